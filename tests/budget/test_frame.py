"""Orthogonal signs: unbiased, exact once all directions are seen, as varied as said."""

from __future__ import annotations

import pytest
import torch

from roundoff.budget.frame import MOST_DIRECTIONS, Frame, draw_frame
from roundoff.budget.samples import Division


def _drawn(shape, division, count, seed=0):
    generator = torch.Generator().manual_seed(seed)
    target = torch.zeros(shape, dtype=torch.float64)
    (vectors,) = draw_frame([(0, target)], division, count, generator)
    return division_first(vectors, division)


def division_first(vectors, division):
    """``(K, samples, elements)``."""
    axis, _ = division.axes[0]
    moved = vectors.movedim(axis + 1, 1)
    return moved.reshape(len(vectors), division.samples, -1)


DIVISIONS = [
    ((4, 6), Division("rows", 4, ((0, 1),))),
    ((8, 3), Division("rows", 4, ((0, 2),))),
    ((5, 3), Division("rows", 3, ((1, 1),))),
    ((7,), Division("rows", 1, ((0, 1),))),
]


@pytest.mark.parametrize(("shape", "division"), DIVISIONS)
def test_all_directions_of_a_sample_are_seen_once(shape, division):
    """Sum over K of v v^T is K times the identity in each sample, and over them all."""
    frame = Frame.of(division.samples, [torch.zeros(shape)])
    vectors = _drawn(shape, division, frame.directions)
    assert set(vectors.unique().tolist()) == {-1.0, 1.0}
    elements = vectors.shape[2]
    gram = torch.einsum("ksi,ksj->sij", vectors, vectors) / frame.directions
    assert torch.equal(gram, torch.eye(elements).double().expand_as(gram))
    assert frame.left(frame.directions) == 0.0
    count = frame.samples * frame.directions
    flat = _drawn(shape, division, count).flatten(1)
    assert torch.equal(flat.T @ flat / count, torch.eye(flat.shape[1]).double())
    assert frame.left_mixed(count) == 0.0


@pytest.mark.parametrize("count", [1, 3, 6, 12])
def test_what_is_left_of_the_variance_is_what_is_said(count):
    """Of v^T A v for one A: independent signs have 2 sum of A_ij^2, i != j (over K)."""
    division = Division("rows", 2, ((0, 1),))
    draws = 2000
    matrix = torch.arange(36.0).view(6, 6).double().sin()
    matrix = matrix + matrix.T
    vectors = torch.stack(
        [_drawn((2, 6), division, count, seed) for seed in range(draws)]
    )
    first = vectors[:, :, 0]
    powers = torch.einsum("dki,ij,dkj->dk", first, matrix, first).mean(1)
    off_diagonal = matrix - matrix.diagonal().diag()
    alone = 2 * float(off_diagonal.square().sum()) / count
    left = Frame(2, 8).left(count)
    # the standard error of a variance is sqrt(2 / draws) of it, and its tails are short
    assert float(powers.var()) == pytest.approx(
        left * alone, rel=5 * (2 / draws) ** 0.5
    )
    error = (left * alone / draws) ** 0.5
    assert abs(float(powers.mean() - matrix.trace())) <= 4 * error


def test_tensors_of_one_sample_share_its_directions():
    generator = torch.Generator().manual_seed(0)
    targets = [(0, torch.zeros(2, 3)), (1, torch.zeros(2))]
    division = Division("rows", 2, ((0, 1), (0, 1)))
    vectors = draw_frame(targets, division, 4, generator)
    joined = torch.cat([vectors[0], vectors[1][:, :, None]], dim=2)
    gram = torch.einsum("ksi,ksj->sij", joined, joined) / 4
    assert torch.equal(gram, torch.eye(4).expand_as(gram))


def test_large_targets_have_independent_signs():
    frame = Frame.of(2, [torch.zeros(2, MOST_DIRECTIONS + 1)])
    assert not frame.is_small
    assert frame.left(64) == frame.left_mixed(64) == 1.0
