"""Small edits of a call: what a port's author may have meant.

Another constant, another axis, another operator of the same kind, another input, another
order of axes, the call left out, or one more call. They are made of the call itself and
of what the reference does; each keeps to the call's own inputs, so that it can be made in
every turn of a loop and in every layer that the same line computes.
"""

from __future__ import annotations

import copy
import math
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import combinations, pairwise, permutations
from typing import Any

import torch
from torch import Tensor

from roundoff.compare.records.recorded_rows import RecordedRow
from roundoff.compare.values.traced_calls import (
    BEFORE,
    Edit,
    EditStep,
    TracedCall,
    records_in,
    trusts_sizes,
)
from roundoff.errors import RunError
from roundoff.ops import operators_that, overload_of

#: How unlikely each kind of edit is: the least unlikely one that explains all is named.
ARGUMENT = 0
CHANGE = 1
LAYOUT = 2
LEFT_OUT = 3
INPUT = 4
ONE_MORE = 5

#: What is said of another value in a sum.
ADDED = "added to it"

#: Numbers that are tried for a constant in a call besides those of the reference.
NEUTRAL = (0.0, 1.0, -1.0, 0.5, 2.0)
#: What masks add to scores so that they never count: large, and finite, as a row of
#: which all is masked has to stay a number.
NEVER = -1e9
#: Orders of the axes that are tried: of up to this many axes.
MOST_AXES = 5
#: Groups, or heads, that are tried in a reshaped value.
MOST_GROUPS = 16
#: Indexes of an axis that are tried in place of another.
MOST_INDEXES = 8

_UNARY = operators_that("work element by element") | {"relu", "abs", "neg"}
_PAIRS = operators_that("pair elements")
_REDUCE = operators_that("reduce axes")
_MOVE = operators_that("move values")
_RESHAPE = operators_that("reshape")
_PERMUTE = operators_that("permute axes")
_CUT = operators_that("cut out")
_JOIN = operators_that("join")
#: They put the elements of an axis in another order.
_TURN = operators_that("reorder")
_PAD = operators_that("pad")
_LOOK_UP = operators_that("look up") | {"index_select", "index", "gather"}
_COMPARE = operators_that("say which is larger")
_FILL = operators_that("create") | {"where", "masked_fill", "fill"}
#: Ports write them out, as other libraries have them.
_ACTIVATIONS = sorted(operators_that("activate"))
_SPREADS = sorted(operators_that("turn one spread into another"))
_DIGITS = re.compile(r"\d+")
_NUMBERS = ("number", "float", "Tensor")
#: What one of them does with a number, the other does with its reciprocal.
_INVERSE = {"mul": "div", "div": "mul"}

#: What an edit makes of a call; None where it does not fit.
Template = Callable[[TracedCall], Edit | None]


@dataclass(frozen=True, slots=True)
class Proposal:
    """An edit that may be made in several calls alike.

    Attributes:
        unlikely: of which kind.
        template: what it makes of a call.
        on_line: make it in every call of the line that it fits, not in one alone.
        everywhere: it may be meant for every call with the same argument, whatever line
            made it.
        exchanges: it exchanges parts of one value.
        is_copied: other lines may have it too: those of key and value have one layout.
    """

    unlikely: int
    template: Template
    on_line: bool = False
    everywhere: bool = False
    exchanges: bool = False
    is_copied: bool = False


@dataclass(frozen=True, slots=True, eq=False)
class Insertion:
    """A call of the reference that a value of the candidate may go through.

    Attributes:
        step: the call, with ``BEFORE`` for the value.
        held: its other tensors, from the reference.
        words: its operator and line.
        shape: that a value must have; empty for any.
    """

    step: EditStep
    held: Mapping[int, Tensor]
    words: str
    shape: tuple[int, ...]


@dataclass(slots=True)
class Ingredients:
    """What the reference has, of which edits are made.

    Attributes:
        calls: the calls of its region and of the rest of its forward pass.
        constants: the numbers in them.
        inserted: calls that a value may go through.
        activations: the names of those that the reference's region computes.
        is_read_again: ``is_read_again(record)``: several calls read a value.
        shapes: ``shapes(record)`` gives the shape of a value of the candidate.
        mask_format: ``mask_format(record)`` gives the format of truth values, and of
            numbers of which each is 0 or 1; None of other values.
        maker: ``maker(record)`` gives the call that makes a value; None of no call's.
        written_out: ``written_out(call)`` gives the one value that several operators of a
            line make a call's result of, element by element; None of any other.
        siblings: ``siblings(call)`` gives the arguments of the calls of its line.
        similar: ``similar(call, record)`` yields choices of another value for one that
            a call reads.
    """

    calls: Sequence[TracedCall]
    constants: Sequence[float] = ()
    inserted: Sequence[Insertion] = ()
    activations: Sequence[str] = ()
    is_read_again: Callable[[int], bool] = lambda _record: False
    shapes: Callable[[int], tuple[int, ...]] = lambda _record: ()
    mask_format: Callable[[int], str | None] = lambda _record: None
    maker: Callable[[int], TracedCall | None] = lambda _record: None
    written_out: Callable[[TracedCall], int | None] = lambda _call: None
    siblings: Callable[[TracedCall], Iterable[Any]] = lambda _call: ()
    similar: Callable[
        [TracedCall, int], Iterable[Callable[[TracedCall], int | None]]
    ] = lambda _call, _record: ()
    _by_overload: dict[str, list[Any]] = field(default_factory=dict)
    _numbers: dict[str, dict[float, None]] = field(default_factory=dict)

    def __post_init__(self) -> None:
        for call in self.calls:
            overload = call.first.overload
            if overload is not None:
                self._by_overload.setdefault(overload, []).append(call.parsed)
            numbers = self._numbers.setdefault(call.first.base_operator, {})
            numbers.update(dict.fromkeys(floats_in(call.parsed)))

    def arguments_of(self, overload: str) -> Sequence[Any]:
        """Return the arguments of the reference's calls of one overload."""
        return self._by_overload.get(overload, ())

    def numbers_of(self, operator: str) -> list[float]:
        """Return the numbers of its region, and of the reference's calls of an operator."""
        return [*self.constants, *self._numbers.get(operator, ())]


def proposals(call: TracedCall, ingredients: Ingredients) -> Iterator[Proposal]:
    """Yield edits of a call, the likely kinds first.

    None of one that was called with names alone: edits count its arguments.
    """
    if not call.parsed[0]:
        return
    for unlikely, kind in _KINDS:
        for template in kind(call, ingredients):
            on_line = kind in (_axes_of_line, _exchanged_parts, _moved_windows)
            everywhere = kind in (
                _transferred,
                _switches,
                _constants,
                _shared_constants,
            )
            exchanges = kind in (_exchanged_parts, _other_order_of_results)
            exchanges |= kind is _exchanged_inputs and _is_move(call, _JOIN)
            is_copied = kind in (_other_copies, _layouts) and _is_move(call)
            yield Proposal(
                unlikely, template, on_line, everywhere, exchanges, is_copied
            )


