"""A parameter whose parts change places, or the code that joins and cuts parts: both are said."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
import torch.nn.functional as F

from roundoff.compare.judging.explain import EarlierSteps, Sides
from roundoff.compare.ports.port_comparison import compare_port


def drawn(*shape, seed):
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


LEAVES = {
    "first": drawn(12, 6, seed=1),
    "second": drawn(10, 12, seed=2),
    "last": drawn(4, 5, seed=3),
}
X = drawn(9, 3, seed=4)


def reference(m, x):
    e = torch.cat([torch.cos(x), torch.sin(x)], 1)
    film = F.linear(torch.tanh(F.linear(e, m.first)), m.second)
    scale, shift = film.chunk(2, 1)
    return F.linear(torch.relu(scale * x.sum(1, keepdim=True) + shift), m.last)


def port(m, x, fault):
    parts = [torch.cos(x), torch.sin(x)]
    if fault == "joined the other way round":
        parts.reverse()
    e = torch.cat(parts, -1)
    film = torch.tanh(e @ m.first) @ m.second
    if fault == "cut the other way round":
        shift, scale = film[:, :5], film[:, 5:]
    else:
        scale, shift = film[:, :5], film[:, 5:]
    return torch.relu(x.sum(1, keepdim=True) * scale + shift) @ m.last


def named(program, step_of, fault, second=LEAVES["second"]):
    leaves = {"first": LEAVES["first"], "second": second, "last": LEAVES["last"]}
    leaves = {name: leaf.t().contiguous() for name, leaf in leaves.items()}
    ours = program(reference, **LEAVES)
    theirs = program(lambda m, x: port(m, x, fault), **leaves)
    sides = Sides(step_of(ours, X, tensors=True), step_of(theirs, X, tensors=True))
    return [row for row in compare_port(sides, EarlierSteps()) if row.cause == "own"]


def line_of(row):
    text = Path(__file__).read_text().splitlines()
    return text[int(row.blamed_line.rpartition(":")[2]) - 1]


@pytest.mark.parametrize(
    ("fault", "name", "line"),
    [
        ("joined the other way round", "first", "torch.cat(parts"),
        ("cut the other way round", "second", "shift, scale = film"),
    ],
)
def test_the_parameter_is_named_with_the_line(program, step_of, fault, name, line):
    [row] = named(program, step_of, fault)
    assert line in line_of(row), row.evidence
    assert row.name in (name, None), row.evidence


def test_a_parameter_whose_parts_changed_places_is_named(program, step_of):
    gate, up = LEAVES["second"].chunk(2)
    [row] = named(program, step_of, "", torch.cat([up, gate]))
    assert row.name == "second"
    assert "film" in line_of(row)


def test_the_port_is_right(program, step_of):
    assert not named(program, step_of, "")
