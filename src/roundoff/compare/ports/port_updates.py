"""What the optimizers of two programs by different hands make of the same parameters."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from roundoff.compare.ports.counterparts import (
    counterparts,
    named_leaves,
    with_gradient,
)
from roundoff.compare.ports.port_results import (
    GradientPair,
    Results,
    change_of,
    gradient_limit,
    gradient_pairs,
    gradients_left,
    least_gradient,
)
from roundoff.compare.records.recorded_rows import RecordedRow, last_named
from roundoff.compare.records.value_sketch import in_reals
from roundoff.compare.rounding.rounding_bound import unit
from roundoff.compare.values.value_flow import Flow
from roundoff.compare.values.value_regions import Sides

#: Updates of parameters agree up to this.
UPDATE = 1e-3
#: Averages of parameters move as far up to this: what each moves by is rounded where it is
#: small beside the average, and what roundings add to a norm is their square.
AVERAGE = 1e-2
#: Gradients that are smaller than this share of what one surely is are taken for none, even
#: if both programs have the same: of a hundredth of the largest that is 1e-5 of it, some
#: hundred roundings of fp32, which two programs of the same calls may make alike.
LEAST_ALIKE = 1e-3
_OPTIMIZER = "optimizer"
#: The one call that is recorded of a compiled region.
_COMPILED = "compiled"

#: The row of each gradient that a backward pass leaves, by its name.
_Gradients = Mapping[str, RecordedRow]


@dataclass(frozen=True, slots=True)
class _Parameters:
    """Parameters of one program, each before and after the optimizer."""

    starts: tuple[RecordedRow, ...]
    ends: tuple[RecordedRow, ...]

    @property
    def numel(self) -> int:
        """How many values they have."""
        return sum(row.numel or 0 for row in self.ends)

    @property
    def is_updated(self) -> bool:
        """True where an optimizer writes each of them."""
        return all(row.is_call and row.phase == _OPTIMIZER for row in self.ends)

    @property
    def is_left(self) -> bool:
        """True where nothing writes any of them.

        One in the memory of another is there from the first write on.
        """
        return not any(row.is_call for row in self.ends)


@dataclass(frozen=True, slots=True)
class _Updated:
    """Parameters of both programs that hold together the same values; mostly one of each."""

    ours: _Parameters
    theirs: _Parameters


@dataclass(frozen=True, slots=True)
class LoneUpdate:
    """Parameters that the optimizer of one program changes, and the other leaves.

    Attributes:
        ours: the reference's row of the first of them, as the step ends with it.
        theirs: the candidate's.
        names: of all of them, in the candidate.
        is_lost: True where it is the reference that changes them.
    """

    ours: RecordedRow
    theirs: RecordedRow
    names: Sequence[str]
    is_lost: bool


def lone_update(sides: Sides) -> LoneUpdate | None:
    """Return the parameters that one optimizer changes, and the other leaves.

    The reference's first. Only those of which it has a gradient that is no rounding.
    """
    updated = _updated(sides)
    lost = [e for e in updated if e.ours.is_updated and e.theirs.is_left]
    extra = [e for e in updated if e.ours.is_left and e.theirs.is_updated]
    found = lost or extra
    if not found:
        return None
    names = [row.name for each in found for row in each.theirs.ends if row.name]
    [ours, theirs] = found[0].ours.ends[0], found[0].theirs.ends[0]
    return LoneUpdate(ours, theirs, names, bool(lost))


def updates(sides: Sides) -> Results:
    """What the optimizer adds to parameters that hold the same values."""
    limit = max(UPDATE, gradient_limit(sides))
    updated = _updated(sides)
    if not all(_are_kept(sides, each) for each in updated):
        apart = [each for each in updated if _statistics_apart(each) > limit]
        # gradients that are rounding move their values anywhere; an optimizer that
        # computes something else does so with most of the values
        if 2 * sum(e.ours.numel for e in apart) < sum(e.ours.numel for e in updated):
            apart = []
    else:
        slopes = (
            gradients_left(sides.reference.step.rows),
            gradients_left(sides.candidate.step.rows),
        )
        apart = [e for e in updated if _updates_apart(sides, e, slopes) > limit]
    ours = [row.record for each in apart for row in each.ours.ends]
    theirs = [row.record for each in apart for row in each.theirs.ends]
    return ours, theirs, _OPTIMIZER


def averages(sides: Sides) -> Results:
    """What a step adds to copies that get no gradient, as moving averages do.

    By how much they change: elements whose gradients are rounding go anywhere, as far.
    The optimizer writes them, or the loop.
    """
    ours: list[int] = []
    theirs: list[int] = []
    learnt = with_gradient(sides.reference), with_gradient(sides.candidate)
    ends = _starts_and_ends(sides.reference), _starts_and_ends(sides.candidate)
    # a narrow format rounds what is averaged
    allowed = max(AVERAGE, sides.limit)
    for each in counterparts(sides):
        if learnt[0].intersection(each.ours) or learnt[1].intersection(each.theirs):
            continue
        copies = ends[0].of(each.ours)
        others = ends[1].of(each.theirs)
        if copies is None or others is None:
            continue
        if copies.is_left and others.is_left:
            continue
        if not _are_known(sides.reference, copies):
            continue
        if not _are_known(sides.candidate, others):
            continue
        moved = _moved(sides.reference, copies)
        moved_there = _moved(sides.candidate, others)
        if moved is None or moved_there is None:
            continue
        if abs(moved - moved_there) > allowed * max(moved, moved_there):
            ours += [row.record for row in copies.ends]
            theirs += [row.record for row in others.ends]
    return ours, theirs, _OPTIMIZER


def _are_known(flow: Flow, parameters: _Parameters) -> bool:
    """Return False where a compiled program runs after the last that is known of them.

    Nobody sees the buffers that it writes.
    """
    last = min(row.record for row in parameters.ends)
    return not any(
        row.record > last and row.operator == _COMPILED
        for row in flow.step.rows.values()
    )


def _moved(flow: Flow, parameters: _Parameters) -> float | None:
    """Return how far parameters are from where they were; None where it was not kept."""
    changes = [
        change_of(flow.step.tensor(start.record), flow.step.tensor(end.record))
        for start, end in zip(parameters.starts, parameters.ends, strict=True)
    ]
    known = [change for change in changes if change is not None]
    if len(known) < len(changes):
        return None
    return float(torch.cat(known).norm())


def _are_kept(sides: Sides, updated: _Updated) -> bool:
    """Return True where the tensors of parameters are known, before and after."""
    programs = (
        (sides.reference.step, updated.ours),
        (sides.candidate.step, updated.theirs),
    )
    return all(
        step.tensor(row.record) is not None
        for step, parameters in programs
        for row in (*parameters.starts, *parameters.ends)
    )


def _updated(sides: Sides) -> list[_Updated]:
    """Return the parameters that an optimizer wrote, and whose gradient is no rounding."""
    sure = _with_gradients(sides)
    ends = _starts_and_ends(sides.reference), _starts_and_ends(sides.candidate)
    updated = []
    for each in counterparts(sides):
        ours = ends[0].of(each.ours)
        theirs = ends[1].of(each.theirs)
        if ours is None or theirs is None or sure.isdisjoint(each.ours):
            continue
        if any(row.phase == _OPTIMIZER for row in (*ours.ends, *theirs.ends)):
            updated.append(_Updated(ours, theirs))
    return updated


@dataclass(frozen=True, slots=True)
class _StartsAndEnds:
    """What the parameters of a program are before and after a step, by name."""

    starts: Mapping[str, RecordedRow]
    ends: Mapping[str, RecordedRow]

    def of(self, names: Sequence[str]) -> _Parameters | None:
        """Return parameters before and after the step; None where one has no last row."""
        if not all(name in self.ends for name in names):
            return None
        starts = tuple(self.starts[name] for name in names)
        return _Parameters(starts, tuple(self.ends[name] for name in names))


def _starts_and_ends(flow: Flow) -> _StartsAndEnds:
    starts = {name: value.row for name, value in named_leaves(flow).items()}
    return _StartsAndEnds(starts, last_named(flow.step.rows))


def _with_gradients(sides: Sides) -> set[str]:
    """Return the reference's parameters whose gradients are more than rounding.

    Beside the largest of all, or as both programs have the same: no two round alike.
    """
    pairs = gradient_pairs(sides, gradients_left)
    sizes = {
        name.removesuffix(".grad"): sides.reference.values[row.record].sketch
        for name, row in gradients_left(sides.reference.step.rows).items()
    }
    largest = max((s.size for s in sizes.values() if s), default=0.0)
    least = least_gradient(sides) * largest
    large = {n for n, s in sizes.items() if s and s.size >= least}
    alike = {n for n, p in pairs.items() if _are_alike(p, sides.limit, least)}
    return large | alike


def _are_alike(pair: GradientPair, limit: float, least: float) -> bool:
    """Return True for two gradients that agree, though not as two zeros do."""
    ours, theirs = pair.sketch, pair.twin
    if ours is None or theirs is None or ours.size < LEAST_ALIKE * least:
        return False
    return ours.distance(theirs) <= limit


def _updates_apart(
    sides: Sides, updated: _Updated, slopes: tuple[_Gradients, _Gradients]
) -> float:
    """Return the relative distance of two updates, where the gradient is no rounding."""
    ours = _change(sides, sides.reference, updated.ours, slopes[0])
    theirs = _change(sides, sides.candidate, updated.theirs, slopes[1])
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
    sides: Sides, flow: Flow, parameters: _Parameters, slopes: _Gradients
) -> _Change | None:
    """Return what an optimizer added; None where it was not kept.

    ``slopes``: what the backward pass leaves. A loop may sum up gradients of several steps,
    and only one program in their place.
    """
    added, sizes = [], []
    for start, end in zip(parameters.starts, parameters.ends, strict=True):
        before = flow.step.tensor(start.record)
        after = flow.step.tensor(end.record)
        gradient = slopes.get(f"{start.name}.grad")
        slope = flow.step.tensor(gradient.record) if gradient is not None else None
        if before is None or after is None or slope is None:
            return None
        if before.is_complex() and not after.is_complex():
            # an optimizer writes the real and imaginary parts
            after = torch.view_as_complex(after.contiguous())
        if slope.shape != after.shape:
            return None
        wide = torch.complex128 if after.is_complex() else torch.float64
        added.append((after.to(wide) - before.to(wide)).reshape(-1))
        sizes.append(slope.abs().reshape(-1))
    size = torch.cat(sizes)
    least = least_gradient(sides) * size.max()
    sure = size > least
    unsure = (size - least).abs() <= sides.limit * size
    change = in_reals(torch.cat(added)[sure])
    return _Change(change.reshape(-1).sort().values, int(unsure.sum()))


def _statistics_apart(updated: _Updated) -> float:
    """Return how far two updates are apart by what they do to statistics, relative to
    the larger of the two; 0 where statistics are missing, or rounding says as much.

    Smallest, largest, mean and norm of the parameter before and after: each says what
    was added to an element, or on average.
    """
    change = _change_of_statistics(updated.ours)
    other = _change_of_statistics(updated.theirs)
    if change is None or other is None or updated.ours.numel != updated.theirs.numel:
        return 0.0
    apart = max(abs(a - b) for a, b in zip(change, other, strict=True))
    size = max(map(abs, [*change, *other]))
    # each side rounds the sum once; both may go another way
    ends = updated.ours.ends
    rounding = 2 * max(unit(row.dtype) * _largest(row) for row in ends)
    return (apart - rounding) / size if apart > rounding else 0.0


def _change_of_statistics(parameters: _Parameters) -> list[float] | None:
    before = _statistics(parameters.starts)
    after = _statistics(parameters.ends)
    if not all(map(math.isfinite, [*before, *after])):
        return None
    return [b - a for a, b in zip(before, after, strict=True)]


def _statistics(rows: Sequence[RecordedRow]) -> list[float]:
    """Return smallest, largest, mean and root mean square; NaN for an unknown one."""
    if any(None in (row.min, row.max, row.mean, row.l2) for row in rows):
        return [math.nan] * 4
    numel = sum(row.numel or 0 for row in rows) or 1
    return [
        min(row.min or 0.0 for row in rows),
        max(row.max or 0.0 for row in rows),
        sum((row.mean or 0.0) * (row.numel or 0) for row in rows) / numel,
        math.sqrt(sum((row.l2 or 0.0) ** 2 for row in rows) / numel),
    ]


def _largest(row: RecordedRow) -> float:
    return max(abs(row.min or 0.0), abs(row.max or 0.0))
