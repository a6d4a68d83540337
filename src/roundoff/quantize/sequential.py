"""Calibrate and round a whole network in one pass: each layer when it is reached, on what really arrives there.

The calibration samples go through the model twice at once, side by side in one batch: the first half in full precision, the
second half through everything that is quantized already. So when a value is reached its scale is chosen from the values that
the quantized network has there, and when a weight is reached its inputs in both networks are at hand: what GPTQ and bias
correction need. Nothing is run again for each layer.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_map
from torch.utils.weak import WeakIdKeyDictionary

from roundoff.attribute.target import named_tensors
from roundoff.capture.calls import Call, watch
from roundoff.capture.execute import execute
from roundoff.errors import QuantizationError
from roundoff.formats import PerTensor, QParams, choose_qparams
from roundoff.quantize.importance import Importance, channel_axis
from roundoff.quantize.model import QuantizedModel, forget, on_sums
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
from roundoff.quantize.scheme import Route
from roundoff.quantize.side_by_side import check_same, samples, stack
from roundoff.workload import Workload, preserve

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


def round_in_order_(
    model: QuantizedModel, workload: Workload, batches: Sequence[Any], how: Rounding, weights: Importance | None = None
) -> list[Gain]:
    """Choose the scales of values and the codes of weights of a quantized model, in place, from front to back.

    Values that no sample reaches (a table computed from parameters) are calibrated, and left as they are in the pass.
    that no data reaches lose their quantizers, and their rows say so.

    Raises ``QuantizationError`` where the batches cannot be joined to one, or where the model mixes the samples of a batch:
    then the first half would not be what the plain model computes, which is checked on the first batch. The model is then as
    before, as after any other error.
    """
    batches = list(batches)
    joined = stack([*batches, *batches]) if batches else None
    if joined is None:
        raise QuantizationError("the batches cannot go through the model side by side", where=workload.name,
                                expected="one batch or more, of tensors that differ in their first axis alone",
                                got="batches of other shapes" if batches else "no calibration data",
                                do="bring all batches to one shape")  # fmt: skip
    handler = _InOrder(model, how, weights, [samples(batch) for batch in batches])
    own = workload.with_model(model.model)
    before = [(q, dict(q._buffers), (q.granularity, q.observer, q.note)) for _, q in model.named()]
    try:
        with preserve(model.model), torch.no_grad():
            plain = named_tensors(own.with_model(model.model.eval()).run(batches[0]))
            with watch(model.model, handler) as mode:
                mode.begin()
                with mode:
                    output = own.run(joined)
            check_same(plain, named_tensors(output), handler.sizes, workload.name)
    except BaseException:
        with torch.no_grad():
            for tensor, exact in handler.exact.values():
                tensor.copy_(exact)
        for quantizer, buffers, state in before:
            quantizer._buffers.update(buffers)
            quantizer.granularity, quantizer.observer, quantizer.note = state
        raise
    model.settle_()
    return handler.gains


class _InOrder:
    def __init__(self, model: QuantizedModel, how: Rounding, weights: Importance | None, sizes: list[int]) -> None:
        self.model, self.how, self.importance, self.sizes = model, how, weights, sizes
        self.gains: list[Gain] = []
        self.done: WeakIdKeyDictionary = WeakIdKeyDictionary()
        self.settled: set[str] = set()
        self.corrected: set[int] = set()
        self.exact: dict[int, tuple[Tensor, Tensor]] = {}  # parameters as they were

    def before_write(self, tensor: Tensor) -> None:
        forget(self.done, tensor)

    def axis(self, value: Tensor) -> int | None:
        """The axis of the samples: the first if it is a multiple of them, else one of their number; None for constants."""
        total = 2 * sum(self.sizes)
        if value.ndim and len(value) and len(value) % total == 0:
            return 0
        return next((i for i, length in enumerate(value.shape) if length == total), None)

    def halves(self, value: Tensor) -> tuple[Tensor, Tensor]:
        """The samples in full precision, and the same samples in the quantized network."""
        axis = self.axis(value)
        first, second = (value, value) if axis is None else value.chunk(2, axis)
        return first, second

    def joined(self, exact: Any, changed: Any) -> Any:
        """The first half of one result and the second half of another; constants as in full precision."""

        def one(a: Any, b: Any) -> Any:
            axis = self.axis(a) if isinstance(a, Tensor) else None
            return a if axis is None else torch.cat([a.chunk(2, axis)[0], b.chunk(2, axis)[1]], axis)

        return tree_map(one, exact, changed)

    def call(self, call: Call) -> Any:
        route = self.model.routes.get(str(call.site))
        if route is None:
            return call.run()
        leaves, weights = list(call.leaves), {}
        for place, name in route.uses.items():
            if self.model.quantizer(name).weight:
                weights[place] = name
            else:
                leaves[place] = self._value(name, leaves[place])
        if weights or route.executes is not None:
            result = self._weighted(call, leaves, route, weights)
        else:
            result = call.run(leaves)
        if call.operator.inplace and result is not call.leaves[0]:
            result = call.leaves[0].copy_(result)
        if not route.output:
            return result
        quantized = self._value(route.output, result)
        return result.copy_(quantized) if call.operator.inplace else quantized

    def _value(self, name: str, value: Tensor) -> Tensor:
        if value not in self.done:
            self.done[value] = {}
        known: dict[str, Tensor] = self.done[value]
        if name not in known:
            quantizer, axis = self.model.quantizer(name), self.axis(value)
            first, second = self.halves(value)
            if quantizer.scale is None and not quantizer.dynamic:
                self._observe(name, quantizer, second)
            known[name] = value if axis is None else torch.cat([first, quantizer(second)], axis)
        return known[name]

    def _observe(self, name: str, quantizer: Quantizer, value: Tensor) -> None:
        self._check_finite(name, value)
        observer = make_observer(self.how.observer, quantizer.granularity, **self.how.parameters)
        with _naming(name):
            axis = channel_axis(quantizer, value)
            observer.see(value, None if self.importance is None else self.importance.power(name, value, axis))
            chosen = observer.qparams(quantizer.fmt)
        quantizer.set_(chosen, self.how.observer, observer.degenerate)

    def _check_finite(self, name: str, value: Tensor) -> None:
        bad = ~value.isfinite()
        if not bool(bad.any()):
            return
        each = bad.reshape(sum(self.sizes), -1).any(1) if len(value) % sum(self.sizes) == 0 else bad.new_ones(1)
        sample, batch = int(each.nonzero()[0]), 0
        while sample >= self.sizes[batch]:
            sample, batch = sample - self.sizes[batch], batch + 1
        raise QuantizationError(
            f"{int(bad.sum())} of {value.numel()} values are NaN or Inf", where=f"{name}, first in batch {batch}",
            expected="finite values", do="find where they arise (roundoff watch), or leave these samples out",
        )  # fmt: skip

    def _weighted(self, call: Call, leaves: list[Any], route: Route, weights: dict[int, str]) -> Any:
        """A call with weights: in full precision for one half, with the weights on their grids for the other."""
        bias = next((o for o in call.operands if o.role == "bias"), None)
        sources = [o for o in call.operands if o.role == "activation"]
        first, second = list(leaves), list(leaves)
        for at in (*weights, *(o.leaf for o in call.operands if o.role == "bias")):
            first[at] = self.exact.setdefault(id(leaves[at]), (leaves[at], leaves[at].detach().clone()))[1]
        plain = route.executes is None and len(weights) == 1 and call.kind in ("conv", "linear", "matmul")
        if not plain or len(sources) != 1 or self.axis(leaves[sources[0].leaf]) is None:
            for at, name in weights.items():
                second[at] = self._nearest(name, leaves[at])
            ran = call.again(second) if route.executes is None else execute(replace(call, leaves=second), route.executes)
            return self.joined(call.again(first), ran)
        ((place, name),) = weights.items()
        quantizer, given, source = self.model.quantizer(name), leaves[place], sources[0].leaf
        axis = self.axis(leaves[source])
        first[source], second[source] = self.halves(leaves[source])
        wanted = call.run(first)
        channels = _channels(call, wanted)
        corrects = bias is not None and self._corrects(call, leaves[bias.leaf], wanted.shape[channels])
        operator = _matrix(call, place)
        if self.how.weights == "nearest" or operator is None or quantizer.dynamic:
            second[place] = self._nearest(name, given)
        elif name not in self.settled:
            self.settled.add(name)
            with _naming(name):
                self._round(call, operator, quantizer, given, first[source], second[source], corrects)
        found = call.run(second)
        if bias is not None:
            held = second[bias.leaf]
            before = held.detach().clone()
            if corrects:
                held.add_((wanted - found).mean([i for i in range(found.ndim) if i != channels]))
            readers = [self.model.quantizer(n) for n in route.uses.values()]
            now = on_sums(held, readers) if route.bias >= 0 else held
            found = found + _along(now - before, found.ndim, channels)
        return torch.cat([wanted, found], axis or 0)

    def _corrects(self, call: Call, bias: Tensor, channels: int) -> bool:
        """Whether a bias can take up the mean error: a parameter that is simply added, and not corrected before."""
        _, kwargs = call.arguments()
        added = isinstance(bias, nn.Parameter) and bias.shape == (channels,) and not {"alpha", "beta"} & set(kwargs)
        if not self.how.bias or not added or id(bias) in self.corrected:
            return False
        self.corrected.add(id(bias))
        return True

    def _nearest(self, name: str, weight: Tensor) -> Tensor:
        """A weight on its grid, each element rounded to the nearest: in place, where the grid stays."""
        quantizer = self.model.quantizer(name)
        if quantizer.dynamic:
            found: Tensor = quantizer(weight)
            return found
        if name not in self.settled:
            self.settled.add(name)
            with _naming(name):
                quantizer.set_(*_scale(quantizer, weight, None, self.how.scales))
            weight.copy_(quantizer(weight))
        return weight

    def _round(
        self, call: Call, operator: str, quantizer: Quantizer, weight: Tensor, exact: Tensor, inputs: Tensor, centred: bool
    ) -> None:
        """Put a weight on its grid, in place, so that the call's result changes least."""
        settings: dict[str, Any] = _convolution(call) if call.kind == "conv" else {}
        groups = int(settings.get("groups", 1))
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
        power = None
        if self.how.scales == "search":
            diagonal = matrix.diagonal(dim1=-2, dim2=-1)[..., None, :].expand_as(w)
            power = from_matrix(diagonal, weight.shape, operator, groups)
        qparams, observer, note = _scale(quantizer, weight, power, self.how.scales)
        grid = matrix_qparams(qparams, weight.shape, operator, groups)
        repaired = round_weight(w, matrix, quantizer.fmt, grid, cross=cross)
        self.gains.append(replace(repaired.gain, name=quantizer.name))
        shared = quantizer.granularity or PerTensor()
        quantizer.set_(weight_qparams(repaired.qparams, weight.shape, operator, groups, shared), observer, note)
        weight.copy_(from_matrix(repaired.weight, weight.shape, operator, groups))


