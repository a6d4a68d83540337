"""The table of operator names, column by column against the systems that are installed."""

import collections
import importlib.util

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from roundoff.errors import PlanError
from roundoff.ops.calls import Call, watch
from roundoff.ops.foreign_names import forward_of, operator_names, rows, translate
from roundoff.ops.foreign_names_table import SYSTEMS
from roundoff.ops.table import CONTRACTING

F = torch.nn.functional


def needs(package: str) -> pytest.MarkDecorator:
    return pytest.mark.skipif(
        importlib.util.find_spec(package) is None, reason=f"{package} is not installed"
    )


def test_the_table_is_well_formed() -> None:
    assert len(rows()) >= 100
    assert {len(row) for row in rows()} == {len(SYSTEMS)}
    torch_names = collections.Counter(name for row in rows() for name in row[0])
    assert [
        name for name, count in torch_names.items() if count > 1
    ] == []  # a site's operator is in one row
    for row in rows():
        assert all(len(set(cell)) == len(cell) for cell in row)


def test_every_contracting_operator_is_in_it() -> None:
    assert set(CONTRACTING) - operator_names("torch") == set()


def test_torch_names_are_functions_or_methods_of_torch() -> None:
    places = (
        torch,
        F,
        torch.Tensor,
        torch._C._nn,
        torch._C._VariableFunctions,
        torch._VF,
        torch.linalg,
    )
    of_sites = {
        "getitem",
        "rsub",
        "rdiv",
        "rpow",
        "rmatmul",
        "pad",
    }  # the names of Python's operators
    of_linalg = {n for n in operator_names("torch") if n.startswith("linalg_")}
    of_linalg = {
        n for n in of_linalg if not hasattr(torch.linalg, n.removeprefix("linalg_"))
    }
    missing = {
        n
        for n in operator_names("torch")
        if not any(hasattr(place, n) for place in places)
    }
    assert (
        missing
        - of_sites
        - {n for n in operator_names("torch") if n.startswith("linalg_")}
        == set()
    )
    assert of_linalg == set()


def test_aten_names_are_operators_and_their_overloads_exist() -> None:
    assert [n for n in operator_names("aten") if not hasattr(torch.ops.aten, n)] == []
    for name in operator_names("torch"):
        for full in translate(name, "torch", "aten"):
            packet, _, overload = full.removeprefix("aten::").partition(".")
            schema = getattr(
                getattr(torch.ops.aten, packet), overload or "default"
            )._schema
            assert schema.name == f"aten::{packet}"
            assert schema.overload_name == overload
            assert not schema.is_mutable
            assert name in translate(full, "aten", "torch")


class Names:
    def __init__(self) -> None:
        self.names: list[str] = []

    def call(self, call: Call) -> object:
        self.names.append(call.site.operator)
        return call.run()

    def before_write(self, tensor: torch.Tensor) -> None: ...


def test_the_torch_column_has_what_sites_are_called() -> None:
    v, image = torch.rand(3, 8), torch.rand(2, 4, 8, 8)
    calls = {
        "linear": lambda: F.linear(v, v),
        "matmul": lambda: v @ v.T,
        "softmax": lambda: v.softmax(-1),
        "cross_entropy_loss": lambda: F.cross_entropy(v, torch.tensor([0, 1, 2])),
        "div": lambda: v / 2,
        "rdiv": lambda: 1 / v,
        "upsample_bilinear2d": lambda: F.interpolate(
            image, scale_factor=2, mode="bilinear"
        ),
        "layer_norm": lambda: F.layer_norm(v, (8,)),
        "log_sigmoid": lambda: F.logsigmoid(v),
        "gelu": lambda: F.gelu(v),
        "conv2d": lambda: F.conv2d(image, torch.rand(4, 4, 3, 3)),
        "linalg_vector_norm": lambda: torch.linalg.vector_norm(v),
        "scaled_dot_product_attention": lambda: F.scaled_dot_product_attention(
            image, image, image
        ),
    }
    for name, call in calls.items():
        seen = Names()
        with watch(torch.nn.Module(), seen) as mode, mode:
            call()
        assert name in seen.names
        assert name in operator_names("torch")


@needs("onnx")
def test_onnx_names() -> None:
    import onnx

    assert (
        operator_names("onnx")
        - {s.name for s in onnx.defs.get_all_schemas() if s.domain == ""}
        == set()
    )


@needs("paddle")
def test_paddle_names() -> None:
    import paddle
    from paddle.amp import amp_lists
    from paddle.base import core

    lists = {
        n
        for of in (
            amp_lists.FP16_WHITE_LIST,
            amp_lists.FP16_BLACK_LIST,
            amp_lists.EXTRA_BLACK_LIST,
        )
        for n in of
    }
    assert (
        operator_names("paddle")
        - set(core.get_all_op_names())
        - set(dir(paddle._C_ops))
        - lists
        == set()
    )


@needs("tensorflow")
def test_tensorflow_names() -> None:
    from tensorflow.core.framework import op_def_pb2
    from tensorflow.python.client import pywrap_tf_session as session

    operators = op_def_pb2.OpList()
    operators.ParseFromString(session.TF_GetBuffer(session.TF_GetAllOpList()))
    assert operator_names("tensorflow") - {op.name for op in operators.op} == {
        "Gelu"
    }  # of Intel's extension


@pytest.mark.parametrize(
    ("name", "source", "target", "expected"),
    [
        ("softmax", "torch", "cann", {"SoftmaxV2"}),
        ("Gemm", "onnx", "torch", {"linear", "addmm"}),
        ("matmul_v2", "paddle", "onnx", {"MatMul"}),
        ("FusedBatchNormV3", "tensorflow", "paddle", {"batch_norm"}),
        ("BNInfer", "cann", "torch", {"batch_norm"}),
        ("aten::_softmax", "aten", "torch", {"softmax"}),
        ("add_", "aten", "torch", {"add"}),
        ("layer_norm", "torch", "ascend", {"LayerNorm", "LayerNormV3", "LayerNormV4"}),
        ("outer", "torch", "onnx", set()),  # made of others there
    ],
)
def test_translations(name: str, source: str, target: str, expected: set[str]) -> None:
    assert set(translate(name, source, target)) == expected


@given(
    st.sampled_from(sorted(operator_names("torch"))),
    st.sampled_from([s for s in SYSTEMS if s not in ("torch", "aten")]),
)
def test_there_and_back(name: str, system: str) -> None:
    for there in translate(name, "torch", system):
        assert name in translate(there, system, "torch")


def test_gradients_know_their_forward_call() -> None:
    assert forward_of("Conv2DBackpropFilter", "tensorflow")[:2] == ("conv1d", "conv2d")
    assert forward_of("softmax_grad", "paddle") == ("softmax",)
    assert forward_of("SoftmaxGrad", "cann") == ("softmax",)
    assert forward_of("Relu", "cann") == forward_of("NothingGrad", "cann") == ()


def test_an_unknown_name_lists_the_nearest() -> None:
    with pytest.raises(PlanError) as caught:
        translate("Matmul", "cann", "torch")
    assert "Matmul (nearest: MatMul, " in str(caught.value)
    with pytest.raises(PlanError, match="no such system"):
        translate("MatMul", "caffe", "torch")
