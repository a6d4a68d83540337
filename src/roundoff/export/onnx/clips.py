"""ReLU and clips beside codes: taken out where codes saturate, else as ONNX Runtime's kernels take them.

A QuantizeLinear saturates at the ends of its codes, so that a clip at the same ends before
it changes nothing and keeps kernels apart. A Relu or Clip that stays behind a Gemm of codes
keeps it from becoming a QGemm in ONNX Runtime 1.31, which dequantizes the weights in every
run instead; Max and Min compute the same and do not.
"""

from __future__ import annotations

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
    replace_node,
)
from roundoff.export.onnx.raise_codes import RESHAPES

#: Bounds of a Clip that has none.
_FREE = (-np.inf, np.inf)


def extremes_as_clips(graph: Any) -> None:
    """Write the larger, or smaller, of a value and one constant as a Relu or Clip."""
    import onnx_ir as ir

    for node in nodes_of(graph, "Max", "Min"):
        place = _place_of_bound(node)
        if place is None:
            continue
        value = node.inputs[1 - place]
        bound = node.inputs[place]
        if node.op_type == "Max" and not float(constant_array(bound)):
            clip = ir.node("Relu", [value], name=node.name)
        else:
            bounds = [bound] if node.op_type == "Max" else [None, bound]
            clip = ir.node("Clip", [value, *bounds], name=node.name)
        replace_by(graph, node, [clip])


def _place_of_bound(node: Any) -> int | None:
    """Return which of a node's two operands is one constant number in fp32, or None."""
    if len(node.inputs) != 2:
        return None
    arrays = [constant_array(value) for value in node.inputs]
    bounds = [
        place
        for place, array in enumerate(arrays)
        if array is not None and array.ndim == 0 and array.dtype == np.float32
    ]
    return bounds[0] if len(bounds) == 1 else None


def drop_clips(graph: Any) -> None:
    """Take out a Relu or Clip whose only reader saturates at the same codes.

    The reader is a QuantizeLinear per tensor, which may stand behind reshapes.
    """
    for node in nodes_of(graph, "Relu", "Clip"):
        reader = _only_reader_behind_reshapes(node)
        if reader is None or reader.op_type != "QuantizeLinear":
            continue
        bounds = _clip_bounds(node)
        if bounds is not None and _saturates_at(reader, *bounds):
            replace_node(graph, node, node.inputs[0])


def _only_reader_behind_reshapes(node: Any) -> Any:
    reader = only_reader(node.outputs[0])
    while reader is not None and reader.op_type in RESHAPES:
        reader = only_reader(reader.outputs[0])
    return reader


def _clip_bounds(node: Any) -> tuple[float, float] | None:
    """Return the bounds of a Relu or Clip; None where they are no constants."""
    if node.op_type == "Relu":
        return 0.0, np.inf
    bounds = []
    for place, free in enumerate(_FREE, start=1):
        value = input_at(node, place)
        constant = constant_array(value)
        if value is not None and constant is None:
            return None
        bounds.append(free if constant is None else float(constant))
    return bounds[0], bounds[1]


def _saturates_at(quantize: Any, low: float, high: float) -> bool:
    """Return True if the codes of a QuantizeLinear end at these bounds, or within them."""
    scale, zero = (constant_array(value) for value in quantize.inputs[1:3])
    if scale is None or zero is None or scale.ndim:
        return False
    if zero.dtype not in (np.uint8, np.int8):
        return False
    with np.errstate(all="ignore"):
        lowest = np.rint(np.float32(low) / np.float32(scale)) + np.float32(zero)
        highest = np.rint(np.float32(high) / np.float32(scale)) + np.float32(zero)
    kind = np.iinfo(zero.dtype)
    return bool(lowest <= kind.min and highest >= kind.max)


def clips_as_extremes(graph: Any) -> None:
    """Write a Relu or Clip behind a Gemm of codes as Max and Min."""
    for node in nodes_of(graph, "Relu", "Clip"):
        product = producer_of(node.inputs[0], "Gemm")
        bounds = _clip_bounds(node)
        if product is None or bounds is None:
            continue
        if all(_is_dequantized(value) for value in product.inputs[:2]):
            nodes = _extremes(graph, node, bounds)
            if nodes:
                replace_by(graph, node, nodes)


def _is_dequantized(value: Any) -> bool:
    return producer_of(value, "DequantizeLinear") is not None


def _extremes(graph: Any, node: Any, bounds: tuple[float, float]) -> list[Any]:
    """Return Max and Min at those bounds that there are."""
    import onnx_ir as ir

    value = node.inputs[0]
    nodes = []
    for operator, bound in zip(("Max", "Min"), bounds, strict=True):
        if np.isinf(bound):
            continue
        name = f"{node.name}:{operator}"
        constant = add_constant(graph, np.array(bound, np.float32), f"{name}_bound")
        nodes.append(ir.node(operator, [value, constant], name=name))
        value = nodes[-1].outputs[0]
    return nodes
