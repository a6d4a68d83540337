"""A factor or a term that both programs have, one of them at another place.

``-x.sum()`` takes the negative of a sum, ``(-x).mean()`` the mean of a negative; the mean of
a sum is the sum of two means. A value that only gets a factor, or a term, which the reference
gives to another value on the same way is no value of the reference's, and nothing is wrong
with it.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import replace

from roundoff.compare.records.call_arguments import factor_given
from roundoff.compare.repairs.other_numbers import SAME
from roundoff.compare.rounding.rounding_bound import DIFFERENCES
from roundoff.compare.values.value_flow import Flow, Value
from roundoff.compare.values.value_regions import Part, Sides, first_of


def behind_common_factors(sides: Sides, part: Part) -> Part:
    """Return a part that begins behind values which only get a factor of the reference's,
    are added up as others are there, or have the other sign there.

    The same part where nothing would be left.
    """
    candidate = sides.candidate
    expected = _in_order(sides.reference, part.expected)
    factors = [factor_given(value.row) for value in expected]
    ours = [factor for factor in factors if factor is not None]
    sums = sum(_is_sum_of_terms(value) for value in expected)
    region = set(part.region)
    value = part.candidate
    while value is not None:
        factor = factor_given(value.row)
        common = [f for f in ours if factor and math.isclose(f, factor, rel_tol=SAME)]
        if common:
            ours.remove(common[0])
        elif sums and _is_sum_of_terms(value):
            sums -= 1
        elif not any(_is_negative(value, each, sides.limit) for each in expected):
            break
        region.discard(value.key)
        value = next(iter(first_of(candidate, region)), None)
    if value is None or value is part.candidate:
        return part
    return replace(part, candidate=value)


def _is_sum_of_terms(value: Value) -> bool:
    """Return True for a sum or difference of two values, and not of a value and a number."""
    is_weighed = factor_given(value.row) is not None
    return value.operator in DIFFERENCES and len(value.inputs) == 2 and not is_weighed


def _is_negative(value: Value, other: Value, limit: float) -> bool:
    """Return True for what another value is with the other sign."""
    if value.sketch is None or other.sketch is None or value.says_nothing:
        return False
    if value.sketch.numel != other.sketch.numel:
        return False
    return value.sketch.negative.distance(other.sketch) <= limit


def _in_order(flow: Flow, keys: Iterable[int]) -> list[Value]:
    return sorted((flow.values[key] for key in keys), key=lambda value: value.order)
