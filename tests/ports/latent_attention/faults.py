"""Faulty ports of the small latent attention."""

from ..bank import Change

FAULTS = [
    Change(
        "packed",
        "sequences see each other",
        "seen = (sequence[:, None] == sequence[None, :]) & (back >= 0)",
        "order = torch.arange(total)\n        seen = order[:, None] >= order[None, :]",
        at="out = F.scaled_dot_product_attention(",
    ),
    Change(
        "packed",
        "window includes one more",
        "seen = seen & (back < self.window)",
        "seen = seen & (back <= self.window)",
        at="out = F.scaled_dot_product_attention(",
    ),
    Change(
        "packed",
        "scale of the part without rotation",
        "stretch**2 * (NOPE + ROPE) ** -0.5",
        "stretch**2 * NOPE**-0.5",
        at="out = F.scaled_dot_product_attention(",
    ),
    Change(
        "packed",
        "latent is not normed",
        "        latent = rms_norm(latent, self.kv_norm)\n",
        "        latent = latent * self.kv_norm\n",
    ),
    Change(
        "packed",
        "halves of a head are turned",
        "    pairs = torch.view_as_complex(x.unflatten(-1, (-1, 2)).contiguous())\n"
        "    turned = pairs * torch.polar(torch.ones_like(angle), angle)[:, None]\n"
        "    return torch.view_as_real(turned).flatten(-2)\n",
        "    one, two = x.chunk(2, dim=-1)\n"
        "    cos, sin = angle.cos()[:, None], angle.sin()[:, None]\n"
        "    return torch.cat([one * cos - two * sin, two * cos + one * sin], -1)\n",
    ),
    Change(
        "packed",
        "up before gate in the loader",
        'both = [sd[prefix + "gate_proj.weight"], sd[prefix + "up_proj.weight"]]',
        'both = [sd[prefix + "up_proj.weight"], sd[prefix + "gate_proj.weight"]]',
        parameter="blocks.0.ffn.w13|blocks.1.ffn.w13|blocks.2.ffn.w13"
        "|blocks.1.ffn.shared.w13|blocks.2.ffn.shared.w13",
        at="gate, up = F.linear(|F.linear(F.silu(gate) * up",
    ),
    Change(
        "packed",
        "residual before the attention is added",
        "    residual = x + residual\n"
        "    scale = torch.rsqrt(residual.square().mean(dim=-1, keepdim=True) + NORM_EPS)\n"
        "    return residual * scale * weight, residual\n",
        "    total = x + residual\n"
        "    scale = torch.rsqrt(total.square().mean(dim=-1, keepdim=True) + NORM_EPS)\n"
        "    return total * scale * weight, residual\n",
        at="x, residual = add_rms_norm(x, residual, self.norm2)|total = x + residual",
    ),
    Change(
        "packed",
        "epsilon of another config",
        "NORM_EPS = 1e-6",
        "NORM_EPS = 1e-5",
        at="scale = torch.rsqrt(|return F.rms_norm(|return residual * scale",
    ),
    Change(
        "packed",
        "correction stands in the weights of experts",
        "gates = scores.gather(1, index)",
        "gates = (scores + self.balance).gather(1, index)",
    ),
    Change(
        "packed",
        "weights of experts are not scaled",
        "gates = 1.5 * gates / gates.sum(dim=1, keepdim=True)",
        "gates = gates / gates.sum(dim=1, keepdim=True)",
    ),
    Change(
        "packed",
        "weights in the order of tokens",
        "weighted = torch.cat(results) * gates.flatten()[order, None]",
        "weighted = torch.cat(results) * gates.flatten()[:, None]",
        at="results.append(|weighted =",
    ),
    Change(
        "packed",
        "shared expert left out",
        "return routed + self.shared(x)",
        "return routed",
        reference="self.shared_experts(hidden_states)",
        at="routed = torch.zeros_like",
    ),
    Change(
        "packed",
        "last of a sequence predicts the first of the next",
        "kept = inner & (targets[1:] != -100)",
        "kept = targets[1:] != -100",
        at="logits[:-1][kept]|targets[1:][kept]|return -picked.mean()",
    ),
    Change(
        "packed",
        "norms decay too",
        '[{"params": decayed}, {"params": plain, "weight_decay": 0.0}]',
        '[{"params": decayed}, {"params": plain}]',
        phase="optimizer",
    ),
    Change(
        "jaxlike",
        "keys and values are split before heads",
        'kv = heads(attn + "kv_b_proj", N + V)',
        'kv = kernel(attn + "kv_b_proj")\n'
        "        kv = torch.cat(\n"
        "            [kv[:, : H * N].unflatten(1, (H, N)), kv[:, H * N :].unflatten(1, (H, V))], 2\n"
        "        )",
        parameter="first.attention.k_up|first.attention.v_up|second.attention.k_up"
        "|second.attention.v_up|third.attention.k_up|third.attention.v_up",
        at='einsum("bthn,rhn->bthr"|einsum("bthr,rhv,hvd->btd"',
    ),
    Change(
        "jaxlike",
        "turned backwards",
        "[even * cos - odd * sin, even * sin + odd * cos]",
        "[even * cos + odd * sin, odd * cos - even * sin]",
    ),
    Change(
        "jaxlike",
        "turn of the shared key left out",
        'k_pe = rope(einsum("btd,dk->btk", x, p["k_rope"]), positions)',
        'k_pe = einsum("btd,dk->btk", x, p["k_rope"])',
        at='einsum("bthk,bsk->bhts"',
        reference="q_pe, k_pe = apply_rotary(q_pe, cos, sin), apply_rotary(k_pe, cos, sin)",
    ),
    Change(
        "jaxlike",
        "stretch of the scale is not squared",
        "(0.1 * np.log(4.0) + 1.0) ** 2",
        "(0.1 * np.log(4.0) + 1.0)",
    ),
    Change(
        "jaxlike",
        "window in the layers without one",
        'decoder_layer(p["third"], x, causal & real, experts)',
        'decoder_layer(p["third"], x, near & real, experts)',
        at="logits = torch.where(mask",
    ),
    Change(
        "jaxlike",
        "three experts for two",
        "ranked[..., :2]",
        "ranked[..., :3]",
        at="weights = probs * chosen|weights = weights / weights.sum",
    ),
    Change(
        "jaxlike",
        "weights over all experts",
        "weights = weights / weights.sum(-1, keepdim=True) * 1.5",
        "weights = weights / probs.sum(-1, keepdim=True) * 1.5",
    ),
    Change(
        "jaxlike",
        "second norm reads what the attention read",
        '    x = x + attention(p["attention"], norm(p["before_attention"], x), mask)\n'
        '    return x + mlp(p["mlp"], norm(p["before_mlp"], x))\n',
        '    y = x + attention(p["attention"], norm(p["before_attention"], x), mask)\n'
        '    return y + mlp(p["mlp"], norm(p["before_mlp"], x))\n',
        at="def norm(|return x / torch.sqrt(",
    ),
    Change(
        "jaxlike",
        "labels of the same place",
        "targets = torch.cat([labels[:, 1:], torch.full_like(labels[:, :1], -100)], 1)",
        "targets = labels",
        at="one_hot = |weights = (targets|nll = torch.logsumexp(|return (nll * weights)",
    ),
    Change(
        "jaxlike",
        "mean over all places",
        "return (nll * weights).sum() / weights.sum()",
        "return (nll * weights).mean()",
    ),
    Change(
        "jaxlike",
        "first norm of the second layer is loaded twice",
        '"before_mlp": sd[at + "post_attention_layernorm.weight"]',
        '"before_mlp": sd[at + "input_layernorm.weight"]',
        parameter="first.before_mlp|second.before_mlp|third.before_mlp",
    ),
    Change(
        "jaxlike",
        "second beta of the default",
        "3e-3, (0.9, 0.95), 1e-8, 0.1",
        "3e-3, (0.9, 0.999), 1e-8, 0.1",
        phase="optimizer",
    ),
]
