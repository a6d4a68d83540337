"""A program that ends with a value with which the reference goes on: it leaves out the rest."""

from __future__ import annotations

from roundoff.compare.blame.blamed import Blamed
from roundoff.compare.ports.port_results import last_results
from roundoff.compare.values.value_flow import Flow, Value
from roundoff.compare.values.value_regions import Sides

_FORWARD = "forward"


def blamed_end(sides: Sides) -> Blamed | None:
    """Return the candidate's end, where the reference makes its own of the same value.

    Named with it is the first operator that the reference applies to it.
    """
    wanted, end = last_results(sides)
    if wanted is None or end is None or end.says_nothing or not end.computes:
        return None
    if end.key not in sides.twins or end.row.numel != wanted.row.numel:
        return None
    twins = set(sides.all_twins(end))
    values = sides.candidate.values
    sources = [values[key] for key in end.row.inputs if key in values]
    if any(not twins.isdisjoint(sides.all_twins(source)) for source in sources):
        return None  # it goes on too, by little
    missing = _first_behind(sides.reference, wanted, twins)
    if missing is None or wanted.key in twins:
        return None
    line = f" ({missing.row.line})" if missing.row.line else ""
    words = f"left out is {missing.operator} of {missing.row.site}{line}"
    return Blamed(end, missing, words, is_operator=True)


def _first_behind(flow: Flow, end: Value, starts: set[int]) -> Value | None:
    """Return the first operator on the way from one of these values to an end."""
    waiting = [end]
    seen = {end.key}
    reading: list[Value] = []
    while waiting:
        value = waiting.pop()
        if value.row.phase != _FORWARD:
            continue
        if starts.intersection(value.inputs) and value.computes and not value.inner:
            reading.append(value)
        for key in value.inputs:
            if key in flow.values and key not in seen and key not in starts:
                seen.add(key)
                waiting.append(flow.values[key])
    return min(reading, key=lambda value: value.order, default=None)
