"""Places in 32 bits, which torch's exporter hands on to operators of ONNX that take 64."""

from __future__ import annotations

from typing import Any

from roundoff.export.onnx.editing import nodes_of

#: Operators whose second operand holds places, of 64 bits alone (ONNX opset 21).
_WIDE = ("ScatterND", "GatherND")


def widen_indices(graph: Any) -> None:
    """Cast places to int64 where an operator takes no others."""
    import onnx_ir as ir

    for node in nodes_of(graph, *_WIDE):
        places = node.inputs[1]
        if places.dtype != ir.DataType.INT32:
            continue
        attributes = {"to": ir.DataType.INT64.value}
        cast = ir.node("Cast", [places], attributes=attributes)
        graph.insert_before(node, cast)
        node.replace_input_with(1, cast.outputs[0])
