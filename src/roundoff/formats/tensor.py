"""The fast twin of ``scalar.py``: whole tensors, no loop over elements; scales, zero points and blocks.

A plain cast that torch has (bf16, fp16, the 8-bit floats; nearest-even) is done by torch; everything else takes the
steps of the oracle with tensors.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache

import torch
from torch import Tensor

from roundoff.errors import FormatError
from roundoff.formats.granularity import Granularity, PerGroup, PerTensor, grouped
from roundoff.formats.types import BlockFormat, Format, Layout, NumberFormat, Rounding, ScaleRule


@dataclass(frozen=True)
class QParams:
    """Scale and zero point: ``real = scale * (code - zero_point)``; shapes broadcast against the grouped tensor."""

    scale: Tensor
    zero_point: Tensor | None = None


def round_tensor(
    x: Tensor,
    fmt: Format,
    *,
    granularity: Granularity | None = None,
    rounding: Rounding | None = None,
    saturate: bool | None = None,
    qparams: QParams | None = None,
    scale_rule: ScaleRule | None = None,
    generator: torch.Generator | None = None,
) -> Tensor:
    """``x`` rounded to ``fmt``, in ``x``'s shape and dtype (fake quantization); ``x`` is not changed.

    Without ``granularity`` and ``qparams``, a plain cast: the values of the format itself. With ``granularity``, scales
    are chosen from ``x`` (``choose_qparams``), values divided by them, rounded and multiplied back; ``qparams`` gives
    them. Block formats scale by blocks along the last axis, or along the axis of a ``PerGroup``.

    NaN stays NaN. Without a scale, Inf and values past the largest follow ``saturate`` (the format's own habit by
    default), see ``round_scalar``; with a scale they saturate, and scales are chosen from the finite values. All-zero
    groups get scale 1; an empty tensor stays empty. bf16 and fp16 tensors are computed in fp32, fp64 in fp64.

    Raises ``FormatError`` for tensors that are not floating point and for sizes that do not divide.

    >>> from roundoff.formats import parse_format
    >>> round_tensor(torch.tensor([0.1, -3.0]), parse_format("bf16")).tolist()
    [0.10009765625, -3.0]
    >>> round_tensor(torch.tensor([0.1, -3.0]), parse_format("int8"), granularity=PerTensor())[1].item()
    -3.0
    """
    if not x.is_floating_point():
        raise FormatError("only floating-point tensors are rounded", where=fmt.name, got=str(x.dtype))
    if x.numel() == 0:
        return x.clone()
    work = x if x.dtype in (torch.float32, torch.float64) else x.float()
    if isinstance(fmt, BlockFormat):
        result = _round_blocks(work, fmt, granularity, rounding, scale_rule or fmt.scale_rule, generator)
    elif not isinstance(fmt, NumberFormat):
        raise FormatError("not a format that holds values", where=fmt.name)
    elif granularity is None and qparams is None:
        if fmt.layout is Layout.INTEGER:
            raise FormatError(f"{fmt.name} needs a scale", where=fmt.name, expected="a granularity or qparams",
                              do="round_tensor(x, fmt, granularity=PerTensor())")  # fmt: skip
        result = cast(work, fmt, rounding=rounding, saturate=saturate, generator=generator)
    else:
        view, axes = grouped(work, granularity or PerTensor())
        chosen = qparams or _choose(view, axes, fmt, scale_rule or fmt.scale_rule)
        result = fake_quantize(view, chosen, fmt, rounding=rounding, generator=generator).reshape(x.shape)
    return result if result.dtype == x.dtype else result.to(x.dtype)


def choose_qparams(x: Tensor, fmt: NumberFormat, granularity: Granularity) -> QParams:
    """Scales (and zero points) of ``x`` from its finite values, by the format's scale rule.

    Symmetric: ``scale = amax / max_finite``. Asymmetric (ONNX DynamicQuantizeLinear): the range is widened to hold 0,
    ``scale = (max - min) / (codes - 1)``, ``zero_point = round(lowest code - min / scale)``, saturated.
    """
    view, axes = grouped(x, granularity)
    return _choose(view, axes, fmt, fmt.scale_rule)


def _choose(view: Tensor, axes: tuple[int, ...], fmt: NumberFormat, rule: ScaleRule) -> QParams:
    largest = view.abs().amax(axes, keepdim=True)
    if not bool(largest.isfinite().all()):
        view = view.where(view.isfinite(), 0.0)
        largest = view.abs().amax(axes, keepdim=True)
    if rule is ScaleRule.MEAN_ABS:
        return QParams(_nonzero(view.abs().mean(axes, keepdim=True), largest))
    if fmt.symmetric:
        return QParams(_nonzero(largest / fmt.max_finite, largest))
    low = view.amin(axes, keepdim=True).clamp_(max=0.0)
    high = view.amax(axes, keepdim=True).clamp_(min=0.0)
    scale = _nonzero((high - low) / (fmt.max_finite - fmt.min_finite), largest)
    zero_point = (fmt.min_finite - low / scale).round_().clamp_(fmt.min_finite, fmt.max_finite)
    return QParams(scale, zero_point)


def _nonzero(scale: Tensor, largest: Tensor) -> Tensor:
    """Scale 1 where all values are zero; a scale that underflowed becomes the smallest normal number."""
    scale = scale.masked_fill_(largest == 0, 1.0)
    return scale.clamp_(min=torch.finfo(scale.dtype).tiny)


def fake_quantize(
    x: Tensor, qparams: QParams, fmt: NumberFormat, *, rounding: Rounding | None = None,
    generator: torch.Generator | None = None,
) -> Tensor:  # fmt: skip
    """Quantize and dequantize: ``(saturate(round(x / scale) + zero_point) - zero_point) * scale``, the order of ONNX
    QuantizeLinear (divide, round, then add)."""
    scaled = x / qparams.scale
    mode = fmt.rounding if rounding is None else rounding
    if fmt.layout is Layout.INTEGER and fmt.emin - fmt.tapers[0][2] == 0:
        codes = _round_(scaled, mode, generator)
        if qparams.zero_point is not None:
            codes.add_(qparams.zero_point).clamp_(fmt.min_finite, fmt.max_finite).sub_(qparams.zero_point)
        else:
            codes.clamp_(fmt.min_finite, fmt.max_finite).add_(0.0)  # an integer has no -0
        return codes.mul_(qparams.scale)
    return cast(scaled, fmt, rounding=mode, saturate=True, generator=generator).mul_(qparams.scale)


def cast(
    x: Tensor, fmt: NumberFormat, *, rounding: Rounding | None = None, saturate: bool | None = None,
    generator: torch.Generator | None = None,
) -> Tensor:  # fmt: skip
    """A new tensor with the values of ``fmt`` nearest to fp32 or fp64 ``x``, without a scale; see ``round_scalar``."""
    mode = fmt.rounding if rounding is None else rounding
    saturate = fmt.saturate if saturate is None else saturate
    dtype = fmt.torch_dtype
    if dtype == x.dtype or (fmt.name == "fp64" and not saturate):
        return x.clone() if not saturate else x.clamp(fmt.min_finite, fmt.max_finite)
    if fmt.name == "fp32" and x.dtype == torch.float32:
        return x.clone()
    fast = mode is Rounding.NEAREST_EVEN and dtype is not None and fmt.has_zero and x.dtype == torch.float32
    if fast and (saturate or fmt.has_infinity) and dtype is not None:
        # torch's own habit out of range differs between the 8-bit types, so the range is closed first
        if saturate:
            return x.clamp(fmt.min_finite, fmt.max_finite).to(dtype).to(x.dtype)
        if fmt.bits == 16:
            return x.to(dtype).to(x.dtype)
    return _cast_by_steps(x, fmt, mode, saturate, generator)


def _cast_by_steps(
    x: Tensor, fmt: NumberFormat, mode: Rounding, saturate: bool, generator: torch.Generator | None
) -> Tensor:
    # scaling by a power of two is exact as long as nothing over- or underflows on the way
    narrow = fmt.quantum_exponent(fmt.emin) > -100 and fmt.emax < 100 and x.dtype == torch.float32
    wide = x if narrow and not _has_subnormals(fmt) else x.double()
    finite = wide.where(wide.isfinite(), 0.0)
    magnitude = finite.abs()
    exponent = torch.frexp(magnitude).exponent - 1
    exponent = exponent.masked_fill_(magnitude == 0, fmt.emin).clamp_(fmt.emin, fmt.emax)
    quantum_exponent = _quantum_table(fmt, x.device)[exponent - fmt.emin]
    significand = _round_(torch.ldexp(magnitude, -quantum_exponent), mode, generator)
    if not fmt.has_zero:
        significand.clamp_(min=1.0)
    rounded = torch.ldexp(significand, quantum_exponent)
    negative = torch.signbit(wide)
    largest = torch.where(negative, -fmt.min_finite, fmt.max_finite).to(wide.dtype)
    past = (rounded > largest) | wide.isinf()
    if saturate or not (fmt.has_infinity or fmt.has_nan):
        rounded = rounded.where(~past, largest)
    else:
        rounded = rounded.masked_fill_(past, torch.inf if fmt.has_infinity else torch.nan)
    if not fmt.has_zero:
        negative = negative & (wide != 0)
    result = torch.where(negative, -rounded, rounded)
    if not fmt.has_negative_zero:
        result = result.masked_fill_(rounded == 0, 0.0)
    if fmt.layout is Layout.EXPONENT:
        result = result.masked_fill_(torch.signbit(wide), torch.nan)
    return result.masked_fill_(wide.isnan(), torch.nan).to(x.dtype)


def _has_subnormals(fmt: NumberFormat) -> bool:
    return fmt.emin <= -126


def _round_(x: Tensor, mode: Rounding, generator: torch.Generator | None) -> Tensor:
    """Round to integers in place."""
    if mode is Rounding.NEAREST_EVEN:
        return x.round_()
    if mode is Rounding.TOWARD_ZERO:
        return x.trunc_()
    if mode is Rounding.STOCHASTIC:
        uniform = torch.rand(x.shape, generator=generator, dtype=x.dtype, device=x.device)
        below = x.floor()
        return below.add_((x - below + uniform >= 1).to(x.dtype))
    whole = x.trunc()
    return whole.add_(((x - whole).abs() >= 0.5).to(x.dtype).copysign_(x))


@lru_cache(maxsize=128)
def _quantum_table(fmt: NumberFormat, device: torch.device) -> Tensor:
    exponents = range(fmt.emin, fmt.emax + 1)
    return torch.tensor([fmt.quantum_exponent(e) for e in exponents], dtype=torch.int32, device=device)


def _round_blocks(
    x: Tensor, fmt: BlockFormat, granularity: Granularity | None, rounding: Rounding | None, rule: ScaleRule,
    generator: torch.Generator | None,
) -> Tensor:  # fmt: skip
    along = PerGroup(fmt.block_size, granularity.axis if isinstance(granularity, PerGroup) else -1)
    view, axes = grouped(x, along)
    scale = block_scales(view, axes, fmt, rule)
    result = view / scale
    saturated = cast(result, fmt.element, rounding=rounding, saturate=True, generator=generator)
    return saturated.mul_(scale).reshape(x.shape)


def block_scales(view: Tensor, axes: tuple[int, ...], fmt: BlockFormat, rule: ScaleRule) -> Tensor:
    """The scale of each block of a grouped tensor, ``keepdim`` over ``axes``; a power of two for the MX formats.

    Blocks of zeros get the smallest scale there is (its product with zero is zero). Scales outside the range of the
    scale format saturate.
    """
    finite = view.where(view.isfinite(), 0.0) if not bool(view.isfinite().all()) else view
    amax = finite.abs().amax(axes, keepdim=True)
    element, largest = fmt.element, fmt.element.max_finite
    if fmt.tensor_scale:
        overall = amax.amax() / (largest * fmt.scale_format.max_finite)
        overall = overall if bool(overall > 0) else torch.ones_like(overall)
        scale = cast(amax / largest / overall, fmt.scale_format, saturate=True)
        # a block too small for the scale format would be divided by zero: it takes the smallest scale
        return scale.clamp_(min=fmt.scale_format.smallest_subnormal).mul_(overall)
    if rule is ScaleRule.RCEIL:
        mantissa, exponent = torch.frexp(amax / largest)
        exponent = exponent - (mantissa == 0.5).to(exponent.dtype)
    else:
        mantissa, exponent = torch.frexp(amax)
        top = 1 if rule is ScaleRule.CEIL else 0
        lower = 1 - top * (mantissa > 0.5).to(exponent.dtype)
        exponent = exponent - lower - (element.emax if element.layout is not Layout.INTEGER else 0)
    exponent = exponent.masked_fill_(amax == 0, -127).clamp_(-127, 127)
    return torch.ldexp(torch.ones_like(amax, dtype=torch.float64), exponent).to(view.dtype)
