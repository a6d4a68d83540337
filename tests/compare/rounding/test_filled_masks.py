"""Scores that a mask fills with -1e9: what it leaves counts, and not the mask alone."""

from __future__ import annotations

import pytest
import torch

import roundoff
from roundoff.compare.rounding.distance import beside_fill

NEVER = -1e9


def recorded(folder, keep, correction):
    generator = torch.Generator().manual_seed(0)
    table = torch.nn.Parameter(torch.randn(9, 6, generator=generator))
    hidden = torch.randn(5, 6, generator=generator)
    drawn = torch.tensor([1, 3, 4, 7, 8, 2])
    right = torch.tensor([3, 0, 1, 5, 8])
    log_q = torch.linspace(-3, -1, 9)
    with roundoff.capture(folder, keep=keep) as run:
        scores = correction(hidden @ table[drawn].T, log_q[drawn])
        scores = scores.masked_fill(drawn == right[:, None], NEVER)
        good = (hidden * table[right]).sum(1, keepdim=True)
        torch.cat([good, scores], 1).log_softmax(1)[:, 0].sum().neg().backward()
        run.step()
    return folder


def taken_off(scores, log_q):
    return scores - log_q


def added(scores, log_q):
    return scores + log_q


def in_another_order(scores, log_q):
    return -(log_q - scores)


@pytest.mark.parametrize("keep", ["tensors", "stats"])
def test_what_a_mask_leaves_is_compared(keep, tmp_path):
    right = recorded(tmp_path / "right", keep, taken_off)
    found = roundoff.compare(
        reference=right, candidate=recorded(tmp_path / "wrong", keep, added)
    )
    assert not found.agrees
    assert found.culprits(1)[0].operator == "add"


@pytest.mark.parametrize("keep", ["tensors", "stats"])
def test_masked_scores_that_agree(keep, tmp_path):
    right = recorded(tmp_path / "right", keep, taken_off)
    other = recorded(tmp_path / "other", keep, in_another_order)
    assert roundoff.compare(reference=right, candidate=other).agrees


def test_numbers_that_are_only_large_are_no_mask():
    large = torch.tensor([-2e9, -1e9, 5.0])
    assert beside_fill(large, large + torch.tensor([0.0, 0.0, 1.0])) is None
    filled = torch.tensor([NEVER, 2.0, NEVER])
    assert beside_fill(filled, torch.tensor([NEVER, NEVER, 2.0])) is None
    assert beside_fill(filled, torch.tensor([NEVER, 3.0, NEVER])).error == 0.5
