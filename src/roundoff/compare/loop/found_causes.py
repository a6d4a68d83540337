"""The causes behind the operators of a comparison: found in each step, and ranked."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from roundoff.compare.judging.culprits import Culprit
from roundoff.compare.judging.explain import Sides
from roundoff.compare.judging.step_causes import (
    DATA,
    LOADED,
    LOOP,
    OPERATORS,
    UPDATE,
    Cause,
)
from roundoff.compare.judging.table import SCHEDULE, STALE, WRONG_CONSTANT, ComparedRow
from roundoff.compare.loop.clip_order import clip_order_causes
from roundoff.compare.loop.fed_data import data_causes
from roundoff.compare.loop.fresh_state import fresh_state_causes
from roundoff.compare.loop.hand_writes import hand_order_causes, hand_write_causes
from roundoff.compare.loop.left_out_operators import operator_causes
from roundoff.compare.loop.left_out_updates import update_causes
from roundoff.compare.loop.loaded_values import GRADIENT, loaded_causes, values_before
from roundoff.compare.loop.loop_order import BACKWARD_PASSES, CLEARING, GRAPHS
from roundoff.compare.loop.optimizer_turns import TURNS
from roundoff.compare.loop.unnamed_updates import COPIES, unnamed_update_causes
from roundoff.compare.pairing.alignment import renaming
from roundoff.compare.records.recorded_rows import Rows
from roundoff.compare.rounding.findings import OWN
from roundoff.compare.rounding.reproducibility import UnstableRow
from roundoff.ops import base
from roundoff.record import LoopEvent

#: What a row looks like where the calls themselves differ, not their values alone.
_OF_CALLS = frozenset(
    (
        WRONG_CONSTANT,
        SCHEDULE,
        "other operator",
        "missing operator",
        "extra operator",
        "gradient cut",
    )
)


@dataclass(frozen=True, slots=True, kw_only=True)
class ComparedStep:
    """A step of both runs with what was found in its rows.

    Attributes:
        sides: the rows and tensors of both.
        rows: of the comparison.
        rank: of the step.
        step: its number.
        is_first: none was compared before it.
        is_same_before: no step before it differs.
        modules: module of the reference -> its name in the candidate.
        events: what the loops did, of the reference and of the candidate.
        unstable: what repeats show to change from run to run.
        known: the names in the steps before it of what the last of these does not write,
            of the reference, as the candidate has them, and of the candidate.
    """

    sides: Sides
    rows: Sequence[ComparedRow]
    rank: int
    step: int
    is_first: bool
    is_same_before: bool
    modules: Mapping[str, str]
    events: tuple[Sequence[LoopEvent], Sequence[LoopEvent]]
    unstable: Sequence[UnstableRow] = ()
    known: tuple[frozenset[str], frozenset[str]] = (frozenset(), frozenset())

    @property
    def differs(self) -> bool:
        """True where a row has an error that rounding does not explain."""
        return any(row.cause is not None for row in self.rows)

    @property
    def begins_with_values(self) -> bool:
        """True where the step shows what parameters begin with: the first one, and one in
        which a model is made again, to go on from a checkpoint."""
        if self.is_first:
            return True
        both = (self.sides.reference.rows, self.sides.candidate.rows)
        return self.is_same_before and all(map(_makes_parameters, both))


def _makes_parameters(rows: Rows) -> bool:
    return any(row.is_call for row in values_before(rows).values())


def causes_of_step(compared: ComparedStep) -> list[Cause]:
    """Return what the step was fed and given otherwise, and the updates left out."""
    rename = renaming(compared.modules)
    at: dict[str, Any] = {"rank": compared.rank, "step": compared.step}
    data: list[Cause] = []
    loaded: list[Cause] = []
    if compared.differs:
        data = data_causes(
            compared.sides, compared.rows, unstable=compared.unstable, **at
        )
    if compared.begins_with_values:
        names = _names(compared.sides, rename)
        loaded = loaded_causes(
            compared.sides,
            compared.rows,
            names,
            unstable=compared.unstable,
            are_carried=not compared.is_first,
            **at,
        )
    is_made_later = _may_be_made_by(data, loaded, compared.sides.candidate.rows)
    causes = [*loaded, *data] if is_made_later else [*data, *loaded]
    causes += update_causes(
        compared.sides, compared.events, compared.rows, rename, **at
    )
    begins_anew = fresh_state_causes(compared.sides, **at) if compared.differs else []
    causes += begins_anew
    if not begins_anew:
        causes += unnamed_update_causes(compared.sides, compared.rows, **at)
    if compared.differs:
        causes += clip_order_causes(compared.sides, compared.events, **at)
    causes = _with_writes_by_hand(causes, compared, rename, at)
    if not causes:
        causes += operator_causes(compared.sides, compared.rows, **at)
    return causes


def _with_writes_by_hand(
    causes: Sequence[Cause],
    compared: ComparedStep,
    rename: Callable[[str], str],
    at: Mapping[str, Any],
) -> list[Cause]:
    """Add what one script alone writes by hand, or writes in another order.

    Where the order differs, what the same values hold before and after follows from it.
    """
    moved = hand_order_causes(compared.sides, rename, **at) if compared.differs else []
    moved_names = {name for cause in moved for name in cause.names}
    kept = [c for c in causes if not c.names or not moved_names.issuperset(c.names)]
    told = moved_names.union(*(cause.names for cause in kept))
    alone = hand_write_causes(compared.sides, rename, compared.known, **at)
    return [*moved, *kept, *(c for c in alone if not told.intersection(c.names))]


def _may_be_made_by(data: Sequence[Cause], loaded: Sequence[Cause], rows: Rows) -> bool:
    """Return True where a differing parameter was at work before the first differing data.

    What an agent does next, or a model makes of its own words, is data that it is fed.
    """
    first = min((cause.row.record for cause in data if cause.row), default=None)
    if first is None:
        return False
    values = {cause.row.record for cause in loaded if cause.row}
    at_work = [r.record for r in rows.values() if r.is_call and values & {*r.inputs}]
    return bool(at_work) and min(at_work) < first


def _names(sides: Sides, rename: Callable[[str], str]) -> dict[str, str]:
    return {name: rename(name) for name in values_before(sides.reference.rows)}


def in_order(causes: Sequence[Cause]) -> list[Cause]:
    """Return the causes of the steps and of the loop, each once, as they act."""
    each = _without_moved(_once(causes))
    of_loop = [cause for cause in each if cause.name in _OF_GRADIENTS]
    left = {cause.step for cause in each if cause.name == COPIES and cause.row is None}

    def place(cause: Cause) -> tuple[int, bool, int]:
        only_shows = any(_only_shows(cause, other) for other in of_loop)
        # a copy that stays behind shows in what it is written to
        is_written = cause.row is not None and cause.row.is_call
        is_copied = cause.kind == LOADED and is_written and cause.step in left
        return cause.step, only_shows or is_copied, cause.at

    return sorted(each, key=place)


def _without_moved(causes: Sequence[Cause]) -> list[Cause]:
    """Leave out updates of what both runs change, in one before the optimizer steps.

    The step of which that is the last write to be seen may be the one before.
    """
    moved = {n for cause in causes if cause.kind == LOOP for n in cause.names}
    return [
        cause
        for cause in causes
        if cause.kind != UPDATE or not cause.names or not moved.issuperset(cause.names)
    ]


#: What the loop does otherwise so that updates, and operators of a pass, are there in
#: one run alone: these come behind it.
_OF_GRADIENTS = (BACKWARD_PASSES, CLEARING, GRAPHS, TURNS)


def _only_shows(cause: Cause, of_loop: Cause) -> bool:
    """Return True for what follows from another loop: updates, operators, later draws."""
    if cause.step != of_loop.step:
        return False
    if cause.kind in (UPDATE, OPERATORS):
        return True
    is_drawn_later = cause.row is not None and cause.row.call > of_loop.at
    return cause.kind == DATA and is_drawn_later


#: Of these gradients add up that the reference begins anew.
_PILING_UP = (BACKWARD_PASSES, CLEARING)

#: Of these the first stands for all: data, and updates that follow each other.
_ONE_OF_A_KIND = {DATA: ""}


def _once(causes: Sequence[Cause]) -> list[Cause]:
    """Return each cause where it is first seen: later steps show it again."""
    first: dict[tuple[str, str], Cause] = {}
    for cause in causes:
        is_of_values = cause.kind == UPDATE and bool(cause.names)
        name = cause.names[0] if is_of_values else cause.name
        key = (cause.kind, _ONE_OF_A_KIND.get(cause.kind, name))
        first.setdefault(key, cause)
    return [*first.values()]


def with_causes(
    operators: Sequence[Culprit], causes: Sequence[Culprit]
) -> list[Culprit]:
    """Return the culprits, operators and what stands behind them, the likeliest first.

    Operators that ran before the first cause come before it, all others after.
    """
    if not causes:
        return [*operators]
    first = min((c.step, c.call) for c in causes)
    before = [c for c in operators if (c.step, c.call) < first]
    after = [c for c in operators if (c.step, c.call) >= first]
    return [*before, *causes, *after]


def is_shown(row: ComparedRow, causes: Sequence[Cause], *, tensors: bool) -> bool:
    """Return True for a row made by an operator that only shows one of the causes."""
    if row.cause != OWN or row.step is None:
        return False
    return any(
        _is_shown_by(row, cause, tensors=tensors)
        for cause in causes
        if cause.rank == row.rank and cause.step <= row.step
    )


def _is_shown_by(row: ComparedRow, cause: Cause, *, tensors: bool) -> bool:
    """Return True where a cause, of the same step or an earlier one, makes the row differ."""
    if cause.step == row.step and row.record in cause.shown_by:
        return True
    if _is_setting_shown(row, cause) or _is_left_from_before(row, cause):
        return True
    if tensors or not cause.decides or row.looks_like in _OF_CALLS:
        return False
    return cause.step != row.step or (row.call or 0) >= cause.at


def _is_setting_shown(row: ComparedRow, cause: Cause) -> bool:
    """Return True for the arithmetic of an optimizer whose setting differs."""
    if cause.kind != LOOP:
        return False
    if cause.phase == "optimizer" and row.blamed_phase == "optimizer":
        return True
    if cause.name in _PILING_UP and _may_be_left_gradient(row):
        return True
    if cause.phase == "backward" and row.blamed_phase == "backward":
        if cause.name in _PILING_UP and _adds_to_gradient(row):
            return True
        return row.looks_like in (
            "extra operator",
            "missing operator",
            "other operator",
        )
    lines = {cause.line, cause.reference_line} - {None}
    clips = cause.name.startswith("clip")
    return clips and bool({row.blamed_line, row.blamed_reference_line} & lines)


def _may_be_left_gradient(row: ComparedRow) -> bool:
    """Return True for what a step begins with where the reference makes it: a gradient of
    what no module holds has no name."""
    is_before = row.call is not None and row.call < 0
    return is_before and not row.name and row.looks_like == STALE


def _adds_to_gradient(row: ComparedRow) -> bool:
    """Return True for a sum that is a gradient, where the reference has no sum.

    One that no line of the script makes is of what no module holds.
    """
    is_unnamed = row.name is None and row.line is None
    is_gradient = is_unnamed or (row.name or "").endswith(GRADIENT)
    operators = (row.operator, row.reference_operator)
    is_sum, is_sum_there = (base(name or "") == "add" for name in operators)
    return is_gradient and is_sum and not is_sum_there


def _is_left_from_before(row: ComparedRow, cause: Cause) -> bool:
    """Return True for data of a later step, and for what an earlier one has left."""
    if row.step is None or row.step <= cause.step:
        return False
    is_before = row.call is not None and row.call < 0
    if cause.kind == DATA and is_before and row.operator == "input":
        return True
    if row.operator == "gradient":
        return True
    return is_before and row.name in cause.names


def relabelled(row: ComparedRow) -> ComparedRow:
    """Return the row without a cause of its own: the listed one stands for it."""
    return replace(row, cause="inherited")
