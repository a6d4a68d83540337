"""Another part of an axis: what is cut out, picked, looked up or padded."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

from roundoff.compare.repairs.edits.edited_calls import (
    MOST_INDEXES,
    Ingredients,
    Template,
    reading_another,
)
from roundoff.compare.values.traced_calls import (
    BEFORE,
    Edit,
    EditStep,
    TracedCall,
    records_in,
)
from roundoff.ops import operators_that

_PAD = operators_that("pad")
_LOOK_UP = operators_that("read at places")
#: Operators of so many axes, and what they fill places with.
_BORDERS = (
    ("constant_pad_nd", "zeros"),
    ("replication_pad{}d", "the values of the border"),
    ("reflection_pad{}d", "the values inside the border, mirrored"),
)


def other_sides(call: TracedCall, _: Ingredients) -> Iterator[Template]:
    """As much padding on the other side, on one side, on both, or one place further."""
    if call.first.base_operator not in _PAD:
        return
    yield _padded(lambda before, after: (after, before), "on the other sides")
    yield _padded(lambda before, after: (before + after, 0), "before only")
    yield _padded(lambda before, after: (0, before + after), "after only")
    yield _padded(_centred, "alike on both sides")
    yield _padded(lambda before, after: (before + 1, after - 1), "one place earlier")
    yield _padded(lambda before, after: (before - 1, after + 1), "one place later")


def more_or_less(call: TracedCall, _: Ingredients) -> Iterator[Template]:
    """No padding at all, one place less or one more: other calls take what is as large then."""
    if call.first.base_operator not in _PAD:
        return
    yield _padded(lambda _before, _after: (0, 0), "nowhere")
    for step, words in ((-1, "one place less"), (1, "one place more")):
        for sides, where in ((1, 0), "before"), ((0, 1), "after"), ((1, 1), "around"):
            yield _padded(partial(_longer, step, sides), f"{words} {where}")


def other_borders(call: TracedCall, _: Ingredients) -> Iterator[Template]:
    """Other values in the padding: zeros, those of the border, or of what lies beside it."""
    if call.first.base_operator not in _PAD:
        return
    yield from (_bordered(operator, words) for operator, words in _BORDERS)


def _bordered(operator: str, words: str) -> Template:
    def template(call: TracedCall) -> Edit | None:
        positional = call.parsed[0]
        sides = positional[1] if len(positional) > 1 else None
        if not isinstance(sides, list):
            return None
        overload = f"aten.{operator.format(len(sides) // 2)}.default"
        if overload == call.first.overload:
            return None
        step = EditStep(overload, [positional[:2], {}])
        return Edit((step,), f"padded with {words}")

    return template


def _centred(before: int, after: int) -> tuple[int, int]:
    half = (before + after) // 2
    return half, before + after - half


def other_rows(call: TracedCall, _: Ingredients) -> Iterator[Template]:
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
        arguments = reading_another(call, place, BEFORE)
        last = EditStep(call.first.overload or "", arguments)
        return Edit((first, last), words)

    return template


def _longer(
    step: int, sides: tuple[int, int], before: int, after: int
) -> tuple[int, int]:
    return before + step * sides[0], after + step * sides[1]


def _padded(moved: Callable[[int, int], tuple[int, int]], words: str) -> Template:
    def template(call: TracedCall) -> Edit | None:
        positional, keywords = call.parsed
        sides = positional[1] if len(positional) > 1 else None
        if not isinstance(sides, list) or not all(isinstance(n, int) for n in sides):
            return None
        pairs = zip(sides[::2], sides[1::2], strict=False)
        # an axis that is not padded stays as it is
        others = [n for b, a in pairs for n in (moved(b, a) if b or a else (b, a))]
        if others == sides or min(others, default=0) < min(0, *sides):
            return None
        arguments = [[positional[0], others, *positional[2:]], keywords]
        return Edit(
            (EditStep(call.first.overload or "", arguments),), f"padded {words}"
        )

    return template


def moved_windows(call: TracedCall, ingredients: Ingredients) -> Iterator[Template]:
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


def other_shifts(call: TracedCall, _: Ingredients) -> Iterator[Template]:
    """Rolled the other way, one place further, or one less far."""
    if call.first.base_operator == "roll":
        yield partial(_rolled, lambda shift: -shift)
        yield partial(_rolled, lambda shift: shift + 1)
        yield partial(_rolled, lambda shift: shift - 1)


def _rolled(moved: Callable[[int], int], call: TracedCall) -> Edit | None:
    positional = call.parsed[0]
    shifts = positional[1] if len(positional) > 1 else None
    if call.first.base_operator != "roll" or not isinstance(shifts, list):
        return None
    others = [moved(shift) for shift in shifts]
    arguments = [[positional[0], others, *positional[2:]], call.parsed[1]]
    by, not_by = (", ".join(map(str, each)) for each in (others, shifts))
    words = f"rolled by {by}, not {not_by},"
    return Edit((EditStep(call.first.overload or "", arguments),), words)


def moved_ranges(call: TracedCall, _: Ingredients) -> Iterator[Template]:
    """As many places in a row, beginning one earlier or later."""
    if call.first.base_operator == "arange":
        yield partial(_ranging, -1)
        yield partial(_ranging, 1)


def _ranging(step: int, call: TracedCall) -> Edit | None:
    positional, keywords = call.parsed
    ends = [0, *positional] if len(positional) == 1 else positional[:2]
    are_places = len(ends) == 2 and all(map(_is_whole, ends))
    if call.first.base_operator != "arange" or not are_places:
        return None
    if positional[2:] not in ([], [1]):
        return None
    start, end = ends
    arguments = [[start + step, end + step], keywords]
    words = f"from {start + step:g} on, not {start:g}"
    return Edit((EditStep("aten.arange.start", arguments),), words)


def _is_whole(number: object) -> bool:
    """Return True for a whole number, be it written as a float."""
    return type(number) is int or (type(number) is float and number.is_integer())


def moved_places(call: TracedCall, ingredients: Ingredients) -> Iterator[Template]:
    """The place before or behind the one that is picked, in each turn of a loop, or as far
    from the other end."""
    if call.first.base_operator == "select" and records_in(call.parsed[0]):
        yield _picked(lambda _, place: place - 1, "one place earlier", ingredients)
        yield _picked(lambda _, place: place + 1, "one place later", ingredients)
        from_end = "as many places from the other end"
        yield _picked(lambda size, place: size - 1 - place, from_end, ingredients)


def _picked(
    moved: Callable[[int, int], int], words: str, ingredients: Ingredients
) -> Template:
    def template(call: TracedCall) -> Edit | None:
        positional = call.parsed[0]
        if call.first.base_operator != "select" or len(positional) != 3:
            return None
        [record, axis, place] = positional
        size = ingredients.shapes(records_in([record])[0])[axis]
        first = place + size if place < 0 else place
        other = moved(size, first)
        if other == first or not 0 <= other < size:
            return None
        arguments = [[record, axis, other], call.parsed[1]]
        return Edit((EditStep(call.first.overload or "", arguments),), words)

    return template


def other_parts(call: TracedCall, ingredients: Ingredients) -> Iterator[Template]:
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


def other_ends(call: TracedCall, ingredients: Ingredients) -> Iterator[Template]:
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
