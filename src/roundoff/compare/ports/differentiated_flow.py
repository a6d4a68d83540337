"""A recorded forward pass differentiated again: which values hand on a gradient, and what.

Its calls run once more under autograd, until the gradients of parameters come out as they
were recorded. A recording says that a value was detached, and not which of the calls that
read its memory afterwards read it so: what each would hand on is linear, and the recorded
gradients say which did. What ran under ``no_grad`` has no backward calls. Each time that a
call reads a value to which it hands nothing on, the gradient that is lost there is known.
"""

from __future__ import annotations

import json
from collections.abc import (
    Callable,
    Collection,
    Container,
    Iterator,
    Mapping,
    Sequence,
)
from dataclasses import dataclass, field, replace
from itertools import chain, combinations, islice
from typing import Any, TypeVar

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from roundoff.compare.ports.made_up_values import leaves_of_pass
from roundoff.compare.ports.port_results import (
    gradients_left,
    inner_gradients,
    last_result,
    starts_of_backward,
)
from roundoff.compare.records.recorded_calls import CannotRun
from roundoff.compare.records.recorded_rows import RecordedRow
from roundoff.compare.values.traced_calls import TracedCall, TracedProgram
from roundoff.compare.values.value_flow import Flow, Value, values_of_parameters
from roundoff.compare.values.value_regions import upstream
from roundoff.errors import RunError
from roundoff.ops import (
    Refusal,
    checked_arguments,
    operators_that,
    overload_of,
    tensors_made,
    writes_arguments,
    writes_out,
)

_CUT = operators_that("cut the gradient")
_DRAW = operators_that("draw") | operators_that("drop out")
#: Their gradient is zero: one that is recorded was handed on by hand, straight through.
_JUMP = operators_that("jump")
_FAILURES = (
    Refusal,
    RunError,
    RuntimeError,
    TypeError,
    ValueError,
    LookupError,
    NotImplementedError,
)
_FORWARD = "forward"
_BACKWARD = "backward"

_UNWRITTEN = operators_that("leave memory unwritten")
_WITHOUT_CALL = operators_that("hand the gradient on without a call")

Key = TypeVar("Key")

#: Recorded gradients with what they may be of that are begun with, at most.
MOST_STARTS = 48
#: Values that one of them may be of.
MOST_ALIKE = 12
#: Gradients of fewer elements may be others'.
FEWEST = 8
#: How far a gradient made again may be off one that the forward pass goes on with.
INNER = 1e-3
#: Reads of parameters that are read several times, each of which may hand nothing on.
MOST_READS = 128
#: Reads of one parameter of which each choice is tried.
FEW_READS = 6
#: Reads one behind the other of which each hands on what the others leave.
MOST_ROUNDS = 4
#: Lines that detach values, each tried as the only one that means it, at most.
MOST_LINES = 8

#: A call that reads a value: the numbers of both, and which of its reads it is.
Edge = tuple[int, int, int]
#: The module of a call, its line, and the lines that it was called from.
Place = tuple[str, str | None, str | None]


@dataclass(frozen=True, slots=True, eq=False)
class LostGradient:
    """What a call would hand on to a value that it reads, which hands nothing on.

    Attributes:
        key: the value.
        reader: the number of the call.
        gradient: of the result, for the value as this call reads it.
    """

    key: int
    reader: int
    gradient: Tensor


@dataclass(frozen=True, slots=True)
class Scaling:
    """A factor by which a backward pass that was written by hand hands a gradient on.

    Attributes:
        factor: the number.
        key: what the backward pass makes of the gradient.
    """

    factor: float
    key: int


@dataclass(frozen=True, slots=True)
class _Way:
    """How a forward pass is differentiated.

    Attributes:
        hidden: where calls stand that hand nothing on.
        is_straight: jumps hand on their gradient as it is.
        is_twice: a gradient that the forward pass goes on with is differentiated again.
        through_views: a view of detached memory may be read as one of what was detached.
        cut: reads of detached values that hand nothing on.
        scaled: values that hand on so many times their gradient.
    """

    hidden: frozenset[Place] = frozenset()
    is_straight: bool = False
    is_twice: bool = False
    through_views: bool = False
    cut: frozenset[Edge] = frozenset()
    scaled: Mapping[int, Scaling] = field(default_factory=dict)


