"""Group normalizations split into what ONNX Runtime has kernels for: the values are those of torch."""

from __future__ import annotations

import collections

import numpy as np
import onnx
import onnx_ir as ir
import pytest
import torch
from onnx import TensorProto, helper, numpy_helper

from roundoff.export.onnx.group_norm import split_group_norms

FLOAT = TensorProto.FLOAT
EPSILON = 1e-3


def normalization(
    groups: int, shape: tuple[int | str, ...], *, computed: bool = False
) -> onnx.ModelProto:
    """A group normalization in opset 21; a computed scale is one that a node makes."""
    rng = np.random.default_rng(0)
    channels = int(shape[1])
    constants = {
        "bias": rng.normal(size=channels).astype(np.float32),
        "length": np.array([channels], np.int64),
    }
    nodes = []
    if computed:
        two = numpy_helper.from_array(np.array([2], np.float32))
        nodes.append(
            helper.make_node("ConstantOfShape", ["length"], ["scale"], value=two)
        )
    else:
        constants["scale"] = rng.uniform(-2, 2, channels).astype(np.float32)
    nodes.append(
        helper.make_node(
            "GroupNormalization",
            ["x", "scale", "bias"],
            ["y"],
            name="norm",
            num_groups=groups,
            epsilon=EPSILON,
        )
    )
    graph = helper.make_graph(
        nodes,
        "graph",
        [helper.make_tensor_value_info("x", FLOAT, shape)],
        [helper.make_tensor_value_info("y", FLOAT, shape)],
        [numpy_helper.from_array(v, n) for n, v in constants.items()],
    )
    model = helper.make_model(
        graph, opset_imports=[helper.make_opsetid("", 21)], ir_version=10
    )
    return onnx.shape_inference.infer_shapes(model, data_prop=True)


def rewritten(model: onnx.ModelProto) -> onnx.ModelProto:
    split = ir.serde.deserialize_model(model)
    split_group_norms(split.graph)
    changed = ir.serde.serialize_model(split)
    onnx.checker.check_model(changed)
    return changed


def operators(model: onnx.ModelProto) -> collections.Counter[str]:
    return collections.Counter(node.op_type for node in model.graph.node)


def expected(groups: int, x: np.ndarray, model: onnx.ModelProto) -> np.ndarray:
    """What torch computes in fp64."""
    stored = {v.name: numpy_helper.to_array(v) for v in model.graph.initializer}
    scale = stored.get("scale", np.full(x.shape[1], 2.0))
    tensors = [torch.tensor(a, dtype=torch.float64) for a in (x, scale, stored["bias"])]
    return torch.nn.functional.group_norm(
        tensors[0], groups, tensors[1], tensors[2], EPSILON
    ).numpy()


@pytest.mark.parametrize(
    ("groups", "shape"),
    [
        (4, ("n", 8, 5, 6)),
        (1, ("n", 6, 7)),
        (6, ("n", 6, 4, 3)),
        (2, ("n", 4, 3, 2, 5)),
        (2, ("n", 4)),
        (3, ("n", 6, "length")),
    ],
)
@pytest.mark.parametrize("computed", [False, True])
def test_values_are_those_of_torch(
    groups, shape, computed, inference_session, tmp_path
):
    model = normalization(groups, shape, computed=computed)
    changed = rewritten(model)
    onnx.save(changed, tmp_path / "net.onnx")
    session = inference_session(tmp_path / "net.onnx")
    for count in (1, 4):  # the batch stays free
        lengths = [11 if isinstance(axis, str) else axis for axis in shape[1:]]
        x = np.random.default_rng(count).normal(1, 3, (count, *lengths))
        x = x.astype(np.float32)
        (actual,) = session.run(None, {"x": x})
        exact = expected(groups, x, model)
        # mean and variance of n values in fp32, and four operations behind them;
        # a group of values that are nearly alike is divided by sqrt(EPSILON) at most
        n = x[0].size // groups
        steps = (n + 4) * np.finfo(np.float32).eps * np.abs(x).max()
        bound = steps / np.sqrt(EPSILON) * 2
        np.testing.assert_allclose(actual, exact, rtol=0, atol=bound)


def test_it_is_four_nodes_and_small():
    model = normalization(4, ("n", 8, 5, 6))
    changed = rewritten(model)
    assert operators(changed) == {
        "Reshape": 2,
        "InstanceNormalization": 1,
        "BatchNormalization": 1,
    }
    # constants of a length are stored once, whatever reads them
    names = [value.name for value in changed.graph.initializer]
    assert len(names) == len(set(names))


def test_a_free_length_is_read_when_the_file_runs():
    changed = rewritten(normalization(3, ("n", 6, "length")))
    assert operators(changed)["Shape"] == 1
    assert operators(rewritten(normalization(3, ("n", 6, 9))))["Shape"] == 0


def test_a_scale_of_unknown_length_stays():
    model = normalization(2, ("n", 4, 3))
    scale = next(v for v in model.graph.initializer if v.name == "scale")
    model.graph.initializer.remove(scale)
    model.graph.input.append(helper.make_tensor_value_info("scale", FLOAT, ["c"]))
    assert operators(rewritten(model)) == {"GroupNormalization": 1}
