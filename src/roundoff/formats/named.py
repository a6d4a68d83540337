"""The formats by name. A new format is one entry here, and no code elsewhere.

Sources: IEEE 754-2019 (fp16, fp32, fp64); the vendors' manuals (bf16, tf32); OCP 8-bit
Floating Point Specification 1.0 (e4m3fn, e5m2); arXiv 2206.02915 (fnuz); OCP
Microscaling Formats v1.0 (fp6, fp4, e8m0, MX); NVIDIA's Transformer Engine and cuDNN
documentation (NVFP4); arXiv 2409.16626 (HiFloat8); arXiv 2402.17764 and 1603.05279
(ternary and binary with a scale from the mean magnitude).

Formats of 8 bits and fewer saturate by default, as ONNX Cast does; HiFloat8, whose
publication has Inf for overflow, does not. HiFloat8 is here as far as it is public. Its
overflow follows IEEE (Inf from the midpoint above 32768 on), its scale in scaled use
(amax onto 15, the largest value with all three fraction bits) is our choice, and its
hybrid rounding for training is left out.
"""

from __future__ import annotations

import math
import re
from dataclasses import replace

from roundoff.errors import FormatError, did_you_mean, nearest, wrong_type
from roundoff.formats.types import BlockFormat, Execution, Format, Layout, RoundingMode

__all__ = ["ALIASES", "FORMATS", "parse_format"]

_FULL = Execution("all", "exact", "exact", bias=True, output=True)
_TF32 = Execution("matrix", "exact", "exact", bias=False, output=False)
_SCALED = Execution("matrix", "tensor", "channel", bias=False, output=False)
_WEIGHT_ONLY = Execution("matrix", None, "channel", bias=False, output=False)
_BLOCK = Execution("matrix", "block", "block", bias=False, output=False)
#: Bits of the widest integers.
WIDEST = 64


def _ieee(
    name: str,
    width: int,
    exponent_bits: int,
    torch_name: str | None,
    execution: Execution,
) -> Format:
    """Make an IEEE-like format: the largest exponent field is Inf (fraction 0) and NaN."""
    fraction_bits = width - 1 - exponent_bits
    emax = 2 ** (exponent_bits - 1) - 1
    max_finite = math.ldexp(2.0 - math.ldexp(1.0, -fraction_bits), emax)
    quiet_nan = ((1 << exponent_bits) - 1 << fraction_bits) | 1 << (fraction_bits - 1)
    return Format(
        name=name,
        width=width,
        fraction_bits=fraction_bits,
        emin=1 - emax,
        max_finite=max_finite,
        min_finite=-max_finite,
        has_inf=True,
        nan_code=quiet_nan,
        saturate=False,
        torch_name=torch_name,
        execution=execution,
    )


def _float(
    name: str,
    width: int,
    fraction_bits: int,
    emin: int,
    max_finite: float,
    *,
    nan_code: int | None = None,
    negative_zero: bool = True,
    torch_name: str | None = None,
) -> Format:
    """Make a small float without Inf."""
    return Format(
        name=name,
        width=width,
        fraction_bits=fraction_bits,
        emin=emin,
        max_finite=max_finite,
        min_finite=-max_finite,
        has_negative_zero=negative_zero,
        nan_code=nan_code,
        torch_name=torch_name,
        execution=_SCALED,
    )


def integer(
    width: int,
    *,
    symmetric: bool = True,
    narrow_range: bool | None = None,
    name: str | None = None,
) -> Format:
    """Make a signed integer format of 2 to 64 bits: quantum 1.

    Args:
        width: bits of a code.
        symmetric: zero_point is 0; otherwise it is chosen with the scale.
        narrow_range: leave out the code ``-2**(width - 1)``; by default as ``symmetric``.
        name: by default ``int8``, or ``int8_asym``, with ``_full`` or ``_narrow`` where
            the range is not the default.

    Example:
        >>> integer(8, narrow_range=False).name, integer(4).min_finite, integer(4, symmetric=False).min_finite
        ('int8_full', -7.0, -8.0)
    """
    if not 2 <= width <= WIDEST:
        raise FormatError(
            f"an integer format needs two bits, and at most {WIDEST}",
            expected=f"2 <= width <= {WIDEST}",
            got=f"width={width}",
        )
    narrow = symmetric if narrow_range is None else narrow_range
    if name is None:
        name = _integer_name(width, symmetric, narrow)
    top = float(2 ** (width - 1) - 1)
    return Format(
        name=name,
        width=width,
        fraction_bits=width - 2,
        emin=width - 2,
        max_finite=top,
        min_finite=-top if narrow else -top - 1.0,
        layout=Layout.TWOS_COMPLEMENT,
        has_negative_zero=False,
        symmetric=symmetric,
        torch_name="int8" if width == 8 else None,
        execution=_SCALED,
    )