# -- the call's arguments ------------------------------------------------------------


def schema_of(call: TracedCall) -> Sequence[Any]:
    """Return the declared arguments of a call; none where torch does not know it."""
    try:
        return list(overload_of(call.first.overload or "")._schema.arguments)
    except RunError:
        return []


def _holds_record(value: Any) -> bool:
    if isinstance(value, dict):
        return "record" in value or any(_holds_record(v) for v in value.values())
    return isinstance(value, list) and any(_holds_record(v) for v in value)


def _with(parsed: Any, place: int | str, value: Any) -> Any:
    changed = copy.deepcopy(parsed)
    positional, keywords = changed
    if isinstance(place, int):
        positional[place] = value
    else:
        keywords[place] = value
    return changed


def _places(call: TracedCall) -> Iterator[tuple[int | str, Any, Any]]:
    """Yield each argument: its place, its declaration and its value."""
    positional, keywords = call.parsed
    declared = schema_of(call)
    for place, value in enumerate(positional):
        if place < len(declared):
            yield place, declared[place], value
    by_name = {each.name: each for each in declared}
    for name, value in keywords.items():
        if name in by_name:
            yield name, by_name[name], value


def _setting(place: int | str, before: Any, value: Any, words: str) -> Template:
    """Another value for an argument, in calls that have the same one there."""

    def template(call: TracedCall) -> Edit | None:
        positional, keywords = call.parsed
        fits = place in keywords if isinstance(place, str) else place < len(positional)
        if not fits:
            return None
        present = keywords[place] if isinstance(place, str) else positional[place]
        if present != before:
            return None
        step = EditStep(call.first.overload or "", _with(call.parsed, place, value))
        return Edit((step,), words)

    return template


def _transferred(call: TracedCall, ingredients: Ingredients) -> Iterator[Template]:
    """Constant arguments as the reference has them in a call of the same operator."""
    seen: set[str] = set()
    if trusts_sizes(call.first.base_operator):
        yield from _groups_of_another(call, ingredients)
        return
    shared = ingredients.numbers_of(call.first.base_operator)
    is_pair = call.first.base_operator in _PAIRS
    if is_pair and any(value in shared for _, value in numbers_of(call)):
        # its number is the reference's: see ``_shared_constants``
        return
    for other in ingredients.arguments_of(call.first.overload or ""):
        template = _taking_over(other)
        edit = template(call)
        if edit is None or str(edit.steps) in seen:
            continue
        seen.add(str(edit.steps))
        if edit.steps[0].arguments != call.parsed:
            yield template


def _groups_of_another(
    call: TracedCall, ingredients: Ingredients
) -> Iterator[Template]:
    """Another number of groups: the one size that a kernel checks."""
    for place, declared, value in _places(call):
        if declared.name != "group":
            continue
        numbers = {
            other[0][place]
            for other in ingredients.arguments_of(call.first.overload or "")
            if isinstance(place, int) and place < len(other[0])
        }
        for number in sorted(numbers - {value}):
            yield _setting(place, value, number, f"with {number} groups, not {value}")


def _switches(call: TracedCall, _: Ingredients) -> Iterator[Template]:
    """A switch the other way, among them those that were left at their default."""
    if _is_move(call):
        return
    places = {declared.name: (place, value) for place, declared, value in _places(call)}
    for position, declared in enumerate(schema_of(call)):
        if str(declared.type) != "bool":
            continue
        place, value = places.get(
            declared.name, (declared.name, declared.default_value)
        )
        words = f"with {declared.name}={not value}"
        if declared.name in places:
            yield _setting(place, value, not value, words)
        elif isinstance(value, bool):
            yield _adding_argument(position, declared, not value, words)


def _adding_argument(position: int, declared: Any, value: bool, words: str) -> Template:
    def template(call: TracedCall) -> Edit | None:
        parsed = copy.deepcopy(call.parsed)
        positional, keywords = parsed
        if declared.kwarg_only:
            keywords[declared.name] = value
        else:
            defaults = [d.default_value for d in schema_of(call)]
            positional += defaults[len(positional) : position]
            positional.append(value)
        return Edit((EditStep(call.first.overload or "", parsed),), words)

    return template


def _taking_over(other: Any) -> Template:
    def template(call: TracedCall) -> Edit | None:
        parsed = copy.deepcopy(call.parsed)
        positional, keywords = other
        if len(parsed[0]) != len(positional):
            return None
        changed = []
        for place, value in enumerate(positional):
            if _holds_record(value) or _holds_record(parsed[0][place]):
                continue
            if parsed[0][place] != value:
                parsed[0][place] = value
                changed.append(_shown(value))
        for name in {*keywords, *parsed[1]}:
            if _holds_record(keywords.get(name)) or name not in keywords:
                changed += [f"no {name}"] if name in parsed[1] else []
                parsed[1].pop(name, None)
            elif parsed[1].get(name) != keywords[name]:
                parsed[1][name] = keywords[name]
                changed.append(f"{name}={_shown(keywords[name])}")
        step = EditStep(call.first.overload or "", parsed)
        return Edit((step,), f"with {', '.join(changed) or 'its other arguments'}")

    return template


def _shown(value: Any) -> str:
    return f"{value:.6g}" if isinstance(value, float) else str(value)


def _constants(call: TracedCall, ingredients: Ingredients) -> Iterator[Template]:
    """Other numbers in the place of one that the reference does not have."""
    yield from _other_constants(call, ingredients, is_shared=False)


def _shared_constants(call: TracedCall, ingredients: Ingredients) -> Iterator[Template]:
    """Other numbers in the place of one that the reference has too."""
    yield from _other_constants(call, ingredients, is_shared=True)


def _other_constants(
    call: TracedCall, ingredients: Ingredients, *, is_shared: bool
) -> Iterator[Template]:
    pool = ingredients.numbers_of(call.first.base_operator)
    for place, value in numbers_of(call):
        if (float(value) in pool) != is_shared:
            continue
        numbers = _other_numbers(float(value), pool)
        if call.first.base_operator in _FILL:
            numbers.append(NEVER)
        if isinstance(value, int):
            numbers.sort(key=lambda number: not number.is_integer())
        for other in numbers:
            yield _setting(
                place, value, other, f"with {other:.6g}, not {float(value):.6g}"
            )


