"""Large products: their errors without running them again, against the operator rounded by hand."""

from __future__ import annotations

import math

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from roundoff import Workload, budget


class Product(nn.Module):
    """``left @ value(x)``: what stands on the left is a selection, or any matrix."""

    def __init__(self, selects):
        super().__init__()
        self.selects = selects
        self.value = nn.Linear(32, 32)

    def left(self, x):
        scores = x @ x.transpose(1, 2)
        if self.selects:
            return F.one_hot(scores.argmax(-1), scores.shape[-1]).float()
        return scores.softmax(-1)

    def forward(self, x):
        return self.left(x) @ self.value(x)


def low(tensor):
    return tensor.bfloat16().float()


@pytest.mark.parametrize("selects", [True, False])
def test_a_product_is_rounded_once(selects):
    """A selection's product of rounded operands is in the format: its output loses nothing.

    32 samples and K = 64 give sqrt(2 / 2048) = 3 %; 4 sigma are 0.5 dB.
    """
    torch.manual_seed(0)
    model = Product(selects)
    x = torch.randn(32, 24, 32)
    with torch.no_grad():
        exact = model(x)
        rounded = low(low(model.left(x)) @ low(model.value(x)))
    error = (rounded - exact).double().square().sum() / exact.double().square().sum()
    found = budget(Workload(model, [x]), ["bf16"], probes=64, trials=0)
    [cost] = [c for c in found.costs if c.operator == "matmul" and "#1" in c.site]
    assert cost.sqnr_db == pytest.approx(-10 * math.log10(float(error)), abs=0.5)
    if selects:
        assert cost.output_db is None


@pytest.mark.parametrize(
    ("build", "shape"),
    [
        (lambda: nn.Linear(16, 24), (16, 40, 16)),
        (lambda: nn.Conv2d(8, 12, 3, padding=1), (16, 8, 12, 12)),
        (lambda: nn.Conv2d(8, 16, 3, groups=4), (16, 8, 12, 12)),
        (lambda: nn.ConvTranspose1d(8, 6, 4, stride=2), (16, 8, 100)),
        (lambda: nn.Conv1d(8, 12, 5, bias=False), (16, 8, 100)),
    ],
)
@pytest.mark.parametrize("fmt", ["bf16", "int8"])
def test_a_layer_is_what_its_rounded_parts_compute(build, shape, fmt):
    torch.manual_seed(0)
    layer = build()
    x = torch.randn(shape)
    found = budget(Workload(layer, [x]), [fmt], probes=64, trials=0)
    with torch.no_grad():
        exact = layer(x)
        if fmt == "bf16":
            rounded = low(torch.func.functional_call(layer, _bf16(layer), (low(x),)))
        else:
            rounded = torch.func.functional_call(layer, _int8(layer), (_scaled(x),))
    error = (rounded - exact).double().square().sum() / exact.double().square().sum()
    [cost] = found.costs
    # the Jacobian is the identity; 16 samples and K = 64 give sqrt(2 / 1024) = 0.19 dB, up to
    # 0.26 dB where a few errors hold most of the sum (24 seeds): 1.5 dB are more than 5 sigma
    assert cost.sqnr_db == pytest.approx(-10 * math.log10(float(error)), abs=1.5)


def _bf16(layer):
    return {name: low(p) for name, p in layer.named_parameters()}


def _scaled(tensor, keep=None):
    """int8 with one scale, or one for each place on the axis ``keep``."""
    axes = [axis for axis in range(tensor.ndim) if axis != keep]
    largest = tensor.abs().amax(axes, keepdim=True)
    return torch.round(tensor / (largest / 127)) * (largest / 127)


def _int8(layer):
    channel = 1 if isinstance(layer, nn.ConvTranspose1d) else 0
    return {"weight": _scaled(layer.weight, channel)}
