"""Quantization as operators that torch's exporter keeps whole and turns into ONNX
QuantizeLinear and DequantizeLinear.

The simulation of a quantized model computes in floating point. For the artefact the
same model is traced with these in the places of its quantizers. Codes of 8 bits and
fewer are uint8 (activations) and int8 (weights), which is what integer kernels on CPUs
multiply fastest; formats of fewer bits are clipped to their range first.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from roundoff.export.onnx.attention import attention


@torch.library.custom_op("roundoff::quantize_dequantize", mutates_args=())
def quantize_dequantize(
    x: Tensor, scale: Tensor, zero_point: Tensor, axis: int, block: int
) -> Tensor:
    """Pass ``x`` through ONNX QuantizeLinear and DequantizeLinear; the dtype of
    ``zero_point`` is that of the codes.
    """
    step = _spread(scale, x.ndim, axis, block)
    low = torch.iinfo(zero_point.dtype).min
    high = torch.iinfo(zero_point.dtype).max
    zero = _spread(zero_point.to(torch.float32), x.ndim, axis, block)
    return (torch.round(x / step).add(zero).clamp(low, high) - zero) * step


@quantize_dequantize.register_fake
def _(x: Tensor, *_: Any) -> Tensor:
    return torch.empty_like(x)


@torch.library.custom_op("roundoff::dequantize", mutates_args=())
def dequantize(
    codes: Tensor, scale: Tensor, zero_point: Tensor, axis: int, block: int
) -> Tensor:
    """ONNX DequantizeLinear of stored codes; ``block`` is how many of them share a
    scale along ``axis``, or 0.
    """
    step = _spread(scale, codes.ndim, axis, block)
    zero = _spread(zero_point.to(torch.float32), codes.ndim, axis, block)
    if block:  # the last block may be short
        step = step.narrow(axis, 0, codes.shape[axis])
        zero = zero.narrow(axis, 0, codes.shape[axis])
    return (codes.to(torch.float32) - zero) * step


@dequantize.register_fake
def _(codes: Tensor, *_: Any) -> Tensor:
    return torch.empty(codes.shape, dtype=torch.float32, device=codes.device)


def _spread(values: Tensor, ndim: int, axis: int, block: int) -> Tensor:
    """Shape values so that they broadcast against a tensor.

    There is one for all, for each index of ``axis`` or for each block along it.
    """
    if block:
        return values.repeat_interleave(block, axis)
    if not values.ndim:
        return values
    shape = [1] * ndim
    shape[axis] = -1
    return values.view(shape)


def cast_and_back(
    x: Tensor, scale: Tensor, dtype: torch.dtype, axis: int, block: int
) -> Tensor:
    """Put ``x`` on the grid of an fp8 dtype with these scales.

    Q/DQ would say the same, but ONNX Runtime fuses Q/DQ of fp8 into integer kernels
    that it has not, and drops a Relu before it as if codes had no sign.
    """
    if block:
        shape = (*x.shape[:axis], -1, block, *x.shape[axis + 1 :])
        return cast_and_back(
            x.reshape(shape), scale.unsqueeze(axis + 1), dtype, 0, 0
        ).reshape(x.shape)
    top = torch.finfo(dtype).max
    step = scale if scale.ndim == x.ndim else _spread(scale, x.ndim, axis, 0)
    return (x / step).clamp(-top, top).to(dtype).to(torch.float32) * step


@torch.library.custom_op("roundoff::site", mutates_args=())
def site(x: Tensor, name: str) -> Tensor:  # noqa: ARG001 (for the exporter)
    """Return ``x`` as the result of the call with this name: the exported nodes that
    made it will have the name.
    """
    return x.clone()


@site.register_fake
def _(x: Tensor, _name: str) -> Tensor:
    return torch.empty_like(x)


@torch.library.custom_op("roundoff::dynamic_quantize_dequantize", mutates_args=())
def dynamic_quantize_dequantize(x: Tensor) -> Tensor:
    """Pass ``x`` through ONNX DynamicQuantizeLinear and DequantizeLinear.

    Codes are uint8, with one scale for the tensor, from its own range.
    """
    low = x.amin().clamp(max=0.0)
    high = x.amax().clamp(min=0.0)
    scale = (high - low) / 255.0
    scale = torch.where(scale > 0, scale, torch.ones_like(scale))
    zero = torch.round(-low / scale).clamp(0, 255)
    return (torch.round(x / scale).add(zero).clamp(0, 255) - zero) * scale


@dynamic_quantize_dequantize.register_fake
def _(x: Tensor) -> Tensor:
    return torch.empty_like(x)


#: The domain of nodes that only carry a name, which ``tidy`` takes out again.
DOMAIN = "roundoff"


#: A recurrent layer as a node, until ``lower_recurrent`` makes ONNX's of it.
LAYER = "RecurrentLayer"


def translations() -> dict[Callable[..., Any], Callable[..., Any]]:
    """Return a table for ``torch.onnx.export(custom_translation_table=...)``."""
    from onnx.defs import OpSchema
    from onnxscript import opset21
    from onnxscript.values import Op, Opset

    op: Any = opset21
    schema = OpSchema(
        "Site",
        DOMAIN,
        1,
        inputs=[OpSchema.FormalParameter("x", "T")],
        outputs=[OpSchema.FormalParameter("y", "T")],
        type_constraints=[
            (
                "T",
                [
                    "tensor(float)",
                    "tensor(double)",
                    "tensor(float16)",
                    "tensor(bfloat16)",
                ],
                "",
            )
        ],
        attributes=[OpSchema.Attribute("name", OpSchema.AttrType.STRING, "")],
    )
    mark: Any = Op(Opset(DOMAIN, 1), "Site", schema)

    def quantized(x: Any, scale: Any, zero_point: Any, axis: int, block: int) -> Any:
        codes = op.QuantizeLinear(x, scale, zero_point, axis=axis, block_size=block)
        return op.DequantizeLinear(
            codes, scale, zero_point, axis=axis, block_size=block
        )

    def dequantized(
        codes: Any, scale: Any, zero_point: Any, axis: int, block: int
    ) -> Any:
        return op.DequantizeLinear(
            codes, scale, zero_point, axis=axis, block_size=block
        )

    def dynamically(x: Any) -> Any:
        codes, scale, zero_point = op.DynamicQuantizeLinear(x)
        return op.DequantizeLinear(codes, scale, zero_point)

    def named(x: Any, name: str) -> Any:
        return mark(x, name=name)

    operators = torch.ops.roundoff
    return {
        operators.recurrent_layer.default: _recurrent(Opset(DOMAIN, 1)),
        operators.quantize_dequantize.default: quantized,
        operators.dequantize.default: dequantized,
        operators.dynamic_quantize_dequantize.default: dynamically,
        operators.site.default: named,
        torch.ops.aten.scaled_dot_product_attention.default: attention,
    }


def _recurrent(opset: Any) -> Callable[..., Any]:
    """Return the translation of ``recurrent_layer``."""
    from onnx.defs import OpSchema
    from onnxscript.values import Op

    operands = OpSchema.FormalParameter(
        "operands",
        "T",
        param_option=OpSchema.FormalParameterOption.Variadic,
        is_homogeneous=False,
    )
    result = [OpSchema.FormalParameter(name, "F") for name in ("y", "y_h", "y_c")]
    integers = ["tensor(int64)", "tensor(int32)"]
    attributes = [("kind", OpSchema.AttrType.STRING)]
    attributes += [(n, OpSchema.AttrType.INT) for n in ("weights", "cell", "lengths")]
    schema = OpSchema(
        LAYER,
        DOMAIN,
        1,
        inputs=[operands],
        outputs=result,
        type_constraints=[
            ("T", ["tensor(float)", *integers], ""),
            ("F", ["tensor(float)"], ""),
        ],
        attributes=[OpSchema.Attribute(name, kind, "") for name, kind in attributes],
    )
    layer: Any = Op(opset, LAYER, schema)

    def written(
        x: Any,
        hidden: Any,
        cell: Any,
        lengths: Any,
        weights: Sequence[Any],
        biases: Sequence[Any],
        kind: str,
    ) -> Any:
        states = [state for state in (hidden, cell, lengths) if state is not None]
        return layer(
            x,
            *states,
            *weights,
            *biases,
            kind=kind,
            weights=len(weights),
            cell=int(cell is not None),
            lengths=int(lengths is not None),
        )

    return written
