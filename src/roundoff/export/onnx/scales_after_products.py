"""Products with a weight whose scales ONNX Runtime's integer kernels refuse when they run.

The kernels take one scale for a left operand, and one a column for a right operand of
two axes. A weight on the left, or on the right with batches, gets a scale of 1 in the
product, and the product is multiplied by its scales: they lie along rows, columns or
batches, never along the axis that is summed, so they stand outside the sum.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from roundoff.export.onnx.editing import (
    add_constant,
    block_size,
    constant_array,
    input_at,
    is_zero,
    nodes_of,
    replace_by,
)


def move_scales(graph: Any) -> None:
    """Multiply products by the scales of a weight where a kernel would refuse them."""
    for source in nodes_of(graph, "DequantizeLinear"):
        if not _has_symmetric_scales(source):
            continue
        axis = _axis(source)
        uses = list(source.outputs[0].uses())
        if uses and all(_is_refused(source, use, axis) for use in uses):
            _move(graph, source, axis)


def _has_symmetric_scales(source: Any) -> bool:
    """Return True for a weight with several scales and no zero point but 0."""
    scale = constant_array(source.inputs[1])
    zero = input_at(source, 2)
    if scale is None or constant_array(source.inputs[0]) is None:
        return False
    if scale.ndim != 1 or block_size(source):
        return False
    return zero is None or is_zero(constant_array(zero))


def _axis(source: Any) -> int:
    """Return the axis of a weight along which its scales lie, from the left."""
    axes: int = constant_array(source.inputs[0]).ndim
    axis: int = source.attributes["axis"].as_int()
    return axis % axes


def _is_refused(source: Any, use: Any, axis: int) -> bool:
    """Return True for a product of matrices that may have its scales outside, and must."""
    other = use.node.inputs[1 - use.idx] if use.node.op_type == "MatMul" else None
    if other is None or other.shape is None or len(other.shape) < 2:
        return False
    axes: int = constant_array(source.inputs[0]).ndim
    if use.idx == 0:
        return axes > 1 and axis != axes - 1
    return axes > 2 and axis != axes - 2


def _move(graph: Any, source: Any, axis: int) -> None:
    import onnx_ir as ir

    codes = constant_array(source.inputs[0])
    name = source.inputs[0].name
    scale = constant_array(source.inputs[1])
    column = scale.reshape([-1] + [1] * (codes.ndim - 1 - axis))
    outside = add_constant(graph, column, f"{name}_outside")
    products = [use.node for use in source.outputs[0].uses()]
    unit = add_constant(graph, np.ones((), scale.dtype), f"{name}_unit")
    source.replace_input_with(1, unit)
    if input_at(source, 2) is not None:
        zero = np.zeros((), constant_array(source.inputs[2]).dtype)
        source.replace_input_with(2, add_constant(graph, zero, f"{name}_zero"))
    for product in products:
        inner = ir.node("MatMul", list(product.inputs), name=product.name)
        inputs = [inner.outputs[0], outside]
        outer = ir.node("Mul", inputs, name=f"{product.name}:scale")
        outer.outputs[0].shape = product.outputs[0].shape
        outer.outputs[0].type = product.outputs[0].type
        replace_by(graph, product, [inner, outer])
