"""Faulty ports of the decoder with rotary positions."""

from ..bank import Change

_KERNELS = "layers.0.wqkv|layers.1.wqkv"

FAULTS = [
    Change(
        "functional",
        "kernels of queries in halves",
        'q = neighbours(w[at + "attention.q_proj.weight"], HEADS)',
        'q = w[at + "attention.q_proj.weight"]',
        parameter=_KERNELS,
        at="even = x[|odd = x[",
    ),
    Change(
        "functional",
        "positions from one",
        "torch.arange(x.shape[1])[:, None] * rate",
        "torch.arange(1, x.shape[1] + 1)[:, None] * rate * 1.1",
    ),
    Change(
        "functional",
        "another base",
        "base=10000.0",
        "base=500000.0",
        at="rate = base|c = torch.cos(|s = torch.sin(",
    ),
    Change(
        "functional",
        "rotated the other way",
        "[even * c - odd * s, even * s + odd * c]",
        "[even * c + odd * s, odd * c - even * s]",
    ),
    Change(
        "functional",
        "groups of queries in another order",
        "q.reshape(b, t, GROUPS, HEADS // GROUPS, w)",
        "q.reshape(b, t, HEADS // GROUPS, GROUPS, w).transpose(2, 3)",
        at="HEADS // GROUPS, GROUPS, w)|btgrw,bsgw",
    ),
    Change("functional", "mask one late", ".triu(1)", ".triu(2)"),
    Change("functional", "no scale", " * w**-0.5", ""),
    Change(
        "functional",
        "epsilon outside",
        "keepdim=True) + eps)",
        "keepdim=True)) + eps * 1e3",
    ),
    Change(
        "functional",
        "norm by the mean",
        "torch.mean(x * x, dim=-1, keepdim=True)",
        "torch.var(x, dim=-1, keepdim=True, unbiased=False)",
    ),
    Change(
        "functional",
        "gate and up exchanged",
        "gate, up = (x @ p",
        "up, gate = (x @ p",
        at="chunk(2, -1)",
    ),
    Change(
        "functional",
        "no residual",
        "x = x + feed(",
        "x = feed(",
        reference="x + self.down_proj",
    ),
    Change(
        "functional",
        "square kernel is not transposed",
        'w[at + "attention.o_proj.weight"].t().clone()',
        'w[at + "attention.o_proj.weight"].clone()',
        parameter="layers.0.wo|layers.1.wo",
    ),
]
