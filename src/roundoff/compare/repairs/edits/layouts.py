"""The elements of a value in another order, before a call or behind it."""

from __future__ import annotations

import copy
from collections.abc import Iterator, Sequence
from itertools import combinations, permutations

from roundoff.compare.repairs.edits.edited_calls import (
    MOST_INDEXES,
    Ingredients,
    Template,
    is_move,
    places_of,
    setting,
)
from roundoff.compare.values.traced_calls import (
    BEFORE,
    Edit,
    EditStep,
    TracedCall,
    records_in,
)
from roundoff.ops import operators_that

#: Orders of the axes that are tried: of up to this many axes.
MOST_AXES = 5
_RESHAPE = operators_that("reshape")
_PERMUTE = operators_that("permute axes")
_CUT = operators_that("cut out")
_JOIN = operators_that("join")


def other_layouts(call: TracedCall, ingredients: Ingredients) -> Iterator[Template]:
    """The axes in another order, before or after; other indexes."""
    records = records_in(call.parsed[0])
    if not records:
        return
    name = call.first.base_operator
    shape = ingredients.shapes(records[0])
    if name in _PERMUTE:
        yield from (_permuting(order) for order in _orders(len(shape)))
        yield from _exchanged_axes(call)
    if name in _RESHAPE:
        yield from (_permuted_before(order) for order in _orders(len(shape)))
        yield from _exchanged_sizes(call)
    if name in _RESHAPE | _JOIN or not is_move(call):
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


def _exchanged_sizes(call: TracedCall) -> Iterator[Template]:
    """Exchange two lengths of a shape: rows and columns that are folded the wrong way."""
    shape = tuple(call.first.shape or ())
    if len(shape) > MOST_AXES:
        return
    for one, other in combinations(range(len(shape)), 2):
        if shape[one] != shape[other] and 1 not in (shape[one], shape[other]):
            yield _with_sizes_exchanged(one, other)


def _with_sizes_exchanged(one: int, other: int) -> Template:
    def template(call: TracedCall) -> Edit | None:
        parsed = copy.deepcopy(call.parsed)
        sizes = parsed[0][1] if len(parsed[0]) > 1 else None
        if not isinstance(sizes, list) or len(sizes) <= other:
            return None
        sizes[one], sizes[other] = sizes[other], sizes[one]
        step = EditStep("aten.reshape.default", [parsed[0][:2], {}])
        return Edit((step,), f"with the lengths {sizes}")

    return template


def _exchanged_axes(call: TracedCall) -> Iterator[Template]:
    """Exchange two axes of the same length, where there are too many for all orders."""
    shape = tuple(call.first.shape or ())
    if len(shape) <= MOST_AXES + 1:
        return
    for one, other in combinations(range(len(shape)), 2):
        if shape[one] == shape[other] > 1:
            order = [*range(len(shape))]
            order[one], order[other] = other, one
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
    for place, declared, value in places_of(call):
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
                yield setting(place, value, index, f"at {index}, not {value}")
