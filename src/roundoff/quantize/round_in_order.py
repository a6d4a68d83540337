"""Calibrate and round a whole network in one pass, each layer on what really arrives.

The calibration data go through the model twice at once: through a copy in full precision,
and through everything that is quantized already. Both runs stop at each decision
(``lockstep.py``): when a value is reached its scale is chosen from the values that the
quantized network has there, and when a weight is reached its inputs in both networks are
at hand: what GPTQ and bias correction need. Nothing is run again for each layer, and
batches of any lengths go through in step.
"""

from __future__ import annotations

import copy
import math
from bisect import bisect_right
from collections.abc import Callable, Iterable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from itertools import accumulate
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.weak import WeakIdKeyDictionary

from roundoff.errors import QuantizationError
from roundoff.formats import Format, QParams, fake_quantize
from roundoff.ops import Call, Handler, float_tensors, watch
from roundoff.preserve import preserve
from roundoff.quantize.calibration import Calibration
from roundoff.quantize.code_flow import PASSES, upper_bound
from roundoff.quantize.graph import Node, no_data
from roundoff.quantize.importance import Importance, channel_axis
from roundoff.quantize.join_batches import in_stacks, samples, stack
from roundoff.quantize.layout import Route
from roundoff.quantize.lockstep import Lockstep, Request
from roundoff.quantize.model import (
    QuantizedModel,
    RoutedCall,
    RoutedCalls,
    Unquantized,
    forget,
)
from roundoff.quantize.observers import make_observer
from roundoff.quantize.options import Rounding
from roundoff.quantize.quantizer import Quantizer
from roundoff.quantize.round_call import (
    CallRounding,
    Progress,
    name_errors,
    run_quantized,
)
from roundoff.quantize.weights.output_error import Gain
from roundoff.workload import Workload

#: Bytes of the largest value of batches that are joined, at most: what allocators hand
#: out again instead of asking the system for new pages each time (glibc: 32 MiB), which
#: cost a MobileNet three times its arithmetic.
JOINED_BYTES = 2**24


def round_in_order_(
    model: QuantizedModel,
    workload: Workload,
    batches: Sequence[Any],
    rounding: Rounding,
    importance: Importance | None = None,
) -> list[Gain]:
    """Choose scales of values and codes of weights, in place, from front to back.

    Batches of one shape are joined where the model computes the same for them together;
    the others go through it beside each other. What is kept at a time is what all batches
    hold at one place of the model, twice, and the second moments of one weight's inputs.
    Calls that no data reaches lose their quantizers, and their rows say so.

    Returns what each weight gained over rounding to nearest.

    Raises ``QuantizationError`` without data, and for NaN or Inf in a value. The model is
    then as before, as after any other error.
    """
    calibration = Calibration.of(model, workload, batches)
    return round_model_(calibration, rounding, importance)


def round_model_(
    calibration: Calibration, rounding: Rounding, importance: Importance | None = None
) -> list[Gain]:
    """Round as ``round_in_order_`` does, a model that is packed with its data."""
    try:
        return _round_pass(calibration, rounding, importance, tolerant=False)
    except _NonFiniteValueError:
        if not _outputs_finite(calibration):
            raise
        # NaN and Inf that the model itself masks: their sites stay as they are
        return _round_pass(calibration, rounding, importance, tolerant=True)


class _NonFiniteValueError(QuantizationError):
    """A value that is to be quantized holds NaN or Inf."""


def _outputs_finite(calibration: Calibration) -> bool:
    """Return True where no unquantized output has a NaN or Inf."""
    model = calibration.model
    with preserve(model), model.through(Unquantized()):
        model.eval()
        outputs = calibration.outputs(calibration.batches)
    return all(bool(t.isfinite().all()) for output in outputs for t in output.values())


def _round_pass(
    calibration: Calibration,
    rounding: Rounding,
    importance: Importance | None,
    *,
    tolerant: bool,
) -> list[Gain]:
    """Round in one pass; ``tolerant``: values with NaN or Inf are left as they are."""
    model = calibration.model
    if not calibration.batches:
        raise no_data(calibration.workload.name)
    states = [_QuantizerState.of(quantizer) for _, quantizer in model.named()]
    with preserve(model.model), torch.no_grad():
        exact = copy.deepcopy(model.model.eval())
        groups = _join_batches(calibration, exact)
        order = _Order(calibration, rounding, importance, groups)
        order.tolerant = tolerant
        try:
            _run_in_step(order, exact)
        except BaseException:
            parameters = zip(model.model.parameters(), exact.parameters(), strict=True)
            for changed, kept in parameters:
                changed.copy_(kept)
            for state in states:
                state.restore_()
            raise
    model.drop_unreached_(order.refused)
    for late in order.late.values():
        _add_late_call_(model, late)
    return order.progress.gains


