"""Weight scales by search and by least squares.

The search takes the scale (and zero point) whose rounded weights lose least, instead of
the one that clips none. Clipping the largest weights costs those few, a smaller step
helps all others: below 8 bits the best range is well inside [min, max] (Banner et al.,
arXiv:1810.05723, section 2; OMSE of Choukroun et al., arXiv:1902.06822, equation 6).
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise

import torch
from torch import Tensor

from roundoff.errors import QuantizationError
from roundoff.formats import (
    Format,
    Granularity,
    PerTensor,
    QParams,
    choose_qparams,
    fake_quantize,
    working_dtype,
)
from roundoff.quantize.weights.matrix import elementwise, has_one_scale_per_row
from roundoff.quantize.weights.output_error import (
    Gain,
    Repaired,
    check_finite,
    check_matrices,
    output_db,
    quadratic,
    relative_db,
)

#: Candidate ranges as shares of [min, max]. Above 1, large weights may come to lie nearer
#: to a coarser grid.
RATIOS = tuple(1.1 - 0.025 * i for i in range(31))


def search_scales(
    weight: Tensor,
    fmt: Format,
    granularity: Granularity | None = None,
    *,
    importance: Tensor | None = None,
    ratios: Sequence[float] = RATIOS,
    refits: int = 3,
) -> Repaired:
    """The qparams that minimise ``Σ h (w - ŵ)²`` over the elements that share them.

    Each ratio is tried on the min-max range, of asymmetric formats keeping its low end,
    its high end or its middle; then the winner's neighbours half and a quarter of a
    step away (and a zero point one off); and last the least-squares scale of the codes,
    ``s Σ h w ŵ / Σ h ŵ²``, a few times. A candidate replaces the best only if its error
    is lower, so the result is never worse than min-max.

    Sets of zeros keep scale 1, constants and single elements come out exact up to fp32
    rounding. A set whose importance is zero keeps min-max. Scales are never below the
    smallest normal number; where that limit was met, the note says so.

    Args:
        weight: floating point, any shape.
        fmt: any format without blocks.
        granularity: which elements share a scale; by default all. PerToken is per
            output channel of a ``matrix_view``.
        importance: h ≥ 0, broadcasts against weight;
            ``hessian.diagonal(dim1=-2, dim2=-1)[..., None, :]`` weighs each input of a
            matrix by its power. By default 1: the plain squared error.
        ratios: positive; 1 is always tried.
        refits: how many times the least-squares scale is tried.

    Returns:
        The weight rounded to nearest in these qparams; the gain is its weighted SQNR.

    Raises:
        QuantizationError: NaN or Inf, an importance that is negative or does not fit, a
            ratio that is not positive.
        FormatError: a block format, or a granularity that does not fit the shape.

    Example:
        >>> from roundoff.formats import parse_format
        >>> weight = torch.tensor([3.0, 1, -1, 1, -1, 1, -1, 1])
        >>> searched = search_scales(weight, parse_format("int2"))
        >>> searched.weight.tolist(), searched.gain.after_db > searched.gain.before_db
        ([1.25, 1.25, -1.25, 1.25, ..., 1.25], True)
    """
    check_finite("search_scales", weight=weight, importance=importance)
    if not all(r > 0 for r in ratios):
        raise QuantizationError(
            "a ratio is not positive",
            where="search_scales",
            expected="ratios > 0",
            got=str(ratios),
        )
    granularity = granularity or PerTensor()
    shape, dims = granularity.split(weight.shape)
    view = weight.detach().to(working_dtype(weight)).reshape(shape)
    h = _importance(importance, weight, shape)
    search = _ScaleSearch(view, h, dims, fmt, choose_qparams(weight, fmt, granularity))
    before = search.db()
    step = min((abs(a - b) for a, b in pairwise(ratios) if a != b), default=0.05)
    if fmt.symmetric:
        search.symmetric_ranges(ratios, step)
    else:
        search.asymmetric_ranges(ratios, step)
    for _ in range(refits):
        search.refit()
    smallest = int((search.scale <= torch.finfo(view.dtype).tiny).sum())
    note = f"{smallest} scales are the smallest normal number" if smallest else ""
    qparams = QParams(search.scale, search.zero_point, granularity)
    gain = Gain("scale search", before, search.db(), note)
    return Repaired(fake_quantize(weight, qparams, fmt), qparams, gain)


class _ScaleSearch:
    """The best scale so far of each set, and its error.

    The error is in squared steps of the first scale, which cannot overflow.
    """

    def __init__(
        self,
        view: Tensor,
        h: Tensor,
        dims: tuple[int, ...],
        fmt: Format,
        qparams: QParams,
    ) -> None:
        self.view = view
        self.h = h
        self.dims = dims
        self.fmt = fmt
        self.start = qparams.scale
        self.scale = qparams.scale
        self.zero_point = qparams.zero_point
        self.error = self._error(self.scale, self.zero_point)

    def offer(self, scale: Tensor, zero_point: Tensor | None = None) -> None:
        """Take this candidate in the sets where it is better."""
        scale = scale.clamp(min=torch.finfo(scale.dtype).tiny)
        if zero_point is None:
            zero_point = self.zero_point
        error = self._error(scale, zero_point)
        better = (error < self.error) & scale.isfinite()
        self.error = torch.where(better, error, self.error)
        self.scale = torch.where(better, scale, self.scale)
        if zero_point is not None and self.zero_point is not None:
            self.zero_point = torch.where(better, zero_point, self.zero_point)

    def symmetric_ranges(self, ratios: Sequence[float], step: float) -> None:
        """Try scales of symmetric ranges, then the neighbours of the best ones."""
        for ratio in ratios:
            self.offer(self.start * ratio)
        for part in (step / 2, step / 4):
            middle = self.scale
            for ratio in (1 - part, 1 + part):
                self.offer(middle * ratio)

    def asymmetric_ranges(self, ratios: Sequence[float], step: float) -> None:
        """Try scales with zero points that keep the low end, the high end or the middle."""
        first_point = self.zero_point
        if first_point is None:
            return
        low = self.fmt.min_finite
        high = self.fmt.max_finite
        for ratio in ratios:
            keep_low = low - (low - first_point) / ratio
            keep_high = high - (high - first_point) / ratio
            for point in (keep_low, keep_high, (keep_low + keep_high) / 2):
                self.offer(self.start * ratio, point.round().clamp_(low, high))
        for part in (step / 2, step / 4):
            self._offer_neighbours(part)

    def _offer_neighbours(self, part: float) -> None:
        """Try scales a share off the best ones, and zero points one off."""
        scale = self.scale
        point = self.zero_point
        if point is None:
            return
        for ratio in (1 - part, 1.0, 1 + part):
            for shift in (-1, 0, 1):
                near = (point + shift).clamp_(self.fmt.min_finite, self.fmt.max_finite)
                self.offer(scale * ratio, near)

    def refit(self) -> None:
        """Try the least-squares scale of the codes."""
        rounded = self._rounded(self.scale, self.zero_point) / self.start
        exact = self.view / self.start
        above = (self.h * rounded * exact).sum(self.dims, keepdim=True)
        below = (self.h * rounded * rounded).sum(self.dims, keepdim=True)
        fitted = self.scale * above / below
        self.offer(torch.where((below > 0) & (above > 0), fitted, self.scale))

    def db(self) -> float:
        """SQNR of the rounded weights in dB, weighted as the search is."""
        unit = self.start.double() ** 2
        power = self.h.double() * self.view.double() ** 2
        signal = power.sum(self.dims, keepdim=True)
        return relative_db(self.error.double() * unit, signal)

    def _rounded(self, scale: Tensor, zero_point: Tensor | None) -> Tensor:
        return fake_quantize(self.view, QParams(scale, zero_point), self.fmt)

    def _error(self, scale: Tensor, zero_point: Tensor | None) -> Tensor:
        error = self._rounded(scale, zero_point).sub_(self.view).div_(self.start)
        return error.square_().mul_(self.h).sum(self.dims, keepdim=True)


def _importance(
    importance: Tensor | None, weight: Tensor, shape: tuple[int, ...]
) -> Tensor:
    """h in the granularity's view, with mean 1."""
    if importance is None:
        return torch.ones(shape, dtype=working_dtype(weight), device=weight.device)
    fault = ""
    try:
        h = importance.detach().to(working_dtype(weight)).expand(weight.shape)
    except RuntimeError:
        fault = f"shape {tuple(importance.shape)}"
    if not fault and bool((h < 0).any()):
        fault = "numbers below 0"
    if fault:
        raise QuantizationError(
            "the importance does not fit the weight",
            where="search_scales",
            expected=f"numbers ≥ 0 that broadcast to {tuple(weight.shape)}",
            got=fault,
        )
    mean = h.mean()
    return (h / torch.where(mean > 0, mean, 1.0)).reshape(shape)


