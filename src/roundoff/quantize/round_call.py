"""Round the weights of one call, reached by every run of the calibration.

Its bias is corrected too, so that the mean of each output channel is kept.
"""

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
from roundoff.ops import Call, Operand
from roundoff.quantize.model import Passing, QuantizedModel, RoutedCall
from roundoff.quantize.observers import make_observer
from roundoff.quantize.options import Rounding
from roundoff.quantize.quantizer import Quantizer, round_bias
from roundoff.quantize.weights.gptq import supported
from roundoff.quantize.weights.hessian import Hessian
from roundoff.quantize.weights.matrix import (
    from_matrix,
    matrix_qparams,
    matrix_view,
    patches,
    weight_qparams,
)
from roundoff.quantize.weights.output_error import Gain, Repaired
from roundoff.quantize.weights.round_weight import RATIOS, round_weight
from roundoff.quantize.weights.scales import search_scales

#: Rows of inputs that second moments are taken from, at most: more add little.
MOMENT_ROWS = 2**14
#: Bytes of rows at a time: what allocators keep for the next, see
#: ``round_in_order.JOINED_BYTES``.
PIECE_BYTES = 2**23


@dataclass
class Progress:
    """What the pass has done so far.

    Attributes:
        decided: quantizers whose scale is chosen, by name.
        corrected: biases that are corrected, by identity.
        gains: of rounded weights.
    """

    decided: set[str] = field(default_factory=set)
    corrected: set[int] = field(default_factory=set)
    gains: list[Gain] = field(default_factory=list)


@dataclass(frozen=True, slots=True)
class _WeightMatrix:
    """The weight of a call as matrices: its place, operator and groups, and its input."""

    place: int
    operator: str
    source: Operand
    settings: dict[str, Any]

    @property
    def groups(self) -> int:
        return int(self.settings.get("groups", 1))

    @property
    def is_linear(self) -> bool:
        """Return True where inputs are rows, not patches of an image."""
        return not self.operator.startswith("conv")


#: Second moments of the inputs, and those with the full-precision inputs where known.
_Moments = tuple[Tensor, Tensor | None]


