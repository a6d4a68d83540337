"""Is it a table of constants, a mask or angles of positions, that makes two programs part?

Such a table is made of no data and of no parameter. One program may read it as a buffer
and the other compute it, in other steps: nothing before its last value has a counterpart.
"""

from __future__ import annotations

from roundoff.compare.blamed_leaves import Blamed
from roundoff.compare.value_flow import Flow, Value, constants_of
from roundoff.compare.value_regions import Part, Sides


def blamed_table(sides: Sides, part: Part) -> Blamed | None:
    """Return the first table that differs; None where one of the sides has none such.

    It is read in the region where the programs part, and agrees with nothing.
    """
    wanted = _lost_tables(sides.reference, part.expected, sides.agreeing)
    masks = [v for v in sides.reference.values.values() if _is_mask(v)]
    tables = [
        table
        for table in _lost_tables(sides.candidate, part.region, sides.twins)
        if not any(_is_opposite(table, mask) for mask in masks)
    ]
    for value in tables:
        same_size = [twin for twin in wanted if twin.row.numel == value.row.numel]
        if same_size:
            words = "a table of constants differs; the reference has"
            words = f"{words} {_in_words(same_size[0])}"
            return Blamed(value, same_size[0], words, is_operator=True)
    return None


def _is_mask(value: Value) -> bool:
    return value.row.dtype == "bool" and not value.says_nothing


def _is_opposite(one: Value, other: Value) -> bool:
    """Return True for masks of which one may hide what the other shows."""
    if one.sketch is None or other.sketch is None or not _is_mask(one):
        return False
    ones = one.sketch.size**2 + other.sketch.size**2
    return one.sketch.numel == other.sketch.numel and round(ones) == one.sketch.numel


def _in_words(value: Value) -> str:
    name = value.row.name or f"{value.operator} of {value.row.site}"
    return f"{name} ({value.row.line})" if value.row.line else name


def _lost_tables(flow: Flow, region: frozenset[int], agreeing: object) -> list[Value]:
    """Return what a region reads that is made of constants alone, and does not agree."""
    constant = constants_of(flow)
    lost = {}
    for key in region:
        if key in constant:
            continue
        for source in flow.values[key].inputs:
            if source not in constant or source in agreeing:  # type: ignore[operator]
                continue
            value = flow.behind(source)
            if not value.says_nothing and value.key not in agreeing:  # type: ignore[operator]
                lost[value.key] = value
    return sorted(lost.values(), key=lambda value: value.order)
