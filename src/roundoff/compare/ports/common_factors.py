"""A factor that both programs multiply with, one of them at another place.

``-x.sum()`` takes the negative of a sum, ``(-x).mean()`` the mean of a negative. A value that
only gets a factor which the reference gives to another value on the same way is no value
of the reference's, and nothing is wrong with it.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import replace

from roundoff.compare.records.call_arguments import factor_given
from roundoff.compare.repairs.other_numbers import SAME
from roundoff.compare.values.value_flow import Flow, Value
from roundoff.compare.values.value_regions import Part, first_of


def behind_common_factors(reference: Flow, candidate: Flow, part: Part) -> Part:
    """Return a part that begins behind values which only get a factor of the reference's.

    The same part where nothing would be left.
    """
    ours = [
        factor
        for value in _in_order(reference, part.expected)
        if (factor := factor_given(value.row)) is not None
    ]
    region = set(part.region)
    value = part.candidate
    while value is not None and (factor := factor_given(value.row)) is not None:
        common = next(
            (each for each in ours if math.isclose(each, factor, rel_tol=SAME)), None
        )
        if common is None:
            break
        ours.remove(common)
        region.discard(value.key)
        value = next(iter(first_of(candidate, region)), None)
    if value is None or value is part.candidate:
        return part
    return replace(part, candidate=value)


def _in_order(flow: Flow, keys: Iterable[int]) -> list[Value]:
    return sorted((flow.values[key] for key in keys), key=lambda value: value.order)
