"""Do two calls take each other's number: the weights of two classes, two scales?

The reference has both numbers, so that neither is odd; and neither call is right with
the other's number alone.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import combinations, islice

from roundoff.compare.blame.blamed import Blamed
from roundoff.compare.judging.step_causes import with_line
from roundoff.compare.repairs.edits.constants import exchanging_numbers
from roundoff.compare.repairs.edits.edited_calls import numbers_of
from roundoff.compare.repairs.trials import (
    BUDGET,
    Region,
    Trials,
    edits_of,
    one_of_each,
)
from roundoff.compare.values.traced_calls import TracedCall
from roundoff.compare.values.value_regions import Sides

#: Calls with numbers of which pairs are tried, the first of a region.
MOST_CALLS = 16


@dataclass(frozen=True, slots=True)
class _Numbered:
    call: TracedCall
    number: float


def exchanged_numbers(sides: Sides, trials: Trials, region: Region) -> Blamed | None:
    """Return the first of two calls with whose numbers exchanged all results are right."""
    trials.left = BUDGET
    calls = list(islice(_numbered(sides, trials, region), MOST_CALLS))
    for one, other in combinations(calls, 2):
        if trials.left < 0:
            return None
        if one.number == other.number:
            continue
        families = (trials.families[each.call.first.call] for each in (one, other))
        both = [call for family in families for call in family]
        edits = edits_of(exchanging_numbers(one.number, other.number), both)
        if len(edits) == len(both) and trials.outcome(edits, is_patient=True)[0]:
            return _blamed(sides, one, other)
    return None


def _numbered(sides: Sides, trials: Trials, region: Region) -> Iterator[_Numbered]:
    """Yield the calls of a region that take a fraction; of several turns the first."""
    values = sides.candidate.values
    numbers = sorted({values[key].row.call for key in region.parted})
    known = trials.program.calls
    calls = [known[number] for number in numbers if number in known]
    for call in one_of_each(calls, trials.families):
        for _, number in numbers_of(call):
            if not float(number).is_integer():
                yield _Numbered(call, abs(number))
                break


def _blamed(sides: Sides, one: _Numbered, other: _Numbered) -> Blamed:
    value = sides.candidate.values[one.call.first.record]
    there = with_line(other.call.first.base_operator, other.call.first.line)
    words = (
        f"it takes {one.number:.6g}, and {there} {other.number:.6g}: with the two "
        "exchanged all results are right"
    )
    return Blamed(value, None, words, is_operator=True, label="wrong constant")
