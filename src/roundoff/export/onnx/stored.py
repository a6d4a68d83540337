"""What a quantizer becomes in ONNX: codes, scale and zero point of QuantizeLinear and DequantizeLinear, or why it cannot."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from roundoff.formats import (
    FORMATS,
    BlockFormat,
    Format,
    PerAxis,
    PerGroup,
    PerTensor,
    block_scale,
    extremes,
)

__all__ = ["Parts", "expresses", "narrower", "slow", "value_parts", "weight_parts"]

#: torch's fp8 dtypes that ONNX has too, under the same names in capitals.
_FP8 = (
    torch.float8_e4m3fn,
    torch.float8_e5m2,
    torch.float8_e4m3fnuz,
    torch.float8_e5m2fnuz,
)


@dataclass(frozen=True)
class Parts:
    """The operands of DequantizeLinear: ``scale * (codes - zero_point)``, scales along ``axis``, one for ``block`` codes."""

    codes: Tensor
    scale: Tensor
    zero_point: Tensor
    axis: int = 0
    block: int = 0


def expresses(quantizer: Any) -> str | None:
    """Why QuantizeLinear cannot express the quantizer of a value, which then stays arithmetic in fp32; None where it can."""
    fmt: Format = quantizer.fmt
    if getattr(quantizer, "exact", None) is not None:
        return (
            f"{len(quantizer.exact)} channels stay in full precision beside the codes"
        )
    if isinstance(fmt, BlockFormat):
        return f"{fmt.name}: ONNX has no operator that chooses the scales of blocks while the model runs"
    if quantizer.dynamic:
        if (
            not isinstance(quantizer.granularity, PerTensor)
            or fmt.symmetric
            or fmt.width != 8
        ):
            shared = quantizer.granularity or "cast"
            return f"dynamic {fmt.name}, {shared}: DynamicQuantizeLinear has asymmetric codes of 8 bits, per tensor"
        return None
    if not isinstance(quantizer.granularity, PerTensor | PerAxis | PerGroup):
        return f"{quantizer.granularity}: QuantizeLinear has scales per tensor, axis or group"
    if fmt.one_quantum == 1.0 and fmt.has_zero:
        return (
            None
            if fmt.width <= 16
            else f"{fmt.name}: QuantizeLinear's codes have 16 bits at most"
        )
    if fmt.torch_dtype in _FP8:
        return None
    return f"{fmt.name}: QuantizeLinear has codes of integers and fp8"


def value_parts(quantizer: Any) -> Parts:
    """Scale and zero point of a value's QuantizeLinear; ``codes`` is empty."""
    scale, zero, axis, block = _flat(quantizer)
    fmt: Format = quantizer.fmt
    if fmt.torch_dtype in _FP8:
        return Parts(
            scale.new_empty(0),
            scale,
            torch.zeros_like(scale).to(fmt.torch_dtype),
            axis,
            block,
        )
    dtype, shift = (
        (torch.uint8, 2 ** (min(fmt.width, 8) - 1))
        if fmt.width <= 8
        else (torch.uint16, 2 ** (fmt.width - 1))
    )
    return Parts(scale.new_empty(0), scale, (zero + shift).to(dtype), axis, block)


def weight_parts(quantizer: Any, weight: Tensor) -> Parts | str:
    """A weight's codes and scales; a reason where ONNX has no such codes."""
    fmt: Format = quantizer.fmt
    if getattr(quantizer, "exact", None) is not None:
        return f"{len(quantizer.exact)} channels stay in full precision: stored as its rounded values"
    if isinstance(fmt, BlockFormat):
        return _block_parts(quantizer, weight, fmt)
    if quantizer.dynamic:
        return "a weight whose scales are chosen while the model runs is stored as its rounded values"
    if not isinstance(quantizer.granularity, PerTensor | PerAxis | PerGroup):
        return f"{quantizer.granularity}: DequantizeLinear has scales per tensor, axis or group"
    if fmt.one_quantum != 1.0 and fmt.torch_dtype not in _FP8 or fmt.width > 16:
        return f"{fmt.name}: DequantizeLinear has codes of integers and fp8"
    scale, zero, axis, block = _flat(quantizer)
    codes = quantizer.codes(weight)
    dtype = (
        fmt.torch_dtype
        if fmt.torch_dtype in _FP8
        else torch.int8
        if fmt.width <= 8
        else torch.int16
    )
    return Parts(codes.to(dtype), scale, zero.to(dtype), axis % weight.ndim, block)


