"""Tidy an exported graph: names of sites on nodes, no operator that does nothing, no number twice, nothing of this machine.

The passes work on ``onnx_ir``, which torch's exporter builds. None changes a value: a clip goes only where QuantizeLinear
saturates at the same codes, a zero point only where it is zero.
"""

from __future__ import annotations

from collections import Counter
from typing import Any

import numpy as np

from roundoff.export.onnx.operators import DOMAIN

__all__ = ["tidy"]


def tidy(model: Any, pack: bool = True) -> None:
    """Tidy an ``onnx_ir.Model`` in place. ``pack``: codes of 4 bits and fewer are stored two to a byte, as INT4."""
    from onnx_ir.passes import common

    graph = model.graph
    _name_sites(graph)
    _drop_clips(graph)
    _pool(graph)
    _cast_fp8(graph)
    _turn_blocks(graph)
    _look_up(graph)
    _drop_zero_points(graph)
    if pack:
        _pack(graph)
    # small tensors alone are compared: scales and zero points that are equal
    common.DeduplicateInitializersPass(size_limit=4)(model)
    _separate_zero_points(graph)
    common.RemoveUnusedNodesPass()(model)
    for value in [
        v for v in graph.inputs if not v.uses() and not v.is_graph_output()
    ]:  # the labels beside the images
        graph.inputs.remove(value)
    model.opset_imports.pop(DOMAIN, None)
    _drop_defaults(model)
    _strip(model)


def _name_sites(graph: Any) -> None:
    """Nodes between the operands of a site and its mark are called as the site, with the operator if there are many."""
    named: set[int] = set()
    for mark in [n for n in graph if n.domain == DOMAIN]:
        name = mark.attributes["name"].as_string()
        found, queue = [], [mark.inputs[0].producer()]
        while queue:
            node = queue.pop()
            if (
                node is None
                or node.domain == DOMAIN
                or id(node) in named
                or node.op_type.endswith("QuantizeLinear")
            ):
                continue
            if node.op_type == "DequantizeLinear":
                continue
            named.add(id(node))
            found.append(node)
            queue += [v.producer() for v in node.inputs if v is not None]
        counts: Counter[str] = Counter()
        for node in reversed(found):
            counts[node.op_type] += 1
            extra = "" if counts[node.op_type] == 1 else f"_{counts[node.op_type]}"
            node.name = name if len(found) == 1 else f"{name}:{node.op_type}{extra}"
    for mark in [n for n in graph if n.domain == DOMAIN]:
        _replace(graph, mark, mark.inputs[0])


def _replace(graph: Any, node: Any, value: Any) -> None:
    """Let every reader of what a node returns read ``value`` instead, and take the node out."""
    node.outputs[0].replace_all_uses_with(value, replace_graph_outputs=True)
    graph.remove(node, safe=True)


def _number(value: Any) -> Any:
    return (
        None
        if value is None or value.const_value is None
        else value.const_value.numpy()
    )


def _drop_clips(graph: Any) -> None:
    """Take out a Relu or Clip whose only reader is a QuantizeLinear that saturates at the same codes (uint8, per tensor)."""
    for node in [n for n in graph if n.op_type in ("Relu", "Clip")]:
        uses = list(node.outputs[0].uses())
        if (
            len(uses) != 1
            or node.outputs[0].is_graph_output()
            or uses[0].node.op_type != "QuantizeLinear"
        ):
            continue
        scale, zero = (_number(v) for v in uses[0].node.inputs[1:3])
        if (
            scale is None
            or zero is None
            or scale.ndim
            or zero.dtype not in (np.uint8, np.int8)
        ):
            continue
        low, high = _bounds(node)
        if low is None or high is None:
            continue
        kind = np.iinfo(zero.dtype)
        with np.errstate(all="ignore"):
            ends = [
                np.rint(np.float32(bound) / np.float32(scale)) + np.float32(zero)
                for bound in (low, high)
            ]
        if ends[0] <= kind.min and ends[1] >= kind.max:
            _replace(graph, node, node.inputs[0])


def _bounds(node: Any) -> tuple[float | None, float | None]:
    if node.op_type == "Relu":
        return 0.0, np.inf
    bounds: list[float | None] = []
    for place, free in ((1, -np.inf), (2, np.inf)):
        given = node.inputs[place] if len(node.inputs) > place else None
        constant = _number(given)
        bounds.append(
            free if given is None else None if constant is None else float(constant)
        )
    return bounds[0], bounds[1]


def _pool(graph: Any) -> None:
    """Means over both spatial axes of codes become GlobalAveragePool, for which ONNX Runtime has an integer kernel."""
    import onnx_ir as ir

    for node in [n for n in graph if n.op_type == "ReduceMean"]:
        source, producer = node.inputs[0], node.inputs[0].producer()
        axes = _number(node.inputs[1]) if len(node.inputs) > 1 else None
        if (
            source.shape is None
            or axes is None
            or producer is None
            or producer.op_type != "DequantizeLinear"
        ):
            continue
        if len(source.shape) != 4 or sorted(int(a) % 4 for a in axes.flatten()) != [
            2,
            3,
        ]:
            continue
        kept = node.attributes.get("keepdims")
        made = [ir.node("GlobalAveragePool", [source], name=node.name)]
        if kept is not None and not kept.as_int():
            made.append(
                ir.node(
                    "Squeeze",
                    [made[0].outputs[0], node.inputs[1]],
                    name=f"{node.name}:Squeeze",
                )
            )
        graph.insert_before(node, made)
        made[-1].outputs[0].name = node.outputs[0].name
        _replace(graph, node, made[-1].outputs[0])


