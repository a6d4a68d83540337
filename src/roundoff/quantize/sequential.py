"""Calibrate and round a whole network in one pass: each layer when it is reached, on what really arrives there.

The calibration data go through the model twice at once: through a copy in full precision, and through everything that is
quantized already. Both runs stop at each decision (``lockstep.py``): when a value is reached its scale is chosen from the
values that the quantized network has there, and when a weight is reached its inputs in both networks are at hand: what
GPTQ and bias correction need. Nothing is run again for each layer, and batches of any lengths go through in step.
"""

from __future__ import annotations

import copy
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_flatten, tree_unflatten
from torch.utils.weak import WeakIdKeyDictionary

from roundoff.capture.calls import Call, Handler, Operand, watch
from roundoff.capture.execute import execute
from roundoff.formats import PerTensor, QParams
from roundoff.quantize.importance import Importance
from roundoff.quantize.lockstep import Lockstep, Request
from roundoff.quantize.model import QuantizedModel, on_sums
from roundoff.quantize.observers import make_observer
from roundoff.quantize.quantizer import Quantizer
from roundoff.quantize.repair.gain import Gain, output_db
from roundoff.quantize.repair.hessian import Hessian
from roundoff.quantize.repair.matrix import (
    from_matrix,
    matrix_qparams,
    matrix_view,
    patches,
    weight_qparams,
)
from roundoff.quantize.repair.rounding import round_weight
from roundoff.quantize.repair.scales import search_scales
from roundoff.quantize.scheme import Route
from roundoff.workload import Workload

#: Rows of inputs that second moments are taken from, at most: more add little.
ROWS = 2**14


@dataclass(frozen=True, kw_only=True)
class Rounding:
    """How one pass chooses.

    Attributes:
        observer: of values (see ``observers.OBSERVERS``).
        weights: ``nearest``, or ``gptq``: rounding that makes up for its own errors and for those of the inputs.
        scales: of weights: ``minmax`` or ``search``, the scale with the least error.
        bias: correct biases so that the mean of each output channel is that of the full-precision network.
        parameters: of the observer.
    """

    observer: str = "adjoint"
    weights: str = "gptq"
    scales: str = "search"
    bias: bool = True
    parameters: dict[str, Any] = field(default_factory=dict)


def stack(batches: Sequence[Any]) -> Any | None:
    """All batches as one, joined along the first axis of their tensors; None where they do not fit together."""
    flat = [tree_flatten(batch) for batch in batches]
    _, layout = flat[0]
    if len(flat) == 1:
        return batches[0]
    if any(spec != layout for _, spec in flat):
        return None
    for leaves, _ in flat:  # a tensor without samples (positions of shape [1, length], say) would not be one after joining
        if len({leaf.shape[:1] for leaf in leaves if isinstance(leaf, Tensor)}) > 1:
            return None
    joined = []
    for parts in zip(*(leaves for leaves, _ in flat), strict=True):
        if not isinstance(parts[0], Tensor):
            if any(p is not parts[0] and p != parts[0] for p in parts):
                return None
            joined.append(parts[0])
        elif any(p.ndim == 0 or p.shape[1:] != parts[0].shape[1:] for p in parts):
            return None
        else:
            joined.append(torch.cat(list(parts)))
    return tree_unflatten(joined, layout)


def in_stacks(batches: Sequence[Any]) -> list[Any]:
    """The batches, those that fit together joined to one."""
    groups: list[list[Any]] = []
    for batch in batches:
        for group in groups:
            if stack([group[0], batch]) is not None:
                group.append(batch)
                break
        else:
            groups.append([batch])
    return [stack(group) for group in groups]


