"""Deployed: a quantized model with stored codes, in the operators that become ONNX's."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from roundoff.export.onnx.arithmetic import plainly
from roundoff.export.onnx.operators import (
    cast_and_back,
    dequantize,
    dynamic_quantize_dequantize,
    quantize_dequantize,
    site,
)
from roundoff.export.onnx.stored import (
    Parts,
    expresses,
    narrower,
    slow,
    value_parts,
    weight_parts,
)
from roundoff.quantize import Passing, QuantizedModel, round_bias, sum_scale


class Deployed(nn.Module):
    """What is exported: weights are buffers of codes, values pass through Q/DQ. Call it once before it is traced: codes are
    made when a weight is first read.

    Args:
        model: the simulation.
        plain: every quantizer as plain arithmetic in fp32 and every weight as its rounded values, in the place of Q/DQ.
        probe: keep what each value is behind its quantizer, in ``values``, as further outputs of the file.

    Attributes:
        reasons: quantizers that ONNX cannot express and why; they are plain arithmetic (values) or rounded values (weights).
        slow: quantizers of values that ONNX Runtime's integer kernels on CPUs don't take, and why.
        places: the key of each quantizer's parts in the file: ``KEY_scale``, ``KEY_zero_point``, ``KEY_codes``.
        values: with ``probe``, after a call: the name of each quantized value and its tensor.
    """

    def __init__(
        self, model: QuantizedModel, *, plain: bool = False, probe: bool = False
    ) -> None:
        super().__init__()
        self.quantized, self.plain, self.probe = model, plain, probe
        self.reasons: dict[str, str] = {}
        self.slow: dict[str, str] = {}
        self.places: dict[str, str] = {}
        self.values: dict[str, Tensor] = {}
        self._shapes: dict[str, tuple[int, int]] = {}
        self._bounds: dict[str, tuple[Any, Any]] = {}
        for index, (name, quantizer) in enumerate(model.named()):
            self.places[name] = f"q{index}"
            if not quantizer.weight and not plain:
                self._check(name, quantizer)

    def _check(self, name: str, quantizer: Any) -> None:
        why, warned = expresses(quantizer), slow(quantizer)
        if why is not None:
            self.reasons[name] = why
        elif not quantizer.dynamic:
            self.keep(self.places[name], value_parts(quantizer))
            if narrower(quantizer):
                self._bounds[name] = _bounds(quantizer)
        if warned is not None:
            self.slow[name] = warned

    def clipped(self, name: str, value: Tensor) -> Tensor:
        """``value`` inside the range of a format that has fewer codes than it is stored in."""
        if name not in self._bounds:
            return value
        low, high = self._bounds[name]
        granularity = self.quantized.quantizer(name).granularity
        if isinstance(low, float) or granularity is None:
            return value.clamp(low, high)
        return (
            value.reshape(granularity.split(value.shape)[0])
            .clamp(low, high)
            .reshape(value.shape)
        )

    def keep(self, key: str, parts: Parts) -> None:
        """Store parts as buffers."""
        self._shapes[key] = parts.axis, parts.block
        self.register_buffer(f"{key}_scale", parts.scale.clone())
        self.register_buffer(f"{key}_zero_point", parts.zero_point)
        if parts.codes.numel():
            self.register_buffer(f"{key}_codes", parts.codes)

    def parts(self, key: str) -> tuple[Tensor, Tensor, int, int]:
        """Scale, zero point, axis and block that were stored."""
        return (
            getattr(self, f"{key}_scale"),
            getattr(self, f"{key}_zero_point"),
            *self._shapes[key],
        )

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """The model's output."""
        self.values = {}
        with self.quantized.through(_Lowered(self)):
            return self.quantized(*args, **kwargs)


class _Lowered(Passing):
    def __init__(self, owner: Deployed) -> None:
        self.owner = owner

    def value(self, name: str, quantizer: Any, value: Tensor) -> Tensor:
        key = self.owner.places[name]
        if quantizer.weight:
            return self._weight(name, key, quantizer, value)
        found = self._passed(name, key, quantizer, value)
        if self.owner.probe:
            self.owner.values.setdefault(name, found)
        return found

    def _passed(self, name: str, key: str, quantizer: Any, value: Tensor) -> Tensor:
        if self.owner.plain or name in self.owner.reasons:
            return plainly(value, quantizer)
        if quantizer.dynamic:
            return _tensor(dynamic_quantize_dequantize(value))
        scale, zero, axis, block = self.owner.parts(key)
        if zero.is_floating_point():
            return cast_and_back(
                value, scale, zero.dtype, axis % max(value.ndim, 1), block
            )
        value = self.owner.clipped(name, value)
        return _tensor(
            quantize_dequantize(value, scale, zero, axis % max(value.ndim, 1), block)
        )

    def _weight(self, name: str, key: str, quantizer: Any, value: Tensor) -> Tensor:
        if (
            f"{key}_scale" not in self.owner._buffers
            and f"{key}_values" not in self.owner._buffers
        ):
            made = "" if self.owner.plain else weight_parts(quantizer, value.detach())
            if isinstance(made, Parts):
                self.owner.keep(key, made)
            else:
                self.owner.register_buffer(f"{key}_values", quantizer(value).detach())
                if made:
                    self.owner.reasons[name] = made
        if f"{key}_values" in self.owner._buffers:
            return _tensor(getattr(self.owner, f"{key}_values"))
        return self._dequantized(key)

    def bias(self, name: str, bias: Tensor, quantizers: list[Any]) -> Tensor:
        key = "bias_" + name.translate(str.maketrans("./#", "___"))
        if (
            f"{key}_scale" not in self.owner._buffers
            and f"{key}_values" not in self.owner._buffers
        ):
            scale = None if self.owner.plain else sum_scale(quantizers, bias.shape[-1])
            if scale is None or any(q.name in self.owner.reasons for q in quantizers):
                self.owner.register_buffer(
                    f"{key}_values", round_bias(bias, quantizers).detach()
                )
            else:
                codes = (
                    torch.round(bias.detach() / scale)
                    .clamp_(-(2.0**31), 2.0**31 - 1)
                    .to(torch.int32)
                )
                scale = (
                    scale.detach().expand(codes.shape).contiguous()
                    if scale.numel() > 1
                    else scale.detach().reshape(())
                )
                self.owner.keep(
                    key, Parts(codes, scale, torch.zeros_like(scale, dtype=torch.int32))
                )
        if f"{key}_values" in self.owner._buffers:
            return _tensor(getattr(self.owner, f"{key}_values"))
        return self._dequantized(key)

    def result(self, name: str, result: Any) -> Any:
        if (
            self.owner.plain
            or not isinstance(result, Tensor)
            or not result.is_floating_point()
        ):
            return result
        return _tensor(site(result, name))

    def _dequantized(self, key: str) -> Tensor:
        return _tensor(
            dequantize(getattr(self.owner, f"{key}_codes"), *self.owner.parts(key))
        )


def _bounds(quantizer: Any) -> tuple[Any, Any]:
    """The smallest and largest value of a quantizer, as numbers or of its scale's shape."""
    qparams, fmt = quantizer.qparams(), quantizer.fmt
    zero = (
        torch.zeros_like(qparams.scale)
        if qparams.zero_point is None
        else qparams.zero_point
    )
    ends = [
        ((end - zero) * qparams.scale).detach()
        for end in (fmt.min_finite, fmt.max_finite)
    ]
    low, high = (float(end) if end.numel() == 1 else end for end in ends)
    return low, high


def _tensor(value: Any) -> Tensor:
    """A custom operator's result, whose type torch does not declare."""
    found: Tensor = value
    return found
