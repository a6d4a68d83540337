"""Which values of a program may be given others, and what stands before them."""

from __future__ import annotations

from collections.abc import Collection, Container, Iterator

from roundoff.compare.values.value_flow import Flow, Value
from roundoff.ops import operators_that

#: Results of fewer elements agree by chance with one of the many that are tried.
FEWEST = 16
#: Calls that make a value of values that agree, at most.
MOST_CALLS = 4
_MOVE = operators_that("move values")
_JOIN = operators_that("join")
_FORWARD = "forward"


def reading(flow: Flow, value: Value) -> list[Value]:
    """Return the calls of the forward pass that read a value; of a step inside one, it."""
    readers = (flow.values[key] for key in flow.readers.get(value.key, ()))
    records = {v.row.record for v in readers if v.row.phase == _FORWARD}
    return [flow.values[key] for key in sorted(records) if key in flow.values]


def before(flow: Flow, region: Collection[int]) -> Iterator[Value]:
    """Yield what is read by a region and not of it, and what that is moved from."""
    waiting = [
        key
        for each in sorted(region, key=lambda k: flow.values[k].order)
        for key in flow.values[each].inputs
        if key not in region
    ]
    seen: set[int] = set()
    while waiting:
        key = waiting.pop(0)
        value = flow.values.get(key)
        if value is None or key in seen:
            continue
        seen.add(key)
        yield value
        if value.operator in _MOVE or not value.computes:
            waiting += value.inputs


def made_of(flow: Flow, value: Value, agreeing: Container[int]) -> set[int]:
    """Return the numbers that agree and that a value is made of; none if others are read too.

    In a few calls: what is made in many reads much that others read.
    """
    found: set[int] = set()
    waiting = [value]
    calls = 0
    while waiting and calls <= MOST_CALLS:
        made = waiting.pop()
        calls += made.computes and made.operator not in _MOVE
        for key in made.inputs:
            read = flow.values.get(key)
            if read is None or not (key in agreeing or read.is_call):
                return set()
            if key in agreeing:
                found.add(key)
            else:
                waiting.append(read)
    return set() if waiting or calls > MOST_CALLS else found


def only_input(flow: Flow, value: Value) -> Value | None:
    """Return the one number that a value is made of; None for several, and for none."""
    inputs = [flow.values[key] for key in value.row.inputs if key in flow.values]
    inputs = [each for each in inputs if each.is_number and each.numel != 1]
    return inputs[0] if len(inputs) == 1 and inputs[0].is_call else None


def is_taken_away(flow: Flow, value: Value) -> bool:
    """Return True where a value, moved or not, is subtracted, or its negative is taken.

    The reference may add the negative of it.
    """
    waiting = [value.key]
    while waiting:
        key = waiting.pop()
        for reader in (flow.values[k] for k in flow.readers.get(key, ())):
            is_subtrahend = reader.operator == "sub" and [*reader.inputs][1:] == [key]
            if is_subtrahend or reader.operator == "neg":
                return True
            if reader.operator in _MOVE:
                waiting.append(reader.key)
    return False


def is_moved(flow: Flow, value: Value) -> bool:
    """Return True for a number that is moved; not for what is joined, or no number before."""
    if value.operator not in _MOVE or value.operator in _JOIN:
        return False
    read = (flow.values.get(key) for key in value.inputs)
    return any(source is not None and source.is_number for source in read)


def may_be_replaced(value: Value) -> bool:
    if not value.is_call or value.inner or not value.is_number:
        return False
    if value.row.phase != _FORWARD or value.says_nothing or value.row.line is None:
        return False
    return value.sketch is not None and value.sketch.numel >= FEWEST
