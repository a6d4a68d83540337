"""Quantizers as plain arithmetic: divide, round, clip, multiply, in operators that
every exporter and runtime has.

``formats.tensor`` reads the bits of a number to find its binade, and looks at the data
to choose the quickest way. Neither can be exported. Here the binade comes from a
logarithm, corrected by comparing with the exact powers of two beside it, so the values
are the same, bit for bit.
"""

from __future__ import annotations

import copy
import math
from typing import Any

import torch
from torch import Tensor

from roundoff.errors import QuantizationError
from roundoff.formats import (
    BlockFormat,
    Format,
    Granularity,
    PerGroup,
    PerTensor,
    PerToken,
    RoundingMode,
    ScaleRule,
)

__all__ = ["plainly", "rounded"]


def plainly(x: Tensor, quantizer: Any) -> Tensor:
    """Compute what ``quantizer(x)`` gives for finite ``x``, in arithmetic that can be exported.

    Raises ``QuantizationError`` for a dynamic quantizer whose blocks do not divide the
    axis.
    """
    fmt: Format = quantizer.fmt
    exact = getattr(quantizer, "exact", None)
    if exact is not None:  # some channels stay as they are
        axis = quantizer.operand.reduce % x.ndim
        kept = (
            torch.zeros(x.shape[axis], dtype=torch.bool)
            .index_fill(0, exact, True)
            .view(-1, *[1] * (x.ndim - 1 - axis))
        )
        rest = copy.copy(quantizer)
        rest._buffers = {**quantizer._buffers, "exact": None}
        return torch.where(kept, x, plainly(torch.where(kept, 0.0, x), rest))
    if not quantizer.dynamic:
        qparams = quantizer.qparams()
        shape = (
            x.shape
            if qparams.granularity is None
            else qparams.granularity.split(x.shape)[0]
        )
        return _affine(
            x.reshape(shape), qparams.scale, qparams.zero_point, fmt
        ).reshape(x.shape)
    operand = quantizer.operand
    granularity = quantizer.granularity
    if granularity is not None and not isinstance(fmt, BlockFormat):
        axis = operand.reduce if isinstance(granularity, PerToken) else -1
        moved = x.movedim(axis, -1)
        return _dynamic(moved, granularity, fmt).movedim(-1, axis)
    how = None if fmt.execution is None else fmt.execution.activation
    fmt = fmt.of_activations if operand.role == "activation" else fmt
    granularity = PerTensor()
    if how in ("block", "group"):
        size = fmt.block_size if isinstance(fmt, BlockFormat) else fmt.group_size
        axis = operand.reduce if -x.ndim <= operand.reduce < x.ndim else -1
        if x.shape[axis] % size:
            raise QuantizationError(
                "blocks that do not divide the axis cannot be exported",
                where=quantizer.name,
                expected=f"a multiple of {size}",
                got=str(x.shape[axis]),
            )
        granularity = PerGroup(size, axis)
    elif how == "exact":
        return rounded(x, fmt)
    return _dynamic(x, granularity, fmt)


def _dynamic(x: Tensor, granularity: Granularity, fmt: Format) -> Tensor:
    """With the scale of the tensor's own range."""
    shape, dims = granularity.split(x.shape)
    view = x.reshape(shape)
    scale, zero_point = _chosen(
        view.amin(dims, keepdim=True), view.amax(dims, keepdim=True), fmt
    )
    return _affine(view, scale, zero_point, fmt).reshape(x.shape)


def _affine(
    view: Tensor, scale: Tensor, zero_point: Tensor | None, fmt: Format
) -> Tensor:
    if zero_point is None:
        return rounded(view / torch.where(scale == 0, 1.0, scale), fmt) * scale
    codes = (torch.round(view / scale) + zero_point).clamp(
        fmt.min_finite, fmt.max_finite
    )
    return (codes - zero_point) * scale


