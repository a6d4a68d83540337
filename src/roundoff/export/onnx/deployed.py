"""Deployed: a quantized model with stored codes, in the operators that become ONNX's."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from roundoff.export.onnx.arithmetic import plainly
from roundoff.export.onnx.codes import (
    QdqOperands,
    needs_clip,
    value_operands,
    weight_operands,
    why_not_expressed,
    why_slow,
)
from roundoff.export.onnx.operators import (
    cast_and_back,
    dequantize,
    dynamic_quantize_dequantize,
    quantize_dequantize,
    site,
)
from roundoff.quantize import (
    GATE_STEP,
    Passing,
    QuantizedModel,
    round_bias,
    sum_scale,
)

#: A bound of codes, for all of them or as a tensor that broadcasts.
Bound = float | Tensor
_KEY = str.maketrans("./#", "___")
_INT32 = torch.iinfo(torch.int32)
#: Key of the operands of all sigmoids that are codes.
_GATE = "gate"
_NO_OFFSET = torch.zeros((), dtype=torch.uint8)


class Deployed(nn.Module):
    """What is exported: weights are buffers of codes, values pass through Q/DQ.

    Call it once before it is traced: codes are made when a weight is first read.

    Args:
        model: the simulation.
        plain: every quantizer as plain arithmetic in fp32 and every weight as its
            rounded values, in the place of Q/DQ.
        probe: keep what each value is behind its quantizer, in ``values``, as further
            outputs of the file.

    Attributes:
        reasons: quantizers that ONNX cannot express, and why; they are plain arithmetic
            (values) or rounded values (weights).
        slow: quantizers of values that ONNX Runtime's integer kernels on CPUs do not
            take, and why.
        places: key of each quantizer's operands in the file: ``KEY_scale``,
            ``KEY_zero_point``, ``KEY_codes``.
        values: with ``probe``, after a call: the name of each quantized value and its
            tensor.
    """

    def __init__(
        self, model: QuantizedModel, *, plain: bool = False, probe: bool = False
    ) -> None:
        super().__init__()
        self.quantized = model
        self.plain = plain
        self.probe = probe
        self.reasons: dict[str, str] = {}
        self.slow: dict[str, str] = {}
        self.places: dict[str, str] = {}
        self.values: dict[str, Tensor] = {}
        self._layouts: dict[str, tuple[int, int]] = {}
        self._bounds: dict[str, tuple[Bound, Bound]] = {}
        if not plain and any(route.gated for route in model.routes.values()):
            step = torch.tensor(GATE_STEP)
            self.keep(_GATE, QdqOperands(step.new_empty(0), step, _NO_OFFSET))
        for index, (name, quantizer) in enumerate(model.named()):
            self.places[name] = f"q{index}"
            if not quantizer.weight and not plain:
                self._prepare_value(name, quantizer)

    def _prepare_value(self, name: str, quantizer: Any) -> None:
        reason = why_not_expressed(quantizer)
        if reason is not None:
            self.reasons[name] = reason
        elif not quantizer.dynamic:
            self.keep(self.places[name], value_operands(quantizer))
            if needs_clip(quantizer):
                self._bounds[name] = _code_bounds(quantizer)
        warning = why_slow(quantizer)
        if warning is not None:
            self.slow[name] = warning

    def clipped(self, name: str, value: Tensor) -> Tensor:
        """Clip to the range of a format that has fewer codes than it is stored in."""
        if name not in self._bounds:
            return value
        low, high = self._bounds[name]
        granularity = self.quantized.quantizer(name).granularity
        if isinstance(low, float) or granularity is None:
            return value.clamp(low, high)  # type: ignore[arg-type]
        groups = value.reshape(granularity.split(value.shape)[0])
        return groups.clamp(low, high).reshape(value.shape)  # type: ignore[arg-type]

    def keep(self, key: str, operands: QdqOperands) -> None:
        """Store operands as buffers."""
        self._layouts[key] = operands.axis, operands.block
        self.register_buffer(f"{key}_scale", operands.scale.clone())
        self.register_buffer(f"{key}_zero_point", operands.zero_point)
        if operands.codes.numel():
            self.register_buffer(f"{key}_codes", operands.codes)

    def keep_values(self, key: str, values: Tensor) -> None:
        """Store rounded values where there are no codes."""
        self.register_buffer(f"{key}_values", values.detach())

    def holds(self, key: str) -> bool:
        """Return True if codes or values are stored under a key."""
        return f"{key}_scale" in self._buffers or f"{key}_values" in self._buffers

    def stored_operands(self, key: str) -> tuple[Tensor, Tensor, int, int]:
        """Return scale, zero point, axis and block that were stored."""
        scale = getattr(self, f"{key}_scale")
        zero_point = getattr(self, f"{key}_zero_point")
        return scale, zero_point, *self._layouts[key]

    def stored_values(self, key: str) -> Tensor:
        """Return the values that were stored, or those of the codes."""
        if f"{key}_values" in self._buffers:
            return _tensor(getattr(self, f"{key}_values"))
        codes = getattr(self, f"{key}_codes")
        return _tensor(dequantize(codes, *self.stored_operands(key)))

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Return the model's output."""
        self.values = {}
        with self.quantized.through(_Lowered(self)):
            return self.quantized(*args, **kwargs)


