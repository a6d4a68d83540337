"""The results of one step of two programs by different hands, and which of them differ.

They are what the forward pass ends with, what it writes to buffers (``written_buffers``),
the gradients of parameters that hold the same values, and what the optimizer makes of
these (``port_updates``).
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import (
    Callable,
    Collection,
    Iterable,
    Iterator,
    Mapping,
    Sequence,
)
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from roundoff.compare.loop.step_results import have_same_losses, losses_of
from roundoff.compare.ports.counterparts import counterparts, joined_sketch
from roundoff.compare.records.recorded_rows import RecordedRow, Rows, last_named
from roundoff.compare.records.value_sketch import Sketch, in_reals
from roundoff.compare.values.value_flow import Flow, Value
from roundoff.compare.values.value_regions import Sides, upstream

#: Gradients below this share of the largest one are rounding of what is zero, in fp32.
NO_GRADIENT = 1e-2
#: How many limits gradients may be apart after the first step.
LATER = 16.0
#: An output of this many elements says more than the loss.
WIDE = 4

_FORWARD = "forward"
_BACKWARD = "backward"
#: What autograd makes of a loss to begin with.
_ONES = "ones_like"

#: Keys of the reference and of the candidate that differ, and their phase.
Results = tuple[list[int], list[int], str]


def outputs(sides: Sides) -> Results:
    """What the forward pass ends with: the last value that nothing in it reads."""
    ours, theirs = last_results(sides)
    if ours is None or theirs is None:
        return [], [], _FORWARD
    if have_same_sum(sides):
        return [], [], _FORWARD
    if _is_reduced_later(ours, theirs, sides.limit):
        return [], [], _FORWARD
    if _ends_differ(sides, ours, theirs):
        return [ours.key], [theirs.key], _FORWARD
    # what a loss is made of may be another value of its formula
    end = wide(sides.reference, ours)
    other_end = wide(sides.candidate, theirs)
    if end.key in sides.agreeing or other_end.key in sides.twins:
        return [], [], _FORWARD
    if _differ_in_sign(end, other_end, sides.limit):
        return [], [], _FORWARD
    ours_is_formula = _is_of_values_alone(sides.reference, end, sides.agreeing)
    if ours_is_formula and _is_of_values_alone(sides.candidate, other_end, sides.twins):
        return [], [], _FORWARD
    return [end.key], [other_end.key], _FORWARD


def have_same_sum(sides: Sides, exact: Sides | None = None) -> bool:
    """Return True where one program goes back from the sum of the losses of the other.

    ``exact``: both in fp64, where that is to be so too.
    """
    reference = sides.reference.step.rows
    candidate = sides.candidate.step.rows
    ours = losses_of(reference)
    theirs = losses_of(candidate)
    if len(ours) == len(theirs) or not have_same_losses(reference, candidate):
        return False
    if exact is None:
        return True
    sums = _sum(exact.reference, ours), _sum(exact.candidate, theirs)
    return math.isclose(*sums, rel_tol=exact.limit)


def _sum(flow: Flow, losses: Iterable[RecordedRow]) -> float:
    """Return the sum of some numbers; NaN where one is not known."""
    numbers = [flow.tensor(loss.record) for loss in losses]
    return math.fsum(math.nan if n is None else float(n) for n in numbers)


def _differ_in_sign(end: Value, other_end: Value, limit: float) -> bool:
    """Return True where a loss is made of the other's terms, of which it takes the negative."""
    if end.sketch is None or other_end.sketch is None:
        return False
    return end.sketch.distance(other_end.sketch.negative) <= limit


def _is_of_values_alone(flow: Flow, end: Value, agreeing: Mapping[int, Any]) -> bool:
    """Return True for a value that is made of values that agree, and of no parameter.

    What ends in the same result is then another formula of it, such as a softmax by
    exponentials: a fault before would reach the result through a layer.
    """
    region = upstream(flow, [end.key], lambda value: value.key not in agreeing)
    read = {key for value in region for key in flow.values[value].inputs}
    leaves = [flow.values[key] for key in read if key in flow.values]
    return not any(leaf.row.name and not leaf.is_call for leaf in leaves)


