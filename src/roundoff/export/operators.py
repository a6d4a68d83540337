"""Quantization as operators that torch's exporter keeps whole and turns into ONNX QuantizeLinear and DequantizeLinear.

The simulation of a quantized model computes in floating point. For the artefact the same model is traced with these in the
places of its quantizers. Codes of 8 bits and fewer are uint8 (activations) and int8 (weights), which is what integer kernels
on CPUs multiply fastest; formats of fewer bits are clipped to their range first.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor


@torch.library.custom_op("roundoff::quantize_dequantize", mutates_args=())
def quantize_dequantize(x: Tensor, scale: Tensor, zero_point: Tensor, axis: int) -> Tensor:
    """``x`` through ONNX QuantizeLinear and DequantizeLinear; the dtype of ``zero_point`` is that of the codes."""
    shape = [1] * x.ndim
    if scale.ndim:
        shape[axis] = -1
    low, high = torch.iinfo(zero_point.dtype).min, torch.iinfo(zero_point.dtype).max
    step, zero = scale.view(shape), zero_point.to(torch.float32).view(shape)
    return (torch.round(x / step).add(zero).clamp(low, high) - zero) * step


@quantize_dequantize.register_fake
def _(x: Tensor, *_: Any) -> Tensor:
    return torch.empty_like(x)


@torch.library.custom_op("roundoff::dequantize", mutates_args=())
def dequantize(codes: Tensor, scale: Tensor, zero_point: Tensor, axis: int, block: int) -> Tensor:
    """ONNX DequantizeLinear of stored codes; ``block`` is how many of them share a scale along ``axis``, or 0."""
    step, zero = scale, zero_point.to(torch.float32)
    if block:
        step, zero = step.repeat_interleave(block, axis), zero.repeat_interleave(block, axis)
    elif scale.ndim:
        shape = [1] * codes.ndim
        shape[axis] = -1
        step, zero = step.view(shape), zero.view(shape)
    return (codes.to(torch.float32) - zero) * step


@dequantize.register_fake
def _(codes: Tensor, *_: Any) -> Tensor:
    return torch.empty(codes.shape, dtype=torch.float32, device=codes.device)


@torch.library.custom_op("roundoff::dynamic_quantize_dequantize", mutates_args=())
def dynamic_quantize_dequantize(x: Tensor) -> Tensor:
    """``x`` through ONNX DynamicQuantizeLinear and DequantizeLinear: uint8, one scale for the tensor, from its own range."""
    low, high = x.amin().clamp(max=0.0), x.amax().clamp(min=0.0)
    scale = (high - low) / 255.0
    scale = torch.where(scale > 0, scale, torch.ones_like(scale))
    zero = torch.round(-low / scale).clamp(0, 255)
    return (torch.round(x / scale).add(zero).clamp(0, 255) - zero) * scale


@dynamic_quantize_dequantize.register_fake
def _(x: Tensor) -> Tensor:
    return torch.empty_like(x)


def translations() -> dict[Callable[..., Any], Callable[..., Any]]:
    """For ``torch.onnx.export(custom_translation_table=...)``."""
    from onnxscript import opset21

    op: Any = opset21

    def quantized(x: Any, scale: Any, zero_point: Any, axis: int) -> Any:
        codes = op.QuantizeLinear(x, scale, zero_point, axis=axis)
        return op.DequantizeLinear(codes, scale, zero_point, axis=axis)

    def dequantized(codes: Any, scale: Any, zero_point: Any, axis: int, block: int) -> Any:
        return op.DequantizeLinear(codes, scale, zero_point, axis=axis, block_size=block)

    def dynamically(x: Any) -> Any:
        codes, scale, zero_point = op.DynamicQuantizeLinear(x)
        return op.DequantizeLinear(codes, scale, zero_point)

    operators = torch.ops.roundoff
    return {
        operators.quantize_dequantize.default: quantized,
        operators.dequantize.default: dequantized,
        operators.dynamic_quantize_dequantize.default: dynamically,
    }
