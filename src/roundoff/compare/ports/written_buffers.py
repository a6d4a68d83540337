"""What the forward passes of two programs write to buffers, and which of it differs.

What one program keeps in several buffers, a running mean and a running variance, may be
one of the other: their names, and what they begin with, say nothing of it. What a step
adds to a running average is small beside what was there before: it is compared by itself.
One program may keep sums where the other keeps means: so many times as much from the
beginning on.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import product

import torch
from torch import Tensor

from roundoff.compare.ports.counterparts import joined_sketch, named_leaves
from roundoff.compare.ports.port_results import Results, change_of
from roundoff.compare.records.recorded_rows import last_named
from roundoff.compare.rounding.rounding_bound import unit
from roundoff.compare.values.value_flow import Flow, Value
from roundoff.compare.values.value_regions import Sides

_FORWARD = "forward"


@dataclass(frozen=True, slots=True)
class _Pair:
    """Buffers that hold together the same after the step; mostly one of each program.

    ``factor``: how many times as much the candidate's hold.
    """

    ours: Sequence[Value]
    theirs: Sequence[Value]
    factor: float = 1.0


def buffers(sides: Sides) -> Results:
    """What the forward pass writes to buffers and the other program does not.

    Of the same size on both sides, or several that are of the size of one together. Not
    where a step before has moved parameters apart: a bias before a normalization gets no
    gradient but rounding, and shows in its running mean.
    """
    if _are_moved_apart(sides):
        return [], [], _FORWARD
    pairs = _pairs(sides)
    paired = {value.key for pair in pairs for value in (*pair.ours, *pair.theirs)}
    ours = [v for v in _written(sides.reference) if v.key not in sides.agreeing]
    theirs = [v for v in _written(sides.candidate) if not _is_computed(sides, v)]
    ours = [value for value in ours if value.key not in paired]
    theirs = [value for value in theirs if value.key not in paired]
    apart = [pair for pair in pairs if _are_changes_apart(sides, pair)]
    return (
        [*_of_sizes(ours, theirs), *(v.key for pair in apart for v in pair.ours)],
        [*_of_sizes(theirs, ours), *(v.key for pair in apart for v in pair.theirs)],
        _FORWARD,
    )


def _is_computed(sides: Sides, value: Value) -> bool:
    """Return True where the reference computes what the candidate writes.

    What was there before agrees with what a write should have changed, and did not.
    """
    twins = sides.all_twins(value)
    return any(sides.reference.values[key].is_call for key in twins)


def _are_moved_apart(sides: Sides) -> bool:
    ours = named_leaves(sides.reference)
    theirs = named_leaves(sides.candidate)
    distances = []
    for names, others, numel in sides.paired:
        sketch = joined_sketch(sides.reference, names, ours, numel)
        twin = joined_sketch(sides.candidate, others, theirs, numel)
        if sketch is not None and twin is not None:
            distances.append(sketch.distance(twin))
    return max(distances, default=0.0) > sides.limit


def _written(flow: Flow) -> list[Value]:
    """Return what the forward pass writes to buffers, as the step leaves it."""
    last = last_named(flow.step.rows)
    values = [flow.values[row.record] for row in last.values() if row.is_call]
    return [v for v in values if v.row.phase == _FORWARD and v.is_number]


def _pairs(sides: Sides) -> list[_Pair]:
    ours = _written(sides.reference)
    theirs = _written(sides.candidate)
    by_key = {value.key: value for value in ours}
    pairs = []
    for value in theirs:
        twin = next((k for k in sides.all_twins(value) if k in by_key), None)
        if twin is not None:
            pairs.append(_Pair([by_key.pop(twin)], [value]))
    taken = {value.key for pair in pairs for value in pair.theirs}
    left = list(by_key.values())
    other_left = [value for value in theirs if value.key not in taken]
    for run, whole in _joined(sides, sides.reference, left, other_left):
        pairs.append(_Pair(run, [whole]))
    for run, whole in _joined(sides, sides.candidate, other_left, left):
        pairs.append(_Pair([whole], run))
    return [*pairs, *_multiples(sides, left, other_left)]


def _multiples(
    sides: Sides, ours: Sequence[Value], theirs: Sequence[Value]
) -> list[_Pair]:
    """Return buffers of which one program holds so many times as much.

    From the beginning on, or as others do that are so: some begin with zeros.
    """
    starts = named_leaves(sides.reference)
    other_starts = named_leaves(sides.candidate)
    found: list[_Pair] = []
    factors: list[float] = []
    for value, other in product(ours, theirs):
        factor = _factor(sides, value, other)
        if factor is None:
            continue
        found.append(_Pair([value], [other], factor))
        start = starts.get(value.row.name or "")
        other_start = other_starts.get(other.row.name or "")
        if start is not None and other_start is not None:
            begun = _factor(sides, start, other_start)
            if begun is not None and abs(begun - factor) <= sides.limit * factor:
                factors.append(factor)
    return [
        pair
        for pair in found
        if any(abs(pair.factor - f) <= sides.limit * f for f in factors)
    ]


def _factor(sides: Sides, ours: Value, theirs: Value) -> float | None:
    """Return how many times one value another is; None for no multiple, and for zeros."""
    sketch, twin = ours.sketch, theirs.sketch
    if sketch is None or twin is None or not sketch.size or not twin.size:
        return None
    factor = twin.size / sketch.size
    return factor if sketch.times(factor).distance(twin) <= sides.limit else None


def _are_changes_apart(sides: Sides, pair: _Pair) -> bool:
    """Return True where a step adds something else, by more than the sums are rounded."""
    ours = _change(sides.reference, pair.ours)
    theirs = _change(sides.candidate, pair.theirs)
    if ours is None or theirs is None or ours.numel() != theirs.numel():
        return False
    size = sum((v.sketch.size for v in pair.ours if v.sketch is not None), 0.0)
    # each program rounds a product and a sum
    rounding = 4 * max(unit(v.row.dtype) for v in (*pair.ours, *pair.theirs)) * size
    theirs = theirs / pair.factor
    apart = float((ours.sort().values - theirs.sort().values).norm())
    return apart > sides.limit * float(ours.norm()) + rounding


def _change(flow: Flow, buffers: Sequence[Value]) -> Tensor | None:
    """Return what a step adds to buffers, flat; None where it is not known."""
    leaves = named_leaves(flow)
    changes = []
    for value in buffers:
        start = leaves.get(value.row.name or "")
        before = None if start is None else flow.tensor(start.key)
        after = flow.tensor(value.key)
        change = change_of(before, after)
        if change is None:
            return None
        changes.append(change)
    return torch.cat(changes)


def _of_sizes(values: Sequence[Value], others: Sequence[Value]) -> list[int]:
    """Return the keys of those that have the size of one of the others, or do together."""
    sizes = {value.row.numel or 0 for value in others}
    alone = {value.key for value in values if value.row.numel in sizes}
    joined = {v.key for size in sizes for run in _runs(values, size) for v in run}
    return sorted(alone | joined)


def _joined(
    sides: Sides, flow: Flow, parts: Sequence[Value], wholes: Sequence[Value]
) -> Iterator[tuple[list[Value], Value]]:
    """Yield several of one program that are together one of the other, and it."""
    taken: set[int] = set()
    for whole in wholes:
        free = [part for part in parts if part.key not in taken]
        runs = _runs(free, whole.row.numel or 0)
        run = next((run for run in runs if _is_one(sides, flow, run, whole)), None)
        if run is not None:
            taken |= {part.key for part in run}
            yield run, whole


def _runs(parts: Sequence[Value], numel: int) -> Iterator[list[Value]]:
    """Yield several that follow each other and have so many elements together."""
    numbers = [part for part in parts if (part.row.numel or 0) > 1]
    for first in range(len(numbers)):
        missing = numel
        for last in range(first, len(numbers)):
            missing -= numbers[last].row.numel or 0
            if missing <= 0:
                break
        if missing == 0 and last > first:
            yield numbers[first : last + 1]


def _is_one(sides: Sides, flow: Flow, run: Sequence[Value], whole: Value) -> bool:
    values = {part.row.name or "": part for part in run}
    sketch = joined_sketch(flow, list(values), values)
    if sketch is None or whole.sketch is None:
        return False
    return sketch.distance(whole.sketch) <= sides.limit
