"""Calibrate and round a whole network in one pass: each layer when it is reached, on what really arrives there.

The calibration data go through the model twice at once: through a copy in full precision, and through everything that is
quantized already. Both runs stop at each decision (``lockstep.py``): when a value is reached its scale is chosen from the
values that the quantized network has there, and when a weight is reached its inputs in both networks are at hand: what
GPTQ and bias correction need. Nothing is run again for each layer, and batches of any lengths go through in step.
"""

from __future__ import annotations

import copy
import math
from bisect import bisect_right
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from itertools import accumulate
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.weak import WeakIdKeyDictionary

from roundoff.errors import QuantizationError
from roundoff.formats import Format, QParams, fake_quantize
from roundoff.ops import Call, Handler, float_tensors, watch
from roundoff.preserve import preserve
from roundoff.quantize.code_flow import PASSES, upper_bound
from roundoff.quantize.graph import Node
from roundoff.quantize.importance import Importance, channel_axis
from roundoff.quantize.join_batches import in_stacks, samples, stack
from roundoff.quantize.layout import Route
from roundoff.quantize.lockstep import Lockstep, Request
from roundoff.quantize.model import QuantizedModel, forget
from roundoff.quantize.observers import make_observer
from roundoff.quantize.options import Rounding
from roundoff.quantize.round_call import Arrived, Settled, Weighed, naming, run
from roundoff.quantize.schemes import Row
from roundoff.quantize.weights.output_error import Gain
from roundoff.workload import Workload

#: Ranges of eight bits and more are made this much wider than calibration asks for: other samples have values beyond its
#: extremes. Measured on 5,000 samples after calibration on 512: 0.5 dB more on a MobileNet, 0.1 dB less on a ResNet.
ROOM = 1.03
#: Bytes of the largest value of batches that are joined, at most: what allocators hand out again instead of asking the
#: system for new pages each time (glibc: 32 MiB), which cost a MobileNet three times its arithmetic.
JOINED = 2**24


def round_in_order_(
    model: QuantizedModel,
    workload: Workload,
    batches: Sequence[Any],
    how: Rounding,
    weights: Importance | None = None,
) -> list[Gain]:
    """Choose the scales of values and the codes of weights of a quantized model, in place, from front to back.

    Batches of one shape are joined where the model computes the same for them together; the others go through it beside
    each other. What is kept at a time is what all batches hold at one place of the model, twice, and the second moments of
    one weight's inputs. Calls that no data reaches lose their quantizers, and their rows say so.

    Raises ``QuantizationError`` without data, and for NaN or Inf in a value. The model is then as before, as after any
    other error.
    """
    batches = list(batches)
    if not batches:
        raise QuantizationError(
            "no calibration data",
            where=workload.name,
            expected="one batch or more",
            got="none",
            do="give the batches that the model is calibrated on",
        )
    before = [
        (q, dict(q._buffers), (q.granularity, q.observer, q.note))
        for _, q in model.named()
    ]
    with preserve(model.model), torch.no_grad():
        exact = copy.deepcopy(model.model.eval())
        branches = model.graph.asks and (
            model.graph.sometimes or model.graph.changing
        )  # which one, a stack would decide
        most = -1.0 if branches else _most(model, batches[0])
        groups = in_stacks(workload.with_model(exact), batches, most)
        order = _InOrder(
            model,
            how,
            weights,
            [{i: samples(batches[i]) for i in group} for group in groups],
        )
        try:
            _run(
                order,
                workload,
                [stack([batches[i] for i in group]) for group in groups],
                exact,
            )
        except BaseException:
            for changed, kept in zip(
                model.model.parameters(), exact.parameters(), strict=True
            ):
                changed.copy_(kept)
            for quantizer, buffers, state in before:
                quantizer._buffers.update(buffers)
                quantizer.granularity, quantizer.observer, quantizer.note = state
            raise
    model.settle_()
    for site, (call, numbers) in order.late.items():
        _late_(model, site, call, sorted(numbers))
    return order.settled.gains


def _late_(model: QuantizedModel, site: str, call: Call, batches: list[int]) -> None:
    """A call that these batches alone made, which the graph was not traced on: it runs in fp32, and its row says so."""
    seen = (
        f"batch {batches[0]}"
        if len(batches) == 1
        else f"batches {batches[0]} to {batches[-1]}, which ran together"
    )
    reason = (
        f"seen only in {seen}: the batches that the graph was traced on do not call it"
    )
    stored = [
        n
        for n, q in model.named()
        if q.weight and any(n in operand.sources for operand in call.operands)
    ]
    model.rows.append(
        Row(
            site,
            "fp32",
            "; ".join([reason, *(f"reads {name} as it is stored" for name in stored)]),
        )
    )
    model.graph.nodes[site] = Node(site, call.operator.name, call.kind, (), ())
    model.known |= {site}