def _turn_blocks(graph: Any) -> None:
    """A weight in blocks that is transposed before its product is stored transposed: as MatMulNBits reads it."""
    import onnx_ir as ir

    for node in [n for n in graph if n.op_type == "Transpose"]:
        producer = node.inputs[0].producer()
        if (
            producer is None
            or producer.op_type != "DequantizeLinear"
            or len(list(producer.outputs[0].uses())) != 1
        ):
            continue
        block = producer.attributes.get("block_size")
        parts = [_number(v) for v in producer.inputs]
        if (
            block is None
            or not block.as_int()
            or parts[0] is None
            or parts[0].ndim != 2
        ):
            continue
        for value, array in zip(producer.inputs, parts, strict=True):
            if len(list(value.uses())) == 1:
                value.const_value = ir.tensor(
                    np.ascontiguousarray(array.T), name=value.name
                )
                value.shape = value.const_value.shape
        producer.attributes["axis"] = ir.AttrInt64(
            "axis", 1 - producer.attributes["axis"].as_int() % 2
        )
        _replace(graph, node, producer.outputs[0])


def _look_up(graph: Any) -> None:
    """Rows of a table of codes are looked up as codes, and dequantized then: not the whole table in every run."""
    import onnx_ir as ir

    for node in [n for n in graph if n.op_type == "Gather"]:
        table, ids = node.inputs[0].producer(), node.inputs[1]
        axis = node.attributes.get("axis")
        if (
            table is None
            or table.op_type != "DequantizeLinear"
            or (axis is not None and axis.as_int())
        ):
            continue
        scale, zero, block = (
            _number(table.inputs[1]),
            _number(table.inputs[2]),
            table.attributes.get("block_size"),
        )
        if (
            table.inputs[0].const_value is None
            or scale is None
            or zero is None
            or zero.astype(np.float32).any()
        ):
            continue
        rows = ir.node("Gather", [table.inputs[0], ids], name=node.name)
        made = [rows]
        if scale.ndim == 0:
            made.append(ir.node("DequantizeLinear", [rows.outputs[0], table.inputs[1]]))
        elif (
            scale.ndim == 1
            and table.attributes["axis"].as_int() == 0
            and not (block and block.as_int())
        ):
            last = ir.tensor(np.array([-1], dtype=np.int64), name=f"{node.name}_last")
            graph.initializers[last.name] = ir.Value(name=last.name, const_value=last)
            steps = ir.node("Gather", [table.inputs[1], ids], name=f"{node.name}:scale")
            column = ir.node(
                "Unsqueeze", [steps.outputs[0], graph.initializers[last.name]]
            )
            made += [
                steps,
                column,
                ir.node(
                    "Cast",
                    [rows.outputs[0]],
                    attributes={"to": ir.DataType.FLOAT.value},
                ),
            ]
            made.append(ir.node("Mul", [made[-1].outputs[0], column.outputs[0]]))
        else:
            continue
        graph.insert_before(node, made)
        made[-1].outputs[0].name = node.outputs[0].name
        _replace(graph, node, made[-1].outputs[0])


def _cast_fp8(graph: Any) -> None:
    """Stored fp8 codes go through Cast and Mul in the place of DequantizeLinear, of which ONNX Runtime would make integer
    kernels that it has not. Codes in blocks lie in an axis of their own."""
    import onnx_ir as ir

    def constant(array: Any, name: str) -> Any:
        graph.initializers[name] = ir.Value(
            name=name, const_value=ir.tensor(array, name=name)
        )
        return graph.initializers[name]

    for node in [n for n in graph if n.op_type == "DequantizeLinear"]:
        value, codes, scale = (
            node.inputs[0],
            _number(node.inputs[0]),
            _number(node.inputs[1]),
        )
        if (
            codes is None
            or scale is None
            or not value.const_value.dtype.name.startswith("FLOAT8")
        ):
            continue
        axis, size = (
            node.attributes["axis"].as_int(),
            node.attributes["block_size"].as_int(),
        )
        shape, name = codes.shape, node.inputs[1].name
        if size:
            split = codes.reshape(*shape[:axis], -1, size, *shape[axis + 1 :])
            value.const_value = ir.Tensor(
                split, dtype=value.const_value.dtype, name=value.name
            )
            scale = np.expand_dims(scale, axis + 1)
        elif scale.ndim:
            scale = scale.reshape([-1 if i == axis else 1 for i in range(len(shape))])
        cast = ir.node("Cast", [value], attributes={"to": ir.DataType.FLOAT.value})
        made = [
            cast,
            ir.node("Mul", [cast.outputs[0], constant(scale, f"{name}_along")]),
        ]
        if size:
            whole = constant(np.array(shape, dtype=np.int64), f"{name}_shape")
            made.append(ir.node("Reshape", [made[-1].outputs[0], whole]))
        graph.insert_before(node, made)
        made[-1].outputs[0].name = node.outputs[0].name
        _replace(graph, node, made[-1].outputs[0])


