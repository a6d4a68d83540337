"""Deployed: a quantized model with stored codes, in the operators that become ONNX's."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from roundoff.errors import QuantizationError
from roundoff.export.operators import dequantize, dynamic_quantize_dequantize, quantize_dequantize
from roundoff.formats import PerAxis, PerGroup
from roundoff.quantize.model import Passing, QuantizedModel, sum_scale
from roundoff.quantize.quantizer import Quantizer


class Deployed(nn.Module):
    """What is exported: weights are buffers of integer codes, values pass through Q/DQ.

    ``reasons`` says which quantizers ONNX cannot express; those stay as the arithmetic that simulates them.
    """

    def __init__(self, model: QuantizedModel) -> None:
        super().__init__()
        self.quantized = model
        self.reasons: dict[str, str] = {}
        self.lowered: dict[str, str] = {}
        for index, (name, quantizer) in enumerate(model.named()):
            why = refuses(quantizer)
            if why is not None:
                self.reasons[name] = why
                continue
            self.lowered[name] = f"q{index}"
            if quantizer.dynamic:
                continue
            self._keep(f"q{index}", quantizer)

    def _keep(self, key: str, quantizer: Quantizer) -> None:
        qparams, shift = quantizer.qparams(), 0 if quantizer.weight else 2 ** (quantizer.fmt.width - 1)
        grouped = isinstance(quantizer.granularity, PerGroup)
        scale = qparams.scale.squeeze(_reduced(quantizer)) if grouped else qparams.scale.flatten()
        zero = torch.zeros_like(scale) if qparams.zero_point is None else qparams.zero_point.reshape(scale.shape)
        if not grouped and not isinstance(quantizer.granularity, PerAxis):
            scale, zero = scale.reshape(()), zero.reshape(())
        dtype = torch.int8 if quantizer.weight else torch.uint8
        self.register_buffer(f"{key}_scale", scale.contiguous())
        self.register_buffer(f"{key}_zero_point", (zero + shift).to(dtype).contiguous())
        if quantizer.weight:
            weight = self.quantized.model.get_parameter(quantizer.name)
            self.register_buffer(f"{key}_codes", quantizer.codes(weight.detach()).to(torch.int8))

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """The model's output."""
        with self.quantized.through(_Lowered(self)):
            return self.quantized(*args, **kwargs)


class _Lowered(Passing):
    def __init__(self, owner: Deployed) -> None:
        self.owner = owner

    def value(self, name: str, quantizer: Quantizer, value: Tensor) -> Tensor:
        key = self.owner.lowered.get(name)
        if key is None:
            return super().value(name, quantizer, value)
        if quantizer.dynamic:
            return _tensor(dynamic_quantize_dequantize(value))
        scale, zero = getattr(self.owner, f"{key}_scale"), getattr(self.owner, f"{key}_zero_point")
        axis, block = 0, 0
        if isinstance(quantizer.granularity, PerAxis):
            axis = quantizer.granularity.axis
        elif isinstance(quantizer.granularity, PerGroup):
            axis, block = quantizer.granularity.axis % value.ndim, quantizer.granularity.group_size
        if quantizer.weight:
            return self._dequantized(key, f"{key}_codes", axis, block)
        if quantizer.fmt.width < 8:
            qparams = quantizer.qparams()
            zero_point = 0.0 if qparams.zero_point is None else float(qparams.zero_point)
            step = float(qparams.scale)
            low, high = quantizer.fmt.min_finite, quantizer.fmt.max_finite
            value = value.clamp((low - zero_point) * step, (high - zero_point) * step)
        return _tensor(quantize_dequantize(value, scale, zero, axis))

    def bias(self, site: str, bias: Tensor, quantizers: list[Quantizer]) -> Tensor:
        scale = sum_scale(quantizers)
        if scale is None or any(q.name in self.owner.reasons for q in quantizers):
            return super().bias(site, bias, quantizers)
        key = "bias_" + site.translate(str.maketrans("./#", "___"))
        if not hasattr(self.owner, key):
            codes = torch.round(bias.detach() / scale).clamp_(-(2.0**31), 2.0**31 - 1).to(torch.int32)
            scale = scale.expand(codes.shape).contiguous() if scale.numel() > 1 else scale.reshape(())
            self.owner.register_buffer(key, codes)
            self.owner.register_buffer(key + "_scale", scale)
            self.owner.register_buffer(key + "_zero_point", torch.zeros_like(scale, dtype=torch.int32))
        return self._dequantized(key, key, 0, 0)

    def _dequantized(self, key: str, codes: str, axis: int, block: int) -> Tensor:
        parts = [getattr(self.owner, name) for name in (codes, f"{key}_scale", f"{key}_zero_point")]
        return _tensor(dequantize(*parts, axis, block))


def _tensor(value: Any) -> Tensor:
    """A custom operator's result, whose type torch does not declare."""
    found: Tensor = value
    return found


def _reduced(quantizer: Quantizer) -> int:
    if not isinstance(quantizer.granularity, PerGroup):
        raise QuantizationError("no groups", where=quantizer.name)
    axis = quantizer.granularity.axis
    return axis + 1 if axis >= 0 else axis


def refuses(quantizer: Quantizer) -> str | None:
    """Why ONNX's QuantizeLinear cannot express a quantizer, or None."""
    fmt = quantizer.fmt
    if fmt.one_quantum != 1.0 or not fmt.has_zero:
        return f"{fmt.name} stays simulated: QuantizeLinear is used for integers here"
    if fmt.width > 8:
        return f"{fmt.name} stays simulated: integer kernels multiply codes of 8 bits"
    if quantizer.dynamic and quantizer.weight:
        return "weights whose scale is chosen while the model runs"
    return None
