"""Do two functions stand the wrong way round: an activation before a convolution, not behind it?

Each may be written out in many calls, so that no call alone is at fault. What the second
function makes of what the first was given is a value of the reference then, and what the
first one makes of that is another.
"""

from __future__ import annotations

from collections.abc import Iterator
from itertools import islice

import torch
from torch import Tensor

from roundoff.compare.blame.blamed import Blamed
from roundoff.compare.records.call_stacks import shared, stack_of
from roundoff.compare.records.recorded_calls import CannotRun
from roundoff.compare.repairs.trials import BUDGET, CALL, Trials
from roundoff.compare.rounding.rounding_bound import DIFFERENCES
from roundoff.compare.values.value_flow import Flow, Value
from roundoff.compare.values.value_regions import Part, Sides

#: First wrong values, and results of their functions, that are tried.
MOST_HEADS = 2
MOST_RESULTS = 4
#: Calls that are made again: a convolution tap by tap takes five for each.
MOST_CALLS = 128


def exchanged_functions(sides: Sides, part: Part, trials: Trials) -> Blamed | None:
    """Return the result of the function that should run last; None without such a pair."""
    flow = sides.candidate
    trials.left = BUDGET
    for head in part.heads[:MOST_HEADS]:
        given = _given(sides, head)
        if given is None:
            continue
        for result in islice(_results(flow, head, given), MOST_RESULTS):
            for second, made in _of_second(trials, result, given):
                # behind a norm that is written out a term may stand elsewhere
                is_term = head.numel != given.numel and _adds_what_is_computed(
                    flow, second
                )
                if not is_term and _gives_reference(trials, given, made, result):
                    return _blamed(result, second)
    return None


def _given(sides: Sides, head: Value) -> Value | None:
    """Return the one value that a first wrong value is made of, if it agrees.

    It is no smaller: what is multiplied with a mean of its own reads that first.
    """
    flow = sides.candidate
    read = [flow.values[key] for key in head.inputs if key in flow.values]
    read = [v for v in read if v.is_number and (v.numel or 0) >= (head.numel or 0)]
    if len({v.key for v in read}) != 1 or read[0].key not in sides.twins:
        return None
    return read[0]


def _results(flow: Flow, head: Value, given: Value) -> Iterator[Value]:
    """Yield what lines of a value's function make that other lines read, as large as what
    it was given: one of them hands back the result."""
    outer = stack_of(head.row)[:-1]
    for value in flow.in_order():
        if value.order < head.order or value.numel != given.numel:
            continue
        stack = stack_of(value.row)
        if stack[:-1] != outer or not value.is_number or value.inner:
            continue
        readers = [flow.values[key] for key in flow.readers.get(value.key, ())]
        read_by = [stack_of(each.row) for each in readers if _is_forward(each)]
        if read_by and all(each[: len(stack)] != stack for each in read_by):
            yield value


def _is_forward(value: Value) -> bool:
    return value.row.phase == "forward"


def _of_second(
    trials: Trials, result: Value, given: Value
) -> list[tuple[Value, Tensor]]:
    """Return the first values of the reference that are there without the first function.

    As large as what that is given: one of them is the result of the second function.
    """
    program = trials.program
    held = program.tensor(given.key)
    present = program.tensor(result.key)
    gained: list[tuple[Value, Tensor]] = []
    if held is None or present is None or held.shape != present.shape:
        return gained
    try:
        for row, tensor in islice(program.again({}, {result.key: held}), MOST_CALLS):
            trials.left -= tensor.numel() + CALL
            if trials.left < 0 or len(gained) == MOST_RESULTS:
                break
            value = program.flow.values[row.record]
            is_as_large = tensor.shape == held.shape
            if is_as_large and value.computes and trials.goal.gains(tensor):
                gained.append((value, tensor))
    except CannotRun:
        pass
    return gained


def _adds_what_is_computed(flow: Flow, value: Value) -> bool:
    """Return True for a sum of which no term is a parameter."""
    terms = [flow.behind(key) for key in value.inputs if key in flow.values]
    has_parameter = any(term.row.name and not term.is_call for term in terms)
    return value.operator in DIFFERENCES and not has_parameter


def _gives_reference(trials: Trials, given: Value, made: Tensor, result: Value) -> bool:
    """Return True where the first function makes a value of the reference of the second's.

    Not where it changes nothing of it: then it is one too many.
    """
    program = trials.program
    try:
        for row, tensor in islice(program.again({}, {given.key: made}), MOST_CALLS):
            if row.record == result.key:
                changes = not torch.equal(tensor, made)
                return changes and bool(trials.goal.gains(tensor))
    except CannotRun:
        return False
    return False


def _blamed(result: Value, second: Value) -> Blamed:
    """Name the line of the first function where one of the same function calls the second."""
    stack = stack_of(result.row)
    line = result.row.line
    if stack:
        line = stack[min(shared(stack, stack_of(second.row)), len(stack) - 1)]
    words = (
        f"it stands before {second.operator} of {second.row.site}; the other way round "
        "both give what the reference has"
    )
    return Blamed(result, None, words, is_operator=True, line=line)
