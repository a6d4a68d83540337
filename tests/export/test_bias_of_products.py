"""Products of codes keep their integer kernel where the sizes in the file are fixed."""

from __future__ import annotations

from typing import Any

import numpy as np
import onnx
import onnx_ir as ir
import pytest
from onnx import TensorProto, helper, numpy_helper

from roundoff.export.onnx.bias_of_products import keep_biases_apart
from roundoff.export.onnx.runtime import kernels

FLOAT = TensorProto.FLOAT


def product(sizes: list[Any], *, first: bool) -> onnx.ModelProto:
    """A MatMul of codes, and a bias of one axis before or after it in the Add."""
    rng = np.random.default_rng(0)
    constants = {
        # powers of two: every sum is exact in fp32
        "step": np.float32(1 / 16),
        "zero": np.uint8(100),
        "codes": rng.integers(-63, 64, (5, 8)).astype(np.int8),
        "weight_step": np.full(5, 1 / 32, np.float32),
        "weight_zero": np.zeros(5, np.int8),
        "bias": np.arange(5, dtype=np.float32),
    }
    weight = ["codes", "weight_step", "weight_zero"]
    terms = ["bias", "sums"] if first else ["sums", "bias"]
    nodes = [
        helper.make_node("QuantizeLinear", ["x", "step", "zero"], ["x_codes"]),
        helper.make_node("DequantizeLinear", ["x_codes", "step", "zero"], ["x_values"]),
        helper.make_node("DequantizeLinear", weight, ["rows"], axis=0),
        helper.make_node("Transpose", ["rows"], ["columns"], perm=[1, 0]),
        helper.make_node("MatMul", ["x_values", "columns"], ["sums"], name="fc"),
        helper.make_node("Add", terms, ["out"], name="fc:Add"),
    ]
    graph = helper.make_graph(
        nodes,
        "graph",
        [helper.make_tensor_value_info("x", FLOAT, [*sizes, 8])],
        [helper.make_tensor_value_info("out", FLOAT, [*sizes, 5])],
        [numpy_helper.from_array(np.asarray(v), n) for n, v in constants.items()],
    )
    opsets = [helper.make_opsetid("", 21)]
    return helper.make_model(graph, opset_imports=opsets, ir_version=10)


def rewritten(model: onnx.ModelProto) -> onnx.ModelProto:
    tidied = ir.serde.deserialize_model(model)
    keep_biases_apart(tidied.graph)
    changed = ir.serde.serialize_model(tidied)
    onnx.checker.check_model(changed)
    return changed


@pytest.mark.parametrize("first", [False, True], ids=["after", "before"])
@pytest.mark.parametrize(
    "sizes", [[2], [2, 3], [2, 3, 4]], ids=["a matrix", "3 axes", "4 axes"]
)
def test_a_product_of_fixed_sizes_stays_in_integers(
    sizes, first, inference_session, tmp_path
):
    model = product(sizes, first=first)
    x = np.random.default_rng(1).normal(0, 4, (*sizes, 8)).astype(np.float32)
    results = []
    for name, proto in (("before.onnx", model), ("after.onnx", rewritten(model))):
        onnx.save(proto, tmp_path / name)
        (result,) = inference_session(tmp_path / name).run(None, {"x": x})
        results.append(result)
    np.testing.assert_array_equal(*results)
    assert kernels(tmp_path / "after.onnx").counts["MatMulIntegerToFloat"] == 1


def test_a_product_of_free_sizes_is_left():
    model = product(["n", 3], first=False)
    same = ir.serde.serialize_model(ir.serde.deserialize_model(model))
    assert rewritten(model) == same


def test_a_matrix_that_becomes_codes_is_left():
    model = product([6], first=False)
    codes = helper.make_node("QuantizeLinear", ["sum", "step", "zero"], ["out"])
    model.graph.node[-1].output[0] = "sum"
    model.graph.node.append(codes)
    model.graph.output[0].type.tensor_type.elem_type = TensorProto.UINT8
    model = onnx.shape_inference.infer_shapes(model)
    assert rewritten(model).graph.node[-2].op_type == "Add"


def test_a_bias_that_is_computed_is_left():
    model = product([2, 3], first=False)
    scaled = helper.make_node("Mul", ["bias", "step"], ["scaled"])
    model.graph.node.insert(0, scaled)
    model.graph.node[-1].input[1] = "scaled"
    changed = rewritten(model)
    assert changed.graph.node[-1].input[1] == "scaled"