@dataclass(slots=True)
class DifferentiatedFlow:
    """A forward pass under autograd.

    Attributes:
        flow: the recorded values.
        tensors: those of the forward pass by record, with their graph.
        gradients: of each parameter, by its name.
        way: how it ran.
        through: what goes back through each read of a detached value; of each value
            where that was asked for.
        values: what goes back to each value, where that was asked for.
        lost_by_read: what goes back to each read of a value that hands nothing on.
    """

    flow: Flow
    tensors: Mapping[int, Tensor]
    parameters: Mapping[str, Tensor]
    gradients: Mapping[str, Tensor]
    way: _Way
    through: Mapping[Edge, Tensor]
    values: Mapping[int, Tensor]
    lost_by_read: Mapping[Edge, Tensor]

    @property
    def lost(self) -> Sequence[LostGradient]:
        """Where a value is read that hands no gradient on, and what is lost there."""
        lost = self.lost_by_read.items()
        return [LostGradient(e[1], e[0], g) for e, g in lost if g.any()]

    def hands_on(self, key: int) -> bool:
        """Return True for a value whose gradient reaches a parameter."""
        tensor = self.tensors.get(key)
        return tensor is not None and tensor.requires_grad

    @property
    def cut_off(self) -> list[int]:
        """The detached values of which some read hands nothing on, in order."""
        return sorted({record for _, record, _ in self.way.cut})

    def is_inner_gradient(self, key: int) -> bool:
        """Return True for a gradient that the forward pass goes on with."""
        return any(value.key == key for value in inner_gradients(self.flow))

    def asked_at(self, key: int) -> Value | None:
        """Return where the program asks for the gradient that a value is made of.

        None for a value that is made of none that a backward pass gives.
        """
        region = upstream(self.flow, [key], lambda value: value.row.phase == _FORWARD)
        read = {source for value in region for source in self.flow.values[value].inputs}
        for value in inner_gradients(self.flow):
            if value.key in read | region:
                start = _start_of(self.flow, value)
                return None if start is None else self.flow.values[start[1].record]
        return None

    def handing_on(self, detached: Collection[int]) -> DifferentiatedFlow | None:
        """Return the same where each read of some detached values hands its gradient on.

        None where that cannot run.
        """
        cut = frozenset(edge for edge in self.way.cut if edge[1] not in detached)
        return self._going(replace(self.way, cut=cut))

    def scaled(self, key: int, scaling: Scaling | None) -> DifferentiatedFlow | None:
        """Return the same with another factor at a value; None where that cannot run."""
        others = {k: each for k, each in self.way.scaled.items() if k != key}
        if scaling is not None:
            others[key] = scaling
        return self._going(replace(self.way, scaled=others))

    def _going(self, way: _Way) -> DifferentiatedFlow | None:
        """Return the same forward pass, differentiated in another way."""
        end = last_result(self.flow)
        if end is None:
            return None
        try:
            return _Run(self.flow, way).run(end)
        except CannotRun:
            return None

    def given(self, key: int, gradient: Tensor) -> Mapping[str, Tensor]:
        """Return what the parameters get where a value gets this gradient."""
        return _gradients(self.tensors[key], self.parameters, gradient)


def differentiated(flow: Flow, limit: float, least: float) -> DifferentiatedFlow | None:
    """Return a forward pass under autograd that gives the recorded gradients.

    None where it cannot run so, or gives other ones: with a backward pass by hand.

    Args:
        flow: with the tensors of both passes.
        limit: how far a gradient may be off.
        least: the share of the largest one below which one may be rounding.
    """
    wanted = _recorded_gradients(flow)
    end = last_result(flow)
    if not wanted or end is None or end.row.numel != 1:
        return None

    smallest = least * max(float(tensor.norm()) for tensor in wanted.values())

    def is_right(found: DifferentiatedFlow) -> bool:
        for name, gradient in wanted.items():
            got = found.gradients.get(name, torch.zeros_like(gradient))
            allowed = limit * max(float(gradient.norm()), smallest)
            if float((got - gradient).norm()) > allowed:
                return False
        return True

    try:
        runs = _attempts(flow, wanted, end, limit)
        return next((run for run in runs if is_right(run)), None)
    except CannotRun:
        return None


def differentiated_rightly(
    flow: Flow,
    is_right: Callable[[Mapping[str, Tensor]], bool],
    agreeing: Container[int],
) -> DifferentiatedFlow | None:
    """Return a forward pass under autograd that gives right gradients, whatever was recorded.

    With what goes back to each value, and through each read of one. None where it cannot
    run, or gives none that ``is_right``: gradients by the names of their parameters.

    It begins with the loss, or with a recorded gradient that is ``agreeing`` with the
    reference's: a loss in logarithms of zeros has none that autograd could give.
    """
    end = last_result(flow)
    if end is None or end.row.numel != 1:
        return None
    for way in _ways(flow):
        try:
            found = _rightly(flow, way, end, is_right, agreeing)
        except CannotRun:
            continue
        if found is not None:
            return found
    return None