@dataclass(frozen=True)
class _QuantizerState:
    """What a quantizer held before the pass."""

    quantizer: Quantizer
    buffers: dict[str, Tensor | None]
    attributes: dict[str, Any]

    @classmethod
    def of(cls, quantizer: Quantizer) -> _QuantizerState:
        names = ("granularity", "observer", "note")
        attributes = {name: getattr(quantizer, name) for name in names}
        return cls(quantizer, dict(quantizer._buffers), attributes)

    def restore_(self) -> None:
        self.quantizer._buffers.update(self.buffers)
        for name, value in self.attributes.items():
            setattr(self.quantizer, name, value)


@dataclass
class _LateCall:
    """A call that these batches alone made, which the graph was not traced on."""

    call: Call
    batches: list[int]


def _add_late_call_(model: QuantizedModel, late: _LateCall) -> None:
    """Let a call that the graph has not run in fp32, with a row that says why."""
    batches = sorted(late.batches)
    which = f"batch {batches[0]}"
    if len(batches) > 1:
        which = f"batches {batches[0]} to {batches[-1]}, which ran together"
    reasons = [
        f"seen only in {which}: the batches that the graph was traced on do not call it"
    ]
    for name in model.weight_names():
        if any(name in operand.sources for operand in late.call.operands):
            reasons.append(f"reads {name} as it is stored")
    call = late.call
    node = Node(str(call.site), call.operator.name, call.kind, (), ())
    model.add_late_(node, "; ".join(reasons))


def _join_batches(calibration: Calibration, exact: nn.Module) -> list[list[int]]:
    """Return which batches go through the model together, by number."""
    graph = calibration.graph
    batches = calibration.batches
    if graph.branches:
        most = -1.0  # which branch, a stack would decide
    else:
        shapes = [shape for node in graph.nodes.values() for shape in node.shapes]
        most = _most_samples(shapes, samples(batches[0]))
    return in_stacks(calibration.workload.with_model(exact), batches, most)


def _most_samples(shapes: Iterable[Sequence[int]], batch_samples: int) -> float:
    """Return how many samples may be joined, given the shapes of a batch's values."""
    largest = max((math.prod(shape) for shape in shapes), default=0)
    if not largest or not batch_samples:
        return math.inf
    return JOINED_BYTES / 4 / largest * batch_samples


def _run_in_step(order: _Order, exact: nn.Module) -> None:
    """Send all batches through the full-precision model and the quantized one, in step."""
    calibration = order.calibration
    bodies: list[Callable[[], None]] = []
    with ExitStack() as opened:
        for group, numbers in enumerate(order.groups):
            batch = stack([calibration.batches[i] for i in numbers])
            runs: list[tuple[nn.Module, Handler]] = []
            if order.rounding.compares:
                runs.append((exact, _ExactRun(order, group)))
            runs.append((order.model.model, _QuantizedRun(order, group)))
            for network, handler in runs:
                twin = network if len(order.groups) == 1 else _with_own_buffers(network)
                mode = opened.enter_context(watch(twin, handler))
                workload = calibration.workload.with_model(twin)
                bodies.append(_body(workload, batch, mode))
        order.steps.run(bodies)


def _body(workload: Workload, batch: Any, mode: Any) -> Callable[[], None]:
    """Return one run of a model; the modes are entered in its own thread."""

    def run() -> None:
        mode.begin()
        with torch.no_grad(), mode:
            workload.run(batch)

    return run


def _with_own_buffers(model: nn.Module) -> nn.Module:
    """Return a copy with the same parameters, and buffers of its own."""
    return copy.deepcopy(model, {id(p): p for p in model.parameters()})


@dataclass(frozen=True, slots=True)
class _ReachedValue:
    """A value that a run has reached, whose scale is to be chosen."""

    group: int
    value: Tensor


@dataclass(frozen=True, slots=True)
class _ReachedCall:
    """A call that a run has reached, whose weights are to be rounded."""

    group: int
    exact: bool
    routed: RoutedCall


