"""The lines that led to a call, and where two calls part."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

from roundoff.compare.records.recorded_rows import RecordedRow, Rows
from roundoff.record import CALLED_FROM


def stack_of(row: RecordedRow) -> tuple[str, ...]:
    """Return the lines that led to a call; empty where nobody knows."""
    callers = row.callers.split(CALLED_FROM) if row.callers else []
    return (*reversed(callers), row.line) if row.line else ()


def places_by_callers(rows: Rows) -> dict[int, int]:
    """Return at which place each call stands among those of the same callers, by record."""
    counts: Counter[str | None] = Counter()
    places = {}
    for row in rows.values():
        if row.is_call:
            places[row.record] = counts[row.callers]
            counts[row.callers] += 1
    return places


def shared(one: Sequence[str], other: Sequence[str]) -> int:
    """Return at which place of two stacks the function stands that both run in.

    Its lines may differ there; before it they are the same.

    >>> shared(("a:9", "a:5", "a:2"), ("a:9", "a:5", "a:3"))
    2
    >>> shared(("a:9", "a:5", "a:2"), ("a:9", "a:6"))
    1
    """
    place = 0
    for first, second in zip(one[:-1], other[:-1], strict=False):
        if first != second:
            break
        place += 1
    return place
