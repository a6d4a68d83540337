"""Formats the device has not: forward values against rounding by hand, gradients against the straight-through formulas."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import roundoff
from roundoff.formats import FORMATS, PerAxis, PerTensor, round_tensor
from roundoff.ops import gradient_format
from roundoff.plan.rules import Plan, Rule

G = torch.Generator().manual_seed(0)
X, W, B = (
    torch.randn(6, 4, generator=G),
    torch.randn(3, 4, generator=G),
    torch.randn(3, generator=G),
)
SEED = torch.randn(6, 3, generator=G)


def linear() -> nn.Sequential:
    model = nn.Sequential(nn.Linear(4, 3))
    with torch.no_grad():
        model[0].weight.copy_(W)
        model[0].bias.copy_(B)
    return model


@pytest.mark.parametrize(
    "name", ["fp8_e4m3fn", "fp8_e5m2", "hif8", "int8", "int4", "tf32"]
)
def test_a_linear_layer_forward_and_backward(name):
    """y = Q(x) Q(w)' + b;  dx = Q'(dy) Q(w),  dw = Q'(dy)' Q(x),  db = sum Q'(dy): Q rounds values, Q' gradients."""
    fmt = FORMATS[name]
    model, x = linear(), X.clone().requires_grad_()
    with roundoff.autocast(name, model):
        y = model(x)
    y.backward(SEED)
    scaled = (
        name != "tf32"
    )  # tf32 is a plain cast; the others have a scale per tensor, weights one per channel
    qx = (
        round_tensor(X, fmt, granularity=PerTensor())
        if scaled
        else round_tensor(X, fmt)
    )
    qw = (
        round_tensor(W, fmt, granularity=PerAxis(0)) if scaled else round_tensor(W, fmt)
    )
    back = {"fp8_e4m3fn": "fp8_e5m2", "int8": None, "int4": None}.get(name, name)
    dy = SEED
    if back is not None:
        dy = (
            round_tensor(SEED, FORMATS[back], granularity=PerTensor())
            if scaled
            else round_tensor(SEED, FORMATS[back])
        )
        assert not torch.equal(dy, SEED)
    # the same products in another order of additions: 8 roundings of at most eps/2 on sums of at most 6 terms
    close = {"rtol": 8 * 2**-24, "atol": 8 * 2**-24 * 12}
    torch.testing.assert_close(y, qx @ qw.T + B, **close)
    torch.testing.assert_close(x.grad, dy @ qw, **close)
    torch.testing.assert_close(model[0].weight.grad, dy.T @ qx, **close)
    torch.testing.assert_close(model[0].bias.grad, dy.sum(0), **close)


def test_gradients_have_the_format_that_goes_with_the_values():
    expected = {
        "fp8_e4m3fn": "fp8_e5m2",
        "fp8_e5m2": "fp8_e5m2",
        "bf16": "bf16",
        "tf32": "tf32",
        "hif8": "hif8",
    }
    for name, back in expected.items():
        found = gradient_format(FORMATS[name])
        assert found is not None
        assert found.name == back
    assert all(
        gradient_format(FORMATS[name]) is None
        for name in ("int8", "int4", "mxfp4", "nvfp4", "ternary")
    )


def test_one_site_is_simulated_beside_others_in_real_formats():
    torch.manual_seed(0)
    model = nn.Sequential(
        nn.Linear(4, 4), nn.GELU(), nn.Linear(4, 4), nn.GELU(), nn.Linear(4, 2)
    )
    plan = Plan((Rule("fp8_e4m3fn", ("2",)), Rule("bf16", ("*",))))
    region = roundoff.autocast(plan, model, record=True)
    with region:
        y = model(X)
    y.float().sum().backward()
    rows = {row["site"]: row for row in region.report.iter_rows(named=True)}
    assert rows["2/linear"]["note"] == "fp8_e4m3fn simulated"
    assert (rows["2/linear"]["inputs"], rows["2/linear"]["output"]) == (
        "bf16 + fp32",
        "fp32",
    )
    assert [rows[f"{i}/linear"]["ran"] for i in (0, 4)] == ["bf16", "bf16"]
    assert (rows["3/gelu"]["ran"], rows["3/gelu"]["backward"]) == ("bf16", "bf16")
    assert all(
        p.grad is not None and bool(p.grad.isfinite().all()) for p in model.parameters()
    )


@pytest.mark.parametrize("name", ["fp8_e4m3fn", "int8", "tf32"])
def test_an_operator_may_write_over_what_a_simulated_one_gave(name):
    """A rounded output is memory of its own: the next layer may work in place, and the gradients are the same."""
    gradients = []
    for inplace in (True, False):
        torch.manual_seed(0)
        model = nn.Sequential(
            nn.Linear(4, 4), nn.ReLU(inplace=inplace), nn.Linear(4, 2)
        )
        with roundoff.autocast(name, model):
            y = model(X)
        y.sum().backward()
        gradients.append([p.grad for p in model.parameters()])
    assert all(map(torch.equal, *gradients))


def test_training_in_simulated_fp8_comes_down():
    """Forty steps on a linear problem end below a tenth of the first loss, as in fp32: gradients arrive."""
    torch.manual_seed(1)
    model = nn.Sequential(nn.Linear(4, 16), nn.ReLU(), nn.Linear(16, 1))
    optimizer = torch.optim.Adam(model.parameters(), lr=0.02)
    target = X @ torch.tensor([[1.0], [-2.0], [0.5], [0.0]])
    losses = []
    for _ in range(40):
        with roundoff.autocast("fp8_e4m3fn", model):
            loss = (model(X) - target).square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    assert losses[-1] < 0.1 * losses[0]
