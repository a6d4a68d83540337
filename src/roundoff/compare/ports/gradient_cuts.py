"""Where one of two programs hands a gradient on, and the other does not.

A ``detach`` too many or too few, ``no_grad``, a straight-through estimator left out: the
forward passes agree, and one program's gradients lack a contribution, or have one more.
Both forward passes are differentiated (see ``differentiated_flow``). Each gradient that is
lost in one program, where a call reads a value that hands none on, is given to the value
of the other program that agrees and does hand it on. Where that makes all gradients of
parameters those of the other program, this is where the two part.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import islice, permutations

import numpy as np
import torch
from torch import Tensor

from roundoff.compare.blame.blamed import Blamed
from roundoff.compare.ports.counterparts import (
    Counterparts,
    counterparts,
    named_leaves,
)
from roundoff.compare.ports.differentiated_flow import differentiated, lost_gradients
from roundoff.compare.ports.pass_under_autograd import (
    DifferentiatedFlow,
    LostGradient,
    Scaling,
    place_of,
)
from roundoff.compare.ports.port_results import least_gradient
from roundoff.compare.records.value_sketch import rising, sketch_of_tensor
from roundoff.compare.values.fault_lines import FaultLines
from roundoff.compare.values.padded_rows import kept_rows, places_kept
from roundoff.compare.values.value_flow import Flow, Value, values_of_parameters
from roundoff.compare.values.value_regions import Sides

LABEL = "gradient cut"
#: Places that are tried, at most.
MOST = 64
#: Axes whose orders are tried.
MOST_AXES = 5

Gradients = Mapping[str, Tensor]


@dataclass(frozen=True, slots=True, eq=False)
class _Lost:
    """A gradient that one program loses, and what it is to the other's parameters.

    Attributes:
        cut: the first value, going back, that hands nothing on.
        twin: the other program's value that agrees with it, and does.
        share: what the other program's parameters get of it.
        is_candidate: the candidate loses it.
        reader: the line of the call that would hand it on.
    """

    cut: Value
    twin: Value
    share: Gradients
    is_candidate: bool
    reader: str | None


def blamed_cut(sides: Sides) -> Blamed | None:
    """Return the value at which one program alone hands a gradient on; None without one.

    ``sides`` have the tensors of both passes in fp64.
    """
    least = least_gradient(sides)
    reference = differentiated(sides.reference, sides.limit, least)
    if reference is None:
        return None
    candidate = differentiated(sides.candidate, sides.limit, least)
    if candidate is None:
        return None
    pair = _Pair(sides, reference, candidate, counterparts(sides))
    for losses in _groups([*pair.losses(True), *pair.losses(False)]):
        if pair.is_explained_by(losses):
            return _blamed(pair, losses[0])
    return _blamed_alone(pair) or _blamed_in_parts(pair) or _blamed_scaling(pair)


def _blamed_in_parts(pair: _Pair) -> Blamed | None:
    """Return what hands a gradient on sample by sample, or with its padding, where the
    reference's whole does not.

    Without its gradients all gradients are the reference's.
    """
    reference, candidate = pair.reference, pair.candidate
    tried = (
        (record, records)
        for record in reference.cut_off
        for records in _parts_of(pair, reference.tensors[record])
    )
    for record, records in islice(tried, MOST):
        mended = candidate.closed_at(records)
        if mended is not None and replace(pair, candidate=mended).is_explained_by([]):
            value = candidate.flow.values[records[0]]
            cut = reference.flow.values[record]
            return _blamed_handing_on(pair, value, cut, None)
    return None


def _parts_of(pair: _Pair, whole: Tensor) -> Iterator[list[int]]:
    """Yield the candidate's values, of one place of a line each, that hold a tensor's
    elements together; or one that does but for its padding."""
    flow = pair.candidate.flow
    yield from ([key] for key in _padded(pair, whole))
    groups: dict[object, list[int]] = defaultdict(list)
    for key, tensor in pair.candidate.tensors.items():
        value = flow.values[key]
        is_real = tensor.is_floating_point() and whole.is_floating_point()
        hands_on = value.is_call and value.computes and pair.candidate.hands_on(key)
        if is_real and hands_on:
            place = (*place_of(value.row), value.operator, tuple(tensor.shape))
            groups[place].append(key)
    for keys in groups.values():
        count, rest = divmod(
            whole.numel(), pair.candidate.tensors[keys[0]].numel() or 1
        )
        if rest or count < 2 or len(keys) % count:
            continue
        # one line may call the operator several times for each part
        times = len(keys) // count
        for first in range(times):
            parts = sorted(keys)[first::times]
            tensors = [pair.candidate.tensors[key] for key in parts]
            if _are_together(pair, tensors, whole):
                yield parts


def _padded(pair: _Pair, whole: Tensor) -> Iterator[int]:
    """Yield the candidate's values that hold a tensor's elements, and padding."""
    for key, tensor in pair.candidate.tensors.items():
        if not pair.candidate.hands_on(key) or tensor.is_complex():
            continue
        kept = (r for mask in pair.sides.padding for r in kept_rows(tensor, mask))
        fitting = (rows for rows in kept if rows.numel() == whole.numel())
        if any(_are_together(pair, [rows], whole) for rows in fitting):
            yield key


def _are_together(pair: _Pair, parts: Sequence[Tensor], whole: Tensor) -> bool:
    """Return True where some values hold what a tensor does, in whatever order."""
    wanted = whole.detach().reshape(-1).sort().values
    present = torch.cat([part.detach().reshape(-1) for part in parts])
    apart = present.to(wanted.dtype).sort().values - wanted
    return float(apart.norm()) <= pair.sides.limit * float(wanted.norm())


def _blamed_alone(pair: _Pair) -> Blamed | None:
    """Return what a line of the candidate detaches where the reference has no such value.

    With its gradients all gradients are the reference's. Of several that a line detaches
    those of one shape alone may be wrong.
    """
    candidate = pair.candidate
    values = candidate.flow.values
    groups: dict[tuple[object, ...], list[int]] = {}
    for record in candidate.cut_off:
        row = values[record].row
        for group in ((row.line,), (row.line, tuple(row.shape or ()))):
            groups.setdefault(group, []).append(record)
    several = sorted(groups.items(), key=lambda each: len(each[0]))
    for records in (records for _, records in several):
        mended = candidate.handing_on(records)
        if mended is not None and replace(pair, candidate=mended).is_explained_by([]):
            value = values[records[0]]
            words = "it hands no gradient on; with it all gradients are the reference's"
            return Blamed(value, None, words, is_operator=True, label=LABEL)
    return None


def _blamed_scaling(pair: _Pair) -> Blamed | None:
    """Return the value of which one program alone hands on so many times the gradient.

    Either a backward pass by hand is missing, or it multiplies by another number.
    """
    reference, candidate = pair.reference, pair.candidate
    ours, theirs = reference.way.scaled, candidate.way.scaled
    pairs = {
        (key, other)
        for key in ours
        for other in _twins(pair.sides, key, is_candidate=False)
        if candidate.hands_on(other)
    } | {
        (key, other)
        for other in theirs
        for key in _twins(pair.sides, other, is_candidate=True)
        if reference.hands_on(key)
    }
    for key, other in sorted(pairs, reverse=True):
        wanted, present = ours.get(key), theirs.get(other)
        if _times(wanted) == _times(present):
            continue
        mended = candidate.scaled(other, wanted)
        if mended is not None and replace(pair, candidate=mended).is_explained_by([]):
            value, twin = candidate.flow.values[other], reference.flow.values[key]
            if present is not None:
                value = candidate.flow.values[present.key]
            if wanted is not None:
                twin = reference.flow.values[wanted.key]
            line = f" ({twin.row.line})" if twin.row.line else ""
            words = (
                f"it hands on {_times(present):.6g} times its gradient, and "
                f"{_times(wanted):.6g} times in the reference{line}"
            )
            return Blamed(value, twin, words, is_operator=True, label=LABEL)
    return None


def _times(scaling: Scaling | None) -> float:
    return 1.0 if scaling is None else scaling.factor


def _groups(losses: Sequence[_Lost]) -> Iterator[Sequence[_Lost]]:
    """Yield which losses may be what makes the gradients differ, the simplest first.

    Those of one line, one alone, those of a line of each program, of parameters, and all.
    """
    by_line: dict[tuple[bool, str | None], list[_Lost]] = {}
    for lost in losses:
        by_line.setdefault((lost.is_candidate, lost.cut.row.line), []).append(lost)
    yield from by_line.values()
    by_lines: dict[object, list[_Lost]] = {}
    for lost in losses:
        by_lines.setdefault(
            (lost.is_candidate, lost.cut.row.line, lost.reader), []
        ).append(lost)
    yield from by_lines.values()
    yield from ([lost] for lost in losses)
    ours = [group for (is_candidate, _), group in by_line.items() if not is_candidate]
    theirs = [group for (is_candidate, _), group in by_line.items() if is_candidate]
    yield from ([*second, *first] for first in ours for second in theirs)
    # a pass of several in which parameters are not trained
    for is_candidate in (True, False):
        of_one = [lost for lost in losses if lost.is_candidate == is_candidate]
        of_parameters = [lost for lost in of_one if not lost.cut.is_call]
        if of_parameters:
            yield of_parameters
    if losses:
        yield losses


@dataclass(slots=True)
class _Pair:
    """Both programs under autograd, and which of their parameters are one."""

    sides: Sides
    reference: DifferentiatedFlow
    candidate: DifferentiatedFlow
    names: Sequence[Counterparts]

    def losing(self, is_candidate: bool) -> DifferentiatedFlow:
        """Return one of the programs."""
        return self.candidate if is_candidate else self.reference

    def losses(self, is_candidate: bool) -> Iterator[_Lost]:
        """Yield what one program loses and the other does not, the last ones first."""
        losing = self.losing(is_candidate)
        other = self.losing(not is_candidate)

        def is_known(key: int) -> bool:
            twins = _twins(self.sides, key, is_candidate)
            return any(other.hands_on(twin) for twin in twins)

        learned = values_of_parameters(losing.flow)
        lost_here = lost_gradients(losing, is_known)
        lost_here = [lost for lost in lost_here if lost.key in learned]
        for lost in list(reversed(lost_here))[:MOST]:
            twins = _twins(self.sides, lost.key, is_candidate)
            # the same value stands before and behind a factor of its gradient
            for key in sorted(twins, key=lambda k: k not in other.way.scaled):
                if not other.hands_on(key):
                    continue
                gradient = self._in_layout(losing, lost, other.tensors[key])
                if gradient is None:
                    continue
                pair = losing.flow.values[lost.key], other.flow.values[key]
                reader = losing.flow.first[lost.reader].line
                share = other.given(key, gradient)
                cut, twin = _first(self, *pair, is_candidate)
                yield _Lost(cut, twin, share, is_candidate, reader)
                break

    def _in_layout(
        self, losing: DifferentiatedFlow, lost: LostGradient, twin: Tensor
    ) -> Tensor | None:
        """Return a gradient with its elements where those of ``twin`` lie.

        Without its padding, or with zeros in that of the twin. None where neither fits.
        """
        values = losing.tensors[lost.key].detach()
        wanted = twin.detach()
        if values.numel() == wanted.numel():
            return _in_places_of(values, lost.gradient, wanted)
        padding = self.sides.padding
        for kept in places_kept(values.shape, padding):
            if int(kept.sum()) == wanted.numel():
                here = values[kept], lost.gradient[kept]
                moved = _in_places_of(*here, wanted.flatten())
                return moved.reshape(wanted.shape)
        for kept in places_kept(wanted.shape, padding):
            if int(kept.sum()) == values.numel():
                filled = torch.zeros_like(wanted)
                flat = values.flatten(), lost.gradient.flatten()
                filled[kept] = _in_places_of(*flat, wanted[kept])
                return filled
        return None

    def is_explained_by(self, losses: Sequence[_Lost]) -> bool:
        """Return True where nothing but these makes the gradients of the two differ.

        What one program loses is in the other's gradients.
        """
        pairs = []
        for each in filter(self._is_trained, self.names):
            ours = self._without(each, losses, is_candidate=True)
            theirs = self._without(each, losses, is_candidate=False)
            if ours is None and theirs is None:
                continue
            whole = self._without(each, [], is_candidate=True)
            if whole is None:
                whole = theirs
            size = float(whole.norm()) if whole is not None else 0.0
            pairs.append((ours, theirs, size))
        largest = max((size for *_, size in pairs), default=0.0)
        least = least_gradient(self.sides) * largest
        return all(
            _apart(ours, theirs) <= self.sides.limit * max(size, least)
            for ours, theirs, size in pairs
        )

    def _is_trained(self, parameters: Counterparts) -> bool:
        """Return True where one of the programs has a gradient: neither has, of frozen ones."""
        ours = self.reference.flow.trained.intersection(parameters.ours)
        return bool(ours or self.candidate.flow.trained.intersection(parameters.theirs))

    def _without(
        self, parameters: Counterparts, losses: Sequence[_Lost], *, is_candidate: bool
    ) -> Tensor | None:
        """Return a gradient without what the other program loses; None for no gradient.

        Of several parameters, theirs together; the reference's where the candidate loses.
        """
        program = self.losing(not is_candidate)
        names = parameters.ours if is_candidate else parameters.theirs
        gradients = {n: program.gradients[n] for n in names if n in program.gradients}
        for lost in losses:
            if lost.is_candidate == is_candidate:
                for name in gradients.keys() & lost.share.keys():
                    gradients[name] = gradients[name] - lost.share[name]
        return _joined(program.flow, gradients, names, parameters.numel)


def _joined(
    flow: Flow, gradients: Gradients, names: Sequence[str], numel: int | None
) -> Tensor | None:
    """Return the gradients of these parameters in one tensor; None where there are none.

    Those of a parameter without are zeros, and of what fills it up to ``numel``.
    """
    if not gradients:
        return None
    if len(names) == 1 and numel is None:
        return next(iter(gradients.values()))
    leaves = named_leaves(flow)
    like = next(iter(gradients.values()))
    parts = [
        gradients[name].reshape(-1)
        if name in gradients
        else like.new_zeros(leaves[name].row.numel or 0)
        for name in names
    ]
    lacking = 0 if numel is None else numel - sum(part.numel() for part in parts)
    return torch.cat([*parts, like.new_zeros(max(lacking, 0))])


def _apart(one: Tensor | None, other: Tensor | None) -> float:
    """Return how far two gradients are apart, in whatever layout; no gradient is zero."""
    if one is None or other is None:
        present = one if other is None else other
        return 0.0 if present is None else float(present.norm())
    ours = sketch_of_tensor(one)
    theirs = sketch_of_tensor(other)
    if ours is None or theirs is None or ours.numel != theirs.numel:
        return math.inf
    return float(np.linalg.norm(ours.values - theirs.values))


def _twins(sides: Sides, key: int, is_candidate: bool) -> list[int]:
    """Return the other side's values that agree with one."""
    if is_candidate:
        return sides.all_twins(sides.candidate.values[key])
    value = sides.reference.values[key]
    return [
        other.key
        for other in sides.candidate.values.values()
        if other.sketch is not None
        and value.sketch is not None
        and other.row.numel == value.row.numel
        and value.sketch.distance(other.sketch) <= sides.limit
    ]


