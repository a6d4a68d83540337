"""Means of colours: the same numbers, or multiples of them, in another order."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F

from roundoff.compare.judging.explain import EarlierSteps, Sides
from roundoff.compare.ports.port_comparison import compare_port

MEANS = (0.485, 0.456, 0.406)
SPREADS = (0.229, 0.224, 0.225)


def drawn(*shape, seed):
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


WEIGHTS = {"kernel": drawn(5, 3, 3, 3, seed=1)}
PICTURES = (drawn(2, 6, 6, 3, seed=2).abs() * 90).clamp(max=255).round()


def reference(m, x):
    x = x.permute(0, 3, 1, 2) / 255
    means = torch.tensor(MEANS).view(3, 1, 1)
    x = (x - means) / torch.tensor(SPREADS).view(3, 1, 1)
    return F.conv2d(x, m.kernel).relu().mean((2, 3))


def port(m, x, means, scale):
    """Blue first, values up to 255 or to 1."""
    x = x.flip(3) / scale
    means = torch.tensor([number * 255 / scale for number in means])
    spreads = torch.tensor([number * 255 / scale for number in reversed(SPREADS)])
    x = (x - means) / spreads
    return F.conv2d(x.permute(0, 3, 1, 2), m.kernel.flip(1)).relu().mean((2, 3))


@pytest.mark.parametrize("scale", [1, 255])
@pytest.mark.parametrize("is_right", [True, False])
def test_means_in_another_order_are_named(program, step_of, scale, is_right):
    means = tuple(reversed(MEANS)) if is_right else MEANS
    theirs = program(lambda m, x: port(m, x, means, scale), **WEIGHTS)
    sides = Sides(
        step_of(program(reference, **WEIGHTS), PICTURES), step_of(theirs, PICTURES)
    )
    rows = [r for r in compare_port(sides, EarlierSteps()) if r.cause == "own"]
    assert bool(rows) != is_right
    for row in rows:
        first = MEANS[-1] * 255 / scale
        assert f"in another order: with [{first:.6g}, " in row.evidence