class CallRounding:
    """One call with weights in all quantized runs, and in their full-precision partners.

    Args:
        model: what is rounded, in place.
        rounding: what holds for this call.
        progress: what is decided already; added to.
        quantized: the call in each quantized run.
        exact: the call in the full-precision run of the same batch, or None.
    """

    def __init__(
        self,
        model: QuantizedModel,
        rounding: Rounding,
        progress: Progress,
        *,
        quantized: Sequence[RoutedCall],
        exact: Sequence[RoutedCall | None],
    ) -> None:
        self.model = model
        self.rounding = rounding
        self.progress = progress
        self.quantized = quantized
        self.exact = (
            exact if self._comparable(quantized[0].site) else [None] * len(exact)
        )
        self.first = quantized[0]

    def _wanted(self, exact_results: Sequence[Any]) -> list[Tensor]:
        """Return the full-precision results that the call's own compare with."""
        if not self._comparable(self.first.site):
            return []
        return [r for r in exact_results if isinstance(r, Tensor)]

    def _comparable(self, site: str) -> bool:
        """Return True where the rows of both runs are the same rows."""
        return site not in self.model.graph.sizes_vary

    def round_(self, exact_results: Sequence[Any]) -> list[Any]:
        """Round the weights, correct the bias, and return the quantized results.

        ``exact_results`` are those of the full-precision partners, None without one.
        """
        uses = self.first.route.uses
        weights = {p: n for p, n in uses.items() if self.model.quantizer(n).weight}
        matrix = _weight_matrix(self.first, weights)
        wanted = self._wanted(exact_results)
        bias = None if matrix is None else self._bias_to_correct(wanted)
        if bias is not None:
            self.progress.corrected.add(id(bias))
        for place, name in weights.items():
            pending = name not in self.progress.decided
            if pending and not self.model.quantizer(name).dynamic:
                self.progress.decided.add(name)
                self._round_weight_(place, name, matrix, centred=bias is not None)
        if bias is None:
            return [run_quantized(self.model, routed) for routed in self.quantized]
        return self._correct_bias_(bias, wanted)

    def _round_weight_(
        self, place: int, name: str, matrix: _WeightMatrix | None, *, centred: bool
    ) -> None:
        """Put one weight on its grid, in place."""
        quantizer = self.model.quantizer(name)
        weight = self.first.leaves[place]
        with name_errors(name):
            if matrix is None or self.rounding.weights != "gptq":
                self._round_to_nearest_(quantizer, weight)
            elif not self._inputs_finite(matrix):
                self._round_to_nearest_(quantizer, weight)
                quantizer.note = (
                    "its inputs hold NaN or Inf, or nothing: rounded to nearest"
                )
            else:
                self._round_by_output_(quantizer, weight, matrix, centred)

    def _inputs_finite(self, matrix: _WeightMatrix) -> bool:
        """Return True where second moments of the inputs can be taken."""
        inputs = [routed.leaves[matrix.source.leaf] for routed in self.quantized]
        return any(x.numel() for x in inputs) and all(map(_is_finite, inputs))

    def _bias_to_correct(self, wanted: Sequence[Tensor]) -> Tensor | None:
        """Return a bias that can take up the mean error, or None.

        It has to be a parameter, one number a channel, and not corrected before; and all
        runs need partners in full precision.
        """
        bias = _bias(self.first.call)
        if len(wanted) < len(self.quantized) or not self.rounding.bias:
            return None
        if not isinstance(bias, nn.Parameter) or id(bias) in self.progress.corrected:
            return None
        channels = wanted[0].shape[_channel_axis(self.first.call)]
        return bias if bias.shape == (channels,) else None

    def _correct_bias_(self, bias: Tensor, wanted: Sequence[Tensor]) -> list[Any]:
        """Add the mean error to a bias; return the results of the quantized runs."""
        results = [
            run_quantized(self.model, routed, with_bias=False)
            for routed in self.quantized
        ]
        axis = _channel_axis(self.first.call)
        before = bias.detach().clone()
        pairs = list(zip(wanted, results, strict=True))
        if all(exact.shape == result.shape for exact, result in pairs):
            errors = [(e - r).movedim(axis, -1).flatten(0, -2) for e, r in pairs]
            _add_mean_(bias, errors)
        after: Tensor = bias
        if self.first.route.bias >= 0:
            after = round_bias(bias, self.model.readers(self.first.route))
        return [
            result + _along(after - before, result.ndim, axis) for result in results
        ]

    def _round_to_nearest_(self, quantizer: Quantizer, weight: Tensor) -> None:
        chosen = quantizer.without_exact(weight)
        quantizer.set_(*_choose_scale(quantizer, chosen, None, self.rounding.scales))
        weight.copy_(quantizer(weight))

    def _round_by_output_(
        self,
        quantizer: Quantizer,
        weight: Tensor,
        matrix: _WeightMatrix,
        centred: bool,
    ) -> None:
        """Put a weight on its grid, in place, so that the call's result changes least.

        ``centred``: a bias takes the mean of the error.
        """
        operator = matrix.operator
        groups = matrix.groups
        halves = self._moments(matrix, tuple(weight.shape[2:]))
        w = matrix_view(quantizer.without_exact(weight), operator, groups)
        hessian, cross = _moments_of(halves[0].merge(halves[1]), quantizer, centred)
        if cross is not None:
            share = _cross_share(w, halves, quantizer, centred)
            cross = hessian + share * (cross - hessian)
        power = None
        if self.rounding.scales == "search":
            diagonal = hessian.diagonal(dim1=-2, dim2=-1)[..., None, :].expand_as(w)
            power = from_matrix(diagonal, weight.shape, operator, groups)
        qparams, observer, note = _choose_scale(
            quantizer, weight, power, self.rounding.scales
        )
        granularity = quantizer.granularity or PerTensor()
        rows_apart = _rows_apart(weight.shape, operator, groups, granularity)
        repaired = round_weight(
            w,
            hessian,
            quantizer.fmt,
            matrix_qparams(qparams, weight.shape, operator, groups),
            cross=cross,
            ratios=RATIOS if rows_apart else (1.0,),
            refit=rows_apart,
            kept=w != 0 if self.rounding.keep_zeros else None,
        )
        self.progress.gains.append(replace(repaired.gain, name=quantizer.name))
        rounded_qparams = weight_qparams(
            repaired.qparams, weight.shape, operator, groups, granularity
        )
        quantizer.set_(rounded_qparams, observer, note)
        weight.copy_(_whole_weight(quantizer, weight, repaired, matrix))

    def _moments(
        self, matrix: _WeightMatrix, kernel: tuple[int, ...]
    ) -> tuple[Hessian, Hessian]:
        """Sum up second moments of the inputs in the quantized runs.

        They stand beside those in full precision where all runs have them. Of the first
        and the second half of each batch's rows.
        """
        leaf = matrix.source.leaf
        inputs = [routed.leaves[leaf] for routed in self.quantized]
        exact = [None if r is None else r.leaves[leaf] for r in self.exact]
        compares = all(
            e is not None and e.shape == x.shape and _is_finite(e)
            for e, x in zip(exact, inputs, strict=True)
        )
        if not compares:
            exact = [None] * len(inputs)
        sampler = _RowSampler(matrix, kernel, inputs)
        halves = Hessian(), Hessian()
        for exact_piece, piece in _pieces(exact, inputs, sampler.bytes_in_pieces()):
            rows = sampler.rows(piece)
            exact_rows = None if exact_piece is None else sampler.rows(exact_piece)
            _add_halves_(halves, rows, exact_rows)
        return halves


