"""Values that another run of the same program would not have again."""

from __future__ import annotations

from collections.abc import Container, Iterable, Sequence

from roundoff.compare.judging.explain import Sides
from roundoff.compare.judging.symptoms import draws
from roundoff.compare.judging.table import ComparedRow
from roundoff.compare.records.recorded_rows import Rows
from roundoff.compare.rounding.findings import OWN
from roundoff.compare.rounding.reproducibility import UnstableRow


def unstable_records(
    sides: Sides, unstable: Sequence[UnstableRow]
) -> tuple[set[int], set[int]]:
    """Return what repeats show to be unstable, with all that is made of it.

    Records of the reference, and of the candidate.
    """
    ours = sides.reference.rows
    theirs = sides.candidate.rows
    return (
        made_of(ours, _of_side(ours, unstable, "reference")),
        made_of(theirs, _of_side(theirs, unstable, "candidate")),
    )


def _of_side(rows: Rows, unstable: Sequence[UnstableRow], side: str) -> set[int]:
    """Return the records at places that are unstable in a step: a batch is each time."""
    places = {(row.site, row.phase) for row in unstable if row.side == side}
    if not places:
        return set()
    return {row.record for row in rows.values() if (row.site, row.phase) in places}


def other_draws(
    rows: Rows, compared: Sequence[ComparedRow], among: Container[int | None]
) -> list[ComparedRow]:
    """Return the rows among these records whose operators draw other numbers."""
    at_fault = [row for row in compared if row.cause == OWN and row.record in among]
    return [
        row for row in at_fault if row.record is not None and draws(rows[row.record])
    ]


def made_of(rows: Rows, sources: Iterable[int]) -> set[int]:
    """Return these records and all that read them, or what was made of them."""
    downstream = {*sources}
    if not downstream:
        return downstream
    for record in sorted(rows):
        if not downstream.isdisjoint(rows[record].inputs):
            downstream.add(record)
    return downstream
