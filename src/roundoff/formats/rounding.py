"""Round tensors to a format's values.

Nothing here loops over elements. The tests hold it to a slow twin in exact arithmetic
(``tests/formats/scalar.py``), which takes the same steps in the same order. Where torch
has the format as a dtype and casts it quickly, the cast is used; what the cast does out
of range is measured once per dtype and device, because it differs between them.
"""

from __future__ import annotations

import math
from functools import lru_cache

import torch
from torch import Tensor

from roundoff.errors import FormatError
from roundoff.formats.named import FORMATS
from roundoff.formats.types import Format, RoundingMode

__all__ = ["cast", "check_floating", "round_values", "to_integer", "working_dtype"]

#: The integer dtype, the mask of the exponent field, and the bits below it.
_EXPONENT = {
    torch.float32: (torch.int32, 0x7F800000, 23),
    torch.float64: (torch.int64, 0x7FF0000000000000, 52),
}
_CARRIERS = {
    torch.float64: FORMATS["fp64"],
    torch.float32: FORMATS["fp32"],
    torch.bfloat16: FORMATS["bf16"],
    torch.float16: FORMATS["fp16"],
}


def check_floating(x: Tensor) -> None:
    """Raise FormatError unless ``x`` can carry values of a format."""
    if x.dtype not in _CARRIERS:
        raise FormatError(
            "only floating-point tensors can be rounded",
            expected="float64, float32, bfloat16 or float16",
            got=f"a tensor of dtype {x.dtype} and shape {tuple(x.shape)}",
            do="convert it with .float() if its values are numbers to be rounded; leave indices and masks alone",
        )


def working_dtype(x: Tensor) -> torch.dtype:
    """fp64 is rounded in fp64, everything else in fp32."""
    return torch.float64 if x.dtype == torch.float64 else torch.float32


def cast(
    x: Tensor,
    fmt: Format,
    rounding: RoundingMode,
    saturate: bool,
    generator: torch.Generator | None,
) -> Tensor:
    """Round ``x`` to the values of ``fmt`` without a scale, in x's shape and dtype; may
    be ``x`` itself.
    """
    x = x.detach()
    if rounding is RoundingMode.NEAREST_EVEN:
        dtype = _cast_dtype(fmt, x.dtype, x.device.type, saturate)
        if dtype is not None:
            return x.to(dtype).to(x.dtype)
    if _holds(fmt, x.dtype):
        return x if not saturate else _clip(x)
    is_stochastic = rounding is RoundingMode.STOCHASTIC and not saturate
    if is_stochastic and x.dtype == torch.float32 and fmt == FORMATS["bf16"]:
        return _stochastic_bf16(x, generator)
    rounded = round_values(x.to(working_dtype(x)), fmt, rounding, saturate, generator)
    if not fmt.has_negative_zero:
        rounded.add_(0.0)  # -0 + 0 is +0
    return rounded.to(x.dtype)


