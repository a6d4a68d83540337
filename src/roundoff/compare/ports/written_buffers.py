"""What the forward passes of two programs write to buffers, and which of it differs.

What one program keeps in several buffers, a running mean and a running variance, may be
one of the other: their names, and what they begin with, say nothing of it.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from roundoff.compare.ports.counterparts import joined_sketch
from roundoff.compare.ports.port_results import Results
from roundoff.compare.records.recorded_rows import last_named
from roundoff.compare.values.value_flow import Flow, Value
from roundoff.compare.values.value_regions import Sides

_FORWARD = "forward"


def buffers(sides: Sides) -> Results:
    """What the forward pass writes to buffers and the other program does not have.

    Of the same size on both sides, or several that are of the size of one together.
    """
    ours = _written(sides.reference, sides.agreeing)
    theirs = _written(sides.candidate, sides.twins)
    ours, theirs = _not_joined(sides, sides.reference, ours, theirs)
    theirs, ours = _not_joined(sides, sides.candidate, theirs, ours)
    return _of_sizes(ours, theirs), _of_sizes(theirs, ours), _FORWARD


def _written(flow: Flow, agreeing: Mapping[int, Any]) -> list[Value]:
    last = last_named(flow.step.rows)
    values = [flow.values[row.record] for row in last.values() if row.is_call]
    return [
        value
        for value in values
        if value.row.phase == _FORWARD and value.is_number and value.key not in agreeing
    ]


def _of_sizes(values: Sequence[Value], others: Sequence[Value]) -> list[int]:
    """Return the keys of those that have the size of one of the others, or do together."""
    sizes = {value.row.numel or 0 for value in others}
    alone = {value.key for value in values if value.row.numel in sizes}
    joined = {v.key for size in sizes for run in _runs(values, size) for v in run}
    return sorted(alone | joined)


def _not_joined(
    sides: Sides, flow: Flow, parts: Sequence[Value], wholes: Sequence[Value]
) -> tuple[list[Value], list[Value]]:
    """Return both without those that are together one of the second, and it."""
    taken: set[int] = set()
    left = []
    for whole in wholes:
        free = [part for part in parts if part.key not in taken]
        runs = _runs(free, whole.row.numel or 0)
        run = next((run for run in runs if _is_one(sides, flow, run, whole)), None)
        if run is None:
            left.append(whole)
        else:
            taken |= {part.key for part in run}
    return [part for part in parts if part.key not in taken], left


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
