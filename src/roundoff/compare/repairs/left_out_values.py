"""What the reference makes more of a right value before it is read."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from collections.abc import Set as AbstractSet
from itertools import takewhile

from torch import Tensor

from roundoff.compare.blame.blamed import Blamed
from roundoff.compare.blame.near_leaves import leaves_of
from roundoff.compare.records.recorded_calls import CannotRun
from roundoff.compare.records.recorded_rows import RecordedRow
from roundoff.compare.records.value_sketch import in_reals
from roundoff.compare.repairs.goals import apart
from roundoff.compare.repairs.named_repairs import there
from roundoff.compare.repairs.read_by_region import (
    hands_on,
    in_region_alone,
    values_read,
)
from roundoff.compare.repairs.rejoins import Rejoin
from roundoff.compare.repairs.transplants import in_layout_of
from roundoff.compare.repairs.trials import Trials
from roundoff.compare.rounding.rounding_bound import DIFFERENCES, PRODUCTS
from roundoff.compare.values.fault_lines import FaultLines, computing_readers
from roundoff.compare.values.traced_calls import TracedProgram
from roundoff.compare.values.value_flow import Flow, Value
from roundoff.compare.values.value_regions import Sides, upstream
from roundoff.ops import operators_that

_MOVE = operators_that("move values")
_CREATE = operators_that("create")


def left_out(
    sides: Sides, trials: Trials, rejoin: Rejoin, *, several: bool = False
) -> Blamed | None:
    """Return a right value of which the reference makes another one before it is read.

    One call of the reference is left out: with its result in the value's place all is
    right. With ``several`` it may be several calls, one after the other.
    """
    # in other turns of a loop it is left out too
    everywhere = trials.alone()
    near = trials
    flow = sides.candidate
    reference = sides.reference
    wanted = [reference.values[key] for key in sorted(rejoin.expected)]
    wanted = [twin for twin in wanted if twin.computes and twin.is_number]
    theirs = TracedProgram(reference)
    for value in values_read(flow, rejoin):
        held = flow.tensor(value.key)
        if held is None:
            continue
        twins = set(sides.all_twins(value))
        made_of_it = _made_of(reference, twins, several)
        near = in_region_alone(flow, near, rejoin, value)
        for twin in wanted:
            if twin.key not in made_of_it:
                continue
            for moved in _as_reference_has_it(sides, held, twin, twins, theirs):
                instead = {value.key: moved}
                is_wrong_everywhere = everywhere.outcome({}, instead)[0]
                is_right = is_wrong_everywhere or near.outcome({}, instead)[0]
                if is_right and not _is_made_after(sides, trials, rejoin, value, moved):
                    return _blamed(
                        sides, rejoin, value, twin, is_alone=not is_wrong_everywhere
                    )
    return None


def _blamed(
    sides: Sides, rejoin: Rejoin, value: Value, twin: Value, *, is_alone: bool
) -> Blamed:
    """Name what leads from a value to what the reference has in its place.

    ``is_alone``: the value is right in other turns of a loop.
    """
    flow, reference = sides.candidate, sides.reference
    last = _moved_on(flow, value)
    products = (last, *computing_readers(flow, last))
    ones = (_idle_ones(flow, each, twin) for each in products)
    idle = idle_leaf(sides, last, [twin.key]) or next(filter(None, ones), None)
    if idle is not None:
        return idle
    lines = FaultLines(sides, rejoin.region | {rejoin.value.key})
    named, line = lines.of_left_out(last, twin, is_right_elsewhere=is_alone)
    first = _first_left_out(reference, twin, set(sides.all_twins(value)))
    words = f"left out is {there(twin)}"
    if first.row.line != twin.row.line:
        words = f"left out is all from {there(first)} to {there(twin)}"
    return Blamed(named, first, words, is_operator=True, line=line)


def _is_made_after(
    sides: Sides, trials: Trials, rejoin: Rejoin, value: Value, made: Tensor
) -> bool:
    """Return True where what the candidate does next changes a value, and not this one.

    What is normalized once more stays as it is. Then the reference does the one where the
    candidate does the other, and nothing is left out.
    """
    flow = sides.candidate
    held = flow.tensor(value.key)
    places = rejoin.region | {rejoin.value.key}
    last = rejoin.value.order
    try:
        changed = trials.program.again({}, {value.key: made})
        again = list(takewhile(lambda each: _order(flow, each[0]) <= last, changed))
    except CannotRun:
        return False
    for row, tensor in again:
        is_new = row.record in places and flow.values[row.record].computes
        present = flow.tensor(row.record) if is_new else None
        if present is None or held is None:
            continue
        was_changed = _apart_in_any_order(held, present) > sides.limit
        if was_changed and _apart_in_any_order(made, tensor) <= sides.limit:
            return True
    return False


def _order(flow: Flow, row: RecordedRow) -> tuple[int, int]:
    return flow.values[row.record].order


def _apart_in_any_order(one: Tensor, other: Tensor) -> float:
    """Return how far the elements of two tensors are apart, in rising order."""
    ours, theirs = (in_reals(each).reshape(-1).sort().values for each in (one, other))
    return apart(ours, theirs)


def _as_reference_has_it(
    sides: Sides,
    held: Tensor,
    twin: Value,
    twins: AbstractSet[int],
    theirs: TracedProgram,
) -> Iterator[Tensor]:
    """Yield what the reference makes of a value, as it may stand in that value's place.

    Where that has rows more or fewer, of padding, the reference's call is made on it.
    """
    content = sides.reference.tensor(twin.key)
    if content is not None:
        fitting = [*in_layout_of(sides, held, content)]
        yield from fitting or _made_here(theirs, twin, twins, held)


def _made_here(
    program: TracedProgram, made: Value, sources: AbstractSet[int], held: Tensor
) -> Iterator[Tensor]:
    """Yield what one call makes of another value in the place of its source, as large."""
    call = program.calls.get(made.row.call)
    if call is None or sources.isdisjoint(made.row.inputs):
        return
    instead = {key: held for key in made.row.inputs if key in sources}
    try:
        results = program.one(call, instead)
    except CannotRun:
        return
    for row, tensor in results:
        if row.record == made.row.record and tensor.shape == held.shape:
            yield tensor


def unmade(sides: Sides, rejoin: Rejoin, region: frozenset[int]) -> Blamed | None:
    """Return what reads a right value as it is, where the reference makes more of it first.

    ``region``: of the programs' difference. Both programs read the value elsewhere too, and
    as it is.
    """
    flow, reference = sides.candidate, sides.reference
    value = rejoin.value
    twins = set(sides.all_twins(value))
    is_right = value.key not in region and value.computes
    if not is_right or twins.isdisjoint(_read_by(reference, rejoin.twin)):
        return None
    readers = {each.row.line for each in computing_readers(flow, value)}
    reading = [reference.values[k] for t in twins for k in reference.readers.get(t, ())]
    is_read_elsewhere = any(
        each.computes and each.key != rejoin.twin.key and not hands_on(each)
        for each in reading
    )
    if len(readers) < 2 or not is_read_elsewhere:
        return None
    lines = FaultLines(sides, region)
    named, line = lines.of_left_out(
        _moved_on(flow, value), rejoin.twin, is_right_elsewhere=True
    )
    words = f"left out is {there(rejoin.twin)}"
    return Blamed(named, rejoin.twin, words, is_operator=True, line=line)


def idle_leaf(sides: Sides, value: Value, expected: Iterable[int]) -> Blamed | None:
    """Return the parameter of zeros that a call adds, or of ones that it multiplies by.

    A loader that leaves one out leaves what the module begins with. The reference has a
    parameter of as many elements that the candidate lacks, read by what is ``expected``.
    """
    flow = sides.candidate
    if value.operator not in DIFFERENCES | PRODUCTS:
        return None
    neutral = 0.0 if value.operator in DIFFERENCES else 1.0
    wanted = {
        leaf.row.numel: leaf
        for leaf in leaves_of(sides.reference, expected)
        if leaf.key not in sides.agreeing
    }
    for source in _constants_read(flow, value, neutral):
        ours = wanted.get(source.row.numel)
        leaf = None if ours is None else leaf_behind(flow, source)
        if leaf is not None:
            words = (
                f"{leaf.row.name} holds {neutral:g} there, which changes nothing; the "
                f"reference has {wanted[source.row.numel].row.name}"
            )
            return Blamed(leaf, ours, words)
    return None


def _idle_ones(flow: Flow, value: Value, twin: Value) -> Blamed | None:
    """Return the ones that a product reads, where the reference's reads what it computes.

    Zeros that are added are what sums begin with.
    """
    if value.operator not in PRODUCTS or value.operator != twin.operator:
        return None
    for source in _constants_read(flow, value, 1.0):
        made = _behind_moves(flow, source)
        if made is not None and made.operator in _CREATE and (made.row.numel or 0) > 1:
            words = "it is 1 everywhere, which changes nothing where it is read"
            return Blamed(made, twin, words, is_operator=True)
    return None


def _constants_read(flow: Flow, value: Value, number: float) -> Iterator[Value]:
    """Yield what a call reads that is this number everywhere."""
    for key in value.row.inputs:
        source = flow.values.get(key)
        sketch = None if source is None else source.sketch
        if sketch is None or not sketch.constant or not sketch.exact:
            continue
        if sketch.values[0] == number:
            yield flow.values[key]


def leaf_behind(flow: Flow, value: Value) -> Value | None:
    """Return the parameter that a value is, or is moved or cut out of; None for no such."""
    behind = _behind_moves(flow, value)
    if behind is None or behind.is_call or not behind.row.name:
        return None
    return behind


def _behind_moves(flow: Flow, value: Value) -> Value | None:
    """Return what a value is moved or cut out of; None where nobody knows."""
    while value.is_call and hands_on(value) and value.inputs:
        source = flow.values.get(value.inputs[0])
        if source is None:
            return None
        value = source
    return value


def _first_left_out(flow: Flow, last: Value, twins: AbstractSet[int]) -> Value:
    """Return the first that computes with one of ``twins`` and leads to the last."""
    between = upstream(flow, [last.key], lambda value: value.key not in twins)
    reading = [
        flow.values[key]
        for key in between
        if not twins.isdisjoint(_read_by(flow, flow.values[key]))
    ]
    computing = [v for v in reading if not hands_on(v) and v.row.line is not None]
    return min(computing, key=lambda value: value.order, default=last)


def _moved_on(flow: Flow, value: Value) -> Value:
    """Return what a value is moved to, as long as nothing else reads it."""
    while True:
        readers = [flow.values[key] for key in flow.readers.get(value.key, ())]
        readers = [v for v in readers if v.row.phase == value.row.phase]
        if len(readers) != 1 or not hands_on(readers[0]) or readers[0].inner:
            return value
        value = readers[0]


def _read_by(flow: Flow, value: Value) -> set[int]:
    """Return what a call reads, behind moves and the steps inside the call."""
    read: set[int] = set()
    waiting = list(value.inputs)
    while waiting:
        key = waiting.pop()
        if key in read or key not in flow.values:
            continue
        read.add(key)
        if _is_passed(flow.values[key]):
            waiting += flow.values[key].inputs
    return read


def _made_of(flow: Flow, keys: AbstractSet[int], several: bool) -> set[int]:
    """Return what reads any of ``keys``, as ``_read_by`` has it.

    With ``several`` all that is made of them.
    """
    made: set[int] = set()
    waiting = list(keys)
    while waiting:
        read = waiting.pop()
        for key in (*flow.readers.get(read, ()), *flow.parts.get(read, ())):
            if key in made:
                continue
            made.add(key)
            if several or _is_passed(flow.values[key]):
                waiting.append(key)
    return made


def _is_passed(value: Value) -> bool:
    """Return True for what moves a value, and for a step inside a call."""
    return value.inner or not value.computes or value.operator in _MOVE
