"""Parameters that a script updates without the reference's optimizer, and as it does."""

from __future__ import annotations

from collections.abc import Callable

from roundoff.compare.loop.loaded_values import values_before
from roundoff.compare.records.recorded_rows import RecordedRow, Rows, last_named
from roundoff.compare.rounding.distance import of_statistics

#: What is left of the way to the reference's new value, of an update that was made.
_LEFT = 0.5
#: The same of a value in new memory, which nothing but its statistics speaks for.
_NEARLY = 0.01


def does_all_updates(
    reference: Rows, candidate: Rows, rename: Callable[[str], str]
) -> bool:
    """Return True where all that the reference's optimizers update is updated alike.

    Each parameter ends clearly nearer to the reference's new value than it began, by
    its statistics. False where nothing is updated.
    """
    before = values_before(candidate)
    after = last_named(candidate)
    updated = [
        (rename(name), row)
        for name, row in last_named(reference).items()
        if row.is_call and row.phase == "optimizer" and name in values_before(reference)
    ]
    if not updated:
        return False
    return all(
        _is_on_its_way(before.get(name), after.get(name), wanted)
        or is_made_out_of_place(candidate, before.get(name), wanted)
        for name, wanted in updated
    )


def is_made_out_of_place(
    candidate: Rows, start: RecordedRow | None, wanted: RecordedRow
) -> bool:
    """Return True where a value that a parameter should get is made in new memory.

    As where a loop hands on its parameters: nothing is written into those of the model.
    """
    if start is None:
        return False
    way = of_statistics(wanted, start).error
    if not way:
        return False
    same_shape = (
        row
        for row in candidate.values()
        if row.is_call and not row.name and row.shape == wanted.shape
    )
    distances = (of_statistics(wanted, row).error for row in same_shape)
    return any(rest is not None and rest <= _NEARLY * way for rest in distances)


def _is_on_its_way(
    start: RecordedRow | None, end: RecordedRow | None, wanted: RecordedRow
) -> bool:
    if start is None or end is None or not end.is_call:
        return False
    way = of_statistics(wanted, start).error
    rest = of_statistics(wanted, end).error
    if way is None or rest is None:
        return False
    return rest == 0 or rest <= _LEFT * way