def _block_parts(quantizer: Any, weight: Tensor, fmt: BlockFormat) -> Parts | str:
    """Elements of few bits are multiples of their smallest: these are the codes, with a scale that is as much smaller."""
    axis = quantizer.operand.reduce % weight.ndim
    smallest = fmt.one_quantum or fmt.smallest_subnormal or fmt.smallest_normal
    top = fmt.max_finite / smallest
    missing = -weight.shape[axis] % fmt.block_size
    small = next(
        (
            f
            for f in FORMATS.values()
            if f.torch_dtype in _FP8 and _same_elements(f, fmt)
        ),
        None,
    )
    if top > 32767 and (small is None or missing):
        return f"{fmt.name}: its blocks do not divide an axis of {weight.shape[axis]}, so the rounded values are stored"
    if top > 32767:
        smallest = 1.0
    shape = list(weight.shape)
    shape[axis] = missing
    whole = torch.cat([weight, weight.new_zeros(shape)], axis)
    view, dims = PerGroup(fmt.block_size, axis).split(whole.shape)
    low, high = extremes(whole.reshape(view), dims)
    step = block_scale(torch.maximum(high, -low), fmt).squeeze(dims[0]) * smallest
    spread = step.repeat_interleave(fmt.block_size, axis).narrow(
        axis, 0, weight.shape[axis]
    )
    codes = quantizer(weight).double() / torch.where(spread == 0, 1.0, spread).double()
    if top > 32767 and small is not None and small.torch_dtype is not None:
        return Parts(
            codes.float().to(small.torch_dtype),
            step.contiguous(),
            torch.zeros_like(step),
            axis,
            fmt.block_size,
        )
    codes, dtype = codes.round(), torch.int8 if top <= 127 else torch.int16
    return Parts(
        codes.to(dtype),
        step.contiguous(),
        torch.zeros_like(step).to(dtype),
        axis,
        fmt.block_size,
    )


def _same_elements(fmt: Format, other: Format) -> bool:
    return (fmt.max_finite, fmt.fraction_bits, fmt.emin) == (
        other.max_finite,
        other.fraction_bits,
        other.emin,
    )


def _flat(quantizer: Any) -> tuple[Tensor, Tensor, int, int]:
    """Scale and zero point in ONNX's shapes, with axis and block."""
    qparams, granularity = quantizer.qparams(), quantizer.granularity
    scale = qparams.scale.detach()
    zero = (
        torch.zeros_like(scale)
        if qparams.zero_point is None
        else qparams.zero_point.detach()
    )
    if isinstance(granularity, PerGroup):
        axis = granularity.axis
        gone = axis + 1 if axis >= 0 else axis
        return (
            scale.squeeze(gone).contiguous(),
            zero.squeeze(gone).contiguous(),
            axis,
            granularity.group_size,
        )
    if isinstance(granularity, PerAxis):
        return (
            scale.flatten().contiguous(),
            zero.flatten().contiguous(),
            granularity.axis,
            0,
        )
    return scale.reshape(()), zero.reshape(()), 0, 0


def narrower(quantizer: Any) -> bool:
    """Whether codes have fewer bits than they are stored in, so that they need a clip of their own.

    A symmetric int8 that leaves out -128 gets none, since a clip keeps kernels from being fused: values under its range are
    then one code lower than in the simulation.
    """
    fmt: Format = quantizer.fmt
    return fmt.one_quantum == 1.0 and not quantizer.dynamic and fmt.width not in (8, 16)


def slow(quantizer: Any) -> str | None:
    """Why ONNX Runtime on a CPU will not gain speed from an activation in this format, or None. As measured in it."""
    fmt: Format = quantizer.fmt
    if quantizer.weight:
        return None
    if fmt.torch_dtype in _FP8:
        return f"{fmt.name} is stored and computed in fp32 by ONNX Runtime on CPUs: no gain in speed"
    if fmt.width > 8:
        return f"{fmt.name}: ONNX Runtime's integer kernels on CPUs multiply 8 bits, others compute in fp32"
    if not quantizer.dynamic and isinstance(quantizer.granularity, PerAxis | PerGroup):
        return f"{quantizer.granularity}: integer kernels have one scale for all activations"
    return None
