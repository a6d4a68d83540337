"""What a quantizer becomes in ONNX: codes, scale and zero point, or why it cannot."""

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

#: torch's fp8 dtypes that ONNX has too, under the same names in capitals.
_FP8 = (
    torch.float8_e4m3fn,
    torch.float8_e5m2,
    torch.float8_e4m3fnuz,
    torch.float8_e5m2fnuz,
)
#: Granularities that QuantizeLinear and DequantizeLinear have.
_GRANULARITIES = (PerTensor, PerAxis, PerGroup)


@dataclass(frozen=True, slots=True)
class QdqOperands:
    """The operands of DequantizeLinear: ``scale * (codes - zero_point)``.

    Attributes:
        codes: empty for a value, whose codes are made while the model runs.
        scale, zero_point: one for all codes, or along ``axis``.
        axis: axis along which scales lie.
        block: codes along it that share a scale; 0 for one.
    """

    codes: Tensor
    scale: Tensor
    zero_point: Tensor
    axis: int = 0
    block: int = 0


def why_not_expressed(quantizer: Any) -> str | None:
    """Return why QuantizeLinear cannot express the quantizer of a value; None where it can.

    Such a quantizer stays arithmetic in fp32.
    """
    fmt: Format = quantizer.fmt
    exact = getattr(quantizer, "exact", None)
    if exact is not None:
        return f"{len(exact)} channels stay in full precision beside the codes"
    if isinstance(fmt, BlockFormat):
        return f"{fmt.name}: ONNX has no operator that chooses the scales of blocks while the model runs"
    if quantizer.dynamic:
        return _why_not_dynamic(quantizer)
    if not isinstance(quantizer.granularity, _GRANULARITIES):
        return f"{quantizer.granularity}: QuantizeLinear has scales per tensor, axis or group"
    if fmt.torch_dtype in _FP8:
        return None
    if fmt.one_quantum != 1.0 or not fmt.has_zero:
        return f"{fmt.name}: QuantizeLinear has codes of integers and fp8"
    if fmt.width > 16:
        return f"{fmt.name}: QuantizeLinear's codes have 16 bits at most"
    return None


def _why_not_dynamic(quantizer: Any) -> str | None:
    fmt: Format = quantizer.fmt
    per_tensor = isinstance(quantizer.granularity, PerTensor)
    if per_tensor and fmt.width == 8 and not fmt.symmetric:
        return None
    shared = quantizer.granularity or "cast"
    return f"dynamic {fmt.name}, {shared}: DynamicQuantizeLinear has asymmetric codes of 8 bits, per tensor"


def value_operands(quantizer: Any) -> QdqOperands:
    """Return scale and zero point of a value's QuantizeLinear; ``codes`` is empty."""
    scale, zero, axis, block = _flat(quantizer)
    fmt: Format = quantizer.fmt
    none = scale.new_empty(0)
    if fmt.torch_dtype in _FP8:
        zero = torch.zeros_like(scale).to(fmt.torch_dtype)
    elif fmt.width <= 8:
        zero = (zero + 2 ** (fmt.width - 1)).to(torch.uint8)
    else:
        zero = (zero + 2 ** (fmt.width - 1)).to(torch.uint16)
    return QdqOperands(none, scale, zero, axis, block)


def weight_operands(quantizer: Any, weight: Tensor) -> QdqOperands | str:
    """Return a weight's codes and scales; a reason where ONNX has no such codes."""
    fmt: Format = quantizer.fmt
    reason = _why_no_codes(quantizer)
    if reason is not None:
        return reason
    if isinstance(fmt, BlockFormat):
        return _block_operands(quantizer, weight, fmt)
    scale, zero, axis, block = _flat(quantizer)
    dtype = _stored_dtype(fmt)
    codes = quantizer.codes(weight).to(dtype)
    return QdqOperands(codes, scale, zero.to(dtype), axis % weight.ndim, block)


def _why_no_codes(quantizer: Any) -> str | None:
    fmt: Format = quantizer.fmt
    exact = getattr(quantizer, "exact", None)
    if exact is not None:
        return f"{len(exact)} channels stay in full precision: stored as its rounded values"
    if isinstance(fmt, BlockFormat):
        return None
    if quantizer.dynamic:
        return "a weight whose scales are chosen while the model runs is stored as its rounded values"
    if not isinstance(quantizer.granularity, _GRANULARITIES):
        return f"{quantizer.granularity}: DequantizeLinear has scales per tensor, axis or group"
    has_codes = fmt.one_quantum == 1.0 or fmt.torch_dtype in _FP8
    if not has_codes or fmt.width > 16:
        return f"{fmt.name}: DequantizeLinear has codes of integers and fp8"
    return None


