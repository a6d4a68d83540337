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
    replace_by,
)

#: Products, at most, for one of the transposed convolution: a kernel is filled up with
#: zeros to a multiple of the stride. Up to there integers were faster (AVX2, no VNNI).
MOST_PRODUCTS = 2.0
#: Clips that stand between a kernel and its codes.
_CLIPS = ("Relu", "Clip")


@dataclass(frozen=True, slots=True)
class _Axis:
    """How one spatial axis of a transposed convolution becomes one of a convolution.

    Attributes:
        stride: phases side by side.
        taps: of each phase.
        length: of the convolution's result.
        pads: zeros before and behind the input.
        cut: elements to leave out before and behind, when phases are in their places.
    """

    stride: int
    taps: int
    length: int
    pads: tuple[int, int]
    cut: tuple[int, int]


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


def shuffles_as_moves(graph: Any) -> None:
    """Put the channels of a pixel shuffle of codes in the order that is moved fastest.

    They are the rows of the convolution before it. ONNX Runtime has DepthToSpace for codes
    only with these in the order of planes, and moves them one by one.
    """
    for node in nodes_of(graph, "DepthToSpace"):
        convolution = _convolution_before(node)
        shape = node.inputs[0].shape
        if convolution is None or shape is None or len(shape) != 4:
            continue
        lengths = list(shape)[2:]
        if not all(isinstance(length, int) for length in lengths):
            continue
        size = node.attributes["blocksize"].as_int()
        mode = node.attributes.get("mode")
        if mode is not None and mode.as_string() == "CRD":
            _reorder_rows(convolution, size)
        axes = [_Axis(size, 1, length, (0, 0), (0, 0)) for length in lengths]
        _move_codes(graph, node, axes)


def _convolution_before(node: Any) -> Any:
    """Return the convolution with stored weights that alone makes the codes of a node."""
    values = producer_of(node.inputs[0], "DequantizeLinear")
    if values is None or only_reader(values.outputs[0]) is not node:
        return None
    codes = producer_of(values.inputs[0], "QuantizeLinear")
    if codes is None or only_reader(codes.outputs[0]) is not values:
        return None
    scale = constant_array(codes.inputs[1])
    maker = codes.inputs[0].producer()
    if maker is not None and maker.op_type in _CLIPS:
        maker = maker.inputs[0].producer()
    if scale is None or scale.ndim or maker is None or maker.op_type != "Conv":
        return None
    alone = only_reader(maker.outputs[0]) is not None
    plain = _integers(maker, "group", [1]) == [1]
    stored = [producer_of(v, "DequantizeLinear") for v in maker.inputs[1:]]
    owned = all(s is not None and _is_stored(s) and _is_owned(s) for s in stored)
    return maker if alone and plain and owned else None


def _is_owned(node: Any) -> bool:
    """Return True where nothing else reads the codes, nor what dequantizes them."""
    readers = [node.inputs[0].uses(), node.outputs[0].uses()]
    return all(len(list(uses)) == 1 for uses in readers)


def _reorder_rows(convolution: Any, size: int) -> None:
    """Order the result's channels by phase first; in place."""
    rows = constant_array(convolution.inputs[1].producer().inputs[0]).shape[0]
    order = np.arange(rows).reshape(-1, size, size).transpose(1, 2, 0).ravel()
    graph = convolution.graph
    for operand in convolution.inputs[1:]:
        stored = operand.producer()
        for place, value in enumerate(stored.inputs):
            array = constant_array(value)
            if array.ndim:
                name = f"{value.name}_of_{convolution.name}"
                ordered = add_constant(graph, array[order], name)
                stored.replace_input_with(place, ordered)


def _move_codes(graph: Any, node: Any, axes: list[_Axis]) -> None:
    """Put phases side by side in the place of a node, with Q/DQ of its codes behind."""
    import onnx_ir as ir

    grid = producer_of(node.inputs[0], "DequantizeLinear").inputs[1:]
    moved = _moved(graph, node.name, node.inputs[0], axes)
    codes = ir.node("QuantizeLinear", [moved[-1].outputs[0], *grid])
    values = ir.node("DequantizeLinear", [codes.outputs[0], *grid])
    replace_by(graph, node, [*moved, codes, values])


def _last_before_codes(node: Any) -> Any:
    """Return the node whose result a QuantizeLinear alone reads: this, or its clip."""
    reader = only_reader(node.outputs[0])
    if reader is None:
        return None
    last = reader if reader.op_type in _CLIPS else node
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
        if bias is None or not _is_stored(bias):
            return None
    if weight is None or not _is_stored(weight):
        return None
    return _Operands(weight, bias)


