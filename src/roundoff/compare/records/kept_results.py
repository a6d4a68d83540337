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
    return is_forward_detach(row) and not is_kept_for_gradient(row, rows)


def is_kept_for_gradient(row: RecordedRow, rows: Rows) -> bool:
    """Return True for what autograd detaches of a result to keep it."""
    if not is_forward_detach(row) or not row.inputs:
        return False
    source = rows.get(row.inputs[0])
    if source is None or source.base_operator not in _KEEPING:
        return False
    return row.call == source.call + 1


def is_forward_detach(row: RecordedRow) -> bool:
    """Return True for any detach of the forward pass."""
    return row.operator == "detach" and row.phase == "forward" and row.is_call


def cutting_detach(rows: Rows, record: int) -> RecordedRow | None:
    """Return the detach that somebody wrote of a value that is detached in the forward pass.

    It is the first of several, each of the one before it, that autograd did not make; None
    where autograd made all.
    """
    detached = rows.get(record)
    for row in rows.values():
        if detached is None or cuts_a_gradient(detached, rows):
            break
        if is_forward_detach(row) and detached.record in row.inputs:
            detached = row
    is_cut = detached is not None and cuts_a_gradient(detached, rows)
    return detached if is_cut else None