def _stored_dtype(fmt: Format) -> torch.dtype:
    if fmt.torch_dtype is not None and fmt.torch_dtype in _FP8:
        return fmt.torch_dtype
    return torch.int8 if fmt.width <= 8 else torch.int16


def _block_operands(
    quantizer: Any, weight: Tensor, fmt: BlockFormat
) -> QdqOperands | str:
    """Return codes and scales of a weight in blocks.

    Elements of few bits are multiples of their smallest: these are the codes, with a
    scale that is as much smaller. Wider elements are stored in fp8.
    """
    axis = quantizer.operand.reduce % weight.ndim
    smallest = fmt.one_quantum or fmt.smallest_subnormal or fmt.smallest_normal
    largest_code = fmt.max_finite / smallest
    if largest_code > 32767:
        fp8 = _fp8_of_elements(fmt)
        if fp8 is None or weight.shape[axis] % fmt.block_size:
            return f"{fmt.name}: its blocks do not divide an axis of {weight.shape[axis]}, so the rounded values are stored"
        step = _block_steps(weight, fmt, axis)
        codes = _divided(quantizer(weight), step, axis, fmt.block_size)
        zero = torch.zeros_like(step)
        return QdqOperands(
            codes.float().to(fp8), step.contiguous(), zero, axis, fmt.block_size
        )
    step = _block_steps(weight, fmt, axis) * smallest
    codes = _divided(quantizer(weight), step, axis, fmt.block_size).round()
    dtype = torch.int8 if largest_code <= 127 else torch.int16
    zero = torch.zeros_like(step).to(dtype)
    return QdqOperands(codes.to(dtype), step.contiguous(), zero, axis, fmt.block_size)


def _block_steps(weight: Tensor, fmt: BlockFormat, axis: int) -> Tensor:
    """Return the scale of each block along an axis; the last block may be short."""
    shape = list(weight.shape)
    shape[axis] = -weight.shape[axis] % fmt.block_size
    padded = torch.cat([weight, weight.new_zeros(shape)], axis)
    view, dims = PerGroup(fmt.block_size, axis).split(padded.shape)
    low, high = extremes(padded.reshape(view), dims)
    return block_scale(torch.maximum(high, -low), fmt).squeeze(dims[0])


def _divided(values: Tensor, step: Tensor, axis: int, block: int) -> Tensor:
    """Return values over the step of their block, in fp64; a step of 0 counts as 1."""
    steps = step.repeat_interleave(block, axis).narrow(axis, 0, values.shape[axis])
    return values.double() / torch.where(steps == 0, 1.0, steps).double()


def _fp8_of_elements(fmt: BlockFormat) -> torch.dtype | None:
    """Return the fp8 dtype with the values of a block format's elements."""
    for other in FORMATS.values():
        if other.torch_dtype in _FP8 and _has_same_elements(other, fmt):
            return other.torch_dtype
    return None


def _has_same_elements(fmt: Format, other: Format) -> bool:
    return (
        fmt.max_finite == other.max_finite
        and fmt.fraction_bits == other.fraction_bits
        and fmt.emin == other.emin
    )


def _flat(quantizer: Any) -> tuple[Tensor, Tensor, int, int]:
    """Return scale and zero point in ONNX's shapes, with axis and block."""
    qparams = quantizer.qparams()
    granularity = quantizer.granularity
    scale = qparams.scale.detach()
    zero = torch.zeros_like(scale)
    if qparams.zero_point is not None:
        zero = qparams.zero_point.detach()
    if isinstance(granularity, PerGroup):
        axis = granularity.axis
        removed = axis + 1 if axis >= 0 else axis
        scale = scale.squeeze(removed).contiguous()
        zero = zero.squeeze(removed).contiguous()
        return scale, zero, axis, granularity.group_size
    if isinstance(granularity, PerAxis):
        scale = scale.flatten().contiguous()
        return scale, zero.flatten().contiguous(), granularity.axis, 0
    return scale.reshape(()), zero.reshape(()), 0, 0


def needs_clip(quantizer: Any) -> bool:
    """Return True if codes have fewer bits than they are stored in.

    A symmetric int8 that leaves out -128 gets no clip, since a clip keeps kernels from
    being fused: values under its range are then one code lower than in the simulation.
    """
    fmt: Format = quantizer.fmt
    return fmt.one_quantum == 1.0 and not quantizer.dynamic and fmt.width not in (8, 16)


def why_slow(quantizer: Any) -> str | None:
    """Return why ONNX Runtime on a CPU gains no speed from a value's format, or None.

    As measured in ONNX Runtime 1.31.
    """
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
