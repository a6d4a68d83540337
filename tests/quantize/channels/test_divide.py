"""Channels divided in front of linear layers by what the output loses."""

import math

import numpy as np
import pytest
import torch
from torch import nn
from torch.nn import functional as F

import roundoff as ro
from roundoff.formats import PerAxis, PerGroup, PerTensor, PerToken, integer
from roundoff.ops.calls import Operand
from roundoff.quantize.calibration import Calibration
from roundoff.quantize.channels.divide import DivisionNoise, Reading, divide_
from roundoff.quantize.channels.smooth import simulated_db
from roundoff.quantize.channels.spread import GAMMA
from roundoff.quantize.importance import importance
from roundoff.quantize.model import Unquantized
from roundoff.quantize.options import Options
from roundoff.quantize.quantizer import Quantizer


class Block(nn.Module):
    """What BERT does: norms behind the sums, whose results the next sum reads too; some channels have outliers."""

    def __init__(self, width=16):
        super().__init__()
        self.norm, self.up, self.down = (
            nn.LayerNorm(width),
            nn.Linear(width, 2 * width),
            nn.Linear(2 * width, width),
        )
        self.last = nn.Linear(width, 8)
        with torch.no_grad():
            self.norm.weight[3], self.norm.weight[7], self.norm.bias[5] = (
                30.0,
                12.0,
                -20.0,
            )
            self.down.weight[:, 4] *= 20.0
            self.last.weight[:, [3, 5, 7]] *= 0.1

    def forward(self, x):
        x = self.norm(x)
        return self.last(x + self.down(F.gelu(self.up(x))))


@pytest.fixture
def block():
    torch.manual_seed(0)
    return Block().double().eval()


def data(*shape, count=2):
    generator = torch.Generator().manual_seed(0)
    return [
        torch.randn(shape, generator=generator, dtype=torch.float64)
        for _ in range(count)
    ]


@pytest.mark.parametrize("activation", ["tensor", "token", "group:8"])
@pytest.mark.parametrize("weight", ["format", "group:8"])
def test_the_function_stays_and_the_output_gains(laid, block, activation, weight):
    batches = data(8, 6, 16)
    model, workload, _graph = laid(
        block, batches, "int8", activation=activation, weight=weight, bias=False
    )
    want, before = (
        block(batches[0]).detach(),
        simulated_db(Calibration.of(model, workload, batches)),
    )
    gain = divide_(
        Calibration.of(model, workload),
        importance(Calibration.of(model, workload, batches)),
    )
    with torch.no_grad(), model.through(Unquantized()):
        # factors and their inverses are rounded once each, in fp64
        assert torch.allclose(model(batches[0]), want, rtol=1e-10, atol=1e-10)
    assert gain.note == "predicted, 3 of 3 values"
    assert {len(f) for f in model.factors.values()} == {16, 32}
    # a third of the values' steps at least, half of the weights' noise remains where groups have their own scales already
    measured = simulated_db(Calibration.of(model, workload, batches)) - before
    assert measured > (1.5 if "group" in activation else 3)
    assert gain.db > 1


@pytest.mark.parametrize("shared", [PerToken(), PerGroup(3, -1), PerTensor()])
@pytest.mark.parametrize("stored", [PerAxis(0), PerGroup(3, 1), PerTensor()])
@pytest.mark.parametrize("symmetric", [False, True])
def test_noise_by_hand(shared, stored, symmetric):
    random = np.random.default_rng(0)
    x, w, logs = (
        random.normal(size=(7, 6)) + 0.3,
        random.normal(size=(4, 6)),
        random.normal(size=6) / 3,
    )
    a, g, s = random.random(6), random.random(4), np.exp(logs)
    values = Quantizer(
        "x",
        integer(8, symmetric=symmetric),
        Operand(0, "activation", -1, -1, frozenset()),
        shared,
    )
    weights = Quantizer(
        "w", integer(4), Operand(1, "weight", 1, 0, frozenset()), stored
    )
    noise = DivisionNoise(
        torch.tensor(x),
        values,
        torch.tensor(a),
        [Reading(torch.tensor(w), weights, torch.tensor(g))],
    )

    def step(part):
        low, high = min(part.min(), 0.0), max(part.max(), 0.0)
        return max(-low, high) / 127 if symmetric else (high - low) / 255

    total, groups = (
        0.0,
        [slice(0, 3), slice(3, 6)] if isinstance(shared, PerGroup) else [slice(0, 6)],
    )
    for part in groups:
        rows = (
            [(x / s)[:, part]]
            if isinstance(shared, PerTensor)
            else [row[part] for row in x / s]
        )
        total += np.mean([step(row) ** 2 for row in rows]) * (a * s**2)[part].sum()
    groups = (
        [slice(0, 3), slice(3, 6)] if isinstance(stored, PerGroup) else [slice(0, 6)]
    )
    power = (x**2).mean(0) / s**2
    for o in range(4):
        for part in groups:
            whole = isinstance(stored, PerTensor)
            largest = np.abs(w * s).max() if whole else np.abs((w * s)[o, part]).max()
            total += GAMMA * g[o] * (largest / 7) ** 2 * power[part].sum()
    assert float(noise([torch.tensor(logs)])) == pytest.approx(total / 12, rel=1e-12)


def test_what_is_left(laid, block):
    batches = data(4, 6, 16)
    model, workload, _graph = laid(
        block, batches, "w8", bias=False
    )  # no value is quantized, so none can be divided
    known = importance(Calibration.of(model, workload, batches))
    gain = divide_(Calibration.of(model, workload), known)
    assert math.isnan(gain.db)
    assert gain.note == "no value is divided"
    assert not model.factors
    net = (
        nn.Sequential(nn.Conv2d(2, 4, 3), nn.Flatten(), nn.Linear(16, 3))
        .double()
        .eval()
    )
    images = data(4, 2, 4, 4)
    model, workload, _graph = laid(
        net, images, {"0/conv2d": "int8", "2/linear": "fp8_e4m3fn"}
    )
    assert (
        divide_(
            Calibration.of(model, workload),
            importance(Calibration.of(model, workload, images)),
        ).note
        == "no value is divided"
    )


def test_the_pipeline_divides_where_asked(block):
    batches = data(8, 6, 16)
    steps = {}
    for divide in (False, True):
        found = ro.quantize(
            block, "int8", batches, options=Options(activation="token", divide=divide)
        )
        steps[divide] = found.steps
    assert [step.name for step in steps[False]] == ["mse, gptq"]
    assert [step.name for step in steps[True]] == ["divide", "mse, gptq"]
    assert steps[True][-1].after > steps[False][-1].after + 2
