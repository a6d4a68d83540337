"""Does a port round to a narrower format than its reference wants?

A format is wanted where the reference computes in it, and where the candidate as a whole
works in it, under autocast or with parameters of that format. A narrower one that stands
in a few calls of the candidate alone is a fault like any other: its roundings do not widen
what values may be apart.
"""

from __future__ import annotations

from roundoff.compare.blame.blamed import Blamed
from roundoff.compare.rounding.rounding_bound import unit
from roundoff.compare.values.value_regions import Part, Sides, wanted_formats

LABEL = "narrower format"

_FORWARD = "forward"


def blamed_format(sides: Sides, part: Part) -> Blamed | None:
    """Return the first value of a region that is rounded to a format nobody wants.

    None where what it is made of differs already: then the rounding is not the cause.
    """
    wanted = wanted_formats(sides.reference, sides.candidate)
    coarsest = max(map(unit, wanted), default=0.0)
    candidate = sides.candidate
    values = [candidate.values[key] for key in part.region]
    for value in sorted(values, key=lambda value: value.order):
        if not value.is_number or value.row.phase != _FORWARD:
            continue
        if unit(value.row.dtype) <= coarsest:
            continue
        if part.region.isdisjoint(value.inputs):
            words = f"it rounds to {value.row.dtype}; the reference nowhere does"
            return Blamed(value, part.reference, words, is_operator=True, label=LABEL)
    return None
