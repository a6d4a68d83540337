"""Other axes for a call, or for all calls of its line."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

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
_RESHAPE = operators_that("reshape")
_PERMUTE = operators_that("permute axes")
_CUT = operators_that("cut out")


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
    """Another axis in all that a line computes along one: a softmax written out."""
    records = records_in(call.parsed[0])
    if not records or is_move(call, _RESHAPE | _PERMUTE | _CUT):
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
    for _place, declared, value in places_of(call):
        if declared.name not in ("dim", "dims", "axis"):
            continue
        axes = value if isinstance(value, list) else [value]
        if len(axes) == 1 and type(axes[0]) is int and dimensions:
            return int(axes[0]) % dimensions
    return None


def _along(axis: int, other: int, dimensions: int) -> Template:
    words = f"along axis {other}, not {axis}, with what else this line does along it"

    def template(call: TracedCall) -> Edit | None:
        if is_move(call) or _axis_of(call, dimensions) != axis:
            return None
        for place, declared, value in places_of(call):
            if declared.name in ("dim", "dims", "axis"):
                changed = [other] if isinstance(value, list) else other
                arguments = with_argument(call.parsed, place, changed)
                return Edit((EditStep(call.first.overload or "", arguments),), words)
        return None

    return template
