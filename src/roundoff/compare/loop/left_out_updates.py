"""Parameters and buffers that one run changes in a step, and the other does not."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace

from roundoff.compare.judging.explain import Sides
from roundoff.compare.judging.step_causes import UPDATE, Cause, listed, with_line
from roundoff.compare.judging.table import ComparedRow
from roundoff.compare.loop.hand_updates import is_made_out_of_place
from roundoff.compare.loop.loaded_values import GRADIENT, values_before
from roundoff.compare.pairing.alignment import MATCHED, REFERENCE_ONLY
from roundoff.compare.records.kept_results import cutting_detaches
from roundoff.compare.records.recorded_rows import (
    RecordedRow,
    Rows,
    written_through_views,
)
from roundoff.compare.rounding.findings import OWN
from roundoff.ops import operators_that
from roundoff.record import FROZEN, LoopEvent

#: These divide the loss scale out of gradients.
UNSCALING = operators_that("unscale gradients")


@dataclass(frozen=True, slots=True)
class _Side:
    """What one run did to its named values in a step."""

    rows: Rows
    #: Gives its names those of the candidate.
    rename: Callable[[str], str]
    #: The last row of each value that the step changes.
    changed: Mapping[str, RecordedRow]
    through_views: frozenset[str]
    gradients: frozenset[str]
    frozen: frozenset[str]
    names: frozenset[str]
    optimizer: LoopEvent | None


def _side(
    rows: Rows, events: Sequence[LoopEvent], rename: Callable[[str], str]
) -> _Side:
    changed: dict[str, RecordedRow] = {}
    names: set[str] = set()
    gradients: set[str] = set()
    for row in rows.values():
        if not row.name:
            continue
        name = rename(row.name)
        if name.endswith(GRADIENT):
            gradients.add(name.removesuffix(GRADIENT))
            continue
        if name in names and row.is_call:
            changed[name] = row
        names.add(name)
    frozen = [n for event in events if event.what == FROZEN for n in event.names]
    steps = [event for event in events if event.what == "optimizer.step"]
    return _Side(
        rows=rows,
        rename=rename,
        changed=changed,
        through_views=frozenset(map(rename, written_through_views(rows))),
        gradients=frozenset(gradients),
        frozen=frozenset(map(rename, frozen)),
        names=frozenset(names),
        optimizer=steps[0] if steps else None,
    )


def update_causes(
    sides: Sides,
    events: tuple[Sequence[LoopEvent], Sequence[LoopEvent]],
    compared: Sequence[ComparedRow],
    rename: Callable[[str], str],
    *,
    rank: int,
    step: int,
) -> list[Cause]:
    """Return the changes of parameters and buffers that only one run makes in a step.

    Args:
        sides: the step.
        events: what the loops did in it, of the reference and the candidate.
        compared: its rows.
        rename: gives names of the reference their name in the candidate.
        rank: of the step.
        step: its number.
    """
    ours = _side(sides.reference.rows, events[0], rename)
    theirs = _side(sides.candidate.rows, events[1], lambda name: name)
    lost = _changed_by_one(ours, theirs)
    if not any(row.cause is not None for row in compared):
        # what is handed on to the next turn is not written into the model
        before = values_before(theirs.rows)
        lost = [
            name
            for name in lost
            if not is_made_out_of_place(
                theirs.rows, before.get(name), ours.changed[name]
            )
            or not _is_changed_often(name, ours, rename)
        ]
    blamed = _forward_calls_at_fault(theirs.rows, compared)
    extra = [
        name
        for name in _changed_by_one(theirs, ours)
        if theirs.changed[name].call not in blamed
    ]
    causes: list[Cause | None] = [_changed_again(sides, rename, rank, step)]
    for names, describe in _reasons(lost, ours, theirs):
        causes.append(_lost(names, describe, (ours, theirs), compared, rank, step))
    if extra and not lost:
        causes.append(_extra(extra, ours, theirs, rank, step))
    return [cause for cause in causes if cause is not None]


def _is_changed_often(name: str, side: _Side, rename: Callable[[str], str]) -> bool:
    """Return True for what a step changes several times: a value that is not handed on
    would have shown in the second turn."""
    changes = (
        row.call
        for row in side.rows.values()
        if row.name and rename(row.name) == name and row.phase == "optimizer"
    )
    return len(set(changes)) > 1


def _changed_by_one(side: _Side, other: _Side) -> list[str]:
    """Return what one side changes and the other has, but does not change or freezes.

    What both freeze, like an average of parameters, may be changed by hand in both.
    """
    unchanged = other.names - other.changed.keys() - other.through_views
    left = [name for name in side.changed if name in unchanged]
    frozen_here_alone = other.frozen - side.frozen
    frozen = [n for n in side.changed if n in frozen_here_alone and n not in left]
    return left + frozen


def _forward_calls_at_fault(rows: Rows, compared: Sequence[ComparedRow]) -> set[int]:
    """Return the candidate's forward calls that are named themselves.

    What they change is their doing: a norm in training mode moves its statistics. A call
    outside of all modules that the reference lacks is an update, and none of them.
    """
    at_fault = [
        row
        for row in compared
        if row.call is not None and row.cause == OWN and row.phase == "forward"
    ]
    return {
        row.call
        for row in at_fault
        if row.call is not None
        if row.looks_like != "extra operator" or _is_in_a_module(rows, row.record)
    }


def _is_in_a_module(rows: Rows, record: int | None) -> bool:
    return record is None or bool(rows[record].module)


def _changed_again(
    sides: Sides, rename: Callable[[str], str], rank: int, step: int
) -> Cause | None:
    """Return the buffers that a checkpoint changes once more as it computes again.

    Running statistics move twice as far in such a step.
    """
    ours = _written_again(sides.reference.rows, rename)
    theirs = _written_again(sides.candidate.rows, lambda name: name)
    names = [name for name in {**theirs, **ours} if (name in ours) != (name in theirs)]
    if not names:
        return None
    first = names[0]
    row = theirs.get(first)
    twin = ours.get(first)
    shown = row or twin
    who = "here, and not in the reference" if row else "in the reference, and not here"
    write = "" if shown is None else with_line(shown.operator, shown.line)
    are = "is" if len(names) == 1 else "are"
    evidence = (
        f"{listed(names)} {are} changed a second time by {write} as the forward pass is "
        f"computed again for its gradients {who}: running statistics count a batch twice"
    )
    return Cause(
        kind=UPDATE,
        label="extra update" if row else "missing update",
        evidence=evidence,
        step=step,
        rank=rank,
        phase="backward",
        name=first,
        names=names,
        at=0 if row is None else row.call,
        row=row,
        twin=twin,
        error=None,
        shown_by=[r.record for r in sides.candidate.rows.values() if r.name in theirs],
    )


def _written_again(rows: Rows, rename: Callable[[str], str]) -> dict[str, RecordedRow]:
    """Return what is written while a forward pass is computed again, by name."""
    written: dict[str, RecordedRow] = {}
    for row in rows.values():
        if not row.recomputed or not row.name or row.name.endswith(GRADIENT):
            continue
        if row.is_call:
            written.setdefault(rename(row.name), row)
    return written


#: Why a value is not changed.
_IS_FROZEN = "frozen"
_NO_GRADIENT = "no gradient"
_NO_UPDATE = "no update"
_NOT_WRITTEN = "not written"


def _reasons(
    lost: Sequence[str], ours: _Side, theirs: _Side
) -> list[tuple[list[str], str]]:
    """Return the names that are not changed, by why."""
    groups: dict[str, list[str]] = {}
    for name in lost:
        groups.setdefault(_reason(name, ours, theirs), []).append(name)
    if theirs.optimizer is not None and not _is_optimizer_seen(theirs):
        groups.pop(_NO_UPDATE, None)
    return [(names, reason) for reason, names in groups.items()]


def _is_optimizer_seen(side: _Side) -> bool:
    """Return False for a compiled optimizer: in no pass does it write a parameter."""
    if any(row.phase == "optimizer" for row in side.rows.values()):
        return True
    updated = [row for name, row in side.changed.items() if name in side.gradients]
    return any(row.phase == "backward" for row in updated)  # in hooks


def _reason(name: str, ours: _Side, theirs: _Side) -> str:
    if name in theirs.frozen and name not in ours.frozen:
        return _IS_FROZEN
    if ours.changed[name].phase != "optimizer":
        return _NOT_WRITTEN
    if name in ours.gradients and name not in theirs.gradients:
        return _NO_GRADIENT
    return _NO_UPDATE


def _lost(
    names: Sequence[str],
    reason: str,
    sides: tuple[_Side, _Side],
    compared: Sequence[ComparedRow],
    rank: int,
    step: int,
) -> Cause | None:
    ours, theirs = sides
    twin = ours.changed[names[0]]
    which = listed(names)
    are = "is" if len(names) == 1 else "are"
    them = "it" if len(names) == 1 else "them"
    write = with_line(twin.operator, twin.line)
    label = "missing update"
    cut = None
    reader = None
    at = -1
    evidence = f"{which} {are} not changed here; the reference changes"
    if reason == _IS_FROZEN:
        why = (
            f"{which} {are} frozen here (requires_grad is False): no gradient and no "
            "update; the reference trains"
        )
        evidence = why
    elif reason == _NO_GRADIENT:
        label = "gradient cut"
        unread, reader = _where_unread(names, ours, theirs, compared)
        cut = unread or _where_cut(ours, theirs, compared)
        at = 0
        place = "" if cut is None else with_line(cut.site, cut.line)
        where = f": it ends at {place}" if place else ""
        if unread is not None:
            where = f": nothing that is computed with {them} is read at {place}"
        get = "gets" if len(names) == 1 else "get"
        evidence = f"{which} {get} no gradient here{where}; the reference changes"
    elif reason == _NO_UPDATE:
        at = _first_use_of_an_optimizer(theirs)
        why = "its gradient is there, the optimizer does not hold or does not step it"
        evidence = f"{which} {are} not changed here: {why}; the reference changes"
    else:
        at = 0
    return Cause(
        kind=UPDATE,
        label=label,
        evidence=f"{evidence} {them} by {write}",
        step=step,
        rank=rank,
        phase=twin.phase if cut is None else cut.phase,
        name=names[0] if cut is None else cut.site,
        names=names,
        at=at,
        twin=reader or cut or twin,
        line=None if cut is None else cut.line,
        decides=reason != _NO_GRADIENT,
    )


def _first_use_of_an_optimizer(side: _Side) -> int:
    """Return the first call that what an optimizer holds decides on: that of its step.

    Or the one before it that divides the loss scale out of the gradients of all that it
    holds.
    """
    unscaled = [
        row.call for row in side.rows.values() if row.base_operator in UNSCALING
    ]
    step = _last(side) if side.optimizer is None else side.optimizer.call
    return min([*unscaled, step])


def _last(side: _Side) -> int:
    return max((row.call for row in side.rows.values()), default=0)


def _where_unread(
    names: Sequence[str], ours: _Side, theirs: _Side, compared: Sequence[ComparedRow]
) -> tuple[RecordedRow, RecordedRow] | tuple[None, None]:
    """Return the candidate's first call at fault that reads nothing made of the names.

    And its counterpart in the reference, which does.
    """
    made_of_them = _made_of(frozenset(names), ours)
    made_here = _made_of(frozenset(names), theirs)
    for row in compared:
        if row.cause != OWN or row.phase != "forward" or row.record is None:
            continue
        if row.reference_record in made_of_them and row.record not in made_here:
            unread = theirs.rows[row.record]
            reader = ours.rows[row.reference_record]
            return (
                replace(unread, line=row.blamed_line or unread.line),
                replace(reader, line=row.blamed_reference_line or reader.line),
            )
    return None, None


def _made_of(names: frozenset[str], side: _Side) -> set[int]:
    """Return the records of the forward pass that depend on a named value."""
    made: set[int] = set()
    for record, row in side.rows.items():
        if row.phase != "forward":
            continue
        is_named = row.name is not None and side.rename(row.name) in names
        if is_named or not made.isdisjoint(row.values_read()):
            made.add(record)
    return made


def _where_cut(
    ours: _Side, theirs: _Side, compared: Sequence[ComparedRow]
) -> RecordedRow | None:
    """Return the detach that only the candidate has, or where its backward pass ends.

    That is the first operator that goes backward in the reference alone.
    """
    detach = lone_detach(theirs.rows, compared)
    if detach is not None:
        return detach
    for row in compared:
        if row.status != "only in reference" or row.reference_record is None:
            continue
        if row.phase == "backward" and row.call is not None and row.call >= 0:
            return ours.rows.get(row.reference_record)
    return None


def lone_detach(candidate: Rows, compared: Sequence[ComparedRow]) -> RecordedRow | None:
    """Return the first detach of the forward pass that the reference has not."""
    records = [
        row.record
        for row in compared
        if row.operator == "detach"
        and row.phase == "forward"
        and row.record is not None
        and row.status not in (MATCHED, REFERENCE_ONLY)
        and row.reference_operator != "detach"
    ]
    return next(cutting_detaches(candidate, records), None)


def lone_detach_of_reference(
    reference: Rows, compared: Sequence[ComparedRow]
) -> RecordedRow | None:
    """Return the first detach of the reference's forward pass that the candidate has not."""
    records = [
        row.reference_record or 0
        for row in compared
        if row.status == REFERENCE_ONLY
        and row.phase == "forward"
        and row.reference_operator == "detach"
    ]
    return next(cutting_detaches(reference, records), None)


def _extra(
    names: Sequence[str], ours: _Side, theirs: _Side, rank: int, step: int
) -> Cause:
    row = theirs.changed[names[0]]
    which = listed(names)
    are = "is" if len(names) == 1 else "are"
    frozen = [name for name in names if name in ours.frozen]
    why = ", before the step ends"
    if frozen:
        they = "it is" if len(names) == 1 else "they are"
        why = f", where {they} frozen (requires_grad is False)"
    evidence = (
        f"{which} {are} changed here by {with_line(row.operator, row.line)}, and not in "
        f"the reference{why}"
    )
    return Cause(
        kind=UPDATE,
        label="extra update",
        evidence=evidence,
        step=step,
        rank=rank,
        phase=row.phase,
        name=names[0],
        names=names,
        at=-1 if frozen else row.call,
        row=row,
        shown_by=[theirs.changed[name].record for name in names],
        decides=bool(frozen),
    )
