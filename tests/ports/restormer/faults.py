"""Faulty ports of the Restormer."""

from ..bank import Change

_FLAX = ("encoder", "bottleneck", "decoder")
_KERAS = ("encoder", "middle", "decoder")


def _each(blocks, names):
    """Return the names of parameters in each of these blocks."""
    return "|".join(f"{block}.{name}" for block in blocks for name in names.split())


FAULTS = [
    Change(
        "jax_style",
        "outputs of the projection are split by heads before query, key and value",
        '"kernel": qkv.reshape(width, 3, heads, width // heads),',
        '"kernel": qkv.reshape(width, heads, 3, width // heads).transpose(1, 2),',
        parameter=_each(_FLAX, "attn.qkv.kernel"),
        at='qkv = torch.einsum("byxc,cshd->byxshd"',
    ),
    Change(
        "jax_style",
        "both norms of a block are converted from the first",
        '"norm_mlp": convert_norm(sd, prefix + ".norm2")',
        '"norm_mlp": convert_norm(sd, prefix + ".norm1")',
        parameter=_each(_FLAX, "norm_mlp.scale")
        + "|"
        + _each(("encoder", "bottleneck"), "norm_mlp.shift"),
        at='layer_norm(p["norm_mlp"], x)|mul = torch.rsqrt(|return x * mul|* mul + p["shift"]',
    ),
    Change(
        "jax_style",
        "depthwise kernels have columns before rows",
        "return weight[:, 0].permute(1, 2, 0)",
        "return weight[:, 0].permute(2, 1, 0)",
        parameter=_each(
            _FLAX, "attn.mix.kernel mlp.gate_mix.kernel mlp.value_mix.kernel"
        ),
        at='torch.einsum("byxcij,ijc->byxc"',
    ),
    Change(
        "jax_style",
        "output of the attention is converted without a transposition",
        '            "kernel": to_io(sd[prefix + ".project_out.weight"]).reshape(\n'
        "                heads,",
        '            "kernel": sd[prefix + ".project_out.weight"].reshape(\n'
        "                heads,",
        parameter=_each(_FLAX, "attn.out.kernel"),
        at='y = torch.einsum("bnhd,hdc->bnc"',
    ),
    Change(
        "jax_style",
        "queries and keys are normalised along features, not along pixels",
        "q, k = unit(q, axis=1), unit(k, axis=1)",
        "q, k = unit(q, axis=-1), unit(k, axis=-1)",
        at="norm = torch.sqrt(torch.sum(x * x|return x / torch.clamp(norm",
    ),
    Change(
        "jax_style",
        "gelu by the hyperbolic tangent, as is the default there",
        "return 0.5 * x * (1.0 + torch.erf(x / math.sqrt(2.0)))",
        "cubic = math.sqrt(2.0 / math.pi) * (x + 0.044715 * x**3)\n"
        "    return 0.5 * x * (1.0 + torch.tanh(cubic))",
        at="gelu(gate) * value",
    ),
    Change(
        "jax_style",
        "norm without a shift takes the mean away, too",
        "    return x * mul\n",
        "    return (x - mean) * mul\n",
    ),
    Change(
        "jax_style",
        "values are summed over the queries' side of the attention",
        'torch.einsum("bhde,bnhe->bnhd", weights, v)',
        'torch.einsum("bhde,bnhd->bnhe", weights, v)',
    ),
    Change(
        "jax_style",
        "mirror at the border doubles the last pixel",
        "index, 2 * (size - 1) - index)",
        "index, 2 * size - 1 - index)",
        at="image = noisy[:, mirror_index(height)]",
    ),
    Change(
        "jax_style",
        "rows that are kept are the odd ones",
        "rows = (torch.arange(height) + 1) % 2",
        "rows = torch.arange(height) % 2",
        at="return (rows[:, None] * cols)|kept = blur(x) * lattice(",
    ),
    Change(
        "jax_style",
        "sum of the pixel loss is divided by pixels, not by their channels",
        "count = torch.sum(mask) * clean.shape[-1]",
        "count = torch.sum(mask)",
        at="pixel = torch.sum(charbonnier(error) * mask) / count",
    ),
    Change(
        "jax_style",
        "no gradient goes through the variance of the norms",
        "mul = torch.rsqrt(var + eps)",
        "mul = torch.rsqrt(var.detach() + eps)",
        at="var = torch.mean(torch.square(x)",
        reference="sigma = x.var(-1",
    ),
    Change(
        "jax_style",
        "all but the scales of the norms decay",
        'return path.endswith("kernel")',
        'return not path.endswith("scale")',
        phase="optimizer",
    ),
    Change(
        "keras_style",
        "keys come before queries where the projection is split",
        'PARTS = ("query", "key", "value")',
        'PARTS = ("key", "query", "value")',
        parameter=_each(
            [
                f"{block}.attention.{part}"
                for block in _KERAS
                for part in ("query", "key")
            ],
            "kernel bias",
        )
        + "|"
        + _each(
            [
                f"{block}.attention.{part}_depthwise"
                for block in _KERAS
                for part in ("query", "key")
            ],
            "depthwise_kernel bias",
        ),
        at="torch.tensordot(x, self.kernel|self.depthwise_kernel.permute("
        "|groups=self.channels)|return y.permute(0, 2, 3, 1) + self.bias"
        "|q = self.heads_first(|k = self.heads_first(",
    ),
    Change(
        "keras_style",
        "filters in front of depth_to_space keep the order of the pixel shuffle",
        '            if name == "upsample":\n'
        "                kernel = block_to_depth(kernel)\n",
        "",
        parameter="upsample.kernel",
        at="nchw, oihw = |y = nn.functional.conv2d(nchw, oihw"
        "|x = depth_to_space(self.upsample(x))",
    ),
    Change(
        "keras_style",
        "biases outside of the blocks stay at zero",
        'assign(stage, kernel, arrays.get(prefix + ".bias"))',
        "assign(stage, kernel)",
        parameter="reduction.bias|to_rgb.bias",
        at="torch.tensordot(x, self.kernel|y = y + self.bias|x = self.reduction("
        "|residual = self.to_rgb(",
    ),
    Change(
        "keras_style",
        "softmax over the queries",
        "softmax(similarity, axis=-1)",
        "softmax(similarity, axis=-2)",
        at="e = torch.exp(x - x.amax(|return e / e.sum(",
    ),
    Change(
        "keras_style",
        "the other half of the channels goes through gelu",
        "gelu(gate) * content",
        "gate * gelu(content)",
        at="return x * torch.special.ndtr(x)",
    ),
    Change(
        "keras_style",
        "channels go to the heads by turns",
        "        x = x.reshape(n, h * w, self.num_heads, c // self.num_heads)\n"
        "        return x.permute(0, 2, 3, 1)\n",
        "        x = x.reshape(n, h * w, c // self.num_heads, self.num_heads)\n"
        "        return x.permute(0, 3, 2, 1)\n",
    ),
    Change(
        "keras_style",
        "similarity is divided by the temperature",
        "similarity = self.alpha.view(1, -1, 1, 1) * similarity",
        "similarity = similarity / self.alpha.view(1, -1, 1, 1)",
    ),
    Change(
        "keras_style",
        "epsilon of Keras in the norms",
        '"epsilon": 1e-5,',
        '"epsilon": 1e-3,',
        at='stddev = torch.sqrt(variance + CONFIG["epsilon"])'
        "|return centred / stddev|return x / stddev",
    ),
    Change(
        "keras_style",
        "order behind space_to_depth is the inverse one",
        "order = torch.arange(2 * filters).reshape(4, -1).T.flatten()",
        "order = torch.arange(2 * filters).reshape(-1, 4).T.flatten()",
        parameter="depth_order",
        at="x = self.middle(x.index_select(",
    ),
    Change(
        "keras_style",
        "mask has one row and one column more",
        "(torch.arange(maximum) < lengths.unsqueeze(1))",
        "(torch.arange(maximum) <= lengths.unsqueeze(1))",
        at="sample_weight = (rows[:, :, None]",
    ),
    Change(
        "keras_style",
        "kernel of the pyramid is the binomial one",
        "taps = torch.tensor([1.0, 5.0, 8.0, 5.0, 1.0]) / 20.0",
        "taps = torch.tensor([1.0, 4.0, 6.0, 4.0, 1.0]) / 16.0",
        at="self.kernel = torch.outer(taps, taps)|nn.functional.conv2d(x, self.kernel",
    ),
    Change(
        "keras_style",
        "edges are compared outside of the pictures, too",
        "edges = edge_loss(y_true * sample_weight, y_pred * sample_weight)",
        "edges = edge_loss(y_true, y_pred)",
        reference="laplacian(output * mask)",
    ),
    Change(
        "keras_style",
        "each gradient is clipped by its own norm",
        "        norm = torch.stack([g.square().sum() for g in gradients.values()]).sum().sqrt()\n"
        "        ratio = self.global_clipnorm / torch.clamp(norm, min=self.global_clipnorm)\n"
        "        return {name: g * ratio for name, g in gradients.items()}\n",
        "        limit, clipped = self.global_clipnorm, {}\n"
        "        for name, g in gradients.items():\n"
        "            norm = g.square().sum().sqrt()\n"
        "            clipped[name] = g * (limit / torch.clamp(norm, min=limit))\n"
        "        return clipped\n",
        phase="optimizer",
        steps=3,
    ),
]
