"""Codes through what joins and moves values: they are codes before, not only behind it.

A value that is read joined (``cat``) has one scale, behind the join. Rounding each part
with that scale gives the same values, and the kernels that make the parts write codes.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from roundoff.export.onnx.editing import (
    constant_array,
    input_at,
    nodes_of,
    only_reader,
    producer_of,
    replace_node,
)

#: Operators that ONNX Runtime runs on codes where Q/DQ stand on both sides, not otherwise.
_JOINS = ("Concat", "DepthToSpace")
#: Operators that move codes where a Q/DQ pair stands on both sides.
_MOVES = ("DepthToSpace", "Split", "Slice")
#: Operators through which it moves QuantizeLinear itself.
RESHAPES = ("Reshape", "Transpose", "Flatten", "Squeeze", "Unsqueeze")


def raise_codes(graph: Any) -> None:
    """Quantize what a join reads where its result is quantized, on the same grid."""
    for quantize in reversed(nodes_of(graph, "QuantizeLinear")):
        if not _is_per_tensor(quantize):
            continue
        join = _join_before(quantize)
        if join is not None:
            _quantize_inputs(graph, quantize, join)


def lower_codes(graph: Any) -> None:
    """Put Q/DQ of the same grid behind what moves dequantized codes: it moves codes then."""
    import onnx_ir as ir

    for node in nodes_of(graph, *_MOVES):
        before = producer_of(node.inputs[0], "DequantizeLinear")
        if before is None or constant_array(before.inputs[0]) is not None:
            continue
        if not _is_per_tensor(before):
            continue
        grid = before.inputs[1:]
        for value in node.outputs:
            codes = ir.node("QuantizeLinear", [value, *grid])
            values = ir.node("DequantizeLinear", [codes.outputs[0], *grid])
            dequantized = values.outputs[0]
            dequantized.type = value.type
            dequantized.shape = value.shape
            if value.is_graph_output():
                dequantized.name = value.name
                value.name = f"{value.name}_moved"
            value.replace_all_uses_with(dequantized, replace_graph_outputs=True)
            codes.replace_input_with(0, value)
            graph.insert_after(node, [codes, values])


def drop_repeated(graph: Any) -> None:
    """Take out Q/DQ of values that lie on that very grid: they were just dequantized."""
    for quantize in nodes_of(graph, "QuantizeLinear"):
        before = producer_of(quantize.inputs[0], "DequantizeLinear")
        if before is None or not _has_grid(before, quantize):
            continue
        for use in list(quantize.outputs[0].uses()):
            after = use.node
            if after.op_type == "DequantizeLinear" and _has_grid(after, quantize):
                _read_instead(graph, after, before.outputs[0])
        if not quantize.outputs[0].uses():
            graph.remove(quantize, safe=True)


def _read_instead(graph: Any, node: Any, value: Any) -> None:
    """Let what reads a node read a value, which takes the name of an output."""
    result = node.outputs[0]
    if result.is_graph_output():
        if value.is_graph_output():
            return
        value.name = result.name
    replace_node(graph, node, value)


def _is_per_tensor(node: Any) -> bool:
    scale = constant_array(node.inputs[1])
    return scale is not None and scale.ndim == 0


def _join_before(quantize: Any) -> Any:
    """Return the join that a QuantizeLinear alone reads, through reshapes; or None."""
    node = quantize
    while True:
        value = node.inputs[0]
        node = value.producer()
        if node is None or only_reader(value) is None:
            return None
        if node.op_type in _JOINS:
            return node
        if node.op_type not in RESHAPES:
            return None


def _quantize_inputs(graph: Any, quantize: Any, join: Any) -> None:
    """Put Q/DQ of a grid before each input of a join that is not dequantized itself."""
    import onnx_ir as ir

    for place, value in enumerate(join.inputs):
        if producer_of(value, "DequantizeLinear") is not None:
            continue
        codes = ir.node("QuantizeLinear", [value, *quantize.inputs[1:]])
        operands = [codes.outputs[0], *quantize.inputs[1:]]
        values = ir.node("DequantizeLinear", operands)
        graph.insert_before(join, [codes, values])
        join.replace_input_with(place, values.outputs[0])


def _has_grid(node: Any, other: Any) -> bool:
    """Return True where two nodes have the same constant scale and zero point."""
    for place in (1, 2):
        mine = constant_array(input_at(node, place))
        theirs = constant_array(input_at(other, place))
        if mine is None or theirs is None or mine.dtype != theirs.dtype:
            return False
        if mine.ndim or not np.array_equal(mine, theirs):
            return False
    return True
