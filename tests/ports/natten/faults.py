"""Faulty ports of the neighbourhood attention network."""

from ..bank import Change


def _unfold(names):
    """Return names of parameters in each layer of the unfold port."""
    layers = [f"{part}.{i}" for part in ("fine", "coarse") for i in range(2)]
    return "|".join(f"{layer}.{name}" for layer in layers for name in names.split())


def _gather(names):
    """Return names of parameters in each layer of the gather port."""
    return "|".join(f"layers.{i}.{name}" for i in range(4) for name in names.split())


FAULTS = [
    Change(
        "unfold_port",
        "channels of qkv stay with all queries first",
        "        by_head = value.view(3, n_head, -1, value.shape[1]).transpose(0, 1)\n"
        "        return by_head.reshape(value.shape)\n",
        "        return value\n",
        parameter=_unfold("att.qkv.weight"),
        at="q, k, v = self.qkv(x)",
    ),
    Change(
        "unfold_port",
        "bias table is that of query minus key",
        "return value.permute(1, 2, 0)",
        "return value.flip(1, 2).permute(1, 2, 0)",
        parameter=_unfold("att.table"),
        at="logits = logits + bias_windows(|windows = table.unfold(0, k, 1)",
    ),
    Change(
        "unfold_port",
        "scales of the two halves are swapped",
        '    (r"\\.gamma1$", ".scale_a"),\n    (r"\\.gamma2$", ".scale_f"),\n',
        '    (r"\\.gamma1$", ".scale_f"),\n    (r"\\.gamma2$", ".scale_a"),\n',
        parameter=_unfold("scale_a scale_f"),
        at="x = x + self.att(|return x + self.back(hidden)",
    ),
    Change(
        "unfold_port",
        "bias of the values is that of the queries",
        "value = checkpoint[key]",
        'value = checkpoint[key.replace("v_bias", "q_bias")]',
        parameter=_unfold("att.value_bias"),
        at="q, v = q + self.query_bias, v + self.value_bias",
    ),
    Change(
        "unfold_port",
        "windows over the border are zeros",
        'F.pad(patches, (r, r, r, r), mode="replicate")',
        "F.pad(patches, (r, r, r, r))",
        at="k_win = unfold_windows(|v_win = unfold_windows(",
    ),
    Change(
        "unfold_port",
        "zeros only below and at the right where the map shrinks",
        "x = F.pad(x, (1, 1, 1, 1))",
        "x = F.pad(x, (0, 1, 0, 1))",
        at="return self.ln(self.conv(x))",
    ),
    Change(
        "unfold_port",
        "norm takes all pixels of an image together",
        "        centred = x - x.mean(1, keepdim=True)\n"
        "        power = centred.pow(2).mean(1, keepdim=True)\n",
        "        centred = x - x.mean((1, 2, 3), keepdim=True)\n"
        "        power = centred.pow(2).mean((1, 2, 3), keepdim=True)\n",
        at="return centred / torch.sqrt(power + self.eps)",
    ),
    Change(
        "unfold_port",
        "pooled before the last norm",
        "        x = self.ln(self.coarse(self.shrink(x)))\n"
        "        return self.classify(x.mean((2, 3)))\n",
        "        x = self.coarse(self.shrink(x)).mean((2, 3), keepdim=True)\n"
        "        return self.classify(self.ln(x).flatten(1))\n",
    ),
    Change(
        "unfold_port",
        "windows of the values are read with their features last",
        "        v_win = v_win.view(b, n, d, self.k**2, h, w)\n",
        "        v_win = v_win.view(b, n, self.k**2, d, h, w).transpose(2, 3)\n",
        at="return (weights.unsqueeze(2) * v_win).sum(3)",
    ),
    Change(
        "unfold_port",
        "windows of the bias table go from the first offsets to the last",
        "windows = table.unfold(0, k, 1).unfold(1, k, 1).flip(0, 1)",
        "windows = table.unfold(0, k, 1).unfold(1, k, 1)",
        at="windows = repeat_middle(|return windows.flatten(3)"
        "|logits = logits + bias_windows(",
    ),
    Change(
        "unfold_port",
        "mean is that of blue, green, red",
        "RGB_MEAN = [123.7, 116.3, 103.5]",
        "RGB_MEAN = [103.5, 116.3, 123.7]",
        at="return net((img - mean) / std)|mean = torch.tensor(RGB_MEAN)",
    ),
    Change(
        "unfold_port",
        "smoothing adds up the classes instead of averaging them",
        "uniform = -logp.mean(1).mean()",
        "uniform = -logp.sum(1).mean()",
        at="return (1 - smooth) * hard + smooth * uniform",
    ),
    Change(
        "unfold_port",
        "all that has more than one axis decays, norms too",
        '    kernels = [p for name, p in net.named_parameters() if name.endswith(".weight")]\n'
        "    others = [p for name, p in net.named_parameters() if not "
        'name.endswith(".weight")]\n',
        "    kernels = [p for p in net.parameters() if p.ndim > 1]\n"
        "    others = [p for p in net.parameters() if p.ndim <= 1]\n",
        phase="optimizer",
    ),
    Change(
        "gather_port",
        "kernels have columns before rows",
        'self.weights[name + ".weight"].permute(2, 3, 1, 0)',
        'self.weights[name + ".weight"].permute(3, 2, 1, 0)',
        parameter="conv_1.kernel|conv_2.kernel|merge.kernel",
        at='y = torch.einsum("bhwijc,ijco->bhwo"',
    ),
    Change(
        "gather_port",
        "keys and values are swapped",
        "wq, wk, wv = self.weights",
        "wq, wv, wk = self.weights",
        parameter=_gather("attention.wk attention.wv"),
        at='k = torch.einsum("btf,fnd->btnd"|v = torch.einsum("btf,fnd->btnd"',
    ),
    Change(
        "gather_port",
        "norm of the second half is loaded from the first",
        'self.norm(layer.mlp_norm, name + ".norm2")',
        'self.norm(layer.mlp_norm, name + ".norm1")',
        parameter=_gather("mlp_norm.scale mlp_norm.offset"),
        at="y = self.down(gelu(self.up(self.mlp_norm(x))))",
    ),
    Change(
        "gather_port",
        "output projection is not transposed",
        'self.weights[name + ".proj.weight"].t().unflatten(0, heads)',
        'self.weights[name + ".proj.weight"].unflatten(0, heads)',
        parameter=_gather("attention.wo"),
        at='return torch.einsum("btnd,ndf->btf", context, self.wo)',
    ),
    Change(
        "gather_port",
        "variance is divided by one less",
        "torch.var_mean(x, dim=-1, correction=0, keepdim=True)",
        "torch.var_mean(x, dim=-1, keepdim=True)",
        at="return (x - mean) * torch.rsqrt(var + LN_EPS)",
    ),
    Change(
        "gather_port",
        "gelu is the quick one",
        "return x * (0.5 + 0.5 * torch.erf(x / math.sqrt(2.0)))",
        "return x * torch.sigmoid(1.702 * x)",
        at="y = self.down(gelu(",
    ),
    Change(
        "gather_port",
        "position is added before the scores are scaled",
        "        scores = scores / math.sqrt(self.depth)\n"
        "        position = self.bias_table[self.entries]\n"
        "        scores = scores + position.transpose(1, 2)\n",
        "        position = self.bias_table[self.entries]\n"
        "        scores = scores + position.transpose(1, 2)\n"
        "        scores = scores / math.sqrt(self.depth)\n",
        at="scores = scores + position|scores = scores / math.sqrt(",
    ),
    Change(
        "gather_port",
        "gain of the second half is for the shortcut, too",
        "        return torch.addcmul(x, y, self.mlp_gain)\n",
        "        return (x + y) * self.mlp_gain\n",
    ),
    Change(
        "gather_port",
        "windows at the upper border are shifted one too far",
        "return min(max(start, 0), members - window)",
        "return min(max(start, 0), max(members - window - 1, 0))",
        parameter=_gather("attention.keys attention.entries"),
        at="k_near = k[:, self.keys]|v_near = v[:, self.keys]"
        "|position = self.bias_table[self.entries]",
    ),
    Change(
        "gather_port",
        "offsets count from the middle of the window, not from the query",
        "line.append((key, n - i // dilation + window - 1))",
        "line.append((key, n - start + window // 2))",
        parameter=_gather("attention.entries"),
        at="position = self.bias_table[self.entries]",
    ),
    Change(
        "gather_port",
        "no layer is dilated",
        "dilation=1 + number % 2",
        "dilation=1",
        parameter="|".join(
            f"layers.{i}.attention.{name}"
            for i in (1, 3)
            for name in ("keys", "entries")
        ),
        at="k_near = k[:, self.keys]|v_near = v[:, self.keys]"
        "|position = self.bias_table[self.entries]",
    ),
    Change(
        "gather_port",
        "smoothing is for the wrong classes only",
        "    off_value = SMOOTHING / classes\n"
        "    on_value = 1.0 - SMOOTHING + off_value\n",
        "    off_value = SMOOTHING / (classes - 1)\n    on_value = 1.0 - SMOOTHING\n",
        at="target = torch.full_like(|target = target.scatter("
        "|return -torch.mean(torch.sum(target",
    ),
    Change(
        "gather_port",
        "count of the steps stays at one",
        "        self.count += 1\n",
        "        self.count = 1\n",
        phase="optimizer",
        steps=2,
    ),
]