def _reciprocals(call: TracedCall, ingredients: Ingredients) -> Iterator[Template]:
    """One over a number that the reference divides by where this multiplies, or turned round."""
    inverse = _INVERSE.get(call.first.base_operator)
    if inverse is None:
        return
    numbers = [number for number in ingredients.numbers_of(inverse) if number]
    for place, value in numbers_of(call):
        for number in numbers:
            words = f"with {1 / number:.6g}, not {float(value):.6g}"
            yield _setting(place, value, 1 / number, words)


def exchanging_numbers(one: float, other: float) -> Template:
    """The second number in the place of the first, and the other way round; signs stay."""
    stands_for = {one: other, other: one}

    def template(call: TracedCall) -> Edit | None:
        for place, value in numbers_of(call):
            number = stands_for.get(abs(value))
            if number is not None:
                words = f"with {number:.6g}, not {abs(value):.6g}"
                changed = math.copysign(number, value)
                return _setting(place, value, changed, words)(call)
        return None

    return template


def numbers_of(call: TracedCall) -> Iterator[tuple[int | str, int | float]]:
    """Yield the numbers of a call, and where they stand."""
    for place, declared, value in _places(call):
        if not isinstance(value, int | float) or isinstance(value, bool):
            continue
        kind = str(declared.type).removeprefix("Optional[").rstrip("]")
        if kind in _NUMBERS and declared.name != "alpha":
            yield place, value


def numbers_in(value: object) -> Iterator[int | float]:
    """Yield the numbers of arguments, integers too, without those of records."""
    if isinstance(value, int | float) and not isinstance(value, bool):
        yield value
    elif isinstance(value, list):
        for each in value:
            yield from numbers_in(each)
    elif isinstance(value, dict) and "record" not in value:
        for each in value.values():
            yield from numbers_in(each)


def floats_in(value: object) -> Iterator[float]:
    """Yield the numbers of arguments that are no integers."""
    return (number for number in numbers_in(value) if isinstance(number, float))


def _other_numbers(value: float, pool: Sequence[float]) -> list[float]:
    numbers = [*pool, *NEUTRAL, 2 * value, value / 2, -value, value * value]
    if value.is_integer():
        numbers += [value + 1, value - 1]
    if value:
        numbers.append(1 / value)
    if value > 0:
        numbers += [math.sqrt(value), 1 / math.sqrt(value)]
    return [n for n in dict.fromkeys(numbers) if n != value and math.isfinite(n)]


def _diagonals(call: TracedCall, _: Ingredients) -> Iterator[Template]:
    """The next diagonal of a triangle: masks that are one off."""
    for place, declared, value in _places(call):
        if declared.name == "diagonal" and type(value) is int:
            for other in (value - 1, value + 1):
                words = f"with diagonal={other}, not {value}"
                yield _setting(place, value, other, words)


def _pairs_of_numbers(call: TracedCall, _: Ingredients) -> Iterator[Template]:
    """Pairs of numbers, as paddings are, the other way round or made equal."""
    for place, _declared, value in _places(call):
        if isinstance(place, int) and _is_pairs(value):
            for change in (_turned_pairs, _even_pairs):
                yield _changing_pairs(place, change)


def _turned_pairs(numbers: Sequence[int]) -> list[int]:
    pairs = zip(numbers[::2], numbers[1::2], strict=True)
    return [number for before, after in pairs for number in (after, before)]