def _in_places_of(values: Tensor, gradient: Tensor, wanted: Tensor) -> Tensor:
    """Return the gradient of some values with its elements where those of another tensor
    lie, which has the same."""
    if values.dim() <= MOST_AXES:
        for order in permutations(range(values.dim())):
            turned = values.permute(order).reshape(wanted.shape)
            if torch.allclose(turned, wanted, rtol=1e-5, atol=1e-8):
                return gradient.permute(order).reshape(wanted.shape)
    moved = torch.empty_like(wanted).reshape(-1)
    moved[rising(wanted)] = gradient.reshape(-1)[rising(values)]
    return moved.reshape(wanted.shape)


def _first(
    pair: _Pair, cut: Value, twin: Value, is_candidate: bool
) -> tuple[Value, Value]:
    """Return where a gradient is lost first, going back, and the other program's value.

    Of what a value is made of, one may hand its gradient on in one program alone too. What
    a backward pass computes again is no value that one is made of.
    """
    losing = pair.losing(is_candidate)
    other = pair.losing(not is_candidate)
    going_on = True
    while going_on:
        going_on = False
        for key in twin.inputs:
            if not other.hands_on(key) or not other.flow.values[key].is_call:
                continue
            phase = other.flow.values[key].row.phase
            twins = [
                each
                for each in _twins(pair.sides, key, not is_candidate)
                if losing.flow.values[each].row.phase == phase
            ]
            if twins and not any(losing.hands_on(each) for each in twins):
                cut = losing.flow.values[min(twins)]
                twin = other.flow.values[key]
                going_on = True
                break
    return cut, twin


