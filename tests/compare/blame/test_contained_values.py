"""What one program joins and cuts otherwise: its values are in those of the other."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from roundoff.compare.blame.contained_values import _Pool
from roundoff.compare.judging.explain import EarlierSteps, Sides
from roundoff.compare.ports.port_comparison import compare_port


def drawn(*shape, seed):
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


LEAVES = {"box": drawn(6, 4, seed=1), "kind": drawn(6, 3, seed=2)}
# the columns of both in another order, as a head that computes all at once has them
JOINED = {
    "head": torch.cat([LEAVES["box"], LEAVES["kind"]], 1)[:, [0, 4, 1, 5, 2, 6, 3]]
}
X = drawn(40, 6, seed=3)


def reference(m, x):
    box = torch.sigmoid(x @ m.box)
    centre = box[:, :2] * 2 - 0.5 + x[:, :2]
    size = (box[:, 2:] * 2) ** 2
    return torch.cat([centre, size, torch.sigmoid(x @ m.kind)], 1)


def port(m, x, fault):
    y = torch.sigmoid(x @ m.head)
    left = 2 * y[:, 0] - 0.5
    if fault == "another curve":
        left = torch.tanh(left) * torch.cos(x[:, 0])
    else:
        left = left + x[:, 0]
    top = 2 * y[:, 2] - 0.5 + x[:, 1]
    wide = 2 * y[:, 4]
    if fault == "another width":
        wide = torch.tanh(wide) * 3
    else:
        wide = wide**2
    high = (2 * y[:, 6]) ** 2
    rest = [y[:, 1], y[:, 3], y[:, 5]]
    return torch.stack([left, top, wide, high, *rest], 1)


def named(program, step_of, fault):
    ours = program(reference, **LEAVES)
    theirs = program(lambda m, x: port(m, x, fault), **JOINED)
    sides = Sides(step_of(ours, X, tensors=True), step_of(theirs, X, tensors=True))
    return [row for row in compare_port(sides, EarlierSteps()) if row.cause == "own"]


@pytest.mark.parametrize(
    ("fault", "line", "source"),
    [
        ("another curve", "torch.tanh(left)", "in sub of /sub"),
        ("another width", "wide = torch.tanh(wide) * 3", "in mul of /mul"),
    ],
)
def test_the_first_call_after_what_is_contained_is_named(
    program, step_of, fault, line, source
):
    [row] = named(program, step_of, fault)
    text = Path(__file__).read_text().splitlines()
    assert line in text[int(row.blamed_line.rpartition(":")[2]) - 1], row.evidence
    assert source in row.evidence


def test_the_port_is_right(program, step_of):
    assert not named(program, step_of, "")


def test_one_element_is_among_others_by_chance():
    pool = _Pool((), torch.linspace(0.0, 1.0, 100, dtype=torch.float64), 1e-6)
    assert not pool.contains(pool.elements[7:8])
    assert pool.contains(pool.elements[7:40])


def test_where_elements_are_dense_others_are_as_near_by_chance():
    dense = torch.linspace(-0.02, 0.02, 10_000, dtype=torch.float64)
    sparse = torch.linspace(1.0, 1000.0, 10_000, dtype=torch.float64)
    pool = _Pool((), torch.cat([dense, sparse]), 1e-3)
    wanted = torch.rand(60, generator=torch.Generator().manual_seed(4)) * 0.03 - 0.015
    assert not pool.contains(wanted)