def _scale(quantizer: Quantizer, weight: Tensor, power: Tensor | None, method: str) -> tuple[QParams, str, str]:
    """The scale of a weight, who chose it, and what was wrong with its range."""
    if quantizer.fmt.scale_from != "amax":  # ternary, binary
        return choose_qparams(weight, quantizer.fmt, quantizer.granularity), quantizer.fmt.scale_from, ""
    observer = make_observer("minmax" if method == "search" else method, quantizer.granularity)
    observer.see(weight)
    qparams = observer.qparams(quantizer.fmt)
    if method == "search":
        qparams = search_scales(weight, quantizer.fmt, quantizer.granularity, importance=power).qparams
    return qparams, method, observer.degenerate


def _matrix(call: Call, place: int) -> str | None:
    """The operator whose weight is a matrix ``repair.matrix`` knows, None for others."""
    if call.kind in ("conv", "linear") and call.operator.name != "bilinear":
        return call.operator.name
    weight = next(o for o in call.operands if o.leaf == place)
    return "matmul" if call.kind == "matmul" and weight.reduce == -2 and call.leaves[place].ndim == 2 else None


@contextmanager
def _naming(name: str) -> Iterator[None]:
    """Errors say which value or weight they are about."""
    try:
        yield
    except QuantizationError as error:
        where = f"{name} ({error.where})" if error.where else name
        raise QuantizationError(error.what, where=where, expected=error.expected, got=error.got, do=error.do) from error


def _convolution(call: Call) -> dict[str, Any]:
    args, kwargs = call.arguments()
    names: tuple[str, ...] = ("stride", "padding", "dilation", "groups")
    if "transpose" in call.operator.name:
        names = ("stride", "padding", "output_padding", "groups", "dilation")
    return {**dict(zip(names, args[3:], strict=False)), **{k: v for k, v in kwargs.items() if k in names}}


def _channels(call: Call, result: Tensor) -> int:
    """The axis of the output channels."""
    return result.ndim - 1 - int(call.operator.name[-2]) if call.kind == "conv" else result.ndim - 1


def _along(values: Tensor, ndim: int, axis: int) -> Tensor:
    shape = [1] * ndim
    shape[axis] = -1
    return values.view(shape)