def _even_pairs(numbers: Sequence[int]) -> list[int]:
    pairs = zip(numbers[::2], numbers[1::2], strict=True)
    return [sum(pair) // 2 for pair in pairs for _side in pair]


def _changing_pairs(
    place: int, change: Callable[[Sequence[int]], list[int]]
) -> Template:
    def template(call: TracedCall) -> Edit | None:
        positional = call.parsed[0]
        numbers: Any = positional[place] if place < len(positional) else None
        if not _is_pairs(numbers) or change(numbers) == numbers:
            return None
        changed = change(numbers)
        step = EditStep(call.first.overload or "", _with(call.parsed, place, changed))
        return Edit((step,), f"with {changed}, not {numbers}")

    return template


def _is_pairs(value: Any) -> bool:
    if not isinstance(value, list) or not value or len(value) % 2:
        return False
    return all(type(number) is int for number in value)


def _axes(call: TracedCall, ingredients: Ingredients) -> Iterator[Template]:
    """Other axes of what works along one or several."""
    records = records_in(call.parsed[0])
    if not records or _is_move(call, _RESHAPE | _PERMUTE | _CUT):
        return
    dimensions = len(ingredients.shapes(records[0]))
    for place, declared, value in _places(call):
        if declared.name not in ("dim", "dims", "axis"):
            continue
        if type(value) is int:
            for axis in range(dimensions):
                if axis != value % max(1, dimensions):
                    yield _setting(
                        place, value, axis, f"along axis {axis}, not {value}"
                    )
        elif isinstance(value, list):
            for axes in _other_sets(value, dimensions):
                yield _setting(place, value, axes, f"over axes {axes}, not {value}")


def _other_sets(axes: Sequence[int], dimensions: int) -> list[list[int]]:
    if not 0 < dimensions <= MOST_AXES:
        return []
    present = {axis % dimensions for axis in axes}
    return [each for each in _sets_of(dimensions) if set(each) != present]


def _sets_of(dimensions: int) -> list[list[int]]:
    return [
        [axis for axis in range(dimensions) if number >> axis & 1]
        for number in range(1, 2**dimensions)
    ]


def _axes_of_line(call: TracedCall, ingredients: Ingredients) -> Iterator[Template]:
    """Another axis in all that a line computes along one: a softmax written out."""
    records = records_in(call.parsed[0])
    if not records or _is_move(call, _RESHAPE | _PERMUTE | _CUT):
        return
    dimensions = len(ingredients.shapes(records[0]))
    axis = _axis_of(call, dimensions)
    if axis is None:
        return
    for other in range(dimensions):
        if other != axis:
            yield _along(axis, other, dimensions)


def _axis_of(call: TracedCall, dimensions: int) -> int | None:
    """Return the one axis that a call works along; None for none or several."""
    for _place, declared, value in _places(call):
        if declared.name not in ("dim", "dims", "axis"):
            continue
        axes = value if isinstance(value, list) else [value]
        if len(axes) == 1 and type(axes[0]) is int and dimensions:
            return int(axes[0]) % dimensions
    return None


def _along(axis: int, other: int, dimensions: int) -> Template:
    words = f"along axis {other}, not {axis}, with what else this line does along it"

    def template(call: TracedCall) -> Edit | None:
        if _is_move(call) or _axis_of(call, dimensions) != axis:
            return None
        for place, declared, value in _places(call):
            if declared.name in ("dim", "dims", "axis"):
                changed = [other] if isinstance(value, list) else other
                arguments = _with(call.parsed, place, changed)
                return Edit((EditStep(call.first.overload or "", arguments),), words)
        return None

    return template


def _other_order_of_results(call: TracedCall, _: Ingredients) -> Iterator[Template]:
    """Two of the parts that a call cuts out exchanged."""
    count = len(call.rows)
    if not 1 < count <= MOST_INDEXES or not _is_move(call):
        return
    for first, second in combinations(range(count), 2):
        order = list(range(count))
        order[first] = second
        order[second] = first
        yield _with_places(tuple(order), f"with parts {first} and {second} exchanged")


def _other_copies(call: TracedCall, ingredients: Ingredients) -> Iterator[Template]:
    """Each index several times in a row, where the whole is repeated; not the other way round.

    Copies that stand in a row are made by ``expand`` and a view: see ``_layouts``.
    """
    records = records_in(call.parsed[0])
    is_copied = call.first.base_operator == "repeat" or _is_move(call, _JOIN)
    if not is_copied or len(set(records)) != 1:
        return
    shape = ingredients.shapes(records[0])
    result = tuple(call.first.shape or ())
    ones = (1,) * (len(result) - len(shape))
    for axis, (length, total) in enumerate(zip((*ones, *shape), result, strict=True)):
        if 1 < length < total:
            yield _copied_in_a_row(axis, length)


def _copied_in_a_row(axis: int, length: int) -> Template:
    def template(call: TracedCall) -> Edit | None:
        result = list(call.first.shape or ())
        if axis >= len(result) or result[axis] % length:
            return None
        copies = [result[axis] // length, length]
        order = [*range(axis), axis + 1, axis, *range(axis + 2, len(result) + 1)]
        whole = {"record": BEFORE}
        apart = [*result[:axis], *copies, *result[axis + 1 :]]
        steps = (
            EditStep(call.first.overload or "", call.parsed),
            EditStep("aten.reshape.default", [[whole, apart], {}]),
            EditStep("aten.permute.default", [[whole, order], {}]),
            EditStep("aten.reshape.default", [[whole, result], {}]),
        )
        return Edit(steps, f"with each index of axis {axis} {copies[0]} times in a row")

    return template


def _other_sides(call: TracedCall, _: Ingredients) -> Iterator[Template]:
    """As much padding on the other side, on one side, on both, or one place further."""
    if call.first.base_operator not in _PAD:
        return
    yield _padded(lambda before, after: (after, before), "on the other sides")
    yield _padded(lambda before, after: (before + after, 0), "before only")
    yield _padded(lambda before, after: (0, before + after), "after only")
    yield _padded(_centred, "alike on both sides")
    yield _padded(lambda before, after: (before + 1, after - 1), "one place earlier")
    yield _padded(lambda before, after: (before - 1, after + 1), "one place later")


def _centred(before: int, after: int) -> tuple[int, int]:
    half = (before + after) // 2
    return half, before + after - half


def _other_rows(call: TracedCall, _: Ingredients) -> Iterator[Template]:
    """The rows one later or one earlier of what is looked up."""
    if call.first.base_operator not in _LOOK_UP:
        return
    for place in range(1, len(records_in(call.parsed))):
        yield _looked_up(place, 1, "of rows one later")
        yield _looked_up(place, -1, "of rows one earlier")


def _looked_up(place: int, by: int, words: str) -> Template:
    def template(call: TracedCall) -> Edit | None:
        records = records_in(call.parsed)
        if place >= len(records):
            return None
        indexes = [[{"record": records[place]}, by], {}]
        first = EditStep("aten.add.Scalar", indexes)
        counter = iter(range(len(records)))
        arguments = _with_record(call.parsed, counter, place, BEFORE)
        last = EditStep(call.first.overload or "", arguments)
        return Edit((first, last), words)

    return template


def _padded(moved: Callable[[int, int], tuple[int, int]], words: str) -> Template:
    def template(call: TracedCall) -> Edit | None:
        positional, keywords = call.parsed
        sides = positional[1] if len(positional) > 1 else None
        if not isinstance(sides, list) or not all(isinstance(n, int) for n in sides):
            return None
        pairs = zip(sides[::2], sides[1::2], strict=False)
        # an axis that is not padded stays as it is
        others = [n for b, a in pairs for n in (moved(b, a) if b or a else (b, a))]
        if others == sides or min(others, default=0) < min(sides, default=0):
            return None
        arguments = [[positional[0], others, *positional[2:]], keywords]
        return Edit(
            (EditStep(call.first.overload or "", arguments),), f"padded {words}"
        )

    return template


def _with_places(places: tuple[int, ...], words: str) -> Template:
    def template(call: TracedCall) -> Edit | None:
        if len(call.rows) != len(places):
            return None
        step = EditStep(call.first.overload or "", call.parsed)
        return Edit((step,), words, places=places)

    return template


def _moved_windows(call: TracedCall, ingredients: Ingredients) -> Iterator[Template]:
    """What a line cuts out, as long, one earlier or later along each axis."""
    if call.first.base_operator != "slice" or not records_in(call.parsed[0]):
        return
    for step in (-1, 1):
        yield _moved(step, ingredients)


def _moved(step: int, ingredients: Ingredients) -> Template:
    def template(call: TracedCall) -> Edit | None:
        positional = call.parsed[0]
        if call.first.base_operator != "slice" or len(positional) < 4:
            return None
        [record, axis, start, _, *more] = positional
        shape = ingredients.shapes(records_in([record])[0])
        length = tuple(call.first.shape or ())[axis]
        every = more[0] if more else 1
        if not isinstance(start, int) or start < 0 or every != 1:
            return None
        first = start + step
        if length == shape[axis] or not 0 <= first <= shape[axis] - length:
            return None
        arguments = [[record, axis, first, first + length, *more], call.parsed[1]]
        words = f"from {first} on, not {start}, with what else this line cuts out"
        return Edit((EditStep(call.first.overload or "", arguments),), words)

    return template


def _moved_places(call: TracedCall, ingredients: Ingredients) -> Iterator[Template]:
    """The place before or behind the one that is picked, in each turn of a loop."""
    if call.first.base_operator == "select" and records_in(call.parsed[0]):
        yield _picked(-1, "one place earlier", ingredients)
        yield _picked(1, "one place later", ingredients)


def _picked(step: int, words: str, ingredients: Ingredients) -> Template:
    def template(call: TracedCall) -> Edit | None:
        positional = call.parsed[0]
        if call.first.base_operator != "select" or len(positional) != 3:
            return None
        [record, axis, place] = positional
        size = ingredients.shapes(records_in([record])[0])[axis]
        other = place + step
        if place < 0 or not 0 <= other < size:
            return None
        arguments = [[record, axis, other], call.parsed[1]]
        return Edit((EditStep(call.first.overload or "", arguments),), words)

    return template


def _other_parts(call: TracedCall, ingredients: Ingredients) -> Iterator[Template]:
    """Another one of the equal parts that an axis has."""
    positional = call.parsed[0]
    if call.first.base_operator != "slice" or len(positional) < 4:
        return
    [record, axis, start, _, *more] = positional
    read = ingredients.shapes(records_in([record])[0])
    is_known = type(axis) is int and bool(read) and type(start) is int
    if not is_known or start < 0 or any(every != 1 for every in more):
        return
    size = read[axis]
    length = tuple(call.first.shape or ())[axis]
    if not length or length == size or start % length:
        return
    for first in range(0, size - length + 1, length)[:MOST_INDEXES]:
        if first != start:
            yield _cutting(positional[1:], [axis, first, first + length, *more])


def _other_ends(call: TracedCall, ingredients: Ingredients) -> Iterator[Template]:
    """As many from another place of the axis: the other end, either end, or the middle."""
    if call.first.base_operator == "slice" and records_in(call.parsed[0]):
        for words, place in _PLACES.items():
            yield _from_place(place, words, ingredients)


#: Where a window may lie -> its start, by how many elements it leaves out in all, and now
#: before it.
_PLACES: dict[str, Callable[[int, int], int]] = {
    "from the other end of its axis": lambda left_out, before: left_out - before,
    "from the start of its axis": lambda _left_out, _before: 0,
    "from the end of its axis": lambda left_out, _before: left_out,
    "from the middle of its axis": lambda left_out, _before: left_out // 2,
    "from behind the middle of its axis": lambda left_out, _before: -(-left_out // 2),
}


def _from_place(
    place: Callable[[int, int], int], words: str, ingredients: Ingredients
) -> Template:
    def template(call: TracedCall) -> Edit | None:
        positional = call.parsed[0]
        if call.first.base_operator != "slice" or len(positional) < 4:
            return None
        [record, axis, start, _, *more] = positional
        shape = ingredients.shapes(records_in([record])[0])
        if type(axis) is not int or type(start) is not int or more not in ([], [1]):
            return None
        size = shape[axis]
        length = tuple(call.first.shape or ())[axis]
        first = start + size if start < 0 else start
        other = place(size - length, first)
        if other == first:
            return None
        arguments = [[record, axis, other, other + length], call.parsed[1]]
        return Edit((EditStep(call.first.overload or "", arguments),), words)

    return template


def _cutting(before: list[Any], after: list[Any]) -> Template:
    def template(call: TracedCall) -> Edit | None:
        if call.parsed[0][1:] != before:
            return None
        arguments = [[call.parsed[0][0], *after], call.parsed[1]]
        words = f"from {after[1]} on, not {before[1]}"
        return Edit((EditStep(call.first.overload or "", arguments),), words)

    return template


def _other_splits(call: TracedCall, _: Ingredients) -> Iterator[Template]:
    """Two neighbouring sizes of a reshaped value in another proportion: groups, heads."""
    if call.first.base_operator not in _RESHAPE or len(call.parsed[0]) != 2:
        return
    sizes = call.parsed[0][1]
    if not isinstance(sizes, list) or not all(type(s) is int for s in sizes):
        return
    for axis in range(len(sizes) - 1):
        both = sizes[axis] * sizes[axis + 1]
        for first in range(2, min(both, MOST_GROUPS + 1)):
            if both % first == 0 and first != sizes[axis]:
                other = [*sizes[:axis], first, both // first, *sizes[axis + 2 :]]
                yield _setting(1, sizes, other, f"to {other}, not {sizes}")


def _exchanged_splits(call: TracedCall, _: Ingredients) -> Iterator[Template]:
    """Two neighbouring sizes of a reshaped value cut in the other order: heads vary first."""
    if call.first.base_operator not in _RESHAPE or len(call.parsed[0]) != 2:
        return
    sizes = call.first.shape or ()
    for axis, (size, other) in enumerate(pairwise(sizes)):
        if 1 not in (size, other) and size != other:
            yield _cut_otherwise(axis)


def _cut_otherwise(axis: int) -> Template:
    def template(call: TracedCall) -> Edit | None:
        sizes = list(call.first.shape or ())
        if call.first.base_operator not in _RESHAPE or len(sizes) < axis + 2:
            return None
        other = [*sizes[:axis], sizes[axis + 1], sizes[axis], *sizes[axis + 2 :]]
        [record, *_] = records_in(call.parsed[0])
        first = EditStep("aten.reshape.default", [[{"record": record}, other], {}])
        last = EditStep(
            "aten.transpose.int", [[{"record": BEFORE}, axis, axis + 1], {}]
        )
        return Edit((first, last), f"to {other}, not {sizes}, which are then exchanged")

    return template


def _exchanged_parts(call: TracedCall, ingredients: Ingredients) -> Iterator[Template]:
    """Two parts of one value, that calls of a line cut out one by one, exchanged."""
    if not _is_move(call, _CUT) or len(call.rows) != 1:
        return
    others = {
        str(other): other
        for other in ingredients.siblings(call)
        if other[0][:1] == call.parsed[0][:1] and other != call.parsed
    }
    for other in others.values():
        yield _exchanging(call.parsed[0][1:], other[0][1:])


def _exchanging(ours: Any, theirs: Any) -> Template:
    def template(call: TracedCall) -> Edit | None:
        for before, after in ((ours, theirs), (theirs, ours)):
            if call.parsed[0][1:] == before and _is_move(call, _CUT):
                arguments = [[call.parsed[0][0], *after], call.parsed[1]]
                step = EditStep(call.first.overload or "", arguments)
                return Edit((step,), "with another part of it exchanged")
        return None

    return template


# -- the operator --------------------------------------------------------------------


def _is_move(call: TracedCall, names: frozenset[str] = _MOVE) -> bool:
    return call.first.base_operator in names


def _other_operators(call: TracedCall, ingredients: Ingredients) -> Iterator[Template]:
    """Another operator on the same operands."""
    name = call.first.base_operator
    reductions: tuple[str, ...] = ("dim", "dim_IntList", "default")
    if len(call.parsed[0]) == 1:
        # of all elements
        reductions = ("default",)
    for names, overloads in (
        (_UNARY, ("default",)),
        (_PAIRS, ("Tensor", "default")),
        (_COMPARE, _overloads_like(call)),
        (_REDUCE, reductions),
    ):
        if name not in names:
            continue
        for other in sorted(names - {name}):
            overload = _overload(other, overloads)
            if overload is not None:
                yield _exchanged(overload, other)
    if len(records_in(call.parsed[0])) == 1 and name in _UNARY:
        for insertion in ingredients.inserted:
            if not insertion.held:
                yield _replaced(insertion)


def _bounds_and_summands(call: TracedCall, _: Ingredients) -> Iterator[Template]:
    """A small number added where it is a lower bound, or the other way round: an epsilon."""
    name = call.first.base_operator
    if name in ("clamp", "clamp_min") and len(records_in(call.parsed)) == 1:
        yield _guarded_by("aten.add.Tensor", "added to it, not as its lower bound")
    elif name == "add" and len(records_in(call.parsed)) == 1:
        yield _guarded_by(
            "aten.clamp_min.default", "as its lower bound, not added to it"
        )


def _guarded_by(overload: str, words: str) -> Template:
    def template(call: TracedCall) -> Edit | None:
        records = records_in(call.parsed)
        numbers = list(numbers_of(call))
        if len(records) != 1 or len(numbers) != 1:
            return None
        [(place, number)] = numbers
        is_upper_bound = place in (2, "max")
        if is_upper_bound or not number > 0:
            return None
        step = EditStep(overload, [[{"record": records[0]}, number], {}])
        return Edit((step,), f"with {number:.6g} {words}")

    return template


def _other_activations(
    call: TracedCall, ingredients: Ingredients
) -> Iterator[Template]:
    """An activation in the place of all that a line computes of a value."""
    if ingredients.written_out(call) is not None:
        yield from (_activation(name, ingredients) for name in _ACTIVATIONS)


def _activation(name: str, ingredients: Ingredients) -> Template:
    def template(call: TracedCall) -> Edit | None:
        source = ingredients.written_out(call)
        if source is None:
            return None
        step = EditStep(f"aten.{name}.default", [[{"record": source}], {}])
        return Edit((step,), f"as {name} of what this line computes it of")

    return template


def _overloads_like(call: TracedCall) -> tuple[str, ...]:
    """Return a call's own overload: with a tensor or with a number."""
    return ((call.first.overload or "").rpartition(".")[2],)


def _overload(name: str, overloads: Sequence[str]) -> str | None:
    for overload in overloads:
        packet = getattr(torch.ops.aten, name, None)
        if packet is not None and overload in packet.overloads():
            return f"aten.{name}.{overload}"
    return None


def _exchanged(overload: str, name: str) -> Template:
    def template(call: TracedCall) -> Edit | None:
        positional, _ = call.parsed
        declared = overload_of(overload)._schema.arguments
        arguments = positional[: len([d for d in declared if not d.kwarg_only])]
        step = EditStep(overload, [arguments, {}])
        return Edit((step,), f"as {name}, not {call.first.base_operator}")

    return template


def _replaced(insertion: Insertion) -> Template:
    """Another call on the first input of a call."""

    def template(call: TracedCall) -> Edit | None:
        records = records_in(call.parsed[0])
        if not records:
            return None
        first = EditStep("aten.alias.default", [[{"record": records[0]}], {}])
        return Edit((first, insertion.step), f"as {insertion.words}")

    return template


# -- layouts -------------------------------------------------------------------------


def _layouts(call: TracedCall, ingredients: Ingredients) -> Iterator[Template]:
    """The axes in another order, before or after; other indexes."""
    records = records_in(call.parsed[0])
    if not records:
        return
    name = call.first.base_operator
    shape = ingredients.shapes(records[0])
    if name in _PERMUTE:
        yield from (_permuting(order) for order in _orders(len(shape)))
    if name in _RESHAPE:
        yield from (_permuted_before(order) for order in _orders(len(shape)))
    if name in _RESHAPE | _JOIN or not _is_move(call):
        yield from _other_orders_of_result(call)
    if name in _CUT:
        yield from _other_indexes(call, shape)
    if name in _CUT | _PERMUTE | _JOIN and len(call.rows) == 1:
        yield from map(_turned_round, range(len(call.first.shape or ())))


def _turned_round(axis: int) -> Template:
    def template(call: TracedCall) -> Edit | None:
        if axis >= len(call.first.shape or ()) or len(call.rows) != 1:
            return None
        first = EditStep(call.first.overload or "", call.parsed)
        last = EditStep("aten.flip.default", [[{"record": BEFORE}, [axis]], {}])
        return Edit((first, last), f"with its axis {axis} the other way round")

    return template


def _other_orders_of_result(call: TracedCall) -> Iterator[Template]:
    shape = tuple(call.first.shape or ())
    for order in _orders(len(shape)):
        if tuple(shape[axis] for axis in order) == shape:
            yield _permuted_after(order)


def _orders(dimensions: int) -> list[tuple[int, ...]]:
    if not 1 < dimensions <= MOST_AXES + 1:
        return []
    orders = list(permutations(range(dimensions)))[1:]
    if dimensions <= 4:
        return orders
    # of many axes those that exchange two or move one
    return [order for order in orders if _is_simple(order)]


def _is_simple(order: Sequence[int]) -> bool:
    moved = [axis for place, axis in enumerate(order) if axis != place]
    if len(moved) == 2:
        return True
    rest = list(range(len(order)))
    return any(
        [*(a for a in rest if a != axis)] == [a for a in order if a != axis]
        for axis in rest
    )


def _permuting(order: Sequence[int]) -> Template:
    def template(call: TracedCall) -> Edit | None:
        [record, *_] = records_in(call.parsed[0])
        step = EditStep("aten.permute.default", [[{"record": record}, [*order]], {}])
        return Edit((step,), f"with the axes in the order {list(order)}")

    return template


def _permuted_before(order: Sequence[int]) -> Template:
    def template(call: TracedCall) -> Edit | None:
        [record, *_] = records_in(call.parsed[0])
        first = EditStep("aten.permute.default", [[{"record": record}, [*order]], {}])
        again = EditStep("aten.clone.default", [[{"record": BEFORE}], {}])
        parsed = copy.deepcopy(call.parsed)
        parsed[0][0] = {"record": BEFORE}
        last = EditStep("aten.reshape.default", [parsed[0][:2], {}])
        words = f"of its input with the axes in the order {list(order)}"
        return Edit((first, again, last), words)

    return template


def _permuted_after(order: Sequence[int]) -> Template:
    def template(call: TracedCall) -> Edit | None:
        first = EditStep(call.first.overload or "", call.parsed)
        last = EditStep("aten.permute.default", [[{"record": BEFORE}, [*order]], {}])
        return Edit((first, last), f"with its axes in the order {list(order)}")

    return template


def _other_indexes(call: TracedCall, shape: Sequence[int]) -> Iterator[Template]:
    for place, declared, value in _places(call):
        if not isinstance(value, int) or isinstance(value, bool):
            continue
        if declared.name not in ("index", "start"):
            continue
        axis = call.parsed[0][1] if len(call.parsed[0]) > 1 else 0
        if not isinstance(axis, int) or not shape:
            continue
        length = shape[axis % len(shape)]
        for index in [*range(min(length, MOST_INDEXES)), length - 1]:
            if index != value % max(1, length):
                yield _setting(place, value, index, f"at {index}, not {value}")


# -- inputs --------------------------------------------------------------------------


def _other_inputs(call: TracedCall, ingredients: Ingredients) -> Iterator[Template]:
    """Another value of the shape of one of its inputs."""
    for place, record in enumerate(records_in(call.parsed)):
        for choose in ingredients.similar(call, record):
            yield _reading(place, choose)


def _exchanged_inputs(call: TracedCall, _: Ingredients) -> Iterator[Template]:
    """The two that it reads, the other way round."""
    records = records_in(call.parsed)
    if len(records) == 2 and records[0] != records[1]:
        yield _swapped


def _swapped(call: TracedCall) -> Edit | None:
    records = records_in(call.parsed)
    if len(records) != 2:
        return None
    exchanged = _renamed(call.parsed, {records[0]: records[1], records[1]: records[0]})
    step = EditStep(call.first.overload or "", exchanged)
    return Edit((step,), "with its inputs exchanged")


def _opposite_masks(call: TracedCall, ingredients: Ingredients) -> Iterator[Template]:
    """A mask that it reads, the other way round."""
    for place, record in enumerate(records_in(call.parsed)):
        if ingredients.mask_format(record) is not None:
            yield _opposite(place, ingredients)


def _opposite(place: int, ingredients: Ingredients) -> Template:
    def template(call: TracedCall) -> Edit | None:
        records = records_in(call.parsed)
        if place >= len(records):
            return None
        mask = {"record": records[place]}
        kind = ingredients.mask_format(records[place])
        if kind is None:
            return None
        opposite = EditStep("aten.rsub.Scalar", [[mask, 1], {}])
        if kind == "bool":
            opposite = EditStep("aten.logical_not.default", [[mask], {}])
        counter = iter(range(len(records)))
        arguments = _with_record(call.parsed, counter, place, BEFORE)
        last = EditStep(call.first.overload or "", arguments)
        return Edit((opposite, last), "with its mask the other way round")

    return template


def _earlier(call: TracedCall, ingredients: Ingredients) -> Iterator[Template]:
    """It and the call that makes what it reads, the other way round.

    Of two values that two calls make alike: the smaller of each pair, and then the mean.
    """
    if _made_before(call, ingredients):
        yield _exchanged_with_maker(ingredients)


def _made_before(call: TracedCall, ingredients: Ingredients) -> dict[int, TracedCall]:
    """Return by record the calls that make what a call reads: one, or several alike.

    Empty where one of them does not compute, or reads more than one tensor where there
    are several.
    """
    records = records_in(call.parsed)
    made = {}
    for record in records:
        maker = ingredients.maker(record)
        if maker is None or maker.first.record != record or _is_move(maker):
            return {}
        made[record] = maker
    makers = [*made.values()]
    if not makers or _is_move(call) or not records_in(makers[0].parsed):
        return {}
    if len(makers) > 1 and len({_without_records(maker) for maker in makers}) > 1:
        return {}
    reads_one = all(len(records_in(maker.parsed)) == 1 for maker in makers)
    return made if len(makers) == 1 or reads_one else {}


def _without_records(call: TracedCall) -> str:
    """Return what a call does, whatever tensors it reads."""
    records = dict.fromkeys(records_in(call.parsed), BEFORE)
    return f"{call.first.overload} {_renamed(call.parsed, records)}"


def _exchanged_with_maker(ingredients: Ingredients) -> Template:
    def template(call: TracedCall) -> Edit | None:
        made = _made_before(call, ingredients)
        if not made:
            return None
        sources = {key: records_in(maker.parsed)[0] for key, maker in made.items()}
        first = EditStep(call.first.overload or "", _renamed(call.parsed, sources))
        maker = next(iter(made.values()))
        counter = iter(range(len(records_in(maker.parsed))))
        arguments = _with_record(maker.parsed, counter, 0, BEFORE)
        last = EditStep(maker.first.overload or "", arguments)
        return Edit((first, last), f"before {maker.first.base_operator}, not after it,")

    return template


def _renamed(value: Any, names: dict[int, int]) -> Any:
    if isinstance(value, dict):
        if "record" in value:
            return {"record": names.get(value["record"], value["record"])}
        return {key: _renamed(v, names) for key, v in value.items()}
    if isinstance(value, list):
        return [_renamed(v, names) for v in value]
    return value


def _reading(place: int, choose: Callable[[TracedCall], int | None]) -> Template:
    def template(call: TracedCall) -> Edit | None:
        records = records_in(call.parsed)
        other = choose(call)
        if other is None or place >= len(records) or records[place] == other:
            return None
        counter = iter(range(len(records)))
        arguments = _with_record(call.parsed, counter, place, other)
        step = EditStep(call.first.overload or "", arguments)
        return Edit((step,), "of another value")

    return template


def reading_instead(record: int, tensor: Tensor) -> Template:
    """Read a tensor from elsewhere in the place of a value."""

    def template(call: TracedCall) -> Edit | None:
        if record not in records_in(call.parsed):
            return None
        arguments = _renamed(call.parsed, {record: BEFORE - 1})
        step = EditStep(call.first.overload or "", arguments)
        return Edit((step,), "of another value", held={BEFORE - 1: tensor})

    return template


def _with_record(value: Any, counter: Iterator[int], place: int, other: int) -> Any:
    if isinstance(value, dict):
        if "record" in value:
            return {"record": other} if next(counter) == place else value
        return {k: _with_record(v, counter, place, other) for k, v in value.items()}
    if isinstance(value, list):
        return [_with_record(v, counter, place, other) for v in value]
    return value


# -- one call less or more -----------------------------------------------------------


def _left_out(call: TracedCall, ingredients: Ingredients) -> Iterator[Template]:
    """One of its inputs of the same shape in its place."""
    shape = tuple(call.first.shape or ())
    for place, record in enumerate(records_in(call.parsed)):
        if ingredients.shapes(record) == shape:
            yield _handing_on(place)


def _not_turned(call: TracedCall, ingredients: Ingredients) -> Iterator[Template]:
    """What it only turns round: turning another value round says less of the same."""
    if call.first.base_operator in _TURN:
        yield from _left_out(call, ingredients)


def _handing_on(place: int) -> Template:
    def template(call: TracedCall) -> Edit | None:
        records = records_in(call.parsed)
        if place >= len(records):
            return None
        step = EditStep("aten.alias.default", [[{"record": records[place]}], {}])
        return Edit((step,), f"without {call.first.base_operator}")

    return template


def _negated(call: TracedCall, _: Ingredients) -> Iterator[Template]:
    """Its result with the other sign."""
    if not _is_move(call, _RESHAPE | _PERMUTE):
        step = EditStep("aten.neg.default", [[{"record": BEFORE}], {}])
        yield _followed(Insertion(step, {}, "a change of sign", ()))


def _other_spreads(call: TracedCall, _: Ingredients) -> Iterator[Template]:
    """The root, the square or the logarithm of its result: a deviation for a variance."""
    row = call.first
    least = row.min
    # of nothing but zeros the logarithm is a mask
    if least is None or least == row.max or "float" not in (row.dtype or ""):
        return
    if row.base_operator in _RESHAPE | _PERMUTE:
        return
    for name in _SPREADS:
        if getattr(torch, name)(torch.tensor(least)).isnan():
            continue
        step = EditStep(f"aten.{name}.default", [[{"record": BEFORE}], {}])
        yield _followed(Insertion(step, {}, name, ()))


def _one_more(call: TracedCall, ingredients: Ingredients) -> Iterator[Template]:
    """A call of the reference after it, or another value added to it."""
    if call.first.base_operator in _RESHAPE:
        # a product of two axes, brought back to three: what is added has three
        for choose in ingredients.similar(call, call.rows[0].record):
            yield _with_another("aten.add.Tensor", choose, ADDED)
    if call.first.base_operator in _RESHAPE | _PERMUTE:
        return
    shape = tuple(call.first.shape or ())
    for insertion in ingredients.inserted:
        if insertion.shape in ((), shape):
            yield _followed(insertion)
    for number in ingredients.constants:
        step = EditStep("aten.mul.Tensor", [[{"record": BEFORE}, number], {}])
        words = f"a product with {number:.6g}"
        yield _followed(Insertion(step, {}, words, ()), scales=True)
    for choose in ingredients.similar(call, call.rows[0].record):
        yield _with_another("aten.add.Tensor", choose, ADDED)
    for place, record in enumerate(records_in(call.parsed)[:2]):
        for choose in ingredients.similar(call, record):
            yield _scaled_input(place, choose)


def _followed(insertion: Insertion, *, scales: bool = False) -> Template:
    def template(call: TracedCall) -> Edit | None:
        if insertion.shape not in ((), tuple(call.first.shape or ())):
            return None
        first = EditStep(call.first.overload or "", call.parsed)
        words = f"followed by {insertion.words}"
        return Edit((first, insertion.step), words, insertion.held, scales=scales)

    return template


def _with_another(
    overload: str, choose: Callable[[TracedCall], int | None], words: str
) -> Template:
    def template(call: TracedCall) -> Edit | None:
        other = choose(call)
        if other is None:
            return None
        first = EditStep(call.first.overload or "", call.parsed)
        arguments = [[{"record": BEFORE}, {"record": other}], {}]
        return Edit(
            (first, EditStep(overload, arguments)), f"with another value {words}"
        )

    return template


def _activated_inputs(call: TracedCall, ingredients: Ingredients) -> Iterator[Template]:
    """An activation of one value that it reads, which others read as it is."""
    if call.first.base_operator in _PAIRS:
        for place, record in enumerate(records_in(call.parsed)[:2]):
            if ingredients.is_read_again(record):
                yield from (_activated(place, name) for name in ingredients.activations)


def _activated(place: int, name: str) -> Template:
    def template(call: TracedCall) -> Edit | None:
        records = records_in(call.parsed)
        if place >= len(records):
            return None
        first = EditStep(f"aten.{name}.default", [[{"record": records[place]}], {}])
        counter = iter(range(len(records)))
        arguments = _with_record(call.parsed, counter, place, BEFORE)
        last = EditStep(call.first.overload or "", arguments)
        return Edit((first, last), f"with {name} of what it reads")

    return template


def _scaled_input(place: int, choose: Callable[[TracedCall], int | None]) -> Template:
    """One of its inputs times another value."""

    def template(call: TracedCall) -> Edit | None:
        records = records_in(call.parsed)
        other = choose(call)
        if other is None or place >= len(records):
            return None
        product = [[{"record": records[place]}, {"record": other}], {}]
        first = EditStep("aten.mul.Tensor", product)
        counter = iter(range(len(records)))
        arguments = _with_record(call.parsed, counter, place, BEFORE)
        last = EditStep(call.first.overload or "", arguments)
        words = "with another factor in what it reads"
        return Edit((first, last), words, factor=other)

    return template


#: How unlikely -> what yields edits of that kind.
_KINDS: tuple[tuple[int, Callable[[TracedCall, Ingredients], Iterator[Template]]], ...]
_KINDS = (
    (ARGUMENT, _transferred),
    (ARGUMENT, _other_activations),
    (CHANGE, _switches),
    (CHANGE, _other_copies),
    (CHANGE, _constants),
    (CHANGE, _diagonals),
    (CHANGE, _pairs_of_numbers),
    (CHANGE, _axes),
    (CHANGE, _axes_of_line),
    (CHANGE, _other_order_of_results),
    (CHANGE, _exchanged_parts),
    (CHANGE, _moved_windows),
    (CHANGE, _moved_places),
    (CHANGE, _other_sides),
    (CHANGE, _other_rows),
    (CHANGE, _other_parts),
    (CHANGE, _other_ends),
    (CHANGE, _exchanged_inputs),
    (CHANGE, _opposite_masks),
    (CHANGE, _earlier),
    (CHANGE, _other_splits),
    (CHANGE, _other_operators),
    (CHANGE, _bounds_and_summands),
    (CHANGE, _not_turned),
    (LAYOUT, _layouts),
    (LAYOUT, _exchanged_splits),
    (LEFT_OUT, _left_out),
    (INPUT, _other_inputs),
    (INPUT, _activated_inputs),
    (ONE_MORE, _negated),
    (ONE_MORE, _other_spreads),
    (ONE_MORE, _shared_constants),
    (ONE_MORE, _reciprocals),
    (ONE_MORE, _one_more),
)


def label_of(row: RecordedRow) -> str:
    """Return a parameter's name without numbers: what is alike in every layer."""
    return _DIGITS.sub("#", row.name or "")
