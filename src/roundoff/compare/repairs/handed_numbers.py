"""Was the number that an edit changes handed to the function that its call stands in?

A function that several lines call with other numbers, of values of one size, makes none of
them: the line that hands the wrong one is at fault. What a function works out from the sizes
it is given, and what a module holds, is its own.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Sequence
from typing import Any

from torch.utils._pytree import KeyPath, tree_leaves_with_path

from roundoff.compare.records.call_stacks import stack_of
from roundoff.compare.repairs.repair_trials import Repair
from roundoff.compare.values.traced_calls import TracedCall, records_in
from roundoff.compare.values.value_flow import Flow


def line_that_hands_numbers(flow: Flow, repair: Repair) -> str | None:
    """Return the line that handed on the numbers that a repair changes; None if none did."""
    call = repair.call
    changed = _changed_numbers(repair)
    stack = stack_of(call.first)
    if not changed or len(stack) < 2:
        return None
    calls = list(_calls_of_line(flow, call))
    place = len(stack) - 1
    while place > 0 and _are_handed(flow, calls, changed, stack[place:]):
        place -= 1
    return stack[place] if place < len(stack) - 1 else None


def _changed_numbers(repair: Repair) -> list[KeyPath]:
    """Return where an edit has other numbers; nothing where it changes more than these."""
    edit = repair.edits.get(repair.call.first.call)
    if edit is None or len(edit.steps) != 1 or edit.places is not None:
        return []
    [step] = edit.steps
    is_same = step.overload == repair.call.first.overload
    if not is_same or records_in(step.arguments) != records_in(repair.call.parsed):
        return []
    before = _numbers(repair.call.parsed)
    after = _numbers(step.arguments)
    if not after.keys() <= before.keys():
        return []
    return [path for path, number in after.items() if before[path] != number]


def _numbers(arguments: Any) -> dict[KeyPath, Any]:
    """Return what arguments hold besides tensors, by where it stands."""
    leaves = tree_leaves_with_path(arguments, is_leaf=_is_tensor)
    return {path: value for path, value in leaves if not _is_tensor(value)}


def _is_tensor(argument: Any) -> bool:
    return isinstance(argument, dict) and "record" in argument


def _calls_of_line(flow: Flow, call: TracedCall) -> Iterator[TracedCall]:
    """Yield the calls of the same operator that the same line makes."""
    seen = set()
    for value in flow.values.values():
        row = value.row
        is_same = (row.line, row.overload, row.phase) == (
            call.first.line,
            call.first.overload,
            call.first.phase,
        )
        if is_same and row.arguments and row.call not in seen:
            seen.add(row.call)
            yield TracedCall(row, (row,))


def _are_handed(
    flow: Flow,
    calls: Sequence[TracedCall],
    paths: Sequence[KeyPath],
    inside: Sequence[str],
) -> bool:
    """Return True where lines outside of some hand other numbers to them for alike values.

    Within one module, which holds the same for both.
    """
    numbers: dict[Any, dict[str, set[Any]]] = defaultdict(lambda: defaultdict(set))
    for call in calls:
        stack = stack_of(call.first)
        if len(stack) <= len(inside) or stack[-len(inside) :] != tuple(inside):
            continue
        shapes = tuple(
            tuple(flow.values[key].row.shape or ())
            for key in records_in(call.parsed)
            if key in flow.values
        )
        given = _numbers(call.parsed)
        outside = stack[-len(inside) - 1]
        its_numbers = tuple(given.get(path) for path in paths)
        numbers[call.first.module, shapes][outside].add(its_numbers)
    return any(
        len({frozenset(given) for given in by_line.values()}) > 1
        for by_line in numbers.values()
    )