def _rightly(
    flow: Flow,
    way: _Way,
    end: Value,
    is_right: Callable[[Mapping[str, Tensor]], bool],
    agreeing: Container[int],
) -> DifferentiatedFlow | None:
    whole = _Run(flow, way)
    plain = whole.run(end)
    edges = frozenset(whole.doubtful)
    standing = frozenset(whole.standing)
    for cut in dict.fromkeys([frozenset[Edge](), standing, edges]):
        way = replace(way, cut=cut)
        found = _Run(flow, way).run(end) if cut else plain
        if is_right(found.gradients):
            return _Run(flow, way, is_whole=True).run(end)
        for value, gradient in islice(_starts(found, agreeing), MOST_STARTS):
            if is_right(found.given(value.key, gradient)):
                return _Run(flow, way, is_whole=True).run(value, gradient)
    return None


def _starts(
    found: DifferentiatedFlow, agreeing: Container[int]
) -> Iterator[tuple[Value, Tensor]]:
    """Yield recorded gradients that agree with the reference's, each with what it may be of.

    The first of them, going back, and the last values of their shape that hand it on.
    """
    flow = found.flow
    values = list(flow.in_order())
    later = [v for v in reversed(values) if v.key in found.tensors and v.is_call]
    going_back = [v for v in values if v.row.phase == _BACKWARD and v.key in agreeing]
    for recorded in going_back:
        gradient = flow.tensor(recorded.key)
        if gradient is None or gradient.numel() < FEWEST or recorded.says_nothing:
            continue
        alike = [v for v in later if found.tensors[v.key].shape == gradient.shape]
        for value in islice((v for v in alike if found.hands_on(v.key)), MOST_ALIKE):
            yield value, gradient


def _attempts(
    flow: Flow, wanted: Mapping[str, Tensor], end: Value, limit: float
) -> Iterator[DifferentiatedFlow]:
    """Yield a forward pass under autograd in each way that it may have been meant.

    As it is, with reads of detached values cut, and with gradients scaled by hand.
    """
    for way in _ways(flow):
        whole = _Run(flow, way)
        try:
            plain = whole.run(end)
        except CannotRun:
            continue
        if way.through_views and not whole.doubtful:
            continue
        yield plain
        for cut in chain([frozenset[Edge]()], _cuts(whole, plain, wanted, end)):
            run = plain
            if cut:
                run = _Run(flow, replace(way, cut=cut)).run(end)
                yield run
            for scaled in _scaled_by_hand(run, limit):
                yield _Run(flow, replace(way, cut=cut, scaled=scaled)).run(end)


def lost_gradients(
    found: DifferentiatedFlow, is_known: Callable[[int], bool]
) -> Sequence[LostGradient]:
    """Return where values are read that hand no gradient on.

    Each is the last one that ``is_known`` on the way to a result that has a gradient.
    """
    end = last_result(found.flow)
    if end is None:
        return []

    def goes_on(key: int) -> bool:
        return not found.hands_on(key) and is_known(key)

    try:
        return _Run(found.flow, found.way, goes_on).run(end).lost
    except CannotRun:
        return []


def _cuts(
    whole: _Run, found: DifferentiatedFlow, wanted: Mapping[str, Tensor], end: Value
) -> Iterator[frozenset[Edge]]:
    """Yield which reads may hand nothing on, the likeliest first.

    Reads of detached values, most of them: what a cut read is made of may have been cut
    before too. Then those of parameters that are read several times: in one of the passes
    of a step they may ask for no gradient; last those where no backward call stands.
    """
    if whole.doubtful:
        yield from _cuts_of_detached(whole, found, wanted, end)
    frozen = whole.several_reads
    if 0 < len(frozen) <= MOST_READS:
        read = _Run(whole.flow, whole.way, is_whole=True).run(end)
        yield frozenset(_solved(frozen | whole.doubtful.keys(), read, wanted))
    unseen = whole.reads_at(_without_backward(whole.flow))
    if unseen and len(unseen | frozen) <= MOST_READS:
        every = unseen | frozen | whole.doubtful.keys()
        yield from _added_back(whole, wanted, end, every)