def round_in_order_(
    model: QuantizedModel, workload: Workload, batches: Sequence[Any], how: Rounding, weights: Importance | None = None
) -> list[Gain]:
    """Choose the scales of values and the codes of weights of a quantized model, in place, from front to back.

    Batches that differ in their first axis alone are joined; the others go through the model beside each other. Memory is
    what they all hold at one place of the model, twice, with the second moments of one weight's inputs.
    """
    order = _InOrder(model, how, weights)
    exact = copy.deepcopy(model.model)
    groups = in_stacks(batches)
    if len(groups) > 1:
        pairs = [(_twin(exact), _twin(model.model)) for _ in groups]
    else:
        pairs = [(exact, model.model)]
    with ExitStack() as opened:
        bodies = []
        for number, (batch, pair) in enumerate(zip(groups, pairs, strict=True)):
            handlers: tuple[Handler, Handler] = (_Exact(order, number), _Quantized(order, number))
            for own, handler in zip(pair, handlers, strict=True):
                mode = opened.enter_context(watch(own, handler))

                def body(own: nn.Module = own, mode: Any = mode, batch: Any = batch) -> None:
                    mode.begin()
                    with torch.no_grad(), mode:
                        workload.with_model(own).run(batch)

                bodies.append(body)
        with torch.no_grad():
            order.steps.run(bodies)
    return order.gains


def _twin(model: nn.Module) -> nn.Module:
    """A copy with the same parameters."""
    return copy.deepcopy(model, {id(p): p for p in model.parameters()})


class _InOrder:
    """What all runs share: what is decided, and how."""

    def __init__(self, model: QuantizedModel, how: Rounding, weights: Importance | None) -> None:
        self.model, self.how, self.importance = model, how, weights
        #: values before the weight that they meet: only then all runs wait there
        self.rank = {row.site: 2 * i for i, row in enumerate(model.rows)}
        self.gains: list[Gain] = []
        self.settled: set[str] = set()
        self.steps = Lockstep(self.decide)

    def unsettled(self, route: Route) -> str:
        """The weight of a call that has to be rounded still, or empty."""
        names = (n for n in route.uses.values() if n not in self.settled)
        return next((n for n in names if self.model.quantizer(n).weight), "")

    def decide(self, requests: list[Request]) -> None:
        """Choose the scale of a value, or round the weights of a call."""
        name = requests[0].key
        quantizer = self.model.quantizer(name)
        if quantizer.weight:
            _Weighing(self, name, requests).settle()
            return
        observer = make_observer(self.how.observer, quantizer.granularity, **self.how.parameters)
        for request in requests:
            value = request.given
            observer.see(value, None if self.importance is None else self.importance.power(name, value))
        quantizer.set_(observer.qparams(quantizer.fmt), self.how.observer)


@dataclass
class _Arrived:
    """A call whose weight is to be rounded, in one of the two runs of a group of batches."""

    group: int
    exact: bool
    call: Call
    leaves: list[Any]
    route: Route


class _Exact:
    """The handler of a full-precision run: it stops where a weight is reached."""

    def __init__(self, order: _InOrder, group: int) -> None:
        self.order, self.group = order, group

    def before_write(self, tensor: Tensor) -> None:
        """Nothing to forget."""

    def call(self, call: Call) -> Any:
        site = str(call.site)
        route = self.order.model.routes.get(site)
        name = "" if route is None or route.executes is not None else self.order.unsettled(route)
        if route is None or not name:
            return call.run()
        arrived = _Arrived(self.group, True, call, call.leaves, route)
        return self.order.steps.ask(name, self.order.rank.get(site, 0) + 1, arrived)


class _Quantized:
    """The handler of a run through what is quantized: it stops at values without a scale and at weights."""

    def __init__(self, order: _InOrder, group: int) -> None:
        self.order, self.group, self.model = order, group, order.model
        self.done: WeakIdKeyDictionary = WeakIdKeyDictionary()

    def before_write(self, tensor: Tensor) -> None:
        if tensor in self.done:
            del self.done[tensor]

    def call(self, call: Call) -> Any:
        site = str(call.site)
        route = self.model.routes.get(site)
        if route is None:
            return call.run()
        if route.executes is not None:
            return execute(call, route.executes)
        leaves, rank = list(call.leaves), self.order.rank.get(site, 0)
        for place, name in route.uses.items():
            if not self.model.quantizer(name).weight:
                leaves[place] = self._value(name, leaves[place], rank)
        name = self.order.unsettled(route)
        if name:
            result = self.order.steps.ask(name, rank + 1, _Arrived(self.group, False, call, leaves, route))
        else:
            result = call.run(settled(self.model, route, leaves))
        if call.operator.inplace and leaves[0] is not call.leaves[0]:
            result = call.leaves[0].copy_(result)
        return self._value(route.output, result, rank) if route.output else result

    def _value(self, name: str, value: Tensor, rank: int) -> Tensor:
        if value not in self.done:
            self.done[value] = {}
        known: dict[str, Tensor] = self.done[value]
        if name not in known:
            quantizer = self.model.quantizer(name)
            if quantizer.scale is None and not quantizer.dynamic:
                self.order.steps.ask(name, rank, value)
            known[name] = quantizer(value)
        return known[name]


