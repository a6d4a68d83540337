"""Is it a table of places by which a program picks other rows than the reference does?

Windows, neighbours, relative positions: one program may pick rows by one table, and the other
in two steps, by tables of each axis. No table of the one is then one of the other's, and what
is picked says which is wrong.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator

from roundoff.compare.blame.blamed import Blamed
from roundoff.compare.values.value_flow import Flow, Value, constants_of
from roundoff.compare.values.value_regions import Part, Sides
from roundoff.ops import operators_that

#: Calls between the values that are picked from and those that are picked, at most.
MOST_STEPS = 8
_LOOK_UP = operators_that("read at places")
_MOVE = operators_that("move values")


def blamed_places(
    sides: Sides, part: Part, matters: Callable[[Value, Value], bool]
) -> Blamed | None:
    """Return the first table by which other places are read of a value that agrees.

    The reference picks as many elements of the same value, and the candidate lacks what it
    picks. None where the candidate computes the places of its data.

    ``matters(picked, wanted)``: results change with what the reference picks. Padding may be
    other words in two right programs.
    """
    flow = sides.candidate
    constants = constants_of(flow, sides.twins)
    region = sorted(
        (flow.values[key] for key in part.region), key=lambda value: value.order
    )
    for picked in region:
        if picked.operator not in _LOOK_UP or picked.inner or picked.says_nothing:
            continue
        inputs = [flow.values[key] for key in picked.inputs if key in flow.values]
        sources = [value for value in inputs if value.is_number]
        tables = [value for value in inputs if not value.is_number]
        if len(sources) != 1 or not tables or sources[0].key not in sides.twins:
            continue
        if any(table.key not in constants for table in tables):
            continue
        wanted = next(_picked_in_reference(sides, sources[0], picked), None)
        if wanted is not None and matters(picked, wanted):
            return _blamed(flow, tables, picked, wanted)
    return None


def _picked_in_reference(sides: Sides, source: Value, picked: Value) -> Iterator[Value]:
    """Yield what the reference picks of a value, as large, and the candidate lacks."""
    flow = sides.reference
    waiting = [(key, 0, False) for key in sides.all_twins(source)]
    seen: set[int] = set()
    while waiting:
        key, steps, is_picked = waiting.pop(0)
        for reader_key in flow.readers.get(key, ()):
            reader = flow.values[reader_key]
            is_look_up = reader.operator in _LOOK_UP
            if reader_key in seen or not (is_look_up or reader.operator in _MOVE):
                continue
            seen.add(reader_key)
            is_now = is_picked or is_look_up
            is_lost = reader_key not in sides.agreeing and not reader.says_nothing
            if is_now and is_lost and reader.numel == picked.numel:
                yield reader
            if steps < MOST_STEPS:
                waiting.append((reader_key, steps + 1, is_now))


def _blamed(flow: Flow, tables: list[Value], picked: Value, wanted: Value) -> Blamed:
    table = min((flow.behind(each.key) for each in tables), key=lambda each: each.order)
    name = table.row.name or table.row.site
    words = (
        f"by {name} other places are read than those of {wanted.operator} of "
        f"{wanted.row.site} ({wanted.row.line})"
    )
    return Blamed(table, wanted, words, line=picked.row.line)
