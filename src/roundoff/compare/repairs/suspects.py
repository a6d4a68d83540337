"""The calls whose edits are tried: the first ones of a region, and what moves values before it."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence
from itertools import islice

from roundoff.compare.repairs.edits.edited_calls import places_of
from roundoff.compare.repairs.trials import Trials, one_of_each
from roundoff.compare.values.traced_calls import TracedCall, TracedProgram
from roundoff.compare.values.value_flow import Flow
from roundoff.compare.values.value_regions import Sides, upstream
from roundoff.ops import operators_that

#: Calls after the place where two programs part, whose edits are tried: of those that one
#: place of a line makes in turns of a loop or in several layers the first. So many that
#: compute, and so many that move values.
MOST_CALLS = 64
#: Calls before it, which only move values.
MOST_MOVES = 48
_MOVE = operators_that("move values")
_ELEMENTWISE = (
    operators_that("pair elements")
    | operators_that("work element by element")
    | operators_that("choose values")
)


def suspects(sides: Sides, trials: Trials, region: Collection[int]) -> list[TracedCall]:
    """Return the calls whose edits are tried: the first of a region, and moves before it."""
    flow = sides.candidate
    records = {flow.values[key].row.record for key in region}
    parted = sorted(
        {flow.values[r].row.call for r in records if flow.values[r].row.is_call}
    )
    program = trials.program
    families = trials.families
    calls = [program.calls[call] for call in parted if call in program.calls]
    firsts = _nearest(one_of_each(calls, families))
    starts = {row.record for call in calls for row in call.rows}
    before = [program.calls[n] for n in _moves_before(flow, program, starts)]
    moves = list(islice(one_of_each(before, families), MOST_MOVES))
    made = {row.record for call in moves for row in call.rows}
    masks = [program.calls[n] for n in _masks_before(flow, program, records | made)]
    masks += [program.calls[n] for n in _triangles_before(flow, program, records)]
    masks = list(islice(one_of_each(masks, families), MOST_MOVES))
    chosen = {call.first.call: call for call in (*firsts, *moves, *masks)}
    far = [program.calls[n] for n in _moves_before_scaling(flow, program, moves)]
    last = [c for c in one_of_each(far, families) if c.first.call not in chosen]
    # what agrees is right, unless nothing behind it is wrong: the nearest first
    nearest = list(chosen.values())
    if trials.only is None:
        nearest.sort(key=lambda call: call.first.call)
    # with one of the last all runs again
    return [*nearest, *last[:MOST_MOVES]]


def _nearest(calls: Iterable[TracedCall]) -> list[TracedCall]:
    """Return the first calls that compute, and as many that only move values.

    A product over named axes moves its inputs half a dozen times.
    """
    left = {False: MOST_CALLS, True: MOST_CALLS}
    nearest = []
    for call in calls:
        is_move = call.first.base_operator in _MOVE
        if left[is_move]:
            left[is_move] -= 1
            nearest.append(call)
    return nearest


def _moves_before(flow: Flow, program: TracedProgram, records: set[int]) -> list[int]:
    """Return the calls that move what these read, and those that made it."""
    moves: dict[int, None] = {}
    waiting = [i for record in sorted(records) for i in flow.values[record].row.inputs]
    seen = set(records)
    while waiting:
        record = waiting.pop(0)
        if record in seen or record not in flow.values:
            continue
        seen.add(record)
        row = flow.values[record].row
        if row.call in program.calls:
            moves[row.call] = None
        if not row.is_call or row.base_operator in _MOVE:
            waiting += row.inputs
    return list(moves)


def _moves_before_scaling(
    flow: Flow, program: TracedProgram, near: Sequence[TracedCall]
) -> list[int]:
    """Return the calls that move what other calls scale or shift before it is read.

    Pictures that are cut and turned lie as they do until their mean is taken off, and
    until a norm and an activation behind that have worked on them.
    """
    moves: dict[int, None] = {}
    seen: set[int] = set()
    while near:
        seen.update(call.first.call for call in near)
        scaling = {
            row.record
            for call in near
            if call.first.base_operator in _ELEMENTWISE
            for row in call.rows
            if flow.values[row.record].is_number
        }
        far = [program.calls[n] for n in _moves_before(flow, program, scaling)]
        near = [each for each in far if each.first.call not in seen]
        moves.update(
            dict.fromkeys(
                each.first.call for each in near if each.first.base_operator in _MOVE
            )
        )
    return list(moves)


def _masks_before(
    flow: Flow, program: TracedProgram, records: Collection[int]
) -> list[int]:
    """Return the calls that make what a region chooses by, or counts.

    Of two masks as many elements may be true in other places.
    """
    masks: dict[int, None] = {}
    waiting = [i for record in sorted(records) for i in flow.values[record].row.inputs]
    seen = set(records)
    while waiting:
        record = waiting.pop(0)
        row = flow.values[record].row if record in flow.values else None
        if record in seen or row is None:
            continue
        is_mask = row.dtype == "bool"
        if not is_mask and row.base_operator not in _MOVE:
            continue
        seen.add(record)
        if is_mask and row.call in program.calls:
            masks[row.call] = None
        waiting += row.inputs
    return list(masks)


def _triangles_before(
    flow: Flow, program: TracedProgram, records: Collection[int]
) -> list[int]:
    """Return the calls that a region is made of and that take one side of a diagonal.

    A mask that is added to scores is made of numbers.
    """
    before = upstream(flow, sorted(records), lambda _value: True)
    made = {flow.values[key].row.call for key in before}
    calls = [program.calls[call] for call in sorted(made & program.calls.keys())]
    return [
        call.first.call
        for call in calls
        if any(declared.name == "diagonal" for _, declared, _ in places_of(call))
    ]
