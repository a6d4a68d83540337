"""The slow oracle: one number at a time, in exact arithmetic, written to be read.

``rounding.py``, ``affine.py`` and ``block.py`` take the same steps in the same order with the same names. Where they
compute in fp32, this rounds to fp32, once per operation.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from fractions import Fraction

from roundoff.formats.named import FORMATS
from roundoff.formats.types import BlockFormat, Format, RoundingMode, ScaleRule

__all__ = ["fake_quantize_scalar", "round_block_scalar", "round_scalar"]

_FP32 = FORMATS["fp32"]


def round_scalar(
    value: float | Fraction,
    fmt: Format,
    *,
    rounding: RoundingMode | None = None,
    saturate: bool | None = None,
    draw: float = 0.5,
) -> float:
    """``value`` rounded to a value of ``fmt`` without a scale; of a block format, to a value of its elements.

    NaN stays NaN, also in formats without one. What rounds past the largest finite value, and Inf, becomes that value
    if ``saturate``, else Inf, else NaN. -0 becomes +0 where there is no -0. Without a zero, what would round to zero
    becomes the smallest magnitude of its sign (+ for both zeros); without negative values, those become NaN.

    Args:
        value: a float, or an exact fraction.
        fmt: the format.
        rounding: by default the format's own.
        saturate: by default the format's own.
        draw: for stochastic rounding, a uniform draw in [0, 1); away from zero if it is below the remainder.

    Raises:
        FormatError: ``saturate=False`` for a format without Inf and NaN.

    Example:
        >>> from roundoff.formats import parse_format
        >>> round_scalar(1.3, parse_format("fp4_e2m1")), round_scalar(1e9, parse_format("fp8_e4m3fn"), saturate=False)
        (1.5, nan)
    """
    rounding = rounding or fmt.rounding
    saturate = fmt.saturates(saturate)
    if math.isnan(value) or (value < 0 and fmt.min_finite > 0):
        return math.nan
    negative = value < 0 or (fmt.has_negative_zero and math.copysign(1.0, value) < 0)
    largest = -fmt.min_finite if negative else fmt.max_finite
    rounded: float | Fraction
    if math.isinf(value):
        rounded = math.inf
    else:
        exact = abs(Fraction(value))
        quantum = Fraction(2) ** fmt.quantum_exponent(
            _floor_log2(exact) if exact else fmt.emin
        )
        significand = exact / quantum
        rounded = _to_integer(significand, rounding, draw) * quantum
        if rounding is RoundingMode.TOWARD_ZERO:
            rounded = min(rounded, Fraction(largest))
    # out of range
    if rounded > largest:
        rounded = largest if saturate else math.inf if fmt.has_inf else math.nan
    if not fmt.has_zero and rounded < fmt.smallest_normal:
        rounded = fmt.smallest_normal
    if rounded == 0 and not fmt.has_negative_zero:
        negative = False
    return -float(rounded) if negative else float(rounded)


def fake_quantize_scalar(
    value: float,
    scale: float,
    fmt: Format,
    *,
    zero_point: int | None = None,
    rounding: RoundingMode | None = None,
    draw: float = 0.5,
) -> float:
    """``value`` quantized with a positive scale and dequantized in fp32: divide, round, add the zero point, saturate.

    Example:
        >>> from roundoff.formats import parse_format
        >>> fake_quantize_scalar(0.3, 0.25, parse_format("int8")), fake_quantize_scalar(9.0, 0.25, parse_format("int4"))
        (0.25, 1.75)
    """
    if math.isnan(value):
        return math.nan
    significant = (
        value
        if math.isinf(value)
        else round_scalar(Fraction(value) / Fraction(scale), _FP32)
    )
    if zero_point is None:
        rounded = round_scalar(
            significant, fmt, rounding=rounding, saturate=True, draw=draw
        )
        return round_scalar(Fraction(rounded) * Fraction(scale), _FP32)
    if math.isinf(significant):
        code = fmt.max_finite if significant > 0 else fmt.min_finite
    else:
        magnitude = _to_integer(
            abs(Fraction(significant)), rounding or fmt.rounding, draw
        )
        code = min(
            max(
                (-magnitude if significant < 0 else magnitude) + zero_point,
                fmt.min_finite,
            ),
            fmt.max_finite,
        )
    return round_scalar(Fraction(code - zero_point) * Fraction(scale), _FP32)


def round_block_scalar(
    values: Sequence[float],
    fmt: BlockFormat,
    *,
    tensor_amax: float | None = None,
    rounding: RoundingMode | None = None,
) -> list[float]:
    """One block of fp32 values rounded to ``fmt``: the scale from the largest finite magnitude, elements saturated.

    Args:
        values: a block, of any length.
        fmt: the format.
        tensor_amax: the largest finite magnitude of the whole tensor, for NVFP4; by default that of the block.
        rounding: by default the format's own.

    Example:
        >>> from roundoff.formats import parse_format
        >>> round_block_scalar([1.0, 7.0, -0.2], parse_format("mxfp4"))
        [1.0, 6.0, -0.0]
    """
    amax = max((abs(v) for v in values if math.isfinite(v)), default=0.0)
    scale = _block_scale(amax, amax if tensor_amax is None else tensor_amax, fmt)
    rounded = []
    for value in values:
        if not math.isfinite(value):
            y = value
        else:
            y = round_scalar(Fraction(value) / scale, _FP32) if scale else value
            y = math.copysign(y, value)
        element = round_scalar(y, fmt, rounding=rounding, saturate=True)
        product = (
            element
            if math.isnan(element)
            else round_scalar(Fraction(element) * scale, _FP32)
        )
        rounded.append(math.copysign(product, element))
    return rounded


def _block_scale(amax: float, tensor_amax: float, fmt: BlockFormat) -> Fraction:
    scale_format = fmt.scale_format
    if fmt.tensor_scale:
        largest = Fraction(scale_format.max_finite) * Fraction(fmt.max_finite)
        tensor_scale = round_scalar(Fraction(tensor_amax) / largest, _FP32)
        tensor_scale = (
            max(tensor_scale, _FP32.smallest_normal) if tensor_scale > 0 else 1.0
        )
        block = round_scalar(Fraction(amax) / Fraction(fmt.max_finite), _FP32)
        block = round_scalar(Fraction(block) / Fraction(tensor_scale), _FP32)
        block = round_scalar(block, scale_format, saturate=True)
        return Fraction(round_scalar(Fraction(block) * Fraction(tensor_scale), _FP32))
    if amax == 0:
        return Fraction(2) ** scale_format.emin
    exponent = _floor_log2(Fraction(amax)) - fmt.emax
    if fmt.scale_rule is ScaleRule.CEIL:
        exponent += Fraction(amax) > Fraction(2) ** (exponent + fmt.emax)
    elif fmt.scale_rule is ScaleRule.RCEIL:
        exponent += Fraction(amax) > Fraction(fmt.max_finite) * Fraction(2) ** exponent
    return Fraction(2) ** min(max(exponent, scale_format.emin), scale_format.emax)


def _to_integer(significand: Fraction, rounding: RoundingMode, draw: float) -> int:
    """A non-negative ``significand`` rounded to an integer."""
    lower = significand.numerator // significand.denominator
    rest = significand - lower
    if rounding is RoundingMode.TOWARD_ZERO:
        return lower
    if rounding is RoundingMode.STOCHASTIC:
        return lower + (Fraction(draw) < rest)
    if rest == Fraction(1, 2):
        return lower + (1 if rounding is RoundingMode.NEAREST_AWAY else lower % 2)
    return lower + (rest > Fraction(1, 2))


def _floor_log2(value: Fraction) -> int:
    exponent = value.numerator.bit_length() - value.denominator.bit_length()
    return exponent if Fraction(2) ** exponent <= value else exponent - 1