def _blamed(pair: _Pair, lost: _Lost) -> Blamed:
    losing = pair.losing(lost.is_candidate)
    other = pair.losing(not lost.is_candidate)
    is_asked_for = losing.is_inner_gradient(lost.cut.key)
    if other.way.is_twice and (is_asked_for or not losing.way.is_twice):
        asked_at = losing.asked_at(lost.cut.key)
        other_asks = other.asked_at(lost.twin.key)
        if asked_at is not None and other_asks is not None:
            return _blamed_constant(asked_at, other_asks, lost.is_candidate)
    if lost.is_candidate:
        words = (
            "it hands no gradient on, as the reference does here: with it all gradients "
            "are the reference's"
        )
        # what stops a gradient may be a function that other lines call rightly
        at = FaultLines(pair.sides, {lost.cut.key}).of_operator(lost.cut)
        return Blamed(
            lost.cut, lost.twin, words, is_operator=True, line=at, label=LABEL
        )
    return _blamed_handing_on(pair, lost.twin, lost.cut, lost.reader)


def _blamed_handing_on(
    pair: _Pair, value: Value, cut: Value, reader: str | None
) -> Blamed:
    """Return a value that hands a gradient on where the reference's does not."""
    line = f" ({reader})" if not cut.is_call and reader else ""
    line = line or (f" ({cut.row.line})" if cut.row.line else "")
    words = (
        f"it hands a gradient on, and the reference's {cut.row.site}{line} does not: "
        "without it all gradients are the reference's"
    )
    at = FaultLines(pair.sides, {value.key}).of_operator(value)
    return Blamed(value, cut, words, is_operator=True, line=at, label=LABEL)


def _blamed_constant(cut: Value, twin: Value, is_candidate: bool) -> Blamed:
    """Return the request for a gradient that one program alone differentiates again.

    ``cut``: of the program in which it is a constant.
    """
    line = f" ({(twin if is_candidate else cut).row.line})"
    if is_candidate:
        words = (
            f"this gradient is a constant (create_graph=False), and the reference's{line} "
            "is differentiated again: with that all gradients are the reference's"
        )
        return Blamed(cut, twin, words, is_operator=True, label=LABEL)
    words = (
        f"this gradient is differentiated again (create_graph=True), and the reference's"
        f"{line} is a constant: with that all gradients are the reference's"
    )
    return Blamed(twin, cut, words, is_operator=True, label=LABEL)
