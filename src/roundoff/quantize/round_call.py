"""A call with weights, reached by every run of the calibration: its weights are rounded and its bias corrected."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from itertools import repeat
from typing import Any

import torch
from torch import Tensor, nn

from roundoff.errors import QuantizationError
from roundoff.formats import Granularity, PerTensor, QParams, choose_qparams
from roundoff.ops import Call, Operand, execute
from roundoff.quantize.layout import Route
from roundoff.quantize.model import QuantizedModel
from roundoff.quantize.observers import make_observer
from roundoff.quantize.options import Rounding
from roundoff.quantize.quantizer import Quantizer, on_sums
from roundoff.quantize.weights.gptq import supported
from roundoff.quantize.weights.hessian import Hessian
from roundoff.quantize.weights.matrix import (
    from_matrix,
    matrix_qparams,
    matrix_view,
    patches,
    weight_qparams,
)
from roundoff.quantize.weights.output_error import Gain
from roundoff.quantize.weights.round_weight import RATIOS, round_weight
from roundoff.quantize.weights.scales import search_scales

#: Rows of inputs that second moments are taken from, at most: more add little.
ROWS = 2**14
#: Bytes of rows at a time: what allocators keep for the next, see ``sequential.JOINED``.
PIECE = 2**23


@dataclass
class Arrived:
    """A call that a run has reached, with its arguments there: values on their grids, weights and bias as they are."""

    call: Call
    leaves: list[Any]
    route: Route


@dataclass
class Settled:
    """What the pass has done so far: names of quantizers, biases that are corrected, gains."""

    names: set[str] = field(default_factory=set)
    corrected: set[int] = field(default_factory=set)
    gains: list[Gain] = field(default_factory=list)


class Weighed:
    """One call with weights in all runs that reached it: pairs of the full-precision run (or None) and the quantized one."""

    def __init__(
        self,
        model: QuantizedModel,
        how: Rounding,
        settled: Settled,
        pairs: Sequence[tuple[Arrived | None, Arrived]],
    ) -> None:
        self.model, self.how, self.settled, self.pairs = model, how, settled, pairs

    def settle(self, wanted: Sequence[Tensor | None]) -> list[Any]:
        """Round, correct, and return the results of the quantized runs; ``wanted`` are those of their partners."""
        first = self.pairs[0][1]
        weights = {
            p: n for p, n in first.route.uses.items() if self.model.quantizer(n).weight
        }
        place, source = _product(first, weights)
        bias = None if place is None else _bias(first.call)
        both = [
            (w, arrived)
            for w, (_, arrived) in zip(wanted, self.pairs, strict=True)
            if isinstance(w, Tensor)
        ]
        corrects = (
            bool(both)
            and len(both) == len(self.pairs)
            and self._corrects(first.call, bias, both[0][0])
        )
        for at, name in weights.items():
            quantizer = self.model.quantizer(name)
            if quantizer.dynamic or name in self.settled.names:
                continue
            self.settled.names.add(name)
            with naming(name):
                if at == place and source is not None and self.how.weights == "gptq":
                    self._round(quantizer, first.leaves[at], at, source, corrects)
                else:
                    quantizer.set_(
                        *_scale(
                            quantizer,
                            quantizer.without_exact(first.leaves[at]),
                            None,
                            self.how.scales,
                        )
                    )
                    first.leaves[at].copy_(quantizer(first.leaves[at]))
        if bias is None or not corrects:
            return [run(self.model, arrived) for _, arrived in self.pairs]
        found = [run(self.model, arrived, bias=False) for _, arrived in self.pairs]
        before, axis = bias.detach().clone(), _channels(first.call)
        _correct_(
            bias,
            [
                (w - f).movedim(axis, -1).flatten(0, -2)
                for (w, _), f in zip(both, found, strict=True)
            ],
        )
        now = on_sums(bias, self._readers(first)) if first.route.bias >= 0 else bias
        return [f + _along(now - before, f.ndim, axis) for f in found]

    def _readers(self, arrived: Arrived) -> list[Quantizer]:
        return [self.model.quantizer(name) for name in arrived.route.uses.values()]

    def _corrects(self, call: Call, bias: Tensor | None, result: Tensor) -> bool:
        """Whether a bias can take up the mean error: a parameter, one number a channel, and not corrected before."""
        if (
            bias is None
            or not self.how.bias
            or not isinstance(bias, nn.Parameter)
            or id(bias) in self.settled.corrected
        ):
            return False
        if bias.shape != (result.shape[_channels(call)],):
            return False
        self.settled.corrected.add(id(bias))
        return True

    def _round(
        self,
        quantizer: Quantizer,
        weight: Tensor,
        place: int,
        source: Operand,
        centred: bool,
    ) -> None:
        """Put a weight on its grid, in place, so that the call's result changes least."""
        call = self.pairs[0][1].call
        operator = matrix_operator(call, place)
        settings: dict[str, Any] = _convolution(call) if call.kind == "conv" else {}
        groups = int(settings.get("groups", 1))
        halves = self._moments(operator, source, tuple(weight.shape[2:]), settings)
        matrix, cross = _taken(halves[0].merge(halves[1]), centred)
        w = matrix_view(quantizer.without_exact(weight), operator, groups)
        if (
            quantizer.exact is not None
        ):  # these inputs make no error, and none can be made up for by them
            matrix = _without(matrix, quantizer.exact)
            cross = None if cross is None else _without(cross, quantizer.exact)
        if cross is not None:
            parts = [
                (h, c)
                for h, c in (_taken(half, centred) for half in halves if half.rows)
                if c is not None
            ]
            if quantizer.exact is not None:
                parts = [
                    (_without(h, quantizer.exact), _without(c, quantizer.exact))
                    for h, c in parts
                ]
            share = supported(w, parts) if len(parts) == 2 else 0.0
            cross = matrix + share * (cross - matrix)
        power = None
        if self.how.scales == "search":
            diagonal = matrix.diagonal(dim1=-2, dim2=-1)[..., None, :].expand_as(w)
            power = from_matrix(diagonal, weight.shape, operator, groups)
        qparams, observer, note = _scale(quantizer, weight, power, self.how.scales)
        grid = matrix_qparams(qparams, weight.shape, operator, groups)
        shared = quantizer.granularity or PerTensor()
        own = _rows_apart(weight.shape, operator, groups, shared)
        kept = w != 0 if self.how.keep_zeros else None
        ratios = RATIOS if own else (1.0,)
        repaired = round_weight(
            w,
            matrix,
            quantizer.fmt,
            grid,
            cross=cross,
            ratios=ratios,
            refit=own,
            kept=kept,
        )
        self.settled.gains.append(replace(repaired.gain, name=quantizer.name))
        quantizer.set_(
            weight_qparams(repaired.qparams, weight.shape, operator, groups, shared),
            observer,
            note,
        )
        found = from_matrix(repaired.weight, weight.shape, operator, groups)
        if quantizer.exact is not None:
            axis = quantizer.operand.reduce
            found = found.index_copy(
                axis,
                quantizer.exact,
                weight.detach().index_select(axis, quantizer.exact),
            )
        weight.copy_(found)

    def _moments(
        self,
        operator: str,
        source: Operand,
        kernel: tuple[int, ...],
        settings: dict[str, Any],
    ) -> tuple[Hessian, Hessian]:
        """Second moments of the inputs in the quantized runs, beside those in full precision where all have them.

        Of the first and the second half of each batch's rows.
        """
        matrix = not operator.startswith("conv")
        inputs = [
            (
                None if one is None else one.leaves[source.leaf],
                other.leaves[source.leaf],
            )
            for one, other in self.pairs
        ]
        whole = all(
            one is not None and one.shape == other.shape for one, other in inputs
        )
        axis = source.reduce if matrix else source.reduce % inputs[0][1].ndim
        rows = sum(other.numel() // max(1, other.shape[axis]) for _, other in inputs)
        share, seed = min(1.0, ROWS / max(1, rows)), torch.Generator()

        def seen(x: Tensor) -> Tensor:
            moved, name = (x.movedim(axis, -1), "linear") if matrix else (x, operator)
            return patches(
                moved,
                name,
                kernel,
                share=share,
                generator=seed.manual_seed(0),
                **settings,
            )

        split = inputs[0][1].ndim > 1 and (
            axis % inputs[0][1].ndim != 0
            if matrix
            else inputs[0][1].ndim == len(kernel) + 2
        )
        taken = (
            share * math.prod(kernel) * sum(other.numel() for _, other in inputs) * 4
        )  # bytes, of all rows
        halves = Hessian(), Hessian()
        for one, other in _pieces(inputs, taken if split else 0.0):
            given, exact = seen(other), seen(one) if whole and one is not None else None
            middle = given.shape[-2] // 2
            for half, part in zip(
                halves, (slice(0, middle), slice(middle, None)), strict=True
            ):
                if given[:, part].numel():
                    half.add(
                        given[:, part],
                        reference=None if exact is None else exact[:, part],
                    )
        return halves


def _pieces(
    inputs: Sequence[tuple[Tensor | None, Tensor]], size: float
) -> Iterator[tuple[Tensor | None, Tensor]]:
    """Inputs in pieces along axis 0, two samples or more each, whose rows take about ``PIECE`` bytes of ``size``."""
    count = max(1, math.ceil(size / PIECE / len(inputs)))
    for one, other in inputs:
        length = len(other) if count == 1 else max(2, -(-len(other) // count))
        yield from zip(
            repeat(None) if one is None else torch.split(one, length),
            torch.split(other, length),
            strict=False,
        )


def run(model: QuantizedModel, arrived: Arrived, bias: bool = True) -> Any:
    """The result of a call with its weights, and its bias, on their grids."""
    leaves, route = list(arrived.leaves), arrived.route
    for place, name in route.uses.items():
        if model.quantizer(name).weight:
            leaves[place] = model.quantizer(name)(leaves[place])
    if route.executes is not None:
        return execute(replace(arrived.call, leaves=leaves), route.executes)
    if bias and route.bias >= 0:
        leaves[route.bias] = on_sums(
            leaves[route.bias], [model.quantizer(n) for n in route.uses.values()]
        )
    return arrived.call.run(leaves)


def matrix_operator(call: Call, place: int) -> str:
    """How ``repair.matrix`` calls the weight at a place of a call; empty where it is no matrix.

    A weight of two axes is ``linear`` where its inputs lie along axis 1, and ``matmul`` where they lie along axis 0, as in
    ``x @ w`` and ``addmm``.
    """
    if call.kind == "conv":
        return call.operator.name
    weight = next(o for o in call.operands if o.leaf == place)
    if call.kind not in ("linear", "matmul") or call.leaves[place].ndim != 2:
        return ""
    return "linear" if weight.reduce % 2 else "matmul"


def _product(
    arrived: Arrived, weights: dict[int, str]
) -> tuple[int | None, Operand | None]:
    """The place of a call's one weight and the one operand that it multiplies; None, None for anything else."""
    call = arrived.call
    sources = [o for o in call.operands if o.role == "activation"]
    if arrived.route.executes is not None or len(weights) != 1 or len(sources) != 1:
        return None, None
    (place,) = weights
    shaped = (
        isinstance(call.leaves[sources[0].leaf], Tensor)
        and call.leaves[sources[0].leaf].ndim > 0
    )
    return (
        (place, sources[0]) if shaped and matrix_operator(call, place) else (None, None)
    )


def _bias(call: Call) -> Tensor | None:
    """The bias that a call adds to its products as it is, one number for each channel."""
    bias: Tensor | None = next(
        (call.leaves[o.leaf] for o in call.operands if o.role == "bias"), None
    )
    scaled = {"alpha", "beta"} & set(call.arguments()[1])
    return None if bias is None or bias.ndim != 1 or scaled else bias


def _taken(hessian: Hessian, centred: bool) -> tuple[Tensor, Tensor | None]:
    return (
        (hessian.centred, hessian.centred_cross)
        if centred
        else (hessian.matrix, hessian.cross)
    )


def _without(moments: Tensor, places: Tensor) -> Tensor:
    """Second moments as if these inputs were always zero."""
    return moments.index_fill(-1, places, 0.0).index_fill(-2, places, 0.0)


def _correct_(bias: Tensor, lost: Sequence[Tensor]) -> None:
    """Add the mean over all rows ``[rows, channels]`` of what was lost."""
    rows = sum(len(part) for part in lost)
    bias.add_(
        sum(
            (part.mean(0) * (len(part) / rows) for part in lost), torch.zeros_like(bias)
        )
    )


def _scale(
    quantizer: Quantizer, weight: Tensor, power: Tensor | None, method: str
) -> tuple[QParams, str, str]:
    """The scale of a weight, who chose it, and what was wrong with its range."""
    if quantizer.fmt.scale_from != "amax":  # ternary, binary
        return (
            choose_qparams(weight, quantizer.fmt, quantizer.granularity),
            quantizer.fmt.scale_from,
            "",
        )
    observer = make_observer(
        "minmax" if method == "search" else method, quantizer.granularity
    )
    observer.see(weight)
    qparams = observer.qparams(quantizer.fmt)
    if method == "search":
        qparams = search_scales(
            weight, quantizer.fmt, quantizer.granularity, importance=power
        ).qparams
    return qparams, method, observer.degenerate


def _rows_apart(
    shape: Sequence[int], operator: str, groups: int, granularity: Granularity
) -> bool:
    """Whether no two rows of a weight's matrices share a scale, so that each may choose its own."""
    matrices = matrix_view(
        torch.empty(tuple(shape), device="meta"), operator, groups
    ).shape
    rows = (
        torch.arange(float(matrices[0] * matrices[1]))
        .view(*matrices[:2], 1)
        .expand(matrices)
    )
    view, shared = granularity.split(shape)
    held = from_matrix(rows, shape, operator, groups).reshape(view)
    return torch.equal(held.amax(shared), held.amin(shared))


@contextmanager
def naming(name: str) -> Iterator[None]:
    """Errors say which value or weight they are about."""
    try:
        yield
    except QuantizationError as error:
        where = f"{name} ({error.where})" if error.where else name
        raise QuantizationError(
            error.what, where=where, expected=error.expected, got=error.got, do=error.do
        ) from error


def _convolution(call: Call) -> dict[str, Any]:
    args, kwargs = call.arguments()
    names: tuple[str, ...] = ("stride", "padding", "dilation", "groups")
    if "transpose" in call.operator.name:
        names = ("stride", "padding", "output_padding", "groups", "dilation")
    return {
        **dict(zip(names, args[3:], strict=False)),
        **{k: v for k, v in kwargs.items() if k in names},
    }


def _channels(call: Call) -> int:
    """The axis of the output channels, from the back: runs may have other numbers of axes in front."""
    return -1 - int(call.operator.name[-2]) if call.kind == "conv" else -1


def _along(values: Tensor, ndim: int, axis: int) -> Tensor:
    shape = [1] * ndim
    shape[axis] = -1
    return values.view(shape)