def _added_back(
    whole: _Run, wanted: Mapping[str, Tensor], end: Value, edges: frozenset[Edge]
) -> Iterator[frozenset[Edge]]:
    """Yield what is left of reads that hand nothing on, as long as some have to.

    All are cut, and those added that the recorded gradients lack: one behind another one
    shows when that is there.
    """
    cut = edges
    for _ in range(MOST_ROUNDS):
        run = _Run(whole.flow, replace(whole.way, cut=cut)).run(end)
        added = _handing_on(run, wanted)
        if not added:
            return
        cut -= added
        yield cut


def _cuts_of_detached(
    whole: _Run, found: DifferentiatedFlow, wanted: Mapping[str, Tensor], end: Value
) -> Iterator[frozenset[Edge]]:
    edges = frozenset(whole.doubtful)
    without = _Run(whole.flow, replace(whole.way, cut=edges)).run(end)
    yield edges - _handing_on(without, wanted)
    yield frozenset(_solved(edges, found, wanted))
    yield frozenset(whole.standing)
    lines = list(dict.fromkeys(line for _, line, _ in whole.doubtful.values()))
    for line in lines[:MOST_LINES] if len(lines) > 1 else []:
        yield frozenset(e for e, place in whole.doubtful.items() if place[1] == line)


def _scaled_by_hand(
    found: DifferentiatedFlow, limit: float
) -> Iterator[Mapping[int, Scaling]]:
    """Yield the values whose gradient a backward pass by hand may multiply by a number.

    What its call reads is the gradient of a value of its shape: the last or the first one.
    """
    scaled: list[tuple[Scaling, list[int]]] = []
    end = last_result(found.flow)
    if end is None:
        return
    whole = found.tensors[end.key]
    by_shape: dict[torch.Size, dict[int, Tensor]] = {}
    for row, factor in _factors_by_hand(found.flow):
        gradient = found.flow.step.tensor(row.inputs[0])
        if gradient is None:
            continue
        if gradient.shape not in by_shape:
            values = {
                key: tensor
                for key, tensor in found.tensors.items()
                if tensor.shape == gradient.shape and tensor.requires_grad
            }
            got = _gradients(whole, values, torch.ones_like(whole))
            by_shape[gradient.shape] = got
        got = by_shape[gradient.shape]
        near = limit * float(gradient.norm())
        keys = [key for key in got if float((got[key] - gradient).norm()) <= near]
        if keys:
            scaled.append((Scaling(factor, row.record), sorted(keys)))
    for place in (-1, 0):
        if scaled:
            yield {keys[place]: scaling for scaling, keys in scaled}


def _factors_by_hand(flow: Flow) -> list[tuple[RecordedRow, float]]:
    """Return the calls that multiply a gradient by a number in a backward pass by hand.

    They were called by none of the user's lines, and no forward call stands beside them.
    """
    rows = flow.step.rows.values()
    forward = {row.line for row in rows if row.phase == _FORWARD}
    by_hand = [row for row in rows if row.line not in forward]
    factors = [(row, _factor(row)) for row in by_hand]
    return [(row, factor) for row, factor in factors if factor is not None]


def _factor(row: RecordedRow) -> float | None:
    """Return the number by which a call of a backward pass by hand multiplies a gradient."""
    if row.phase != _BACKWARD or row.line is None or row.callers:
        return None
    if row.base_operator == "neg":
        return -1.0
    if row.base_operator not in ("mul", "div") or len(row.inputs) != 1:
        return None
    positional, _ = json.loads(row.arguments or "[[],{}]")
    numbers = [argument for argument in positional if _is_factor(argument)]
    if len(numbers) != 1:
        return None
    number = float(numbers[0])
    return number if row.base_operator == "mul" else 1 / number


def _is_factor(value: object) -> bool:
    return isinstance(value, int | float) and value != 0


def _solved(
    edges: Collection[Edge], found: DifferentiatedFlow, wanted: Mapping[str, Tensor]
) -> set[Edge]:
    """Return the reads without which the gradients would be those that were recorded.

    What each hands on to the parameters is known, and each does or does not.
    """
    shares = {
        edge: found.given(edge[1], found.through[edge])
        for edge in edges
        if edge in found.through
    }
    more = _stacked(found.gradients, wanted) - _stacked(wanted, wanted)
    return _adding_up_to(more, shares, wanted, found.flow)


