"""Numbers that a program draws, and feeds to its model: why are they others?"""

from __future__ import annotations

from collections.abc import Sequence

from roundoff.compare.judging.explain import Sides
from roundoff.compare.judging.extra_draws import ExtraDraws
from roundoff.compare.judging.step_causes import DATA, Cause, with_line
from roundoff.compare.judging.symptoms import (
    drawing_rows,
    draws,
    other_number_of_draws,
)
from roundoff.compare.judging.table import ComparedRow
from roundoff.compare.records.call_arguments import argument_differences
from roundoff.compare.records.recorded_rows import RecordedRow


def draw_cause(
    sides: Sides,
    compared: Sequence[ComparedRow],
    drawn: ComparedRow,
    shown_by: set[int],
    rank: int,
    step: int,
) -> Cause:
    """Return the cause for numbers that the program draws, and feeds to its model.

    Args:
        sides: the step.
        compared: its rows.
        drawn: the first of them that draws other numbers.
        shown_by: records of the candidate that only show this.
        rank: of the step.
        step: its number.
    """
    missing = _missing_draw(sides, compared, drawn, shown_by, rank, step)
    return missing or _other_draws(sides, drawn, shown_by, rank, step)


def _missing_draw(
    sides: Sides,
    compared: Sequence[ComparedRow],
    drawn: ComparedRow,
    shown_by: set[int],
    rank: int,
    step: int,
) -> Cause | None:
    """Return the cause where the candidate leaves out a draw that the reference makes before.

    As where it takes the samples in the order of a file, and not shuffled.
    """
    twin = sides.reference.rows.get(drawn.reference_record or 0)
    row = sides.candidate.rows[drawn.record or 0]
    found = None if twin is None else _left_out(sides, compared, twin, row)
    if found is None:
        return None
    left_out, present = found
    draw = f"{left_out.operator} ({left_out.line})"
    words = f"{draw} is drawn in the reference only"
    if present is not None:
        place = with_line(present.site, present.line)
        words = f"{place} stands where the reference draws {draw}"
    shown = present or row
    return Cause(
        kind=DATA,
        label="other data",
        evidence=(
            f"the runs were fed other data: {words}; what "
            f"{with_line(row.site, row.line)} draws after it are other numbers"
        ),
        step=step,
        rank=rank,
        phase="forward",
        name=shown.site,
        row=shown,
        twin=left_out,
        line=(present or left_out).line,
        reference_line=left_out.line,
        error=drawn.error,
        shown_by=tuple(sorted(shown_by)),
        decides=True,
    )


def _left_out(
    sides: Sides,
    compared: Sequence[ComparedRow],
    twin: RecordedRow,
    row: RecordedRow,
) -> tuple[RecordedRow, RecordedRow | None] | None:
    """Return the first draw of the reference before one that the candidate does not make,
    and what it has in its place.

    None where the candidate has drawn as often before.
    """
    ours = [r for r in drawing_rows(sides.reference.rows) if r.call < twin.call]
    theirs = [r for r in drawing_rows(sides.candidate.rows) if r.call < row.call]
    if len(theirs) >= len(ours):
        return None
    pairs = {each.reference_record: each.record for each in compared}
    for draw in ours:
        present = sides.candidate.rows.get(pairs.get(draw.record) or 0)
        if present is None or not draws(present):
            return draw, present
    return None


def _other_draws(
    sides: Sides, drawn: ComparedRow, shown_by: set[int], rank: int, step: int
) -> Cause:
    row = sides.candidate.rows[drawn.record or 0]
    twin = sides.reference.rows.get(drawn.reference_record or 0)
    place = with_line(row.site, row.line)
    label = "other draws"
    before = ""
    if twin is not None:
        before = other_number_of_draws(
            sides.reference.rows, twin, sides.candidate.rows, row
        )
    evidence = f"{place} draws other numbers: another seed, or other draws before it"
    evidence += before
    stack = ExtraDraws(sides.reference.rows, sides.candidate.rows).stack
    if stack:
        evidence += f"; what the candidate alone draws is called from {stack[-1]}"
    arguments = [] if twin is None else argument_differences(twin, row)
    if arguments:
        label = "other data"
        evidence = f"{place} draws with other arguments: {'; '.join(arguments)}"
    elif twin is not None and row.shape != twin.shape:
        label = "other data"
        evidence = (
            f"the runs were fed other data: {place} draws numbers of the shape "
            f"{row.shape} where the reference's have {twin.shape}"
        )
    elif row.arguments is None:
        evidence += ", or other arguments, of which none are recorded"
    return Cause(
        kind=DATA,
        label=label,
        evidence=evidence,
        step=step,
        rank=rank,
        phase="forward",
        name=row.site,
        row=row,
        twin=twin,
        line=stack[-1] if stack else row.line,
        error=drawn.error,
        shown_by=tuple(sorted(shown_by)),
        decides=True,
    )
