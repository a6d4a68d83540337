"""What is done to gradients between the backward pass and the optimizer: a clip, mostly.

An optimizer that divides by the size of gradients makes the same update of clipped ones at
first, so that the update does not show a clip that is missing, or of another norm. Where
both programs write clipped gradients over the others, these are compared. Where one does,
the other one may clip on the way: it has the clipped gradient, or what the first one's
optimizer makes of it first, among the values that it makes of its own gradient.
"""

from __future__ import annotations

import json
from collections.abc import Collection, Container, Iterator, Mapping, Sequence

from roundoff.compare.ports.port_results import (
    GradientPair,
    Results,
    gradient_limit,
    gradient_pairs,
    gradients_left,
    least_gradient,
    pairs_far_apart,
)
from roundoff.compare.records.recorded_rows import last_named
from roundoff.compare.values.value_flow import Flow, Value
from roundoff.compare.values.value_regions import Sides

_BACKWARD = "backward"
_OPTIMIZER = "optimizer"
#: What was last written to memory, seen through another view of it.
_SHARED = "alias"


def prepared_gradients(sides: Sides) -> Results:
    """What is made of gradients that agree before the optimizer reads them."""
    left = _of_one(gradient_pairs(sides, gradients_left))
    read = _of_one(gradient_pairs(sides, last_named))
    far = pairs_far_apart(sides, read)
    limit = gradient_limit(sides) + _farthest(sides, left)
    keys: Results = ([], [], _OPTIMIZER)
    names = far.keys() & left.keys()
    rates = _rates(sides.reference) | _rates(sides.candidate) if names else set()
    for name in names:
        (before,), (other_before,) = left[name].ours, left[name].theirs
        (after,), (other_after,) = read[name].ours, read[name].theirs
        stages = list(_stages(sides.candidate, other_after, other_before))
        earlier = list(_stages(sides.reference, after, before))
        if any(_distance(after, stage) <= limit for stage in stages):
            continue
        if any(_distance(other_after, stage) <= limit for stage in earlier):
            continue
        ours: Value | None = after
        theirs: Value | None = other_after
        if _is_as_left(sides.reference, after, before):
            results = _contradiction(
                (sides.candidate, sides.reference), other_after, before, rates, limit
            )
            ours = _first_of(results, sides.agreeing)
        elif _is_as_left(sides.candidate, other_after, other_before):
            results = _contradiction(
                (sides.reference, sides.candidate), after, other_before, rates, limit
            )
            theirs = _first_of(results, sides.twins)
        if ours is not None and theirs is not None:
            keys[0].append(ours.key)
            keys[1].append(theirs.key)
    return keys


def _stages(flow: Flow, after: Value, before: Value) -> Iterator[Value]:
    """Yield what a gradient's memory holds in turn, the last first, down to what the
    backward pass left: an optimizer may make its update in the gradient's place."""
    value = after
    while value.key != before.key:
        yield value
        if not value.row.inplace or not value.row.inputs:
            return
        source = flow.values.get(value.row.inputs[0])
        if source is None:
            return
        value = source


def _is_as_left(flow: Flow, after: Value, before: Value) -> bool:
    """Return True where a gradient is as the backward pass leaves it, or a view of that."""
    return flow.behind(after.key).key == flow.behind(before.key).key


def _of_one(pairs: Mapping[str, GradientPair]) -> dict[str, GradientPair]:
    """Return the gradients of one parameter of each side: what is made of one is followed."""
    return {name: pair for name, pair in pairs.items() if pair.is_one_to_one}


def _farthest(sides: Sides, pairs: Mapping[str, GradientPair]) -> float:
    """Return how far gradients are apart already: a clip by their norm hands it on."""
    sizes = [pair.sketch.size for pair in pairs.values() if pair.sketch]
    least = least_gradient(sides) * max(sizes, default=0.0)
    shares = [
        pair.sketch.distance(pair.twin)
        * pair.sketch.size
        / max(pair.sketch.size, least)
        for pair in pairs.values()
        if pair.sketch is not None and pair.twin is not None and pair.sketch.size
    ]
    return max(shares, default=0.0)


def _contradiction(
    flows: tuple[Flow, Flow],
    clipped: Value,
    gradient: Value,
    rates: Collection[float],
    limit: float,
) -> list[Value]:
    """Return what is made of a gradient as it was; nothing for what may be right.

    ``flows``: of the program that writes the clipped gradient, and of the one that has
    the gradient as it was. That one is not judged where it makes nothing of this one
    gradient alone, but of all gradients in one tensor. ``rates``: with which optimizers add
    values.
    """
    flow, other = flows
    results = list(_made_of(other, gradient))
    if any(_is_part_of_more(other, value) for value in results):
        return []
    wanted = [clipped, *_readers(flow, clipped)]
    if any(_distance(w, value) <= limit for w in wanted for value in results):
        return []
    if any(_is_update(clipped, value, rates, limit) for value in results):
        return []
    return results


def _is_update(
    clipped: Value, made: Value, rates: Collection[float], limit: float
) -> bool:
    """Return True for what a clipped gradient is times a rate that it is added with."""
    if clipped.sketch is None or made.sketch is None:
        return False
    scaled = (clipped.sketch.times(rate) for rate in rates)
    forms = (form for each in scaled for form in (each, each.negative))
    return any(form.distance(made.sketch) <= limit for form in forms)


def _rates(flow: Flow) -> set[float]:
    """Return the factors, without their signs, with which an optimizer adds values."""
    rates = set()
    for value in flow.values.values():
        is_added = value.operator == "add" and value.row.phase == _OPTIMIZER
        if is_added and value.row.arguments:
            _, keywords = json.loads(value.row.arguments)
            rate = keywords.get("alpha", 1)
            if isinstance(rate, int | float) and rate not in (0, 1):
                rates.add(abs(float(rate)))
    return rates


def _is_part_of_more(flow: Flow, value: Value) -> bool:
    """Return True for what is written to memory that something else views too."""
    if not value.row.inplace or not value.inputs or value.inputs[0] not in flow.values:
        return False
    written = flow.values[value.inputs[0]].row
    if written.operator == _SHARED:
        return True
    rows = flow.step.rows
    while written.view_of is not None and written.view_of in rows:
        written = rows[written.view_of]
    return (written.numel or 0) > (value.row.numel or 0)


def _first_of(made: Sequence[Value], agreeing: Container[int]) -> Value | None:
    """Return the first value that the other program does not have; else the first."""
    others = [value for value in made if value.key not in agreeing]
    return next(iter([*others, *made]), None)


def _readers(flow: Flow, value: Value) -> Iterator[Value]:
    """Yield what is made of a value, element by element, but for parameters."""
    for key in flow.readers.get(value.key, ()):
        reader = flow.values[key]
        if reader.row.phase == _BACKWARD or reader.row.name:
            continue
        if reader.row.numel == value.row.numel and reader.sketch is not None:
            yield reader


def _made_of(flow: Flow, gradient: Value) -> Iterator[Value]:
    """Yield all that is made of a gradient, element by element, but for parameters."""
    waiting = [gradient]
    seen: set[int] = set()
    while waiting:
        for reader in _readers(flow, waiting.pop(0)):
            if reader.key not in seen:
                seen.add(reader.key)
                waiting.append(reader)
                if reader.computes:
                    yield reader


def _distance(one: Value, other: Value) -> float:
    if one.sketch is None or other.sketch is None:
        return 0.0
    return one.sketch.distance(other.sketch)
