"""Calibrate and round a whole network in one pass: each layer when it is reached, on what really arrives there.

The calibration samples go through the model twice at once, side by side in one batch: the first half in full precision, the
second half through everything that is quantized already. So when a value is reached its scale is chosen from the values that
the quantized network has there, and when a weight is reached its inputs in both networks are at hand: what GPTQ and bias
correction need. Nothing is run again for each layer.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_flatten, tree_map, tree_unflatten
from torch.utils.weak import WeakIdKeyDictionary

from roundoff.capture.calls import Call, watch
from roundoff.capture.execute import execute
from roundoff.errors import QuantizationError
from roundoff.formats import PerTensor, QParams
from roundoff.quantize.importance import Importance
from roundoff.quantize.model import QuantizedModel, on_sums
from roundoff.quantize.observers import make_observer
from roundoff.quantize.quantizer import Quantizer
from roundoff.quantize.repair.gain import Gain
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
    if any(spec != layout for _, spec in flat):
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


def round_in_order_(
    model: QuantizedModel, workload: Workload, batches: Sequence[Any], how: Rounding, weights: Importance | None = None
) -> list[Gain]:
    """Choose the scales of values and the codes of weights of a quantized model, in place, from front to back.

    Raises ``QuantizationError`` where the batches cannot be joined to one, or where the model mixes the samples of a batch.
    """
    joined = stack([*batches, *batches])
    if joined is None:
        raise QuantizationError("batches of different shapes cannot go through the model side by side", where=workload.name,
                                expected="tensors that differ in their first axis alone",
                                do="calibrate without rounding in order")  # fmt: skip
    handler = _InOrder(model, how, weights)
    own = workload.with_model(model.model)
    with torch.no_grad(), watch(model.model, handler) as mode:
        mode.begin()
        with mode:
            own.run(joined)
    return handler.gains


class _InOrder:
    def __init__(self, model: QuantizedModel, how: Rounding, weights: Importance | None) -> None:
        self.model, self.how, self.importance = model, how, weights
        self.gains: list[Gain] = []
        self.done: WeakIdKeyDictionary = WeakIdKeyDictionary()
        self.settled: set[str] = set()
        self.exact: dict[int, tuple[Tensor, Tensor]] = {}  # parameters as they were

    def before_write(self, tensor: Tensor) -> None:
        if tensor in self.done:
            del self.done[tensor]

    def call(self, call: Call) -> Any:
        site = str(call.site)
        route = self.model.routes.get(site)
        if route is None:
            return call.run()
        if route.executes is not None:
            return _halves(call, lambda c: execute(c, route.executes))
        leaves, weight = list(call.leaves), ""
        for place, name in route.uses.items():
            if self.model.quantizer(name).weight:
                weight = name
            else:
                leaves[place] = self._value(name, leaves[place])
        result = self._weighted(call, leaves, route, weight) if weight else call.run(leaves)
        if call.operator.inplace and leaves[0] is not call.leaves[0]:
            result = call.leaves[0].copy_(result)
        return self._value(route.output, result) if route.output else result

    def _value(self, name: str, value: Tensor) -> Tensor:
        if value not in self.done:
            self.done[value] = {}
        known: dict[str, Tensor] = self.done[value]
        if name not in known:
            half = len(value) // 2
            quantizer = self.model.quantizer(name)
            if quantizer.scale is None and not quantizer.dynamic:
                self._observe(name, quantizer, value[half:])
            known[name] = torch.cat([value[:half], quantizer(value[half:])])
        return known[name]

    def _observe(self, name: str, quantizer: Quantizer, value: Tensor) -> None:
        observer = make_observer(self.how.observer, quantizer.granularity, **self.how.parameters)
        observer.see(value, None if self.importance is None else self.importance.power(name, value))
        quantizer.set_(observer.qparams(quantizer.fmt), self.how.observer)

    def _weighted(self, call: Call, leaves: list[Any], route: Any, name: str) -> Any:
        place = next(p for p, n in route.uses.items() if n == name)
        quantizer, given = self.model.quantizer(name), leaves[place]
        source = next(o for o in call.operands if o.role == "activation")
        bias = next((o for o in call.operands if o.role == "bias"), None)
        half = len(leaves[source.leaf]) // 2
        first, second = list(leaves), list(leaves)
        first[source.leaf], second[source.leaf] = leaves[source.leaf][:half], leaves[source.leaf][half:]
        for at in (place, *(() if bias is None else (bias.leaf,))):
            first[at] = self.exact.setdefault(id(leaves[at]), (leaves[at], leaves[at].detach().clone()))[1]
        wanted = call.run(first)
        corrects = self.how.bias and bias is not None and name not in self.settled and len(bias.sources) == 1
        if name not in self.settled:
            self.settled.add(name)
            self._round(call, name, quantizer, given, first[source.leaf], second[source.leaf], corrects)
        found = call.run(second)
        if bias is not None:
            held, axis = second[bias.leaf], _channels(call, found)
            before = held.detach().clone()
            if corrects:
                held.add_((wanted - found).mean([i for i in range(found.ndim) if i != axis]))
            readers = [self.model.quantizer(n) for n in route.uses.values()]
            now = on_sums(held, readers) if route.bias >= 0 else held
            found = found + _along(now - before, found.ndim, axis)
        return torch.cat([wanted, found])

    def _round(
        self, call: Call, name: str, quantizer: Quantizer, weight: Tensor, exact: Tensor, inputs: Tensor, centred: bool
    ) -> None:
        """Put a weight on its grid, in place."""
        operator = call.operator.name
        settings: dict[str, Any] = _convolution(call) if call.kind == "conv" else {}
        groups = int(settings.get("groups", 1))
        quantizer.set_(_scale(quantizer, weight, None, self.how.scales), self.how.scales)
        if self.how.weights == "nearest" or call.kind not in ("conv", "linear"):
            weight.copy_(quantizer(weight))
            return
        kernel = tuple(weight.shape[2:])
        rows = max(1, inputs.numel() // (inputs.shape[1] if call.kind == "conv" else inputs.shape[-1]))
        share = min(1.0, ROWS / rows)
        hessian, seed = Hessian(), torch.Generator()
        given, wanted = (
            patches(x, operator, kernel, share=share, generator=seed.manual_seed(0), **settings) for x in (inputs, exact)
        )
        hessian.add(given, reference=wanted)
        matrix, cross = (hessian.centred, hessian.centred_cross) if centred else (hessian.matrix, hessian.cross)
        w = matrix_view(weight, operator, groups)
        if self.how.scales == "search":
            diagonal = matrix.diagonal(dim1=-2, dim2=-1)[..., None, :].expand_as(w)
            power = from_matrix(diagonal, weight.shape, operator, groups)
            quantizer.set_(_scale(quantizer, weight, power, self.how.scales), "search")
        grid = matrix_qparams(quantizer.qparams(), weight.shape, operator, groups)
        repaired = round_weight(w, matrix, quantizer.fmt, grid, cross=cross)
        self.gains.append(replace(repaired.gain, name=name))
        shared = quantizer.granularity or PerTensor()
        chosen = weight_qparams(repaired.qparams, weight.shape, operator, groups, shared)
        quantizer.set_(chosen, quantizer.observer)
        weight.copy_(from_matrix(repaired.weight, weight.shape, operator, groups))


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


def _along(values: Tensor, ndim: int, axis: int) -> Tensor:
    shape = [1] * ndim
    shape[axis] = -1
    return values.view(shape)


def _halves(call: Call, run: Any) -> Any:
    """The call in full precision on the first half of the samples, changed on the second."""
    exact, changed = call.run(), run(call)
    return tree_map(
        lambda a, b: torch.cat([a[: len(a) // 2], b[len(b) // 2 :]]) if isinstance(a, Tensor) else a, exact, changed
    )

