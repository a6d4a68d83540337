"""Which numbers would a bias or a scale have to hold for a wrong value to be right?

A loader that folds a normalization computes the bias and the scale itself, so that they
hold nothing of the reference's, right or wrong. Where what a value lacks is one number for
each channel, or one factor, the parameter is fitted to it, and what follows runs again.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from roundoff.compare.blamed_leaves import Blamed, leaves_of
from roundoff.compare.repair_trials import BUDGET, TINY, Trials
from roundoff.compare.transplants import Rejoin
from roundoff.compare.value_regions import Sides

#: Parameters of a region that are tried.
MOST_LEAVES = 12


def fitted_leaf(sides: Sides, trials: Trials, rejoin: Rejoin) -> Blamed | None:
    """Return a parameter of one axis that makes a value right once it is fitted.

    Args:
        sides: both programs.
        trials: of what the value is made of.
        rejoin: the value, and what it should be.
    """
    present = sides.candidate.tensor(rejoin.value.key)
    if present is None or present.shape != rejoin.held.shape:
        return None
    trials.left = BUDGET
    for leaf in leaves_of(sides.candidate, sorted(rejoin.region))[:MOST_LEAVES]:
        tensor = sides.candidate.tensor(leaf.key)
        if tensor is None or tensor.dim() != 1 or leaf.key in sides.twins:
            continue
        for fitted, words in _fits(tensor, present, rejoin.held):
            if trials.outcome({}, {leaf.key: fitted})[0]:
                text = f"{leaf.row.name} is off by {words} for each of its elements"
                return Blamed(leaf, rejoin.twin, text, fitted)
    return None


def _fits(
    tensor: Tensor, present: Tensor, wanted: Tensor
) -> Iterator[tuple[Tensor, str]]:
    """Yield what a parameter may have to hold, with what it is off by."""
    for axis, size in enumerate(present.shape):
        if size != len(tensor) or size == present.numel():
            continue
        now = present.movedim(axis, 0).reshape(size, -1).to(torch.float64)
        then = wanted.movedim(axis, 0).reshape(size, -1).to(torch.float64)
        yield tensor + (then - now).mean(1).to(tensor.dtype), "a number"
        square = now.square().sum(1).clamp(min=TINY)
        yield tensor * ((now * then).sum(1) / square).to(tensor.dtype), "a factor"
