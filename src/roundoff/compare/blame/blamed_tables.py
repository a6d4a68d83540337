"""Is it a table of constants, a mask or angles of positions, that makes two programs part?

Such a table is made of no data and of no parameter. One program may read it as a buffer
and the other compute it, in other steps: nothing before its last value has a counterpart.
"""

from __future__ import annotations

from collections.abc import Container, Sequence

from roundoff.compare.blame.blamed import Blamed
from roundoff.compare.records.parameter_content import relation
from roundoff.compare.values.value_flow import Flow, Value, constants_of
from roundoff.compare.values.value_regions import Part, Sides, first_of, upstream
from roundoff.ops import operators_that

_LOOK_UP = operators_that("read at places")
#: How a table is used: its elements are places of another value, or numbers and masks.
_PLACES = "places"
_NUMBERS = "numbers"


def blamed_table(sides: Sides, part: Part) -> Blamed | None:
    """Return the first table that differs; None where one of the sides has none such.

    It is read in the region where the programs part, and agrees with nothing.
    """
    ours, theirs = sides.reference, sides.candidate
    tables = _lost_tables(theirs, part.region, sides.twins, _masks(ours))
    wanted = _lost_tables(ours, part.expected, sides.agreeing, _masks(theirs))
    for value, kind in tables:
        for twin, other_kind in wanted:
            is_of_kernel = twin.inner and holds_two_numbers(ours, twin)
            if is_of_kernel and not holds_two_numbers(theirs, value):
                continue  # how a kernel sums up to a place is no table of numbers
            if _are_as_large(twin, value) and _may_be_one(kind, other_kind):
                words = _difference(sides, twin, value)
                first = _first_wrong(sides, value)
                return Blamed(first, twin, words, is_operator=True)
    return None


def blamed_numbers(sides: Sides, part: Part) -> Blamed | None:
    """Return the first numbers of what the first wrong value reads, where no data are in them.

    All else that it reads agrees: numbers for each class, say, that stand nowhere in the
    reference, as its kernel computes with them inside. For where nothing that was tried
    makes the programs agree.
    """
    flow = sides.candidate
    if part.candidate is None:
        return None
    read = [flow.values[key] for key in part.candidate.inputs if key in flow.values]
    lost = [each for each in read if each.key not in sides.twins]
    if len(lost) != 1 or len(read) < 2 or not _is_table(lost[0]):
        return None
    made_of = upstream(flow, [lost[0].key], lambda value: value.key not in sides.twins)
    values = [flow.values[key] for key in made_of]
    sources = [
        flow.values[k] for value in values for k in value.inputs if k in flow.values
    ]
    is_of_data = any(
        source.is_number and (source.key in sides.twins or source.row.is_leaf)
        for source in sources
    )
    numbers = [each for each in values if each.is_call and each.is_number]
    if is_of_data or not numbers:
        return None
    words = (
        "made of numbers alone, and not of data: they stand nowhere in the reference, and "
        "all else that is read with them agrees"
    )
    first = min(numbers, key=lambda value: value.order)
    return Blamed(first, part.reference, words, is_operator=True, is_sure=False)


def holds_two_numbers(flow: Flow, value: Value) -> bool:
    """Return True for a table of two numbers, as a mask is that a kernel may make itself."""
    tensor = flow.tensor(value.key)
    if tensor is None or tensor.is_complex() or not tensor.numel():
        return False
    return bool(((tensor == tensor.min()) | (tensor == tensor.max())).all())


def _first_wrong(sides: Sides, table: Value) -> Value:
    """Return the first of what a table is made of that the reference does not have.

    The table itself where several are, or none is known.
    """
    flow = sides.candidate
    made_of = upstream(
        flow, [table.key], lambda value: value.is_call and value.key not in sides.twins
    )
    firsts = first_of(flow, made_of)
    return firsts[0] if len(firsts) == 1 and not firsts[0].inner else table


def _are_as_large(one: Value, other: Value) -> bool:
    """Return True for tables of as many elements, or of as many once each is laid out once."""
    if _numel(one) == _numel(other):
        return True
    once = _numel_once(one)
    return once is not None and once == _numel_once(other)


def _numel(value: Value) -> int | None:
    """Return how many elements a value has; one that a call computes inside is not its row's."""
    return value.row.numel if value.tensor is None else value.tensor.numel()


def _numel_once(value: Value) -> int | None:
    """Return how many there are without what is laid out again, as angles of both halves are."""
    return None if value.sketch is None else value.sketch.without_repeats.numel


def _difference(sides: Sides, twin: Value, value: Value) -> str:
    """Return how a table is related to the reference's, in words."""
    wanted = sides.reference.tensor(twin.key)
    present = sides.candidate.tensor(value.key)
    if wanted is not None and present is not None:
        how = relation(wanted, present)
        if how is not None:
            return f"this table is the reference's {_in_words(twin)} {how.words}"
    return f"a table of constants differs; the reference has {_in_words(twin)}"


def _may_be_one(kind: str, other: str) -> bool:
    """Return True for tables of one use: what chooses by places is no mask and no number."""
    return (kind == _PLACES) == (other == _PLACES)


def _masks(flow: Flow) -> list[Value]:
    return [value for value in flow.values.values() if _is_mask(value)]


def _is_mask(value: Value) -> bool:
    return value.row.dtype == "bool" and not value.says_nothing


def _is_opposite(one: Value, other: Value) -> bool:
    """Return True for masks of which one may hide what the other shows."""
    if one.sketch is None or other.sketch is None:
        return False
    ones = one.sketch.size**2 + other.sketch.size**2
    return one.sketch.numel == other.sketch.numel and round(ones) == one.sketch.numel


def _in_words(value: Value) -> str:
    name = value.row.name or f"{value.operator} of {value.row.site}"
    return f"{name} ({value.row.line})" if value.row.line else name


def _lost_tables(
    flow: Flow,
    region: frozenset[int],
    agreeing: Container[int],
    masks: Sequence[Value],
) -> list[tuple[Value, str]]:
    """Return what a region reads that is made of constants alone, and does not agree.

    Each with how it is used. A mask is no loss where the other program has its opposite
    among ``masks``.
    """
    constant = constants_of(flow, agreeing)
    lost = {}
    for key in region:
        if key in constant:
            continue
        for source in flow.values[key].inputs:
            if source not in constant or source in agreeing:
                continue
            value = flow.behind(source)
            if not _is_table(value) or value.key in agreeing:
                continue
            read = flow.values[source]
            if _is_mask(read) and any(_is_opposite(read, mask) for mask in masks):
                continue
            lost[value.key] = value, _use(read, flow.values[key])
    return sorted(lost.values(), key=lambda table: table[0].order)


def _is_table(value: Value) -> bool:
    """Return True for several numbers that say something.

    One number alone has the size of any other: a program may have it as a tensor, and the
    other one as a number in a call.
    """
    return (value.row.numel or 0) > 1 and not value.says_nothing


def _use(table: Value, reader: Value) -> str:
    is_whole = (table.row.dtype or "").startswith(("int", "uint"))
    return _PLACES if is_whole and reader.operator in _LOOK_UP else _NUMBERS
