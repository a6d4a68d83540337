"""Faulty ports of the small LightGlue."""

from ..bank import Change


def _each(names, layers=3):
    """Return these names of parameters in each of the layers."""
    return "|".join(f"{name}_{il}" for name in names.split() for il in range(layers))


FAULTS = [
    Change(
        "flax_scan",
        "neighbours that turn together are not brought into halves",
        'turned=name != "value"',
        "turned=False",
        parameter="|".join(
            f"layers/self/{name}/{kind}"
            for name in ("query", "key")
            for kind in ("kernel", "bias")
        ),
        at="real, imag = torch.chunk(x, 2|return torch.cat([real * cos",
    ),
    Change(
        "flax_scan",
        "kernels behind the attention are not transposed",
        'weight.T.unflatten(0, (CONFIG["num_heads"], -1))',
        'weight.unflatten(0, (CONFIG["num_heads"], -1))',
        parameter="layers/self/out/kernel|layers/cross/out/kernel",
        at='return torch.einsum("...hd,hdo->...o"',
    ),
    Change(
        "flax_scan",
        "scales of the norms are those of the self-attention in both",
        'stacked(w, source + ".ffn.1.weight", plain)',
        'stacked(w, "transformers.{}.self_attn.ffn.1.weight", plain)',
        parameter="layers/cross/mlp/norm/scale",
    ),
    Change(
        "flax_scan",
        "every layer is scored with the last layer's weights",
        'source = "log_assignment.{}."',
        'source = "log_assignment.2."',
        parameter="assign/project/kernel|assign/project/bias"
        "|assign/matchable/kernel|assign/matchable/bias",
    ),
    Change(
        "flax_scan",
        "points of the other image are masked by one's own mask",
        "attend(shared, shared.flip(0), value.flip(0), mask.flip(0))",
        "attend(shared, shared.flip(0), value.flip(0), mask)",
        at="weights = softmax(logits, key_mask|x = torch.where(where, x, torch.full_like("
        "x, -torch.inf))",
        reference="= sim.masked_fill(~mask",
    ),
    Change(
        "flax_scan",
        "logits are scaled by the width of all heads",
        "/ math.sqrt(depth)",
        '/ math.sqrt(CONFIG["embed_dim"])',
    ),
    Change(
        "flax_scan",
        "activation is approximated by a tanh, as is the default there",
        "0.5 * x * torch.erfc(-x * math.sqrt(0.5))",
        "0.5 * x * (1 + torch.tanh(math.sqrt(2 / math.pi) * (x + 0.044715 * x**3)))",
        at="h = gelu(",
    ),
    Change(
        "flax_scan",
        "descriptors are brought to unit length before the root, not to unit sum",
        "total = torch.sum(torch.abs(desc), dim=-1, keepdim=True)",
        "total = torch.sqrt(torch.sum(torch.square(desc), dim=-1, keepdim=True))",
        at="return torch.sqrt(torch.clamp(desc / torch.clamp(total",
        reference="desc = F.normalize(desc, p=1",
    ),
    Change(
        "flax_scan",
        "both softmaxes are over the second image",
        "columns = logsumexp(sim, there, axis=2)",
        "columns = logsumexp(sim, there, axis=3)",
        at="inner = 2.0 * sim - rows - columns",
        reference="scores1 = F.log_softmax(sim, 1)",
    ),
    Change(
        "flax_scan",
        "confidences are of the states one layer later",
        "known = states[:-1].detach()",
        "known = states[1:].detach()",
        at='logits = torch.einsum("lsbki,li->lsbk", known',
    ),
    Change(
        "flax_scan",
        "keys of the other image carry no gradient",
        "attend(shared, shared.flip(0), value.flip(0), mask.flip(0))",
        "attend(shared, shared.flip(0).detach(), value.flip(0), mask.flip(0))",
        at='shared = to_heads(|logits = torch.einsum("sbqhd,sbkhd->sbhqk"',
    ),
    Change(
        "flax_scan",
        "ignored points count as points without a match",
        "    alone0 = (matches0 == -1).to(scores)\n"
        "    alone1 = (matches1 == -1).to(scores)\n",
        "    alone0 = (matches0 < 0).to(scores)\n"
        "    alone1 = (matches1 < 0).to(scores)\n",
        at='left = torch.einsum("lbm,bm->lb"|left = left + torch.einsum("lbn,bn->lb"'
        "|count = torch.sum(alone0",
    ),
    Change(
        "flax_scan",
        "product of the momenta is not kept for the next step",
        '"product": product}',
        '"product": state["product"]}',
        phase="optimizer",
        steps=2,
    ),
    Change(
        "ragged_engine",
        "queries, keys and values are taken for blocks of rows",
        "self[key].unflatten(0, (N_EMBD, 3)).unbind(1)",
        "self[key].chunk(3)",
        parameter=_each("self_qkv self_vec"),
        at="q, k, v = map(split_heads, qkv.chunk(3))",
    ),
    Change(
        "ragged_engine",
        "state stays before the message in the weights",
        "torch.cat([message, state], dim=1)",
        "torch.cat([state, message], dim=1)",
        parameter=_each("self_up cross_up"),
        at="both = torch.cat([message, x])",
    ),
    Change(
        "ragged_engine",
        "row of the confidence before that of the matchability",
        'rows.append(self[f"token_confidence.{il}.token.0.weight"])',
        'rows.insert(0, self[f"token_confidence.{il}.token.0.weight"])',
        parameter=_each("head_rows", layers=2),
        at='matchable = self.tensor("head_rows", il)[0] @ x'
        '|trust = (self.tensor("head_rows", il)[1] @',
    ),
    Change(
        "ragged_engine",
        "what is gathered is not brought to the new maximum",
        "acc = acc * shrink + torch.einsum(",
        "acc = acc + torch.einsum(",
        at="out = acc / mass|return FlashAttention.apply(",
    ),
    Change(
        "ragged_engine",
        "a last block of keys that is not full is left out",
        "range(0, k.shape[2], KEY_BLOCK)",
        "range(0, k.shape[2] - KEY_BLOCK + 1, KEY_BLOCK)",
        at="mass = mass * shrink + |acc = acc * shrink + |out = acc / mass"
        "|return FlashAttention.apply(",
    ),
    Change(
        "ragged_engine",
        "backward of the softmax without what all keys have in common",
        "p * (d_p - inner.unsqueeze(2)) * ctx.scale",
        "p * d_p * ctx.scale",
        at="return FlashAttention.apply(",
    ),
    Change(
        "ragged_engine",
        "backward of the norm takes the variance for a constant",
        "d_x = d_unit - d_unit.mean(0) - unit * (d_unit * unit).mean(0)",
        "d_x = d_unit - d_unit.mean(0)",
        at="h = NormGelu.apply(|return d_x * inv, d_gain",
    ),
    Change(
        "ragged_engine",
        "variance of a sample",
        "torch.var_mean(x, dim=0, correction=0)",
        "torch.var_mean(x, dim=0)",
        at="inv = torch.rsqrt(var|unit = (x - mean) * inv|h = NormGelu.apply(",
    ),
    Change(
        "ragged_engine",
        "confidences pull at the states",
        "[1] @ x.detach() + bias",
        "[1] @ x + bias",
        reference="return self.token(desc.detach())",
    ),
    Change(
        "ragged_engine",
        "each axis of an image by its own side",
        "        x = (2 * xy[:1] - width) / longest\n"
        "        y = (2 * xy[1:] - height) / longest\n",
        "        x = (2 * xy[:1] - width) / width\n"
        "        y = (2 * xy[1:] - height) / height\n",
        at="return torch.cat([x, y, turn.deg2rad()])",
        reference="scale = size.amax(-1) / 2",
    ),
    Change(
        "ragged_engine",
        "heads are turned the other way",
        "[even * cos - odd * sin, even * sin + odd * cos]",
        "[even * cos + odd * sin, odd * cos - even * sin]",
        at="return turned.flatten(0, 1)",
        reference="return torch.stack((-x2, x1), dim=-1)",
    ),
    Change(
        "ragged_engine",
        "first layer weighs most",
        "for table in reversed(tables):",
        "for table in tables:",
        at="parts.append(weight * torch.stack(every)",
        reference="weight = GAMMA ** (LAYERS - i - 1)",
    ),
    Change(
        "ragged_engine",
        "decay goes through the moments",
        "        decoupled_weight_decay=True,\n",
        "",
        phase="optimizer",
    ),
]
