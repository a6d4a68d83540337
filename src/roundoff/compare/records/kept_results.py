"""Detached results that autograd keeps for the backward pass, beside those that a user detaches.

A recording has both: a softmax whose gradient is made of its result is followed by a
``detach``, though nobody has cut a gradient.
"""

from __future__ import annotations

from roundoff.compare.records.recorded_rows import RecordedRow, Rows
from roundoff.ops import operators_that

_KEEPING = operators_that("keep their result for the gradient")


def cuts_a_gradient(row: RecordedRow, rows: Rows) -> bool:
    """Return True for a detach of the forward pass that somebody wrote.

    The first one behind a call that keeps its result is autograd's; a user's comes after
    it, and reads what it leaves.
    """
    if row.operator != "detach" or row.phase != "forward" or not row.is_call:
        return False
    source = rows.get(row.inputs[0]) if row.inputs else None
    if source is None or source.base_operator not in _KEEPING:
        return True
    return row.call != source.call + 1


def cutting_detach(rows: Rows, record: int) -> RecordedRow | None:
    """Return the detach that somebody wrote of a value that is detached in the forward pass.

    It is the last of several, each of the one before it; None where autograd made all.
    """
    for row in rows.values():
        again = row.operator == "detach" and row.phase == "forward"
        if again and record in row.inputs:
            record = row.record
    last = rows.get(record)
    return last if last is not None and cuts_a_gradient(last, rows) else None
