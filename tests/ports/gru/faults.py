"""Faulty ports of the classifier of sequences."""

from ..bank import Change

FAULTS = [
    Change(
        "keras_cell",
        "gates in torch's order",
        "return torch.cat([z, r, n])",
        "return torch.cat([r, z, n])",
        parameter="rnn.kernel|rnn.recurrent_kernel|rnn.bias",
        at="chunk(3, -1)",
    ),
    Change(
        "keras_cell",
        "update the wrong way round",
        "return z * h + (1 - z) * hh",
        "return (1 - z) * h + z * hh",
    ),
    Change(
        "keras_cell",
        "reset before the product",
        "hh = torch.tanh(x_h + r * h_h)",
        "hh = torch.tanh(x_h + (r * h) @ self.recurrent_kernel[:, 20:] + self.bias[1, 20:])",
    ),
    Change(
        "keras_cell",
        "no recurrent bias",
        "h @ self.recurrent_kernel + self.bias[1]",
        "h @ self.recurrent_kernel + 0 * self.bias[1]",
    ),
    Change("keras_cell", "unbiased variance", ", unbiased=False", ""),
    Change(
        "keras_cell",
        "epsilon outside",
        "torch.sqrt(h.var(1, keepdim=True, unbiased=False) + 1e-5)",
        "torch.sqrt(h.var(1, keepdim=True, unbiased=False)) + 1e-3",
    ),
    Change(
        "keras_cell", "relu for silu", "h = h * torch.sigmoid(h)", "h = torch.relu(h)"
    ),
    Change(
        "keras_cell",
        "recurrent kernel is not transposed",
        'order(w["gru.weight_hh_l0"]).t()',
        'torch.cat([m.t() for m in order(w["gru.weight_hh_l0"]).chunk(3)]).t()',
        parameter="rnn.recurrent_kernel",
    ),
    Change(
        "loop",
        "one step too few",
        "range(x.size(1))",
        "range(x.size(1) - 1)",
        at="h = self.unit(",
    ),
    Change(
        "loop", "no norm", "h = self.ln(h)", "h = h + 0", reference="self.norm(h[-1])"
    ),
    Change("loop", "gelu for silu", "h = F.silu(h)", "h = F.gelu(h)"),
    Change(
        "loop",
        "recurrent weight of other gates",
        'for kind in ("weight", "bias"):',
        'net.unit.weight_hh.copy_(w["gru.weight_hh_l0"].roll(10, 0))\n    for kind in ("weight", "bias"):',
        parameter="unit.weight_hh",
    ),
]