def settled(model: QuantizedModel, route: Route, leaves: list[Any]) -> list[Any]:
    """The arguments of a call with its weights and bias on their grids."""
    found = list(leaves)
    for place, name in route.uses.items():
        if model.quantizer(name).weight:
            found[place] = model.quantizer(name)(leaves[place])
    if route.bias >= 0:
        found[route.bias] = on_sums(leaves[route.bias], [model.quantizer(n) for n in route.uses.values()])
    return found


class _Weighing:
    """One call with weights, reached by all runs: its weights are rounded, its bias corrected, and all go on."""

    def __init__(self, order: _InOrder, name: str, requests: list[Request]) -> None:
        self.order, self.model, self.how, self.name = order, order.model, order.how, name
        exact = {r.given.group: r for r in requests if r.given.exact}
        changed = {r.given.group: r for r in requests if not r.given.exact}
        self.requests = requests
        self.pairs = [(exact.get(group), request) for group, request in changed.items()]

    def settle(self) -> None:
        """Round, correct, and give each run its result."""
        wanted = {r.run: r.given.call.run(r.given.leaves) for r in self.requests if r.given.exact}
        for request in self.requests:
            request.answer = wanted.get(request.run)
        if not self.pairs:  # only the full-precision runs came here
            return
        first: _Arrived = self.pairs[0][1].given
        whole = all(one is not None for one, _ in self.pairs)
        bias = next((o for o in first.call.operands if o.role == "bias"), None)
        held = None if bias is None else first.leaves[bias.leaf]
        corrects = self.how.bias and whole and isinstance(held, nn.Parameter)
        for place, name in first.route.uses.items():
            quantizer = self.model.quantizer(name)
            if quantizer.weight and name not in self.order.settled:
                self.order.settled.add(name)
                self._round(name, quantizer, first.leaves[place], place, whole, corrects)
        if corrects and held is not None:
            self._correct(held, wanted)
        for _, request in self.pairs:
            arrived: _Arrived = request.given
            request.answer = arrived.call.run(settled(self.model, arrived.route, arrived.leaves))

    def _correct(self, bias: Tensor, wanted: dict[int, Tensor]) -> None:
        total, rows = torch.zeros((), dtype=torch.float64), 0
        for one, request in self.pairs:
            if one is None:
                continue
            call, leaves = request.given.call, list(request.given.leaves)
            for place, name in request.given.route.uses.items():
                if self.model.quantizer(name).weight:
                    leaves[place] = self.model.quantizer(name)(leaves[place])
            shift = (wanted[one.run] - call.run(leaves)).double()
            axis = _channels(call, shift)
            rest = [i for i in range(shift.ndim) if i != axis]
            total = total + shift.sum(rest)
            rows += shift.numel() // shift.shape[axis]
        bias.add_((total / rows).to(bias.dtype))

    def _round(self, name: str, quantizer: Quantizer, weight: Tensor, place: int, whole: bool, centred: bool) -> None:
        """Choose a weight's scale and put it on its grid, in place."""
        if quantizer.dynamic:  # formats with a scale rule of their own round it in each run
            return
        arrived: _Arrived = self.pairs[0][1].given
        operator, source = matrix_operator(arrived.call, place)
        quantizer.set_(_scale(quantizer, weight, None, self.how.scales), self.how.scales)
        gptq = self.how.weights == "gptq"
        if source is None or not gptq and self.how.scales != "search":
            self._put(quantizer, weight, quantizer(weight))
            return
        settings: dict[str, Any] = _convolution(arrived.call) if arrived.call.kind == "conv" else {}
        groups = int(settings.get("groups", 1))
        hessian = self._moments(operator, source, tuple(weight.shape[2:]), settings, whole)
        matrix, cross = (hessian.centred, hessian.centred_cross) if centred else (hessian.matrix, hessian.cross)
        w = matrix_view(weight, operator, groups)
        if self.how.scales == "search":
            diagonal = matrix.diagonal(dim1=-2, dim2=-1)[..., None, :].expand_as(w)
            power = from_matrix(diagonal, weight.shape, operator, groups)
            quantizer.set_(_scale(quantizer, weight, power, self.how.scales), "search")
        if not gptq or not quantizer.in_place:
            rounded = quantizer(weight)
            db = output_db(matrix_view(rounded, operator, groups), w, matrix)
            note = "" if quantizer.in_place else "also read in full precision: rounded to nearest where it is read"
            self.order.gains.append(Gain(name, db, db, note))
            self._put(quantizer, weight, rounded)
            return
        grid = matrix_qparams(quantizer.qparams(), weight.shape, operator, groups)
        repaired = round_weight(w, matrix, quantizer.fmt, grid, cross=cross)
        self.order.gains.append(replace(repaired.gain, name=name))
        shared = quantizer.granularity or PerTensor()
        chosen = weight_qparams(repaired.qparams, weight.shape, operator, groups, shared)
        quantizer.set_(chosen, quantizer.observer)
        weight.copy_(from_matrix(repaired.weight, weight.shape, operator, groups))

    def _put(self, quantizer: Quantizer, weight: Tensor, rounded: Tensor) -> None:
        if quantizer.in_place:
            weight.copy_(rounded)

    def _moments(
        self, operator: str, source: Operand, kernel: tuple[int, ...], settings: dict[str, Any], whole: bool
    ) -> Hessian:
        """Second moments of the inputs in the quantized network, with those in full precision where all runs came here."""
        matrix = not operator.startswith("conv")
        seen = [(one, request, _rows(request.given.leaves[source.leaf], source, matrix)) for one, request in self.pairs]
        share = min(1.0, ROWS / max(1, sum(n for _, _, n in seen)))
        hessian, seed = Hessian(), torch.Generator()
        for one, request, _ in seen:
            arrived = [r.given.leaves[source.leaf] for r in (request, one if whole else None) if r is not None]
            rows = [
                patches(_last(x, source) if matrix else x, "linear" if matrix else operator, kernel, share=share,
                        generator=seed.manual_seed(0), **settings)
                for x in arrived
            ]  # fmt: skip
            hessian.add(rows[0], reference=rows[1] if len(rows) > 1 else None)
        return hessian


