"""Tidy an exported graph: sites as names, nothing idle, nothing twice, nothing local.

The passes work on ``onnx_ir``, which torch's exporter builds. None changes a value: a
clip goes only where QuantizeLinear saturates at the same codes, a zero point only where
it is zero.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from typing import Any

import numpy as np

from roundoff.export.onnx.bias_of_products import keep_biases_apart
from roundoff.export.onnx.clips import (
    clips_as_extremes,
    drop_clips,
    extremes_as_clips,
)
from roundoff.export.onnx.editing import (
    add_constant,
    block_size,
    constant_array,
    input_at,
    is_zero,
    nodes_of,
    producer_of,
    replace_by,
    replace_node,
)
from roundoff.export.onnx.group_norm import split_group_norms
from roundoff.export.onnx.indices import widen_indices
from roundoff.export.onnx.operators import DOMAIN
from roundoff.export.onnx.pixel_shuffle import shuffles_as_moves
from roundoff.export.onnx.raise_codes import drop_repeated, lower_codes, raise_codes
from roundoff.export.onnx.scales_after_products import move_scales
from roundoff.export.onnx.transposed import as_convolutions


def tidy(model: Any, pack: bool = True) -> None:
    """Tidy an ``onnx_ir.Model`` in place.

    With ``pack``, codes of 4 bits and fewer are stored two to a byte, as INT4.
    """
    from onnx_ir.passes import common

    graph = model.graph
    _name_sites(graph)
    widen_indices(graph)
    split_group_norms(graph)
    extremes_as_clips(graph)
    drop_repeated(graph)
    raise_codes(graph)
    as_convolutions(graph)
    shuffles_as_moves(graph)
    lower_codes(graph)
    drop_repeated(graph)
    drop_clips(graph)
    clips_as_extremes(graph)
    _pool(graph)
    _cast_fp8(graph)
    _turn_blocks(graph)
    _look_up(graph)
    _add_floats(graph)
    keep_biases_apart(graph)
    move_scales(graph)
    _drop_zero_points(graph)
    _store_unsigned(graph)
    if pack:
        _pack(graph)
    # small tensors alone are compared: scales and zero points that are equal
    common.DeduplicateInitializersPass(size_limit=4)(model)
    _separate_zero_points(graph)
    drop_unread(model)
    _drop_unread_inputs(graph)
    model.opset_imports.pop(DOMAIN, None)
    _drop_defaults(model)
    _strip(model)


def drop_unread(model: Any) -> None:
    """Drop the nodes and constants that no output needs."""
    from onnx_ir.passes import common

    common.RemoveUnusedNodesPass()(model)


def _name_sites(graph: Any) -> None:
    """Name the nodes between the operands of a site and its mark after the site.

    Where there are many, the operator stands behind the name.
    """
    named: set[int] = set()
    marks = [node for node in graph if node.domain == DOMAIN]
    for mark in marks:
        site = mark.attributes["name"].as_string()
        nodes = list(_nodes_of_site(mark, named))
        counts: Counter[str] = Counter()
        for node in reversed(nodes):
            counts[node.op_type] += 1
            number = counts[node.op_type]
            suffix = "" if number == 1 else f"_{number}"
            node.name = f"{site}:{node.op_type}{suffix}" if len(nodes) > 1 else site
    for mark in marks:
        replace_node(graph, mark, mark.inputs[0])


def _nodes_of_site(mark: Any, named: set[int]) -> Iterator[Any]:
    """Yield the nodes behind a mark up to Q/DQ and other sites, and add them to ``named``."""
    queue = [mark.inputs[0].producer()]
    while queue:
        node = queue.pop()
        if node is None or id(node) in named or _ends_site(node):
            continue
        named.add(id(node))
        yield node
        queue += [value.producer() for value in node.inputs if value is not None]


def _ends_site(node: Any) -> bool:
    ends = ("QuantizeLinear", "DequantizeLinear")
    return bool(node.domain == DOMAIN or node.op_type.endswith(ends))


def _pool(graph: Any) -> None:
    """Turn means over both spatial axes of codes into GlobalAveragePool.

    ONNX Runtime has an integer kernel for that.
    """
    import onnx_ir as ir

    for node in nodes_of(graph, "ReduceMean"):
        if not _is_spatial_mean(node):
            continue
        pool = ir.node("GlobalAveragePool", [node.inputs[0]], name=node.name)
        nodes = [pool]
        keeps = node.attributes.get("keepdims")
        if keeps is not None and not keeps.as_int():
            inputs = [pool.outputs[0], node.inputs[1]]
            nodes.append(ir.node("Squeeze", inputs, name=f"{node.name}:Squeeze"))
        replace_by(graph, node, nodes)


def _is_spatial_mean(node: Any) -> bool:
    """Return True for means over the last two of four axes of dequantized codes."""
    source = node.inputs[0]
    axes = constant_array(input_at(node, 1))
    if axes is None or source.shape is None or len(source.shape) != 4:
        return False
    if producer_of(source, "DequantizeLinear") is None:
        return False
    return sorted(int(axis) % 4 for axis in axes.flatten()) == [2, 3]


def _turn_blocks(graph: Any) -> None:
    """Store a weight in blocks transposed where it is transposed before its product.

    So MatMulNBits reads it.
    """
    import onnx_ir as ir

    for node in nodes_of(graph, "Transpose"):
        producer = producer_of(node.inputs[0], "DequantizeLinear")
        if producer is None or len(list(producer.outputs[0].uses())) != 1:
            continue
        codes = constant_array(producer.inputs[0])
        if not block_size(producer) or codes is None or codes.ndim != 2:
            continue
        for value in producer.inputs:
            if len(list(value.uses())) == 1:
                array = np.ascontiguousarray(constant_array(value).T)
                value.const_value = ir.tensor(array, name=value.name)
                value.shape = value.const_value.shape
        axis = 1 - producer.attributes["axis"].as_int() % 2
        producer.attributes["axis"] = ir.AttrInt64("axis", axis)
        replace_node(graph, node, producer.outputs[0])


def _look_up(graph: Any) -> None:
    """Look up rows of a table as codes, and dequantize these: not the whole table."""
    for node in nodes_of(graph, "Gather"):
        table = producer_of(node.inputs[0], "DequantizeLinear")
        axis = node.attributes.get("axis")
        if table is None or (axis is not None and axis.as_int()):
            continue
        scale = constant_array(table.inputs[1])
        codes = table.inputs[0].const_value
        if (
            codes is None
            or scale is None
            or not is_zero(constant_array(table.inputs[2]))
        ):
            continue
        if scale.ndim == 0:
            replace_by(graph, node, _rows_of_tensor_scale(node, table))
        elif _has_row_scales(table, scale):
            replace_by(graph, node, _rows_of_row_scales(graph, node, table))


def _has_row_scales(table: Any, scale: Any) -> bool:
    if scale.ndim != 1 or block_size(table):
        return False
    return bool(table.attributes["axis"].as_int() == 0)


def _rows_of_tensor_scale(node: Any, table: Any) -> list[Any]:
    import onnx_ir as ir

    rows = ir.node("Gather", [table.inputs[0], node.inputs[1]], name=node.name)
    return [rows, ir.node("DequantizeLinear", [rows.outputs[0], table.inputs[1]])]


def _rows_of_row_scales(graph: Any, node: Any, table: Any) -> list[Any]:
    import onnx_ir as ir

    ids = node.inputs[1]
    last = add_constant(graph, np.array([-1], dtype=np.int64), f"{node.name}_last")
    rows = ir.node("Gather", [table.inputs[0], ids], name=node.name)
    steps = ir.node("Gather", [table.inputs[1], ids], name=f"{node.name}:scale")
    column = ir.node("Unsqueeze", [steps.outputs[0], last])
    to_float = {"to": ir.DataType.FLOAT.value}
    cast = ir.node("Cast", [rows.outputs[0]], attributes=to_float)
    product = ir.node("Mul", [cast.outputs[0], column.outputs[0]])
    return [rows, steps, column, cast, product]


def _add_floats(graph: Any) -> None:
    """Store a bias that no kernel adds to its sums as the floats that its codes stand for.

    They would be computed anew in every run, and nothing fuses with them.
    """
    for node in nodes_of(graph, "DequantizeLinear"):
        codes, scale = (constant_array(value) for value in node.inputs[:2])
        if codes is None or scale is None or codes.dtype != np.int32:
            continue
        readers = {use.node.op_type for use in node.outputs[0].uses()}
        if readers <= {"Add", "ConvTranspose"}:
            floats = codes.astype(np.float32) * scale
            name = f"{node.inputs[0].name}_values"
            replace_node(graph, node, add_constant(graph, floats, name))


def _cast_fp8(graph: Any) -> None:
    """Put Cast and Mul in the place of DequantizeLinear of stored fp8 codes.

    ONNX Runtime would make integer kernels of it that it has not. Codes in blocks lie in
    an axis of their own.
    """
    import onnx_ir as ir

    for node in nodes_of(graph, "DequantizeLinear"):
        value = node.inputs[0]
        codes = constant_array(value)
        scale = constant_array(node.inputs[1])
        if codes is None or scale is None:
            continue
        if not value.const_value.dtype.name.startswith("FLOAT8"):
            continue
        axis = node.attributes["axis"].as_int()
        name = node.inputs[1].name
        shape = codes.shape
        size = block_size(node)
        if size:
            split = codes.reshape(*shape[:axis], -1, size, *shape[axis + 1 :])
            dtype = value.const_value.dtype
            value.const_value = ir.Tensor(split, dtype=dtype, name=value.name)
            scale = np.expand_dims(scale, axis + 1)
        elif scale.ndim:
            scale = scale.reshape([-1 if i == axis else 1 for i in range(len(shape))])
        to_float = {"to": ir.DataType.FLOAT.value}
        cast = ir.node("Cast", [value], attributes=to_float)
        steps = add_constant(graph, scale, f"{name}_along")
        nodes = [cast, ir.node("Mul", [cast.outputs[0], steps])]
        if size:
            whole = np.array(shape, dtype=np.int64)
            inputs = [nodes[-1].outputs[0], add_constant(graph, whole, f"{name}_shape")]
            nodes.append(ir.node("Reshape", inputs))
        replace_by(graph, node, nodes)


def _drop_zero_points(graph: Any) -> None:
    """Drop the zero points of stored codes that are all 0: that is what absence means.

    Some stay for ONNX Runtime: it looks for those of products, and asks for one of each
    scale where it stores int8 as uint8 (``session.x64quantprecision``, which converts
    weights with codes of more than 7 bits).
    """
    for node in nodes_of(graph, "DequantizeLinear"):
        codes = constant_array(node.inputs[0])
        zero = constant_array(input_at(node, 2))
        if codes is None or not is_zero(zero):
            continue
        converted = bool(zero.ndim) and _exceeds_seven_bits(codes)
        if zero.dtype != np.int8 or not (converted or _is_read_by_product(node)):
            node.resize_inputs(2)


def _store_unsigned(graph: Any) -> None:
    """Store int8 codes as uint8 where several nodes read a weight: a layer in a loop.

    ONNX Runtime makes a DequantizeLinear for each reader, and cannot convert the same
    codes to uint8 more than once (``session.x64quantprecision``).
    """
    for node in nodes_of(graph, "DequantizeLinear"):
        value = node.inputs[0]
        codes = constant_array(value)
        if codes is None or codes.dtype != np.int8 or not _is_shared(node):
            continue
        if len(list(value.uses())) > 1 or not _exceeds_seven_bits(codes):
            continue
        zero = constant_array(input_at(node, 2))
        if zero is None:
            zero = np.zeros(constant_array(node.inputs[1]).shape, np.int8)
        node.resize_inputs(3)
        for place, array, name in ((0, codes, "unsigned"), (2, zero, "offset")):
            unsigned = (array.astype(np.int16) + 128).astype(np.uint8)
            constant = add_constant(graph, unsigned, f"{value.name}_{name}")
            node.replace_input_with(place, constant)


def _is_shared(node: Any) -> bool:
    return len(list(node.outputs[0].uses())) > 1


def _separate_zero_points(graph: Any) -> None:
    """Give each weight a zero point of its own: ONNX Runtime cannot convert one twice."""
    for node in nodes_of(graph, "DequantizeLinear"):
        zero = input_at(node, 2)
        array = constant_array(zero)
        if array is None or array.dtype != np.int8 or len(list(zero.uses())) < 2:
            continue
        name = f"{node.inputs[0].name}_zero_point"
        node.replace_input_with(2, add_constant(graph, array.copy(), name))


def _is_read_by_product(node: Any) -> bool:
    readers = {use.node.op_type for use in node.outputs[0].uses()}
    return bool(readers & {"Gemm", "MatMul"}) and not block_size(node)


def _exceeds_seven_bits(codes: Any) -> bool:
    return bool(codes.size) and bool(codes.min() < -64 or codes.max() > 63)


def _pack(graph: Any) -> None:
    """Store codes of 4 bits and fewer as INT4.

    They are cast to int8 for integer kernels; MatMulNBits reads four bits.
    """
    import onnx_ir as ir

    for value in list(graph.initializers.values()):
        if not _fits_four_bits(value):
            continue
        packed = constant_array(value).astype(ir.DataType.INT4.numpy())
        value.const_value = ir.Tensor(packed, dtype=ir.DataType.INT4, name=value.name)
        value.dtype = ir.DataType.INT4
        readers = [use.node for use in value.uses()]
        if all(block_size(node) and len(node.inputs) == 2 for node in readers):
            continue
        to_int8 = {"to": ir.DataType.INT8.value}
        cast = ir.node("Cast", [value], attributes=to_int8, name=f"{value.name}:int8")
        graph.insert_before(next(node for node in graph if node in readers), cast)
        for node in readers:
            node.replace_input_with(0, cast.outputs[0])


def _fits_four_bits(value: Any) -> bool:
    """Return True for codes of a weight, not zero points, from -8 to 7."""
    codes = constant_array(value)
    if codes is None or codes.dtype != np.int8 or codes.ndim < 2:
        return False
    if any(use.idx for use in value.uses()):
        return False
    return bool(codes.min() >= -8 and codes.max() <= 7)


def _drop_unread_inputs(graph: Any) -> None:
    """Drop the inputs that nothing reads: the labels beside the images."""
    unread = [v for v in graph.inputs if not v.uses() and not v.is_graph_output()]
    for value in unread:
        graph.inputs.remove(value)


def _drop_defaults(model: Any) -> None:
    """Leave out attributes that are what their absence means.

    They are a tenth of the nodes' bytes in a small network.
    """
    from onnx.defs import SchemaError, get_schema

    version = model.opset_imports[""]
    for node in model.graph:
        try:
            declared = get_schema(node.op_type, version, node.domain).attributes
        except SchemaError:  # an operator of ONNX Runtime's own
            continue
        if node.op_type in ("QuantizeLinear", "DequantizeLinear"):
            scale = constant_array(node.inputs[1])
            if scale is not None and scale.ndim == 0:
                node.attributes.pop("axis", None)
        for name in list(node.attributes):
            if name in declared and _is_default(node.attributes[name], declared[name]):
                del node.attributes[name]


def _is_default(attribute: Any, declared: Any) -> bool:
    from onnx.helper import get_attribute_value

    if not declared.default_value.name:
        return False
    default = get_attribute_value(declared.default_value)
    if isinstance(default, bytes):
        default = default.decode()
    return bool(attribute.value == default)


def _strip(model: Any) -> None:
    """Leave out what the exporter notes of its own work.

    These are stack traces (with paths of this machine) and inferred shapes.
    """
    from onnx_ir.passes import common

    common.ClearMetadataAndDocStringPass()(model)
    graph = model.graph
    ends = [*graph.inputs, *graph.outputs]
    constants = list(graph.initializers.values())
    declared = {id(value) for value in ends}
    inner = [value for node in graph for value in node.outputs]
    for value in [*(v for v in inner if id(v) not in declared), *constants]:
        value.shape = None
        value.type = None
    for value in [*ends, *constants]:
        value.metadata_props.clear()
        value.doc_string = None
    model.producer_name = "roundoff"
    model.producer_version = None
    model.doc_string = None
