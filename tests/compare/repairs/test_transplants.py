"""The value after which a port is right again bounds the fault; what is behind it is named.

The network is none of the bank of ports: two gated layers and a normalised sum.
"""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F

from roundoff.compare.judging.explain import EarlierSteps, Sides
from roundoff.compare.ports.port_comparison import compare_port


def drawn(*shape, seed):
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


LEAVES = {
    "one": drawn(8, 8, seed=1),
    "two": drawn(8, 8, seed=2),
    "three": drawn(8, 8, seed=3),
    "bias": drawn(8, seed=4),
    "out": drawn(6, 8, seed=5),
}
X = drawn(4, 5, 8, seed=6)


def layer(m, x):
    gate = torch.sigmoid(F.linear(x, m.one, m.bias))
    return x + gate * torch.tanh(F.linear(x, m.two)) * 0.5


def reference(m, x):
    for _ in range(2):
        x = layer(m, x)
    x = F.softmax(F.linear(x, m.three), -1)
    return F.linear(x, m.out)


def port_layer(m, x, fault):
    product = x @ m.one.t()
    raised = product if fault == "bias" else product + m.bias
    gate = 1 / (1 + torch.exp(-raised))
    value = x @ m.two.t()
    squashed = value / (1 + value.abs()) if fault == "squash" else torch.tanh(value)
    half = squashed if fault == "half" else squashed * 0.5
    return x + gate * half


def port(m, x, fault=""):
    for _ in range(2):
        x = port_layer(m, x, fault)
    x = x @ m.three.t()
    x = torch.exp(x)
    axis = 1 if fault == "axis" else -1
    x = x / x.sum(axis, keepdim=True)
    return x @ m.out.t()


def named(program, step_of, fault, leaves=LEAVES):
    sides = Sides(
        step_of(program(reference, **LEAVES), X, tensors=True),
        step_of(program(lambda m, x: port(m, x, fault), **leaves), X, tensors=True),
    )
    rows = compare_port(sides, EarlierSteps())
    return [row for row in rows if row.cause == "own"]


def test_the_port_is_right(program, step_of):
    assert not named(program, step_of, "")


@pytest.mark.parametrize(
    ("fault", "operators"),
    [
        ("bias", {"mm", "matmul", "_unsafe_view", "view"}),
        ("squash", {"abs", "add", "div"}),
        ("half", {"mul"}),
        ("axis", {"sum"}),
    ],
)
def test_what_is_behind_the_transplant_is_named(program, step_of, fault, operators):
    """In both turns of the loop the same is wrong: one of them is named."""
    [row] = named(program, step_of, fault)
    assert row.operator.rstrip("_0123456789#") in operators, (
        row.operator,
        row.evidence,
    )
