"""Calibrate and round a whole network in one pass: each layer when it is reached, on what really arrives there.

The calibration samples go through the model twice at once, side by side in one batch: the first half in full precision, the
second half through everything that is quantized already. So when a value is reached its scale is chosen from the values that
the quantized network has there, and when a weight is reached its inputs in both networks are at hand: what GPTQ and bias
correction need. Nothing is run again for each layer.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from itertools import accumulate
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_map
from torch.utils.weak import WeakIdKeyDictionary

from roundoff.attribute.target import named_tensors
from roundoff.capture.calls import Call, watch
from roundoff.capture.execute import execute
from roundoff.errors import QuantizationError, WorkloadError
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
from roundoff.quantize.side_by_side import (
    Layout,
    MixedSamplesError,
    check_same,
    find_layout,
    samples,
    stack,
)
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

    All batches go through as one. Where they have other shapes, or the model takes other paths or computes something else
    for all together, they go one after the other: then each value and weight is settled by the first that reaches it. A
    value that has no samples (a table computed from parameters) is calibrated, and left as it is in the pass. Calls that no
    data reaches lose their quantizers, and their rows say so.

    Raises ``QuantizationError`` without data, for NaN or Inf in a value, and where the model mixes the samples of a batch:
    then the first half would not be what the plain model computes, which is checked. The model is then as before, as after
    any other error.
    """
    batches = list(batches)
    if not batches:
        raise QuantizationError("no calibration data", where=workload.name, expected="one batch or more", got="none",
                                do="give the batches that the model is calibrated on")  # fmt: skip
    singly = [[i] for i in range(len(batches))]
    together = len(batches) > 1 and stack([*batches, *batches]) is not None
    gains = _settle(model, workload, batches, [list(range(len(batches)))] if together else singly, how, weights)
    if isinstance(gains, QuantizationError) and together:
        gains = _settle(model, workload, batches, singly, how, weights)
    if isinstance(gains, QuantizationError):
        raise gains
    model.settle_()
    return gains


def _settle(
    model: QuantizedModel, workload: Workload, batches: Sequence[Any], groups: Sequence[Sequence[int]], how: Rounding,
    weights: Importance | None,
) -> list[Gain] | QuantizationError:  # fmt: skip
    """One pass for each group of batches; an error, with the model as before, where their samples are not independent."""
    handler = _InOrder(model, how, weights)
    own = workload.with_model(model.model)
    before = [(q, dict(q._buffers), (q.granularity, q.observer, q.note)) for _, q in model.named()]
    wrong: QuantizationError | None = None
    try:
        with preserve(model.model), torch.no_grad():
            own.model.eval()
            plain = [named_tensors(own.run(batches[group[0]])) for group in groups]  # before any weight changes
            for group, exact in zip(groups, plain, strict=True):
                handler.begin({i: samples(batches[i]) for i in group})
                output = handler.run(own, stack([batches[i] for i in (*group, *group)]))
                check_same(exact, named_tensors(output), list(handler.sizes.values()), workload.name)
        return handler.gains
    except MixedSamplesError as error:
        wrong = error
        return wrong
    except BaseException as error:
        wrong = error if isinstance(error, QuantizationError) else QuantizationError("")
        raise
    finally:
        if wrong is not None:
            with torch.no_grad():
                for tensor, exact_values in handler.exact.values():
                    tensor.copy_(exact_values)
            for quantizer, buffers, state in before:
                quantizer._buffers.update(buffers)
                quantizer.granularity, quantizer.observer, quantizer.note = state


class _InOrder:
    def __init__(self, model: QuantizedModel, how: Rounding, weights: Importance | None) -> None:
        self.model, self.how, self.importance = model, how, weights
        self.gains: list[Gain] = []
        self.settled: set[str] = set()
        self.corrected: set[int] = set()
        self.exact: dict[int, tuple[Tensor, Tensor]] = {}  # parameters as they were
        self.begin({})

    def begin(self, sizes: dict[int, int]) -> None:
        """A new pass, over batches of so many samples."""
        self.sizes = sizes
        self.done: WeakIdKeyDictionary = WeakIdKeyDictionary()

    def run(self, own: Workload, batch: Any) -> Any:
        """The model's output for a batch that holds all samples twice."""
        with watch(own.model, self) as mode:
            mode.begin()
            try:
                with mode:
                    return own.run(batch)
            except WorkloadError as error:
                raise QuantizationError(
                    "the model runs on its batches, but not with all samples twice in one batch", where=own.name,
                    expected="a model that takes batches of any length", got=str(error.got),
                    do="take lengths from the input's shape instead of numbers in the code",
                ) from error  # fmt: skip

    def before_write(self, tensor: Tensor) -> None:
        forget(self.done, tensor)

    def layout(self, value: Tensor) -> Layout | None:
        """Where the samples lie in a value."""
        return find_layout(value, 2 * sum(self.sizes.values()))

    def joined(self, exact: Any, changed: Any) -> Any:
        """The first half of one result and the second half of another; constants as in full precision."""

        def one(a: Any, b: Any) -> Any:
            layout = self.layout(a) if isinstance(a, Tensor) else None
            return a if layout is None else layout.join(layout.halves(a)[0], layout.halves(b)[1])

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
            quantizer, layout = self.model.quantizer(name), self.layout(value)
            first, second = (value, value) if layout is None else layout.halves(value)
            if name not in self.settled and not quantizer.dynamic:
                self.settled.add(name)
                self._observe(name, quantizer, second)
            known[name] = value if layout is None else layout.join(first, quantizer(second))
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
        where, total = name, sum(self.sizes.values())
        if value.ndim and len(value) % total == 0:
            sample = int(bad.reshape(total, -1).any(1).nonzero()[0])
            ends = list(accumulate(self.sizes.values()))
            where += f", first in batch {list(self.sizes)[bisect_right(ends, sample)]}"
        raise QuantizationError(
            f"{int(bad.sum())} of {value.numel()} values are NaN or Inf", where=where, expected="finite values",
            do="find where they arise (roundoff watch), or leave these samples out",
        )  # fmt: skip

    def _weighted(self, call: Call, leaves: list[Any], route: Route, weights: dict[int, str]) -> Any:
        """A call with weights: in full precision for one half, with the weights on their grids for the other."""
        bias = next((o for o in call.operands if o.role == "bias"), None)
        sources = [o for o in call.operands if o.role == "activation"]
        first, second = list(leaves), list(leaves)
        for at in (*weights, *(o.leaf for o in call.operands if o.role == "bias")):
            first[at] = self.exact.setdefault(id(leaves[at]), (leaves[at], leaves[at].detach().clone()))[1]
        layout = self.layout(leaves[sources[0].leaf]) if len(sources) == 1 else None
        plain = route.executes is None and len(weights) == 1 and call.kind in ("conv", "linear", "matmul")
        if not plain or layout is None or layout.axis == sources[0].reduce % leaves[sources[0].leaf].ndim:
            for at, name in weights.items():
                second[at] = self._nearest(name, leaves[at])
            ran = call.again(second) if route.executes is None else execute(replace(call, leaves=second), route.executes)
            return self.joined(call.again(first), ran)
        ((place, name),) = weights.items()
        quantizer, given, source = self.model.quantizer(name), leaves[place], sources[0].leaf
        first[source], second[source] = layout.halves(leaves[source])
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
        return layout.join(wanted, found)

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
