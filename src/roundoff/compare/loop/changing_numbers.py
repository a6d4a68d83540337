"""Numbers that a program changes from step to step: a schedule that the other one lacks.

A share of teacher forcing, a temperature, a weight of the loss. In the first step they are
the same, and later on a call is handed another number.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace

from roundoff.compare.judging.explain import Sides
from roundoff.compare.judging.table import SCHEDULE, WRONG_CONSTANT, ComparedRow
from roundoff.compare.records.call_arguments import argument_differences
from roundoff.compare.records.recorded_rows import RecordedRow, Rows
from roundoff.compare.rounding.findings import OWN

_STEPS = "from step to step"
#: The reference changes a number, the candidate does -> what is said of it.
_WORDS = {
    (True, False): f"a schedule: the reference changes it {_STEPS}, here it stays",
    (False, True): f"a schedule: it stays in the reference, here it changes {_STEPS}",
    (True, True): f"another schedule: both change it {_STEPS}",
}


def with_schedules(
    rows: Sequence[ComparedRow],
    sides: Sides,
    before: Callable[[], tuple[Rows, Rows] | None],
) -> Sequence[ComparedRow]:
    """Return rows of which those with a wrong constant tell whether a program changes it.

    Args:
        rows: of a step.
        sides: the step.
        before: gives the rows of both programs in the step before, which agrees; None for
            no such step.
    """
    if not any(_has_other_constant(row) for row in rows):
        return rows
    earlier = before()
    if earlier is None:
        return rows
    ours, theirs = (_calls_by_place(each) for each in earlier)
    told = []
    for row in rows:
        if _has_other_constant(row):
            changes = (
                _changes(sides.reference.rows, row.reference_record, ours),
                _changes(sides.candidate.rows, row.record, theirs),
            )
            words = _WORDS.get(changes)
            if words is not None:
                evidence = f"{row.evidence}; {words}"
                row = replace(row, looks_like=SCHEDULE, evidence=evidence)
        told.append(row)
    return told


def _has_other_constant(row: ComparedRow) -> bool:
    return row.cause == OWN and row.looks_like == WRONG_CONSTANT


def _calls_by_place(rows: Rows) -> dict[object, RecordedRow]:
    """Return the calls of a step by site, and the first of each line and operator.

    A loop may take more turns in the next step.
    """
    calls = [row for row in rows.values() if row.is_call and not row.place]
    places: dict[object, RecordedRow] = {}
    for row in calls:
        places.setdefault(row.site, row)
        places.setdefault((row.line, row.overload), row)
    return places


def _changes(
    rows: Rows, record: int | None, earlier: Mapping[object, RecordedRow]
) -> bool:
    """Return True where the same call of the step before was handed another number."""
    row = None if record is None else rows.get(record)
    if row is None:
        return False
    same = earlier.get(row.site) or earlier.get((row.line, row.overload))
    if same is None or same.overload != row.overload:
        return False
    return bool(argument_differences(same, row))
