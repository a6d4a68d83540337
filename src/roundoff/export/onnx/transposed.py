"""Transposed convolutions of codes as convolutions: ONNX Runtime has integer kernels for these.

With stride ``s``, output ``s j + r`` is a sum over the inputs ``j - q`` times the weights
``s q + r``: a convolution for each phase ``r``, whose outputs lie side by side. All phases
are channels of one convolution; a transposition puts them in their places, and what the
padding cuts off is cut off. The sums are the same integers.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import numpy as np

from roundoff.export.onnx.editing import (
    add_constant,
    constant_array,
    input_at,
    nodes_of,
    only_reader,
    producer_of,
)
from roundoff.export.onnx.phases import PhaseAxis, phases_in_place, spatial_lengths

#: Products, at most, for one of the transposed convolution: a kernel is filled up with
#: zeros to a multiple of the stride. Up to there integers were faster (AVX2, no VNNI).
MOST_PRODUCTS = 2.0
#: Clips that stand between a kernel and its codes.
CLIPS = ("Relu", "Clip")


@dataclass(frozen=True, slots=True)
class _Operands:
    """Stored codes of a transposed convolution and what dequantizes them."""

    weight: Any
    bias: Any


def as_convolutions(graph: Any) -> None:
    """Write transposed convolutions of codes, whose results are codes, as convolutions."""
    for node in nodes_of(graph, "ConvTranspose"):
        last = _last_before_codes(node)
        operands = _operands(node)
        if last is None or operands is None:
            continue
        axes = _axes(node, constant_array(operands.weight.inputs[0]).shape[2:])
        if axes is not None:
            _rewrite(graph, node, last, operands, axes)


def _last_before_codes(node: Any) -> Any:
    """Return the node whose result a QuantizeLinear alone reads: this, or its clip."""
    reader = only_reader(node.outputs[0])
    if reader is None:
        return None
    last = reader if reader.op_type in CLIPS else node
    quantize = only_reader(last.outputs[0])
    if quantize is None or quantize.op_type != "QuantizeLinear":
        return None
    scale = constant_array(quantize.inputs[1])
    return last if scale is not None and scale.ndim == 0 else None


def _operands(node: Any) -> _Operands | None:
    """Return the operands of a transposed convolution of codes; None for another."""
    if producer_of(node.inputs[0], "DequantizeLinear") is None:
        return None
    weight = producer_of(node.inputs[1], "DequantizeLinear")
    bias_value = input_at(node, 2)
    bias = None
    if bias_value is not None:
        bias = producer_of(bias_value, "DequantizeLinear")
        if bias is None or not is_stored(bias):
            return None
    if weight is None or not is_stored(weight):
        return None
    return _Operands(weight, bias)


def is_stored(node: Any) -> bool:
    """Return True where all that a node reads is constant."""
    return all(constant_array(value) is not None for value in node.inputs)


def _axes(node: Any, kernel: tuple[int, ...]) -> list[PhaseAxis] | None:
    """Return what becomes of each spatial axis, or None where that is not known or dear."""
    rank = len(kernel)
    lengths = spatial_lengths(node.inputs[0], rank)
    strides = _integers(node, "strides", [1] * rank)
    if lengths is None or not _is_plain(node) or max(strides) == 1:
        return None
    pads = _integers(node, "pads", [0] * 2 * rank)
    extra = _integers(node, "output_padding", [0] * rank)
    sides = zip(pads[:rank], pads[rank:], strict=True)
    axes = []
    for place, along in enumerate(sides):
        axis = _axis(lengths[place], kernel[place], strides[place], along, extra[place])
        if axis is None:
            return None
        axes.append(axis)
    products = math.prod(axis.stride * axis.taps for axis in axes)
    return axes if products <= MOST_PRODUCTS * math.prod(kernel) else None


def _is_plain(node: Any) -> bool:
    """Return True without groups and dilation, for padding that is given in numbers."""
    auto_pad = node.attributes.get("auto_pad")
    return (
        max(_integers(node, "dilations", [1])) == 1
        and _integers(node, "group", [1]) == [1]
        and (auto_pad is None or auto_pad.as_string() == "NOTSET")
        and "output_shape" not in node.attributes
    )


def _integers(node: Any, name: str, default: list[int]) -> list[int]:
    attribute = node.attributes.get(name)
    if attribute is None:
        return default
    value = attribute.value
    return [int(value)] if isinstance(value, int) else [int(v) for v in value]


def _axis(
    length: int, kernel: int, stride: int, pads: tuple[int, int], extra: int
) -> PhaseAxis | None:
    taps = -(-kernel // stride)
    result = (length - 1) * stride - sum(pads) + kernel + extra
    skipped, before = divmod(pads[0], stride)
    blocks = -(-(before + result) // stride)
    pad_before = taps - 1 - skipped
    pad_behind = blocks - length + taps - 1 - pad_before
    if pad_before < 0 or pad_behind < 0 or result < 1:
        return None
    behind = blocks * stride - before - result
    return PhaseAxis(stride, taps, blocks, (pad_before, pad_behind), (before, behind))


def _rewrite(
    graph: Any, node: Any, last: Any, operands: _Operands, axes: list[PhaseAxis]
) -> None:
    """Put a convolution, codes, and what moves these in the place of a node."""
    import onnx_ir as ir

    name = node.name
    quantize = only_reader(last.outputs[0])
    phases = math.prod(axis.stride for axis in axes)
    inputs = [node.inputs[0], _phase_weight(graph, node, operands.weight, axes)]
    if operands.bias is not None:
        inputs.append(_repeated_bias(graph, node, operands.bias, phases))
    sides = zip(*(axis.pads for axis in axes), strict=True)
    pads = [pad for side in sides for pad in side]
    convolution = ir.node("Conv", inputs, attributes={"pads": pads}, name=name)
    graph.insert_before(node, convolution)
    node.outputs[0].replace_all_uses_with(convolution.outputs[0])
    graph.remove(node, safe=True)

    written = convolution if last is node else last
    codes = ir.node("QuantizeLinear", [written.outputs[0], *quantize.inputs[1:]])
    values = ir.node("DequantizeLinear", [codes.outputs[0], *quantize.inputs[1:]])
    moved = phases_in_place(graph, name, values.outputs[0], axes)
    graph.insert_before(quantize, [codes, values, *moved])
    quantize.replace_input_with(0, moved[-1].outputs[0])


def _phase_weight(graph: Any, node: Any, stored: Any, axes: list[PhaseAxis]) -> Any:
    """Return the dequantized weight [phases and out, in, taps ...] of all phases."""
    codes = constant_array(stored.inputs[0])
    rank = len(axes)
    filled = np.pad(
        codes,
        [(0, 0), (0, 0)]
        + [
            (0, axis.taps * axis.stride - size)
            for axis, size in zip(axes, codes.shape[2:], strict=True)
        ],
    )
    split = [size for axis in axes for size in (axis.taps, axis.stride)]
    parts = filled.reshape(*codes.shape[:2], *split)
    taps = [2 + 2 * i for i in range(rank)]
    phases = parts.transpose([*(tap + 1 for tap in taps), 1, 0, *taps])
    # the first tap of a convolution meets the earliest input
    flipped = np.flip(phases, tuple(range(rank + 2, 2 * rank + 2)))
    weight = flipped.reshape(-1, codes.shape[0], *(axis.taps for axis in axes))
    count = math.prod(axis.stride for axis in axes)
    scales = [_tiled(constant_array(value), count) for value in stored.inputs[1:]]
    return _dequantized(graph, node, "weight", [np.ascontiguousarray(weight), *scales])


def _repeated_bias(graph: Any, node: Any, stored: Any, count: int) -> Any:
    arrays = [_tiled(constant_array(value), count) for value in stored.inputs]
    return _dequantized(graph, node, "bias", arrays)


def _tiled(array: Any, count: int) -> Any:
    return np.tile(array, count) if array.ndim else array


def _dequantized(graph: Any, node: Any, operand: str, arrays: list[Any]) -> Any:
    """Add stored codes to the graph, and what dequantizes them before a node."""
    import onnx_ir as ir

    kinds = ("codes", "scale", "zero_point")
    values = [
        add_constant(graph, array, f"{node.name}_{operand}_{kind}")
        for array, kind in zip(arrays, kinds, strict=False)
    ]
    dequantize = ir.node("DequantizeLinear", values, attributes={"axis": 0})
    graph.insert_before(node, dequantize)
    return dequantize.outputs[0]
