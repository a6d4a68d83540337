"""What the optimizers of two programs by different hands make of the same parameters."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from roundoff.compare.ports.port_results import (
    Results,
    gradient_limit,
    least_gradient,
    named_leaves,
    same_parameters,
)
from roundoff.compare.records.recorded_rows import RecordedRow, last_named
from roundoff.compare.records.value_sketch import in_reals
from roundoff.compare.rounding.rounding_bound import unit
from roundoff.compare.values.value_flow import Flow
from roundoff.compare.values.value_regions import Sides

#: Updates of parameters agree up to this.
UPDATE = 1e-3
_OPTIMIZER = "optimizer"


@dataclass(frozen=True, slots=True)
class _Updated:
    """A parameter of both programs, before and after the optimizer."""

    ours: tuple[RecordedRow, RecordedRow]
    theirs: tuple[RecordedRow, RecordedRow]

    @property
    def numel(self) -> int:
        """How many values the parameter has."""
        return self.ours[1].numel or 0


def updates(sides: Sides) -> Results:
    """What the optimizer adds to parameters that hold the same values."""
    limit = max(UPDATE, gradient_limit(sides))
    updated = _updated(sides)
    if not all(_are_kept(sides, each) for each in updated):
        apart = [each for each in updated if _statistics_apart(each) > limit]
        # gradients that are rounding move their values anywhere; an optimizer that
        # computes something else does so with most of the values
        if 2 * sum(e.numel for e in apart) < sum(e.numel for e in updated):
            apart = []
    else:
        apart = [each for each in updated if _updates_apart(sides, each) > limit]
    ours = [each.ours[1].record for each in apart]
    return ours, [each.theirs[1].record for each in apart], _OPTIMIZER


def _are_kept(sides: Sides, updated: _Updated) -> bool:
    """Return True where the tensors of a parameter are known, before and after."""
    ours = [sides.reference.step.tensor(row.record) for row in updated.ours]
    theirs = [sides.candidate.step.tensor(row.record) for row in updated.theirs]
    return all(tensor is not None for tensor in (*ours, *theirs))


def _updated(sides: Sides) -> list[_Updated]:
    """Return the parameters that an optimizer wrote, and whose gradient is no rounding."""
    ends = last_named(sides.reference.step.rows)
    other_ends = last_named(sides.candidate.step.rows)
    starts = named_leaves(sides.reference)
    other_starts = named_leaves(sides.candidate)
    sure = _with_gradients(sides)
    return [
        _Updated(
            (starts[name].row, ends[name]), (other_starts[other].row, other_ends[other])
        )
        for name, other in same_parameters(sides)
        if name in sure
        and name in ends
        and other in other_ends
        and _OPTIMIZER in (ends[name].phase, other_ends[other].phase)
    ]


def _with_gradients(sides: Sides) -> set[str]:
    """Return the reference's parameters whose gradients are more than rounding."""
    last = last_named(sides.reference.step.rows)
    sizes = {
        name.removesuffix(".grad"): sides.reference.values[row.record].sketch
        for name, row in last.items()
        if name.endswith(".grad")
    }
    largest = max((s.size for s in sizes.values() if s), default=0.0)
    least = least_gradient(sides) * largest
    return {n for n, s in sizes.items() if s and s.size >= least}


def _updates_apart(sides: Sides, updated: _Updated) -> float:
    """Return the relative distance of two updates, where the gradient is no rounding."""
    ours = _change(sides, sides.reference, *updated.ours)
    theirs = _change(sides, sides.candidate, *updated.theirs)
    if ours is None or theirs is None:
        return 0.0
    change = ours.values
    if len(change) != len(theirs.values) or not change.any():
        return 0.0
    apart = float((change - theirs.values).norm())
    # each that one side alone takes may be as far off as two changes are
    by_chance = 2 * math.sqrt(ours.unsure) * float(change.abs().max())
    return max(apart - by_chance, 0.0) / float(change.norm())


@dataclass(frozen=True, slots=True)
class _Change:
    """What an optimizer added to a parameter.

    Attributes:
        values: sorted, of the elements whose gradient is no rounding.
        unsure: how many of them the other side may not take.
    """

    values: Tensor
    unsure: int


def _change(
    sides: Sides, flow: Flow, start: RecordedRow, end: RecordedRow
) -> _Change | None:
    """Return what an optimizer added; None where it was not kept."""
    before = flow.step.tensor(start.record)
    after = flow.step.tensor(end.record)
    gradient = last_named(flow.step.rows).get(f"{start.name}.grad")
    slope = flow.step.tensor(gradient.record) if gradient is not None else None
    if before is None or after is None or slope is None or slope.shape != after.shape:
        return None
    size = slope.abs()
    least = least_gradient(sides) * size.max()
    sure = size > least
    unsure = (size - least).abs() <= sides.limit * size
    wide = torch.complex128 if after.is_complex() else torch.float64
    change = in_reals((after.to(wide) - before.to(wide))[sure])
    return _Change(change.reshape(-1).sort().values, int(unsure.sum()))


def _statistics_apart(updated: _Updated) -> float:
    """Return how far two updates are apart by what they do to statistics, relative to
    the larger of the two; 0 where statistics are missing, or rounding says as much.

    Smallest, largest, mean and norm of the parameter before and after: each says what
    was added to an element, or on average.
    """
    change = _change_of_statistics(*updated.ours)
    other = _change_of_statistics(*updated.theirs)
    if change is None or other is None or updated.numel != updated.theirs[1].numel:
        return 0.0
    apart = max(abs(a - b) for a, b in zip(change, other, strict=True))
    size = max(map(abs, [*change, *other]))
    # each side rounds the sum once; both may go another way
    rounding = 2 * unit(updated.ours[1].dtype) * _largest(updated.ours[1])
    return (apart - rounding) / size if apart > rounding else 0.0


def _change_of_statistics(start: RecordedRow, end: RecordedRow) -> list[float] | None:
    before = _statistics(start)
    after = _statistics(end)
    if not all(map(math.isfinite, [*before, *after])):
        return None
    return [b - a for a, b in zip(before, after, strict=True)]


def _statistics(row: RecordedRow) -> list[float]:
    """Return smallest, largest, mean and root mean square; NaN for an unknown one."""
    statistics = [row.min, row.max, row.mean, row.l2]
    values = [math.nan if value is None else value for value in statistics]
    values[-1] /= math.sqrt(row.numel or 1)
    return values


def _largest(row: RecordedRow) -> float:
    return max(abs(row.min or 0.0), abs(row.max or 0.0))