class _Order:
    """What all runs share: what has been decided, and how the next is."""

    def __init__(
        self,
        calibration: Calibration,
        rounding: Rounding,
        importance: Importance | None,
        groups: Sequence[Sequence[int]],
    ) -> None:
        self.calibration = calibration
        self.model = calibration.model
        self.rounding = rounding
        self.importance = importance
        #: numbers of the batches that run together
        self.groups = groups
        #: values come before the weight that they meet: only then do both runs wait there
        self.rank = {row.site: 2 * i for i, row in enumerate(self.model.rows)}
        self.progress = Progress()
        #: calls that the graph has not
        self.late: dict[str, _LateCall] = {}
        #: values that get no scale, and why
        self.refused: dict[str, str] = {}
        #: values with NaN or Inf are refused instead of an error
        self.tolerant = False
        self.steps = Lockstep(self.decide)

    def weight_to_round(self, route: Route) -> str:
        """Return a weight of a call that has to be rounded still, or an empty name."""
        for name in route.uses.values():
            quantizer = self.model.quantizer(name)
            pending = quantizer.weight and not quantizer.dynamic
            if pending and name not in self.progress.decided:
                return name
        return ""

    def run_unrouted(self, call: Call, group: int) -> Any:
        """Run a call without quantizers; note one that the graph has not."""
        result = call.run()
        site = str(call.site)
        if not self.model.knows(site) and float_tensors(result):
            late = self.late.setdefault(site, _LateCall(call, []))
            late.batches += [i for i in self.groups[group] if i not in late.batches]
        return result

    def decide(self, requests: list[Request]) -> None:
        """Choose a scale, or round a call's weights, for all runs that wait for it."""
        name = requests[0].key
        if self.model.quantizer(name).weight:
            self._round(requests)
        else:
            self.progress.decided.add(name)
            self._choose_scale(name, [request.subject for request in requests])

    def _round(self, requests: list[Request]) -> None:
        """Round the weights of a call; answer each run with the call's result."""
        exact_calls: dict[int, RoutedCall] = {}
        exact_results: dict[int, Any] = {}
        quantized: list[Request] = []
        for request in requests:
            reached: _ReachedCall = request.subject
            if reached.exact:
                request.answer = reached.routed.call.run(reached.routed.leaves)
                exact_calls[reached.group] = reached.routed
                exact_results[reached.group] = request.answer
            else:
                quantized.append(request)
        if not quantized:
            return
        groups = [request.subject.group for request in quantized]
        rounding = CallRounding(
            self.model,
            self.rounding.of(quantized[0].subject.routed.site),
            self.progress,
            quantized=[request.subject.routed for request in quantized],
            exact=[exact_calls.get(group) for group in groups],
        )
        results = rounding.round_([exact_results.get(group) for group in groups])
        for request, result in zip(quantized, results, strict=True):
            request.answer = result

    def _choose_scale(self, name: str, reached: Sequence[_ReachedValue]) -> None:
        """Choose the scale of a value from what all runs have there."""
        quantizer = self.model.quantizer(name)
        node = self.model.graph.nodes.get(name)
        source = self._source_of_codes(node, quantizer)
        if source is not None:
            quantizer.set_(source.qparams(), source.observer)
            return
        rounding = self.rounding.of(*quantizer.sites)
        observer = make_observer(
            rounding.observer, quantizer.granularity, **rounding.parameters
        )
        if not any(value.value.numel() for value in reached):
            self.refused[name] = "no calibration batch has an element here"
            return
        for value in reached:
            seen = quantizer.without_exact(value.value)
            if not self._is_finite(name, seen, self.groups[value.group]):
                return
            with name_errors(name):
                observer.see(seen, self._power(name, quantizer, seen))
        with name_errors(name):
            qparams = observer.qparams(quantizer.fmt)
        first = quantizer.without_exact(reached[0].value)
        if rounding.observer == "adjoint" and _needs_room(
            first, qparams, quantizer.fmt
        ):
            qparams.scale.mul_(rounding.room)
        _limit_to_clip_(qparams, node, quantizer.fmt)
        quantizer.set_(qparams, rounding.observer, observer.degenerate)

    def _source_of_codes(
        self, node: Node | None, quantizer: Quantizer
    ) -> Quantizer | None:
        """Return the quantizer on whose grid a value lies already, or None.

        That is what a call reads through that only chooses among the codes it reads, or
        what the whole was written through of which this is a part.
        """
        name = quantizer.source or self._read_by_choosing(node)
        if not name:
            return None
        source = self.model.quantizer(name)
        same_grid = source.fmt == quantizer.fmt and source.scale is not None
        return source if same_grid else None

    def _read_by_choosing(self, node: Node | None) -> str:
        """Return what a call reads through that only chooses codes; or an empty name."""
        route = None if node is None else self.model.routes.get(node.site)
        if node is None or route is None or node.operator not in PASSES:
            return ""
        return next(iter(route.uses.values()), "")

    def _power(self, name: str, quantizer: Quantizer, value: Tensor) -> Tensor | None:
        """Return what an error of each element costs the output, where that is known."""
        if self.importance is None:
            return None
        return self.importance.power(name, value, channel_axis(quantizer, value))

    def _is_finite(self, name: str, value: Tensor, numbers: Sequence[int]) -> bool:
        """Return True without NaN and Inf; else refuse the value, or raise and name the batch."""
        # one pass; a sum that overflows is looked at again
        if bool(value.sum().isfinite()):
            return True
        bad = ~value.isfinite()
        if not bool(bad.any()):
            return True
        text = f"{int(bad.sum())} of {value.numel()} values are NaN or Inf"
        if self.tolerant:
            self.refused[name] = text
            return False
        batches = self.calibration.batches
        ends = list(accumulate(samples(batches[i]) for i in numbers))
        where = name
        if ends[-1] and value.ndim and len(value) % ends[-1] == 0:
            sample = int(bad.reshape(ends[-1], -1).any(1).nonzero()[0])
            where += f", first in batch {numbers[bisect_right(ends, sample)]}"
        raise _NonFiniteValueError(
            text,
            where=where,
            expected="finite values",
            do="find where they arise (roundoff watch), or leave these samples out",
        )


