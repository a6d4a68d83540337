"""Values that stand in other places than the reference's: where did they get there?

All values are there, so that they agree as a whole, and what is computed of them next to
each other does not. A port may hold them in an order of its own; one is at fault where all
is right with the reference's values in its place. It is followed back to the first that is.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterable, Iterator, Sequence

from torch import Tensor

from roundoff.compare.blame.blamed import Blamed
from roundoff.compare.blame.known_leaves import is_in_order
from roundoff.compare.blame.near_leaves import of_leaves_alone
from roundoff.compare.blame.same_layouts import is_close, same_layout
from roundoff.compare.repairs.goals import apart
from roundoff.compare.repairs.rejoins import Rejoin
from roundoff.compare.repairs.replaceable_values import before
from roundoff.compare.repairs.transplants import in_layout_of
from roundoff.compare.repairs.trials import BUDGET, Trials
from roundoff.compare.repairs.turned_values import first_turned
from roundoff.compare.tensors.structure import WRONG_AXIS
from roundoff.compare.values.fault_lines import FaultLines, handed_on
from roundoff.compare.values.value_flow import Flow, Value, constants_of
from roundoff.compare.values.value_regions import Sides, upstream
from roundoff.ops import operators_that

#: Values that are tried, the first ones.
MOST_TRIED = 32
#: Orders of the axes of one value that are tried.
MOST_ORDERS = 24
#: Values that several others are made of.
MOST_COMMON = 4
#: Values of the reference whose elements one has.
MOST_TWINS = 4
#: Values between two that agree.
MOST_BETWEEN = 16
_RESHAPE = operators_that("reshape")
_PLACES = _RESHAPE | operators_that("permute axes")
_PLACES |= operators_that("repeat")
_MOVES = operators_that("move values")


def misordered(sides: Sides, trials: Trials, rejoin: Rejoin) -> Blamed | None:
    """Return the first value whose elements stand in other places than they have to."""
    trials.left = BUDGET
    for value in _read_by_region(sides, rejoin):
        if trials.left < 0:
            return None
        right = _right_order(sides, trials, [value])
        if right is not None:
            is_right = _stands_rightly(sides, value, right[0])
            if is_right and not _is_split(sides.candidate, value):
                return _blamed_reader(sides, rejoin.region, value)
            first = _first_of_order(sides, trials, value)
            return _blamed(sides, trials, rejoin, first)
    common = common_order(sides, trials, rejoin.region)
    if common is not None:
        return common
    trials.left = BUDGET
    for value in _in_other_places(sides, rejoin)[:MOST_TRIED]:
        if _twin_in_place(sides, trials, value):
            first = _first_of_order(sides, trials, value)
            return _blamed(sides, trials, rejoin, first)
    return None


def common_order(
    sides: Sides, trials: Trials, region: Collection[int]
) -> Blamed | None:
    """Return what a function reads several times, and has to be handed in another order."""
    trials.left = BUDGET
    for value in _read_by_several(sides, region):
        if _right_order(sides, trials, [value]) is not None:
            return _blamed_reader(sides, region, value)
    return None


def _blamed(sides: Sides, trials: Trials, rejoin: Rejoin, value: Value) -> Blamed:
    twin = sides.reference.values[sides.all_twins(value)[0]]
    turned = first_turned(sides, trials, value)
    order = "in another order" if turned is None else "the other way round"
    words = (
        f"its values are those of {twin.operator} of {twin.row.site} "
        f"({twin.row.line}) {order}"
    )
    first = turned or value
    line = FaultLines(sides, rejoin.region).of_operator(first)
    return Blamed(first, twin, words, is_operator=True, line=line, label=WRONG_AXIS)


def _blamed_reader(sides: Sides, region: Collection[int], value: Value) -> Blamed:
    """Name what reads a value as the reference has it, where it has to be moved first."""
    flow = sides.candidate
    twin = sides.reference.values[sides.all_twins(value)[0]]
    readers = [flow.values[key] for key in flow.readers.get(value.key, ())]
    readers = [v for v in readers if v.row.line and v.row.phase == value.row.phase]
    readers = [v for v in readers if v.key in region] or readers or [value]
    reader = min(readers, key=lambda each: each.order)
    words = (
        f"it reads the values of {twin.operator} of {twin.row.site} "
        f"({twin.row.line}), which have to stand in another order"
    )
    line = FaultLines(sides, region).of_operator(reader)
    if line == reader.row.line:
        line = handed_on(value, readers)
    return Blamed(reader, twin, words, is_operator=True, line=line, label=WRONG_AXIS)


def _read_by_several(sides: Sides, region: Collection[int]) -> list[Value]:
    """Return what several of the values are made of that a wrong region reads, the last first."""
    flow = sides.candidate
    read = before(flow, region)
    sources = {source.key for value in read for source in _computed(flow, value)}
    made_of: Counter[int] = Counter()
    for key in sources:
        inputs = [flow.values[k] for k in flow.values[key].inputs if k in flow.values]
        made_of.update({s.key for value in inputs for s in _computed(flow, value)})
    common = [flow.values[key] for key, count in made_of.items() if count > 1]
    common = [value for value in common if _may_be_moved(sides, value)]
    return sorted(common, key=lambda value: value.order, reverse=True)[:MOST_COMMON]


def _read_by_region(sides: Sides, rejoin: Rejoin) -> list[Value]:
    """Return what the wrong region reads that agrees and is computed of more than parameters.

    Before it another formula may stand, of which no value is the reference's.
    """
    flow = sides.candidate
    formula = upstream(
        flow, sorted(rejoin.region), lambda value: value.key not in sides.twins
    )
    region = formula | {*rejoin.region}
    read = [value for value in before(flow, region) if _may_be_moved(sides, value)]
    return [v for v in read if not of_leaves_alone(flow, v)][:MOST_TRIED]


def _computed(flow: Flow, value: Value) -> Iterator[Value]:
    """Yield what computed a value, before it was moved; nothing for parameters."""
    waiting = [value]
    while waiting:
        source = waiting.pop()
        if source.computes and source.operator not in _MOVES:
            yield source
        elif source.is_call:
            waiting += [flow.values[k] for k in source.inputs if k in flow.values]


def _may_be_moved(sides: Sides, value: Value) -> bool:
    is_value = value.is_call and not value.inner and not value.says_nothing
    return is_value and value.key in sides.twins


def _first_of_order(sides: Sides, trials: Trials, value: Value) -> Value:
    """Follow a value back as long as what it is made of is right in another order too.

    Through what may be laid out so, as rows of two axes that are one: what it is made of
    may show the axes again. Of several that stand wrongly together it is one of the data.
    """
    constants = constants_of(sides.candidate)
    followed = through = [value]
    while trials.left > 0:
        inputs = [*dict.fromkeys(i for each in through for i in _inputs(sides, each))]
        inputs = [each for each in inputs if not _stands_as_in_reference(sides, each)]
        groups = [[each] for each in inputs]
        groups += [inputs] if len(inputs) > 1 else []
        wrong, other = _in_another_order(sides, trials, groups)
        if wrong is None and other is None:
            break
        are_tables = wrong is not None and all(each.key in constants for each in wrong)
        if wrong is not None and not (are_tables and len(wrong) > 1):
            followed = wrong
        through = wrong or other or []
    return min(followed, key=lambda each: (each.key in constants, each.order))


def _in_another_order(
    sides: Sides, trials: Trials, groups: Iterable[list[Value]]
) -> tuple[list[Value] | None, list[Value] | None]:
    """Return the first values that stand wrongly; the first that are only laid out otherwise.

    Both are right in another order.
    """
    laid_out = None
    for group in groups:
        right = _right_order(sides, trials, group)
        if right is None:
            continue
        pairs = zip(group, right, strict=True)
        if not any(_stands_rightly(sides, value, tensor) for value, tensor in pairs):
            return group, laid_out
        laid_out = laid_out or group
    return None, laid_out


def _inputs(sides: Sides, value: Value) -> Iterator[Value]:
    """Yield what a value is made of that agrees, behind what the reference computes otherwise."""
    flow = sides.candidate
    waiting = [*value.inputs]
    seen: set[int] = set()
    while waiting and len(seen) < MOST_BETWEEN:
        key = waiting.pop(0)
        if key in seen or key not in flow.values:
            continue
        seen.add(key)
        if _may_be_moved(sides, flow.values[key]):
            if not _is_of_parameters(flow, flow.values[key]):
                yield flow.values[key]
        else:
            waiting += flow.values[key].inputs


def _is_of_parameters(flow: Flow, value: Value) -> bool:
    """Return True for a value that is made of parameters, and of constants at most."""
    made_of = upstream(flow, [value.key], lambda _value: True)
    has_names = any(flow.values[key].row.name for key in made_of)
    return has_names and of_leaves_alone(flow, value)


def _stands_as_in_reference(sides: Sides, value: Value) -> bool:
    """Return True where the reference has the same elements in the same order."""
    held = sides.candidate.tensor(value.key)
    twins = [sides.reference.tensor(key) for key in sides.all_twins(value)]
    return held is not None and any(t is not None and is_close(t, held) for t in twins)


def _stands_rightly(sides: Sides, value: Value, right: Tensor) -> bool:
    """Return True for a value as the reference has it, which only what reads it regroups.

    It may be laid out otherwise: the order in which all is right is then none of its axes.
    """
    if _stands_as_in_reference(sides, value):
        return True
    held = sides.candidate.tensor(value.key)
    return (
        held is not None
        and is_in_order(sides, value)
        and not same_layout(held, right.to(held.dtype))
    )


def _is_split(flow: Flow, value: Value) -> bool:
    """Return True for an axis that a line cuts into two: it says which varies faster.

    A product of matrices cuts its own result, on its own line.
    """
    if value.operator not in _RESHAPE or len(value.inputs) != 1:
        return False
    source = flow.values.get(value.inputs[0])
    if source is None or source.row.line == value.row.line:
        return False
    return 0 < len(source.row.shape or ()) < len(value.row.shape or ())


def _right_order(
    sides: Sides, trials: Trials, values: Sequence[Value]
) -> Sequence[Tensor] | None:
    """Return the reference's values with which, in the place of some, all is right.

    They have the same elements: as they stand in the reference, then each in the order of
    axes of as high a number.
    """
    ways = [_as_they_stand_first(sides, value) for value in values]
    for way in zip(*ways, strict=False):
        moved = {v.key: t for v, t in zip(values, way, strict=True)}
        if trials.outcome({}, moved)[0]:
            return way
    return None


def _as_they_stand_first(sides: Sides, value: Value) -> list[Tensor]:
    """Return the other orders of a value, those that stand in the reference first."""
    twins = [sides.reference.tensor(key) for key in sides.all_twins(value)]
    contents = [content for content in twins if content is not None]

    def is_turned(moved: Tensor) -> bool:
        return not any(is_close(content, moved) for content in contents)

    return sorted(_in_other_orders(sides, value), key=is_turned)


def _in_other_orders(sides: Sides, value: Value) -> Iterator[Tensor]:
    held = sides.candidate.tensor(value.key)
    orders = 0
    for key in _from_both_ends(sides.all_twins(value))[:MOST_TWINS]:
        content = sides.reference.tensor(key)
        if held is None or content is None:
            continue
        for moved in in_layout_of(sides, held, content):
            if moved.shape == held.shape and apart(moved, held) > sides.limit:
                yield moved
                orders += 1
            if orders >= MOST_ORDERS:
                return


def _from_both_ends(keys: Sequence[int]) -> list[int]:
    """Return the first, the last, the second, and so on.

    The reference moves values several times: as they are made, and as they are read.

    >>> _from_both_ends([1, 2, 3, 4, 5])
    [1, 5, 2, 4, 3]
    """
    ways = zip(keys, reversed(keys), strict=True)
    return [*dict.fromkeys(key for pair in ways for key in pair)]


def _twin_in_place(sides: Sides, trials: Trials, value: Value) -> bool:
    """Return True where all is right with a value of the reference in the value's place."""
    held = sides.candidate.tensor(value.key)
    for key in sides.all_twins(value):
        content = sides.reference.tensor(key)
        if held is None or content is None:
            continue
        for moved in in_layout_of(sides, held, content):
            if trials.outcome({}, {value.key: moved})[0]:
                return True
    return False


def _in_other_places(sides: Sides, rejoin: Rejoin) -> list[Value]:
    """Return the moves behind the wrong region that agree but for their order, in order."""
    flow = sides.candidate
    before = upstream(flow, sorted(rejoin.region), lambda value: value.is_call)
    values = [flow.values[key] for key in before - rejoin.region]
    values = [value for value in values if value.is_number and not value.inner]
    values = [value for value in values if value.operator in _PLACES]
    values = [value for value in values if _stands_otherwise(sides, value)]
    return sorted(values, key=lambda value: value.order)


def _stands_otherwise(sides: Sides, value: Value) -> bool:
    """Return True where the reference has the same elements in another order too."""
    held = sides.candidate.tensor(value.key)
    twins = [sides.reference.tensor(key) for key in sides.all_twins(value)]
    contents = [content for content in twins if content is not None]
    return held is not None and any(not same_layout(c, held) for c in contents)