def _stochastic_bf16(x: Tensor, generator: torch.Generator | None) -> Tensor:
    """fp32 ``x`` rounded by its bits: a 16-bit draw added to the 16 bits that bf16 has
    not, which are cut off then.

    The carry has exactly the probability that it should, also among subnormals, and
    from the largest value to Inf.
    """
    count = x.numel()
    place = _place_of_draws(x.device, generator)
    draws = torch.empty(-(-count // 4), dtype=torch.int64, device=place)
    draws = draws.random_(-(2**63), None, generator=generator).to(x.device)
    noise = (
        draws.view(torch.int16)[:count]
        .view(x.shape)
        .to(torch.int32)
        .bitwise_and_(0xFFFF)
    )
    rounded = noise.add_(x.view(torch.int32)).bitwise_and_(-0x10000).view(torch.float32)
    return torch.where(x.isfinite(), rounded, x)


def _place_of_draws(
    device: torch.device, generator: torch.Generator | None
) -> torch.device:
    """Return where random numbers for a tensor of ``device`` are drawn: a generator
    draws on its own device alone."""
    if generator is None or generator.device.type == device.type:
        return device
    return generator.device


def _holds(fmt: Format, dtype: torch.dtype) -> bool:
    """Return True if every number of ``dtype`` is a value of the format, Inf and -0 included."""
    return fmt.has_inf and fmt.has_negative_zero and fmt.contains(_CARRIERS[dtype])


def _clip(x: Tensor) -> Tensor:
    """Saturate Inf to the largest value that ``x`` can carry."""
    limit = torch.finfo(x.dtype).max
    return x.clamp(-limit, limit)


@lru_cache(maxsize=256)
def _cast_dtype(
    fmt: Format, carrier: torch.dtype, device: str, saturate: bool
) -> torch.dtype | None:
    """Return the dtype whose cast gives the format's nearest-even values at speed, else
    ``None``: also where ``carrier``, the dtype to be rounded, is no wider.
    """
    dtype = fmt.torch_dtype
    if dtype is None or not dtype.is_floating_point or not fmt.has_subnormals:
        return None
    if _holds(fmt, carrier):
        return None
    if carrier == torch.float64 and dtype != torch.float32:
        return (
            None  # torch casts fp64 to fp16 and smaller by way of fp32: two roundings
        )
    if dtype.itemsize == 1 and device == "cpu":
        return (
            None  # scalar code on the CPU, several times slower than ``round_values``
        )
    out_of_range = math.inf if fmt.has_inf else math.nan
    asked = "saturate" if saturate else _fate(out_of_range)
    return dtype if _overflow(dtype, device) == asked else None


@lru_cache(maxsize=64)
def _overflow(dtype: torch.dtype, device: str) -> str:
    """Return what a cast to ``dtype`` makes of Inf and of finite values out of range.

    One of ``saturate``, ``inf``, ``nan`` and ``mixed``.
    """
    wide = torch.float64 if dtype == torch.float32 else torch.float32
    beyond = torch.tensor([math.inf, torch.finfo(wide).max], device=device, dtype=wide)
    fates = {_fate(value) for value in beyond.to(dtype).float().tolist()}
    return fates.pop() if len(fates) == 1 else "mixed"


def _fate(value: float) -> str:
    if math.isnan(value):
        return "nan"
    return "inf" if math.isinf(value) else "saturate"


def round_values(
    x: Tensor,
    fmt: Format,
    rounding: RoundingMode,
    saturate: bool,
    generator: torch.Generator | None = None,
    out: Tensor | None = None,
) -> Tensor:
    """Run the general algorithm on fp32 or fp64 ``x``.

    ``out=x`` overwrites x, for formats with a zero that saturate.

    The sign of a zero is not cleared for formats without -0: ``cast`` does that.
    """
    if _holds(fmt, x.dtype):
        return _clip(x) if saturate else x.clone()
    quantum = _quantum(x, fmt)
    unit = isinstance(quantum, float) and quantum == 1.0
    significand = x if unit else torch.div(x, quantum, out=out)
    rounded = to_integer(significand, rounding, generator, out if unit else significand)
    if not unit:
        rounded.mul_(quantum)
    if saturate:
        rounded.clamp_(min(fmt.min_finite, 0.0), fmt.max_finite)
    else:
        rounded = _overflowed(x, rounded, fmt, rounding)
    if fmt.has_zero:
        return rounded
    sign = x + 0.0  # -0 + 0 is +0
    rounded = rounded.abs_().clamp_(min=fmt.smallest_normal).copysign_(sign)
    if fmt.min_finite > 0:
        rounded.masked_fill_(x < 0, math.nan)
    return rounded


def _overflowed(
    x: Tensor, rounded: Tensor, fmt: Format, rounding: RoundingMode
) -> Tensor:
    """Return ``rounded`` with Inf, or NaN without Inf, where ``x`` is out of range."""
    lowest = min(fmt.min_finite, 0.0)
    if rounding is RoundingMode.TOWARD_ZERO:
        rounded = torch.where(x.isinf(), x, rounded.clamp(lowest, fmt.max_finite))
    if _may_exceed(rounded, lowest, fmt.max_finite):
        beyond = math.inf if fmt.has_inf else math.nan
        rounded.masked_fill_(rounded > fmt.max_finite, beyond)
        rounded.masked_fill_(rounded < lowest, -beyond)
    return rounded


def _may_exceed(rounded: Tensor, low: float, high: float) -> bool:
    """Return True if a number may be out of range.

    Look only where that costs less than a masked fill: on the CPU.
    """
    if rounded.device.type != "cpu" or rounded.numel() == 0:
        return True
    # NaN hides the others, and then no comparison holds
    inside = rounded.amin().item() >= low and rounded.amax().item() <= high
    return not inside


def _quantum(x: Tensor, fmt: Format) -> Tensor | float:
    """Return the distance between neighbouring values at each element: a power of two."""
    if fmt.one_quantum is not None:
        return fmt.one_quantum
    integer, mask, bits = _EXPONENT[x.dtype]
    field = x.view(integer).bitwise_and(mask)
    if fmt.taper:
        quanta = _quanta(fmt, x.dtype, x.device)
        exponents = field.bitwise_right_shift_(bits).flatten()
        return quanta.index_select(0, exponents).view(x.shape)
    # The exponent field alone is the power of two below |x|; subnormals of x give 0, Inf and NaN give Inf.
    power = field.view(x.dtype)
    smallest = math.ldexp(1.0, fmt.emin)
    # The upper limit keeps Inf / quantum from being NaN; past it any quantum shows that
    # the range is exceeded.
    largest = math.ldexp(1.0, fmt.emax)
    quantum = power.clamp_(smallest, largest).mul_(math.ldexp(1.0, -fmt.fraction_bits))
    if not fmt.has_subnormals and fmt.fraction_bits:
        quantum.masked_fill_(x.abs() < smallest, smallest)
    return quantum


@lru_cache(maxsize=64)
def _quanta(fmt: Format, dtype: torch.dtype, device: torch.device) -> Tensor:
    """Return the quantum for each value of the exponent field of ``dtype``, for formats
    whose fraction bits vary.
    """
    _, mask, bits = _EXPONENT[dtype]
    count = (mask >> bits) + 1
    exponents = [
        min(max(field - (count // 2 - 1), fmt.emin), fmt.emax) for field in range(count)
    ]
    return torch.tensor(
        [math.ldexp(1.0, fmt.quantum_exponent(e)) for e in exponents],
        dtype=dtype,
        device=device,
    )


def to_integer(
    significand: Tensor,
    rounding: RoundingMode,
    generator: torch.Generator | None,
    out: Tensor | None,
) -> Tensor:
    """Round ``significand`` to integers; Inf and NaN stay."""
    if rounding is RoundingMode.NEAREST_EVEN:
        return torch.round(significand, out=out)
    # On magnitudes, since torch's floor is vectorised on the CPU and its trunc is not.
    magnitude = significand.abs()
    if rounding is RoundingMode.TOWARD_ZERO:
        magnitude.floor_()
    elif rounding is RoundingMode.NEAREST_AWAY:
        # The number below a half: a half itself would round the sum up to 1 from just
        # below a half.
        below_half = 0.5 - torch.finfo(magnitude.dtype).eps / 4
        magnitude.add_(below_half).floor_()
    else:
        lower = magnitude.floor()
        remainder = magnitude.sub_(lower).nan_to_num_(0.0)  # exact; Inf - Inf is NaN
        draw = torch.rand(
            remainder.shape,
            dtype=remainder.dtype,
            device=_place_of_draws(remainder.device, generator),
            generator=generator,
        ).to(remainder.device)
        magnitude = lower.add_(draw < remainder)
    return magnitude.copysign_(significand)
