"""Which number of a formula is none of the reference's?

Data are made ready by a few calls with numbers: over 255, less a mean, over a deviation.
Where several of these numbers are wrong no repair of one call makes the result right. But
of calls in a row that each take a number, one whose number the reference has too is right.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence

from roundoff.compare.blame.blamed import Blamed
from roundoff.compare.records.call_arguments import numbers_given
from roundoff.compare.repairs.ordered_constants import may_be_table
from roundoff.compare.repairs.rejoins import Rejoin
from roundoff.compare.values.fault_lines import FaultLines
from roundoff.compare.values.value_flow import Flow, Value
from roundoff.compare.values.value_regions import Sides
from roundoff.ops import operators_that

#: How far two expressions of one number may be apart, relative: written with some digits.
SAME = 1e-5

_MOVE = operators_that("move values")
_PAIRS = operators_that("pair elements")


def other_number(sides: Sides, rejoin: Rejoin) -> Blamed | None:
    """Return the first call with a number that the reference does not compute with.

    None where the wrong region does not begin with calls that take a number, or where the
    reference computes there without numbers.
    """
    ours = _numbers_of_reference(sides, rejoin)
    for call, number in _numbers_of_candidate(sides, rejoin) if ours else ():
        if number is None:
            return None
        if not _is_among(number, ours):
            return _blamed(sides, rejoin, call, number, ours)
    return None


def odd_number(sides: Sides, rejoin: Rejoin) -> Blamed | None:
    """Return the first call with the one number that the reference does not compute with.

    Wherever it stands in the wrong region; None where there are several.
    """
    ours = _numbers_of_reference(sides, rejoin)
    odd = [
        (call, number)
        for call, number in _numbers_of_candidate(sides, rejoin)
        if number is not None and not _is_among(number, ours)
    ]
    if not ours or len({number for _, number in odd}) != 1:
        return None
    return _blamed(sides, rejoin, *odd[0], ours)


def _numbers_of_reference(sides: Sides, rejoin: Rejoin) -> list[float]:
    """Return the numbers that the reference computes with, those of its tables too."""
    calls = _computing(sides.reference, rejoin.expected | {rejoin.twin.key})
    numbers = [number for _, number in _numbers(calls) if number is not None]
    return [*numbers, *_numbers_of_tables(sides.reference, calls)]


def _numbers_of_tables(flow: Flow, calls: Iterable[Value]) -> Iterator[float]:
    read = (key for call in calls for key in call.inputs if key in flow.values)
    for table in map(flow.behind, read):
        if not may_be_table(table) or table.row.name:
            continue
        content = flow.tensor(table.key)
        if content is not None and content.is_floating_point():
            yield from (number for number in content.flatten().tolist() if number)


def _numbers_of_candidate(
    sides: Sides, rejoin: Rejoin
) -> Iterator[tuple[Value, float | None]]:
    return _numbers(_computing(sides.candidate, rejoin.region | {rejoin.value.key}))


def _blamed(
    sides: Sides, rejoin: Rejoin, call: Value, number: float, ours: Sequence[float]
) -> Blamed:
    known = ", ".join(f"{each:.6g}" for each in dict.fromkeys(ours))
    words = f"it takes {number:.6g}, which is no number of the reference's: {known}"
    line = FaultLines(sides, rejoin.region).of_operator(call)
    return Blamed(
        call,
        rejoin.twin,
        words,
        is_operator=True,
        line=line,
        label="wrong constant",
        is_sure=False,
    )


def _computing(flow: Flow, keys: Iterable[int]) -> list[Value]:
    """Return what computes of these, in order; a write to a part of another does not.

    What is added to places is a matter of how a table is laid out.
    """
    values = [flow.values[key] for key in keys if flow.values[key].is_number]
    made = [v for v in values if v.computes and not v.inner and v.operator not in _MOVE]
    return sorted(made, key=lambda value: value.order)


def _numbers(calls: Iterable[Value]) -> Iterator[tuple[Value, float | None]]:
    for call in calls:
        yield call, _number(call)


def _number(value: Value) -> float | None:
    """Return the one number that a call takes beside a tensor; None for other calls."""
    numbers = numbers_given(value.row)
    is_pair = value.operator in _PAIRS and len(value.row.inputs) == 1
    return numbers[0] if is_pair and len(numbers) == 1 and numbers[0] else None


def _is_among(number: float, numbers: Sequence[float]) -> bool:
    """Return True for one of these, its inverse, or either with the other sign."""
    wanted = [each for one in numbers for each in (one, 1 / one)]
    return any(abs(abs(number) - abs(each)) <= SAME * abs(each) for each in wanted)