def _run(
    order: _InOrder, workload: Workload, stacks: Sequence[Any], exact: nn.Module
) -> None:
    """All batches through the full-precision model and the quantized one, in step."""
    bodies: list[Callable[[], None]] = []
    with ExitStack() as opened:
        for number, batch in enumerate(stacks):
            handlers: list[tuple[nn.Module, Handler]] = [
                (order.model.model, _Quantized(order, number))
            ]
            if order.how.compares:
                handlers.insert(0, (exact, _Exact(order, number)))
            for own, handler in handlers:
                twin = own if len(stacks) == 1 else _twin(own)
                mode = opened.enter_context(watch(twin, handler))

                def body(
                    twin: nn.Module = twin, mode: Any = mode, batch: Any = batch
                ) -> None:
                    mode.begin()
                    with torch.no_grad(), mode:  # both belong to a thread
                        workload.with_model(twin).run(batch)

                bodies.append(body)
        order.steps.run(bodies)


def _most(model: QuantizedModel, batch: Any) -> float:
    """How many samples may be joined, from the largest value that the graph has for the first batch."""
    largest = max(
        (
            math.prod(shape)
            for node in model.graph.nodes.values()
            for shape in node.shapes
        ),
        default=0,
    )
    return (
        JOINED / 4 / largest * samples(batch)
        if largest and samples(batch)
        else math.inf
    )


def _twin(model: nn.Module) -> nn.Module:
    """A copy with the same parameters, and buffers of its own."""
    return copy.deepcopy(model, {id(p): p for p in model.parameters()})


class _InOrder:
    """What all runs share: what has been decided, and how the next is."""

    def __init__(
        self,
        model: QuantizedModel,
        how: Rounding,
        weights: Importance | None,
        sizes: Sequence[dict[int, int]],
    ) -> None:
        self.model, self.how, self.importance, self.sizes = model, how, weights, sizes
        #: values come before the weight that they meet: only then do both runs wait there
        self.rank = {row.site: 2 * i for i, row in enumerate(model.rows)}
        self.settled = Settled()
        #: calls that the graph has not, and the batches that made them
        self.late: dict[str, tuple[Call, list[int]]] = {}
        self.steps = Lockstep(self.decide)

    def waiting(self, route: Route) -> str:
        """A weight of a call that has to be rounded still, or empty."""
        quantizers = (
            (n, self.model.quantizer(n))
            for n in route.uses.values()
            if n not in self.settled.names
        )
        return next((n for n, q in quantizers if q.weight and not q.dynamic), "")

    def passed(self, call: Call, group: int) -> Any:
        """The result of a call that reads nothing through quantizers; one that was not seen before is noted."""
        site, result = str(call.site), call.run()
        if site not in self.model.known and float_tensors(result):
            known = self.late.setdefault(site, (call, []))[1]
            known += [number for number in self.sizes[group] if number not in known]
        return result

    def decide(self, requests: list[Request]) -> None:
        """Choose the scale of a value, or round the weights of a call, for all runs that wait for it."""
        name = requests[0].key
        if not self.model.quantizer(name).weight:
            self.settled.names.add(name)
            self._observe(name, requests)
            return
        exact = {
            group: (r, arrived)
            for r in requests
            for group, full, arrived in [r.given]
            if full
        }
        changed = [
            (group, r, arrived)
            for r in requests
            for group, full, arrived in [r.given]
            if not full
        ]
        for request, arrived in exact.values():
            request.answer = arrived.call.run(arrived.leaves)
        if changed:
            partners = [exact.get(group) for group, _, _ in changed]
            pairs = [
                (p[1] if p else None, arrived)
                for p, (_, _, arrived) in zip(partners, changed, strict=True)
            ]
            how = self.how.of(str(changed[0][2].call.site))
            weighed = Weighed(self.model, how, self.settled, pairs)
            results = weighed.settle([p[0].answer if p else None for p in partners])
            for (_, request, _), result in zip(changed, results, strict=True):
                request.answer = result

    def _observe(self, name: str, requests: list[Request]) -> None:
        quantizer, node = self.model.quantizer(name), self.model.graph.nodes.get(name)
        route = self.model.routes.get(name)
        if (
            node is not None
            and route is not None
            and node.operator in PASSES
            and route.uses
        ):
            read = self.model.quantizer(next(iter(route.uses.values())))
            if read.fmt == quantizer.fmt and read.scale is not None:
                quantizer.set_(read.qparams(), read.observer)  # the same codes, moved
                return
        how = self.how.of(*quantizer.sites)
        observer = make_observer(how.observer, quantizer.granularity, **how.parameters)
        for request in requests:
            group, value = request.given
            value = quantizer.without_exact(value)
            self._check_finite(name, value, self.sizes[group])
            with naming(name):
                axis = channel_axis(quantizer, value)
                observer.see(
                    value,
                    None
                    if self.importance is None
                    else self.importance.power(name, value, axis),
                )
        with naming(name):
            chosen = observer.qparams(quantizer.fmt)
        first = quantizer.without_exact(requests[0].given[1])
        if how.observer == "adjoint" and _needs_room(first, chosen, quantizer.fmt):
            chosen.scale.mul_(ROOM)
        bound = None if node is None else upper_bound(node)
        if (
            bound is not None and not quantizer.fmt.symmetric
        ):  # no code stands for what is clipped anyway
            chosen.scale.clamp_(
                max=_below(
                    bound / (quantizer.fmt.max_finite - quantizer.fmt.min_finite)
                )
            )
        quantizer.set_(chosen, how.observer, observer.degenerate)

    @staticmethod
    def _check_finite(name: str, value: Tensor, sizes: dict[int, int]) -> None:
        if bool(
            value.sum().isfinite()
        ):  # one pass; a sum that overflows is looked at again
            return
        bad = ~value.isfinite()
        if not bool(bad.any()):
            return
        where, total = name, sum(sizes.values())
        if total and value.ndim and len(value) % total == 0:
            sample = int(bad.reshape(total, -1).any(1).nonzero()[0])
            where += f", first in batch {list(sizes)[bisect_right(list(accumulate(sizes.values())), sample)]}"
        raise QuantizationError(
            f"{int(bad.sum())} of {value.numel()} values are NaN or Inf",
            where=where,
            expected="finite values",
            do="find where they arise (roundoff watch), or leave these samples out",
        )


