"""The bias of a product of codes, written so that ONNX Runtime's integer kernel stays.

ONNX Runtime 1.31 turns a MatMul and an Add of one axis into Reshape, Gemm and Reshape where
every size is known, before it looks for codes; between reshapes the Gemm is no integer
kernel any more and its weights are dequantized in every run. A bias with the rank of the
product is not taken into a Gemm.
"""

from __future__ import annotations

from typing import Any

from roundoff.export.onnx.editing import (
    add_constant,
    constant_array,
    nodes_of,
    only_reader,
    producer_of,
)


def biases_of_full_rank(graph: Any) -> None:
    """Give the bias of a product of codes the rank of the product, where sizes are fixed."""
    for node in nodes_of(graph, "Add"):
        rank = _fixed_rank(node.outputs[0])
        place = _place_of_bias(node)
        # a matrix stays: its Gemm has no reshapes, and is a QGemm
        if place is None or rank < 3:
            continue
        bias = node.inputs[place]
        array = constant_array(bias).reshape((1,) * (rank - 1) + (-1,))
        new = add_constant(graph, array, f"{bias.name}_of_rank_{rank}")
        node.replace_input_with(place, new)


def _fixed_rank(value: Any) -> int:
    """Return the rank of a value whose sizes are all known; 0 for another."""
    shape = value.shape
    if shape is None or not all(isinstance(size, int) for size in shape):
        return 0
    return len(shape)


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
