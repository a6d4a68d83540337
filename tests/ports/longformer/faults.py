"""Faulty ports of the Longformer."""

from ..bank import Change


def _blocks(names):
    """Return the names of parameters in each block of the first port."""
    return "|".join(f"blocks.{i}.{name}" for i in range(3) for name in names.split())


def _layers(names):
    """Return the names of variables in each layer of the second port."""
    return "|".join(f"layer.{i}.{name}" for i in range(3) for name in names.split())


FAULTS = [
    Change(
        "jax_style",
        "kernel of the output is split before it is transposed",
        'w[f"{name}.weight"].T.unflatten(0, (CONFIG.num_heads, -1)).contiguous()',
        'w[f"{name}.weight"].unflatten(0, (CONFIG.num_heads, -1)).contiguous()',
        parameter=_blocks("attention.out.kernel"),
        at="return torch.einsum(self.equation, x, self.kernel)|return self.out(",
    ),
    Change(
        "jax_style",
        "global projections are loaded from the local ones",
        'self.global_kernel = nn.Parameter(fused_kernel(w, name, "_global"))',
        'self.global_kernel = nn.Parameter(fused_kernel(w, name, ""))',
        parameter=_blocks("attention.global_kernel"),
        at="self.global_kernel[0]|self.global_kernel[1]|self.global_kernel[2]",
    ),
    Change(
        "jax_style",
        "heads are the inner axis of what is split",
        "    return kernel.unflatten(-1, (CONFIG.num_heads, -1))\n",
        "    return kernel.unflatten(-1, (-1, CONFIG.num_heads)).mT\n",
        parameter=_blocks(
            "attention.local_kernel attention.local_bias"
            " attention.global_kernel attention.global_bias"
        ),
        at="self.global_kernel[0]|self.global_kernel[1]|self.global_kernel[2]"
        "|self.global_bias[0]|self.global_bias[1]|self.local_bias[0]"
        '|torch.einsum("bld,cdhk->cblhk", x, self.local_kernel)',
    ),
    Change(
        "jax_style",
        "norm behind the second half is loaded from the first",
        'self.output_norm = layer_norm(w, f"{name}.norm2")',
        'self.output_norm = layer_norm(w, f"{name}.norm1")',
        parameter=_blocks("output_norm.scale output_norm.bias"),
        at="mul = torch.rsqrt(var + self.epsilon) * self.scale"
        "|return centred * mul + self.bias|return self.output_norm(y + x)",
    ),
    Change(
        "jax_style",
        "gelu is approximate, as is the default there",
        "def gelu(x, approximate=False):",
        "def gelu(x, approximate=True):",
        at="inner = |return 0.5 * x * (1.0 + torch.tanh(inner))|y = self.wo(gelu(",
    ),
    Change(
        "jax_style",
        "bias of the global query comes after the scale",
        "        query = (query + self.global_bias[0]) * self.scale\n",
        "        query = query * self.scale + self.global_bias[0]\n",
        at='logits = torch.einsum("bhk,blhk->bhl", query, key)',
    ),
    Change(
        "jax_style",
        "scores of the first token are not scaled",
        "logits = torch.cat([logits, to_first[..., None]], -1) * self.scale",
        "logits = torch.cat([logits * self.scale, to_first[..., None]], -1)",
        at="to_first = torch.einsum(|weights = softmax(logits, where=allowed",
    ),
    Change(
        "jax_style",
        "variance in the norms is that of a sample",
        "        var = (centred * centred).mean(-1, keepdim=True)\n",
        "        var = (centred * centred).sum(-1, keepdim=True) / (x.shape[-1] - 1)\n",
        at="mul = torch.rsqrt(var + self.epsilon)|return centred * mul + self.bias",
    ),
    Change(
        "jax_style",
        "second half adds to what stood before the first norm",
        "        x = self.attention_norm(self.attention(x, is_token) + x)\n"
        "        y = self.wo(gelu(self.wi(x)))\n",
        "        x = self.attention(x, is_token) + x\n"
        "        y = self.wo(gelu(self.wi(self.attention_norm(x))))\n",
        at="return self.output_norm(y + x)",
    ),
    Change(
        "jax_style",
        "window ends one place before the last",
        "offsets = torch.arange(2 * one_sided + 1) - one_sided",
        "offsets = torch.arange(2 * one_sided) - one_sided",
        at="table = torch.arange(length)[:, None] + dilation * offsets"
        "|inside = (table >= 0)|key[:, table])|value[:, table])"
        "|allowed = is_token[:, table]|table, inside = window_table(",
    ),
    Change(
        "jax_style",
        "every layer has the dilation of the first",
        'LongformerBlock(w, f"layers.{i}", dilation)',
        'LongformerBlock(w, f"layers.{i}", CONFIG.dilation[0])',
        at="table = torch.arange(length)[:, None] + dilation * offsets"
        "|key[:, table])|value[:, table])|allowed = is_token[:, table]"
        "|table, inside = window_table(",
    ),
    Change(
        "jax_style",
        "loss is divided by all places",
        "return -torch.where(keep, picked, 0.0).sum() / keep.sum()",
        "return -torch.where(keep, picked, 0.0).sum() / keep.numel()",
    ),
    Change(
        "jax_style",
        "what does not decay is named as in PyTorch, and is not found",
        'return name.rpartition(".")[2].endswith(("kernel", "embedding"))',
        'return not name.endswith(("LayerNorm.weight", "LayerNorm.bias"))',
        phase="optimizer",
    ),
    Change(
        "own_band",
        "square kernels are not transposed",
        '        if name.endswith("kernel"):\n',
        "        if array.shape != variable.shape:\n",
        parameter=_layers(
            "attention.query.kernel attention.key.kernel attention.value.kernel"
            " attention.query_global.kernel attention.output_dense.kernel"
        ),
        at="outputs = torch.tensordot(inputs, self.kernel, dims=1)"
        "|query = self.split(self.query(|key = self.split(self.key("
        "|value = self.split(self.value(|query = self.split(self.query_global("
        "|return self.output_dense(torch.flatten(context, 2))",
    ),
    Change(
        "own_band",
        "global values come before the keys in the fused kernel",
        'sources = ("key_global", "value_global")',
        'sources = ("value_global", "key_global")',
        parameter=_layers("attention.kv_global.kernel"),
        at="outputs = torch.tensordot(inputs, self.kernel, dims=1)"
        "|key, value = torch.split(self.kv_global(",
    ),
    Change(
        "own_band",
        "both norms of a layer are exchanged",
        '    "attention_norm": "norm1",\n    "output_norm": "norm2",\n',
        '    "attention_norm": "norm2",\n    "output_norm": "norm1",\n',
        parameter=_layers(
            "attention_norm.gamma attention_norm.beta output_norm.gamma output_norm.beta"
        ),
        at="inv = self.gamma / torch.sqrt(|return inputs * inv + (self.beta"
        "|hidden_states = self.attention_norm(|return self.output_norm(",
    ),
    Change(
        "own_band",
        "bias of the global values is that of the local ones",
        '"value_global_bias": "value_global.bias",',
        '"value_global_bias": "value.bias",',
        parameter=_layers("attention.value_global_bias"),
        at="self.split(value + self.value_global_bias)",
    ),
    Change(
        "own_band",
        "epsilon of Keras in the norms",
        "def __init__(self, units, epsilon=1e-5):",
        "def __init__(self, units, epsilon=1e-3):",
        at="inv = self.gamma / torch.sqrt(|return inputs * inv + (self.beta"
        "|hidden_states = self.attention_norm(|return self.output_norm("
        "|return self.norm(embeddings)",
    ),
    Change(
        "own_band",
        "gelu is the quick one",
        "    cdf = 0.5 * (1.0 + torch.erf(x / 2.0**0.5))\n    return x * cdf\n",
        "    cdf = torch.sigmoid(1.702 * x)\n    return x * cdf\n",
        at="layer_output = gelu(",
    ),
    Change(
        "own_band",
        "phases of the dilated layer are left one behind the other",
        "    x = torch.swapaxes(x, 1, 2)\n"
        "    return torch.reshape(x, (x.shape[0], -1, *x.shape[3:]))\n",
        "    return torch.reshape(x, (x.shape[0], -1, *x.shape[3:]))\n",
        at="context = batch_to_space(",
    ),
    Change(
        "own_band",
        "first token attends to padding",
        "        scores = scores + (1.0 - attention_mask[:, None, None, :]) * MASKED\n",
        "",
        at='return torch.einsum("bhqk,bkhd->bqhd", softmax(scores), value)',
        reference="~mask[:, None, None]",
    ),
    Change(
        "own_band",
        "zeros beside the frames all stand behind",
        "paddings = (0, 0) * (x.ndim - 3) + (ATTENTION_SIDE, ATTENTION_SIDE)",
        "paddings = (0, 0) * (x.ndim - 3) + (0, 2 * ATTENTION_SIDE)",
        at="x = nn.functional.pad(x, paddings)|return torch.stack([x[:, :, start"
        "|key = frames(|value = frames(|local_mask = frames(",
    ),
    Change(
        "own_band",
        "first token stays in the windows and is seen twice",
        "        local_mask[:, 0] = 0.0\n",
        "",
        at="local_mask = frames(|visible = band * local_mask"
        "|scores = scores + (1.0 - visible",
        reference="seen[:, 0] = False",
    ),
    Change(
        "own_band",
        "positions are counted from zero",
        "position_ids = torch.cumsum(mask, dim=1) * mask + PAD_ID",
        "position_ids = (torch.cumsum(mask, dim=1) - 1) * mask",
        at="self.position_embeddings.embeddings[position_ids]",
    ),
    Change(
        "own_band",
        "labels of class zero are not counted",
        "active = (labels != IGNORED).float()",
        "active = (labels > 0).float()",
        at="return torch.sum(crossentropy * active) / torch.sum(active)",
    ),
    Change(
        "own_band",
        "each gradient is clipped by a norm of its own",
        "        global_norm = torch.linalg.vector_norm(\n"
        "            torch.stack([torch.linalg.vector_norm(g) for g in gradients])\n"
        "        )\n"
        "        scale = self.clipnorm / torch.clamp(global_norm, min=self.clipnorm)\n"
        "        return [g * scale for g in gradients]\n",
        "        norms = [torch.linalg.vector_norm(g) for g in gradients]\n"
        "        scales = [self.clipnorm / torch.clamp(n, min=self.clipnorm) for n in norms]\n"
        "        return [g * scale for g, scale in zip(gradients, scales)]\n",
        phase="optimizer",
        steps=2,
    ),
]
