"""Faulty ports of the ViTDet."""

from ..bank import Change


def _layers(prefix, names):
    """Return the names of variables in each layer of a backbone."""
    return "|".join(f"{prefix}{i}.{name}" for i in range(3) for name in names.split())


FAULTS = [
    Change(
        "tf_style",
        "keys and values change places in the checkpoint",
        "query, key, value = torch.chunk(self.state[",
        "query, value, key = torch.chunk(self.state[",
        parameter=_layers(
            "backbone.layer_",
            "self_attention.key.kernel self_attention.value.kernel",
        ),
    ),
    Change(
        "tf_style",
        "projection behind the heads is not transposed",
        'kernel = self.state[source + ".proj.weight"].T\n',
        'kernel = self.state[source + ".proj.weight"]\n',
        parameter=_layers("backbone.layer_", "self_attention.attention_output.kernel"),
    ),
    Change(
        "tf_style",
        "distances of the last convolution stay in the order of torch",
        "            self.variables[key] = self.variables[key][..., [1, 0, 3, 2]]\n",
        "            self.variables[key] = self.variables[key][..., [0, 1, 2, 3]]\n",
        parameter="box_net.predict.kernel|box_net.predict.bias",
    ),
    Change(
        "tf_style",
        "kernels of the upsampling are mirrored in their two sides",
        '        self.conv("decoder.upsample", "fpn.stages.0.0", use_bias=True)\n',
        '        self.conv("decoder.upsample", "fpn.stages.0.0", use_bias=True)\n'
        '        kernel = self.variables["decoder.upsample.kernel"]\n'
        '        self.variables["decoder.upsample.kernel"] = kernel.transpose(0, 1)\n',
        parameter="decoder.upsample.kernel",
        at='outputs = torch.einsum("bhwi,yxoi->bhywxo"',
    ),
    Change(
        "tf_style",
        "windows are put back without their rows and columns in turn",
        "        x = torch.reshape(x, (-1, rows, columns, size, size, dim))\n"
        "        x = torch.permute(x, (0, 1, 3, 2, 4, 5))\n",
        "        x = torch.reshape(x, (-1, rows, columns, size, size, dim))\n",
        at="x = torch.reshape(x, (-1, rows * size, columns * size, dim))"
        "|return x[:, :height, :width, :]",
        reference="x = x.transpose(2, 3).reshape(-1, hp, wp",
    ),
    Change(
        "tf_style",
        "zeros stand on both sides of the map, and are cut off behind it",
        "x = nn.functional.pad(x, (0, 0, 0, right, 0, bottom))\n"
        "        x = torch.reshape(x, (-1, rows, size, columns, size, dim))",
        "x = nn.functional.pad(\n"
        "            x,\n"
        "            (0, 0, right // 2, right - right // 2, bottom // 2, bottom - bottom // 2),\n"
        "        )\n"
        "        x = torch.reshape(x, (-1, rows, size, columns, size, dim))",
    ),
    Change(
        "tf_style",
        "positions are asked with the scaled queries",
        'rows = torch.einsum("bijnd,ikd->bnijk", query, self.height_bias(height))\n'
        '        columns = torch.einsum("bijnd,jld->bnijl", query, self.width_bias(width))',
        'rows = torch.einsum("bijnd,ikd->bnijk", scaled, self.height_bias(height))\n'
        '        columns = torch.einsum("bijnd,jld->bnijl", scaled, self.width_bias(width))',
    ),
    Change(
        "tf_style",
        "epsilon of Keras in the norms",
        "def __init__(self, units, epsilon=1e-6):",
        "def __init__(self, units, epsilon=1e-3):",
        at="inv = torch.rsqrt(variance + self.epsilon) * self.gamma",
    ),
    Change(
        "tf_style",
        "every second pixel in place of the largest",
        '"4": self.level_4(max_pool2d(x, pool_size=2, strides=2)),',
        '"4": self.level_4(max_pool2d(x, pool_size=1, strides=2)[:, :-1, :-1]),',
        at="x = nn.functional.max_pool2d(x, pool_size, strides)",
    ),
    Change(
        "tf_style",
        "slope of the cubic kernel is that of TensorFlow",
        "def keys_cubic(distance, a=-0.75):",
        "def keys_cubic(distance, a=-0.5):",
        at="near = ((a + 2.0) * d - (a + 3.0)) * d * d + 1.0"
        "|far = ((a * d - 5.0 * a) * d + 8.0 * a) * d - 4.0 * a"
        "|weight = keys_cubic(source - place)"
        "|matrix = matrix + nn.functional.one_hot("
        "|return torch.where(d <= 1.0, near"
        '|table = torch.einsum("hp,pqd->hqd"',
    ),
    Change(
        "tf_style",
        "distances in the tables run from the query to the key",
        "relative = query - key + (size - 1)",
        "relative = key - query + (size - 1)",
        at="gathered = torch.index_select(table, 0, torch.flatten(relative))",
    ),
    Change(
        "tf_style",
        "alpha weighs the negatives",
        "    positive = alpha * ",
        "    positive = (1.0 - alpha) * ",
    ),
    Change(
        "tf_style",
        "tables of relative positions decay",
        '"beta$", "embeddings$", "embedding$"',
        '"beta$", "embedding$"',
        phase="optimizer",
    ),
    Change(
        "mmdet_style",
        "projection of patches is not turned to BGR",
        "                v = v[:, [2, 1, 0]]\n",
        "                v = v[:, [0, 1, 2]]\n",
        parameter="backbone.patch_embed.projection.weight",
        at="x = self.projection(x)",
    ),
    Change(
        "mmdet_style",
        "rows of queries, keys and values are taken by head",
        "w_q, w_k, w_v = v.reshape(3, -1, v.shape[1]).unbind(0)\n",
        "v = v.reshape(3, 3, -1, v.shape[1]).transpose(0, 1)\n"
        "            w_q, w_k, w_v = v.flatten(1, 2).unbind(0)\n",
        parameter=_layers(
            "backbone.layers.",
            "attn.q_proj.weight attn.k_proj.weight attn.v_proj.weight",
        ),
    ),
    Change(
        "mmdet_style",
        "tables of rows and of columns change places",
        '            new_k = new_k.replace(".q_bias", ".q_proj.bias")\n',
        '            new_k = new_k.replace(".q_bias", ".q_proj.bias")\n'
        '            if "rel_pos" in k:\n'
        '                new_k = new_k[:-1] + {"h": "w", "w": "h"}[new_k[-1]]\n',
        parameter=_layers("backbone.layers.", "attn.rel_pos_h attn.rel_pos_w"),
        at="Rh = self.rel_pos(self.rel_pos_h, H)|Rw = self.rel_pos(self.rel_pos_w, W)",
    ),
    Change(
        "mmdet_style",
        "tower of the boxes is loaded from that of the classes",
        "        new_ckpt[new_k] = v\n    return new_ckpt\n\n\ndef model():",
        "        new_ckpt[new_k] = v\n"
        '    for k in [k for k in new_ckpt if "reg_convs" in k]:\n'
        '        new_ckpt[k] = new_ckpt[k.replace("reg_convs", "cls_convs")]\n'
        "    return new_ckpt\n\n\ndef model():",
        parameter="|".join(
            f"bbox_head.reg_convs.{i}.{name}"
            for i in range(2)
            for name in ("conv.weight", "norm.weight", "norm.bias")
        ),
    ),
    Change(
        "mmdet_style",
        "half as many groups in the norms of the head",
        "norm_cfg = dict(num_groups=4, eps=1e-5)",
        "norm_cfg = dict(num_groups=2, eps=1e-5)",
        at="x = self.norm(self.conv(x))",
    ),
    Change(
        "mmdet_style",
        "scale is of the whole width, not of a head's",
        "self.scale = self.head_dims**-0.5",
        "self.scale = embed_dims**-0.5",
        at="attn = torch.baddbmm(",
    ),
    Change(
        "mmdet_style",
        "distances are scaled behind the exponential",
        "bbox_pred = scale(self.conv_reg(reg_feat)).exp()",
        "bbox_pred = scale(self.conv_reg(reg_feat).exp())",
        at="return x * self.scale",
    ),
    Change(
        "mmdet_style",
        "identity of the feed-forward net is the normed input",
        "        return self.ffn(self.ln2(x), identity=x)\n",
        "        x = self.ln2(x)\n        return self.ffn(x, identity=x)\n",
        at="return identity + self.layers(x)",
    ),
    Change(
        "mmdet_style",
        "extra token is taken to be the last",
        "src = self.pos_embed[:, num_extra_tokens:]",
        "src = self.pos_embed[:, :-num_extra_tokens]",
    ),
    Change(
        "mmdet_style",
        "points stand in the corners of their cells",
        "def __init__(self, strides, offset=0.5):",
        "def __init__(self, strides, offset=0.0):",
        at="shift_x = (torch.arange(feat_w) + self.offset) * stride"
        "|shift_y = (torch.arange(feat_h) + self.offset) * stride",
    ),
    Change(
        "mmdet_style",
        "what encloses both boxes is left out: plain IoU",
        "gious = overlap / union - (enclose_area - union) / enclose_area",
        "gious = overlap / union",
        at="return loss_weight * ((1 - gious) * weight).sum() / avg_factor",
        reference="return inter / union - (enclosing - union) / enclosing",
    ),
    Change(
        "mmdet_style",
        "no gradient goes from the boxes into the pyramid",
        "cls_feat, reg_feat = x, x\n",
        "cls_feat, reg_feat = x, x.detach()\n",
    ),
    Change(
        "mmdet_style",
        "layers are counted without the one of the patches",
        'return int(var_name.split(".")[2]) + 1\n',
        'return int(var_name.split(".")[2])\n',
        phase="optimizer",
    ),
]
