"""Faulty ports of MobileViT."""

from ..bank import Change

_BLOCKS = (3, 5)
_RESIDUALS = (0, 1, 2, 4)


def _attention(names):
    """Return names of variables in each transformer layer of the Keras port."""
    return "|".join(
        f"encoder.{i}.transformer.{j}.{n}"
        for i in _BLOCKS
        for j in range(2)
        for n in names.split()
    )


def _layers(names, which=(0, 1)):
    """Return names of parameters in transformer layers of the Paddle port."""
    return "|".join(
        f"mvit_{i}.transformer.{j}.{n}"
        for i in (1, 2)
        for j in which
        for n in names.split()
    )


FAULTS = [
    Change(
        "tf_style",
        "depthwise kernels have columns before rows",
        "return torch.permute(array, (2, 3, 0, 1))",
        "return torch.permute(array, (3, 2, 0, 1))",
        parameter="|".join(
            f"encoder.{i}.depthwise.depthwise_kernel" for i in _RESIDUALS
        ),
        at='return torch.einsum("bhwcij,ijcm->bhwc", windows'
        "|features = self.depthwise_bn(self.depthwise(",
    ),
    Change(
        "tf_style",
        "output of the attention is not transposed before its heads are split",
        "    if array.ndim == 2:\n        array = array.T\n",
        '    if array.ndim == 2 and "output_dense" not in name:\n'
        "        array = array.T\n",
        parameter=_attention("attention.output_dense.kernel"),
        at="return torch.einsum(self.equation, inputs, self.kernel)"
        "|return self.output_dense(context)",
    ),
    Change(
        "tf_style",
        "keys read the weights of the queries",
        '(r"\\.attention\\.key_dense\\.", ".attn.k."),',
        '(r"\\.attention\\.key_dense\\.", ".attn.q."),',
        parameter=_attention("attention.key_dense.kernel attention.key_dense.bias"),
        at="return torch.einsum(self.equation, inputs, self.kernel)"
        "|key = self.key_dense(hidden_states)",
    ),
    Change(
        "tf_style",
        "norm behind the attention reads that before it",
        '(r"\\.layernorm_after\\.", ".norm2."),',
        '(r"\\.layernorm_after\\.", ".norm1."),',
        parameter=_attention("layernorm_after.gamma layernorm_after.beta"),
        at="return normalized * self.gamma + self.beta"
        "|normalized = self.layernorm_after(hidden_states)",
    ),
    Change(
        "tf_style",
        "SAME in the depthwise convolutions, also where they stride",
        "        features = zero_padding_2d(features, (1, 1))\n",
        "        first = 2 - self.depthwise.strides\n"
        "        features = nn.functional.pad(features, (0, 0, first, 1, first, 1))\n",
        at='return torch.einsum("bhwcij,ijcm->bhwc", windows'
        "|features = self.depthwise_bn(self.depthwise(",
    ),
    Change(
        "tf_style",
        "ReLU6 behind the depthwise convolution",
        "        features = swish(features)\n        features = self.reduce_bn(",
        "        features = torch.clamp(features, 0.0, 6.0)\n"
        "        features = self.reduce_bn(",
    ),
    Change(
        "tf_style",
        "columns and rows of a patch change places where it is folded",
        "features = torch.permute(grid, (0, 3, 1, 4, 2, 5))",
        "features = torch.permute(grid, (0, 3, 2, 4, 1, 5))",
        at="features = torch.reshape(features, shape)",
    ),
    Change(
        "tf_style",
        "features stand before the residual in the fusion",
        "torch.cat((residual, features), dim=-1)",
        "torch.cat((features, residual), dim=-1)",
    ),
    Change(
        "tf_style",
        "shortcut of the second half begins behind the norm",
        "return self.dense_output(layer_output) + hidden_states",
        "return self.dense_output(layer_output) + normalized",
    ),
    Change(
        "tf_style",
        "epsilon of Keras in the norms of batches",
        '"batch_norm_eps": 1e-5,',
        '"batch_norm_eps": 1e-3,',
        at='self.epsilon = config["batch_norm_eps"]'
        "|inv = torch.rsqrt(variance + self.epsilon)"
        "|return (inputs - mean) * inv + self.beta"
        "|swish(self.normalization(|self.expand_bn(|self.depthwise_bn(|self.reduce_bn(",
    ),
    Change(
        "tf_style",
        "centres of pixels are not at halves where maps are resized",
        "    source = (torch.arange(new, dtype=torch.float32) + 0.5) * (old / new) - 0.5\n",
        "    source = torch.arange(new, dtype=torch.float32) * (old / new)\n",
        at="return first * (1.0 - share) + second * share"
        "|return resize_axis(resize_axis("
        "|features = resize(features, height, width)"
        '|features = resize(features, *info["orig_size"])',
    ),
    Change(
        "tf_style",
        "divided by the size of the batch",
        "return torch.sum(unreduced * sample_weight) / torch.sum(sample_weight)",
        "return torch.mean(unreduced * sample_weight)",
    ),
    Change(
        "tf_style",
        "the rate goes into the accumulators",
        "            accum.mul_(self.momentum).add_(grad)\n"
        "            var.sub_(lr * (grad + self.momentum * accum))\n",
        "            accum.mul_(self.momentum).sub_(lr * grad)\n"
        "            var.add_(self.momentum * accum - lr * grad)\n",
        phase="optimizer",
        steps=2,
    ),
    Change(
        "paddle_style",
        "values stand before keys in the joint projection",
        '        weights = [self.src[f"{src}.{one}.weight"].t() for one in "qkv"]\n'
        '        biases = [self.src[f"{src}.{one}.bias"] for one in "qkv"]\n',
        '        weights = [self.src[f"{src}.{one}.weight"].t() for one in "qvk"]\n'
        '        biases = [self.src[f"{src}.{one}.bias"] for one in "qvk"]\n',
        parameter=_layers("attn.qkv.weight attn.qkv.bias"),
        at="return torch.matmul(x, self.weight) + self.bias"
        "|qkv = self.qkv(x).reshape(|q, k, v = qkv.permute(",
    ),
    Change(
        "paddle_style",
        "square weights of linear layers stay as they are",
        '        self.dst[f"{name}.weight"] = self.src[f"{src}.weight"].t()\n',
        '        weight = self.src[f"{src}.weight"]\n'
        "        square = weight.shape[0] == weight.shape[1]\n"
        '        self.dst[f"{name}.weight"] = weight if square else weight.t()\n',
        parameter=_layers("attn.proj.weight"),
        at="return torch.matmul(x, self.weight) + self.bias|return self.proj(out)",
    ),
    Change(
        "paddle_style",
        "both layers of a transformer read the weights of the first",
        'self.layer(f"{name}.transformer.{i}", f"{src}.layers.{i}")',
        'self.layer(f"{name}.transformer.{i}", f"{src}.layers.0")',
        parameter=_layers(
            "attn_norm.weight attn_norm.bias attn.qkv.weight attn.qkv.bias"
            " attn.proj.weight attn.proj.bias ffn_norm.weight ffn_norm.bias"
            " ffn.linear1.weight ffn.linear1.bias ffn.linear2.weight ffn.linear2.bias",
            which=(1,),
        ),
    ),
    Change(
        "paddle_style",
        "norms of the expansion and of the depthwise convolution are swapped",
        '        self.conv(f"{name}.dw", f"{src}.conv_3x3")\n',
        '        self.conv(f"{name}.dw", f"{src}.conv_3x3")\n'
        '        self.norm(f"{name}.pw.bn", f"{src}.conv_3x3.norm")\n'
        '        self.norm(f"{name}.dw.bn", f"{src}.exp_1x1.norm")\n',
        parameter="|".join(
            f"mv2_{i}.{conv}.bn.{kind}"
            for i in range(1, 5)
            for conv in ("pw", "dw")
            for kind in ("weight", "bias")
        ),
        at="scale = self.weight / torch.sqrt(var|shift = self.bias - mean * scale"
        "|return x * scale.view(|x = self.bn(x)",
    ),
    Change(
        "paddle_style",
        "softmax goes over the queries",
        "attn = F.softmax(attn, dim=-1)",
        "attn = F.softmax(attn, dim=-2)",
    ),
    Change(
        "paddle_style",
        "heads are not moved back before they are joined",
        "out = out.transpose(2, 3).reshape(b, p, n, d)",
        "out = out.reshape(b, p, n, d)",
        reference="self.proj(y.transpose(1, 2)",
    ),
    Change(
        "paddle_style",
        "the linear bottleneck has an activation",
        "self.pwl = ConvBnAct(hidden_dim, oup, 1)",
        "self.pwl = ConvBnAct(hidden_dim, oup, 1, act=Swish())",
        at="return x if self.act is None else self.act(x)"
        "|return SwishFunction.apply(x)|return x / (1.0 + torch.exp(-x))"
        "|y = self.pwl(self.dw(self.pw(x)))",
    ),
    Change(
        "paddle_style",
        "attention goes over the pixels of a patch",
        "x = self.norm(self.transformer(x))",
        "x = self.norm(self.transformer(x.transpose(1, 2)).transpose(1, 2))",
    ),
    Change(
        "paddle_style",
        "scale of the whole width, not of a head",
        "self.scale = self.dim_head**-0.5",
        "self.scale = dim**-0.5",
        at="attn = torch.matmul(q * self.scale",
    ),
    Change(
        "paddle_style",
        "mean and deviation of ImageNet, as for the other nets",
        '"mean": [0.0, 0.0, 0.0], "std": [1.0, 1.0, 1.0]}',
        '"mean": [0.485, 0.456, 0.406], "std": [0.229, 0.224, 0.225]}',
        at='return (img.float() * NORMALIZE["scale"] - mean) / std'
        '|mean, std = torch.tensor(NORMALIZE["mean"])'
        '|return net(to_chw(normalize_image(batch["image"])))',
    ),
    Change(
        "paddle_style",
        "smoothing is shared by the other classes only",
        "return (1.0 - epsilon) * one_hot + epsilon / one_hot.shape[-1]",
        "other = epsilon / (one_hot.shape[-1] - 1)\n"
        "    return (1.0 - epsilon) * one_hot + other * (1.0 - one_hot)",
        at="target = label_smooth(|return torch.sum(-target * log_probs, dim=-1).mean()",
    ),
    Change(
        "paddle_style",
        "gradient of the swish leaves out its input",
        "return dy * (sig + x * sig * (1.0 - sig))",
        "return dy * (sig + sig * (1.0 - sig))",
        at="return SwishFunction.apply(x)|return x / (1.0 + torch.exp(-x))"
        "|return x if self.act is None else self.act(x)|self.linear2(self.act(",
    ),
    Change(
        "paddle_style",
        "norms and biases decay too",
        "        if len(param.shape) == 1:\n            return param.grad\n",
        "",
        phase="optimizer",
    ),
]
