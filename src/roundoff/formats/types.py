"""What a number format is, as data.

Every format is a list of fields that one algorithm reads (``rounding.py``; the tests hold
it to a slow twin in exact arithmetic). In the binade ``2**E <= |v| < 2**(E+1)`` the
values are the multiples of a quantum ``2**(E - fraction_bits)``; below ``2**emin`` the
quantum stays that of ``emin`` (subnormals). An integer format is the case where all
values share one quantum, and a tapered format the one where the fraction bits depend on
``|E|``.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from enum import Enum
from functools import cached_property, lru_cache
from typing import TYPE_CHECKING, Literal

from roundoff.errors import FormatError

if TYPE_CHECKING:
    import torch

__all__ = ["BlockFormat", "Execution", "Format", "Layout", "RoundingMode", "ScaleRule"]


class RoundingMode(Enum):
    """How a number between two neighbouring values is rounded."""

    #: to the nearer one; a tie to the one whose significand ``v / quantum`` is even
    #: (IEEE 754 roundTiesToEven). Without fraction bits (e8m0, powers of two) the lower
    #: significand is 1, so a tie goes up.
    NEAREST_EVEN = "nearest_even"
    #: to the nearer one; a tie to the larger magnitude (IEEE 754 roundTiesToAway)
    NEAREST_AWAY = "nearest_away"
    #: to the smaller magnitude; a finite number never overflows to Inf or NaN
    TOWARD_ZERO = "toward_zero"
    #: to the larger magnitude with probability (|v| - lower) / (upper - lower), so that the mean is v
    STOCHASTIC = "stochastic"


class Layout(Enum):
    """How codes stand for values (see ``codes.py``)."""

    #: sign bit (if any values are negative), exponent field, fraction field
    SIGN_MAGNITUDE = "sign_magnitude"
    #: two's complement integer times the quantum
    TWOS_COMPLEMENT = "twos_complement"
    #: sign, prefix-coded dot, sign-magnitude exponent, fraction (arXiv 2409.16626)
    HIF8 = "hif8"


class ScaleRule(Enum):
    """The power-of-two scale of a block whose largest magnitude is amax."""

    #: 2**(floor(log2(amax)) - emax): OCP MX v1.0, section 6.3. The largest element may
    #: saturate.
    FLOOR = "floor"
    #: 2**(ceil(log2(amax)) - emax): amax is always below the largest power of two
    CEIL = "ceil"
    #: smallest power of two with amax / scale <= max_finite: nothing saturates, no
    #: range is wasted
    RCEIL = "rceil"


@dataclass(frozen=True)
class Execution:
    """Which operators run in a format, and which parts of a call are rounded."""

    #: every operator, or only matmul, linear, convolution, attention, recurrent and
    #: embedding operators
    operators: Literal["all", "matrix"]
    #: how activation operands are rounded; ``exact`` is a plain cast without a scale,
    #: ``None`` leaves them alone
    activation: Literal["exact", "tensor", "token", "block"] | None
    #: how weights are rounded
    weight: Literal["exact", "tensor", "channel", "group", "block"] | None
    #: the bias is rounded too
    bias: bool
    #: the result is rounded to the format; otherwise it stays in fp32
    output: bool


@dataclass(frozen=True, kw_only=True)
class Format:
    """A number format.

    Example:
        >>> from roundoff.formats import parse_format
        >>> fmt = parse_format("fp8_e4m3fn")
        >>> fmt.max_finite, fmt.smallest_normal, fmt.smallest_subnormal, fmt.bits
        (448.0, 0.015625, 0.001953125, 8.0)
        >>> parse_format("bf16").contains(fmt), fmt.contains(parse_format("bf16"))
        (True, False)
    """

    name: str
    #: bits of one code
    width: int
    #: fraction bits of every binade (the precision less one); where ``taper`` is given,
    #: only its largest entry
    fraction_bits: int
    #: exponent of the smallest normal binade
    emin: int
    #: largest and smallest finite value
    max_finite: float
    min_finite: float
    #: (limit, bits) with rising limits: the fraction bits where ``|E| <= limit``
    taper: tuple[tuple[int, int], ...] = ()
    layout: Layout = Layout.SIGN_MAGNITUDE
    has_zero: bool = True
    has_negative_zero: bool = True
    #: nonzero values below ``2**emin`` exist
    has_subnormals: bool = True
    has_inf: bool = False
    #: the code of NaN; ``None``: the format has no NaN
    nan_code: int | None = None
    #: default where the range is exceeded: True gives the nearest finite value, False
    #: gives Inf, or NaN without Inf
    saturate: bool = True
    rounding: RoundingMode = RoundingMode.NEAREST_EVEN
    #: what the largest magnitude is scaled to when a scale is chosen; ``None``:
    #: ``max_finite``
    scale_target: float | None = None
    #: what a scale is chosen from: the largest magnitude (amax), or the mean magnitude
    scale_from: Literal["amax", "absmean"] = "amax"
    #: zero_point is 0 by construction
    symmetric: bool = True
    #: bits in memory where they are not ``width`` (tf32 lies in 32)
    storage_bits: int | None = None
    #: torch's name of the same format
    torch_name: str | None = None
    execution: Execution | None = None
    #: the format of activations where it is another than that of weights (w4a8);
    #: ``None``: this one
    activation_format: Format | None = None
    #: the format of gradients beside values in this one, where its own exponents are
    #: too few; ``None``: see ``roundoff.ops.gradient_format``
    gradient_format: Format | None = None
    #: weights that share a scale in a row, where the execution rule has groups
    group_size: int = 32

    def __hash__(self) -> int:
        # equality still compares every field; this one is called in hot loops
        return hash(self.name)

    @property
    def of_activations(self) -> Format:
        """The format of activations."""
        return self.activation_format or self

    @property
    def shares_scale(self) -> bool:
        """True where all samples of a batch have one scale, chosen from its activations."""
        return self.execution is not None and self.execution.activation == "tensor"

    @property
    def bits(self) -> float:
        """Bits in memory per element, including its share of a block's scale, or of a
        group's, which has 32 bits.
        """
        grouped = self.execution is not None and self.execution.weight == "group"
        width = float(self.width if self.storage_bits is None else self.storage_bits)
        return width + 32.0 / self.group_size if grouped else width

    @property
    def torch_dtype(self) -> torch.dtype | None:
        """The torch dtype with exactly these values, or ``None``."""
        if self.torch_name is None:
            return None
        import torch

        dtype: torch.dtype = getattr(torch, self.torch_name)
        return dtype

    @cached_property
    def emax(self) -> int:
        """Exponent of the largest magnitude."""
        return math.frexp(max(self.max_finite, -self.min_finite))[1] - 1

    @cached_property
    def one_quantum(self) -> float | None:
        """The quantum when all values are multiples of it (integers), else ``None``."""
        limit = max(self.max_finite, -self.min_finite)
        if limit > math.ldexp(1.0, self.emin + 1):
            return None
        if self.has_zero and not self.has_subnormals:
            return None
        return math.ldexp(1.0, self.quantum_exponent(self.emin))

    @property
    def has_nan(self) -> bool:
        return self.nan_code is not None

    @property
    def smallest_normal(self) -> float:
        """``2**emin``; for formats of one quantum, that quantum."""
        if self.one_quantum is not None:
            return self.one_quantum
        return math.ldexp(1.0, self.emin)

    @property
    def smallest_subnormal(self) -> float | None:
        """The smallest positive value below ``smallest_normal``, or ``None``."""
        smallest = math.ldexp(1.0, self.quantum_exponent(self.emin - 1))
        return smallest if smallest < self.smallest_normal else None

    def quantum_exponent(self, exponent: int) -> int:
        """log2 of the distance between values in ``[2**exponent, 2**(exponent + 1))``."""
        if exponent < self.emin and not self.has_subnormals:
            return self.emin
        exponent = max(exponent, self.emin)
        for limit, bits in self.taper:
            if abs(exponent) <= limit:
                return exponent - bits
        return exponent - (self.taper[-1][1] if self.taper else self.fraction_bits)

    def saturates(self, asked: bool | None) -> bool:
        """Return True to saturate: as asked, or the format's own default.

        Raises:
            FormatError: ``asked`` is False, and there is neither Inf nor NaN for what
                is out of range.
        """
        if asked is False and not self.has_inf and not self.has_nan:
            raise FormatError(
                f"{self.name} has neither Inf nor NaN for what is out of range",
                expected="saturate=True",
                got="saturate=False",
                do="let it saturate, or choose a format with Inf or NaN",
            )
        return self.saturate if asked is None else asked

    def contains(self, other: Format) -> bool:
        """Return True if every finite value of ``other``, without a scale, is one of this format.

        Decided from the fields. Only block formats with the same fields contain each
        other, because their values depend on the scale; the sign of zero does not
        count.
        """
        return _contains(self, other)


@dataclass(frozen=True, kw_only=True)
class BlockFormat(Format):
    """Blocks of elements along one axis that share a scale.

    The inherited number fields are the element's.

    Example:
        >>> from dataclasses import replace
        >>> from roundoff.formats import ScaleRule, parse_format
        >>> fmt = parse_format("mxfp4")
        >>> fmt.block_size, fmt.max_finite, fmt.bits
        (32, 6.0, 4.25)
        >>> replace(fmt, scale_rule=ScaleRule.RCEIL).scale_rule
        <ScaleRule.RCEIL: 'rceil'>
    """

    block_size: int
    #: the format of the shared scale: powers of two for MX, fp8_e4m3fn for NVFP4
    scale_format: Format
    #: for power-of-two scales
    scale_rule: ScaleRule = ScaleRule.FLOOR
    #: one more fp32 scale per tensor, so that block scales fill their range (NVFP4)
    tensor_scale: bool = False

    def __hash__(self) -> int:
        return hash(self.name)

    @property
    def shares_scale(self) -> bool:
        """True where blocks have their scales relative to one of the whole tensor."""
        return self.tensor_scale

    @property
    def bits(self) -> float:
        """Element bits and the block's share of its scale; a scale per tensor is not counted."""
        return self.width + self.scale_format.width / self.block_size


@lru_cache(maxsize=4096)
def _contains(outer: Format, inner: Format) -> bool:
    if outer == inner:
        return True
    if isinstance(outer, BlockFormat) or isinstance(inner, BlockFormat):
        return False
    if inner.has_zero and not outer.has_zero:
        return False
    if inner.max_finite > outer.max_finite or inner.min_finite < outer.min_finite:
        return False
    lowest = inner.quantum_exponent(inner.emin - 1)
    return all(
        _binade_contains(outer, inner, exponent)
        for exponent in range(lowest, inner.emax + 1)
    )


def _binade_contains(outer: Format, inner: Format, exponent: int) -> bool:
    """Return True if ``outer`` has the values of ``inner`` from ``2**exponent`` up to
    the next power of two.
    """
    step = inner.quantum_exponent(exponent)
    if step > exponent:
        return True  # no values here: without subnormals the binade is empty
    second = math.ldexp(1.0, exponent) + math.ldexp(1.0, step)
    if second > max(inner.max_finite, -inner.min_finite):
        step = exponent  # the power of two is the binade's only value
    return outer.quantum_exponent(exponent) <= step
