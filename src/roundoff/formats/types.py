"""Number formats as data: one algorithm (``scalar.py``, and its tensor twin) serves every format."""

from __future__ import annotations

import enum
from dataclasses import dataclass
from functools import lru_cache
from typing import TYPE_CHECKING

from roundoff.errors import FormatError

if TYPE_CHECKING:
    import torch


class Rounding(enum.Enum):
    """How a value between two neighbours is rounded."""

    NEAREST_EVEN = "nearest, ties to the neighbour with an even significand"
    NEAREST_AWAY = "nearest, ties to the neighbour of larger magnitude"
    TOWARD_ZERO = "the neighbour of smaller magnitude"
    STOCHASTIC = "either neighbour, with the probability that keeps the mean"


class Layout(enum.Enum):
    """How a code (bit pattern) is read."""

    IEEE = "sign, biased exponent, fraction; exponent 0 is subnormal"
    EXPONENT = "biased exponent only: a power of two (OCP MX v1.0, 5.4.1)"
    TAPERED = "sign, prefix-coded exponent width, exponent, fraction (HiFloat8, arXiv:2409.16626)"
    INTEGER = "two's complement"
    SIGN = "one bit: 0 is +1, 1 is -1"


class ScaleRule(enum.Enum):
    """How a scale is chosen from the values it covers."""

    AMAX = "largest magnitude / largest finite value"
    MEAN_ABS = "mean magnitude (XNOR-Net, arXiv:1603.05279, eq. 6; BitNet b1.58, arXiv:2402.17764, eq. 3)"
    FLOOR = "2^(floor(log2 amax) - emax), OCP MX v1.0, 6.3: the largest values may saturate"
    CEIL = "2^(ceil(log2 amax) - emax): one octave more room unless amax is a power of two"
    RCEIL = "2^ceil(log2(amax / largest finite value)): the smallest power of two that saturates nothing"


@dataclass(frozen=True)
class Execution:
    """Which operators run in a format, and which parts of a call are rounded.

    ``activation`` and ``weight``: None (kept), ``exact`` (plain cast), or scaled per ``tensor``, ``token``,
    ``channel`` or ``block``. ``bias``: rounded too (integer kernels keep it in int32). ``output``: the result is
    rounded to the format; else it is left in fp32, as a kernel with wide accumulators leaves it.
    """

    operators: str
    activation: str | None
    weight: str | None
    bias: bool
    output: bool


@dataclass(frozen=True)
class Format:
    """What every format has: a name, storage bits per element (shared scales included), and how it executes."""

    name: str
    bits: float
    execution: Execution | None

    @property
    def torch_dtype(self) -> torch.dtype | None:
        """torch's dtype of the same values, None when torch has none."""
        import torch

        return getattr(torch, _TORCH_NAMES.get(self.name, ""), None)

    def contains(self, other: Format) -> bool:
        """Whether every finite value of ``other`` is a value of this format (scales aside)."""
        return self.name == other.name


@dataclass(frozen=True)
class NumberFormat(Format):
    """A format whose elements stand alone.

    Between ``emin`` and ``emax`` a value has exponent E = floor(log2 |x|) and ``fraction_bits(E)`` bits after the
    point; below ``emin`` the spacing stays that of ``emin`` (subnormals). ``tapers`` lists (lowest E, highest E,
    fraction bits). An integer format is the part below ``emin`` alone: its spacing is constant.
    """

    tapers: tuple[tuple[int, int, int], ...]
    max_finite: float
    min_finite: float
    layout: Layout
    has_infinity: bool = False
    has_nan: bool = True
    has_negative_zero: bool = True
    has_zero: bool = True
    #: out of range becomes the largest finite value, not Inf or NaN, unless asked otherwise
    saturate: bool = False
    rounding: Rounding = Rounding.NEAREST_EVEN
    #: zero_point fixed at 0 when quantizing with a scale
    symmetric: bool = True
    scale_rule: ScaleRule = ScaleRule.AMAX
    #: codes that are not numbers: bit pattern to value
    special_codes: tuple[tuple[int, float], ...] = ()
    bias: int = 0

    @property
    def emin(self) -> int:
        """Exponent of the smallest normal value."""
        return self.tapers[0][0]

    @property
    def emax(self) -> int:
        """Exponent of the largest value."""
        return self.tapers[-1][1]

    @property
    def smallest_normal(self) -> float:
        """2^emin."""
        return 2.0**self.emin

    @property
    def smallest_subnormal(self) -> float:
        """The smallest positive value."""
        return 2.0 ** self.quantum_exponent(self.emin)

    def quantum_exponent(self, exponent: int) -> int:
        """Log2 of the spacing of values of this exponent.

        >>> from roundoff.formats import parse_format
        >>> parse_format("bf16").quantum_exponent(0), parse_format("int8").quantum_exponent(3)
        (-7, 0)
        """
        exponent = min(max(exponent, self.emin), self.emax)
        bits = next(bits for low, high, bits in self.tapers if low <= exponent <= high)
        return exponent - bits

    def contains(self, other: Format) -> bool:
        """Whether every finite value of ``other`` is a value of this format.

        >>> from roundoff.formats import parse_format
        >>> parse_format("tf32").contains(parse_format("bf16")), parse_format("fp16").contains(parse_format("bf16"))
        (True, False)
        """
        return isinstance(other, NumberFormat) and _contains(self, other)


@dataclass(frozen=True)
class BlockFormat(Format):
    """Blocks of ``block_size`` elements along one axis share a scale in ``scale_format``; with ``tensor_scale`` the
    scales are relative to one fp32 scale of the whole tensor (NVFP4)."""

    element: NumberFormat
    block_size: int
    scale_format: NumberFormat
    scale_rule: ScaleRule
    tensor_scale: bool = False


@lru_cache(maxsize=4096)
def _contains(outer: NumberFormat, inner: NumberFormat) -> bool:
    if inner.max_finite > outer.max_finite or inner.min_finite < outer.min_finite:
        return False
    if inner.has_zero and not outer.has_zero or inner.has_negative_zero and not outer.has_negative_zero:
        return False
    lowest = inner.quantum_exponent(inner.emin)
    exponents = range(lowest, inner.emax + 1)
    # an exponent below emin is reached by subnormals, whose spacing is that of emin
    return all(
        outer.quantum_exponent(e) <= max(inner.quantum_exponent(e), lowest)
        for e in exponents
        if 2.0**e <= inner.max_finite
    )


_TORCH_NAMES = {
    "fp64": "float64", "fp32": "float32", "bf16": "bfloat16", "fp16": "float16",
    "fp8_e4m3fn": "float8_e4m3fn", "fp8_e5m2": "float8_e5m2", "fp8_e4m3fnuz": "float8_e4m3fnuz",
    "fp8_e5m2fnuz": "float8_e5m2fnuz", "e8m0": "float8_e8m0fnu",
}  # fmt: skip


def unsupported(fmt: Format, what: str) -> FormatError:
    """The error of asking a format for something it has no meaning for."""
    return FormatError(f"{what} is not defined for {fmt.name}", where=fmt.name)
