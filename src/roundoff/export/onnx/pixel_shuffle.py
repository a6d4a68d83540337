"""Pixel shuffles of codes: whole runs of channels move, as codes."""

from __future__ import annotations

from typing import Any

import numpy as np

from roundoff.export.onnx.editing import (
    add_constant,
    constant_array,
    nodes_of,
    only_reader,
    producer_of,
    replace_by,
)
from roundoff.export.onnx.phases import PhaseAxis, phases_in_place, spatial_lengths
from roundoff.export.onnx.transposed import CLIPS, is_stored


def shuffles_as_moves(graph: Any) -> None:
    """Put the channels of a pixel shuffle of codes in the order that is moved fastest.

    They are the rows of the convolution before it. ONNX Runtime has DepthToSpace for codes
    only with these in the order of planes, and moves them one by one.
    """
    for node in nodes_of(graph, "DepthToSpace"):
        convolution = _convolution_before(node)
        lengths = spatial_lengths(node.inputs[0], 2)
        if convolution is None or lengths is None:
            continue
        size = node.attributes["blocksize"].as_int()
        mode = node.attributes.get("mode")
        if mode is not None and mode.as_string() == "CRD":
            _reorder_rows(convolution, size)
        axes = [PhaseAxis(size, 1, length, (0, 0), (0, 0)) for length in lengths]
        _move_codes(graph, node, axes)


def _convolution_before(node: Any) -> Any:
    """Return the convolution with stored weights that alone makes the codes of a node."""
    quantize = _quantize_before(node)
    if quantize is None:
        return None
    value = quantize.inputs[0]
    clip = value.producer()
    if clip is not None and clip.op_type in CLIPS and only_reader(value) is not None:
        value = clip.inputs[0]
    convolution = producer_of(value, "Conv")
    if convolution is None or only_reader(value) is None:
        return None
    group = convolution.attributes.get("group")
    if group is not None and group.as_int() != 1:
        return None
    stored = [producer_of(v, "DequantizeLinear") for v in convolution.inputs[1:]]
    return convolution if all(_is_owned(operand) for operand in stored) else None


def _quantize_before(node: Any) -> Any:
    """Return the QuantizeLinear, per tensor, of the codes that a node alone reads."""
    values = producer_of(node.inputs[0], "DequantizeLinear")
    if values is None or only_reader(values.outputs[0]) is not node:
        return None
    codes = producer_of(values.inputs[0], "QuantizeLinear")
    if codes is None or only_reader(codes.outputs[0]) is not values:
        return None
    scale = constant_array(codes.inputs[1])
    return codes if scale is not None and scale.ndim == 0 else None


def _is_owned(node: Any) -> bool:
    """Return True for stored codes that nothing else reads, dequantized or not."""
    if node is None or not is_stored(node):
        return False
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


def _move_codes(graph: Any, node: Any, axes: list[PhaseAxis]) -> None:
    """Put phases side by side in the place of a node, with Q/DQ of its codes behind."""
    import onnx_ir as ir

    grid = producer_of(node.inputs[0], "DequantizeLinear").inputs[1:]
    moved = phases_in_place(graph, node.name, node.inputs[0], axes)
    codes = ir.node("QuantizeLinear", [moved[-1].outputs[0], *grid])
    values = ir.node("DequantizeLinear", [codes.outputs[0], *grid])
    replace_by(graph, node, [*moved, codes, values])
