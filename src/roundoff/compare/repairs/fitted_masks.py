"""Which elements of a mask would have to be the other way for a wrong value to be right?

A mask that hides too much or too little leaves no trace in what is computed of it: none of
these values has an equal in the reference. Where it is known what a value behind it should
be, each element is tried the other way, and those are kept that bring the value nearer.
"""

from __future__ import annotations

from torch import Tensor

from roundoff.compare.blame.blamed import Blamed
from roundoff.compare.records.recorded_calls import CannotRun
from roundoff.compare.repairs.goals import apart
from roundoff.compare.repairs.rejoins import Rejoin
from roundoff.compare.repairs.trials import BUDGET, Trials
from roundoff.compare.values.value_flow import Flow, Value
from roundoff.compare.values.value_regions import Sides

#: Elements of a mask that is tried: each takes a run.
MOST_ELEMENTS = 256
#: Masks of a region that are tried.
MOST_MASKS = 4
#: A row of which several elements are wrong is right after the last of them alone.
ROUNDS = 2


def fitted_mask(sides: Sides, trials: Trials, rejoin: Rejoin) -> Blamed | None:
    """Return a mask with which a value is right once some elements are the other way.

    Args:
        sides: both programs.
        trials: of what the value is made of.
        rejoin: the value, and what it should be, element by element.
    """
    if rejoin.value.key not in trials.goal.held:
        return None
    flow = sides.candidate
    for mask in _masks_read(flow, rejoin)[:MOST_MASKS]:
        held = flow.tensor(mask.key)
        if held is None or held.numel() > MOST_ELEMENTS:
            continue
        trials.left = BUDGET
        fitted, count = _Fit(trials, rejoin, mask).of(held)
        if count and trials.outcome({}, {mask.key: fitted})[0]:
            words = (
                f"with {count} of its {held.numel()} elements the other way all that is "
                "computed of it is right"
            )
            return Blamed(mask, rejoin.twin, words, is_operator=True)
    return None


def _masks_read(flow: Flow, rejoin: Rejoin) -> list[Value]:
    """Return the masks by which a region chooses numbers, before they are broadcast."""
    masks = {}
    for key in rejoin.region | {rejoin.value.key}:
        reader = flow.values[key]
        if not reader.is_number or reader.inner:
            continue
        for source in reader.inputs:
            mask = flow.behind(source) if source in flow.values else None
            if mask is not None and mask.row.dtype == "bool" and not mask.inner:
                masks[mask.key] = mask
    return sorted(masks.values(), key=lambda mask: mask.order)


class _Fit:
    """The search for the elements of one mask that are wrong."""

    def __init__(self, trials: Trials, rejoin: Rejoin, mask: Value) -> None:
        self._trials = trials
        self._rejoin = rejoin
        self._mask = mask

    def of(self, held: Tensor) -> tuple[Tensor, int]:
        """Return the mask that comes nearest, and how many of its elements differ."""
        best = held.clone().reshape(-1)
        off = self._off(best.reshape(held.shape))
        for _ in range(ROUNDS):
            before = off
            for place in range(best.numel()):
                other = best.clone()
                other[place] = ~other[place]
                distance = self._off(other.reshape(held.shape))
                if distance < off:
                    best = other
                    off = distance
            if not off < before:
                break
        fitted = best.reshape(held.shape)
        return fitted, int((fitted != held).sum())

    def _off(self, mask: Tensor) -> float:
        """Return how far the value is from what it should be."""
        key = self._rejoin.value.key
        flow = self._trials.program.flow
        present = flow.tensor(key)
        try:
            again = self._trials.program.again(
                {}, {self._mask.key: mask}, self._trials.only
            )
            for row, tensor in again:
                if row.record == key:
                    present = tensor
        except CannotRun:
            return float("inf")
        if present is None:
            return float("inf")
        distance = apart(self._rejoin.held, present)
        return distance if distance == distance else float("inf")
