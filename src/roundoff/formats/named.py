"""The named formats: constants, and ``parse_format``."""

from __future__ import annotations

import difflib
import math

from roundoff.errors import FormatError
from roundoff.formats.types import BlockFormat, Execution, Format, Layout, NumberFormat, Rounding, ScaleRule

NAN, INF = math.nan, math.inf

_CAST = Execution("all", "exact", "exact", bias=True, output=True)
_OPERANDS = Execution("matrix", "exact", "exact", bias=False, output=False)
_SCALED = Execution("matrix", "tensor", "channel", bias=False, output=False)
_WEIGHT_ONLY = Execution("matrix", None, "channel", bias=False, output=False)
_BLOCKS = Execution("matrix", "block", "block", bias=False, output=False)


def _ieee(name: str, exponent_bits: int, fraction_bits: int, execution: Execution | None, bits: int = 0) -> NumberFormat:
    """A binary format of IEEE 754: Inf and NaN in the highest exponent."""
    bias = 2 ** (exponent_bits - 1) - 1
    largest = (2 - 2.0**-fraction_bits) * 2.0**bias
    top = (2**exponent_bits - 1) << fraction_bits
    sign = 1 << (exponent_bits + fraction_bits)
    special = []
    if exponent_bits + fraction_bits < 16:
        special = [(s | top | m, NAN if m else -INF if s else INF) for s in (0, sign) for m in range(2**fraction_bits)]
    return NumberFormat(
        name, bits or 1 + exponent_bits + fraction_bits, execution, ((1 - bias, bias, fraction_bits),), largest, -largest,
        Layout.IEEE, has_infinity=True, special_codes=tuple(special), bias=bias,
    )  # fmt: skip


def _small(
    name: str, bits: int, fraction_bits: int, bias: int, largest: float, *, nan: tuple[int, ...] = (),
    infinity: bool = False, negative_zero: bool = True, execution: Execution | None = _SCALED,
) -> NumberFormat:  # fmt: skip
    """A float of 8 bits or fewer that uses codes of the highest exponent for numbers; saturates by default."""
    emax = math.frexp(largest)[1] - 1
    sign = 1 << (bits - 1)
    special = [(code, NAN) for code in nan]
    if infinity:
        top = (2 ** (bits - 1 - fraction_bits) - 1) << fraction_bits
        special = [(s | top | m, NAN if m else -INF if s else INF) for s in (0, sign) for m in range(2**fraction_bits)]
    return NumberFormat(
        name, bits, execution, ((1 - bias, emax, fraction_bits),), largest, -largest, Layout.IEEE, has_infinity=infinity,
        has_nan=bool(special), has_negative_zero=negative_zero, saturate=True, special_codes=tuple(special), bias=bias,
    )  # fmt: skip


def _integer(name: str, bits: int, *, symmetric: bool, rule: ScaleRule = ScaleRule.AMAX, step: int = 0,
             execution: Execution = _SCALED) -> NumberFormat:  # fmt: skip
    """Two's complement with constant spacing 2^step. Symmetric ones leave out the most negative code (narrow range)."""
    top = bits - 1
    largest = float(2**top - 1) * 2.0**step
    lowest = -largest if symmetric else -(2.0 ** (top + step))
    return NumberFormat(
        name, bits, execution, ((top + step, top + step, top),), largest, lowest, Layout.INTEGER, has_nan=False,
        has_negative_zero=False, saturate=True, symmetric=symmetric, scale_rule=rule,
    )  # fmt: skip


