"""The light mode names what ``capture.calls`` names, function by function, also in compiled code."""

from __future__ import annotations

import functools

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import roundoff
from roundoff.ops.calls import watch
from roundoff.plan.rounded_model import Plain
from roundoff.plan.rules import Plan


def _beside_half(name: str, x: torch.Tensor) -> torch.Tensor:
    return getattr(F, name)(x, x * 0.5)


def _last_axis(name: str, x: torch.Tensor) -> torch.Tensor:
    return getattr(F, name)(x, -1)


X = torch.rand(2, 4, 6, 6, generator=torch.Generator().manual_seed(7)) * 0.5 + 0.25
FUNCTIONS = {
    **{
        name: getattr(F, name)
        for name in """celu elu glu hardsigmoid hardswish hardtanh leaky_relu mish relu relu6 selu silu
       softsign tanhshrink gelu sigmoid logsigmoid""".split()
    },
    **{
        name: functools.partial(_beside_half, name)
        for name in """binary_cross_entropy l1_loss
       binary_cross_entropy_with_logits huber_loss mse_loss smooth_l1_loss soft_margin_loss""".split()
    },
    **{
        name: functools.partial(_last_axis, name)
        for name in ("softmax", "log_softmax", "softmin")
    },
    "adaptive_avg_pool2d": lambda x: F.adaptive_avg_pool2d(x, 2),
    "adaptive_avg_pool3d": lambda x: F.adaptive_avg_pool3d(x, 2),
    "batch_norm": lambda x: F.batch_norm(x, None, None, training=True),
    "group_norm": lambda x: F.group_norm(x, 2),
    "layer_norm": lambda x: F.layer_norm(x, (6,)),
    "rms_norm": lambda x: F.rms_norm(x, (6,)),
    "einsum": lambda x: torch.einsum("abij,abkj->abik", x, x),
    "embedding": lambda x: F.embedding(torch.tensor([1, 0]), x[0, 0]),
    "norm": lambda x: torch.norm(x),
    "method": lambda x: x.norm(),
    "embedding_bag": lambda x: F.embedding_bag(torch.tensor([[1, 0]]), x[0, 0]),
    "div": lambda x: 1 / x,
    "cross_entropy": lambda x: F.cross_entropy(x[:, :, 0, 0], torch.tensor([1, 0])),
    "pool": lambda x: F.max_pool2d(x, 2),
    "nll_loss": lambda x: F.nll_loss(x[:, :, 0, 0], torch.tensor([1, 0])),
    "dropout": lambda x: F.dropout2d(x, 0.5) * 2,
    "nearest": lambda x: F.interpolate(x, scale_factor=2),
    "linear": lambda x: F.interpolate(x[0], 3, mode="linear"),
    "bilinear": lambda x: F.interpolate(x, None, 2, "bilinear"),
    "area": lambda x: F.interpolate(x, 3, mode="area"),
    "tanh": F.tanh,
    "in place": lambda x: F.relu(x * 1, inplace=True),
    "pad": lambda x: F.pad(x, (1, 1)) + 1,
    "sdpa": lambda x: F.scaled_dot_product_attention(x, x, x),
    "normalize": F.normalize,
    "kl_div": lambda x: F.kl_div(x, x * 0.5, reduction="batchmean"),
    "cosine": lambda x: F.cosine_similarity(x, x),
    "unflatten": lambda x: x.unflatten(1, (2, 2)).exp(),
}


@pytest.mark.parametrize("name", FUNCTIONS)
def test_functions_have_the_names_of_the_budget(name):
    class One(nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return FUNCTIONS[name](x)

    model, handler = One(), Plain()
    with watch(model, handler) as mode, mode:
        model(X)
    region = roundoff.autocast(Plan((), default="bf16"), model)
    with region:
        model(X)
    assert set(region.rules._decided) == set(handler.sites)


@pytest.mark.parametrize(
    "name",
    ["cross_entropy", "mse_loss", "mish", "norm", "hardswish", "bilinear", "unflatten"],
)
def test_functions_are_cast_the_same_in_compiled_code(name):
    """Each of these is a function that torch.compile cannot look into from a mode, or not in the same way."""

    class One(nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return FUNCTIONS[name](x)

    torch._dynamo.reset()
    model = One()
    compiled = torch.compile(model, backend="aot_eager", fullgraph=True)
    with roundoff.autocast(Plan((), default="bf16"), model):
        eager, traced = model(X), compiled(X)
    assert eager.dtype == traced.dtype == torch.bfloat16
    assert torch.equal(eager, traced)


def test_an_operator_without_a_kernel_for_its_format_names_the_site():
    class Distances(nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return torch.cdist(x, x)

    model = Distances()
    with (
        pytest.raises(RuntimeError, match="not implemented for 'BFloat16'") as caught,
        roundoff.autocast(Plan((), default="bf16"), model),
    ):
        model(X)
    assert caught.value.__notes__ == [
        "roundoff: /cdist was to run in torch.bfloat16, as the plan of this region says"
    ]
