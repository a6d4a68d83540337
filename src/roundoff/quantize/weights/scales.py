"""Weight scales by search: the scale (and zero point) whose rounded weights lose least, instead of the one that clips none.

Clipping the largest weights costs those few, a smaller step helps all others: below 8 bits the best range is well inside
[min, max] (Banner et al., arXiv:1810.05723, section 2; OMSE of Choukroun et al., arXiv:1902.06822, equation 6).
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
from roundoff.quantize.weights.matrix import elementwise
from roundoff.quantize.weights.output_error import (
    Gain,
    Repaired,
    check_finite,
    check_matrices,
    output_db,
    quadratic,
    relative_db,
)

#: Candidate ranges as shares of [min, max]. Above 1, large weights may come to lie nearer to a coarser grid.
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
    """The qparams that minimise ``Σ h (w - ŵ)²`` over the elements that share them, and the weight rounded to nearest.

    Each ratio is tried on the min-max range, of asymmetric formats keeping its low end, its high end or its middle; then
    the winner's neighbours half and a quarter of a step away (and a zero point one off); and last the least-squares
    scale of the codes found, ``s Σ h w ŵ / Σ h ŵ²``, a few times. A candidate replaces the best only if its error is
    lower, so the result is never worse than min-max.

    Sets of zeros keep scale 1, constants and single elements come out exact up to fp32 rounding. A set whose importance
    is zero keeps min-max. Scales are never below the smallest normal number; where that limit was met, the note says so.

    Args:
        weight: floating point, any shape.
        fmt: any format without blocks.
        granularity: which elements share a scale; by default all. PerToken is per output channel of a ``matrix_view``.
        importance: h ≥ 0, broadcasts against weight; ``hessian.diagonal(dim1=-2, dim2=-1)[..., None, :]`` weighs each
            input of a matrix by its power. By default 1: the plain squared error.
        ratios: positive; 1 is always tried.
        refits: how many times the least-squares scale is tried.

    Raises:
        QuantizationError: NaN or Inf, an importance that is negative or does not fit, a ratio that is not positive.
        FormatError: a block format, or a granularity that does not fit the shape.

    Example:
        >>> from roundoff.formats import parse_format
        >>> found = search_scales(torch.tensor([3.0, 1, -1, 1, -1, 1, -1, 1]), parse_format("int2"))
        >>> found.weight.tolist(), found.gain.after_db > found.gain.before_db
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
    search = _Search(view, h, dims, fmt, choose_qparams(weight, fmt, granularity))
    before = search.db()
    step = min((abs(a - b) for a, b in pairwise(ratios) if a != b), default=0.05)
    if fmt.symmetric:
        for ratio in ratios:
            search.offer(search.start * ratio)
        for part in (step / 2, step / 4):
            middle = search.scale
            for ratio in (1 - part, 1 + part):
                search.offer(middle * ratio)
    else:
        search.both_ends(ratios, step)
    for _ in range(refits):
        search.refit()
    floor = int((search.scale <= torch.finfo(view.dtype).tiny).sum())
    note = f"{floor} scales are the smallest normal number" if floor else ""
    qparams = QParams(search.scale, search.zero_point, granularity)
    return Repaired(
        fake_quantize(weight, qparams, fmt),
        qparams,
        Gain("scale search", before, search.db(), note),
    )


class _Search:
    """The best scale so far of each set, and its error in squared steps of the first one, which cannot overflow."""

    def __init__(
        self,
        view: Tensor,
        h: Tensor,
        dims: tuple[int, ...],
        fmt: Format,
        qparams: QParams,
    ) -> None:
        self.view, self.h, self.dims, self.fmt = view, h, dims, fmt
        self.start, self.scale, self.zero_point = (
            qparams.scale,
            qparams.scale,
            qparams.zero_point,
        )
        self.error = self._error(self.scale, self.zero_point)

    def offer(self, scale: Tensor, zero_point: Tensor | None = None) -> None:
        """Take this candidate where it is better."""
        scale = scale.clamp(min=torch.finfo(scale.dtype).tiny)
        if zero_point is None:
            zero_point = self.zero_point
        error = self._error(scale, zero_point)
        better = (error < self.error) & scale.isfinite()
        self.error = torch.where(better, error, self.error)
        self.scale = torch.where(better, scale, self.scale)
        if zero_point is not None and self.zero_point is not None:
            self.zero_point = torch.where(better, zero_point, self.zero_point)

    def both_ends(self, ratios: Sequence[float], step: float) -> None:
        """Scales of an asymmetric range with the zero points that keep its low end, its high end, or its middle."""
        low, high, given = self.fmt.min_finite, self.fmt.max_finite, self.zero_point
        if given is None:
            return
        for ratio in ratios:
            first, last = low - (low - given) / ratio, high - (high - given) / ratio
            for point in (first, last, (first + last) / 2):
                self.offer(self.start * ratio, point.round().clamp_(low, high))
        for part in (step / 2, step / 4):
            scale, best = (
                self.scale,
                given if self.zero_point is None else self.zero_point,
            )
            for ratio in (1 - part, 1.0, 1 + part):
                for shift in (-1, 0, 1):
                    self.offer(scale * ratio, (best + shift).clamp_(low, high))

    def refit(self) -> None:
        """The least-squares scale of the codes."""
        rounded = self._rounded(self.scale, self.zero_point) / self.start
        top = (self.h * rounded * (self.view / self.start)).sum(self.dims, keepdim=True)
        bottom = (self.h * rounded * rounded).sum(self.dims, keepdim=True)
        self.offer(
            torch.where((bottom > 0) & (top > 0), self.scale * top / bottom, self.scale)
        )

    def db(self) -> float:
        """SQNR of the rounded weights in dB, weighted as the search is."""
        unit = self.start.double() ** 2
        signal = (self.h.double() * self.view.double() ** 2).sum(
            self.dims, keepdim=True
        )
        return relative_db(self.error.double() * unit, signal)

    def _rounded(self, scale: Tensor, zero_point: Tensor | None) -> Tensor:
        return fake_quantize(self.view, QParams(scale, zero_point), self.fmt)

    def _error(self, scale: Tensor, zero_point: Tensor | None) -> Tensor:
        off = self._rounded(scale, zero_point).sub_(self.view).div_(self.start)
        return off.square_().mul_(self.h).sum(self.dims, keepdim=True)


