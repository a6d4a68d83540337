"""Scales and zero points: choose them, and quantize and dequantize with them.

Convention of ONNX QuantizeLinear: ``code = saturate(round(x / scale) + zero_point)``,
that is divide (not multiply by the reciprocal, which differs at ties), round, then add;
and ``x ~ scale * (code - zero_point)``.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from roundoff.errors import FormatError
from roundoff.formats.granularity import Granularity, PerTensor
from roundoff.formats.rounding import (
    check_floating,
    round_values,
    to_integer,
    working_dtype,
)
from roundoff.formats.types import BlockFormat, Format, RoundingMode

__all__ = ["QParams", "choose_qparams", "dequantize", "fake_quantize", "quantize"]


@dataclass(frozen=True)
class QParams:
    """Scale and zero point, in fp32 (fp64 for fp64 tensors).

    Attributes:
        scale: broadcasts against the granularity's view of the tensor (see
            ``granularity.py``). One number fits a tensor of any rank.
        zero_point: the code of real 0, of the scale's shape; ``None`` means 0.
        granularity: which elements share them; ``None``: they broadcast against the
            tensor as it is.
    """

    scale: Tensor
    zero_point: Tensor | None = None
    granularity: Granularity | None = None

    def for_values(self, dtype: torch.dtype) -> tuple[Tensor, Tensor | None]:
        """Scale and zero point in a dtype; one number without axes, so that it fits a
        value and its flattened view.
        """
        zero_point = self.zero_point
        return _fitting(self.scale, dtype), (
            None if zero_point is None else _fitting(zero_point, dtype)
        )

    def view_shape(self, x: Tensor) -> Sequence[int]:
        """Return the shape in which ``x`` broadcasts against the scale."""
        if self.granularity is None:
            return x.shape
        return self.granularity.split(x.shape)[0]


def _fitting(numbers: Tensor, dtype: torch.dtype) -> Tensor:
    numbers = numbers.to(dtype)
    return numbers.reshape(()) if numbers.numel() == 1 else numbers


def choose_qparams(
    x: Tensor, fmt: Format, granularity: Granularity | None = None
) -> QParams:
    """Choose the scale (and zero point) that bring ``x`` into the range of ``fmt``.

    Symmetric formats: ``scale = amax / target``, target being the format's largest
    value (hif8: 15, see ``named.py``), or the mean magnitude for ternary and binary.
    Asymmetric ones: ``scale = (max - min) / levels`` with 0 inside ``[min, max]``, and
    ``zero_point = round(lowest code - min / scale)``, so that 0 is exact.

    A symmetric scale times the target never overflows; with asymmetric formats, numbers
    within a step of the dtype's largest may come back as Inf. NaN and Inf are left out
    of amax, min, max and mean. All-zero, empty and all-non-finite sets have scale 1. A
    scale below the smallest normal number of its dtype becomes that number, since a
    subnormal scale is inexact.

    Args:
        x: floating point, any shape.
        fmt: not a block format, whose scales are chosen inside ``round_tensor``.
        granularity: which elements share a scale; by default all.

    Raises:
        FormatError: ``x`` is no floating-point tensor, the granularity does not fit its
            shape, or a block format.

    Example:
        >>> from roundoff.formats import PerAxis, parse_format
        >>> q = choose_qparams(torch.tensor([[0.5, -2.54], [0.0, 0.0]]), parse_format("int8"), PerAxis(0))
        >>> q.scale.flatten().tolist(), q.zero_point
        ([0.01999..., 1.0], None)
        >>> q = choose_qparams(torch.tensor([-1.0, 4.1]), parse_format("int8_asym"))
        >>> q.scale.item(), q.zero_point.item()
        (0.0199..., -78.0)
    """
    check_floating(x)
    if isinstance(fmt, BlockFormat):
        raise FormatError(
            f"{fmt.name} has a scale rule of its own",
            expected="a format without blocks",
            got=fmt.name,
            do="call round_tensor, or choose the element format",
        )
    granularity = granularity or PerTensor()
    shape, dims = granularity.split(x.shape)
    view = x.detach().to(working_dtype(x)).reshape(shape)
    zero_point = None
    if fmt.scale_from == "absmean":
        scale = usable(mean_magnitude(view, dims))
    elif fmt.symmetric:
        scale = usable(_symmetric_scale(*extremes(view, dims), fmt))
    else:
        scale, zero_point = _asymmetric_qparams(*extremes(view, dims), fmt)
    return QParams(scale, zero_point, granularity)


def _symmetric_scale(low: Tensor, high: Tensor, fmt: Format) -> Tensor:
    target, limit = scale_limits(fmt, low.dtype)
    return (torch.maximum(high, -low) / target).clamp_(max=limit)


def scale_limits(fmt: Format, dtype: torch.dtype) -> tuple[float, float]:
    """Return what the largest magnitude is scaled to, and the largest scale of a dtype."""
    largest = torch.finfo(dtype).max
    target = min(fmt.scale_target or fmt.max_finite, largest)
    # Rounded up, the scale of the largest fp32 number would make it overflow on the way
    # back.
    return target, largest / target * (1 - 2.0**-23)


def _asymmetric_qparams(
    low: Tensor, high: Tensor, fmt: Format
) -> tuple[Tensor, Tensor]:
    levels = fmt.max_finite - fmt.min_finite
    low = low.clamp(max=0.0)
    high = high.clamp(min=0.0)
    scale = usable(high / levels - low / levels)  # high - low could overflow
    zero_point = (fmt.min_finite - low / scale).round_()
    return scale, zero_point.clamp_(fmt.min_finite, fmt.max_finite)


def usable(scale: Tensor) -> Tensor:
    """Make the scale normal and positive: 1 for 0, the smallest normal number for less."""
    tiny = torch.finfo(scale.dtype).tiny
    return torch.where(scale > 0, scale.clamp(min=tiny), 1.0)


def mean_magnitude(view: Tensor, dims: tuple[int, ...]) -> Tensor:
    """Mean magnitude of the finite values over ``dims`` (kept with length 1); 0 where
    there is none.
    """
    total = view.abs().sum(dims, keepdim=True)
    count: int | Tensor = view.numel() // max(total.numel(), 1)
    if count == 0:
        return total
    if bool(total.isfinite().all()):
        return total / count
    finite = view.isfinite()
    count = finite.sum(dims, keepdim=True).clamp_(min=1)
    # divided first, because the sum of large finite values overflows too
    return (torch.where(finite, view, 0.0).abs_() / count).sum(dims, keepdim=True)


def extremes(view: Tensor, dims: tuple[int, ...]) -> tuple[Tensor, Tensor]:
    """Smallest and largest finite value over ``dims`` (kept with length 1); 0 where
    there is none.
    """
    if view.numel() == 0:
        shape = [1 if i in dims else n for i, n in enumerate(view.shape)]
        return view.new_zeros(shape), view.new_zeros(shape)
    low = view.amin(dims, keepdim=True)
    high = view.amax(dims, keepdim=True)
    if not bool((low.isfinite() & high.isfinite()).all()):
        finite = view.isfinite()
        low = torch.where(finite, view, math.inf).amin(dims, keepdim=True)
        high = torch.where(finite, view, -math.inf).amax(dims, keepdim=True)
        empty = low > high
        low = low.masked_fill_(empty, 0.0)
        high = high.masked_fill_(empty, 0.0)
    return low, high


def fake_quantize(
    x: Tensor,
    qparams: QParams,
    fmt: Format,
    *,
    rounding: RoundingMode | None = None,
    saturate: bool | None = None,
    generator: torch.Generator | None = None,
) -> Tensor:
    """Quantize to ``fmt`` with ``qparams`` and dequantize: a new tensor of x's shape
    and dtype, without gradient.

    NaN stays NaN, also in formats without one. Inf saturates, as everything out of
    range does unless ``saturate`` is False (then Inf or NaN as the format has it).
    Computed in fp32 (fp64 for fp64 tensors). Zeros may have either sign.

    Raises:
        FormatError: ``x`` is no floating-point tensor, or qparams do not fit its shape,
            or a zero point is given for a format that is not an integer, or
            ``saturate=False`` for a format without Inf and NaN.

    Example:
        >>> from roundoff.formats import parse_format
        >>> x = torch.tensor([0.04, 0.06, 9.0, -9.0])
        >>> fake_quantize(x, QParams(torch.tensor(0.0625)), parse_format("int8"))
        tensor([ 0.0625,  0.0625,  7.9375, -7.9375])
    """
    check_floating(x)
    saturate = saturate is None or fmt.saturates(saturate)
    rounding = rounding or fmt.rounding
    view = x.detach().to(working_dtype(x)).reshape(qparams.view_shape(x))
    scale, zero_point = qparams.for_values(view.dtype)
    y = _divided(view, scale)
    if zero_point is None:
        out = y if fmt.has_zero and saturate else None
        y = round_values(y, fmt, rounding, saturate, generator, out=out)
        return y.mul_(scale).reshape(x.shape).to(x.dtype)
    if fmt.one_quantum != 1.0 or not fmt.has_zero or not saturate:
        raise FormatError(
            "a zero point needs an integer format that saturates",
            expected="int8_asym or another integer",
            got=fmt.name,
            do="leave the zero point out",
        )
    y = to_integer(y, rounding, generator, y)
    y.add_(zero_point).clamp_(fmt.min_finite, fmt.max_finite).sub_(zero_point)
    return y.mul_(scale).reshape(x.shape).to(x.dtype)


def _divided(view: Tensor, scale: Tensor) -> Tensor:
    if not _broadcasts(scale.shape, view.shape):
        raise FormatError(
            "the scale does not fit the tensor",
            expected=f"a shape that broadcasts to {tuple(view.shape)}",
            got=f"a scale of shape {tuple(scale.shape)}",
            do="choose_qparams gives scales of the right shape",
        )
    if scale.dim() and scale.device != view.device:
        raise FormatError(
            "the scale and the tensor are on different devices",
            expected=f"a scale on {view.device}",
            got=f"a scale on {scale.device}",
            do="move the scales to the tensor's device",
        )
    return view / scale


def _broadcasts(shape: Sequence[int], to: Sequence[int]) -> bool:
    """Return True if a tensor of ``shape`` can be expanded to the shape ``to``."""
    if len(shape) > len(to):
        return False
    pairs = zip(reversed(shape), reversed(to), strict=False)
    return all(size in (1, wanted) for size, wanted in pairs)


def quantize(x: Tensor, qparams: QParams, fmt: Format) -> Tensor:
    """Return the codes of ``x``, in its shape: int32 for an integer format, the
    format's own torch dtype for others (fp8).

    What :func:`fake_quantize` gives is ``scale * (code - zero_point)`` of these, so a
    tensor that lies on the grid has its own codes. What is out of range saturates.

    Raises:
        FormatError: as ``fake_quantize``; an integer format and a NaN, which has no
            code; a format without a torch dtype.

    Example:
        >>> from roundoff.formats import parse_format
        >>> quantize(torch.tensor([0.04, 0.06, 9.0, -9.0]), QParams(torch.tensor(0.0625)), parse_format("int8"))
        tensor([   1,    1,  127, -127], dtype=torch.int32)
    """
    # in fp64 the quotient of a value on the grid and its scale is its code but for a
    # last bit
    values = fake_quantize(x, qparams, fmt).double().reshape(qparams.view_shape(x))
    codes = values / qparams.scale.double()
    if fmt.one_quantum != 1.0:
        if fmt.torch_dtype is None:
            raise FormatError(
                f"torch has no dtype for codes of {fmt.name}",
                expected="an integer, or fp8",
                got=fmt.name,
            )
        return codes.reshape(x.shape).float().to(fmt.torch_dtype)
    if qparams.zero_point is not None:
        codes = codes + qparams.zero_point.double()
    if bool(codes.isnan().any()):
        raise FormatError(
            "NaN has no integer code",
            expected="finite values",
            got=f"{int(codes.isnan().sum())} NaN",
        )
    return codes.round_().reshape(x.shape).to(torch.int32)


def dequantize(codes: Tensor, qparams: QParams) -> Tensor:
    """Return the values of codes, ``scale * (code - zero_point)``, in the scale's dtype
    and the codes' shape.

    >>> dequantize(torch.tensor([1, -3]), QParams(torch.tensor(0.5), torch.tensor(1.0)))
    tensor([ 0., -2.])
    """
    values = codes.to(qparams.scale.dtype).reshape(qparams.view_shape(codes))
    if qparams.zero_point is not None:
        values = values - qparams.zero_point.to(values.dtype)
    return (values * qparams.scale).reshape(codes.shape)