def _is_reduced_later(ours: Value, theirs: Value, limit: float) -> bool:
    """Return True where one end is the mean, or the sum, of the other's elements.

    One run ends in the losses of the samples, whose gradients it averages afterwards.
    """
    reduced, several = sorted((ours.row, theirs.row), key=lambda row: row.numel or 0)
    if reduced.numel != 1 or not several.numel or several.numel == 1:
        return False
    if reduced.mean is None or several.mean is None:
        return False
    expected = (several.mean, several.mean * several.numel)
    largest = limit * abs(reduced.mean)
    return any(abs(reduced.mean - value) <= largest for value in expected)


def _ends_differ(sides: Sides, end: Value, other_end: Value) -> bool:
    """Return True if two programs end in values that do not agree.

    One end may agree with a value inside the other program. If that goes on from there
    to an end of as many elements, it does something more to the result; if not, its end
    is another one: an accuracy that is computed beside the loss.
    """
    twin = sides.agreeing.get(end.key)
    other_twin = sides.twins.get(other_end.key)
    if twin is None and other_twin is None:
        return True
    if twin is not None and other_twin is not None:
        return False
    if twin is not None:
        return _goes_on(sides.candidate, twin[0], other_end)
    return other_twin is not None and _goes_on(sides.reference, other_twin[0], end)


def _goes_on(flow: Flow, key: int, end: Value) -> bool:
    """Return True if an end is made of a value of as many elements."""
    start = flow.values.get(key)
    if start is None or start.row.numel != end.row.numel:
        return False
    waiting = list(end.inputs)
    seen: set[int] = set()
    while waiting:
        source = waiting.pop()
        if source == key:
            return True
        if source in flow.values and source not in seen:
            seen.add(source)
            waiting += flow.values[source].inputs
    return False


def wide(flow: Flow, last: Value) -> Value:
    """Return the last value of several elements that a loss is made of."""
    waiting = [last]
    seen: set[int] = set()
    while waiting:
        value = waiting.pop(0)
        if value.is_call and value.is_number and (value.row.numel or 0) >= WIDE:
            return value
        for key in value.inputs:
            if key in flow.values and key not in seen:
                seen.add(key)
                waiting.append(flow.values[key])
    return last


def last_result(flow: Flow) -> Value | None:
    """Return what the backward pass begins with, or the last value that nothing reads."""
    end = _differentiated(flow)
    if end is not None:
        return flow.values[end]
    return next(reversed(_unread(flow)), None)


def last_results(sides: Sides) -> tuple[Value | None, Value | None]:
    """Return what each program ends with: ``last_result``, as far as both are the same one.

    Where no gradient is asked for, the last value that nothing reads may be another one in
    each program, or the same beside a result that differs. Two are the same result if no
    other one that a program ends with has as many elements.
    """
    flows = sides.reference, sides.candidate
    ours, theirs = map(last_result, flows)
    if any(_differentiated(flow) is not None for flow in flows):
        return ours, theirs
    if ours is None or theirs is None:
        return ours, theirs
    each = [_alone_in_size(_unread(flow)) for flow in flows]
    pairs = [(end, each[1][size]) for size, end in each[0].items() if size in each[1]]
    differing = [pair for pair in pairs if _ends_differ(sides, *pair)]
    if ours.row.numel == theirs.row.numel:
        is_right = not _ends_differ(sides, ours, theirs)
        return differing[0] if differing and is_right else (ours, theirs)
    return next(iter(differing or reversed(pairs)), (ours, theirs))


def _alone_in_size(ends: Sequence[Value]) -> dict[int | None, Value]:
    """Return the values by how many elements they have, where that is said by one alone."""
    count = Counter(end.row.numel for end in ends)
    return {end.row.numel: end for end in ends if count[end.row.numel] == 1}


def _unread(flow: Flow) -> list[Value]:
    """Return what the forward pass computes and does not read, in its order."""
    return [
        value
        for value in flow.in_order()
        if not value.inner
        and value.row.phase == _FORWARD
        and not value.row.name
        and value.computes
        and value.is_number
        and not value.row.place
        and not _is_read(flow, value.key)
    ]


def _differentiated(flow: Flow) -> int | None:
    """Return the last value of which a backward pass begins with ones; None without one.

    What a program computes and does not use is no result of it.
    """
    last = flow.end
    for value, _ in starts_of_backward(flow):
        last = value.key
    return last