def _integer_name(width: int, symmetric: bool, narrow: bool) -> str:
    name = f"int{width}" if symmetric else f"int{width}_asym"
    if narrow == symmetric:
        return name
    return f"{name}_narrow" if narrow else f"{name}_full"


def _block(
    name: str,
    element: Format,
    size: int,
    scale_format: Format,
    tensor_scale: bool = False,
) -> BlockFormat:
    fields = {key: getattr(element, key) for key in element.__dataclass_fields__}
    fields |= {"name": name, "torch_name": None, "saturate": True, "execution": _BLOCK}
    fields |= {"gradient_format": None}
    return BlockFormat(
        **fields, block_size=size, scale_format=scale_format, tensor_scale=tensor_scale
    )


_FP32 = _ieee("fp32", 32, 8, "float32", _FULL)
_E5M2 = replace(_ieee("fp8_e5m2", 8, 5, "float8_e5m2", _SCALED), saturate=True)
_E4M3 = replace(
    _float("fp8_e4m3fn", 8, 3, -6, 448.0, nan_code=0x7F, torch_name="float8_e4m3fn"),
    gradient_format=_E5M2,
)
_E5M2_FNUZ = _float(
    "fp8_e5m2fnuz",
    8,
    2,
    -15,
    57344.0,
    nan_code=0x80,
    negative_zero=False,
    torch_name="float8_e5m2fnuz",
)
_E4M3_FNUZ = replace(
    _float(
        "fp8_e4m3fnuz",
        8,
        3,
        -7,
        240.0,
        nan_code=0x80,
        negative_zero=False,
        torch_name="float8_e4m3fnuz",
    ),
    gradient_format=_E5M2_FNUZ,
)
_E3M2 = _float("fp6_e3m2", 6, 2, -2, 28.0)
_E2M3 = _float("fp6_e2m3", 6, 3, 0, 7.5)
_E2M1 = _float("fp4_e2m1", 4, 1, 0, 6.0)
_E8M0 = Format(
    name="e8m0",
    width=8,
    fraction_bits=0,
    emin=-127,
    max_finite=2.0**127,
    min_finite=2.0**-127,
    has_zero=False,
    has_negative_zero=False,
    has_subnormals=False,
    nan_code=0xFF,
    saturate=False,
    torch_name="float8_e8m0fnu",
)
_HIF8 = Format(
    name="hif8",
    width=8,
    fraction_bits=3,
    emin=-22,
    max_finite=32768.0,
    min_finite=-32768.0,
    taper=((3, 3), (7, 2), (15, 1), (22, 0)),
    layout=Layout.HIF8,
    has_negative_zero=False,
    has_inf=True,
    nan_code=0x80,
    saturate=False,
    rounding=RoundingMode.NEAREST_AWAY,
    scale_target=15.0,
    execution=_SCALED,
)
_TERNARY = replace(
    integer(2, name="ternary"), scale_from="absmean", execution=_WEIGHT_ONLY
)
_BINARY = Format(
    name="binary",
    width=1,
    fraction_bits=0,
    emin=0,
    max_finite=1.0,
    min_finite=-1.0,
    has_zero=False,
    has_negative_zero=False,
    has_subnormals=False,
    scale_from="absmean",
    execution=_WEIGHT_ONLY,
)
# An int8 with the implied scale 2**-6. The code -128 is left out, as the specification
# allows.
_MXINT8 = replace(
    integer(8), emin=0, fraction_bits=6, max_finite=127 / 64, min_finite=-127 / 64
)

#: Every format by its name.
FORMATS: dict[str, Format] = {
    fmt.name: fmt
    for fmt in (
        _ieee("fp64", 64, 11, "float64", _FULL),
        _FP32,
        replace(_ieee("tf32", 19, 8, None, _TF32), storage_bits=32),
        _ieee("bf16", 16, 8, "bfloat16", _FULL),
        _ieee("fp16", 16, 5, "float16", _FULL),
        _E4M3,
        _E5M2,
        _E4M3_FNUZ,
        _E5M2_FNUZ,
        _HIF8,
        _E3M2,
        _E2M3,
        _E2M1,
        _E8M0,
        integer(8),
        integer(8, symmetric=False),
        integer(4),
        integer(4, symmetric=False),
        integer(2),
        integer(2, symmetric=False),
        _TERNARY,
        _BINARY,
        _block("mxfp8_e4m3", _E4M3, 32, _E8M0),
        _block("mxfp8_e5m2", _E5M2, 32, _E8M0),
        _block("mxfp6_e3m2", _E3M2, 32, _E8M0),
        _block("mxfp6_e2m3", _E2M3, 32, _E8M0),
        _block("mxfp4", _E2M1, 32, _E8M0),
        _block("mxint8", _MXINT8, 32, _E8M0),
        _block("nvfp4", _E2M1, 16, _E4M3, tensor_scale=True),
    )
}

