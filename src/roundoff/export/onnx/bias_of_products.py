"""The bias of a product of codes, written so that ONNX Runtime's integer kernel stays.

ONNX Runtime 1.31 turns a MatMul and an Add of one axis into a Gemm, before it looks for
codes: between two reshapes where every size is known, and as it is for a matrix. Where no
codes follow that Gemm is no integer kernel any more, and its weights are dequantized in
every run. A bias with the rank of the product is not taken into a Gemm with reshapes, and a
difference into none; a + b and a - (-b) are the same number.
"""

from __future__ import annotations

from typing import Any

from roundoff.export.onnx.editing import (
    add_constant,
    constant_array,
    nodes_of,
    only_reader,
    producer_of,
    replace_by,
)


def keep_biases_apart(graph: Any) -> None:
    """Write the bias of each product of codes so that no float Gemm is made of both."""
    for node in nodes_of(graph, "Add"):
        place = _place_of_bias(node)
        shape = node.outputs[0].shape
        if place is None or shape is None:
            continue
        if len(shape) == 2 and not _becomes_codes(node.outputs[0]):
            _subtract(graph, node, place)
        elif len(shape) > 2 and all(isinstance(size, int) for size in shape):
            _give_rank(graph, node, place, len(shape))


def _becomes_codes(value: Any) -> bool:
    reader = only_reader(value)
    return reader is not None and reader.op_type == "QuantizeLinear"


def _give_rank(graph: Any, node: Any, place: int, rank: int) -> None:
    """Give the bias the rank of the product."""
    bias = node.inputs[place]
    array = constant_array(bias).reshape((1,) * (rank - 1) + (-1,))
    new = add_constant(graph, array, f"{bias.name}_of_rank_{rank}")
    node.replace_input_with(place, new)


def _subtract(graph: Any, node: Any, place: int) -> None:
    """Write the sum as the difference from the negative bias."""
    import onnx_ir as ir

    bias = node.inputs[place]
    negative = add_constant(graph, -constant_array(bias), f"{bias.name}_negative")
    difference = [node.inputs[1 - place], negative]
    replace_by(graph, node, [ir.node("Sub", difference, name=node.name)])


def _place_of_bias(node: Any) -> int | None:
    """Return which operand of an Add is a bias of one axis after a product of codes."""
    for place in (0, 1):
        array = constant_array(node.inputs[place])
        product = producer_of(node.inputs[1 - place], "MatMul")
        if array is None or array.ndim != 1 or product is None:
            continue
        is_alone = only_reader(product.outputs[0]) is node
        if is_alone and all(_is_dequantized(value) for value in product.inputs):
            return place
    return None


def _is_dequantized(value: Any) -> bool:
    transpose = producer_of(value, "Transpose")
    if transpose is not None:
        value = transpose.inputs[0]
    return producer_of(value, "DequantizeLinear") is not None