def _handing_on(found: DifferentiatedFlow, wanted: Mapping[str, Tensor]) -> set[Edge]:
    """Return the reads with which the gradients would be those that were recorded.

    Of those that hand nothing on. Of several reads one behind the other that were cut none
    is known by what it hands on alone, as the others cut that too; where all are cut, what
    each of the others adds is known.
    """
    shares = {
        edge: found.given(edge[1], found.lost_by_read[edge])
        for edge in found.way.cut
        if edge in found.lost_by_read and found.hands_on(edge[1])
    }
    less = _stacked(wanted, wanted) - _stacked(found.gradients, wanted)
    return _adding_up_to(less, shares, wanted, found.flow)


def _adding_up_to(
    whole: Tensor,
    shares: Mapping[Edge, Mapping[str, Tensor]],
    like: Mapping[str, Tensor],
    flow: Flow,
) -> set[Edge]:
    """Return the reads whose shares add up to a sum: each does or does not.

    A backward pass by hand may multiply some by another factor than one.
    """
    if not shares:
        return set()
    columns = {edge: _stacked(share, like) for edge, share in shares.items()}
    matrix = torch.stack([*columns.values()], 1)
    solution = torch.linalg.lstsq(matrix, whole[:, None], driver="gelsd").solution
    least = _least_factor(flow)
    factors = zip(shares, solution[:, 0], strict=True)
    chosen = {edge for edge, factor in factors if abs(factor) > least / 2}
    # of a parameter with few elements several reads may add up to the same
    by_parameter: dict[int, list[Edge]] = {}
    for edge in shares:
        if not flow.values[edge[1]].is_call:
            by_parameter.setdefault(edge[1], []).append(edge)
    of_values = [columns[edge] for edge in chosen if edge[1] not in by_parameter]
    rest = whole - sum(of_values, torch.zeros_like(whole))
    for edges in by_parameter.values():
        if 1 < len(edges) <= FEW_READS:
            best = _nearest_sum(rest, {edge: columns[edge] for edge in edges})
            chosen = (chosen - {*edges}) | best
    return chosen


def _nearest_sum(whole: Tensor, columns: Mapping[Edge, Tensor]) -> set[Edge]:
    """Return the columns whose sum is nearest to ``whole``, where any of them is not zero."""
    places = torch.stack([*columns.values()]).any(0)
    wanted = whole[places]
    parts = {edge: column[places] for edge, column in columns.items()}
    some = chain.from_iterable(
        combinations(parts, count) for count in range(len(parts) + 1)
    )

    def off(edges: Sequence[Edge]) -> float:
        return float((wanted - sum(parts[edge] for edge in edges)).norm())

    return {*min(some, key=off)}


def _least_factor(flow: Flow) -> float:
    return min([1.0, *(abs(factor) for _, factor in _factors_by_hand(flow))])


def _stacked(gradients: Mapping[str, Tensor], like: Mapping[str, Tensor]) -> Tensor:
    parts = [gradients.get(name, torch.zeros_like(t)) for name, t in like.items()]
    return torch.cat([part.reshape(-1).to(torch.float64) for part in parts])


def _recorded_gradients(flow: Flow) -> dict[str, Tensor]:
    recorded = {}
    for name, row in gradients_left(flow.step.rows).items():
        tensor = flow.step.tensor(row.record)
        if tensor is not None:
            recorded[name.removesuffix(".grad")] = tensor
    return recorded


def _ways(flow: Flow) -> list[_Way]:
    """Return how it may have been differentiated, the plainest way first."""
    hidden = _without_backward(flow)
    may_be_twice = (True, False) if inner_gradients(flow) else (False,)
    return [
        _Way(lines, is_straight, is_twice, through_views)
        for through_views in (False, True)
        for is_straight in (False, True)
        for is_twice in may_be_twice
        for lines in (frozenset[Place](), hidden)
    ]


def _without_backward(flow: Flow) -> frozenset[Place]:
    """Return where calls stand to which no backward call belongs."""
    rows = flow.step.rows.values()
    going_back = {_place(row) for row in rows if row.phase == _BACKWARD}
    standing = {
        _place(row)
        for row in rows
        if row.phase == _FORWARD
        and row.is_call
        and row.base_operator not in _WITHOUT_CALL
    }
    return frozenset(standing - going_back)


def _start_of(flow: Flow, gradient: Value) -> tuple[Value, RecordedRow] | None:
    """Return what the backward pass that makes a gradient is of, and its first ones."""
    starts = [s for s in starts_of_backward(flow) if s[1].record < gradient.key]
    return starts[-1] if starts else None


def _place(row: RecordedRow) -> Place:
    return row.module, row.line, row.callers


