"""Codes before what joins them: exact files by hand, and what ONNX Runtime makes of them."""

from __future__ import annotations

import numpy as np
import onnx
import onnx_ir as ir
import pytest
from onnx import TensorProto, helper, numpy_helper

from roundoff.export.onnx.raise_codes import drop_repeated, lower_codes, raise_codes
from roundoff.export.onnx.runtime import kernels

FLOAT = TensorProto.FLOAT
#: zero points and scales of three grids
GRIDS = {
    "a_step": np.float32(0.1),
    "b_step": np.float32(0.3),
    "zero": np.uint8(7),
    "axis_step": np.float32([0.1, 0.2]),
    "axis_zero": np.uint8([7, 7]),
}


def quantized(value: str, grid: str) -> list[onnx.NodeProto]:
    operands = [f"{grid}_step", "axis_zero" if grid == "axis" else "zero"]
    return [
        helper.make_node("QuantizeLinear", [value, *operands], [f"{value}_codes"]),
        helper.make_node(
            "DequantizeLinear", [f"{value}_codes", *operands], [f"{value}_values"]
        ),
    ]


def file(nodes: list[onnx.NodeProto], output: str) -> onnx.ModelProto:
    graph = helper.make_graph(
        nodes,
        "graph",
        [helper.make_tensor_value_info(n, FLOAT, [2, 4]) for n in ("x", "y")],
        [helper.make_tensor_value_info(output, FLOAT, ["r", "c"])],
        [numpy_helper.from_array(np.asarray(v), n) for n, v in GRIDS.items()],
    )
    return helper.make_model(
        graph, opset_imports=[helper.make_opsetid("", 21)], ir_version=10
    )


def changed(model: onnx.ModelProto, change) -> onnx.ModelProto:
    graph = ir.serde.deserialize_model(model)
    change(graph.graph)
    return ir.serde.serialize_model(graph)


def names(model: onnx.ModelProto) -> list[str]:
    return [node.op_type for node in model.graph.node]


def same(one, other, inference_session, tmp_path) -> None:
    rng = np.random.default_rng(0)
    feed = {n: rng.normal(0, 5, (2, 4)).astype(np.float32) for n in ("x", "y")}
    results = []
    for name, model in (("one", one), ("other", other)):
        onnx.checker.check_model(model)
        onnx.save(model, tmp_path / name)
        results += inference_session(tmp_path / name).run(None, feed)
    np.testing.assert_array_equal(*results)


@pytest.mark.parametrize("reshaped", [False, True])
def test_what_is_joined_is_codes_before(reshaped, inference_session, tmp_path):
    nodes = [
        helper.make_node("Abs", ["x"], ["x_positive"]),
        *quantized("y", "b"),
        helper.make_node("Concat", ["x_positive", "y_values"], ["joined"], axis=0),
    ]
    last = "joined"
    if reshaped:
        nodes.append(helper.make_node("Transpose", ["joined"], ["turned"], perm=[1, 0]))
        last = "turned"
    model = file([*nodes, *quantized(last, "a")], f"{last}_values")
    raised = changed(model, raise_codes)
    # y is codes already, of another scale: ONNX Runtime makes those of the whole of them
    pairs = names(raised).count("QuantizeLinear"), names(model).count("QuantizeLinear")
    assert pairs == (3, 2)
    order = names(raised)
    assert order.index("QuantizeLinear") < order.index("Concat")
    same(model, raised, inference_session, tmp_path)


@pytest.mark.parametrize("case", ["read twice", "per axis", "no join"])
def test_where_not(case):
    joined = helper.make_node("Concat", ["x", "y"], ["joined"], axis=0)
    grid = "axis" if case == "per axis" else "a"
    nodes = [joined, *quantized("joined", grid)]
    if case == "no join":
        nodes[0] = helper.make_node("Add", ["x", "y"], ["joined"])
    output = "joined_values"
    if case == "read twice":
        nodes.append(helper.make_node("Sub", ["joined_values", "joined"], ["out"]))
        output = "out"
    model = file(nodes, output)
    assert names(changed(model, raise_codes)) == names(model)


@pytest.mark.parametrize(("second", "left"), [("a", 1), ("b", 2)])
def test_a_grid_is_rounded_to_once(second, left, inference_session, tmp_path):
    nodes = [*quantized("x", "a"), *quantized("x_values", second)]
    nodes.append(helper.make_node("Add", ["x_values_values", "y"], ["out"]))
    model = file(nodes, "out")
    dropped = changed(model, drop_repeated)
    assert names(dropped).count("QuantizeLinear") == left
    same(model, dropped, inference_session, tmp_path)


def test_what_moves_codes_has_them_behind_it(inference_session, tmp_path):
    nodes = [
        *quantized("x", "a"),
        helper.make_node("Split", ["x_values"], ["u", "v"], axis=1, num_outputs=2),
        helper.make_node("Sub", ["u", "v"], ["out"]),
    ]
    model = file(nodes, "out")
    lowered = changed(model, lower_codes)
    assert names(lowered).count("QuantizeLinear") == 3
    same(model, lowered, inference_session, tmp_path)
    onnx.save(lowered, tmp_path / "lowered")
    assert "Split" not in kernels(tmp_path / "lowered").between_codes


def test_outputs_keep_their_names(inference_session, tmp_path):
    nodes = [
        *quantized("x", "a"),
        helper.make_node("Split", ["x_values"], ["u", "out"], axis=1, num_outputs=2),
    ]
    model = file(nodes, "out")
    lowered = changed(model, lower_codes)
    assert [value.name for value in lowered.graph.output] == ["out"]
    same(model, lowered, inference_session, tmp_path)


def test_floats_that_are_moved_stay_floats():
    nodes = [
        helper.make_node("Split", ["x"], ["u", "v"], axis=1, num_outputs=2),
        helper.make_node("Sub", ["u", "v"], ["out"]),
    ]
    model = file(nodes, "out")
    assert names(changed(model, lower_codes)) == names(model)