class _ExactRun:
    """The handler of a full-precision run: it stops where a weight is to be rounded."""

    def __init__(self, order: _Order, group: int) -> None:
        self.order = order
        self.group = group
        self.passed: WeakIdKeyDictionary = WeakIdKeyDictionary()

    def before_write(self, tensor: Tensor) -> None:
        """Forget what a tensor in this memory became."""
        forget(self.passed, tensor)

    def call(self, call: Call) -> Any:
        """Return the call's result, as it is."""
        site = str(call.site)
        route = self.order.model.routes.get(site)
        if route is None:
            return self.order.run_unrouted(call, self.group)
        leaves = self.order.model.divided(route, call.leaves, self.passed)
        weight = self.order.weight_to_round(route)
        if not weight:
            return call.run(leaves)
        reached = _ReachedCall(self.group, True, RoutedCall(call, route, leaves))
        return self.order.steps.ask(weight, self.order.rank.get(site, 0) + 1, reached)


class _QuantizedRun(RoutedCalls):
    """The handler of a run through what is quantized.

    It stops at values without a scale and at weights that are to be rounded.
    """

    def __init__(self, order: _Order, group: int) -> None:
        super().__init__(order.model)
        self.order = order
        self.group = group
        self.rank = 0

    def call(self, call: Call) -> Any:
        """Return the call's result from operands on their grids."""
        self.rank = self.order.rank.get(str(call.site), 0)
        return super().call(call)

    def run_unrouted(self, call: Call) -> Any:
        """Run a call without quantizers."""
        return self.order.run_unrouted(call, self.group)

    def quantize(self, name: str, value: Tensor) -> Tensor:
        """Quantize a value once its scale is chosen; a weight waits for ``run``."""
        quantizer = self.model.quantizer(name)
        if quantizer.weight:
            return value
        if name not in self.order.progress.decided and not quantizer.dynamic:
            self.order.steps.ask(name, self.rank, _ReachedValue(self.group, value))
        if name in self.order.refused:
            return value
        quantized: Tensor = quantizer(value)
        return quantized

    def run(self, routed: RoutedCall) -> Any:
        """Run a call once its weights are rounded; as it is where a value has no scale."""
        if not self.order.refused.keys().isdisjoint(routed.route.uses.values()):
            call = routed.call
            return call.again(
                self.order.model.divided(routed.route, call.leaves, self.passed)
            )
        weight = self.order.weight_to_round(routed.route)
        if not weight:
            return run_quantized(self.model, routed)
        reached = _ReachedCall(self.group, False, routed)
        return self.order.steps.ask(weight, self.rank + 1, reached)


def _needs_room(value: Tensor, qparams: QParams, fmt: Format) -> bool:
    """Return True for a wide integer format whose grid the value does not lie on.

    An image of 256 levels lies on it as it is.
    """
    if fmt.one_quantum != 1.0 or fmt.width < 8 or not value.numel():
        return False
    some = value[:64]
    error = (fake_quantize(some, qparams, fmt) - some).square().mean()
    # a quarter of what values between codes leave
    return bool(error > qparams.scale.square().mean() / 48)


def _limit_to_clip_(qparams: QParams, node: Node | None, fmt: Format) -> None:
    """Let no code of an asymmetric format stand for what a clip cuts off anyway."""
    bound = None if node is None else upper_bound(node)
    if bound is not None and not fmt.symmetric:
        levels = fmt.max_finite - fmt.min_finite
        qparams.scale.clamp_(max=_round_down(bound / levels))


def _round_down(value: float) -> float:
    """Return the largest number of fp32 that is not above ``value``."""
    nearest = torch.tensor(value, dtype=torch.float32)
    if float(nearest) > value:
        nearest = torch.nextafter(nearest, torch.zeros(()))
    return float(nearest)
