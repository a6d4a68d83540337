"""Parts of a value in another order, or cut in another way."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import combinations, pairwise, permutations
from typing import Any

from roundoff.compare.repairs.edits.edited_calls import (
    MOST_INDEXES,
    Ingredients,
    Template,
    is_move,
    setting,
)
from roundoff.compare.values.other_sizes import joint_axes
from roundoff.compare.values.traced_calls import (
    BEFORE,
    Edit,
    EditStep,
    TracedCall,
    records_in,
)
from roundoff.ops import operators_that

#: Groups, or heads, that are tried in a reshaped value.
MOST_GROUPS = 16
#: Axes that one is cut into, of which all orders are tried.
MOST_CUTS = 4
_RESHAPE = operators_that("reshape")
_CUT = operators_that("cut out")
_JOIN = operators_that("join")


def other_order_of_results(call: TracedCall, _: Ingredients) -> Iterator[Template]:
    """Two of the parts that a call cuts out exchanged; those of each pair, or the halves."""
    count = len(call.rows)
    if not 1 < count <= MOST_INDEXES or not is_move(call):
        return
    for first, second in combinations(range(count), 2):
        order = list(range(count))
        order[first] = second
        order[second] = first
        yield _with_places(tuple(order), f"with parts {first} and {second} exchanged")
    if count > 2 and count % 2 == 0:
        # corners as y, x, y, x for x, y, x, y; lower and upper ones the other way round
        neighbours = tuple(place ^ 1 for place in range(count))
        halves = tuple((place + count // 2) % count for place in range(count))
        yield _with_places(neighbours, "with the two of each pair of parts exchanged")
        yield _with_places(halves, "with the two halves of the parts exchanged")


def _with_places(places: tuple[int, ...], words: str) -> Template:
    def template(call: TracedCall) -> Edit | None:
        if len(call.rows) != len(places):
            return None
        step = EditStep(call.first.overload or "", call.parsed)
        return Edit((step,), words, places=places)

    return template


def other_copies(call: TracedCall, ingredients: Ingredients) -> Iterator[Template]:
    """Each index several times in a row, where the whole is repeated; not the other way round.

    Copies that stand in a row are made by ``expand`` and a view: see ``other_layouts``.
    """
    records = records_in(call.parsed[0])
    is_copied = call.first.base_operator == "repeat" or is_move(call, _JOIN)
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


def other_splits(call: TracedCall, _: Ingredients) -> Iterator[Template]:
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
                yield setting(1, sizes, other, f"to {other}, not {sizes}")


def other_cuts(call: TracedCall, ingredients: Ingredients) -> Iterator[Template]:
    """The three or four axes that one is cut into, in any other order: channels vary first."""
    if call.first.base_operator not in _RESHAPE or len(call.parsed[0]) != 2:
        return
    sizes = call.first.shape or ()
    axes = tuple(range(len(sizes)))
    [record] = records_in(call.parsed[0])
    for _, behind in joint_axes(ingredients.shapes(record), sizes):
        if 2 < len(behind) <= MOST_CUTS:
            for within in permutations(behind):
                order = (*axes[: behind.start], *within, *axes[behind.stop :])
                if order != axes:
                    yield _cut_otherwise(order)


def exchanged_splits(call: TracedCall, _: Ingredients) -> Iterator[Template]:
    """Two neighbouring sizes of a reshaped value cut in the other order: heads vary first."""
    if call.first.base_operator not in _RESHAPE or len(call.parsed[0]) != 2:
        return
    sizes = call.first.shape or ()
    axes = tuple(range(len(sizes)))
    for axis, (size, other) in enumerate(pairwise(sizes)):
        if 1 not in (size, other) and size != other:
            yield _cut_otherwise((*axes[:axis], axis + 1, axis, *axes[axis + 2 :]))


def _cut_otherwise(order: tuple[int, ...]) -> Template:
    def template(call: TracedCall) -> Edit | None:
        sizes = list(call.first.shape or ())
        if call.first.base_operator not in _RESHAPE or len(sizes) != len(order):
            return None
        other = [sizes[axis] for axis in order]
        back = [order.index(axis) for axis in range(len(order))]
        [record, *_] = records_in(call.parsed[0])
        first = EditStep("aten.reshape.default", [[{"record": record}, other], {}])
        last = EditStep("aten.permute.default", [[{"record": BEFORE}, back], {}])
        return Edit((first, last), f"to {other}, not {sizes}, which are then exchanged")

    return template


def exchanged_parts(call: TracedCall, ingredients: Ingredients) -> Iterator[Template]:
    """Two parts of one value, that calls of a line cut out one by one, exchanged."""
    if not is_move(call, _CUT) or len(call.rows) != 1:
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
            if call.parsed[0][1:] == before and is_move(call, _CUT):
                arguments = [[call.parsed[0][0], *after], call.parsed[1]]
                step = EditStep(call.first.overload or "", arguments)
                return Edit((step,), "with another part of it exchanged")
        return None

    return template
