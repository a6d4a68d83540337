"""What a wrong region of the candidate reads, and what is read there alone."""

from __future__ import annotations

from roundoff.compare.repairs.rejoins import Rejoin
from roundoff.compare.repairs.replaceable_values import before
from roundoff.compare.repairs.trials import Trials
from roundoff.compare.values.value_flow import Flow, Value
from roundoff.ops import operators_that

#: Values that the wrong region reads, of which some may be exchanged or not complete.
MOST_READ = 16
_JOIN = operators_that("join")
_MOVE = operators_that("move values")


def values_read(flow: Flow, rejoin: Rejoin) -> list[Value]:
    """Return what the wrong region reads: what is computed before what that is moved to.

    A value that is read twice goes through moves of each reader. What the model is given
    counts, its parameters do not.
    """
    read = [value for value in before(flow, rejoin.region) if not value.inner]
    read = [value for value in read if value.is_call or not value.row.name]
    read = [value for value in read if value.is_number]
    read.sort(key=hands_on)
    return read[:MOST_READ]


def hands_on(value: Value) -> bool:
    """Return True for what only moves values, but for what joins several."""
    is_move = value.operator in _MOVE and value.operator not in _JOIN
    return not value.computes or is_move


def in_region_alone(flow: Flow, trials: Trials, rejoin: Rejoin, value: Value) -> Trials:
    """Return trials in which another value is read in the wrong region, and nowhere else.

    They go on with what is left of the budget.
    """
    handed_on = [v.key for v in before(flow, rejoin.region) if v.operator in _MOVE]
    only = {*rejoin.region, *handed_on} - {value.key}
    return trials.of_part(only)
