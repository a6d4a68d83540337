"""What is multiplied with a weight stands in another order than the weight is meant for."""

from __future__ import annotations

from pathlib import Path

import torch
import torch.nn.functional as F

from roundoff.compare.judging.explain import EarlierSteps, Sides
from roundoff.compare.ports.port_comparison import compare_port


def drawn(*shape, seed):
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


LEAVES = {"patch": drawn(6, 3, 2, 2, seed=1), "head": drawn(4, 6, seed=2)}
X = drawn(5, 3, 8, 8, seed=3)


def reference(m, x):
    x = F.conv2d(x, m.patch, stride=2).flatten(2).mean(2)
    return F.linear(torch.tanh(x), m.head)


def port(m, x, order):
    x = x.reshape(5, 3, 4, 2, 4, 2)
    patches = x.permute(0, 2, 4, *order)
    x = patches.reshape(5, 16, 12) @ m.kernel
    return torch.tanh(x.mean(1)) @ m.head.t()


def named(program, step_of, order):
    leaves = {"kernel": LEAVES["patch"].flatten(1).t(), "head": LEAVES["head"]}
    ours = program(reference, **LEAVES)
    theirs = program(lambda m, x: port(m, x, order), **leaves)
    sides = Sides(step_of(ours, X, tensors=True), step_of(theirs, X, tensors=True))
    return [row for row in compare_port(sides, EarlierSteps()) if row.cause == "own"]


def test_the_port_is_right(program, step_of):
    assert not named(program, step_of, (1, 3, 5))


def test_the_weight_is_named_with_the_line_that_turns_the_patches(program, step_of):
    [row] = named(program, step_of, (3, 5, 1))
    line = int(row.blamed_line.rpartition(":")[2])
    assert "x.permute(0, 2, 4" in Path(__file__).read_text().splitlines()[line - 1]
    assert row.name == "kernel"
    assert "multiplied with into another order" in row.evidence


PAIRS = {"w": drawn(8, 3, 2, 2, seed=4), "b": drawn(8, seed=5), "head": LEAVES["head"]}
#: Both halves one after the other, of what the reference has in turns.
HALVES = torch.arange(8).reshape(4, 2).t().flatten()


def in_turns(m, x):
    x = F.conv2d(x, m.w, m.b, stride=2).flatten(2).mean(2)
    return F.linear(F.pad(torch.tanh(x[:, 0::2]) * x[:, 1::2], (0, 2)), m.head)


def in_halves(m, x):
    x = F.conv2d(x, m.kernel, stride=2) + m.bias[:, None, None]
    left, right = x.flatten(2).mean(2).chunk(2, 1)
    return F.pad(torch.tanh(left) * right, (0, 2)) @ m.head.t()


def test_a_bias_that_is_not_in_the_order_of_its_weight_is_named(program, step_of):
    def own_rows(bias):
        leaves = {"kernel": PAIRS["w"][HALVES], "bias": bias, "head": PAIRS["head"]}
        ours, theirs = program(in_turns, **PAIRS), program(in_halves, **leaves)
        sides = Sides(step_of(ours, X, tensors=True), step_of(theirs, X, tensors=True))
        return [
            row for row in compare_port(sides, EarlierSteps()) if row.cause == "own"
        ]

    assert not own_rows(PAIRS["b"][HALVES])
    [row] = own_rows(PAIRS["b"])
    assert row.name == "bias", row.evidence


STATISTICS = {"scale": drawn(6, seed=6).abs() + 1, "shift": drawn(6, seed=7)}


def of_the_last(m, x):
    h = (x - m.shift) / m.scale
    h = torch.tanh(h)[..., -2:]
    return h * m.scale[-2:] + m.shift[-2:]


def of_the_first(m, x):
    h = (x - m.shift) / m.scale
    h = torch.tanh(h)[:, -2:]
    return h * m.scale[-2:] + m.shift[:2]


def test_another_part_of_a_parameter_that_is_right_elsewhere(at_fault, blamed_text):
    [row] = at_fault(of_the_last, of_the_first, STATISTICS, drawn(7, 6, seed=8))
    assert "it takes another part of shift than" in row.evidence
    assert blamed_text(row) == "return h * m.scale[-2:] + m.shift[:2]"
