"""The slow oracle: one number at a time, in exact arithmetic, written to be read.

The tensor twin takes the same steps in the same order; tests hold them together.
"""

from __future__ import annotations

import math
from fractions import Fraction
from functools import lru_cache

from roundoff.errors import FormatError
from roundoff.formats.types import Layout, NumberFormat, Rounding, unsupported


def round_scalar(
    value: float, fmt: NumberFormat, *, rounding: Rounding | None = None, saturate: bool | None = None, uniform: float = 0.5
) -> float:
    """``value`` rounded to a value of ``fmt`` (no scale).

    NaN stays NaN, in formats without NaN too. Infinity stays where the format has it and does not saturate, becomes
    the largest finite value where it saturates or has no NaN, else NaN. Magnitudes that round past the largest
    finite value are treated as infinity is. -0 becomes +0 where there is no -0, and 0 becomes the smallest value of
    the sign where there is no 0. A format without negative numbers turns them into NaN. ``uniform`` in [0, 1) is the
    random number of stochastic rounding.

    >>> from roundoff.formats import parse_format
    >>> round_scalar(1.3, parse_format("fp4_e2m1")), round_scalar(1e9, parse_format("fp8_e4m3fn"), saturate=False)
    (1.5, nan)
    """
    rounding = fmt.rounding if rounding is None else rounding
    saturate = fmt.saturate if saturate is None else saturate
    if math.isnan(value):
        return math.nan
    negative = math.copysign(1.0, value) < 0
    unsigned = fmt.layout is Layout.EXPONENT
    if unsigned and negative:
        return math.nan
    largest = -fmt.min_finite if negative else fmt.max_finite
    if math.isinf(value):
        magnitude = math.inf
    else:
        exact = abs(Fraction(value))
        exponent = math.frexp(value)[1] - 1 if value else fmt.emin
        quantum = Fraction(2) ** fmt.quantum_exponent(exponent)
        significand = _round_integer(exact / quantum, rounding, uniform)
        if not fmt.has_zero:
            significand = max(significand, 1)
        rounded = significand * quantum
        magnitude = float(rounded) if rounded <= Fraction(largest) else math.inf
    if magnitude == math.inf:
        if saturate or not (fmt.has_infinity or fmt.has_nan):
            magnitude = largest
        elif not fmt.has_infinity:
            return math.nan
    if magnitude == 0 and not fmt.has_negative_zero:
        return 0.0
    if not fmt.has_zero and value == 0:
        return magnitude
    return -magnitude if negative else magnitude


def _round_integer(value: Fraction, rounding: Rounding, uniform: float) -> int:
    below = value.numerator // value.denominator
    rest = value - below
    if rounding is Rounding.TOWARD_ZERO:
        return below
    if rounding is Rounding.STOCHASTIC:
        return below + int(rest + Fraction(uniform) >= 1)
    if rest == Fraction(1, 2):
        return below + 1 if rounding is Rounding.NEAREST_AWAY else below + below % 2
    return below + int(rest > Fraction(1, 2))


def decode(code: int, fmt: NumberFormat) -> float:
    """The value of a code, for formats of up to 16 bits. Raises ``FormatError`` for a code out of range.

    >>> from roundoff.formats import parse_format
    >>> decode(0x7E, parse_format("fp8_e4m3fn")), decode(0xFF, parse_format("int8"))
    (448.0, -1.0)
    """
    bits = int(fmt.bits)
    if bits > 16:
        raise unsupported(fmt, "decoding codes of more than 16 bits")
    if not 0 <= code < 2**bits:
        raise FormatError(f"code {code} is out of range", where=fmt.name, expected=f"0 <= code < 2**{bits}", got=str(code))
    special = dict(fmt.special_codes)
    if code in special:
        return special[code]
    if fmt.layout is Layout.SIGN:
        return -1.0 if code else 1.0
    if fmt.layout is Layout.INTEGER:
        return float(code - 2**bits * (code >> (bits - 1))) * fmt.smallest_subnormal
    if fmt.layout is Layout.EXPONENT:
        return 2.0 ** (code - fmt.bias)
    sign = -1.0 if code >> (bits - 1) else 1.0
    magnitude = code & (2 ** (bits - 1) - 1)
    if fmt.layout is Layout.TAPERED:
        return sign * _decode_tapered(magnitude)
    fraction_bits = fmt.tapers[0][2]
    exponent, fraction = magnitude >> fraction_bits, magnitude & (2**fraction_bits - 1)
    if exponent == 0:
        return sign * fraction * 2.0 ** (fmt.emin - fraction_bits)
    return sign * (1 + fraction / 2**fraction_bits) * 2.0 ** (exponent - fmt.bias)


def _decode_tapered(magnitude: int) -> float:
    """HiFloat8, 7 bits below the sign: prefix (width of the exponent), exponent as sign and magnitude, fraction."""
    text = f"{magnitude:07b}"
    prefixes = (("11", 4), ("10", 3), ("01", 2), ("001", 1), ("0001", 0))
    for prefix, width in prefixes:
        if text.startswith(prefix):
            rest = text[len(prefix) :]
            exponent = 0
            if width:
                digits = "1" + rest[1:width]  # the leading 1 of the magnitude is implied
                exponent = int(digits, 2) * (-1 if rest[0] == "1" else 1)
            fraction = rest[width:]
            return (1 + int(fraction, 2) / 2 ** len(fraction)) * 2.0**exponent
    subnormal = int(text[4:], 2)
    return 2.0 ** (subnormal - 23) if subnormal else 0.0


@lru_cache(maxsize=64)
def all_values(fmt: NumberFormat) -> tuple[float, ...]:
    """The value of every code, in code order, for formats of up to 16 bits.

    >>> from roundoff.formats import parse_format
    >>> all_values(parse_format("fp4_e2m1"))[:8]
    (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)
    """
    return tuple(decode(code, fmt) for code in range(2 ** int(fmt.bits)))


def encode(value: float, fmt: NumberFormat) -> int:
    """The code of a value of ``fmt``; of several NaN codes the lowest. Raises ``FormatError`` for any other value."""
    for code, candidate in enumerate(all_values(fmt)):
        same_sign = math.copysign(1.0, candidate) == math.copysign(1.0, value)
        if (candidate == value and same_sign) or (math.isnan(candidate) and math.isnan(value)):
            return code
    raise FormatError(f"{value!r} is no value of {fmt.name}", where=fmt.name, do="round it first: round_scalar")
