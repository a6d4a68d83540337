"""Faulty ports of the gMLP."""

from ..bank import Change


def _hk(names):
    """Return the names of arrays in each layer of the Haiku port."""
    return "|".join(f"gmlp/layer_{i}/{n}" for i in range(3) for n in names.split())


def _keras(names):
    """Return the names of variables in each block of the Keras port."""
    return "|".join(f"block.{i}.{n}" for i in range(3) for n in names.split())


FAULTS = [
    Change(
        "haiku_style",
        "weights over positions stay [to, from]",
        '    spatial_w = state[f"{old}.sgu.weight"].swapaxes(1, 2)\n',
        '    spatial_w = state[f"{old}.sgu.weight"]\n',
        parameter=_hk("spatial_gate/w"),
        at='w = get_parameter("w")[:, :length|w = w * torch.triu(|v = torch.matmul(v, w) +',
    ),
    Change(
        "haiku_style",
        "gate comes first in the projection",
        '    w_u, w_v = state[f"{old}.proj_in.weight"].split(GATE_SIZE)\n'
        '    b_u, b_v = state[f"{old}.proj_in.bias"].split(GATE_SIZE)\n',
        '    w_v, w_u = state[f"{old}.proj_in.weight"].split(GATE_SIZE)\n'
        '    b_v, b_u = state[f"{old}.proj_in.bias"].split(GATE_SIZE)\n',
        parameter=_hk("linear_u/w linear_u/b linear_v/w linear_v/b"),
        at='u = gelu(Linear("linear_u")|v = gelu(Linear("linear_v")'
        '|out = torch.tensordot(inputs|out = out + get_parameter("b")',
    ),
    Change(
        "haiku_style",
        "queries and keys are swapped",
        "    query, key, value = state[",
        "    key, query, value = state[",
        parameter=_hk("tiny_attention/query/w tiny_attention/key/w"),
        at='query = Linear("query"|key = Linear("key"|out = torch.tensordot(inputs'
        '|logits = torch.einsum("btk,bsk->bts"',
    ),
    Change(
        "haiku_style",
        "norm of the gate reads the weights of the layer's",
        '"spatial_gate/layer_norm": convert_norm(state, f"{old}.sgu.norm"),',
        '"spatial_gate/layer_norm": convert_norm(state, f"{old}.norm"),',
        parameter=_hk("spatial_gate/layer_norm/scale spatial_gate/layer_norm/offset"),
        at='v = LayerNorm("layer_norm")(v)|inv = get_parameter("scale")'
        "|return inv * (inputs - mean)",
    ),
    Change(
        "haiku_style",
        "gelu is approximate, as is the default there",
        ", approximate=False)",
        ")",
        at="inner = math.sqrt(|return 0.5 * x * (1.0 + torch.tanh(inner))",
    ),
    Change(
        "haiku_style",
        "shortcut begins behind the norm",
        '        h = LayerNorm("layer_norm")(x)\n',
        '        x = h = LayerNorm("layer_norm")(x)\n',
        at='return x + Linear("linear_out")(h)',
    ),
    Change(
        "haiku_style",
        "attention looks at what is not normed",
        'TinyAttention("tiny_attention")(h, mask)',
        'TinyAttention("tiny_attention")(x, mask)',
        at='query = Linear("query"|key = Linear("key"|value = Linear("value"',
    ),
    Change(
        "haiku_style",
        "attention is added behind the gate",
        "h = u * (gate + attended)",
        "h = u * gate + attended",
    ),
    Change(
        "haiku_style",
        "a position is not mixed into itself",
        "w = w * torch.triu(torch.ones(length, length))",
        "w = w * torch.triu(torch.ones(length, length), 1)",
        at="v = torch.matmul(v, w) +",
    ),
    Change(
        "haiku_style",
        "padding is attended to",
        "return causal[None, :, :] & not_pad[:, None, :]",
        "return causal[None, :, :].expand(len(tokens), -1, -1)",
        at="logits = torch.where(mask, logits, -1e30)",
        reference="scores.masked_fill(pad[",
    ),
    Change(
        "haiku_style",
        "row of the padding learns as an input too",
        "        is_pad = (tokens == PAD_ID)[..., None]\n"
        "        embedded = torch.where(is_pad, embedded.detach(), embedded)\n",
        "",
        at='embedded = get_parameter("table")[tokens]'
        "|return embedded * math.sqrt(MODEL_SIZE)",
        reference="self.embed(tokens)",
    ),
    Change(
        "haiku_style",
        "all that has two axes decays: the table too, and biases of positions",
        'return name.endswith("/w")',
        "return array.ndim > 1",
        phase="optimizer",
    ),
    Change(
        "haiku_style",
        "count of the moments stays where it was",
        'return updates, {"count": count, "mu": mu, "nu": nu}',
        'return updates, {**state, "mu": mu, "nu": nu}',
        phase="optimizer",
        steps=2,
    ),
    Change(
        "tf_style",
        "kernels that are square stay [out, in]",
        '        return [checkpoint[name + ".weight"].T, checkpoint[name + ".bias"]]\n',
        '        kernel = checkpoint[name + ".weight"]\n'
        "        if kernel.shape[0] != kernel.shape[1]:\n"
        "            kernel = kernel.T\n"
        '        return [kernel, checkpoint[name + ".bias"]]\n',
        parameter=_keras("dense_out.kernel"),
        at="outputs = self.dense_out(outputs)|outputs = torch.matmul(inputs, self.kernel)",
    ),
    Change(
        "tf_style",
        "queries, keys and values are taken by turns",
        '        qkv = checkpoint[prefix + "attn.to_qkv.weight"]\n',
        '        qkv = checkpoint[prefix + "attn.to_qkv.weight"]\n'
        "        qkv = torch.cat([qkv[0::3], qkv[1::3], qkv[2::3]])\n",
        parameter=_keras("attention.qkv.kernel"),
        at="query, key, value = torch.split(self.qkv(inputs)"
        "|outputs = torch.matmul(inputs, self.kernel)",
    ),
    Change(
        "tf_style",
        "bias of positions is reshaped where it should be transposed",
        'torch.permute(checkpoint[prefix + "sgu.bias"], (1, 0))',
        'torch.reshape(checkpoint[prefix + "sgu.bias"], (-1, 2))',
        parameter=_keras("gating.spatial_bias"),
        at="v = v + self.spatial_bias[",
    ),
    Change(
        "tf_style",
        "beta comes before gamma in the last norm",
        'net.output_norm.set_weights(norm("norm"))',
        'net.output_norm.set_weights([checkpoint["norm.bias"], checkpoint["norm.weight"]])',
        parameter="output_norm.gamma|output_norm.beta",
        at="return self.shared.linear(self.output_norm(hidden))"
        "|return normalized * self.gamma + self.beta",
    ),
    Change(
        "tf_style",
        "softmax over the queries",
        "weights = softmax(logits + attention_bias)",
        "weights = softmax(logits + attention_bias, axis=1)",
        at="exps = torch.exp(logits - torch.amax(|return exps / torch.sum(",
    ),
    Change(
        "tf_style",
        "heads of the gate take channels by turns",
        "        v = torch.reshape(v, (batch, length, self.num_heads, -1))\n"
        '        v = torch.einsum("mnh,bnhd->bmhd", self.causal_kernel(length), v)\n'
        "        v = v + self.spatial_bias[:length, :, None]\n",
        "        v = torch.reshape(v, (batch, length, -1, self.num_heads))\n"
        '        v = torch.einsum("mnh,bndh->bmdh", self.causal_kernel(length), v)\n'
        "        v = v + self.spatial_bias[:length, None, :]\n",
    ),
    Change(
        "tf_style",
        "first half is normed and mixed, not the second",
        "u, v = torch.chunk(inputs, 2, dim=-1)",
        "v, u = torch.chunk(inputs, 2, dim=-1)",
        at="v = self.layer_norm(v)|return torch.mul(u, torch.add(v, attended))",
    ),
    Change(
        "tf_style",
        "logits are scaled by the width of the model",
        "logits = logits / self.attention_size**0.5",
        "logits = logits / inputs.shape[-1] ** 0.5",
    ),
    Change(
        "tf_style",
        "epsilon of Keras in the norms",
        '"layer_norm_epsilon": 1e-5,',
        '"layer_norm_epsilon": 1e-3,',
        at="normalized = centered / torch.sqrt(variance + self.epsilon)"
        "|outputs = self.layer_norm(inputs)|v = self.layer_norm(v)",
    ),
    Change(
        "tf_style",
        "a token does not see itself",
        "band = torch.tril(torch.ones(length, length))",
        "band = torch.tril(torch.ones(length, length), -1)",
        at="visible = band * (|return (1.0 - visible) * -1e9"
        "|weights = softmax(logits + attention_bias)",
    ),
    Change(
        "tf_style",
        "kernel of the last positions where a row is short",
        "kernel = self.spatial_kernel[:length, :length]",
        "kernel = self.spatial_kernel[-length:, -length:]",
        at='return torch.where(columns <= rows, kernel|v = torch.einsum("mnh,bnhd->bmhd"',
    ),
    Change(
        "tf_style",
        "smoothing is shared by the wrong classes only",
        "    low_confidence = smoothing / vocab_size\n"
        "    confidence = 1.0 - smoothing + low_confidence\n",
        "    low_confidence = smoothing / (vocab_size - 1)\n"
        "    confidence = 1.0 - smoothing\n",
        at="soft_targets = torch.where(hot|xentropy = -torch.sum(soft_targets",
    ),
    Change(
        "tf_style",
        "decay goes through the slots",
        "            grad = variable.grad\n"
        '            slots["m"].mul_(beta_1).add_(grad * (1.0 - beta_1))\n'
        '            slots["v"].mul_(beta_2).add_(torch.square(grad) * (1.0 - beta_2))\n'
        '            denominator = torch.sqrt(slots["v"] / v_correction)'
        ' + self.hp["epsilon"]\n'
        '            update = slots["m"] / m_correction / denominator\n'
        "            if self.do_use_weight_decay(name):\n"
        "                update = update + decay * variable\n",
        "            grad = variable.grad\n"
        "            if self.do_use_weight_decay(name):\n"
        "                grad = grad + decay * variable\n"
        '            slots["m"].mul_(beta_1).add_(grad * (1.0 - beta_1))\n'
        '            slots["v"].mul_(beta_2).add_(torch.square(grad) * (1.0 - beta_2))\n'
        '            denominator = torch.sqrt(slots["v"] / v_correction)'
        ' + self.hp["epsilon"]\n'
        '            update = slots["m"] / m_correction / denominator\n',
        phase="optimizer",
    ),
]
