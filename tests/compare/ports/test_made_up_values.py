"""What two programs may take to be run again on made-up values."""

from __future__ import annotations

import pytest
import torch

from roundoff.compare.ports import made_up_values
from roundoff.compare.ports.made_up_values import on_made_up_values
from roundoff.compare.records.recorded_rows import elements_of_pass

X = torch.randn(4, 100, generator=torch.Generator().manual_seed(1))
WEIGHT = torch.randn(50, generator=torch.Generator().manual_seed(2))


def in_windows(m, x):
    """51 windows of 50 numbers each, which are views, and their products with a kernel."""
    return torch.mv(x.unfold(1, 50, 1)[0], m.weight).tanh()


#: The numbers it is given, the kernel, the products and their hyperbolic tangents.
HELD = 4 * 100 + 50 + 51 + 51


@pytest.fixture
def sides(sides_of, program):
    net = program(in_windows, weight=WEIGHT)
    return sides_of(net, program(in_windows, weight=WEIGHT), X, tensors=False)


def test_views_take_no_memory(sides):
    assert elements_of_pass(sides.reference.step.rows) == HELD


@pytest.mark.parametrize(("most", "is_run"), [(2 * HELD, True), (2 * HELD - 1, False)])
def test_programs_are_run_again_by_what_they_take(sides, monkeypatch, most, is_run):
    monkeypatch.setattr(made_up_values, "MOST_ELEMENTS", most)
    assert (on_made_up_values(sides) is not None) == is_run


#: Another view of what a program is given, made before it runs.
TURNED = X.t()


def beside_a_view(m, x):
    return (x @ TURNED).tanh() * m.weight[:4]


def test_a_view_from_before_is_given_as_well(sides_of, program):
    nets = [program(beside_a_view, weight=WEIGHT) for _ in range(2)]
    sides = sides_of(*nets, X, tensors=False)
    assert on_made_up_values(sides) is not None
