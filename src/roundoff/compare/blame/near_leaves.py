"""The leaves that the first values which differ are made of, and what lies between."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Sequence

from torch import Tensor

from roundoff.compare.records.recorded_calls import CannotRun
from roundoff.compare.values.traced_calls import TracedProgram
from roundoff.compare.values.value_flow import Flow, Value
from roundoff.compare.values.value_regions import Sides

#: Parameters of a region that are tried one by one.
MOST_LEAVES = 12
#: Values after the first that differs, which are tried too.
NEXT = 4


def leaves_near(flow: Flow, starts: Sequence[int], agreeing: object) -> list[Value]:
    """Return the parameters and buffers that values read, not behind values that agree.

    Values that are made of parameters alone are looked through.
    """
    leaves: dict[int, Value] = {}
    seen: set[int] = set()
    waiting = [(key, True) for key in starts]
    while waiting:
        key, is_start = waiting.pop()
        if key in seen or key not in flow.values:
            continue
        seen.add(key)
        value = flow.values[key]
        if value.row.name and not value.is_call:
            leaves[key] = value
            continue
        agrees = key in agreeing  # type: ignore[operator]
        if agrees and not is_start and not of_leaves_alone(flow, value):
            continue
        waiting += [(k, is_start and _is_inside(flow, k)) for k in value.inputs]
    return sorted(leaves.values(), key=lambda v: v.order)[:MOST_LEAVES]


def _is_inside(flow: Flow, key: int) -> bool:
    """Return True for a step inside a call."""
    return key in flow.values and flow.values[key].inner


def of_leaves_alone(flow: Flow, value: Value, depth: int = 8) -> bool:
    """Return True for a value that is made of parameters and constants alone."""
    if not value.is_call:
        return bool(value.row.name)
    if not depth:
        return False
    inputs = [flow.values[k] for k in value.inputs if k in flow.values]
    return all(of_leaves_alone(flow, each, depth - 1) for each in inputs)


def read_by(flow: Flow, value: Value, agreeing: object) -> list[Value]:
    """Return the parameters of a region and of what it reads, which is one step before."""
    boundary = edge_of_agreement(flow, [value.key], agreeing)
    starts = [value.key, *value.row.inputs]
    starts += [key for key in boundary if flow.behind(key).computes]
    behind = [flow.behind(key).key for key in starts if key in flow.values]
    leaves = {
        leaf.key: leaf
        for start in (*starts, *behind)
        for leaf in leaves_near(flow, [start], agreeing)
    }
    return list(leaves.values())[:MOST_LEAVES]


def next_values(sides: Sides, key: int) -> list[int]:
    """Return a value and the next ones made of it that do not agree."""
    flow = sides.candidate
    chosen = [key]
    waiting = [key]
    while waiting and len(chosen) < NEXT:
        for reader in flow.readers.get(waiting.pop(0), ()):
            value = flow.values[reader]
            if value.inner or value.row.phase != flow.values[key].row.phase:
                continue
            if reader not in sides.twins and reader not in waiting:
                waiting.append(reader)
                if value.computes and reader not in chosen:
                    chosen.append(reader)
    return chosen


def values_with(
    program: TracedProgram, needed: Collection[int], leaf: int, other: Tensor
) -> Iterator[tuple[int, Tensor]]:
    """Yield recorded values as they would be with other values in a leaf.

    Of the records that are needed, in the order of execution; none from the first call
    on that cannot run.
    """
    try:
        for row, tensor in program.again({}, {leaf: other}, needed):
            yield row.record, tensor
    except CannotRun:
        return


def between(flow: Flow, leaf: int, keys: Iterable[int]) -> set[int]:
    """Return the records that lead from a leaf to some values, these among them."""
    return {record for key in keys for record in _between(flow, leaf, key)}


def _between(flow: Flow, leaf: int, key: int) -> set[int]:
    """Return the records that lead from a leaf to a value, the value among them."""
    rows = flow.step.rows
    leads: dict[int, bool] = {leaf: True}
    for record in sorted(rows):
        if record > key:
            break
        row = rows[record]
        if record != leaf and row.is_call:
            leads[record] = any(leads.get(i, False) for i in row.inputs)
    needed = {key}
    for record in sorted((r for r, does in leads.items() if does), reverse=True):
        if record in needed:
            needed.update(i for i in rows[record].inputs if leads.get(i, False))
    return {record for record in needed if record != leaf and leads.get(record, False)}


def parameters_of(flow: Flow) -> list[Value]:
    """Return the named leaves of the forward pass, in order."""
    return [
        value
        for value in flow.in_order()
        if value.row.name
        and not value.is_call
        and value.row.phase == "forward"
        and not value.says_nothing
    ]


def leaves_of(flow: Flow, keys: Iterable[int]) -> list[Value]:
    """Return the parameters and buffers that values read, in the order of execution."""
    leaves: dict[int, Value] = {}
    waiting = list(keys)
    seen = set(waiting)
    while waiting:
        value = flow.values[waiting.pop()]
        for key in (*value.inputs, *value.row.inputs):
            if key in seen or key not in flow.values:
                continue
            seen.add(key)
            source = flow.values[key]
            if source.row.name and not source.is_call:
                leaves[key] = source
            elif not source.computes or source.inner:
                waiting.append(key)
    return sorted(leaves.values(), key=lambda value: value.order)


def edge_of_agreement(flow: Flow, starts: Sequence[int], agreeing: object) -> list[int]:
    """Return the values that agree and are read by a region that ends with ``starts``."""
    boundary: dict[int, None] = {}
    seen: set[int] = set()
    waiting = [k for key in starts for k in flow.values[key].inputs]
    while waiting:
        key = waiting.pop(0)
        if key in seen or key not in flow.values:
            continue
        seen.add(key)
        if key in agreeing:  # type: ignore[operator]
            boundary[key] = None
        else:
            waiting += flow.values[key].inputs
    return list(boundary)