def _is_stored(node: Any) -> bool:
    return all(constant_array(value) is not None for value in node.inputs)


def _axes(node: Any, kernel: tuple[int, ...]) -> list[_Axis] | None:
    """Return what becomes of each spatial axis, or None where that is not known or dear."""
    rank = len(kernel)
    shape = node.inputs[0].shape
    strides = _integers(node, "strides", [1] * rank)
    pads = _integers(node, "pads", [0] * 2 * rank)
    extra = _integers(node, "output_padding", [0] * rank)
    if shape is None or len(shape) != rank + 2 or not _is_plain(node):
        return None
    if max(strides) == 1:
        return None
    lengths = list(shape)[2:]
    if not all(isinstance(length, int) for length in lengths):
        return None
    axes = [
        _axis(lengths[i], kernel[i], strides[i], (pads[i], pads[rank + i]), extra[i])
        for i in range(rank)
    ]
    if any(axis is None for axis in axes):
        return None
    products = math.prod(a.stride * a.taps for a in axes if a is not None)
    if products > MOST_PRODUCTS * math.prod(kernel):
        return None
    return [axis for axis in axes if axis is not None]


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
) -> _Axis | None:
    taps = -(-kernel // stride)
    result = (length - 1) * stride - sum(pads) + kernel + extra
    skipped, before = divmod(pads[0], stride)
    blocks = -(-(before + result) // stride)
    pad_before = taps - 1 - skipped
    pad_behind = blocks - length + taps - 1 - pad_before
    if pad_before < 0 or pad_behind < 0 or result < 1:
        return None
    behind = blocks * stride - before - result
    return _Axis(stride, taps, blocks, (pad_before, pad_behind), (before, behind))


def _rewrite(
    graph: Any, node: Any, last: Any, operands: _Operands, axes: list[_Axis]
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
    moved = _moved(graph, name, values.outputs[0], axes)
    graph.insert_before(quantize, [codes, values, *moved])
    quantize.replace_input_with(0, moved[-1].outputs[0])


def _phase_weight(graph: Any, node: Any, stored: Any, axes: list[_Axis]) -> Any:
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


def _moved(graph: Any, name: str, value: Any, axes: list[_Axis]) -> list[Any]:
    """Return the nodes that put phases, which are channels, side by side.

    The channels are last meanwhile, as ONNX Runtime's integer convolutions have them;
    those of the last axis's phases move together.
    """
    rank = len(axes)
    lengths = [axis.length for axis in axes]
    whole = [axis.length * axis.stride for axis in axes]
    chain = _Chain(graph, name, value)
    chain.add("Transpose", perm=[0, *range(2, rank + 2), 1])
    if rank > 1:
        apart = [0, *lengths, *(axis.stride for axis in axes[:-1]), -1]
        chain.add("Reshape", chain.integers("apart", apart))
        pairs = [place for i in range(1, rank) for place in (i, rank + i)]
        chain.add("Transpose", perm=[0, *pairs, rank, 2 * rank])
    chain.add("Reshape", chain.integers("whole", [0, *whole, -1]))
    if any(any(axis.cut) for axis in axes):
        ends = [size - axis.cut[1] for size, axis in zip(whole, axes, strict=True)]
        chain.add(
            "Slice",
            chain.integers("first", [axis.cut[0] for axis in axes]),
            chain.integers("end", ends),
            chain.integers("axes", list(range(1, rank + 1))),
        )
    chain.add("Transpose", perm=[0, rank + 1, *range(1, rank + 1)])
    return chain.nodes


class _Chain:
    """Nodes that each read the one before, named after a site."""

    def __init__(self, graph: Any, name: str, value: Any) -> None:
        self.graph = graph
        self.name = name
        self.value = value
        self.nodes: list[Any] = []

    def add(self, operator: str, *operands: Any, **attributes: Any) -> None:
        """Append a node that reads the last one's result."""
        import onnx_ir as ir

        number = sum(node.op_type == operator for node in self.nodes)
        suffix = f"_{number + 1}" if number else ""
        node = ir.node(
            operator,
            [self.value, *operands],
            attributes=attributes,
            name=f"{self.name}:{operator}{suffix}",
        )
        self.nodes.append(node)
        self.value = node.outputs[0]

    def integers(self, kind: str, numbers: list[int]) -> Any:
        """Add a constant for a node."""
        array = np.array(numbers, dtype=np.int64)
        return add_constant(self.graph, array, f"{self.name}_{kind}")
