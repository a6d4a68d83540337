"""Copies that a step of the reference moves, and the candidate holds and never touches.

What no recorded step of a program reads has no row there. That it is held, and with which
values, was noted before the first step.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Iterator, Sequence

from roundoff.compare.judging.explain import Sides
from roundoff.compare.judging.step_causes import UPDATE, Cause, listed, with_line
from roundoff.compare.loop.loaded_values import GRADIENT, values_before
from roundoff.compare.records.recorded_rows import RecordedRow, Rows, last_named
from roundoff.record import TensorContent

#: Numbers of two recordings of the same values, summed up in another order.
SAME = 1e-5
#: How many, the smallest, the largest and the mean.
_Content = tuple[int, float | None, float | None, float | None]


def left_average_causes(
    sides: Sides,
    held: Sequence[TensorContent],
    touched: Collection[str],
    *,
    rank: int,
    step: int,
) -> list[Cause]:
    """Return the copies without gradient that only the reference moves.

    Only where the candidate moves others in the same phase: else it may do so after what
    was recorded. Of two copies of one content it may move one and keep the other.

    Args:
        sides: the step; the rest of it agrees.
        held: what the candidate held before its first step.
        touched: the names that any recorded step of the candidate has.
        rank: of the step.
        step: its number.
    """
    ours = list(_moved_copies(sides.reference.rows))
    theirs = list(_moved_copies(sides.candidate.rows))
    phases = {write.phase for _, write in theirs}
    lost = [
        (start, write)
        for start, write in ours
        if write.phase in phases
        and not any(_is_same(_content_of(other), start) for other, _ in theirs)
    ]
    left: dict[str, RecordedRow] = {}
    for content in held:
        if content.name in touched or not content.shape:
            continue
        numel = math.prod(content.shape)
        values = (numel, content.min, content.max, content.mean)
        for start, write in lost:
            if _is_same(values, start):
                left[content.name] = write
                break
    if not left:
        return []
    names = list(left)
    write = left[names[0]]
    are, it = ("is", "it") if len(names) == 1 else ("are", "them")
    evidence = (
        f"{listed(names)} {are} not changed here, as others are; the reference changes "
        f"{it} by {with_line(write.operator, write.line)}"
    )
    return [
        Cause(
            kind=UPDATE,
            label="missing update",
            evidence=evidence,
            step=step,
            rank=rank,
            phase=write.phase,
            name=names[0],
            names=names,
            twin=write,
            decides=True,
        )
    ]


def _moved_copies(rows: Rows) -> Iterator[tuple[RecordedRow, RecordedRow]]:
    """Yield named values without a gradient that a step writes outside of modules: as they
    were, and the write."""
    starts = values_before(rows)
    last = last_named(rows)
    for name, row in last.items():
        is_copy = not name.endswith(GRADIENT) and f"{name}{GRADIENT}" not in last
        is_there = name in starts and not starts[name].is_call
        if is_copy and is_there and row.is_call and not row.module:
            yield starts[name], row


def _content_of(row: RecordedRow) -> _Content:
    return row.numel or 0, row.min, row.max, row.mean


def _is_same(content: _Content, start: RecordedRow) -> bool:
    """Return True for the values that a row has, in whatever shape: no constant."""
    numel, low, high, mean = content
    if low is None or high is None or mean is None:
        return False
    if numel != start.numel or low == high:
        return False
    size = max(abs(low), abs(high))
    pairs = zip((low, high, mean), (start.min, start.max, start.mean), strict=True)
    return all(b is not None and abs(a - b) <= SAME * size for a, b in pairs)
