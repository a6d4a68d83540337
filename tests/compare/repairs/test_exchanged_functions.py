"""An activation and a convolution, both written out, the wrong way round."""

from __future__ import annotations

import math

import torch
import torch.nn.functional as F


def drawn(*shape, seed):
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


LEAVES = {
    "a": drawn(5, 6, seed=1),
    "k": drawn(6, 1, 3, seed=2),
    "b": drawn(6, seed=3),
    "c": drawn(6, 2, seed=4),
}
X = drawn(4, 7, 5, seed=5)
#: Of plain functions nobody knows which one a line belongs to.
LINES = (
    "h = taps(m, gelu(x @ m.a))",
    "return 0.5 * x * (1.0 + torch.erf(x / math.sqrt(2.0)))",
)


def reference(m, x):
    h = (x @ m.a).transpose(1, 2)
    h = F.gelu(F.conv1d(h, m.k, m.b, padding=1, groups=6))
    return (h.transpose(1, 2) @ m.c).square().mean()


def gelu(x):
    return 0.5 * x * (1.0 + torch.erf(x / math.sqrt(2.0)))


def taps(m, x):
    wide = F.pad(x, (0, 0, 1, 1))
    h = sum(wide[:, i : i + 7] * m.k[:, 0, i] for i in range(3))
    return h + m.b


def port(m, x):
    h = gelu(taps(m, x @ m.a))
    return ((h @ m.c) ** 2).sum() / h[..., :2].numel()


def exchanged(m, x):
    h = taps(m, gelu(x @ m.a))
    return ((h @ m.c) ** 2).sum() / h[..., :2].numel()


def test_the_port_is_right(at_fault):
    assert not at_fault(reference, port, LEAVES, X)


def test_the_first_of_two_functions_is_named(at_fault, blamed_text):
    [row] = at_fault(reference, exchanged, LEAVES, X)
    assert "the other way round both give" in row.evidence
    assert blamed_text(row) in LINES


def with_context(m, x):
    h = F.elu(x @ m.a)
    return (F.elu(h + x @ m.a @ m.d) @ m.c).square().mean()


def elu(x):
    return torch.where(x > 0, x, torch.exp(torch.clamp(x, max=0.0)) - 1.0)


def layer(x, context=None):
    if context is not None:
        x = x + context
    return elu(x)


def layer_of_context_late(x, context=None):
    h = elu(x)
    if context is not None:
        h = h + context
    return h


def right_order(m, x):
    h = layer(layer(x @ m.a), x @ m.a @ m.d)
    return (h @ m.c).square().mean()


def added_late(m, x):
    h = layer_of_context_late(layer_of_context_late(x @ m.a), x @ m.a @ m.d)
    return (h @ m.c).square().mean()


def test_a_line_that_is_right_in_another_layer_is_named_where_the_other_function_stands(
    at_fault, blamed_text
):
    leaves = {**LEAVES, "d": drawn(6, 6, seed=6)}
    assert not at_fault(with_context, right_order, leaves, X)
    [row] = at_fault(with_context, added_late, leaves, X)
    assert "it stands before add" in row.evidence
    assert blamed_text(row) == "h = elu(x)"


def with_gate(m, x):
    h = F.layer_norm(x @ m.a, (6,), m.b, m.b)
    gate = torch.sigmoid(h.mean(1, keepdim=True) @ m.d)
    return (h * gate @ m.c).square().mean()


def norm(m, x):
    h = x - x.mean(-1, keepdim=True)
    h = h * torch.rsqrt(h.square().mean(-1, keepdim=True) + 1e-5)
    return m.b * h + m.b


def gated(m, x):
    return x * torch.sigmoid(x.mean(1)[:, None] @ m.d)


def norm_then_gate(m, x):
    h = norm(m, x @ m.a)
    h = gated(m, h)
    return (h @ m.c).square().mean()


def gate_then_norm(m, x):
    h = gated(m, x @ m.a)
    h = norm(m, h)
    return (h @ m.c).square().mean()


def test_a_gate_that_reads_a_mean_stands_before_the_norm(at_fault, blamed_text):
    leaves = {**LEAVES, "d": drawn(6, 6, seed=6)}
    assert not at_fault(with_gate, norm_then_gate, leaves, X)
    [row] = at_fault(with_gate, gate_then_norm, leaves, X)
    assert "the other way round both give" in row.evidence
    assert blamed_text(row) in (
        "return x * torch.sigmoid(x.mean(1)[:, None] @ m.d)",
        "h = gated(m, x @ m.a)",
    )