def last_differentiated(sides: Sides) -> tuple[int | None, int | None]:
    """Return what the last backward pass of each program begins with.

    None where one has more passes: then which results are the same is not said by them.
    """
    flows = sides.reference, sides.candidate
    passes = [len([*starts_of_backward(flow)]) for flow in flows]
    if passes[0] != passes[1]:
        return None, None
    return _differentiated(sides.reference), _differentiated(sides.candidate)


def inner_gradients(flow: Flow) -> list[Value]:
    """Return the gradients that the forward pass goes on with: of a penalty."""
    read = read_of_backward(flow)
    return [v for v in read if flow.behind(v.key).row.phase == _BACKWARD]


def read_of_backward(flow: Flow) -> list[Value]:
    """Return what the forward pass reads of a backward pass.

    Besides gradients its own values, which a backward pass has read last.
    """
    return [
        value
        for value in flow.in_order()
        if value.row.phase == _BACKWARD
        and value.is_number
        and any(
            flow.values[key].row.phase == _FORWARD
            for key in flow.readers.get(value.key, ())
        )
    ]


def starts_of_backward(flow: Flow) -> Iterator[tuple[Value, RecordedRow]]:
    """Yield what each backward pass is of, and the ones that it begins with, in order."""
    for row in flow.step.rows.values():
        if row.base_operator != _ONES or row.phase != _FORWARD or not row.inputs:
            continue
        source = flow.values.get(row.inputs[0])
        phases = {
            flow.values[key].row.phase for key in flow.readers.get(row.record, ())
        }
        if source is not None and phases == {_BACKWARD}:
            yield source, row


def _is_read(flow: Flow, key: int) -> bool:
    """Return True where the forward pass computes with a value."""
    waiting = [key]
    while waiting:
        for reader in flow.readers.get(waiting.pop(), ()):
            value = flow.values[reader]
            if value.row.phase != _FORWARD:
                continue
            if value.computes:
                return True
            if value.sketch is None or value.operator != _ONES:
                waiting.append(reader)
    return False


@dataclass(frozen=True, slots=True, eq=False)
class GradientPair:
    """The gradients of parameters that are counterparts, and of each side their values
    without places."""

    ours: tuple[Value, ...]
    theirs: tuple[Value, ...]
    sketch: Sketch | None
    twin: Sketch | None

    @property
    def is_one_to_one(self) -> bool:
        """True for the gradients of one parameter of each side, with as many elements.

        A table may lack the row of the padding.
        """
        if len(self.ours) != 1 or len(self.theirs) != 1:
            return False
        return self.ours[0].row.numel == self.theirs[0].row.numel


def gradients(sides: Sides) -> Results:
    """The gradients of parameters that hold the same values, as the backward pass leaves
    them.

    What is undone before the optimizer reads them, the scale of a loss, is no difference.
    """
    return gradients_but(sides, undone_gradients(sides))


def gradients_but(sides: Sides, undone: Collection[str]) -> Results:
    """Return the gradients that differ, without those of the reference's parameters in
    ``undone``."""
    pairs = pairs_far_apart(sides, gradient_pairs(sides, gradients_left))
    apart = [pair for name, pair in pairs.items() if name not in undone]
    ours = [value.key for pair in apart for value in pair.ours]
    ours += [value.key for value in _missing_gradients(sides)]
    return ours, [value.key for pair in apart for value in pair.theirs], _BACKWARD


def undone_gradients(sides: Sides) -> frozenset[str]:
    """Return the gradients that differ after the backward pass, and not for the optimizer."""
    left = pairs_far_apart(sides, gradient_pairs(sides, gradients_left))
    read = pairs_far_apart(sides, gradient_pairs(sides, last_named))
    return frozenset(left.keys() - read.keys())


def _missing_gradients(sides: Sides) -> list[Value]:
    """Return the reference's gradients of parameters for which the candidate has none."""
    ours = _values_of(sides.reference, gradients_left)
    theirs = _values_of(sides.candidate, gradients_left)
    if not theirs:
        return []
    sizes = {name: v.sketch.size for name, v in ours.items() if v.sketch}
    least = least_gradient(sides) * max(sizes.values(), default=0.0)
    return [
        ours[name]
        for pair in counterparts(sides)
        if not any(other in theirs for other in pair.theirs)
        for name in pair.ours
        if sizes.get(name, 0.0) > least
    ]


