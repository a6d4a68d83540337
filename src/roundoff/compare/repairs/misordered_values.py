"""A view or a transposition that puts values in other places than the reference's.

All values are there, so that they agree as a whole, and what is computed of them next to
each other does not. A port may hold them in an order of its own; one is at fault where all
is right with the reference's values in its place.
"""

from __future__ import annotations

from roundoff.compare.blame.blamed_leaves import Blamed, same_layout
from roundoff.compare.repairs.repair_trials import BUDGET, Trials
from roundoff.compare.repairs.transplants import Rejoin, in_layout_of
from roundoff.compare.tensors.structure import WRONG_AXIS
from roundoff.compare.values.fault_lines import FaultLines
from roundoff.compare.values.value_flow import Value
from roundoff.compare.values.value_regions import Sides, upstream
from roundoff.ops import operators_that

#: Values that are tried, the first ones.
MOST_TRIED = 32
_PLACES = operators_that("reshape") | operators_that("permute axes")
_PLACES |= operators_that("repeat")


def misordered(sides: Sides, trials: Trials, rejoin: Rejoin) -> Blamed | None:
    """Return the first move whose elements stand in other places than they have to."""
    trials.left = BUDGET
    for value in _in_other_places(sides, rejoin)[:MOST_TRIED]:
        twin = _twin_in_place(sides, trials, value)
        if twin is None:
            continue
        words = (
            f"its values are those of {twin.operator} of {twin.row.site} "
            f"({twin.row.line}) in another order"
        )
        line = FaultLines(sides, rejoin.region).of_operator(value)
        return Blamed(value, twin, words, is_operator=True, line=line, label=WRONG_AXIS)
    return None


def _twin_in_place(sides: Sides, trials: Trials, value: Value) -> Value | None:
    """Return the value of the reference with which in its place all is right."""
    held = sides.candidate.tensor(value.key)
    for key in sides.all_twins(value):
        content = sides.reference.tensor(key)
        if held is None or content is None:
            continue
        for moved in in_layout_of(sides, held, content):
            if trials.outcome({}, {value.key: moved})[0]:
                return sides.reference.values[key]
    return None


def _in_other_places(sides: Sides, rejoin: Rejoin) -> list[Value]:
    """Return the moves behind the wrong region that agree but for their order, in order."""
    flow = sides.candidate
    before = upstream(flow, sorted(rejoin.region), lambda value: value.is_call)
    values = [flow.values[key] for key in before - rejoin.region]
    values = [value for value in values if value.is_number and not value.inner]
    values = [value for value in values if value.operator in _PLACES]
    values = [value for value in values if _stands_otherwise(sides, value)]
    return sorted(values, key=lambda value: value.order)


def _stands_otherwise(sides: Sides, value: Value) -> bool:
    """Return True where the reference has the same elements in another order too."""
    held = sides.candidate.tensor(value.key)
    twins = [sides.reference.tensor(key) for key in sides.all_twins(value)]
    contents = [content for content in twins if content is not None]
    return held is not None and any(not same_layout(c, held) for c in contents)
