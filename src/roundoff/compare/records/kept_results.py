"""Detached results that autograd keeps for the backward pass, beside those that a user detaches.

A recording has both: a softmax whose gradient is made of its result is followed by a
``detach``, though nobody has cut a gradient.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator

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


def cutting_detaches(rows: Rows, records: Iterable[int]) -> Iterator[RecordedRow]:
    """Yield the detaches that somebody wrote of values that are detached in the forward pass.

    Each is the first of several, one of the one before it, that autograd did not make;
    there is none where autograd made all.

    Args:
        rows: of a step.
        records: the first detach of each value.
    """
    detaches = [row for row in rows.values() if is_forward_detach(row)]
    #: By what they read: the first of it.
    again = {row.inputs[0]: row for row in reversed(detaches) if row.inputs}
    for record in records:
        detached = rows.get(record)
        while detached is not None and not cuts_a_gradient(detached, rows):
            detached = again.get(detached.record)
        if detached is not None:
            yield detached
