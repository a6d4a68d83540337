"""Clips beside codes: taken out, or written so that products stay integers; the results are the same."""

from __future__ import annotations

import collections
from typing import Any

import numpy as np
import onnx
import onnx_ir as ir
import pytest
from onnx import TensorProto, helper, numpy_helper

from roundoff.export.onnx.clips import (
    clips_as_extremes,
    drop_clips,
    extremes_as_clips,
)
from roundoff.export.onnx.runtime import kernels

FLOAT = TensorProto.FLOAT


def product(
    clip: list[tuple[str, list[str]]],
    *,
    codes: bool,
    zero: int = 0,
    shape: bool = False,
) -> onnx.ModelProto:
    """A Gemm of codes, clips, and what reads them: codes, through a reshape, or a sum."""
    rng = np.random.default_rng(0)
    constants = {
        # powers of two: every sum is exact in fp32
        "step": np.float32(1 / 16),
        "zero": np.uint8(100),
        "weight_codes": rng.integers(-63, 64, (5, 8)).astype(np.int8),
        "weight_step": np.full(5, 1 / 32, np.float32),
        "weight_zero": np.zeros(5, np.int8),
        "result_step": np.float32(1 / 4),
        "result_zero": np.uint8(zero),
        "nought": np.float32(0),
        "six": np.float32(6),
        "low": np.float32(-1),
        "pair": np.array([0, 5, 1], np.int64),
        "last": np.array([1], np.int64),
    }
    nodes = [
        helper.make_node("QuantizeLinear", ["x", "step", "zero"], ["x_codes"]),
        helper.make_node("DequantizeLinear", ["x_codes", "step", "zero"], ["x_values"]),
        helper.make_node(
            "DequantizeLinear",
            ["weight_codes", "weight_step", "weight_zero"],
            ["weight"],
            axis=0,
        ),
        helper.make_node("Gemm", ["x_values", "weight"], ["y0"], name="fc", transB=1),
    ]
    for number, (operator, bounds) in enumerate(clip):
        inputs = [f"y{number}", *bounds]
        nodes.append(
            helper.make_node(operator, inputs, [f"y{number + 1}"], name=f"clip{number}")
        )
    last = f"y{len(clip)}"
    if shape:
        nodes.append(helper.make_node("Reshape", [last, "pair"], ["shaped"]))
        last = "shaped"
    if codes:
        grid = ["result_step", "result_zero"]
        nodes.append(helper.make_node("QuantizeLinear", [last, *grid], ["codes"]))
        nodes.append(helper.make_node("DequantizeLinear", ["codes", *grid], ["out"]))
    else:
        nodes.append(helper.make_node("ReduceSum", [last, "last"], ["out"]))
    read = {name for node in nodes for name in node.input}
    graph = helper.make_graph(
        nodes,
        "graph",
        [helper.make_tensor_value_info("x", FLOAT, ["n", 8])],
        [
            helper.make_tensor_value_info(
                "out", FLOAT, ["n"] + [None] * (2 if shape else 1)
            )
        ],
        [
            numpy_helper.from_array(np.asarray(v), n)
            for n, v in constants.items()
            if n in read
        ],
    )
    return helper.make_model(
        graph, opset_imports=[helper.make_opsetid("", 21)], ir_version=10
    )


def rewritten(model: onnx.ModelProto) -> onnx.ModelProto:
    tidied = ir.serde.deserialize_model(model)
    extremes_as_clips(tidied.graph)
    drop_clips(tidied.graph)
    clips_as_extremes(tidied.graph)
    changed = ir.serde.serialize_model(tidied)
    onnx.checker.check_model(changed)
    return changed


def operators(model: onnx.ModelProto) -> collections.Counter[str]:
    return collections.Counter(node.op_type for node in model.graph.node)


def compare(
    model: onnx.ModelProto, inference_session: Any, folder: Any
) -> onnx.ModelProto:
    """Both files give the same, and the changed one runs its product in integers."""
    changed = rewritten(model)
    x = np.random.default_rng(1).normal(0, 4, (6, 8)).astype(np.float32)
    results = []
    for name, proto in (("before.onnx", model), ("after.onnx", changed)):
        onnx.save(proto, folder / name)
        (result,) = inference_session(folder / name).run(None, {"x": x})
        results.append(result)
    assert np.unique(results[0]).size > 3
    np.testing.assert_array_equal(*results)
    assert kernels(folder / "after.onnx").counts["QGemm"] == 1
    return changed


@pytest.mark.parametrize(
    "clip",
    [
        [("Relu", [])],
        [("Max", ["nought"])],
        [("Clip", ["nought"])],
        [("Clip", ["nought", "six"])],
        [("Max", ["low"]), ("Min", ["six"])],
    ],
    ids=["relu", "max", "clip", "both bounds", "max and min"],
)
def test_a_clip_whose_result_stays_float_leaves_the_product_in_integers(
    clip, inference_session, tmp_path
):
    changed = compare(product(clip, codes=False), inference_session, tmp_path)
    assert operators(changed)["Relu"] == 0
    assert operators(changed)["Max"] == 1


@pytest.mark.parametrize("shape", [False, True], ids=["", "through a reshape"])
@pytest.mark.parametrize(
    "clip", [[("Relu", [])], [("Max", ["nought"])]], ids=["relu", "max"]
)
def test_a_clip_at_the_ends_of_the_codes_is_taken_out(
    clip, shape, inference_session, tmp_path
):
    model = product(clip, codes=True, shape=shape)
    changed = compare(model, inference_session, tmp_path)
    assert not {"Relu", "Clip", "Max"} & set(operators(changed))


def test_a_clip_within_the_codes_stays(inference_session, tmp_path):
    model = product([("Relu", [])], codes=True, zero=100)
    changed = compare(model, inference_session, tmp_path)
    assert operators(changed)["Max"] == 1


def test_the_larger_of_two_values_is_no_clip():
    model = product([("Max", ["x5"])], codes=False)
    model.graph.input.append(helper.make_tensor_value_info("x5", FLOAT, ["n", 5]))
    assert operators(rewritten(model))["Max"] == 1
    clipped = product([("Min", ["six"])], codes=True)
    assert operators(rewritten(clipped))["Min"] == 1
