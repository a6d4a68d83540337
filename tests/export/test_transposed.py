"""Transposed convolutions of codes as convolutions: ONNX Runtime runs both files and they give the same codes."""

from __future__ import annotations

import collections
from typing import Any

import numpy as np
import onnx
import onnx_ir as ir
import pytest
from onnx import TensorProto, helper, numpy_helper

from roundoff.export.onnx.pixel_shuffle import shuffles_as_moves
from roundoff.export.onnx.runtime import kernels
from roundoff.export.onnx.transposed import as_convolutions

FLOAT = TensorProto.FLOAT


def transposed(
    length: tuple[int, ...],
    kernel: tuple[int, ...],
    *,
    bias: bool = True,
    relu: bool = False,
    **attributes: Any,
) -> onnx.ModelProto:
    """A transposed convolution of codes with 3 channels to 2, whose result is codes."""
    rng = np.random.default_rng(0)
    groups = attributes.get("group", 1)
    weight = rng.integers(-63, 64, (3 * groups, 2, *kernel)).astype(np.int8)
    constants = {
        # powers of two: every sum is exact in fp32, ties fall alike
        "step": np.float32(1 / 16),
        "zero": np.uint8(100),
        "weight_codes": weight,
        "weight_step": np.float32([1 / 32, 1 / 64]),
        "weight_zero": np.zeros(2, np.int8),
        "result_step": np.float32(1 / 4),
    }
    nodes = [
        helper.make_node("QuantizeLinear", ["x", "step", "zero"], ["x_codes"]),
        helper.make_node("DequantizeLinear", ["x_codes", "step", "zero"], ["x_values"]),
        helper.make_node(
            "DequantizeLinear",
            ["weight_codes", "weight_step", "weight_zero"],
            ["weight"],
            axis=1,
        ),
    ]
    operands = ["x_values", "weight"]
    if bias:
        constants |= {
            "bias_codes": np.int32([300, -500][:2] * groups),
            "bias_step": np.float32([1 / 512, 1 / 1024] * groups),
            "bias_zero": np.zeros(2 * groups, np.int32),
        }
        nodes.append(
            helper.make_node(
                "DequantizeLinear",
                ["bias_codes", "bias_step", "bias_zero"],
                ["bias"],
                axis=0,
            )
        )
        operands.append("bias")
    nodes.append(
        helper.make_node("ConvTranspose", operands, ["y"], name="up", **attributes)
    )
    if relu:
        nodes.append(helper.make_node("Relu", ["y"], ["clipped"]))
    written = "clipped" if relu else "y"
    nodes += [
        helper.make_node("QuantizeLinear", [written, "result_step", "zero"], ["codes"]),
        helper.make_node("DequantizeLinear", ["codes", "result_step", "zero"], ["out"]),
    ]
    graph = helper.make_graph(
        nodes,
        "graph",
        [helper.make_tensor_value_info("x", FLOAT, ["n", 3 * groups, *length])],
        [helper.make_tensor_value_info("out", FLOAT, None)],
        [numpy_helper.from_array(np.asarray(v), n) for n, v in constants.items()],
    )
    model = helper.make_model(
        graph, opset_imports=[helper.make_opsetid("", 21)], ir_version=10
    )
    return onnx.shape_inference.infer_shapes(model)


def rewritten(model: onnx.ModelProto) -> onnx.ModelProto:
    """The same file after the pass."""
    tidied = ir.serde.deserialize_model(model)
    as_convolutions(tidied.graph)
    return ir.serde.serialize_model(tidied)


def operators(model: onnx.ModelProto) -> collections.Counter[str]:
    return collections.Counter(node.op_type for node in model.graph.node)


@pytest.mark.parametrize("relu", [False, True])
@pytest.mark.parametrize(
    ("length", "kernel", "attributes"),
    [
        ((5, 7), (2, 2), {"strides": [2, 2]}),
        ((5, 7), (4, 4), {"strides": [2, 2], "pads": [1, 1, 1, 1]}),
        ((4, 6), (4, 2), {"strides": [2, 1], "pads": [1, 0, 1, 1]}),
        (
            (5, 4),
            (3, 3),
            {"strides": [2, 2], "pads": [1, 1, 1, 1], "output_padding": [1, 1]},
        ),
        ((9,), (8,), {"strides": [4], "pads": [2, 2]}),
        ((9,), (16,), {"strides": [8], "pads": [4, 4]}),
        ((6,), (6,), {"strides": [2], "pads": [3, 2], "output_padding": [1]}),
        ((3, 4, 2), (2, 2, 2), {"strides": [2, 2, 2]}),
        ((3, 4, 2), (4, 2, 2), {"strides": [2, 2, 1], "pads": [1, 0, 0, 1, 0, 0]}),
    ],
)
def test_the_codes_are_the_same(
    length, kernel, attributes, relu, inference_session, tmp_path
):
    model = transposed(length, kernel, relu=relu, **attributes)
    changed = rewritten(model)
    onnx.checker.check_model(changed)
    assert operators(changed)["ConvTranspose"] == 0
    assert operators(changed)["Conv"] == 1
    x = np.random.default_rng(1).normal(0, 3, (2, 3, *length)).astype(np.float32)
    results = []
    for name, proto in (("before", model), ("after", changed)):
        onnx.save(proto, tmp_path / name)
        (result,) = inference_session(tmp_path / name).run(None, {"x": x})
        results.append(result)
    assert np.unique(results[0]).size > 10
    np.testing.assert_array_equal(*results)


