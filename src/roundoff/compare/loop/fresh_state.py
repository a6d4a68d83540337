"""The state of an optimizer that begins anew in one run alone, as after a checkpoint that lacks it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from roundoff.compare.judging.explain import Sides
from roundoff.compare.judging.step_causes import UPDATE, Cause, with_line
from roundoff.compare.loop.unnamed_updates import (
    written_before,
    written_sources,
)
from roundoff.compare.records.recorded_rows import RecordedRow, Rows
from roundoff.ops import operators_that

#: The name of the causes.
STATE = "optimizer state"
#: Make the values that an optimizer begins with: zeros, or a copy of the first gradient.
_BEGIN = operators_that("create") | {"clone"}


def fresh_state_causes(sides: Sides, *, rank: int, step: int) -> list[Cause]:
    """Return the cause for moments that one run goes on with, and the other makes anew.

    Both update the same parameters. What an optimizer writes that has no name and was
    there before it is its state; what it makes in the step it begins with.

    Args:
        sides: the step.
        rank: of the step.
        step: its number.
    """
    ours = sides.reference.rows
    theirs = sides.candidate.rows
    if not _updated(ours) & _updated(theirs):
        return []
    lost = _goes_on_alone(ours, theirs)
    kept = _goes_on_alone(theirs, ours)
    if lost:
        cause = _cause(lost, _begun(theirs), rank, step, lost=True)
        cause = replace(cause, reference_line=_loaded_at(ours, lost))
    elif kept:
        cause = _cause(kept, _begun(ours), rank, step, lost=False)
        cause = replace(cause, line=_loaded_at(theirs, kept))
    else:
        return []
    leaves = (r for r in theirs.values() if r.phase == "optimizer" and r.is_leaf)
    read = [row.record for row in leaves if not row.name]
    shown_by = [*read, *(row.record for row in _begun(theirs))]
    return [replace(cause, at=_first_call(theirs), shown_by=shown_by)]


def _loaded_at(rows: Rows, state: Sequence[RecordedRow]) -> str | None:
    """Return the line that made what an optimizer goes on with; None for a step before."""
    sources = written_sources(rows)
    before = (rows.get(sources[write.record]) for write in state)
    return next((row.line for row in before if row is not None and row.is_call), None)


def _first_call(rows: Rows) -> int:
    calls = (row.call for row in rows.values() if row.phase == "optimizer")
    return min((call for call in calls if call >= 0), default=-1)


def _updated(rows: Rows) -> set[str]:
    """Return the names of the parameters that an optimizer writes."""
    return {
        row.name
        for row in rows.values()
        if row.name and row.inplace and row.phase == "optimizer"
    }


def _goes_on_alone(rows: Rows, others: Rows) -> list[RecordedRow]:
    """Return the writes to the state that one run has and the other begins with.

    Counts of steps tell nothing: an optimizer may make them of a number, and no call shows.
    """
    state = written_before(rows)
    begun = _moments(_begun(others)) - _moments(_begun(rows))
    more = _moments(state) - _moments(written_before(others))
    return state if 0 < more <= begun else []


def _moments(rows: Sequence[RecordedRow]) -> int:
    """Return how many of these are no numbers."""
    return sum(1 for row in rows if row.shape)


def _begun(rows: Rows) -> list[RecordedRow]:
    return [
        row
        for row in rows.values()
        if row.phase == "optimizer" and row.is_call and row.base_operator in _BEGIN
    ]


def _cause(
    state: Sequence[RecordedRow],
    begun: Sequence[RecordedRow],
    rank: int,
    step: int,
    *,
    lost: bool,
) -> Cause:
    write = state[0]
    made = begun[0]
    begins = f"begins anew, with {with_line(made.operator, made.line)}"
    goes_on = f"goes on with {len(state):,} values from before"
    here, there = (begins, goes_on) if lost else (goes_on, begins)
    why = "not loaded here, or made again" if lost else "loaded here alone, or kept"
    evidence = (
        f"the state of the optimizer, its moments and counts of steps, {here}, where the "
        f"reference's {there}: it is {why}"
    )
    return Cause(
        kind=UPDATE,
        label="other state",
        evidence=evidence,
        step=step,
        rank=rank,
        phase="optimizer",
        name=STATE,
        row=made if lost else write,
        twin=write if lost else made,
        decides=True,
    )