def refit_scales(
    weight: Tensor, quantized: Tensor, hessian: Tensor, fmt: Format, qparams: QParams
) -> Repaired:
    """The least-squares scale of each output channel for codes that stay as they are.

    With ``ŵ = s c`` a row's error ``(w - s c) H (w - s c)ᵀ`` is a parabola in s with
    its minimum at ``s' = s (ŵ H wᵀ) / (ŵ H ŵᵀ)``; so the error never rises. Channels
    whose codes are all zero, or whose s' is not positive, keep their scale. Rows with
    several scales are refused.

    Args:
        weight: ``[..., out, in]``, the weight to approximate.
        quantized: the same shape, on the grid of ``qparams``.
        hessian: ``[..., in, in]``.
        fmt: the format of the codes.
        qparams: with one scale (and zero point) for each row.

    Raises:
        QuantizationError: NaN or Inf, shapes that do not fit, or more than one scale in
            a row.

    Example:
        >>> from roundoff.formats import parse_format
        >>> row, codes = torch.tensor([[1.1, 2.2]]), torch.tensor([[1.0, 2.0]])
        >>> grid = QParams(torch.tensor(1.0))
        >>> refit_scales(row, codes, torch.eye(2), parse_format("int4"), grid).weight
        tensor([[1.1000, 2.2000]])
    """
    check_matrices("refit_scales", weight, hessian)
    check_finite("refit_scales", quantized=quantized)
    scale, zero_point = elementwise(qparams, weight.shape)
    if not has_one_scale_per_row(scale):
        raise QuantizationError(
            "several scales in one row",
            where="refit_scales",
            expected="one scale per output channel",
            do="use gptq's own grid as it is; only PerToken of a matrix view can be refitted",
        )
    old_scale = scale[..., :1]
    product = quantized @ hessian
    above = (product * weight).sum(-1, keepdim=True)
    below = (product * quantized).sum(-1, keepdim=True)
    factor = torch.where((above > 0) & (below > 0), above / below, 1.0)
    new_scale = (old_scale * factor).clamp(min=torch.finfo(scale.dtype).tiny)
    # the same codes
    rounded = fake_quantize(
        quantized * (new_scale / scale), QParams(new_scale, zero_point), fmt
    )
    # compared as rounded to fp32, where the minimum may have moved off by an ulp
    error = quadratic(quantized - weight, hessian)
    better = (quadratic(rounded - weight, hessian) < error)[..., None]
    chosen = torch.where(better, rounded, quantized)
    refitted = QParams(
        torch.where(better, new_scale, old_scale),
        None if zero_point is None else zero_point[..., :1],
    )
    gain = Gain(
        "scale refit",
        output_db(quantized, weight, hessian),
        output_db(chosen, weight, hessian),
    )
    return Repaired(chosen, refitted, gain)
