"""Other axes for a call, or for all calls of its line."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

from roundoff.compare.repairs.edits.edited_calls import (
    Ingredients,
    Template,
    is_move,
    places_of,
    setting,
    with_argument,
)
from roundoff.compare.values.traced_calls import Edit, EditStep, TracedCall, records_in
from roundoff.ops import operators_that

#: Orders of the axes that are tried: of up to this many axes.
MOST_AXES = 5
#: Axes that a line works along together.
MOST_TOGETHER = 2
_RESHAPE = operators_that("reshape")
_PERMUTE = operators_that("permute axes")
_CUT = operators_that("cut out")
_ADDS_AN_AXIS = "unsqueeze"


def other_axes(call: TracedCall, ingredients: Ingredients) -> Iterator[Template]:
    """Other axes of what works along one or several."""
    records = records_in(call.parsed[0])
    if not records or is_move(call, _RESHAPE | _PERMUTE | _CUT):
        return
    dimensions = len(ingredients.shapes(records[0]))
    for place, declared, value in places_of(call):
        if declared.name not in ("dim", "dims", "axis"):
            continue
        if type(value) is int:
            for axis in range(dimensions):
                if axis != value % max(1, dimensions):
                    yield setting(place, value, axis, f"along axis {axis}, not {value}")
        elif isinstance(value, list):
            for axes in _other_sets(value, dimensions):
                yield setting(place, value, axes, f"over axes {axes}, not {value}")


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


def axes_of_line(call: TracedCall, ingredients: Ingredients) -> Iterator[Template]:
    """Other axes in all that a line, or a function, computes along one: a softmax written out."""
    records = records_in(call.parsed[0])
    if not records or is_move(call, _RESHAPE | _PERMUTE | _CUT):
        return
    dimensions = len(ingredients.shapes(records[0]))
    axes = _axes_of(call, dimensions)
    if axes is None:
        return
    for others in _other_or_neighbours(axes, dimensions):
        yield _along(axes, others, dimensions)


def added_axes(call: TracedCall, ingredients: Ingredients) -> Iterator[Template]:
    """Another place for an axis that is added, in all that a line adds: what one term gets
    behind its rows, the other gets before its columns."""
    records = records_in(call.parsed[0])
    if call.first.base_operator != _ADDS_AN_AXIS or not records:
        return
    dimensions = len(ingredients.shapes(records[0])) + 1
    present = call.parsed[0][1] % dimensions
    for other in range(dimensions):
        if other != present:
            yield _added_at({present: other, other: present}, dimensions)


def _added_at(places: Mapping[int, int], dimensions: int) -> Template:
    """Return the edit that adds axes at other places of a tensor that then has so many."""
    [one, other] = sorted(places)
    words = f"with axis {other} for axis {one} where axes are added here"

    def template(call: TracedCall) -> Edit | None:
        if call.first.base_operator != _ADDS_AN_AXIS or not call.parsed[0]:
            return None
        if len(call.first.shape or ()) != dimensions:
            return None
        place = places.get(call.parsed[0][1] % dimensions)
        if place is None:
            return None
        arguments = with_argument(call.parsed, 1, place)
        return Edit((EditStep(call.first.overload or "", arguments),), words)

    return template


def _other_or_neighbours(axes: Sequence[int], dimensions: int) -> Iterator[list[int]]:
    """Yield other single axes; one and its neighbour in the place of one, which are one axis
    of a program that does not part it.

    >>> [*_other_or_neighbours([2], 3)], [*_other_or_neighbours([1, 2], 3)]
    ([[0], [1], [1, 2]], [[0], [1], [2]])
    """
    yield from ([axis] for axis in range(dimensions) if [axis] != [*axes])
    if len(axes) == 1:
        for first in (axes[0] - 1, axes[0]):
            if 0 <= first < dimensions - 1:
                yield [first, first + 1]


def _axes_of(call: TracedCall, dimensions: int) -> list[int] | None:
    """Return the axes that a call works along, rising; None for none, all, and more than two."""
    for _place, declared, value in places_of(call):
        if declared.name not in ("dim", "dims", "axis"):
            continue
        axes = value if isinstance(value, list) else [value]
        if 0 < len(axes) <= MOST_TOGETHER and type(axes[0]) is int and dimensions:
            return sorted(int(axis) % dimensions for axis in axes)
    return None


def _along(axes: Sequence[int], others: Sequence[int], dimensions: int) -> Template:
    along, instead = _in_words(others), _in_words(axes)
    words = f"along {along}, not {instead}, with what else is done along it here"

    def template(call: TracedCall) -> Edit | None:
        if is_move(call) or _axes_of(call, dimensions) != axes:
            return None
        for place, declared, value in places_of(call):
            if declared.name in ("dim", "dims", "axis"):
                if not isinstance(value, list) and len(others) > 1:
                    return None
                changed = [*others] if isinstance(value, list) else others[0]
                arguments = with_argument(call.parsed, place, changed)
                return Edit((EditStep(call.first.overload or "", arguments),), words)
        return None

    return template


def _in_words(axes: Sequence[int]) -> str:
    noun = "axis" if len(axes) == 1 else "axes"
    return f"{noun} {' and '.join(map(str, axes))}"
