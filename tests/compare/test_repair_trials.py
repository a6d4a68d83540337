"""Small edits are tried where a port parts from its reference: the edited call is named.

The network is none of the bank of ports: a gate over a normalised sequence, pooled.
"""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F

from roundoff.compare.explain import EarlierSteps, Sides
from roundoff.compare.port_comparison import compare_port


def drawn(*shape, seed):
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


LEAVES = {
    "scale": drawn(12, seed=1).abs() + 0.5,
    "gate": drawn(10, 12, seed=2),
    "value": drawn(10, 12, seed=3),
    "out": drawn(5, 10, seed=4),
}
#: The port's leaves: matrices the other way round, gate and value in one.
OTHERS = {
    "gain": LEAVES["scale"],
    "both": torch.cat([LEAVES["gate"], LEAVES["value"]]).t().contiguous(),
    "last": LEAVES["out"].t().contiguous(),
}
X = 0.1 * drawn(3, 7, 12, seed=5)


def reference(m, x):
    x = F.layer_norm(x, (12,), m.scale, None, 1e-5)
    x = torch.sigmoid(F.linear(x, m.gate)) * F.linear(x, m.value)
    return F.linear(F.gelu(x).mean(1), m.out)


def port(
    m,
    x,
    *,
    eps=1e-5,
    halves=(0, 1),
    squash=torch.sigmoid,
):
    centered = x - x.mean(-1, keepdim=True)
    variance = (centered * centered).mean(-1, keepdim=True)
    x = centered * torch.rsqrt(variance + eps) * m.gain
    both = torch.einsum("btd,dk->bkt", x, m.both).unflatten(1, (2, 10))
    gate = both.select(1, halves[0])
    x = squash(gate) * both.select(1, halves[1])
    x = F.gelu(x).sum(-1) / 7
    return torch.mm(x, m.last)


def compared(program, step_of, ours, theirs, *, tensors, leaves=OTHERS):
    sides = Sides(
        step_of(program(ours, **LEAVES), X, tensors=tensors),
        step_of(program(theirs, **leaves), X, tensors=tensors),
    )
    rows = compare_port(sides, EarlierSteps())
    return [row for row in rows if row.cause == "own"]


@pytest.mark.parametrize("tensors", [True, False])
def test_the_port_is_right(program, step_of, tensors):
    assert not compared(program, step_of, reference, port, tensors=tensors)


@pytest.mark.parametrize("tensors", [True, False])
@pytest.mark.parametrize(
    ("wrong", "operator", "words"),
    [
        ({"eps": 1e-3}, "add", "1e-05"),
        ({"squash": torch.tanh}, "tanh", "sigmoid"),
        ({"halves": (1, 1)}, "select", "at 0"),
    ],
    ids=lambda value: "" if isinstance(value, str) else str(next(iter(value))),
)
def test_the_edited_call_is_named(program, step_of, tensors, wrong, operator, words):
    [row] = compared(
        program,
        step_of,
        reference,
        lambda m, x: port(m, x, **wrong),
        tensors=tensors,
    )
    assert row.operator == operator
    assert words in row.evidence


@pytest.mark.parametrize("tensors", [True, False])
def test_a_parameter_in_another_order_is_no_fault_of_the_program(
    program, step_of, tensors
):
    leaves = OTHERS | {"gain": LEAVES["scale"].flip(0)}
    [row] = compared(program, step_of, reference, port, tensors=tensors, leaves=leaves)
    assert row.name == "gain"
