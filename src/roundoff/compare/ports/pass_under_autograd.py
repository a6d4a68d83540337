"""A recorded forward pass run again under autograd, in one of the ways it may be meant.

A recording says that a value was detached, and not which of the calls that read its memory
afterwards read it so; nor of which parameters a pass asked for no gradient. A way says it.
Each time that a call reads a value to which it hands nothing on, the gradient that is lost
there is known. A gradient that the forward pass goes on with, of a penalty, keeps its graph.
"""

from __future__ import annotations

from collections.abc import (
    Callable,
    Collection,
    Container,
    Mapping,
    Sequence,
)
from dataclasses import dataclass, field, replace
from typing import Any, TypeVar

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from roundoff.compare.ports.made_up_values import leaves_of_pass
from roundoff.compare.ports.port_results import (
    inner_gradients,
    last_result,
    starts_of_backward,
)
from roundoff.compare.records.recorded_calls import CannotRun
from roundoff.compare.records.recorded_rows import RecordedRow
from roundoff.compare.values.inner_values import FAILURES
from roundoff.compare.values.traced_calls import TracedCall, TracedProgram
from roundoff.compare.values.value_flow import Flow, Value, values_of_parameters
from roundoff.compare.values.value_regions import upstream
from roundoff.errors import RunError
from roundoff.ops import (
    checked_arguments,
    operators_that,
    overload_of,
    tensors_made,
    writes_arguments,
    writes_out,
    written_out_in_fp64,
)

_CUT = operators_that("cut the gradient")
_DRAW = operators_that("draw") | operators_that("drop out")
#: Their gradient is zero: one that is recorded was handed on by hand, straight through.
_JUMP = operators_that("jump")
_FORWARD = "forward"
_BACKWARD = "backward"
_UNWRITTEN = operators_that("leave memory unwritten")
Key = TypeVar("Key")
#: How far a gradient made again may be off one that the forward pass goes on with.
INNER = 1e-3
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
class Way:
    """How a forward pass is differentiated.

    Attributes:
        hidden: where calls stand that hand nothing on.
        is_straight: jumps hand on their gradient as it is.
        is_twice: a gradient that the forward pass goes on with is differentiated again.
        through_views: a view of detached memory may be read as one of what was detached.
        cut: reads of detached values that hand nothing on.
        scaled: values that hand on so many times their gradient.
        closed: values that hand nothing on to what they are made of.
    """

    hidden: frozenset[Place] = frozenset()
    is_straight: bool = False
    is_twice: bool = False
    through_views: bool = False
    cut: frozenset[Edge] = frozenset()
    scaled: Mapping[int, Scaling] = field(default_factory=dict)
    closed: frozenset[int] = frozenset()


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
    way: Way
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
        """The values of which some read hands nothing on, in order."""
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

    def closed_at(self, keys: Collection[int]) -> DifferentiatedFlow | None:
        """Return the same where some values hand nothing on; None where that cannot run."""
        return self._going(replace(self.way, closed=self.way.closed.union(keys)))

    def scaled(self, key: int, scaling: Scaling | None) -> DifferentiatedFlow | None:
        """Return the same with another factor at a value; None where that cannot run."""
        others = {k: each for k, each in self.way.scaled.items() if k != key}
        if scaling is not None:
            others[key] = scaling
        return self._going(replace(self.way, scaled=others))

    def _going(self, way: Way) -> DifferentiatedFlow | None:
        """Return the same forward pass, differentiated in another way."""
        end = last_result(self.flow)
        if end is None:
            return None
        try:
            return Run(self.flow, way).run(end)
        except CannotRun:
            return None

    def given(self, key: int, gradient: Tensor) -> Mapping[str, Tensor]:
        """Return what the parameters get where a value gets this gradient."""
        return gradients_of(self.tensors[key], self.parameters, gradient)


class Run:
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
        way: Way,
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
            return value.is_call and place_of(value.row) in places

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
            gradients_of(result, parameters, ones),
            self.way,
            gradients_of(result, self._read_again, ones),
            gradients_of(result, made, ones),
            gradients_of(result, self._lost, ones),
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
        if record not in self.flow.values:
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
        ones = torch.ones_like(begun)
        known = [*gradients_of(begun, values, ones, is_twice=True).values()]
        far = [float((each.detach() - recorded).norm()) for each in known]
        if not known or min(far) > INNER * float(recorded.norm()):
            raise CannotRun(
                "no value has a gradient that the forward pass goes on with"
            )
        return known[far.index(min(far))]

    def _hands_on(self, call: TracedCall) -> bool:
        """Return True for a call whose results have a gradient that goes on to an input."""
        first = call.first
        if place_of(first) in self.way.hidden:
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
                    result = written_out_in_fp64(func, args, kwargs)
                    # it may refuse a gradient for one of its inputs: a mask
                    if result is None and not self._is_kept_from(first.call):
                        raise
                    if result is None:
                        result = func(*args, **kwargs)
            tensors = tensors_made(func, args, kwargs, result)
        except FAILURES as error:
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
        is_on_line = place_of(self.flow.values[source].row) == place_of(detach)
        if is_on_line and self._own_detaches.get(source, 0):
            self._own_detaches[source] -= 1
        else:
            self._detached[source] = place_of(detach)
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
        if record in self.way.closed:
            return self._lose(edge, tensor)
        if tensor.requires_grad and record in self._learned:
            self._learning_reads[edge] = place_of(reader.first)
        if not self.flow.values[record].is_call:
            if self.flow.values[record].row.name and tensor.requires_grad:
                self.reads_of_parameters.setdefault(record, []).append(edge)
            if edge not in self.way.cut:
                return self._read_alone(edge, tensor)
            return self._lose(edge, tensor)
        detached = self._detached.get(self._behind.get(record, record))
        if tensor.requires_grad and detached is not None and record in self._learned:
            self.doubtful[edge] = detached
            if detached == place_of(reader.first):
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


def _start_of(flow: Flow, gradient: Value) -> tuple[Value, RecordedRow] | None:
    """Return what the backward pass that makes a gradient is of, and its first ones."""
    starts = [s for s in starts_of_backward(flow) if s[1].record < gradient.key]
    return starts[-1] if starts else None


def place_of(row: RecordedRow) -> Place:
    return row.module, row.line, row.callers


def _has_no_gradient(row: RecordedRow) -> bool:
    """Return True for a call that autograd refuses: it ran without."""
    try:
        return row.overload is not None and writes_out(overload_of(row.overload))
    except RunError:
        return False


def _is_number(tensor: Tensor) -> bool:
    return tensor.is_floating_point() or tensor.is_complex()


def gradients_of(
    result: Tensor,
    leaves: Mapping[Key, Tensor],
    gradient: Tensor,
    *,
    is_twice: bool = False,
) -> dict[Key, Tensor]:
    """Return what autograd gives to leaves; those that it does not reach are left out.

    With a graph of their own where they are differentiated once more. Raises ``CannotRun``
    where an operator has no such derivative.
    """
    if not leaves or not result.requires_grad:
        return {}
    try:
        tensors: Sequence[Tensor | None] = torch.autograd.grad(
            result,
            list(leaves.values()),
            gradient,
            retain_graph=True,
            create_graph=is_twice,
            allow_unused=True,
        )
    except RuntimeError as error:
        raise CannotRun(str(error)) from error
    return {
        name: tensor
        for name, tensor in zip(leaves, tensors, strict=True)
        if tensor is not None
    }
