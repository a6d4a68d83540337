"""Is an axis reduced in another way: a sum where the reference has a mean?

The sum is a step inside of the mean, and agrees; what differs comes after it, as if the
division by the count had been left out of what reads it.
"""

from __future__ import annotations

from roundoff.compare.blame.blamed import Blamed
from roundoff.compare.values.value_flow import Value
from roundoff.compare.values.value_regions import Part, Sides
from roundoff.ops import operators_that

_REDUCE = operators_that("reduce axes")


def reduced_otherwise(sides: Sides, part: Part) -> Blamed | None:
    """Return a reduction that is a step of the reference's, which goes on from there.

    None where the reference does not part inside of a reduction, or the candidate has not
    stopped at a step of it.
    """
    wanted = part.reference
    whole = None
    if wanted is not None and wanted.inner:
        whole = sides.reference.values.get(wanted.row.record)
    if whole is None or whole.operator not in _REDUCE:
        return None
    for value in _read_by(sides, part):
        is_reduced = value.operator in _REDUCE and value.operator != whole.operator
        if is_reduced and _is_step_of(sides, value, whole):
            line = f" ({whole.row.line})" if whole.row.line else ""
            words = (
                f"{value.operator} where the reference has {whole.operator} of "
                f"{whole.row.site}{line}"
            )
            return Blamed(value, whole, words, is_operator=True)
    return None


def _read_by(sides: Sides, part: Part) -> list[Value]:
    """Return the calls that the wrong region reads, behind moves, the first first."""
    flow = sides.candidate
    read = {
        flow.behind(source).key
        for key in part.region
        for source in flow.values[key].inputs
        if source in flow.values and source not in part.region
    }
    calls = [flow.values[key] for key in read]
    calls = [value for value in calls if value.is_call and not value.inner]
    return sorted(calls, key=lambda value: value.order)


def _is_step_of(sides: Sides, value: Value, whole: Value) -> bool:
    twins = (sides.reference.values[key] for key in sides.all_twins(value))
    return any(twin.inner and twin.row.record == whole.row.record for twin in twins)
