"""Which backward pass that was written by hand hands on a wrong gradient?

Its values have no counterparts: another formula of the same derivative makes others. But
the forward pass was recorded, and autograd differentiates it. Where that gives the
reference's gradients of all parameters, the forward pass is right, and what goes back to
each of its values is known. A value of the recorded backward pass that is such a gradient
is right. Of those that lead to wrong ones the earliest is sought with which, once it holds
one of them, what is made of it is right: the fault is in what that is made of.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from roundoff.compare.blame.blamed import Blamed
from roundoff.compare.ports.counterparts import counterparts, named_leaves
from roundoff.compare.ports.differentiated_flow import differentiated_rightly
from roundoff.compare.ports.hand_terms import lacking_factor
from roundoff.compare.ports.pass_under_autograd import DifferentiatedFlow
from roundoff.compare.ports.port_results import (
    GradientPair,
    gradient_pairs,
    gradients_left,
    pairs_far_apart,
)
from roundoff.compare.records.recorded_calls import CannotRun
from roundoff.compare.records.value_sketch import (
    Sketch,
    SketchIndex,
    in_reals,
    sketch_of_tensor,
)
from roundoff.compare.repairs.goals import Goal
from roundoff.compare.repairs.named_repairs import blamed_for
from roundoff.compare.repairs.repair_trials import Repair, best_repair
from roundoff.compare.repairs.trials import Region, Trials
from roundoff.compare.values.traced_calls import TracedProgram
from roundoff.compare.values.value_flow import Value
from roundoff.compare.values.value_regions import Sides, upstream
from roundoff.ops import operators_that

#: Trials of a gradient in the place of a wrong one, at most.
TRIALS = 600
#: Gradients that are tried in the place of one value, at most.
MOST_GRADIENTS = 16
#: Right gradients that are made of one: fewer may be those of other values by chance.
FEWEST = 3
#: What is made of one, before a trial is in vain.
PATIENCE = 12
#: How far slices that differ by a factor may be apart beside it.
SLICES = 1e-4
#: How autograd puts together what comes from several reads of a value.
_SUMS = frozenset({"add", "add_"})
#: They take a value times another one.
_FACTORS = frozenset({"mul", "mul_"})
_BACKWARD = "backward"
_FORWARD = "forward"
_MOVE = operators_that("move values")


def blamed_by_hand(sides: Sides, wrong: Sequence[int]) -> Blamed | None:
    """Return the first wrong call of a backward pass by hand; None where it is none.

    Args:
        sides: with the tensors of both passes.
        wrong: keys of the candidate's gradients that differ.
    """
    found = differentiated_rightly(sides.candidate, _Wanted(sides).are, sides.twins)
    return None if found is None else _Search(sides, found, wrong).blamed()


@dataclass(frozen=True, slots=True, eq=False)
class _Gradient:
    """What goes back to a value of the forward pass.

    Attributes:
        key: the value.
        tensor: the gradient.
        sketch: of it.
        is_whole: False for what goes back through one of several reads.
    """

    key: int
    tensor: Tensor
    sketch: Sketch
    is_whole: bool


class _Search:
    """Which values of the recorded backward pass are right, and where the first is not."""

    def __init__(
        self, sides: Sides, found: DifferentiatedFlow, wrong: Sequence[int]
    ) -> None:
        self._sides = sides
        self._flow = sides.candidate
        self._known = list(_gradients(found))
        sketches = [(i, g.sketch) for i, g in enumerate(self._known)]
        self._index = SketchIndex(
            (i, sketch) for i, sketch in sketches if self._known[i].is_whole
        )
        self._with_parts = SketchIndex(sketches)
        rows = self._flow.step.rows.values()
        self._forward_lines = {row.line for row in rows if row.phase == _FORWARD}
        going_back = [
            value
            for value in self._flow.values.values()
            if value.row.phase == _BACKWARD and value.sketch is not None
        ]
        present = SketchIndex((v.key, v.sketch) for v in going_back if v.sketch)
        self._right: set[int] = set()
        for value in self._flow.in_order():
            if self._is_right(value):
                self._right.add(value.key)
        self._region = upstream(self._flow, wrong, self._is_wrong)
        self._missing: dict[tuple[int, ...], list[_Gradient]] = {}
        for gradient in sorted(self._known, key=lambda each: -each.key):
            if not present.near(gradient.sketch, sides.limit):
                shape = tuple(gradient.tensor.shape)
                self._missing.setdefault(shape, []).append(gradient)
        self._of_parameters = {
            f"{name}.grad": sketch_of_tensor(tensor.detach())
            for name, tensor in found.gradients.items()
        }
        self._program = TracedProgram(self._flow, phases=(_BACKWARD,))

    def blamed(self) -> Blamed | None:
        """Return what to name."""
        value, gradient = self._earliest() or (None, None)
        region = self._region
        if value is not None and gradient is not None:
            region = upstream(self._flow, [value.key], self._is_wrong)
            repaired = self._repaired(value, gradient, region)
            repaired = repaired or self._scaled(value, gradient)
            if repaired is not None:
                return repaired
        first = self._named(region, is_last=gradient is not None)
        if first is None:
            return None
        if gradient is None:
            words = "what it is made of is right, and what is made of it is not"
        else:
            source = self._flow.values[gradient.key]
            line = f" ({source.row.line})" if source.row.line else ""
            words = (
                f"the gradient of {source.row.site}{line} that is made of it is wrong"
            )
            first = self._before_factors(first, gradient)
        words = (
            f"autograd gives the reference's gradients for this forward pass; {words}"
        )
        return Blamed(first, None, words, is_operator=True)

    def _is_right(self, value: Value) -> bool:
        """Return True for a gradient that is right, and for what autograd makes of such."""
        if value.row.phase != _BACKWARD or value.key in self._sides.twins:
            return True
        if value.says_nothing or not (value.is_call or value.inputs):
            return True
        if value.sketch is not None and self._index.near(
            value.sketch, self._sides.limit
        ):
            return True
        if self._is_by_hand(value) or value.row.name:
            return False
        if not all(key in self._right for key in value.inputs):
            return False
        is_part = value.sketch is not None and bool(
            self._with_parts.near(value.sketch, self._sides.limit)
        )
        return is_part or value.operator in _SUMS

    def _is_by_hand(self, value: Value) -> bool:
        line = value.row.line
        return line is not None and line not in self._forward_lines

    def _is_wrong(self, value: Value) -> bool:
        return value.key not in self._right

    def _earliest(self) -> tuple[Value, _Gradient] | None:
        """Return the earliest value after which more is right, and what it should be.

        What is made by hand and read by a wrong call may be the gradient of another value,
        or a part of it, and look right.
        """
        flow = self._flow
        wrong = [flow.values[key] for key in self._region]
        heads = [v for v in wrong if self._region.isdisjoint(v.inputs)]
        values = [*wrong, *self._handed_to(heads)]
        trials = 0
        for value in sorted(values, key=lambda each: each.order):
            if value.inner or not value.is_number:
                continue
            for gradient in self._of_shape(value):
                trials += 1
                if trials > TRIALS:
                    return None
                together = self._together(value, gradient)
                ways = [{value.key: gradient.tensor}, *([together] if together else [])]
                if any(self._is_mended_with(value, way) for way in ways):
                    return value, gradient
        return None

    def _together(self, value: Value, gradient: _Gradient) -> dict[int, Tensor]:
        """Return what a place of a line has to hold in all turns of a loop, by their keys.

        Going back the last turn comes first. Nothing for a place without other turns, or
        with another number of them than the place in the forward pass has.
        """
        flow = self._flow
        turns = [v for v in flow.in_order() if _place_of(v) == _place_of(value)]
        place = _place_of(flow.values[gradient.key])
        alike = {
            each.key: each.tensor
            for each in self._known
            if each.is_whole and _place_of(flow.values[each.key]) == place
        }
        if len(turns) < 2 or len(turns) != len(alike):
            return {}
        going_back = [alike[key] for key in sorted(alike, reverse=True)]
        pairs = list(zip(turns, going_back, strict=True))
        if any(tuple(v.row.shape or ()) != tuple(each.shape) for v, each in pairs):
            return {}
        return {turn.key: each for turn, each in pairs}

    def _handed_to(self, heads: Sequence[Value]) -> list[Value]:
        """Return what calls by hand make and these read, behind autograd's moves and sums."""
        handed: dict[int, Value] = {}
        waiting = [key for head in heads for key in head.inputs]
        while waiting:
            value = self._flow.values.get(waiting.pop())
            if value is None or value.row.phase != _BACKWARD:
                continue
            if self._is_by_hand(value):
                handed[value.key] = value
            elif not value.computes or value.operator in _SUMS:
                waiting += value.inputs
        return list(handed.values())

    def _repaired(
        self, value: Value, gradient: _Gradient, region: set[int]
    ) -> Blamed | None:
        """Return the edit of a call by hand that makes a value what it should be."""
        limit = self._sides.limit
        held = {value.key: gradient.tensor}
        ends = {value.key: [(gradient.sketch, limit)]}
        goal = Goal(SketchIndex(()), None, limit, ends, frozenset(ends), held)
        trials = Trials(self._program, goal, only=region)
        repair = best_repair(
            self._sides, trials, Region(region, frozenset()), lambda: None
        )
        if not isinstance(repair, Repair) or not repair.ends:
            return None
        return blamed_for(self._sides, repair, region, None)

    def _scaled(self, value: Value, gradient: _Gradient) -> Blamed | None:
        """Return a term by hand that makes a value right with another factor."""
        term = lacking_factor(self._program, value, gradient.tensor, self._is_by_hand)
        if term is None:
            return None
        words = (
            "autograd gives the reference's gradients for this forward pass: so it does "
            f"with {term.factor:.4g} times this value"
        )
        return Blamed(term.value, None, words, is_operator=True)

    def _of_shape(self, value: Value) -> list[_Gradient]:
        """Return what a value may have to hold: gradients that are nowhere in the pass.

        Those of the last values of the forward pass first: they come first, going back.
        """
        shape = tuple(value.row.shape or ())
        return self._missing.get(shape, [])[:MOST_GRADIENTS]

    def _is_mended_with(self, value: Value, given: Mapping[int, Tensor]) -> bool:
        """Return True where what is made of wrong values is right if they hold these.

        ``value`` is one of them.
        """
        since = gained = 0
        held = self._flow.tensor(value.key)
        if held is None:
            return False
        gradient = given[value.key]
        instead = {key: each.to(held.dtype) for key, each in given.items()}
        try:
            changed = self._program.again({}, instead)
            for row, tensor in changed:
                if row.record not in self._region:
                    continue
                made = self._flow.values[row.record]
                if self._is_gradient(made, tensor):
                    gained += 1
                    since = 0
                    if gained == FEWEST or made.row.name is not None:
                        return True
                since += made.computes
                if since > PATIENCE:
                    return False
        except CannotRun:
            return False
        return value.row.name is not None and self._is_gradient(value, gradient)

    def _is_gradient(self, made: Value, tensor: Tensor) -> bool:
        """Return True for a right gradient that is not only the given one, moved."""
        sketch = sketch_of_tensor(tensor)
        if made.row.name is not None:
            wanted = self._of_parameters.get(made.row.name)
            if wanted is None or sketch is None:
                return False
            return wanted.distance(sketch) <= self._sides.limit
        if not made.computes or made.operator in _MOVE:
            return False
        if sketch is None or sketch.constant:
            return False
        return bool(self._index.near(sketch, self._sides.limit))

    def _before_factors(self, value: Value, gradient: _Gradient) -> Value:
        """Return what a wrong gradient is before it is multiplied by right values.

        Where a factor is left out that is one for whole slices, it is missing behind them:
        then the value itself.
        """
        held = self._flow.tensor(value.key)
        if held is None or _is_off_by_slices(gradient.tensor, held):
            return value
        while value.operator in _FACTORS:
            sources = [self._flow.values[key] for key in dict.fromkeys(value.inputs)]
            wrong = [source for source in sources if source.key not in self._right]
            if len(sources) != 2 or len(wrong) != 1 or not self._is_by_hand(wrong[0]):
                break
            [value] = wrong
        return value

    def _named(self, region: set[int], *, is_last: bool) -> Value | None:
        """Return the call by hand of a region that is named; None where there is none.

        The last one that computes, of a region that makes one value: what is left out
        before it is missing there; else the first. Where none does, the first that moves
        values; where none is by hand, what autograd was handed.
        """
        flow = self._flow
        values = sorted((flow.values[key] for key in region), key=lambda v: v.order)
        by_hand = [v for v in values if self._is_by_hand(v) and not v.inner]
        computing = [v for v in by_hand if v.computes and v.operator not in _MOVE]
        if computing:
            return computing[-1] if is_last else computing[0]
        calls = [value for value in by_hand if value.is_call]
        if calls:
            return calls[0]
        # a tensor of which views were written
        written = [key for value in by_hand for key in value.inputs[:1]]
        handed = [key for value in values for key in value.inputs]
        handed = [key for key in handed if key in flow.values]
        handed = [key for key in handed if self._is_by_hand(flow.values[key])]
        named = [flow.values[key] for key in written or handed if key in flow.values]
        return max(named, key=lambda value: value.order, default=None)


