"""A loss, or a term of one, that is so many times the reference's.

A mean over all places for one over those that count divides by another number. A loss is
one number and says little; the gradients behind it are off by the same factor, and the
first of them that is says where it comes in.
"""

from __future__ import annotations

from collections.abc import Collection, Container, Iterator
from dataclasses import replace
from itertools import islice

import numpy as np

from roundoff.compare.blame.blamed import Blamed
from roundoff.compare.ports.port_results import (
    gradient_limit,
    gradients,
    last_results,
)
from roundoff.compare.ports.scaled_gradients import (
    LABEL,
    blamed_scale,
    factor_of_gradients,
    is_times,
    prepared_factors,
    ratio_of_sizes,
    says_something,
)
from roundoff.compare.records.value_sketch import Array
from roundoff.compare.values.value_flow import Flow, Value
from roundoff.compare.values.value_regions import Part, Sides, upstream

#: Gradients of a backward pass that are looked at, the first ones.
MOST_GRADIENTS = 32
#: Numbers of a forward pass that may be terms of its loss, the last ones.
MOST_TERMS = 64

_BACKWARD = "backward"
_FORWARD = "forward"


def scaled_loss(sides: Sides) -> Blamed | None:
    """Return where a factor comes in by which a loss and all gradients are off alike."""
    ours, theirs, _ = gradients(sides)
    blamed = blamed_scale(sides, ours, theirs) if ours and theirs else None
    if blamed is None:
        return None
    ends = last_results(sides)
    sizes = [end.sketch.size for end in ends if end is not None and end.sketch]
    factor = factor_of_gradients(sides, ours)
    if len(sizes) < len(ends) or factor is None:
        return None
    if abs(sizes[1] - abs(factor) * sizes[0]) > sides.limit * sizes[1]:
        return None
    words = (
        f"the loss is {factor:.6g} times the reference's, and so are all gradients from "
        "here on"
    )
    first = _first_wrong(sides, blamed.value)
    return replace(blamed, value=first, evidence=words)


def scaled_term(sides: Sides, part: Part) -> Blamed | None:
    """Return where a term of a loss gets a factor that the reference's has not.

    The term is a number that differs, and the first gradient that differs does so by the
    same factor: what the term is made of is right. Not by one that is undone before the
    optimizer reads the gradients.
    """
    limit = gradient_limit(sides)
    undone = [1 / factor for _, factor in prepared_factors(sides.candidate)]
    factors = _factors_of_terms(sides, part)
    for each in set(undone):
        factors = factors[abs(factors - each) > limit * abs(each)]
    ours: dict[int | None, list[Value]] = {}
    for twin in _lost_gradients(sides.reference, sides.agreeing):
        ours.setdefault(twin.row.numel, []).append(twin)
    theirs = _lost_gradients(sides.candidate, sides.twins)
    for value in islice(theirs, MOST_GRADIENTS):
        for twin in ours.get(value.row.numel, ()):
            ratio = ratio_of_sizes(twin, value)
            is_near = bool((abs(factors - ratio) <= limit * factors).any())
            if not is_near or not is_times(value, twin, ratio, limit):
                continue
            words = (
                f"a term of the loss is {ratio:.6g} times the reference's, and so are the "
                "gradients from here on"
            )
            first = _first_wrong(sides, value)
            return Blamed(first, twin, words, is_operator=True, label=LABEL)
    return None


def _factors_of_terms(sides: Sides, part: Part) -> Array:
    """Return by what numbers of the candidate differ from those of the reference."""
    ours = _numbers(sides.reference, part.expected)
    theirs = _numbers(sides.candidate, part.region)
    factors: Array = np.divide.outer(theirs, ours).reshape(-1)
    differing: Array = factors[(factors > 0) & (abs(factors - 1) > sides.limit)]
    return differing


def _numbers(flow: Flow, keys: Collection[int]) -> Array:
    """Return the numbers, finite and not zero, that a region computes: the last ones."""
    values = (flow.values[key] for key in sorted(keys))
    rows = [value.row for value in values if value.is_number and value.row.numel == 1]
    numbers: Array = np.array([row.mean or 0.0 for row in rows[-MOST_TERMS:]])
    known: Array = numbers[np.isfinite(numbers) & (numbers != 0)]
    return known


def _lost_gradients(flow: Flow, agreeing: Container[int]) -> Iterator[Value]:
    """Yield what a backward pass makes that agrees with nothing, in order."""
    for value in flow.in_order():
        is_lost = value.row.phase == _BACKWARD and value.key not in agreeing
        if is_lost and says_something(value):
            yield value


def _first_wrong(sides: Sides, value: Value) -> Value:
    """Return the first value of the backward pass that one is made of and that differs.

    A loss that makes its own gradients has done so in the forward pass: those are no part
    of the pass that goes back from it.
    """
    flow = sides.candidate
    forward = [v.order for v in flow.values.values() if v.row.phase == _FORWARD]
    start = max((order for order in forward if order < value.order), default=(0, 0))

    def is_wrong(each: Value) -> bool:
        is_going_back = each.row.phase == _BACKWARD and each.order > start
        return is_going_back and each.key not in sides.twins

    behind = upstream(flow, [value.key], is_wrong)
    made = [flow.values[key] for key in behind if flow.values[key].computes]
    return min(made, key=lambda each: each.order, default=value)