FP64 = _ieee("fp64", 11, 52, _CAST)
FP32 = _ieee("fp32", 8, 23, _CAST)
#: fp32 storage; matrix units read 10 fraction bits of the operands and accumulate in fp32
TF32 = _ieee("tf32", 8, 10, _OPERANDS, bits=32)
BF16 = _ieee("bf16", 8, 7, _CAST)
FP16 = _ieee("fp16", 5, 10, _CAST)
#: OCP 8-bit floating point, v1.0, tables 1 and 2
FP8_E4M3FN = _small("fp8_e4m3fn", 8, 3, 7, 448.0, nan=(0x7F, 0xFF))
FP8_E5M2 = _small("fp8_e5m2", 8, 2, 15, 57344.0, infinity=True)
#: arXiv:2206.02915: one zero, one NaN where -0 would be, bias one larger
FP8_E4M3FNUZ = _small("fp8_e4m3fnuz", 8, 3, 8, 240.0, nan=(0x80,), negative_zero=False)
FP8_E5M2FNUZ = _small("fp8_e5m2fnuz", 8, 2, 16, 57344.0, nan=(0x80,), negative_zero=False)
#: OCP Microscaling formats, v1.0, tables 2 to 6
FP6_E3M2 = _small("fp6_e3m2", 6, 2, 3, 28.0)
FP6_E2M3 = _small("fp6_e2m3", 6, 3, 1, 7.5)
FP4_E2M1 = _small("fp4_e2m1", 4, 1, 1, 6.0)
E8M0 = NumberFormat(
    "e8m0", 8, None, ((-127, 127, 0),), 2.0**127, 2.0**-127, Layout.EXPONENT, has_negative_zero=False, has_zero=False,
    saturate=True, special_codes=((0xFF, NAN),), bias=127,
)  # fmt: skip
#: arXiv:2409.16626, tables 2 and 3; public details only (its hybrid rounding with a stochastic part, used in training,
#: is not specified bit by bit in public and is left out)
HIF8 = NumberFormat(
    "hif8", 8, _SCALED,
    ((-22, -16, 0), (-15, -8, 1), (-7, -4, 2), (-3, 3, 3), (4, 7, 2), (8, 15, 1)),
    2.0**15, -(2.0**15), Layout.TAPERED, has_infinity=True, has_negative_zero=False, rounding=Rounding.NEAREST_AWAY,
    special_codes=((0x80, NAN), (0x6F, INF), (0xEF, -INF)),
)  # fmt: skip
INT8 = _integer("int8", 8, symmetric=True)
INT4 = _integer("int4", 4, symmetric=True)
INT2 = _integer("int2", 2, symmetric=True)
INT8_ASYM = _integer("int8_asym", 8, symmetric=False)
INT4_ASYM = _integer("int4_asym", 4, symmetric=False)
INT2_ASYM = _integer("int2_asym", 2, symmetric=False)
#: -1, 0, +1 times the mean magnitude
TERNARY = _integer("ternary", 2, symmetric=True, rule=ScaleRule.MEAN_ABS, execution=_WEIGHT_ONLY)
#: -1, +1 times the mean magnitude; zero becomes +1
BINARY = NumberFormat(
    "binary", 1, _WEIGHT_ONLY, ((1, 1, 1),), 1.0, -1.0, Layout.SIGN, has_nan=False, has_negative_zero=False,
    has_zero=False, saturate=True, scale_rule=ScaleRule.MEAN_ABS,
)  # fmt: skip
#: OCP MX v1.0, 5.3.4: int8 with an implied 2^-6
MXINT8_ELEMENT = _integer("mxint8_element", 8, symmetric=True, step=-6)


def _mx(name: str, element: NumberFormat, rule: ScaleRule = ScaleRule.FLOOR) -> BlockFormat:
    return BlockFormat(name, element.bits + 8 / 32, _BLOCKS, element, 32, E8M0, rule)


_ALL: tuple[Format, ...] = (
    FP64, FP32, TF32, BF16, FP16, FP8_E4M3FN, FP8_E5M2, FP8_E4M3FNUZ, FP8_E5M2FNUZ, FP6_E3M2, FP6_E2M3, FP4_E2M1, E8M0,
    HIF8, INT8, INT4, INT2, INT8_ASYM, INT4_ASYM, INT2_ASYM, TERNARY, BINARY,
    _mx("mxfp8_e4m3", FP8_E4M3FN), _mx("mxfp8_e5m2", FP8_E5M2), _mx("mxfp6_e3m2", FP6_E3M2), _mx("mxfp6_e2m3", FP6_E2M3),
    _mx("mxfp4", FP4_E2M1), _mx("mxint8", MXINT8_ELEMENT),
    BlockFormat("nvfp4", 4 + 8 / 16, _BLOCKS, FP4_E2M1, 16, FP8_E4M3FN, ScaleRule.AMAX, tensor_scale=True),
)  # fmt: skip

#: Every named format, by name.
FORMATS: dict[str, Format] = {fmt.name: fmt for fmt in _ALL}

ALIASES = {
    "float64": "fp64", "double": "fp64", "float32": "fp32", "float": "fp32", "bfloat16": "bf16", "float16": "fp16",
    "half": "fp16", "fp8": "fp8_e4m3fn", "e4m3": "fp8_e4m3fn", "e4m3fn": "fp8_e4m3fn", "fp8_e4m3": "fp8_e4m3fn",
    "float8_e4m3fn": "fp8_e4m3fn", "e5m2": "fp8_e5m2", "float8_e5m2": "fp8_e5m2", "e4m3fnuz": "fp8_e4m3fnuz",
    "float8_e4m3fnuz": "fp8_e4m3fnuz", "e5m2fnuz": "fp8_e5m2fnuz", "float8_e5m2fnuz": "fp8_e5m2fnuz", "fp4": "fp4_e2m1",
    "e2m1": "fp4_e2m1", "e3m2": "fp6_e3m2", "e2m3": "fp6_e2m3", "hifloat8": "hif8", "mxfp8": "mxfp8_e4m3",
    "mxfp6": "mxfp6_e3m2",
}  # fmt: skip


def parse_format(name: str | Format) -> Format:
    """The format of this name; case, dashes and common other names (``bfloat16``, ``half``, ``e4m3``) are accepted.

    Raises ``FormatError`` listing the nearest names.

    >>> parse_format("BFloat16").name, parse_format("fp8-e5m2").bits
    ('bf16', 8)
    """
    if isinstance(name, Format):
        return name
    key = str(name).strip().lower().replace("-", "_").removeprefix("torch.")
    key = ALIASES.get(key, key)
    if key not in FORMATS:
        near = difflib.get_close_matches(key, [*FORMATS, *ALIASES], n=3, cutoff=0.4)
        raise FormatError(
            "unknown number format",
            expected="one of " + ", ".join(FORMATS),
            got=repr(name),
            do=f"did you mean {' or '.join(near)}?" if near else None,
        )
    return FORMATS[key]