class _Run:
    """One run of a forward pass under autograd.

    Args:
        flow: the values, with tensors.
        way: how.
        goes_on: says of values without a gradient that what reads them may stand for
            them.
        is_whole: what goes back to each value, and through each read, is kept.

    Attributes:
        doubtful: the reads of values that were detached before, each with where.
        standing: those of them that stand where the value was detached.
        reads_of_parameters: by record.
    """

    def __init__(
        self,
        flow: Flow,
        way: _Way,
        goes_on: Callable[[int], bool] = lambda _key: False,
        *,
        is_whole: bool = False,
    ) -> None:
        self.flow = flow
        self._is_whole = is_whole
        self.way = way
        self._goes_on = goes_on
        self._tensors: dict[int, Tensor] = {}
        self._lost: dict[Edge, Tensor] = {}
        self._read_again: dict[Edge, Tensor] = {}
        self._reads: dict[int, int] = {}
        #: Of the value that a detach hands on, where it was last detached by the program.
        self._detached: dict[int, Place] = {}
        self._behind: dict[int, int] = {}
        #: Detaches by autograd itself, of results that a backward call reads.
        self._own_detaches: dict[int, int] = {}
        self.doubtful: dict[Edge, Place] = {}
        self.standing: set[Edge] = set()
        self.reads_of_parameters: dict[int, list[Edge]] = {}
        self._learning_reads: dict[Edge, Place] = {}
        self._program = TracedProgram(flow, self._tensors)
        inner = inner_gradients(flow)
        self._inner = {value.key: value for value in inner}
        self._learned = values_of_parameters(flow)
        self._asked_for = {tuple(value.row.shape or ()) for value in inner}

    @property
    def several_reads(self) -> frozenset[Edge]:
        """The reads of parameters that several calls read."""
        reads = self.reads_of_parameters.values()
        return frozenset(edge for edges in reads if len(edges) > 1 for edge in edges)

    def reads_at(self, places: Container[Place]) -> frozenset[Edge]:
        """Return the reads at some places of values with a gradient from elsewhere."""

        def is_made_there(record: int) -> bool:
            value = self.flow.values[record]
            return value.is_call and _place(value.row) in places

        reads = self._learning_reads.items()
        there = [edge for edge, place in reads if place in places]
        return frozenset(edge for edge in there if not is_made_there(edge[1]))

    def run(self, end: Value, gradient: Tensor | None = None) -> DifferentiatedFlow:
        """Run all, and differentiate ``end``, to which ``gradient`` goes back, or ones.

        Raises ``CannotRun``.
        """
        parameters: dict[str, Tensor] = {}
        for leaf in leaves_of_pass(self.flow):
            tensor = self._kept(leaf.row)
            if leaf.row.name and leaf.is_number and leaf.operator != "buffer":
                tensor = tensor.clone().requires_grad_()
                parameters.setdefault(leaf.row.name, tensor)
            self._tensors[leaf.key] = self._asked(tensor)
        with torch.enable_grad():
            for entry in self._program.order:
                self._step(entry)
        result = self._tensors.get(end.key)
        if result is None or not result.requires_grad:
            raise CannotRun("its result has no gradient")
        ones = torch.ones_like(result)
        if gradient is not None:
            ones = gradient.detach().to(result.dtype)
        made = self._tensors if self._is_whole else {}
        made = {key: each for key, each in made.items() if each.requires_grad}
        return DifferentiatedFlow(
            self.flow,
            self._tensors,
            parameters,
            _gradients(result, parameters, ones),
            self.way,
            _gradients(result, self._read_again, ones),
            _gradients(result, made, ones),
            _gradients(result, self._lost, ones),
        )

    def _kept(self, row: RecordedRow, made: Tensor | None = None) -> Tensor:
        """Return what was recorded; else what was ``made`` again, or memory without values."""
        tensor = self.flow.tensor(row.record)
        is_blank = row.numel == 0 or row.base_operator in _UNWRITTEN
        if tensor is None and made is None and is_blank:
            dtype = getattr(torch, row.dtype or "", None)
            made = torch.zeros(tuple(row.shape or ()), dtype=dtype)
        tensor = made if tensor is None else tensor
        if tensor is None:
            raise CannotRun("one of its inputs was not stored")
        return tensor.detach()

    def _step(self, entry: TracedCall | RecordedRow) -> None:
        if isinstance(entry, RecordedRow):
            for row, tensor in self._program.one(entry):
                self._tensors[row.record] = tensor
            return
        for record in entry.first.inputs:
            if record not in self._tensors:
                self._take_from_backward(record)
        results: dict[int, Tensor] = {}
        if self._hands_on(entry):
            results = self._results(entry)
        for row in entry.rows:
            if row.dtype is None:
                continue
            result = results.get(row.place or 0)
            if result is None or not _is_number(result):
                result = self._kept(row, result)
            if tuple(result.shape) != tuple(row.shape or ()):
                raise CannotRun("it gives another shape than was recorded")
            scaling = self.way.scaled.get(row.record)
            if scaling is not None and result.requires_grad:
                result = result.detach() + scaling.factor * (result - result.detach())
            self._tensors[row.record] = self._asked(result)
            if self.way.through_views and row.view_of is not None and row.inputs:
                source = row.inputs[0]
                self._behind.setdefault(row.record, self._behind.get(source, source))

    def _asked(self, tensor: Tensor) -> Tensor:
        """Return a value with a gradient, where one of its shape may be asked for."""
        is_asked = self.way.is_twice and tuple(tensor.shape) in self._asked_for
        if not is_asked or tensor.requires_grad or not _is_number(tensor):
            return tensor
        return tensor.detach().requires_grad_()

    def _take_from_backward(self, record: int) -> None:
        """Add what a backward pass makes and the forward pass reads, where it is known."""
        if record in self._inner:
            self._tensors[record] = self._inner_gradient(self._inner[record])
            return
        source = self._tensors.get(self.flow.behind(record).key)
        shape = tuple(self.flow.values[record].row.shape or ())
        if source is not None and tuple(source.shape) == shape:
            self._tensors[record] = source

    def _inner_gradient(self, value: Value) -> Tensor:
        """Return a gradient that the forward pass goes on with, with its own graph.

        Of the value of its shape whose gradient it is. Raises ``CannotRun`` without one.
        """
        recorded = self._kept(value.row)
        if not self.way.is_twice:
            return recorded
        start = _start_of(self.flow, value)
        begun = None if start is None else self._tensors.get(start[0].key)
        if begun is None or not begun.requires_grad:
            raise CannotRun("what a gradient is of was not recorded")
        values = {
            key: tensor
            for key, tensor in self._tensors.items()
            if tensor.shape == recorded.shape and tensor.requires_grad
        }
        gradients: Sequence[Tensor | None] = torch.autograd.grad(
            begun,
            list(values.values()),
            torch.ones_like(begun),
            create_graph=True,
            allow_unused=True,
        )
        known = [each for each in gradients if each is not None]
        far = [float((each.detach() - recorded).norm()) for each in known]
        if not known or min(far) > INNER * float(recorded.norm()):
            raise CannotRun(
                "no value has a gradient that the forward pass goes on with"
            )
        return known[far.index(min(far))]

    def _hands_on(self, call: TracedCall) -> bool:
        """Return True for a call whose results have a gradient that goes on to an input."""
        first = call.first
        if _place(first) in self.way.hidden:
            return False
        is_unseen = first.overload is None
        if is_unseen and not self.flow.values[first.record].is_number:
            return False
        if _has_no_gradient(first):
            return False
        if first.base_operator in _JUMP and not self.way.is_straight:
            return False
        read = [self._tensors.get(record) for record in first.inputs]
        if any(tensor is not None and tensor.requires_grad for tensor in read):
            return True
        # what is lost may be known before, and not here
        is_known = any(self._goes_on(record) for record in first.inputs)
        return is_known and not self._stand_for_it(call)

    def _results(self, call: TracedCall) -> dict[int, Tensor]:
        first = call.first
        if first.base_operator in _DRAW:
            raise CannotRun("it draws random numbers")
        if first.base_operator in _CUT:
            return {0: self._handed_on(first)}
        if self.way.is_straight and first.base_operator in _JUMP:
            read = self._tensors[first.inputs[0]]
            return {0: read + (self._kept(call.rows[0]) - read).detach()}
        if first.overload is None or first.arguments is None:
            raise CannotRun("its arguments were not recorded")
        try:
            func = overload_of(first.overload)
            is_written = writes_arguments(func)

            def value(record: int) -> Tensor:
                # where its memory lies may be other than was recorded: for a view
                tensor = self._read(record, call).contiguous()
                return tensor.clone() if is_written else tensor

            args, kwargs = checked_arguments(func, first.arguments, value)
            with _CountedDetaches() as counted:
                try:
                    result = func(*args, **kwargs)
                except RuntimeError:
                    # it may refuse a gradient for one of its inputs: a mask
                    if not self._is_kept_from(first.call):
                        raise
                    result = func(*args, **kwargs)
            tensors = tensors_made(func, args, kwargs, result)
        except _FAILURES as error:
            raise CannotRun(str(error)) from error
        for row in call.rows:
            self._own_detaches[row.record] = counted.count
        return dict(enumerate(tensors))

    def _handed_on(self, detach: RecordedRow) -> Tensor:
        """Return what a detach reads; notes where the program detaches it."""
        [record, *_] = detach.inputs
        source = self._behind.get(record, record)
        self._behind[detach.record] = source
        # autograd's own stand where the call does
        is_on_line = _place(self.flow.values[source].row) == _place(detach)
        if is_on_line and self._own_detaches.get(source, 0):
            self._own_detaches[source] -= 1
        else:
            self._detached[source] = _place(detach)
        return self._tensors[record]

    def _read(self, record: int, reader: TracedCall) -> Tensor:
        """Return a value that a call reads; notes one that hands no gradient on."""
        tensor = self._tensors.get(record)
        if tensor is None:
            raise CannotRun("one of its inputs was not stored")
        is_seen_through = self.way.through_views and reader.first.view_of is not None
        if is_seen_through or not _is_number(tensor):
            return tensor
        number = reader.first.call
        self._reads[number] = self._reads.get(number, 0) + 1
        edge = number, record, self._reads[number]
        if tensor.requires_grad and record in self._learned:
            self._learning_reads[edge] = _place(reader.first)
        if not self.flow.values[record].is_call:
            if self.flow.values[record].row.name and tensor.requires_grad:
                self.reads_of_parameters.setdefault(record, []).append(edge)
            if edge not in self.way.cut:
                return self._read_alone(edge, tensor)
            return self._lose(edge, tensor)
        detached = self._detached.get(self._behind.get(record, record))
        if tensor.requires_grad and detached is not None and record in self._learned:
            self.doubtful[edge] = detached
            if detached == _place(reader.first):
                self.standing.add(edge)
            if edge not in self.way.cut:
                read = tensor.view_as(tensor)
                self._read_again[edge] = read
                return read
        elif edge not in self.way.cut and (
            tensor.requires_grad or self._stand_for_it(reader)
        ):
            return self._read_alone(edge, tensor)
        return self._lose(edge, tensor)

    def _lose(self, edge: Edge, tensor: Tensor) -> Tensor:
        """Return a value as a call reads it that hands nothing on to it."""
        self._lost[edge] = tensor.detach().clone().requires_grad_()
        return self._lost[edge]

    def _read_alone(self, edge: Edge, tensor: Tensor) -> Tensor:
        """Return a value as one call reads it, if what goes back there is kept."""
        if not self._is_whole or not tensor.requires_grad:
            return tensor
        self._read_again[edge] = tensor.view_as(tensor)
        return self._read_again[edge]

    def _is_kept_from(self, call: int) -> bool:
        """Ask for no gradient of what a call reads without one; False where it has none."""
        edges = [edge for edge in self._lost if edge[0] == call]
        for edge in edges:
            self._lost.pop(edge).requires_grad_(False)
        return bool(edges)

    def _stand_for_it(self, reader: TracedCall) -> bool:
        """Return True where all that a call makes stands for what it reads."""
        numbers = [
            row.record for row in reader.rows if self.flow.values[row.record].is_number
        ]
        return bool(numbers) and all(map(self._goes_on, numbers))


class _CountedDetaches(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Counts the results that autograd detaches to keep them."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.count = 0

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        return False  # see ``inner_values``

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        self.count += func is torch.ops.aten.detach.default
        return func(*args, **kwargs or {})


def _has_no_gradient(row: RecordedRow) -> bool:
    """Return True for a call that autograd refuses: it ran without."""
    try:
        return row.overload is not None and writes_out(overload_of(row.overload))
    except RunError:
        return False


def _is_number(tensor: Tensor) -> bool:
    return tensor.is_floating_point() or tensor.is_complex()


def _gradients(
    result: Tensor, leaves: Mapping[Key, Tensor], gradient: Tensor
) -> dict[Key, Tensor]:
    """Return what autograd gives to leaves; those that it does not reach are left out."""
    if not leaves or not result.requires_grad:
        return {}
    tensors: Sequence[Tensor | None] = torch.autograd.grad(
        result,
        list(leaves.values()),
        gradient,
        retain_graph=True,
        allow_unused=True,
    )
    return {
        name: tensor
        for name, tensor in zip(leaves, tensors, strict=True)
        if tensor is not None
    }
