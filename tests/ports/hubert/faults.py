"""Faulty ports of the HuBERT."""

from ..bank import Change


def _each(prefix, names):
    """Return the names of parameters in each layer of the encoder."""
    return "|".join(f"{prefix}.{i}.{n}" for i in range(3) for n in names.split())


FAULTS = [
    Change(
        "fairseq_style",
        "keys come before queries in the joint projection",
        "torch.cat([q, k, v])",
        "torch.cat([k, q, v])",
        parameter=_each("encoder.layers", "self_attn.in_proj_weight"),
        at="qkv = F.linear(|q, k, v = qkv.chunk(",
    ),
    Change(
        "fairseq_style",
        "biases of queries and values are exchanged",
        '        upgraded[prefix + "q_bias"] = upgraded.pop(prefix + "q.bias")\n'
        '        upgraded[prefix + "v_bias"] = upgraded.pop(prefix + "v.bias")\n',
        '        upgraded[prefix + "q_bias"] = upgraded.pop(prefix + "v.bias")\n'
        '        upgraded[prefix + "v_bias"] = upgraded.pop(prefix + "q.bias")\n',
        parameter=_each("encoder.layers", "self_attn.q_bias self_attn.v_bias"),
        at="bias = torch.cat([self.q_bias|qkv = F.linear(",
    ),
    Change(
        "fairseq_style",
        "matrix behind the heads is turned; it is square, so nothing complains",
        '        upgraded[prefix + "grep_a"] = upgraded[prefix + "grep_a"].flatten()\n',
        '        upgraded[prefix + "grep_a"] = upgraded[prefix + "grep_a"].flatten()\n'
        '        upgraded[prefix + "out_proj.weight"].t_()\n',
        parameter=_each("encoder.layers", "self_attn.out_proj.weight"),
        at="return self.out_proj(attn)",
    ),
    Change(
        "fairseq_style",
        "lengths of the positional kernel are those of its directions",
        'upgraded[conv + "weight_g"] = weight_g.flatten()',
        'upgraded[conv + "weight_g"] = weight_v.norm(dim=(0, 1))',
        parameter="encoder.pos_conv.0.weight_g",
        at="weight = self.weight_v * (self.weight_g / norm)",
    ),
    Change(
        "fairseq_style",
        "frame is cut at the front of the positional convolution",
        "x = x[:, :, : -self.remove]",
        "x = x[:, :, self.remove :]",
    ),
    Change(
        "fairseq_style",
        "first convolution is normed over all of its channels",
        "            x.float(), self.num_groups, self.weight, self.bias, self.eps\n",
        "            x.float(), 1, self.weight, self.bias, self.eps\n",
        at="output = F.group_norm(",
    ),
    Change(
        "fairseq_style",
        "queries are scaled by the width of all heads",
        "self.scaling = self.head_dim**-0.5",
        "self.scaling = self.embed_dim**-0.5",
        at="q = self.fold(q * self.scaling)",
    ),
    Change(
        "fairseq_style",
        "one is taken from the gated product, not from the reset",
        "return gate_a * (gate_b * grep_a - 1.0) + 2.0",
        "return gate_a * gate_b * grep_a - 1.0 + 2.0",
    ),
    Change(
        "fairseq_style",
        "second shortcut begins before the first norm",
        "        x = residual + x\n"
        "        x = self.self_attn_layer_norm(x)\n\n"
        "        residual = x\n",
        "        x = residual + x\n"
        "        residual = x\n"
        "        x = self.self_attn_layer_norm(x)\n\n",
        at="        x = residual + x",
    ),
    Change(
        "fairseq_style",
        "buckets reach as far as those of T5",
        "max_distance: int = 23",
        "max_distance: int = 128",
        at="scale = (num_buckets - max_exact) / math.log("
        "|large = torch.log(relative_positions.float()"
        "|large = max_exact + large|large = torch.clamp(large"
        "|large = torch.where(is_small"
        "|return relative_buckets + torch.where(|values = self.relative_attention_bias(",
    ),
    Change(
        "fairseq_style",
        "spans include the frame behind their end",
        "row[start : start + CFG.mask_length] = True",
        "row[start : start + CFG.mask_length + 1] = True",
        at="x[mask_indices] = self.mask_emb",
    ),
    Change(
        "fairseq_style",
        "frames that are seen are divided by the number of masked ones",
        'loss_u = F.cross_entropy(logp_u, targ_u, reduction="sum") / targ_u.numel()',
        'loss_u = F.cross_entropy(logp_u, targ_u, reduction="sum") / targ_m.numel()',
    ),
    Change(
        "fairseq_style",
        "codes and distances decay as the matrices do",
        '    r"bias$|layer_norm|conv_layers\\.0\\.1|weight_g|grep_a|mask_emb"\n'
        '    r"|relative_attention_bias|label_embs"\n',
        '    r"bias$|layer_norm|conv_layers\\.0\\.1|weight_g|grep_a|mask_emb"\n',
        phase="optimizer",
    ),
    Change(
        "mlx_style",
        "kernels are reshaped where axes should change places",
        'w[f"extractor.{n}.weight"] = kernel.transpose(1, 2)',
        'w[f"extractor.{n}.weight"] = kernel.reshape(\n'
        "            len(kernel), kernel.shape[2], kernel.shape[1]\n"
        "        )",
        parameter="extractor.1.weight|extractor.2.weight",
        at='return torch.einsum("blkgi,goki->blgo"|x = conv1d(x, self.weight',
    ),
    Change(
        "mlx_style",
        "positional kernel is turned round as for a true convolution",
        'weights[f"{norm}.original1"].transpose(1, 2)',
        'weights[f"{norm}.original1"].flip(2).transpose(1, 2)',
        parameter="position.direction",
        at="weight = self.magnitude * self.direction|squares = torch.square("
        "|return gelu(conv1d(x, weight",
    ),
    Change(
        "mlx_style",
        "second norm of a layer reads the first",
        'copy(f"{target}.ln2", f"{source}.norm2")',
        'copy(f"{target}.ln2", f"{source}.norm1")',
        parameter=_each("encoder", "ln2.weight ln2.bias"),
        at="return self.ln2(x + y), position_bias",
    ),
    Change(
        "mlx_style",
        "reset comes before update in the gates",
        'update, reset = weights[f"{source}.gate.{name}"].split(4)',
        'reset, update = weights[f"{source}.gate.{name}"].split(4)',
        parameter=_each(
            "encoder",
            "attention.update_gate.weight attention.update_gate.bias "
            "attention.reset_gate.weight attention.reset_gate.bias",
        ),
        at="update = torch.sigmoid(|reset = torch.sigmoid(",
    ),
    Change(
        "mlx_style",
        "groups of channels are by turns, as is the default there",
        "        x = x.reshape(batch, time, self.num_groups, dims // self.num_groups)\n"
        "        x = x.transpose(1, 2).reshape(batch, self.num_groups, -1)\n"
        "        mean = x.mean(-1, keepdim=True)\n"
        "        var = (x * x).mean(-1, keepdim=True) - mean * mean\n"
        "        x = (x - mean) * torch.rsqrt(var + self.eps)\n"
        "        x = x.reshape(batch, self.num_groups, time, -1).transpose(1, 2)\n",
        "        x = x.reshape(batch, -1, self.num_groups)\n"
        "        mean = x.mean(1, keepdim=True)\n"
        "        var = (x * x).mean(1, keepdim=True) - mean * mean\n"
        "        x = (x - mean) * torch.rsqrt(var + self.eps)\n",
        at="return x.reshape(batch, time, dims) * self.weight",
    ),
    Change(
        "mlx_style",
        "variance of a layer norm is divided by one less",
        "var = x.var(-1, keepdim=True, correction=0)",
        "var = x.var(-1, keepdim=True)",
        at="x = (x - means) * torch.rsqrt(var + self.eps)"
        "|return self.weight * x + self.bias",
    ),
    Change(
        "mlx_style",
        "positional convolution has no activation",
        "return gelu(conv1d(x, weight, groups=self.groups) + self.bias)",
        "return conv1d(x, weight, groups=self.groups) + self.bias",
        reference="F.gelu(x[:, :, :-1])",
    ),
    Change(
        "mlx_style",
        "each layer gates the bias that the one before has gated",
        "        scores = scores + gate * position_bias + mask\n",
        "        position_bias = gate * position_bias\n"
        "        scores = scores + position_bias + mask\n",
    ),
    Change(
        "mlx_style",
        "codes keep their lengths in the similarity",
        "codes = self.codebook / torch.linalg.norm(self.codebook, dim=0)",
        "codes = self.codebook",
        at="return x @ codes / self.args.temperature",
        reference="F.cosine_similarity(",
    ),
    Change(
        "mlx_style",
        "steps ahead and back change places in the table",
        "torch.where(steps_back < 0, bucket + half, bucket)",
        "torch.where(steps_back > 0, bucket + half, bucket)",
        at="return self.table[:, bucket]",
    ),
    Change(
        "mlx_style",
        "frames that only touch the end of an utterance count",
        "lengths = 1 + (lengths - kernel) // stride",
        "lengths = 1 + (lengths - 1) // stride",
        at="keep = torch.arange(length) <|x = x * keep[..., None]"
        "|mask = torch.where(keep, 0.0, -1e9)",
    ),
    Change(
        "mlx_style",
        "gradient of the features is not made smaller",
        "return scale * x + stop_gradient((1 - scale) * x)",
        "return x",
        reference="features = still + FEATURE_GRAD",
    ),
    Change(
        "mlx_style",
        "moments keep their bias, as is the default there",
        "        m = m / (1 - b1**self.steps)\n        v = v / (1 - b2**self.steps)\n",
        "",
        phase="optimizer",
    ),
]
