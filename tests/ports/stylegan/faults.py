"""Faulty ports of the small StyleGAN 2."""

from ..bank import Change


def _each(places, names):
    """Return the names of parameters at each of these places."""
    return "|".join(
        f"{place}.{name}" for place in places.split() for name in names.split()
    )


_STYLED = " ".join(
    f"synthesis.{name}" for name in "conv.0 conv.1 conv.2 conv0_up.0 conv0_up.1".split()
)
_RGB = "synthesis.torgb.0 synthesis.torgb.1 synthesis.torgb.2"
_MODULATED = " ".join(f"{place}.conv" for place in f"{_STYLED} {_RGB}".split())
_BLOCKS = "D.blocks.0 D.blocks.1"

FAULTS = [
    Change(
        "tf_official",
        "one of the styles counted twice",
        'variable(ckpt[name + ".modulation.bias"] - 1)',
        'variable(ckpt[name + ".modulation.bias"])',
        parameter=_each(_MODULATED, "mod_bias"),
        at="self.mod_bias + 1",
    ),
    Change(
        "tf_official",
        "kernels before which it upsamples are not turned",
        "        if up:\n            w = torch.flip(w, (0, 1))\n",
        "",
        parameter="synthesis.conv0_up.0.conv.weight|synthesis.conv0_up.1.conv.weight",
        at="w = torch.flip(w, (0, 1)).permute(2, 3, 0, 1)",
    ),
    Change(
        "tf_official",
        "rows of the dense layer in the order of NCHW",
        "w.unflatten(0, (-1, res, res)).permute(1, 2, 0, 3).flatten(0, 2)",
        "w.unflatten(0, (-1, res, res)).flatten(0, 2)",
        parameter="D.dense0.weight",
        at="x = self.dense0(x.flatten(1))",
    ),
    Change(
        "tf_official",
        "biases of the mapping without their multiplier",
        'variable(ckpt[name + ".bias"] * lrmul)',
        'variable(ckpt[name + ".bias"])',
        parameter=_each("mapping.dense.0 mapping.dense.1 mapping.dense.2", "bias"),
    ),
    Change(
        "tf_official",
        "noises of each size exchanged",
        '            self.conv0_up.append(SynthesisLayer(ckpt, up, f"{noise}{i + 1}", up=True))\n'
        '            self.conv.append(SynthesisLayer(ckpt, same, f"{noise}{i + 2}"))\n',
        '            self.conv0_up.append(SynthesisLayer(ckpt, up, f"{noise}{i + 2}", up=True))\n'
        '            self.conv.append(SynthesisLayer(ckpt, same, f"{noise}{i + 1}"))\n',
        parameter=_each(
            "synthesis.conv0_up.0 synthesis.conv0_up.1 synthesis.conv.1 synthesis.conv.2",
            "noise",
        ),
    ),
    Change(
        "tf_official",
        "coefficient by the channels alone",
        "fan_in = w[0].numel()",
        "fan_in = w.shape[1]",
        parameter="|".join(
            (
                _each(_STYLED, "conv.weight"),
                _each(_BLOCKS, "conv0.weight conv1_down.weight"),
                "D.conv.weight",
            )
        ),
    ),
    Change(
        "tf_official",
        "slope of Keras",
        "def leaky_relu(x, alpha=0.2):",
        "def leaky_relu(x, alpha=0.3):",
        at="return torch.maximum(x, alpha * x)",
    ),
    Change(
        "tf_official",
        "norm of the kernel without the style",
        "            ww = self.weight[None] * s[:, None, None, :, None]\n"
        "            d = torch.rsqrt(torch.sum(torch.square(ww), dim=(1, 2, 3)) + 1e-8)\n"
        "            x = x * d[:, None, None, :]\n",
        "            ww = torch.square(self.weight)\n"
        "            d = torch.rsqrt(torch.sum(ww, dim=(0, 1, 2)) + 1e-8)\n"
        "            x = x * d\n",
        reference="demod = torch.rsqrt(weight.pow(2)",
    ),
    Change(
        "tf_official",
        "noise behind the activation",
        "        x = x + self.noise * self.noise_strength\n"
        "        return leaky_relu(x + self.bias)\n",
        "        x = leaky_relu(x + self.bias)\n"
        "        return x + self.noise * self.noise_strength\n",
        reference="return image + self.weight * noise",
    ),
    Change(
        "tf_official",
        "colours in the style of the layer before",
        "dlatents[:, res * 2 - 3])",
        "dlatents[:, res * 2 - 4])",
        at="s = torch.matmul(y, self.mod_weight)",
        reference="skip = to_rgb(out, latent[:, i + 2], skip)",
    ),
    Change(
        "tf_official",
        "colours upsampled with the padding of the other side",
        "up=factor, pad0=(p + 1) // 2 + factor - 1, pad1=p // 2)",
        "up=factor, pad0=(p + 1) // 2, pad1=p // 2 + factor - 1)",
        at="x = F.pad(x, (0, 0, pad0, pad1, pad0, pad1))|y = y + tap * x[",
    ),
    Change(
        "tf_official",
        "groups of neighbours",
        "    y = x.reshape(group_size, n // group_size, h, w, c)\n"
        "    y = y - torch.mean(y, dim=0, keepdim=True)\n"
        "    y = torch.mean(torch.square(y), dim=0)\n",
        "    y = x.reshape(n // group_size, group_size, h, w, c)\n"
        "    y = y - torch.mean(y, dim=1, keepdim=True)\n"
        "    y = torch.mean(torch.square(y), dim=1)\n",
    ),
    Change(
        "tf_official",
        "no gradient through the deviation of the batch",
        "return torch.cat([x, y], dim=3)",
        "return torch.cat([x, y.detach()], dim=3)",
        at="y = y.tile(group_size, h, w, 1)",
        reference="out = torch.cat([out, stddev], 1)",
    ),
    Change(
        "pure_tree",
        "mapping is not transposed",
        '"mapping": {"w": weights.mT * LR_MUL,',
        '"mapping": {"w": weights * LR_MUL,',
        parameter="g.mapping.w",
    ),
    Change(
        "pure_tree",
        "gain of the mapping twice",
        "weights.mT * LR_MUL",
        "weights.mT * (LR_MUL / weights.shape[-1] ** 0.5)",
        parameter="g.mapping.w",
        at="x = leaky(x @ (w * he(w)) + b)",
    ),
    Change(
        "pure_tree",
        "constant lies on its side",
        'w["input.input"][0]',
        'w["input.input"][0].mT',
        parameter="g.synthesis.const",
    ),
    Change(
        "pure_tree",
        "biases of each size exchanged",
        '        layers[f"layer{i + 1}"] = converted_layer(w, f"convs.{i}", up=i % 2 == 0)\n',
        '        layers[f"layer{i + 1}"] = converted_layer(w, f"convs.{i}", up=i % 2 == 0)\n'
        '        layers[f"layer{i + 1}"]["b"] = w[f"convs.{i ^ 1}.activate.bias"]\n',
        parameter=_each(
            " ".join(f"g.synthesis.layer{i}" for i in (1, 2, 3, 4)),
            "b",
        ),
    ),
    Change(
        "pure_tree",
        "colours have the modulation of the convolution before",
        '        layers[f"rgb{i + 1}"] = converted_rgb(w, f"to_rgbs.{i}")\n',
        '        layers[f"rgb{i + 1}"] = converted_rgb(w, f"to_rgbs.{i}")\n'
        '        layers[f"rgb{i + 1}"]["mod"] = layers[f"layer{2 * i + 2}"]["mod"]\n',
        parameter=_each("g.synthesis.rgb1 g.synthesis.rgb2", "mod.w mod.b"),
    ),
    Change(
        "pure_tree",
        "blur does not make up for the zeros between",
        "fir(x.shape[2], pad=(1, 1), gain=2.0)",
        "fir(x.shape[2], pad=(1, 1))",
        at='return torch.einsum("ih,bchw,jw->bcij", matrix, x, matrix)'
        "|taps = gain * taps / taps.sum()",
    ),
    Change(
        "pure_tree",
        "blurred before the convolution",
        "    y = patches(spread(x), 3, pad=2)\n"
        '    x = torch.einsum("bcijk,bkcd->bdij", y, normed(p, style))\n'
        "    x = resample(x, fir(x.shape[2], pad=(1, 1), gain=2.0))\n",
        "    x = resample(x, fir(x.shape[2], up=2, pad=(2, 1), gain=2.0))\n"
        '    x = torch.einsum("bcijk,bkcd->bdij", patches(x, 3, pad=1), normed(p, style))\n',
        reference="out = F.conv_transpose2d(",
    ),
    Change(
        "pure_tree",
        "variance of a sample",
        "groups.var(dim=0, correction=0)",
        "groups.var(dim=0)",
    ),
    Change(
        "pure_tree",
        "skip takes every other pixel without a blur",
        'point(p["skip"], resample(x, fir(size, down=2, pad=(1, 1))))',
        'point(p["skip"], x[..., ::2, ::2])',
        at='return torch.einsum("bcij,cd->bdij", x,',
        reference="x = F.conv2d(x, torch.flip(kernel, [0, 1])",
    ),
    Change(
        "pure_tree",
        "samples take each other's styles",
        "both[which].transpose(0, 1)",
        'both[which].reshape(len(batch["z"]), LAYERS, -1)',
    ),
    Change(
        "pure_tree",
        "blocks are not divided by the root of two",
        "return (x + straight) * 0.5**0.5",
        "return x + straight",
        reference="return (out + skip) / math.sqrt(2)",
    ),
    Change(
        "pure_tree",
        "colours are demodulated",
        'x = torch.einsum("bcij,bkcd->bdij", x, styled(p, style))',
        'x = torch.einsum("bcij,bkcd->bdij", x, normed(p, style))',
        at='return torch.einsum("kcd,bc,bd->bkcd", w, s, d)',
    ),
    Change(
        "pure_tree",
        "norm of the weights carries no gradient to them",
        "squares = (w * w).sum(0)",
        "squares = (w * w).sum(0).detach()",
        at="d = torch.rsqrt(s * s @ squares + 1e-8)",
        reference="demod = torch.rsqrt(weight.pow(2)",
    ),
]