class _Exact:
    """The handler of a full-precision run: it stops where a weight is to be rounded."""

    def __init__(self, order: _InOrder, group: int) -> None:
        self.order, self.group = order, group
        self.done: WeakIdKeyDictionary = WeakIdKeyDictionary()

    def before_write(self, tensor: Tensor) -> None:
        """What was made of this memory holds no longer."""
        forget(self.done, tensor)

    def call(self, call: Call) -> Any:
        """The call's result, as it is."""
        site = str(call.site)
        route = self.order.model.routes.get(site)
        if route is None:
            return self.order.passed(call, self.group)
        leaves, name = (
            self.order.model.divided(route, call.leaves, self.done),
            self.order.waiting(route),
        )
        if not name:
            return call.run(leaves)
        given = self.group, True, Arrived(call, leaves, route)
        return self.order.steps.ask(name, self.order.rank.get(site, 0) + 1, given)


class _Quantized:
    """The handler of a run through what is quantized: it stops at values without a scale and at weights to be rounded."""

    def __init__(self, order: _InOrder, group: int) -> None:
        self.order, self.group, self.model = order, group, order.model
        self.done: WeakIdKeyDictionary = WeakIdKeyDictionary()

    def before_write(self, tensor: Tensor) -> None:
        """What was made of this memory holds no longer."""
        forget(self.done, tensor)

    def call(self, call: Call) -> Any:
        """The call's result from operands on their grids."""
        site = str(call.site)
        route = self.model.routes.get(site)
        if route is None:
            return self.order.passed(call, self.group)
        leaves, rank = (
            self.model.divided(route, call.leaves, self.done),
            self.order.rank.get(site, 0),
        )
        for place, name in route.uses.items():
            if not self.model.quantizer(name).weight:
                leaves[place] = self._value(name, leaves[place], rank)
        arrived, waiting = Arrived(call, leaves, route), self.order.waiting(route)
        if waiting:
            result = self.order.steps.ask(
                waiting, rank + 1, (self.group, False, arrived)
            )
        else:
            result = run(self.model, arrived)
        if call.operator.inplace and result is not call.leaves[0]:
            result = call.leaves[0].copy_(result)
        if not route.output:
            return result
        quantized = self._value(route.output, result, rank)
        return result.copy_(quantized) if call.operator.inplace else quantized

    def _value(self, name: str, value: Tensor, rank: int) -> Tensor:
        if value not in self.done:
            self.done[value] = {}
        known: dict[str, Tensor] = self.done[value]
        if name not in known:
            quantizer = self.model.quantizer(name)
            if name not in self.order.settled.names and not quantizer.dynamic:
                self.order.steps.ask(name, rank, (self.group, value))
            known[name] = quantizer(value)
        return known[name]


def _needs_room(value: Tensor, chosen: QParams, fmt: Format) -> bool:
    """Whether a value has a wide integer format, and does not lie on its grid as it is (an image of 256 levels)."""
    if fmt.one_quantum != 1.0 or fmt.width < 8 or not value.numel():
        return False
    some = value[:64]
    missed = (fake_quantize(some, chosen, fmt) - some).square().mean()
    return bool(
        missed > chosen.scale.square().mean() / 48
    )  # a quarter of what values between codes leave


def _below(value: float) -> float:
    """The largest number of fp32 that is not above ``value``."""
    found = torch.tensor(value, dtype=torch.float32)
    if float(found) > value:
        found = torch.nextafter(found, torch.zeros(()))
    return float(found)
