"""A loss, or a term of one, that is so many times the reference's.

A mean over all places for one over those that count divides by another number. A loss is
one number and says little; the gradients behind it are off by the same factor, and the
first of them that is says where it comes in.
"""

from __future__ import annotations

from collections.abc import Container, Iterator
from dataclasses import replace
from itertools import product

from roundoff.compare.blame.blamed_leaves import Blamed
from roundoff.compare.ports.port_results import (
    gradient_limit,
    gradients,
    last_result,
)
from roundoff.compare.ports.scaled_gradients import (
    LABEL,
    blamed_scale,
    factor_between,
    factor_of_gradients,
    says_something,
)
from roundoff.compare.values.value_flow import Flow, Value
from roundoff.compare.values.value_regions import Part, Sides, upstream

_BACKWARD = "backward"


def scaled_loss(sides: Sides) -> Blamed | None:
    """Return where a factor comes in by which a loss and all gradients are off alike."""
    ours, theirs, _ = gradients(sides)
    blamed = blamed_scale(sides, ours, theirs) if ours and theirs else None
    if blamed is None:
        return None
    ends = last_result(sides.reference), last_result(sides.candidate)
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
    same factor: what the term is made of is right.
    """
    factors = [*_factors_of_terms(sides, part)]
    if not factors:
        return None
    limit = gradient_limit(sides)
    ours = _lost_gradients(sides.reference, sides.agreeing)
    for value in _lost_gradients(sides.candidate, sides.twins):
        for twin in ours:
            factor = factor_between(twin, value, limit)
            if factor is None:
                continue
            near = [each for each in factors if abs(each - factor) <= limit * each]
            if not near:
                continue
            words = (
                f"a term of the loss is {factor:.6g} times the reference's, and so are the "
                "gradients from here on"
            )
            first = _first_wrong(sides, value)
            return Blamed(first, twin, words, is_operator=True, label=LABEL)
    return None


def _factors_of_terms(sides: Sides, part: Part) -> Iterator[float]:
    """Yield by what numbers of the candidate differ from those of the reference."""
    ours = _numbers(sides.reference, part.expected)
    theirs = _numbers(sides.candidate, part.region)
    for one, other in product(ours, theirs):
        factor = other / one
        if factor > 0 and abs(factor - 1) > sides.limit:
            yield factor


def _numbers(flow: Flow, keys: frozenset[int]) -> list[float]:
    """Return the numbers, not zero, that a region computes."""
    numbers = []
    for key in sorted(keys):
        row = flow.values[key].row
        if row.numel == 1 and row.mean and flow.values[key].is_number:
            numbers.append(row.mean)
    return numbers


def _lost_gradients(flow: Flow, agreeing: Container[int]) -> list[Value]:
    return [
        value
        for value in flow.in_order()
        if value.row.phase == _BACKWARD
        and value.key not in agreeing
        and says_something(value)
    ]


def _first_wrong(sides: Sides, value: Value) -> Value:
    """Return the first value of the backward pass that one is made of and that differs."""
    flow = sides.candidate

    def is_wrong(each: Value) -> bool:
        return each.key not in sides.twins and each.row.phase == _BACKWARD

    behind = upstream(flow, [value.key], is_wrong)
    made = [flow.values[key] for key in behind if flow.values[key].computes]
    return min(made, key=lambda each: each.order, default=value)
