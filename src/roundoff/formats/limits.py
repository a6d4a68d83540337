"""Where a number format ends: the magnitudes from which rounding gives Inf, a subnormal
or zero, exactly.

>>> limits("fp16")
Limits(overflow=65520.0, overflow_tie=True, normal=6.1005353927612305e-05, zero=2.9802322387695312e-08, zero_tie=True)
>>> limits("fp8_e4m3fn").overflow, limits("fp8_e4m3fn").overflow_tie
(464.0, False)
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import lru_cache

from roundoff.errors import FormatError
from roundoff.formats.named import FORMATS, parse_format
from roundoff.formats.types import BlockFormat, Format, RoundingMode


@dataclass(frozen=True)
class Limits:
    """The bounds of one format for rounding to nearest; magnitudes, so both signs behave alike.

    ``overflow``: what lies above rounds past the largest finite value (to Inf or NaN,
    or to the largest value where the format saturates). It is the middle between the
    largest value and the one that would follow; ``overflow_tie`` says whether the
    middle itself goes up. ``normal``: what lies below rounds to a subnormal or to zero;
    the middle itself rounds to the smallest normal. ``zero``: what lies below rounds to
    zero: half the smallest positive value; ``zero_tie``: the half itself does too.
    """

    overflow: float
    overflow_tie: bool
    normal: float
    zero: float
    zero_tie: bool


@lru_cache
def limits(fmt: str | Format) -> Limits:
    """Return the bounds of a format.

    Raises ``FormatError`` for formats that are only used with a scale (integers,
    blocks).
    """
    fmt = parse_format(fmt)
    if not _has_limits(fmt):
        examples = ", ".join(plain_formats()[:6])
        raise FormatError(
            f"{fmt.name} is only used with a scale, so values neither overflow nor underflow in it by themselves",
            expected=f"a floating-point format, such as {examples}",
            got=fmt.name,
        )
    away = fmt.rounding is RoundingMode.NEAREST_AWAY
    step = math.ldexp(1.0, fmt.quantum_exponent(fmt.emax))
    last_is_odd = (fmt.max_finite / step) % 2 == 1
    smallest = fmt.smallest_subnormal or fmt.smallest_normal
    zero = smallest / 2
    return Limits(
        overflow=fmt.max_finite + step / 2,
        overflow_tie=away or last_is_odd,  # to even: an odd last significand goes up
        normal=zero if fmt.smallest_subnormal is None else fmt.smallest_normal - zero,
        zero=zero,
        zero_tie=not away,
    )


def _has_limits(fmt: Format) -> bool:
    scaled = isinstance(fmt, BlockFormat) or fmt.one_quantum is not None
    return fmt.has_zero and not scaled


def plain_formats() -> list[str]:
    """Return the names of the formats that have bounds of their own, as values need no
    scale in them.
    """
    return [name for name, fmt in FORMATS.items() if _has_limits(fmt)]


#: Largest finite value by torch's name of a floating-point dtype.
LARGEST: dict[str, float] = {
    fmt.torch_name: fmt.max_finite
    for fmt in FORMATS.values()
    if fmt.torch_name is not None
    and not isinstance(fmt, BlockFormat)
    and fmt.one_quantum is None
}
