"""Faulty ports of the small Evoformer."""

from ..bank import Change


def _each(blocks, scopes, names):
    """Return the names of parameters of both blocks."""
    return "|".join(
        f"{blocks}.{i}.{scope}.{name}"
        for i in (0, 1)
        for scope in scopes.split()
        for name in names.split()
    )


_WITH_HEADS = (
    "msa_row.attention msa_column.attention starting_node.attention"
    " ending_node.attention"
)
_ATTEND = "along_row along_column from_start from_end"

FAULTS = [
    Change(
        "with_heads",
        "gates of the two sides exchanged",
        'left_gate=self.linear("a_g"),\n'
        '            right_projection=self.linear("b_p"),\n'
        '            right_gate=self.linear("b_g"),\n',
        'left_gate=self.linear("b_g"),\n'
        '            right_projection=self.linear("b_p"),\n'
        '            right_gate=self.linear("a_g"),\n',
        parameter=_each(
            "evoformer",
            "outgoing incoming",
            "left_gate.weights left_gate.bias right_gate.weights right_gate.bias",
        ),
    ),
    Change(
        "with_heads",
        "heads interleaved in the merge",
        'mha.w("out.weight").T.unflatten(0, (N_HEAD, -1))',
        'mha.w("out.weight").T.unflatten(0, (-1, N_HEAD)).transpose(0, 1)',
        parameter=_each("evoformer", _WITH_HEADS, "output_w"),
    ),
    Change(
        "with_heads",
        "gating's weights are not transposed",
        'into_heads(mha.w("gate.weight"))',
        'into_heads(mha.w("gate.weight").T)',
        parameter=_each("evoformer", _WITH_HEADS, "gating_w"),
    ),
    Change(
        "with_heads",
        "channels of the outer product the other way",
        "out.T.unflatten(0, (hidden, hidden))",
        "out.T.unflatten(0, (hidden, hidden)).transpose(0, 1)",
        parameter=_each("evoformer", "outer_product_mean", "output_w"),
    ),
    Change(
        "with_heads",
        "values read the keys' weights",
        '"value_w": into_heads(mha.w("to_v.weight"))',
        '"value_w": into_heads(mha.w("to_k.weight"))',
        parameter=_each("evoformer", _WITH_HEADS, "value_w"),
    ),
    Change(
        "with_heads",
        "first norm of the triangle for its second",
        'center_layer_norm=self.norm("norm_out")',
        'center_layer_norm=self.norm("norm_in")',
        parameter=_each(
            "evoformer",
            "outgoing incoming",
            "center_layer_norm.scale center_layer_norm.offset",
        ),
    ),
    Change(
        "with_heads",
        "distances the other way",
        "position.unsqueeze(2) - position.unsqueeze(1)",
        "position.unsqueeze(1) - position.unsqueeze(2)",
        at="offset = torch.clip(|relative = torch.eye(",
    ),
    Change(
        "with_heads",
        "queries not scaled",
        "q_data, p.query_w) * p.query_w.shape[-1] ** -0.5",
        "q_data, p.query_w)",
        at='logits = torch.einsum("brqhc,brkhc->brhqk", q, k)',
        reference="scores = q @ k.transpose(-1, -2) *",
    ),
    Change(
        "with_heads",
        "rows look at pairs without a norm",
        '"bijc,ch->bhij", normed, ',
        '"bijc,ch->bhij", pair_act, ',
    ),
    Change(
        "with_heads",
        "sides of the incoming triangle exchanged",
        '"bkic,bkjc->bijc"',
        '"bkjc,bkic->bijc"',
        at="product = torch.einsum(equation, left, right)",
    ),
    Change(
        "with_heads",
        "ends are not turned back",
        "pair_act = pair_act + turned.swapaxes(1, 2)",
        "pair_act = pair_act + turned",
    ),
    Change(
        "with_heads",
        "another activation",
        "torch.clamp_min(linear(p.transition1, act), 0)",
        "nn.functional.gelu(linear(p.transition1, act))",
    ),
    Change(
        "with_heads",
        "mean over all letters",
        "(errors * bert_mask).sum() / bert_mask.sum()",
        "(errors * bert_mask).mean()",
    ),
    Change(
        "planes",
        "keys before queries",
        'for n in ("to_q", "to_k", "to_v")]',
        'for n in ("to_k", "to_q", "to_v")]',
        parameter=_each("trunk", _ATTEND, "qkv.weight"),
    ),
    Change(
        "planes",
        "last gate before those of the sides",
        'joined(state, prefix + "a_g", prefix + "b_g", prefix + "g")',
        'joined(state, prefix + "g", prefix + "a_g", prefix + "b_g")',
        parameter=_each("trunk", "leaving arriving", "gates.weight gates.bias"),
    ),
    Change(
        "planes",
        "square weight transposed",
        'self.close = joined(state, prefix + "z")',
        'self.close = conv1x1(state[prefix + "z.weight"].t(), state[prefix + "z.bias"])',
        parameter=_each("trunk", "leaving arriving", "close.weight"),
    ),
    Change(
        "planes",
        "letters of the columns for the rows",
        'names = ("tf_z_i", "tf_z_j", "tf_m")',
        'names = ("tf_z_j", "tf_z_i", "tf_m")',
        parameter="letter|letter_shift",
    ),
    Change(
        "planes",
        "rows' norm for the columns",
        'prefix + "col_attn.norm_m"',
        'prefix + "row_attn.norm_m"',
        parameter=_each("trunk", "ln_column", "gamma beta"),
    ),
    Change(
        "planes",
        "unbiased variance",
        "torch.sqrt(x.pow(2).mean(dim=1, keepdim=True) + self.eps)",
        "torch.sqrt(x.var(dim=1, keepdim=True) + self.eps)",
        at="return torch.addcmul(self.beta, x / std",
    ),
    Change(
        "planes",
        "heads outside of the three",
        ".view(n, 3, self.heads, -1, r, t).unbind(1)",
        ".view(n, self.heads, 3, -1, r, t).unbind(2)",
    ),
    Change(
        "planes",
        "bias of the ends is not turned",
        "self.from_end(u, residues, u)",
        "self.from_end(u, residues, swap(u))",
        at="block = block + self.favour(pairs)",
    ),
    Change(
        "planes",
        "sum over the alignment",
        "self.write(outer.flatten(1, 2)) / torch.where(seen > 0, seen, 1.0)",
        "self.write(outer.flatten(1, 2))",
        reference="return self.out(outer) / count",
    ),
    Change(
        "planes",
        "padding takes part in the triangles",
        "a * gate_a * mask, b * gate_b * mask",
        "a * gate_a, b * gate_b",
        reference="mask * torch.sigmoid(self.",
        at="third = a @ swap(b)",
    ),
    Change(
        "planes",
        "residual of the normed",
        "return z + gate * self.close(",
        "return u + gate * self.close(",
    ),
    Change(
        "planes",
        "mean of both directions",
        "return self.read_m(m), far + swap(far)",
        "return self.read_m(m), (far + swap(far)) / 2",
    ),
    Change(
        "planes",
        "farthest distances count as nearer",
        "-self.near, self.near)",
        "1 - self.near, self.near - 1)",
        at="z = z + self.apart[",
    ),
]