class _Lowered(Passing):
    """Pass values through Q/DQ, and read weights and biases from their codes."""

    def __init__(self, owner: Deployed) -> None:
        self.owner = owner

    def value(self, name: str, quantizer: Any, value: Tensor) -> Tensor:
        key = self.owner.places[name]
        if quantizer.weight:
            return self._weight(name, key, quantizer, value)
        passed = self._passed(name, key, quantizer, value)
        if self.owner.probe:
            # a copy: the model may write into the value itself
            self.owner.values.setdefault(name, passed.clone())
        return passed

    def _passed(self, name: str, key: str, quantizer: Any, value: Tensor) -> Tensor:
        if self.owner.plain or name in self.owner.reasons:
            return plainly(value, quantizer)
        if quantizer.dynamic:
            return _tensor(dynamic_quantize_dequantize(value))
        scale, zero, axis, block = self.owner.stored_operands(key)
        axis = axis % max(value.ndim, 1)
        if zero.is_floating_point():
            return cast_and_back(value, scale, zero.dtype, axis, block)
        value = self.owner.clipped(name, value)
        return _tensor(quantize_dequantize(value, scale, zero, axis, block))

    def _weight(self, name: str, key: str, quantizer: Any, value: Tensor) -> Tensor:
        if not self.owner.holds(key):
            self._store_weight(name, key, quantizer, value)
        return self.owner.stored_values(key)

    def _store_weight(self, name: str, key: str, quantizer: Any, value: Tensor) -> None:
        if self.owner.plain:
            self.owner.keep_values(key, quantizer(value))
            return
        operands = weight_operands(quantizer, value.detach())
        if isinstance(operands, QdqOperands):
            self.owner.keep(key, operands)
            return
        self.owner.keep_values(key, quantizer(value))
        self.owner.reasons[name] = operands

    def bias(self, name: str, bias: Tensor, quantizers: list[Any]) -> Tensor:
        key = "bias_" + name.translate(_KEY)
        if not self.owner.holds(key):
            self._store_bias(key, bias, quantizers)
        return self.owner.stored_values(key)

    def _store_bias(self, key: str, bias: Tensor, quantizers: list[Any]) -> None:
        scale = None if self.owner.plain else sum_scale(quantizers, bias.shape[-1])
        if scale is None or any(q.name in self.owner.reasons for q in quantizers):
            self.owner.keep_values(key, round_bias(bias, quantizers))
            return
        codes = torch.round(bias.detach() / scale).clamp_(
            float(_INT32.min), float(_INT32.max)
        )
        codes = codes.to(torch.int32)
        scale = scale.detach()
        if scale.numel() > 1:
            scale = scale.expand(codes.shape).contiguous()
        else:
            scale = scale.reshape(())
        zero = torch.zeros_like(scale, dtype=torch.int32)
        self.owner.keep(key, QdqOperands(codes, scale, zero))

    def gate(self, name: str, gate: Tensor) -> Tensor:
        if self.owner.plain:
            return super().gate(name, gate)
        scale, zero, axis, block = self.owner.stored_operands(_GATE)
        marked = _tensor(site(gate, f"{name}:gate"))
        return _tensor(quantize_dequantize(marked, scale, zero, axis, block))

    def result(self, name: str, result: Any) -> Any:
        if self.owner.plain:
            return result
        if isinstance(result, tuple) and result:  # of a recurrent layer
            return (self.result(name, result[0]), *result[1:])
        if not isinstance(result, Tensor) or not result.is_floating_point():
            return result
        return _tensor(site(result, name))


def _code_bounds(quantizer: Any) -> tuple[Bound, Bound]:
    """Return the smallest and largest value of a quantizer.

    These are numbers, or tensors of its scale's shape.
    """
    qparams = quantizer.qparams()
    zero = torch.zeros_like(qparams.scale)
    if qparams.zero_point is not None:
        zero = qparams.zero_point
    low = ((quantizer.fmt.min_finite - zero) * qparams.scale).detach()
    high = ((quantizer.fmt.max_finite - zero) * qparams.scale).detach()
    if low.numel() == 1:
        return float(low), float(high)
    return low, high


def _tensor(value: Any) -> Tensor:
    """Return a custom operator's result, whose type torch does not declare."""
    tensor: Tensor = value
    return tensor
