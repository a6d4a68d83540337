"""What a later step reads that a step has made: it counts as a result of the step.

The answers of a frozen model that are computed once for all samples are read by parts, a
batch at a time. In the first step the parts that it reads may agree, and others not.
"""

from __future__ import annotations

from collections.abc import Sequence

from roundoff.compare.judging.table import ComparedRow
from roundoff.compare.pairing.alignment import MATCHED
from roundoff.compare.records.recorded_rows import Content, Rows
from roundoff.compare.rounding.rounding_bound import REGION, unit

_FORWARD = "forward"


def differs_later(
    reference: Rows,
    candidate: Rows,
    rows: Sequence[ComparedRow],
    later: tuple[Rows, Rows],
) -> bool:
    """Return True where both programs read later what the same call made otherwise.

    Args:
        reference: the reference's rows of a step.
        candidate: the candidate's.
        rows: of their comparison by name.
        later: the rows of both in the next step.
    """
    ours, theirs = (_read_from_before(each) for each in later)
    return any(
        (row.error or 0.0) > REGION * unit(row.dtype)
        and row.status == MATCHED
        and row.phase == _FORWARD
        and (row.call or 0) >= 0
        and reference[row.reference_record or 0].content_in_steps in ours
        and candidate[row.record or 0].content_in_steps in theirs
        for row in rows
    )


def _read_from_before(rows: Rows) -> set[Content]:
    """Return what a step reads that is no parameter, and that none of its calls made."""
    return {
        row.content_in_steps
        for row in rows.values()
        if not row.is_call and not row.name
    }