class _RowSampler:
    """Takes rows ``[groups, n, in]`` of a call's inputs, as many as are worth it."""

    def __init__(
        self, matrix: _WeightMatrix, kernel: tuple[int, ...], inputs: Sequence[Tensor]
    ) -> None:
        self.matrix = matrix
        self.kernel = kernel
        self.ndim = inputs[0].ndim
        self.elements = sum(x.numel() for x in inputs)
        reduce = matrix.source.reduce
        self.axis = reduce if matrix.is_linear else reduce % self.ndim
        rows = sum(x.numel() // max(1, x.shape[self.axis]) for x in inputs)
        self.share = min(1.0, MOMENT_ROWS / max(1, rows))
        self.generator = torch.Generator()

    def rows(self, x: Tensor) -> Tensor:
        """Return the sampled rows of one tensor, the same places in each of a shape."""
        moved = x.movedim(self.axis, -1) if self.matrix.is_linear else x
        return patches(
            moved,
            "linear" if self.matrix.is_linear else self.matrix.operator,
            self.kernel,
            share=self.share,
            generator=self.generator.manual_seed(0),
            **self.matrix.settings,
        )

    def bytes_in_pieces(self) -> float:
        """Return the bytes of all rows; 0 where samples do not lie along axis 0."""
        if self.matrix.is_linear:
            splits = self.axis % self.ndim != 0
        else:
            splits = self.ndim == len(self.kernel) + 2
        if self.ndim <= 1 or not splits:
            return 0.0
        return self.share * math.prod(self.kernel) * self.elements * 4


def _is_finite(x: Tensor) -> bool:
    # one pass; a sum that overflows is looked at again
    return bool(x.sum().isfinite()) or bool(x.isfinite().all())


def _add_halves_(
    halves: tuple[Hessian, Hessian], rows: Tensor, exact: Tensor | None
) -> None:
    """Add the first and the second half of rows ``[groups, n, in]`` to sums of their own."""
    middle = rows.shape[-2] // 2
    spans = slice(0, middle), slice(middle, None)
    for half, span in zip(halves, spans, strict=True):
        if rows[:, span].numel():
            reference = None if exact is None else exact[:, span]
            half.add(rows[:, span], reference=reference)


def _pieces(
    exact: Sequence[Tensor | None], inputs: Sequence[Tensor], size: float
) -> Iterator[tuple[Tensor | None, Tensor]]:
    """Cut inputs along axis 0, into two samples or more each.

    The rows of a piece take about ``PIECE_BYTES`` of ``size`` bytes.
    """
    count = max(1, math.ceil(size / PIECE_BYTES / len(inputs)))
    for exact_input, x in zip(exact, inputs, strict=True):
        length = len(x) if count == 1 else max(2, -(-len(x) // count))
        exact_parts = (
            repeat(None) if exact_input is None else torch.split(exact_input, length)
        )
        yield from zip(exact_parts, torch.split(x, length), strict=False)


def run_quantized(
    model: QuantizedModel, routed: RoutedCall, *, with_bias: bool = True
) -> Any:
    """Run a call with its weights, and its bias, on their grids."""
    leaves = list(routed.leaves)
    for place, name in routed.route.uses.items():
        quantizer = model.quantizer(name)
        if quantizer.weight:
            leaves[place] = quantizer(leaves[place])
    call = RoutedCall(routed.call, routed.route, leaves)
    return call.run(Passing(), model.readers(routed.route), with_bias=with_bias)


def matrix_operator(call: Call, place: int) -> str:
    """Name the operator of the weight at a place of a call, as ``weights.matrix`` does.

    Empty where it is no matrix. A weight of two axes is ``linear`` where its inputs lie
    along axis 1, and ``matmul`` where they lie along axis 0, as in ``x @ w`` and
    ``addmm``.
    """
    if call.kind == "conv":
        return call.operator.name
    weight = next(o for o in call.operands if o.leaf == place)
    if call.kind not in ("linear", "matmul") or call.leaves[place].ndim != 2:
        return ""
    return "linear" if weight.reduce % 2 else "matmul"


def _weight_matrix(routed: RoutedCall, weights: dict[int, str]) -> _WeightMatrix | None:
    """Return a call's one weight, which multiplies one operand; None for anything else."""
    call = routed.call
    sources = [o for o in call.operands if o.role == "activation"]
    if routed.route.executes is not None or len(weights) != 1 or len(sources) != 1:
        return None
    (place,) = weights
    source = call.leaves[sources[0].leaf]
    operator = matrix_operator(call, place)
    if not operator or not isinstance(source, Tensor) or source.ndim == 0:
        return None
    settings = _convolution_settings(call) if call.kind == "conv" else {}
    return _WeightMatrix(place, operator, sources[0], settings)


def _convolution_settings(call: Call) -> dict[str, Any]:
    """Return the arguments of a convolution behind its bias, by name."""
    args, kwargs = call.arguments()
    names: tuple[str, ...] = ("stride", "padding", "dilation", "groups")
    if "transpose" in call.operator.name:
        names = ("stride", "padding", "output_padding", "groups", "dilation")
    settings = dict(zip(names, args[3:], strict=False))
    return settings | {k: v for k, v in kwargs.items() if k in names}


def _bias(call: Call) -> Tensor | None:
    """Return the bias that a call adds to its products as it is, one number a channel."""
    biases = [call.leaves[o.leaf] for o in call.operands if o.role == "bias"]
    scaled = {"alpha", "beta"} & set(call.arguments()[1])
    if not biases or scaled:
        return None
    bias: Tensor = biases[0]
    return bias if bias.ndim == 1 else None


def _moments_of(hessian: Hessian, quantizer: Quantizer, centred: bool) -> _Moments:
    """Return second moments, about the mean or not.

    Inputs that stay in full precision make no error, and none can be made up for by them.
    """
    matrix = hessian.centred if centred else hessian.matrix
    cross = hessian.centred_cross if centred else hessian.cross
    if quantizer.exact is not None:
        matrix = _as_if_zero(matrix, quantizer.exact)
        cross = None if cross is None else _as_if_zero(cross, quantizer.exact)
    return matrix, cross


def _as_if_zero(moments: Tensor, places: Tensor) -> Tensor:
    """Return second moments as if these inputs were always zero."""
    return moments.index_fill(-1, places, 0.0).index_fill(-2, places, 0.0)


def _cross_share(
    w: Tensor, halves: Sequence[Hessian], quantizer: Quantizer, centred: bool
) -> Tensor | float:
    """Return which share of the correction for the inputs' errors holds on both halves."""
    parts = []
    for half in halves:
        if half.rows:
            matrix, cross = _moments_of(half, quantizer, centred)
            if cross is not None:
                parts.append((matrix, cross))
    return supported(w, parts) if len(parts) == 2 else 0.0


def _whole_weight(
    quantizer: Quantizer, weight: Tensor, repaired: Repaired, matrix: _WeightMatrix
) -> Tensor:
    """Return a rounded weight in its shape, with what stays in full precision."""
    whole = from_matrix(repaired.weight, weight.shape, matrix.operator, matrix.groups)
    if quantizer.exact is None:
        return whole
    axis = quantizer.operand.reduce
    exact = weight.detach().index_select(axis, quantizer.exact)
    return whole.index_copy(axis, quantizer.exact, exact)


def _add_mean_(bias: Tensor, errors: Sequence[Tensor]) -> None:
    """Add the mean over all rows ``[rows, channels]`` of what was lost.

    A bias stays as it is where that is not finite, or there are no rows.
    """
    rows = sum(len(part) for part in errors)
    if not rows:
        return
    means = (part.sum(0) / rows for part in errors)
    mean = sum(means, torch.zeros_like(bias))
    if bool(mean.isfinite().all()):
        bias.add_(mean)


def _choose_scale(
    quantizer: Quantizer, weight: Tensor, power: Tensor | None, method: str
) -> tuple[QParams, str, str]:
    """Return the scale of a weight, who chose it, and what was wrong with its range."""
    fmt = quantizer.fmt
    granularity = quantizer.granularity
    if fmt.scale_from != "amax":  # ternary, binary
        return choose_qparams(weight, fmt, granularity), fmt.scale_from, ""
    searches = method == "search"
    observer = make_observer("minmax" if searches else method, granularity)
    observer.see(weight)
    qparams = observer.qparams(fmt)
    if searches:
        qparams = search_scales(weight, fmt, granularity, importance=power).qparams
    return qparams, method, observer.degenerate


def _rows_apart(
    shape: Sequence[int], operator: str, groups: int, granularity: Granularity
) -> bool:
    """Return True where no two rows of a weight's matrices share a scale."""
    meta = torch.empty(tuple(shape), device="meta")
    matrices = matrix_view(meta, operator, groups).shape
    numbers = torch.arange(float(matrices[0] * matrices[1]))
    rows = numbers.view(*matrices[:2], 1).expand(matrices)
    view, shared = granularity.split(shape)
    row_of = from_matrix(rows, shape, operator, groups).reshape(view)
    return torch.equal(row_of.amax(shared), row_of.amin(shared))


@contextmanager
def name_errors(name: str) -> Iterator[None]:
    """Let errors say which value or weight they are about."""
    try:
        yield
    except QuantizationError as error:
        where = f"{name} ({error.where})" if error.where else name
        raise QuantizationError(
            error.what, where=where, expected=error.expected, got=error.got, do=error.do
        ) from error


def _channel_axis(call: Call) -> int:
    """The axis of the output channels, from the back.

    Runs may have other numbers of axes in front.
    """
    return -1 - int(call.operator.name[-2]) if call.kind == "conv" else -1


def _along(values: Tensor, ndim: int, axis: int) -> Tensor:
    """View one number a channel so that it broadcasts along ``axis``."""
    shape = [1] * ndim
    shape[axis] = -1
    return values.view(shape)