def _place_of(value: Value) -> object:
    """Return what values of one place of a line have in common."""
    row = value.row
    return row.line, value.operator, row.place, row.phase, value.inner, row.callers


def _gradients(found: DifferentiatedFlow) -> Iterator[_Gradient]:
    """Yield what goes back to each value, and through each read, but for zeros."""
    seen: set[tuple[int, float]] = set()
    whole = ((key, tensor, True) for key, tensor in found.values.items())
    read = ((edge[1], tensor, False) for edge, tensor in found.through.items())
    for key, tensor, is_whole in (*whole, *read):
        sketch = sketch_of_tensor(tensor.detach())
        if sketch is None or not sketch.size or (key, sketch.size) in seen:
            continue
        seen.add((key, sketch.size))
        yield _Gradient(key, tensor.detach(), sketch, is_whole)


class _Wanted:
    """The reference's gradients, which the candidate's parameters should have."""

    def __init__(self, sides: Sides) -> None:
        self._sides = sides
        pairs = gradient_pairs(sides, gradients_left)
        self._wanted = [
            (each, pairs[each.ours[0]])
            for each in counterparts(sides)
            if each.ours[0] in pairs
        ]
        self._leaves = named_leaves(sides.candidate)

    def are(self, gradients: Mapping[str, Tensor]) -> bool:
        """Return True for these gradients by name; small ones may be rounding."""
        pairs: dict[str, GradientPair] = {}
        for each, pair in self._wanted:
            parts = [self._gradient(name, gradients) for name in each.theirs]
            if each.numel is not None:
                lacking = each.numel - sum(part.numel() for part in parts)
                parts.append(parts[0].new_zeros(lacking))
            twin = sketch_of_tensor(torch.cat(parts))
            if twin is None:
                return False  # not finite
            pairs[each.ours[0]] = replace(pair, twin=twin)
        return bool(pairs) and not pairs_far_apart(self._sides, pairs)

    def _gradient(self, name: str, gradients: Mapping[str, Tensor]) -> Tensor:
        if name in gradients:
            return in_reals(gradients[name].detach()).reshape(-1)
        return torch.zeros(self._leaves[name].row.numel or 0, dtype=torch.float64)


def _is_off_by_slices(wanted: Tensor, held: Tensor) -> bool:
    """Return True where one is the other times numbers that are equal along some axis."""
    if wanted.shape != held.shape:
        return False
    ours, theirs = wanted.to(torch.float64), held.to(torch.float64)
    for axis, size in enumerate(held.shape):
        if size == 1:
            continue
        # of slices of equal ratio the products of their ends with each other are equal
        first, other = ours.narrow(axis, 0, 1), theirs.narrow(axis, 0, 1)
        crossed = ours * other - theirs * first
        largest = float((ours * other).abs().max())
        if float(crossed.abs().max()) <= SLICES * largest:
            return True
    return False
