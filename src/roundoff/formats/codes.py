"""Codes: the bit patterns of a format's values, for every layout, in exact arithmetic."""

from __future__ import annotations

import math
from functools import lru_cache

from roundoff.errors import FormatError
from roundoff.formats.types import Format, Layout

__all__ = ["all_values", "decode"]

#: HiFloat8's prefix codes: dot bits, then the width of the exponent field.
_DOTS = (("11", 4), ("10", 3), ("01", 2), ("001", 1), ("0001", 0))


def decode(code: int, fmt: Format) -> float:
    """Return the value of a code: an element's, without any scale.

    NaN and Inf codes give nan and inf.

    Codes above the largest finite value are Inf (the first one, where the format has
    Inf) or NaN.

    Raises:
        FormatError: the code is not in ``[0, 2**width)``, or is the one that a narrow
            range leaves out.

    Example:
        >>> from roundoff.formats import parse_format
        >>> decode(0x7E, parse_format("fp8_e4m3fn")), decode(0xFF, parse_format("int8"))
        (448.0, -1.0)
    """
    if not 0 <= code < 1 << fmt.width:
        raise FormatError(
            f"{fmt.name} has no such code",
            expected=f"0 <= code < {1 << fmt.width}",
            got=str(code),
            do="give the bit pattern as an unsigned integer",
        )
    if code == fmt.nan_code:
        return math.nan
    if fmt.layout is Layout.TWOS_COMPLEMENT:
        return _twos_complement(code, fmt)
    sign_bit = fmt.width - 1 if fmt.min_finite < 0 else fmt.width
    negative = bool(code >> sign_bit)
    magnitude = code & ((1 << sign_bit) - 1)
    value = _magnitude(magnitude, fmt)
    if value > fmt.max_finite:
        first_above = _magnitude(magnitude - 1, fmt) == fmt.max_finite
        if not (fmt.has_inf and first_above):
            return math.nan
        value = math.inf
    return -value if negative else value


def _twos_complement(code: int, fmt: Format) -> float:
    integer = code - ((code >> (fmt.width - 1)) << fmt.width)
    value = math.ldexp(integer, fmt.quantum_exponent(fmt.emin))
    if value < fmt.min_finite:
        raise FormatError(
            f"the narrow range of {fmt.name} leaves out this code",
            expected=f"a value >= {fmt.min_finite:g}",
            got=f"{code} ({value:g})",
            do="use a format with narrow_range=False",
        )
    return value


def _magnitude(code: int, fmt: Format) -> float:
    """Exponent field and fraction field; inf where Python's float ends (fp64's highest
    exponent).
    """
    if fmt.layout is Layout.HIF8:
        return _hif8(code)
    exponent = (code >> fmt.fraction_bits) - fmt.has_subnormals
    significand = code & ((1 << fmt.fraction_bits) - 1)
    if exponent < 0:
        exponent = 0
    else:
        significand += 1 << fmt.fraction_bits
    if exponent + fmt.emin > 1023:
        return math.inf if significand == 1 << fmt.fraction_bits else math.nan
    return math.ldexp(significand, exponent + fmt.emin - fmt.fraction_bits)


def _hif8(code: int) -> float:
    """Decode the seven bits below the sign: dot, exponent (sign, then the magnitude
    below its leading 1), fraction.
    """
    text = f"{code:07b}"
    for dot, width in _DOTS:
        if text.startswith(dot):
            after_dot = text[len(dot) :]
            field = after_dot[:width]
            fraction = after_dot[width:]
            exponent = int("1" + field[1:], 2) if width else 0
            if field.startswith("1"):
                exponent = -exponent
            return math.ldexp(int("1" + fraction, 2), exponent - len(fraction))
    return math.ldexp(1.0, code - 23) if code else 0.0


@lru_cache(maxsize=64)
def all_values(fmt: Format) -> list[float]:
    """Return the value of every code, in the order of codes, for formats of at most 16
    bits; treat it as read-only.

    The code that a narrow range leaves out is left out here too.

    Raises:
        FormatError: the format has more than 16 bits.

    Example:
        >>> from roundoff.formats import parse_format
        >>> all_values(parse_format("fp4_e2m1"))[:8], all_values(parse_format("int2"))
        ([0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0], [0.0, 1.0, -1.0])
    """
    if fmt.width > 16:
        raise FormatError(
            f"{fmt.name} has too many values to list",
            expected="a format of at most 16 bits",
            got=f"{fmt.width} bits",
        )
    narrow = fmt.layout is Layout.TWOS_COMPLEMENT and fmt.min_finite == -fmt.max_finite
    left_out = 1 << (fmt.width - 1) if narrow else -1
    return [decode(code, fmt) for code in range(1 << fmt.width) if code != left_out]