#: Other names in use. Names are compared in lower case, with ``-`` as ``_``.
ALIASES: dict[str, str] = {
    "float64": "fp64",
    "double": "fp64",
    "float32": "fp32",
    "float": "fp32",
    "single": "fp32",
    "tfloat32": "tf32",
    "bfloat16": "bf16",
    "float16": "fp16",
    "half": "fp16",
    "fp8": "fp8_e4m3fn",
    "e4m3": "fp8_e4m3fn",
    "e4m3fn": "fp8_e4m3fn",
    "fp8_e4m3": "fp8_e4m3fn",
    "float8_e4m3fn": "fp8_e4m3fn",
    "e5m2": "fp8_e5m2",
    "float8_e5m2": "fp8_e5m2",
    "e4m3fnuz": "fp8_e4m3fnuz",
    "float8_e4m3fnuz": "fp8_e4m3fnuz",
    "e5m2fnuz": "fp8_e5m2fnuz",
    "float8_e5m2fnuz": "fp8_e5m2fnuz",
    "hifloat8": "hif8",
    "e3m2": "fp6_e3m2",
    "e2m3": "fp6_e2m3",
    "fp4": "fp4_e2m1",
    "e2m1": "fp4_e2m1",
    "float8_e8m0fnu": "e8m0",
    "ue8m0": "e8m0",
    "mxfp8": "mxfp8_e4m3",
    "mxfp6": "mxfp6_e2m3",
    "mxfp4_e2m1": "mxfp4",
}


_WIDTH = r"[2-9]|1[0-6]"
_INTEGER = re.compile(rf"int(?P<width>{_WIDTH})(?P<asymmetric>_asym)?")
_MIXED = re.compile(
    rf"w(?P<weight>{_WIDTH})(?:a(?P<activation>{_WIDTH}))?(?:g(?P<group>[1-9]\d*))?"
)


def integer_named(name: str) -> Format | None:
    """Return the integer format of any width from 2 to 16: ``int6``, ``int3_asym``.

    ``None``: no such name.
    """
    match = _INTEGER.fullmatch(name)
    if match is None:
        return None
    return integer(int(match["width"]), symmetric=match["asymmetric"] is None)


def mixed(name: str) -> Format | None:
    """Combine integer weights of one width, and activations of another or in full precision.

    ``w4a8``: weights of 4 bits, asymmetric activations of 8. ``w4``: weights alone.
    ``w4g64``: 64 weights along the contracted axis share a scale. Widths are 2 to 16.
    ``None``: no such name.
    """
    match = _MIXED.fullmatch(name)
    if match is None:
        return None
    activation = None
    if match["activation"]:
        activation = integer(int(match["activation"]), symmetric=False)
    rule = Execution(
        "matrix",
        "tensor" if activation else None,
        "group" if match["group"] else "channel",
        bias=False,
        output=False,
    )
    return replace(
        integer(int(match["weight"]), name=name),
        execution=rule,
        activation_format=activation,
        group_size=int(match["group"] or 32),
    )


def parse_format(name: str | Format) -> Format:
    """Return the format with this name or alias; a format is returned as it is.

    Case does not matter, nor ``-`` for ``_`` or a leading ``torch.``. ``int6`` and the
    like are integers of any width from 2 to 16, ``w4a8`` and the like integers of two
    widths (see ``mixed``).

    Raises:
        FormatError: there is none; the message has the nearest names.

    Example:
        >>> parse_format("bfloat16").name, parse_format("torch.float16").name, parse_format("MXFP8").name
        ('bf16', 'fp16', 'mxfp8_e4m3')
        >>> parse_format("int6").max_finite, parse_format("w4a8").of_activations.name
        (31.0, 'int8_asym')
    """
    if isinstance(name, Format):
        return name
    if str(name).startswith("torch."):  # a dtype
        name = str(name)
    if not isinstance(name, str):
        raise wrong_type("format", name, "the name of a format, such as 'bf16'")
    key = name.strip().lower().replace("-", "_").removeprefix("torch.")
    fmt = FORMATS.get(ALIASES.get(key, key)) or integer_named(key) or mixed(key)
    if fmt is None:
        near = nearest(key, [*FORMATS, *ALIASES])
        suggestion = did_you_mean(dict.fromkeys(ALIASES.get(n, n) for n in near))
        raise FormatError(
            "unknown format",
            expected=", ".join(FORMATS),
            got=name,
            do=suggestion or "choose one of these",
        )
    return fmt