def gradient_pairs(
    sides: Sides, named: Callable[[Rows], Mapping[str, RecordedRow]]
) -> dict[str, GradientPair]:
    """Return the gradients of parameters that hold the same values, of both sides.

    By the name of the reference's, or the first of them. ``named`` says which row of a
    gradient is meant.
    """
    ours = _values_of(sides.reference, named)
    theirs = _values_of(sides.candidate, named)
    pairs = {}
    for each in counterparts(sides):
        values = tuple(ours[name] for name in each.ours if name in ours)
        twins = tuple(theirs[name] for name in each.theirs if name in theirs)
        if values and twins:
            sketch = joined_sketch(sides.reference, each.ours, ours, each.numel)
            twin = joined_sketch(sides.candidate, each.theirs, theirs, each.numel)
            pairs[each.ours[0]] = GradientPair(values, twins, sketch, twin)
    return pairs


def _values_of(
    flow: Flow, named: Callable[[Rows], Mapping[str, RecordedRow]]
) -> dict[str, Value]:
    """Return gradients by the names of their parameters."""
    return {
        name.removesuffix(".grad"): flow.values[row.record]
        for name, row in named(flow.step.rows).items()
        if name.endswith(".grad")
    }


def gradients_left(rows: Rows) -> dict[str, RecordedRow]:
    """Return the row of each gradient before anything but a backward pass has written it.

    The last row where no backward pass was recorded: a function that gives gradients.
    """
    named = {n: row for n, row in last_named(rows).items() if n.endswith(".grad")}
    of_backward = {row.name: row for row in rows.values() if row.phase == _BACKWARD}
    return {
        name: _left(rows, row) or of_backward.get(name, row)
        for name, row in named.items()
    }


def _left(rows: Rows, row: RecordedRow) -> RecordedRow | None:
    """Return what the backward pass left in memory that was written again, or viewed,
    afterwards; None where it left nothing in this memory."""
    before = row
    while before.phase != _BACKWARD:
        is_same_memory = before.inplace or before.view_of is not None
        if not is_same_memory or not before.inputs or before.inputs[0] not in rows:
            return None
        before = rows[before.inputs[0]]
    return before


def pairs_far_apart(
    sides: Sides, pairs: Mapping[str, GradientPair]
) -> dict[str, GradientPair]:
    """Return the gradients that do not agree; small ones may be rounding."""
    largest = max((p.sketch.size for p in pairs.values() if p.sketch), default=0.0)
    limit = gradient_limit(sides)
    least = least_gradient(sides) * largest
    return {name: p for name, p in pairs.items() if _far(p, limit, least)}


def change_of(before: Tensor | None, after: Tensor | None) -> Tensor | None:
    """Return what was added to a tensor, flat and in fp64; None where it is not known."""
    if before is None or after is None:
        return None
    ends = in_reals(before).to(torch.float64), in_reals(after).to(torch.float64)
    if ends[0].shape != ends[1].shape:
        return None
    return (ends[1] - ends[0]).reshape(-1)


def least_gradient(sides: Sides) -> float:
    """Return the share of the largest gradient below which one may be rounding."""
    return max(NO_GRADIENT, gradient_limit(sides))


def gradient_limit(sides: Sides) -> float:
    """Return the relative distance up to which gradients agree.

    In a format narrower than fp32 units of a ReLU go the other way: of values that are
    ``limit`` off as large a share, which is its root in the norm. In later steps those are
    of parameters that rounding has moved apart.
    """
    if sides.is_narrow:
        return math.sqrt(sides.limit)
    return LATER * sides.limit if sides.paired else sides.limit


def _far(pair: GradientPair, limit: float, least: float) -> bool:
    """Return True where gradients are further apart than ``limit`` of a size."""
    if pair.sketch is None or pair.twin is None:
        return False
    apart = pair.sketch.distance(pair.twin)
    if math.isinf(apart):
        return True
    return apart * pair.sketch.size > limit * max(pair.sketch.size, least)
