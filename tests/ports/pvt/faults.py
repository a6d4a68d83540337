"""Faulty ports of the Pyramid Vision Transformer."""

from ..bank import Change

_DENSE = 'y = torch.tensordot(x, params["kernel"], dims=axes)'
_NORM = 'mul = torch.rsqrt(var + epsilon) * params["scale"]'
_BLOCKS = ((0, 0), (1, 0), (1, 1), (2, 0), (2, 1), (3, 0))


def _flax(names, blocks=_BLOCKS):
    """Return the names of parameters in these blocks of the Flax port."""
    return "|".join(
        f"params.stage_{i}.block_{j}.{n}" for i, j in blocks for n in names.split()
    )


def _mindspore(names):
    """Return the names of parameters in each layer of the MindSpore port."""
    return "|".join(
        f"stages.{i}.layers.{j}.{n}" for i, j in _BLOCKS for n in names.split()
    )


FAULTS = [
    Change(
        "flax_style",
        "taps of height and width change places in the kernels",
        'src[name + ".weight"].permute(2, 3, 1, 0)',
        'src[name + ".weight"].permute(3, 2, 1, 0)',
        parameter="|".join(f"params.stage_{i}.embed.conv.kernel" for i in range(4))
        + "|"
        + _flax("mlp.depthwise.kernel")
        + "|"
        + _flax("attention.reduce.conv.kernel", ((0, 0), (2, 0), (2, 1))),
        at='y = torch.einsum("bhwcij,ijco->bhwo"|y = torch.einsum("bhwcij,ijc->bhwc"'
        '|x = conv(params["embed"]["conv"]',
    ),
    Change(
        "flax_style",
        "features of a head come before the heads in the kernels",
        '    kernel = src[name + ".weight"].T.unflatten(1, (*shape, -1))\n',
        "    *first, heads = shape\n"
        '    kernel = src[name + ".weight"].T.unflatten(1, (*first, -1, heads)).mT\n',
        parameter=_flax(
            "attention.query.kernel attention.key_value.kernel", _BLOCKS[1:]
        )
        + "|params.class_attention.attention.query.kernel"
        "|params.class_attention.attention.key_value.kernel",
        at='query = dense(params["query"], inputs_q)'
        '|torch.unbind(dense(params["key_value"], inputs_kv)|' + _DENSE,
    ),
    Change(
        "flax_style",
        "norm of the reduced map is loaded from the norm before the attention",
        '"norm": convert_norm(src, "attn.norm"),',
        '"norm": convert_norm(src, "norm1"),',
        parameter=_flax(
            "attention.reduce.norm.scale attention.reduce.norm.bias", _BLOCKS[:-1]
        ),
        at='layer_norm(params["norm"], x, CONFIG.stem_epsilon)'
        "|return (x - mean) * mul + params|" + _NORM,
    ),
    Change(
        "flax_style",
        "corners of the table are aligned with those of the map",
        "sample = (torch.arange(out_size) + 0.5) * (in_size / out_size) - 0.5",
        "sample = torch.arange(out_size) * ((in_size - 1) / (out_size - 1))",
        at="away = torch.abs(sample|weights = relu(1.0 - away)"
        "|return weights / torch.sum(weights"
        '|return torch.einsum("hwc,hy,wx->yxc"|x = x + resize_bilinear(',
    ),
    Change(
        "flax_style",
        "windows of the pooling end where the next begin",
        "stop = -(-(window + 1) * in_size // out_size)",
        "stop = (window + 1) * in_size // out_size",
        at="inside = ((place >= start)|return inside / torch.sum(inside"
        '|return torch.einsum("bhwc,hy,wx->byxc"|x = adaptive_avg_pool(x, stage.pool)',
    ),
    Change(
        "flax_style",
        "rectifier of the linear stage is missing",
        "    if linear:\n        x = relu(x)\n",
        "",
        at="x = gelu(depthwise_conv(|windows = sliding_windows(x, params"
        '["kernel"].shape[0], 1, "SAME")|y = torch.einsum("bhwcij,ijc->bhwc"',
        reference="x = F.relu(x)",
    ),
    Change(
        "flax_style",
        "activation stands before the depthwise convolution",
        'x = gelu(depthwise_conv(params["depthwise"], x))',
        'x = depthwise_conv(params["depthwise"], gelu(x))',
        at='y = torch.einsum("bhwcij,ijc->bhwc"|return 0.5 * x * torch.special.erfc',
    ),
    Change(
        "flax_style",
        "reduction is padded where sizes do not divide",
        'x = conv(params["conv"], x, stage.reduction, "VALID")',
        'x = conv(params["conv"], x, stage.reduction)',
        at="x = nn.functional.pad(x|return x.unfold(1, window, stride)"
        '|y = torch.einsum("bhwcij,ijco->bhwo"',
    ),
    Change(
        "flax_style",
        "queries are divided by the root of the whole width",
        "query = query / math.sqrt(query.shape[-1])",
        "query = query / math.sqrt(query.shape[-1] * query.shape[-2])",
        at='logits = torch.einsum("bqnd,bknd->bnqk", query, key)',
    ),
    Change(
        "flax_style",
        "residual of the attention is taken behind the norm",
        'x = x + spatial_attention(params["attention"], y, stage)',
        'x = y + spatial_attention(params["attention"], y, stage)',
    ),
    Change(
        "flax_style",
        "token of the class does not look at itself",
        'multi_head_attention(params["attention"], tokens[:, :1], tokens)',
        'multi_head_attention(params["attention"], tokens[:, :1], tokens[:, 1:])',
        at='torch.unbind(dense(params["key_value"], inputs_kv)'
        '|logits = torch.einsum("bqnd,bknd->bnqk", query, key)|' + _DENSE,
        reference="kv = self.kv(u)",
    ),
    Change(
        "flax_style",
        "auxiliary head reads the third stage before its last norm",
        '        x = layer_norm(stage_params["ln_post"], x, CONFIG.norm_epsilon)\n'
        "        features.append(x)\n",
        "        features.append(x)\n"
        '        x = layer_norm(stage_params["ln_post"], x, CONFIG.norm_epsilon)\n',
        at="pooled = torch.mean(features[2]",
    ),
    Change(
        "flax_style",
        "weights of the two losses come to one",
        "return main + CONFIG.aux_weight * aux",
        "return (1.0 - CONFIG.aux_weight) * main + CONFIG.aux_weight * aux",
    ),
    Change(
        "mindspore_style",
        "values stand before keys in the fused kernels",
        "return rows.unflatten(0, (2, heads, -1)).transpose(0, 1).flatten(0, 2)",
        "return rows.unflatten(0, (2, heads, -1)).flip(0).transpose(0, 1).flatten(0, 2)",
        parameter=_mindspore("attention.key_value.weight attention.key_value.bias")
        + "|class_attention.attention.key_value.weight"
        "|class_attention.attention.key_value.bias",
        at="key_value = self.split_heads(self.key_value(memory))"
        "|key, value = torch.split(key_value|y = torch.addmm(self.bias",
    ),
    Change(
        "mindspore_style",
        "kernel behind the heads is not transposed",
        'cell.projection.weight.copy_(src[prefix + "proj.weight"].T)',
        'cell.projection.weight.copy_(src[prefix + "proj.weight"])',
        parameter=_mindspore("attention.projection.weight")
        + "|class_attention.attention.projection.weight",
        at="return self.projection(self.merge_heads(|y = torch.addmm(self.bias",
    ),
    Change(
        "mindspore_style",
        "table of positions is read with width first",
        '        table = src[prefix + "pos_embed"].reshape(*table_size, -1)\n'
        "        cell.position_table.copy_(table.permute(2, 0, 1))\n",
        '        table = src[prefix + "pos_embed"].reshape(*table_size[::-1], -1)\n'
        "        cell.position_table.copy_(table.permute(2, 1, 0))\n",
        parameter="stages.0.position_table",
        at="table = ResizeBilinear((height, width))(|x = x + to_sequence(table[None])"
        "|below = torch.index_select(|above = torch.index_select("
        "|return below + (above - below)",
    ),
    Change(
        "mindspore_style",
        "padding is all below and at the right",
        "before = max(total, 0) // 2",
        "before = 0",
        at="x = F.pad(x, (*self.pads|x = torch.conv2d(x|x = self.projection(x)",
    ),
    Change(
        "mindspore_style",
        "norm behind a stage is over all places, too",
        "        self.layernorm = LayerNorm(dim, epsilon=1e-6)\n",
        "        self.layernorm = LayerNorm(dim, begin_norm_axis=1, epsilon=1e-6)\n",
        at="x = x - torch.mean(x, dim=axes|variance = torch.mean(x * x, dim=axes"
        "|return x / torch.sqrt(variance|return to_map(self.layernorm(x)",
    ),
    Change(
        "mindspore_style",
        "heads are merged without their permutation",
        "return x.permute(0, 2, 1, 3).reshape(batch, places, -1)",
        "return x.reshape(batch, places, -1)",
        at="return self.projection(self.merge_heads(|y = torch.addmm(self.bias",
    ),
    Change(
        "mindspore_style",
        "form of the GELU with a sigmoid",
        "return x * (0.5 + 0.5 * torch.erf(x * math.sqrt(0.5)))",
        "return x * torch.sigmoid(1.702 * x)",
    ),
    Change(
        "mindspore_style",
        "scale of the class attention multiplies the residual, too",
        "token = token + self.gamma1 * self.attention(normed, memory)",
        "token = self.gamma1 * (token + self.attention(normed, memory))",
    ),
    Change(
        "mindspore_style",
        "weights of the neighbours change places where the table is resized",
        "return below + (above - below) * lerp",
        "return above + (below - above) * lerp",
        at="table = ResizeBilinear((height, width))(|x = x + to_sequence(table[None])",
    ),
    Change(
        "mindspore_style",
        "stages learn nothing from the auxiliary head",
        "pooled = torch.mean(features[-2], dim=(2, 3))",
        "pooled = torch.mean(features[-2], dim=(2, 3)).detach()",
        at="return logits, self.auxiliary(pooled)",
        reference="aux = self.aux_head(",
    ),
    Change(
        "mindspore_style",
        "smoothing is shared by the wrong labels only",
        "        self.on_value = 1.0 - smooth_factor + smooth_factor / num_classes\n"
        "        self.off_value = smooth_factor / num_classes\n",
        "        self.on_value = 1.0 - smooth_factor\n"
        "        self.off_value = smooth_factor / (num_classes - 1)\n",
        at="return torch.where(hit, on_value|label = self.onehot("
        "|return -torch.sum(label * ",
    ),
    Change(
        "mindspore_style",
        "means and deviations are those of blue, green, red",
        "torch.unbind(image.float(), dim=1), mean, std)",
        "torch.unbind(image.float(), dim=1), mean[::-1], std[::-1])",
        at="return torch.stack(channels, dim=1)|(channel - m) * (1.0 / s)",
    ),
    Change(
        "mindspore_style",
        "share of each image is that of all the others, too",
        "torch.mean(second + share * (first - second))",
        "torch.mean(second + share[:, None] * (first - second))",
    ),
]