def _importance(
    importance: Tensor | None, weight: Tensor, shape: tuple[int, ...]
) -> Tensor:
    """h in the granularity's view, with mean 1."""
    if importance is None:
        return torch.ones(shape, dtype=working_dtype(weight), device=weight.device)
    try:
        h = importance.detach().to(working_dtype(weight)).expand(weight.shape)
    except RuntimeError:
        h = None
    if h is None or bool((h < 0).any()):
        raise QuantizationError(
            "the importance does not fit the weight",
            where="search_scales",
            expected=f"numbers ≥ 0 that broadcast to {tuple(weight.shape)}",
            got=f"shape {tuple(importance.shape)}" if h is None else "numbers below 0",
        )
    return (h / h.mean() if bool(h.any()) else h).reshape(shape)


def refit_scales(
    weight: Tensor, quantized: Tensor, hessian: Tensor, fmt: Format, qparams: QParams
) -> Repaired:
    """The least-squares scale of each output channel for codes that stay as they are, under the full Hessian.

    With ``ŵ = s c`` a row's error ``(w - s c) H (w - s c)ᵀ`` is a parabola in s with its minimum at
    ``s' = s (ŵ H wᵀ) / (ŵ H ŵᵀ)``; so the error never rises. Channels whose codes are all zero, or whose s' is not
    positive, keep their scale. This is for one scale per output channel; weights with several in a row keep theirs.

    Args:
        weight: ``[..., out, in]``, what is to be approximated.
        quantized: the same shape, on the grid of ``qparams``.
        hessian: ``[..., in, in]``.
        fmt: the format of the codes.
        qparams: with one scale (and zero point) for each row.

    Raises:
        QuantizationError: NaN or Inf, shapes that do not fit, or more than one scale in a row.

    Example:
        >>> row, codes = torch.tensor([[1.1, 2.2]]), torch.tensor([[1.0, 2.0]])
        >>> from roundoff.formats import parse_format
        >>> refit_scales(row, codes, torch.eye(2), parse_format("int4"), QParams(torch.tensor(1.0))).weight
        tensor([[1.1000, 2.2000]])
    """
    check_matrices("refit_scales", weight, hessian)
    check_finite("refit_scales", quantized=quantized)
    scale, zero_point = elementwise(qparams, weight.shape)
    if bool((scale != scale[..., :1]).any()):
        raise QuantizationError(
            "several scales in one row",
            where="refit_scales",
            expected="one scale per output channel",
            do="use gptq's own grid as it is; only PerToken of a matrix view can be refitted",
        )
    across = quantized @ hessian
    top, bottom = (
        (across * weight).sum(-1, keepdim=True),
        (across * quantized).sum(-1, keepdim=True),
    )
    factor = torch.where((top > 0) & (bottom > 0), top / bottom, 1.0)
    new_scale = (scale[..., :1] * factor).clamp(min=torch.finfo(scale.dtype).tiny)
    rounded = fake_quantize(
        quantized * (new_scale / scale), QParams(new_scale, zero_point), fmt
    )  # the same codes
    # Compared as rounded to fp32, where the minimum may have moved off by an ulp.
    better = (
        quadratic(rounded - weight, hessian) < quadratic(quantized - weight, hessian)
    )[..., None]
    chosen = torch.where(better, rounded, quantized)
    found = QParams(
        torch.where(better, new_scale, scale[..., :1]),
        None if zero_point is None else zero_point[..., :1],
    )
    gain = Gain(
        "scale refit",
        output_db(quantized, weight, hessian),
        output_db(chosen, weight, hessian),
    )
    return Repaired(chosen, found, gain)