def _drop_zero_points(graph: Any) -> None:
    """Drop the zero points of stored codes that are all 0: that is what absence means.

    Some stay for ONNX Runtime: it looks for those of products, and asks for one of each
    scale where it stores int8 as uint8 (``session.x64quantprecision``, which converts
    weights with codes of more than 7 bits).
    """
    for node in [n for n in graph if n.op_type == "DequantizeLinear"]:
        codes = _number(node.inputs[0])
        if len(node.inputs) < 3 or codes is None:
            continue
        zero = _number(node.inputs[2])
        if zero is None or zero.astype(np.float32).any():
            continue
        converted = bool(zero.ndim) and _exceeds_seven_bits(codes)
        if zero.dtype != np.int8 or not (converted or _is_read_by_product(node)):
            node.resize_inputs(2)


def _separate_zero_points(graph: Any) -> None:
    """Give each weight a zero point of its own: ONNX Runtime cannot convert one twice."""
    import onnx_ir as ir

    for node in [n for n in graph if n.op_type == "DequantizeLinear"]:
        zero = node.inputs[2] if len(node.inputs) > 2 else None
        if zero is None or len(list(zero.uses())) < 2 or _number(zero) is None:
            continue
        if _number(zero).dtype == np.int8:
            name = f"{node.inputs[0].name}_zero_point"
            copy = ir.tensor(_number(zero).copy(), name=name)
            graph.initializers[name] = ir.Value(name=name, const_value=copy)
            node.replace_input_with(2, graph.initializers[name])


def _is_read_by_product(node: Any) -> bool:
    readers = {use.node.op_type for use in node.outputs[0].uses()}
    return bool(readers & {"Gemm", "MatMul"}) and not _size(node)


def _exceeds_seven_bits(codes: Any) -> bool:
    return bool(codes.size) and bool(codes.min() < -64 or codes.max() > 63)


def _pack(graph: Any) -> None:
    import onnx_ir as ir

    for value in list(graph.initializers.values()):
        codes, readers = _number(value), [use.node for use in value.uses()]
        if (
            codes is None
            or codes.dtype != np.int8
            or codes.ndim < 2
            or any(use.idx for use in value.uses())  # zero points, not codes
            or codes.min() < -8
            or codes.max() > 7
        ):
            continue
        value.const_value = ir.Tensor(
            codes.astype(ir.DataType.INT4.numpy()),
            dtype=ir.DataType.INT4,
            name=value.name,
        )
        value.dtype = ir.DataType.INT4
        if all(_size(node) and len(node.inputs) == 2 for node in readers):
            continue  # MatMulNBits reads four bits
        cast = ir.node(
            "Cast",
            [value],
            attributes={"to": ir.DataType.INT8.value},
            name=f"{value.name}:int8",
        )
        graph.insert_before(next(node for node in graph if node in readers), cast)
        for node in readers:
            node.replace_input_with(0, cast.outputs[0])


def _size(node: Any) -> int:
    """How many codes share a scale, 0 where an axis or all do."""
    block = node.attributes.get("block_size")
    return 0 if block is None else int(block.as_int())


def _drop_defaults(model: Any) -> None:
    """Leave out attributes that are what their absence means: a tenth of the nodes' bytes in a small network."""
    from onnx.defs import SchemaError, get_schema
    from onnx.helper import get_attribute_value

    for node in model.graph:
        try:
            known = get_schema(
                node.op_type, model.opset_imports[""], node.domain
            ).attributes
        except SchemaError:  # an operator of ONNX Runtime's own
            continue
        scale = (
            _number(node.inputs[1])
            if node.op_type in ("QuantizeLinear", "DequantizeLinear")
            else None
        )
        if scale is not None and scale.ndim == 0:
            node.attributes.pop("axis", None)
        for name in [
            n for n in node.attributes if n in known and known[n].default_value.name
        ]:
            default = get_attribute_value(known[name].default_value)
            default = default.decode() if isinstance(default, bytes) else default
            if node.attributes[name].value == default:
                del node.attributes[name]


def _strip(model: Any) -> None:
    """Leave out what the exporter notes of its own work: stack traces (with paths of this machine) and inferred shapes."""
    from onnx_ir.passes import common

    common.ClearMetadataAndDocStringPass()(model)
    given = {id(v) for v in [*model.graph.inputs, *model.graph.outputs]}
    for node in model.graph:
        for value in node.outputs:
            if id(value) not in given:
                value.shape = value.type = None
    for value in model.graph.initializers.values():
        value.shape = value.type = None
    for value in [
        *model.graph.inputs,
        *model.graph.outputs,
        *model.graph.initializers.values(),
    ]:
        value.metadata_props.clear()
        value.doc_string = None
    model.producer_name, model.producer_version, model.doc_string = (
        "roundoff",
        None,
        None,
    )