def test_it_runs_in_integers_alone(tmp_path):
    model = transposed((8, 8), (4, 4), strides=[2, 2], pads=[1, 1, 1, 1])
    onnx.save(rewritten(model), tmp_path / "after")
    found = kernels(tmp_path / "after")
    assert found.counts["QLinearConv"] == 1
    assert found.between_codes == ()
    onnx.save(model, tmp_path / "before")
    assert "ConvTranspose" in kernels(tmp_path / "before").between_codes


@pytest.mark.parametrize(
    ("length", "kernel", "attributes"),
    [
        ((5, 7), (3, 3), {}),  # no stride: one phase
        ((5, 7), (2, 2), {"strides": [2, 2], "group": 2}),
        ((5, 7), (2, 2), {"strides": [2, 2], "dilations": [2, 2]}),
        ((5, 7), (1, 1), {"strides": [2, 2]}),  # three of four products with zeros
        ((9,), (1,), {"strides": [3]}),
        ((9,), (2,), {"strides": [2], "output_shape": [18]}),
        (("h", 7), (2, 2), {"strides": [2, 2]}),  # its length is not known
    ],
)
def test_others_stay(length, kernel, attributes):
    model = transposed(length, kernel, **attributes)
    assert operators(rewritten(model)) == operators(model)


def test_a_result_that_is_no_code_stays():
    model = transposed((5,), (2,), strides=[2])
    del model.graph.node[-2:]
    model.graph.output[0].name = "y"
    assert operators(rewritten(model))["ConvTranspose"] == 1


def shuffled(mode: str, *, relu: bool, shared: bool = False) -> onnx.ModelProto:
    """A convolution of 3 channels to 8 with codes for a pixel shuffle of blocks of 2."""
    rng = np.random.default_rng(0)
    constants = {
        "step": np.float32(1 / 16),
        "zero": np.uint8(100),
        "weight_codes": rng.integers(-63, 64, (8, 3, 3, 3)).astype(np.int8),
        "weight_step": np.exp2(-5 - np.arange(8) % 3).astype(np.float32),
        "weight_zero": np.zeros(8, np.int8),
        "bias_codes": rng.integers(-500, 500, 8).astype(np.int32),
        "bias_step": np.exp2(-9 - np.arange(8) % 3).astype(np.float32),
        "bias_zero": np.zeros(8, np.int32),
    }
    operands = [
        ("x_codes", ["step", "zero"], "x_values", {}),
        ("weight_codes", ["weight_step", "weight_zero"], "weight", {"axis": 0}),
        ("bias_codes", ["bias_step", "bias_zero"], "bias", {"axis": 0}),
    ]
    nodes = [helper.make_node("QuantizeLinear", ["x", "step", "zero"], ["x_codes"])]
    nodes += [
        helper.make_node("DequantizeLinear", [codes, *grid], [values], **axis)
        for codes, grid, values, axis in operands
    ]
    nodes.append(
        helper.make_node("Conv", ["x_values", "weight", "bias"], ["y"], pads=[1] * 4)
    )
    if relu:
        nodes.append(helper.make_node("Relu", ["y"], ["clipped"]))
    written = "clipped" if relu else "y"
    nodes += [
        helper.make_node("QuantizeLinear", [written, "step", "zero"], ["codes"]),
        helper.make_node("DequantizeLinear", ["codes", "step", "zero"], ["values"]),
        helper.make_node(
            "DepthToSpace", ["values"], ["out"], name="shuffle", blocksize=2, mode=mode
        ),
    ]
    outputs = [helper.make_tensor_value_info("out", FLOAT, ["n", 2, 10, 12])]
    if shared:
        outputs.append(helper.make_tensor_value_info("values", FLOAT, ["n", 8, 5, 6]))
    graph = helper.make_graph(
        nodes,
        "graph",
        [helper.make_tensor_value_info("x", FLOAT, ["n", 3, 5, 6])],
        outputs,
        [numpy_helper.from_array(np.asarray(v), n) for n, v in constants.items()],
    )
    model = helper.make_model(
        graph, opset_imports=[helper.make_opsetid("", 21)], ir_version=10
    )
    return onnx.shape_inference.infer_shapes(model)


@pytest.mark.parametrize("relu", [False, True])
@pytest.mark.parametrize("mode", ["CRD", "DCR"])
def test_a_pixel_shuffle_moves_the_same_codes(mode, relu, inference_session, tmp_path):
    model = shuffled(mode, relu=relu)
    tidied = ir.serde.deserialize_model(model)
    shuffles_as_moves(tidied.graph)
    changed = ir.serde.serialize_model(tidied)
    onnx.checker.check_model(changed)
    assert operators(changed)["DepthToSpace"] == 0
    x = np.random.default_rng(1).normal(0, 3, (2, 3, 5, 6)).astype(np.float32)
    results = []
    for name, proto in (("before", model), ("after", changed)):
        onnx.save(proto, tmp_path / name)
        results += inference_session(tmp_path / name).run(None, {"x": x})
    np.testing.assert_array_equal(*results)


def test_codes_that_are_read_elsewhere_too_keep_their_order():
    model = ir.serde.deserialize_model(shuffled("CRD", relu=False, shared=True))
    shuffles_as_moves(model.graph)
    assert "DepthToSpace" in {node.op_type for node in model.graph}
