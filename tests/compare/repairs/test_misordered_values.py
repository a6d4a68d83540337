"""Values that stand in another order than the reference's: what reads them so is named."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
import torch.nn.functional as F

from roundoff.compare.judging.explain import EarlierSteps, Sides
from roundoff.compare.ports.port_comparison import compare_port

DIM = 6
PLACES = 5


def drawn(*shape, seed):
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


LEAVES = {
    name: drawn(DIM, DIM, seed=seed)
    for seed, name in enumerate(("query", "key", "value", "gate", "leave"), 1)
}
X = drawn(2, PLACES, PLACES, DIM, seed=9)


def reference(m, x):
    turned = F.layer_norm(x, (DIM,)).transpose(1, 2)
    q, k, v = (F.linear(turned, w) for w in (m.query, m.key, m.value))
    y = F.softmax(q @ k.transpose(-1, -2), -1) @ v
    y = F.linear(torch.sigmoid(F.linear(turned, m.gate)) * y, m.leave)
    return torch.tanh(x + y.transpose(1, 2))


def attended(m, x):
    q, k, v = x @ m.query.t(), x @ m.key.t(), x @ m.value.t()
    scores = torch.einsum("...qd,...kd->...qk", q, k)
    y = torch.einsum("...qk,...kd->...qd", scores.softmax(-1), v)
    return (y * torch.sigmoid(x @ m.gate.t())) @ m.leave.t()


def port(m, x, fault):
    h = x - x.mean(-1, keepdim=True)
    h = h * torch.rsqrt(h.square().mean(-1, keepdim=True) + 1e-5)
    if fault == "not turned":
        y = attended(m, h)
    else:
        y = attended(m, h.swapaxes(1, 2))
    if fault == "not turned back":
        z = y + x
    else:
        z = y.swapaxes(1, 2) + x
    return z.tanh()


def named(program, step_of, fault):
    ours = program(reference, **LEAVES)
    theirs = program(lambda m, x: port(m, x, fault), **LEAVES)
    sides = Sides(step_of(ours, X), step_of(theirs, X))
    return [row for row in compare_port(sides, EarlierSteps()) if row.cause == "own"]


def test_the_port_is_right(program, step_of):
    assert not named(program, step_of, "")


@pytest.mark.parametrize(
    ("fault", "text"),
    [("not turned back", "z = y + x"), ("not turned", "y = attended(m, h)")],
)
def test_what_reads_values_in_another_order_is_named(program, step_of, fault, text):
    [row] = named(program, step_of, fault)
    lines = Path(__file__).read_text().splitlines()
    assert text in lines[int(row.blamed_line.rpartition(":")[2]) - 1], row.evidence
    assert "another order" in row.evidence