def _chosen(low: Tensor, high: Tensor, fmt: Format) -> tuple[Tensor, Tensor | None]:
    """Scale and zero point as ``choose_qparams`` and ``block_scale`` choose them, from
    the smallest and largest value.
    """
    tiny = torch.finfo(low.dtype).tiny
    amax = torch.maximum(high, -low)
    if isinstance(fmt, BlockFormat):
        return _block_scale(amax, fmt), None
    if fmt.symmetric:
        scale = amax / (fmt.scale_target or fmt.max_finite)
        return torch.where(scale > 0, scale.clamp(min=tiny), 1.0), None
    levels = fmt.max_finite - fmt.min_finite
    low = low.clamp(max=0.0)
    high = high.clamp(min=0.0)
    scale = high / levels - low / levels
    scale = torch.where(scale > 0, scale.clamp(min=tiny), 1.0)
    return scale, torch.round(fmt.min_finite - low / scale).clamp(
        fmt.min_finite, fmt.max_finite
    )


def _block_scale(amax: Tensor, fmt: BlockFormat) -> Tensor:
    scales = fmt.scale_format
    if fmt.tensor_scale:
        whole = amax.amax(tuple(range(amax.ndim))) / (
            scales.max_finite * fmt.max_finite
        )
        whole = torch.where(
            whole > 0, whole.clamp(min=torch.finfo(amax.dtype).tiny), 1.0
        )
        return rounded(amax / fmt.max_finite / whole, scales) * whole
    lowest = max(scales.emin + fmt.emax, -126)
    index, powers = _binade(amax, lowest, min(scales.emax + fmt.emax, 127))
    if fmt.scale_rule is not ScaleRule.FLOOR:
        limit = (
            1.0
            if fmt.scale_rule is ScaleRule.CEIL
            else 2 * math.frexp(fmt.max_finite)[0]
        )
        index = (index + (amax > powers[index] * limit).to(torch.int64)).clamp(
            max=len(powers) - 1
        )
    scale = powers[index] * 2.0**-fmt.emax
    return torch.where(amax == 0, 2.0**scales.emin, scale)


def rounded(x: Tensor, fmt: Format) -> Tensor:
    """Round ``x`` to the values of ``fmt``; what is out of range saturates."""
    if fmt.max_finite > torch.finfo(x.dtype).max:
        return x
    quantum: Tensor | float | None = fmt.one_quantum
    if quantum is None:
        if not fmt.has_subnormals:
            raise QuantizationError(
                "a format without numbers below the smallest normal", got=fmt.name
            )
        lowest = max(fmt.emin, -126)
        highest = min(fmt.emax, 127)
        index, _ = _binade(x.abs(), lowest, highest)
        quanta = [
            math.ldexp(1.0, fmt.quantum_exponent(e)) for e in range(lowest, highest + 1)
        ]
        quantum = torch.tensor(quanta, dtype=x.dtype, device=x.device)[index]
    y = x / quantum
    if fmt.rounding is RoundingMode.NEAREST_AWAY:
        y = torch.floor(y.abs() + (0.5 - torch.finfo(y.dtype).eps / 4)) * torch.sign(y)
    else:
        y = torch.round(y)
    y = (y * quantum).clamp(min(fmt.min_finite, 0.0), fmt.max_finite)
    if not fmt.has_zero:  # binary: zero counts as positive
        y = (
            torch.where(x < 0, -fmt.smallest_normal, fmt.smallest_normal)
            if fmt.width == 1
            else y
        )
    return y


def _binade(x: Tensor, lowest: int, highest: int) -> tuple[Tensor, Tensor]:
    """Find the index of the power of two below each ``x``, and the powers.

    They are ``2**lowest .. 2**highest``; beyond them the nearest counts.
    """
    powers = torch.tensor(
        [math.ldexp(1.0, e) for e in range(lowest, highest + 1)],
        dtype=x.dtype,
        device=x.device,
    )
    x = torch.where(torch.isnan(x), 1.0, x)
    guess = torch.floor(torch.log2(x.clamp(2.0**lowest, 2.0**highest))).clamp(
        lowest, highest
    )
    index = (guess - lowest).to(torch.int64)
    last = highest - lowest
    index = index + ((x >= powers[(index + 1).clamp(max=last)]) & (index < last)).to(
        torch.int64
    )
    return index - ((x < powers[index]) & (index > 0)).to(torch.int64), powers
