"""The built-in lists, held against what torch.autocast really does on this CPU and against torch's own header."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F

from roundoff.errors import PlanError
from roundoff.ops.autocast_lists import autocast_class, autocast_differences

X = torch.rand(2, 4, 4, 4) + 0.5
SQUARE = torch.rand(4, 4) + 0.5
CALLS = {
    "linear": lambda x: F.linear(x, SQUARE.to(x.dtype)),
    "matmul": lambda x: x @ x,
    "bmm": lambda x: torch.bmm(x[0], x[0]),
    "conv2d": lambda x: F.conv2d(x, x),
    "einsum": lambda x: torch.einsum("abij,abjk->abik", x, x),
    "scaled_dot_product_attention": lambda x: F.scaled_dot_product_attention(x, x, x),
    "softmax": lambda x: x.softmax(-1),
    "layer_norm": lambda x: F.layer_norm(x, (4,)),
    "exp": torch.exp,
    "log": torch.log,
    "pow": lambda x: x**2,
    "sum": torch.sum,
    "prod": torch.prod,
    "cumsum": lambda x: x.cumsum(0),
    "rsqrt": torch.rsqrt,
    "mse_loss": lambda x: F.mse_loss(x, x * 0.5),
    "l1_loss": lambda x: F.l1_loss(x, x * 0.5),
    "gelu": F.gelu,
    "mean": torch.mean,
    "add": lambda x: x + x,
    "cdist": lambda x: torch.cdist(x, x),
    "prelu": lambda x: F.prelu(x, x[0, :, 0, 0]),
    "avg_pool3d": lambda x: F.avg_pool3d(x, 2),
    "rdiv": lambda x: 1 / x,
    "group_norm": lambda x: F.group_norm(x, 2),
    "softplus": F.softplus,
    "cosine_similarity": lambda x: F.cosine_similarity(x, x),
    "logsumexp": lambda x: x.logsumexp(-1),
}


@pytest.mark.parametrize("operator", CALLS)
def test_what_autocast_does_on_the_cpu(operator):
    """fp32 and bf16 inputs tell the lists apart: lower turns the first into bf16, fp32 the second into fp32."""
    with torch.autocast("cpu", torch.bfloat16):
        wide, narrow = CALLS[operator](X).dtype, CALLS[operator](X.bfloat16()).dtype
    expected = {
        (torch.bfloat16, torch.bfloat16): "lower",
        (torch.float32, torch.float32): "fp32",
        (torch.float32, torch.bfloat16): "follow",
    }
    assert autocast_class(operator, "cpu") == expected[wide, narrow]


def test_a_promoting_operator():
    with torch.autocast("cpu", torch.bfloat16):
        assert torch.cat([X, X.bfloat16()]).dtype == torch.float32
        assert torch.cat([X.bfloat16()]).dtype == torch.bfloat16
    assert autocast_class("cat", "cpu") == "promote"


def test_the_lists_for_cuda_are_those_of_the_header():
    header = (Path(torch.__file__).parent / "include/ATen/autocast_mode.h").read_text()

    def names(macro: str) -> set[str]:
        body = header.split(f"#define {macro}(_)")[1].split("\n\n")[0]
        return set(re.findall(r"_\((\w+)", body))

    for macro, expected in (
        ("AT_FORALL_LOWER_PRECISION_FP", "lower"),
        ("AT_FORALL_FP32", "fp32"),
        ("AT_FORALL_FP32_SET_OPT_DTYPE", "fp32"),
        ("AT_FORALL_PROMOTE", "promote"),
    ):
        found = names(macro)
        assert len(found) >= 8
        assert {name: autocast_class(name, "cuda") for name in found} == dict.fromkeys(
            found, expected
        )


def test_where_the_devices_differ():
    found = autocast_differences("cpu", "cuda")
    assert found["softmax"] == ("follow", "fp32")
    assert found["avg_pool3d"] == ("fp32", "follow")
    assert "linear" not in found
    assert autocast_differences("cuda", "cuda") == {}


def test_an_unknown_device():
    with pytest.raises(PlanError, match="no autocast on such a device"):
        autocast_class("linear", "abacus")
