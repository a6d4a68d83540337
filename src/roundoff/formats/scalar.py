"""The slow oracle: one number at a time, in exact arithmetic, written to be read.

``tensor.py``, ``affine.py`` and ``block.py`` take the same steps in the same order with the same names. Where they
compute in fp32, this rounds to fp32, exactly once per operation.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from fractions import Fraction

from roundoff.formats.named import FORMATS
from roundoff.formats.tensor import check_saturate
from roundoff.formats.types import BlockFormat, Format, Rounding, ScaleRule

__all__ = ["fake_quantize_scalar", "round_block_scalar", "round_scalar"]

_FP32 = FORMATS["fp32"]


def round_scalar(
    value: float | Fraction,
    fmt: Format,
    *,
    rounding: Rounding | None = None,
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
    saturate = check_saturate(fmt, saturate)
    if isinstance(value, float) and math.isnan(value):
        return math.nan
    negative = math.copysign(1.0, value) < 0
    if value < 0 and fmt.min_finite > 0:
        return math.nan
    if math.isinf(value):
        magnitude, largest = math.inf, -fmt.min_finite if negative else fmt.max_finite
    else:
        exact = abs(Fraction(value))
        quantum = Fraction(2) ** fmt.quantum_exponent(_floor_log2(exact) if exact else fmt.emin)
        significand = exact / quantum
        magnitude = float(min(_to_integer(significand, rounding or fmt.rounding, draw) * quantum, Fraction(2) ** 1023 * 2
                              - Fraction(2) ** 970)) if False else _to_integer(significand, rounding or fmt.rounding, draw) * quantum
    return magnitude