def matrix_operator(call: Call, place: int) -> tuple[str, Operand | None]:
    """How ``repair.matrix`` calls the weight at a place of a call (empty: no matrix), and the operand it multiplies.

    A weight of two axes is ``linear`` where its inputs lie along axis 1, ``matmul`` where they lie along axis 0, as in the
    products of ``addmm`` and ``matmul``.
    """
    weight = next(o for o in call.operands if o.leaf == place)
    others = [o for o in call.operands if o.leaf != place and o.role in ("activation", "weight")]
    if call.kind == "conv":
        return call.operator.name, others[0] if others else None
    tensor = call.leaves[place]
    if call.kind not in ("linear", "matmul") or len(others) != 1 or tensor.ndim != 2:
        return "", None
    if others[0].role != "activation" or call.leaves[others[0].leaf].ndim < 1:
        return "", None
    return "linear" if weight.reduce % 2 else "matmul", others[0]


def _rows(x: Tensor, source: Operand, matrix: bool) -> int:
    return x.numel() // max(1, x.shape[source.reduce] if matrix else x.shape[1])


def _last(x: Tensor, source: Operand) -> Tensor:
    return x.movedim(source.reduce, -1)


def _scale(quantizer: Quantizer, weight: Tensor, power: Tensor | None, method: str) -> QParams:
    if method == "search":
        return search_scales(weight, quantizer.fmt, quantizer.granularity, importance=power).qparams
    observer = make_observer(method, quantizer.granularity)
    observer.see(weight)
    return observer.qparams(quantizer.fmt)


def _convolution(call: Call) -> dict[str, Any]:
    args, kwargs = call.arguments()
    names: tuple[str, ...] = ("stride", "padding", "dilation", "groups")
    if "transpose" in call.operator.name:
        names = ("stride", "padding", "output_padding", "groups", "dilation")
    return {**dict(zip(names, args[3:], strict=False)), **{k: v for k, v in kwargs.items() if k in names}}


def _channels(call: Call, result: Tensor) -> int:
    return 1 if call.kind == "conv" and result.ndim > 2 else result.ndim - 1
