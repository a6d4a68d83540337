"""Does a parameter hold the wrong values, or is it used in the wrong place?

Blocks that run in another order, or one of them twice, read parameters that hold what the
reference reads elsewhere, as if the loader had exchanged them. Contents alone do not tell
the two apart. The numbers in the names do, where both programs count their layers: a
parameter that has the number of what it holds was loaded rightly. So was one with which
another call gives what the reference has.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import replace

from roundoff.compare.blame.blamed import Blamed
from roundoff.compare.blame.known_leaves import parameters_of_the_same
from roundoff.compare.blame.shared_parameters import is_shared
from roundoff.compare.records.call_stacks import shared, stack_of
from roundoff.compare.values.fault_lines import computing_readers
from roundoff.compare.values.value_flow import Flow, Value
from roundoff.compare.values.value_regions import Sides

_NUMBER = re.compile(r"\d+")


def as_misused(sides: Sides, blamed: Blamed | None) -> Blamed | None:
    """Return what reads a blamed parameter instead of it, where its name says it is right.

    Anything else that is blamed is returned as it is: of two in one memory no read is wrong.
    """
    if blamed is None or blamed.is_operator or blamed.value.is_call:
        return blamed
    if is_shared(sides.candidate, blamed.value):
        return blamed
    wanted = blamed.reference
    held = parameters_of_the_same(sides, blamed.value)
    if wanted is None or not wanted.row.name or not held:
        return blamed
    readers = _readers(sides.candidate, blamed.value)
    wrong = [reader for reader in readers if not _gives_right(sides, reader)]
    if not wrong:
        return blamed
    [reader, *_] = wrong
    right = [other for other in readers if other not in wrong]
    line = _own_line(reader, right)
    is_there = wanted.key in sides.agreeing
    if line is None and is_there and _has_its_number(blamed.value, held, wanted):
        line = _line_of_block(sides.candidate, blamed.value, reader)
    if line is None:
        return blamed
    words = reads_instead(blamed.value, wanted)
    return replace(
        blamed, value=reader, evidence=words, other=None, is_operator=True, line=line
    )


def reads_instead(leaf: Value, wanted: Value) -> str:
    """Return which parameter is read here, and which one in the reference, in words."""
    return f"it reads {leaf.row.name}, where the reference reads {wanted.row.name}"


def _own_line(reader: Value, right: Sequence[Value]) -> str | None:
    """Return the line that leads to a wrong reader and to none of the right ones.

    The innermost; None where all have the same lines, and without right ones: a turn of a
    loop that is right by chance is no other place.
    """
    stack = stack_of(reader.row) or (reader.row.line,)
    others = [stack_of(other.row) or (other.row.line,) for other in right]
    if not others:
        return None
    for line in reversed(stack):
        if all(line not in other for other in others):
            return line
    return None


def _has_its_number(leaf: Value, held: Sequence[Value], wanted: Value) -> bool:
    """Return True where a parameter is counted as what it holds is, not as what it should."""
    numbers = _numbers(leaf)
    is_counted = bool(numbers) and any(_numbers(other) == numbers for other in held)
    return is_counted and _numbers(wanted) != numbers


def _numbers(leaf: Value) -> list[str]:
    return _NUMBER.findall(leaf.row.name or "")


def _readers(flow: Flow, leaf: Value) -> list[Value]:
    """Return the calls of the forward pass that read a parameter, in order.

    For a step inside a call that is the call.
    """
    read = [flow.values[key] for key in flow.readers.get(leaf.key, ())]
    # of what nothing reads only the size was asked
    read = [v for v in read if v.inner or flow.readers.get(v.key)]
    records = sorted({v.row.record for v in read if v.row.phase == "forward"})
    return [flow.values[record] for record in records]


def _gives_right(sides: Sides, reader: Value) -> bool:
    """Return True for a call that computes what the reference has, or what is made of it
    next is that: a scale is one of the steps of a norm."""
    made = (reader, *computing_readers(sides.candidate, reader))
    return any(
        value.computes and value.key in sides.twins and not value.says_nothing
        for value in made
    )


def _line_of_block(flow: Flow, leaf: Value, reader: Value) -> str | None:
    """Return the line that runs all that has the same number as a parameter."""
    stack = stack_of(reader.row)
    if not stack:
        return reader.row.line
    place = len(stack) - 1
    for other in flow.values.values():
        if other.is_call or not other.row.name or _block(other) != _block(leaf):
            continue
        readers = _readers(flow, other)
        if readers and stack_of(readers[0].row):
            place = min(place, shared(stack, stack_of(readers[0].row)))
    return stack[max(place - 1, 0)]


def _block(leaf: Value) -> str:
    """Return a parameter's name up to its first number."""
    name = leaf.row.name or ""
    match = _NUMBER.search(name)
    return name[: match.end()] if match else name
