"""Where a backward pass begins to make so many times the reference's gradients.

A mean for a sum over the batch, or a factor left out in a backward pass by hand, shows in
all gradients behind it by one factor. The first value of the backward pass that is so many
times one of the reference's is where it comes in: what it is made of is not.
"""

from __future__ import annotations

import math
from collections.abc import Container, Sequence

import numpy as np

from roundoff.compare.blame.blamed import Blamed
from roundoff.compare.judging.step_causes import with_line
from roundoff.compare.loop.loaded_values import GRADIENT
from roundoff.compare.ports.port_results import (
    GradientPair,
    gradient_limit,
    gradient_pairs,
    gradients_left,
    pairs_far_apart,
)
from roundoff.compare.records.call_arguments import factor_given
from roundoff.compare.records.value_sketch import Array, Sketch
from roundoff.compare.values.value_flow import Flow, Value
from roundoff.compare.values.value_regions import Sides, upstream

LABEL = "constant factor"
#: So few values are near to many by chance.
FEWEST = 8

_BACKWARD = "backward"
_OPTIMIZER = "optimizer"


def blamed_scale(
    sides: Sides, ours: Sequence[int], theirs: Sequence[int]
) -> Blamed | None:
    """Return where the candidate's gradients begin to be so many times the reference's.

    None where not all that differ do so by one factor.

    Args:
        sides: both programs.
        ours: gradients of the reference that differ.
        theirs: those of the candidate.
    """
    limit = gradient_limit(sides)
    factor = factor_of_gradients(sides, ours)
    if factor is None:
        return None
    twins = _by_numel(sides.reference, ours, sides.agreeing)
    region = upstream(
        sides.candidate, theirs, lambda value: value.key not in sides.twins
    )
    for value in sorted(map(sides.candidate.values.__getitem__, region), key=_order):
        if not says_something(value):
            continue
        for twin in twins.get(_numel(value), ()):
            if is_times(value, twin, factor, limit):
                there = with_line(f"{twin.operator} of {twin.row.site}", twin.row.line)
                words = (
                    f"it is {factor:.6g} times what {there} gives, as are all gradients "
                    "behind it"
                )
                return Blamed(value, twin, words, is_operator=True, label=LABEL)
    return None


def prepared_factors(flow: Flow) -> list[tuple[Value, float]]:
    """Return what multiplies gradients of parameters by one number before the optimizer
    reads them, each with its number: what divides a sum's by how many it adds up."""
    found = []
    for value in flow.in_order():
        row = value.row
        if row.phase != _OPTIMIZER or not row.inplace or len(row.inputs) != 1:
            continue
        source = flow.step.rows.get(row.inputs[0])
        factor = factor_given(row)
        is_gradient = source is not None and (source.name or "").endswith(GRADIENT)
        if is_gradient and factor is not None:
            found.append((value, factor))
    return found


def prepared_otherwise(sides: Sides, factor: float) -> Blamed | None:
    """Return what should undo a factor of all gradients, and multiplies by another number.

    None where the candidate multiplies none, or the reference does too.
    """
    prepared = prepared_factors(sides.candidate)
    if not prepared or prepared_factors(sides.reference):
        return None
    value, number = prepared[0]
    words = (
        f"it multiplies a gradient by {number:.6g}; all are {factor:.6g} times the "
        f"reference's here, which {1 / factor:.6g} would undo"
    )
    return Blamed(value, None, words, is_operator=True, label=LABEL)


def _order(value: Value) -> tuple[float, int]:
    return value.order


def factor_of_gradients(sides: Sides, ours: Sequence[int]) -> float | None:
    """Return by what all gradients that differ are multiplied; None where it is not one."""
    limit = gradient_limit(sides)
    apart = pairs_far_apart(sides, gradient_pairs(sides, gradients_left))
    wanted = set(ours)
    pairs = [p for p in apart.values() if any(v.key in wanted for v in p.ours)]
    found = set(ours) - {value.key for pair in pairs for value in pair.ours}
    factors = [_factor_of(pair, limit) for pair in pairs]
    known = [factor for factor in factors if factor is not None]
    if not pairs or found or len(known) < len(pairs):
        return None
    first = known[0]
    if any(abs(factor - first) > limit * abs(first) for factor in known):
        return None
    return first


def _factor_of(pair: GradientPair, limit: float) -> float | None:
    """Return how many times the reference's a gradient is; None where it is not."""
    if pair.sketch is None or pair.twin is None:
        return None
    for turned in (pair.twin, pair.twin.negative):
        if turned.values.shape == pair.sketch.values.shape and pair.sketch.size:
            factor = turned.size / pair.sketch.size
            if factor and _apart(pair.sketch, turned, factor) <= limit:
                return factor if turned is pair.twin else -factor
    return None


def ratio_of_sizes(twin: Value, value: Value) -> float:
    """Return how large a value is, in sizes of the reference's; 0 where that is not known."""
    if twin.sketch is None or value.sketch is None or not twin.sketch.size:
        return 0.0
    return value.sketch.size / twin.sketch.size


def _apart(one: Sketch, other: Sketch, factor: float) -> float:
    """Return how far ``other`` is from ``factor`` times ``one``, relative; ``factor`` > 0."""
    if one.numel != other.numel or not (one.exact and other.exact):
        return math.inf
    scaled: Array = factor * one.values
    size = float(np.linalg.norm(scaled))
    return float(np.linalg.norm(scaled - other.values)) / size if size else math.inf


def _by_numel(
    flow: Flow, results: Sequence[int], agreeing: Container[int]
) -> dict[int, list[Value]]:
    """Return what results are made of in the backward pass, by how many elements."""
    region = upstream(flow, results, lambda value: value.key not in agreeing)
    found: dict[int, list[Value]] = {}
    for value in sorted(map(flow.values.__getitem__, region), key=_order):
        if says_something(value):
            found.setdefault(_numel(value), []).append(value)
    return found


def says_something(value: Value) -> bool:
    """Return True for numbers of a backward pass that agree with no others by chance."""
    return (
        value.row.phase == _BACKWARD
        and value.is_number
        and not value.says_nothing
        and _numel(value) >= FEWEST
    )


def _numel(value: Value) -> int:
    return 0 if value.sketch is None else value.sketch.numel


def is_times(value: Value, twin: Value, factor: float, limit: float) -> bool:
    """Return True for a value that is so many times the reference's, in some order."""
    if value.sketch is None or twin.sketch is None:
        return False
    wanted = twin.sketch if factor > 0 else twin.sketch.negative
    if wanted.values.shape != value.sketch.values.shape:
        return False
    return _apart(wanted, value.sketch, abs(factor)) <= limit
