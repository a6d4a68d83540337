"""What holds for single layers: observers, symmetry, balancing; and calls that only some batches make."""

import math

import numpy as np
import pytest
import torch
from torch import nn

import roundoff as ro
from roundoff.errors import PatternError, QuantizationError
from roundoff.quantize.options import Options, Rounding

PLAIN = {"weights": "nearest", "scales": "minmax", "bias": False}


def data(*shape, count=2, seed=0):
    generator = torch.Generator().manual_seed(seed)
    return [torch.randn(shape, generator=generator) for _ in range(count)]


def rows(model):
    return {row.site: (row.format, row.reason) for row in model.rows}


def scale_of(model, site):
    route = model.routes[site]
    (quantizer,) = [
        model.quantizer(n) for n in route.uses.values() if not model.quantizer(n).weight
    ]
    return float(quantizer.scale), quantizer


def test_each_layer_has_its_observer_and_symmetry():
    """a: min-max, symmetric; b: 90 % of what is not zero, asymmetric. Expected scales from numpy, float64."""
    torch.manual_seed(0)
    net, batches = (
        nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 4)),
        data(64, 8),
    )
    layers = {
        "2/*": Rounding(observer="percentile", parameters={"percentile": 0.9}, **PLAIN)
    }
    options = Options(
        symmetric=False, layers={"0/*": Options(symmetric=True, weight="tensor")}
    )
    how = Rounding(observer="minmax", layers=layers, **PLAIN)
    model = ro.quantize(
        net, "int8", batches, spread=False, rounding=how, options=options
    )
    x = torch.cat(batches).double().numpy()
    found, quantizer = scale_of(model, "0/linear")
    assert (quantizer.observer, quantizer.fmt.symmetric) == ("minmax", True)
    # one division, rounded to fp32
    assert found == pytest.approx(
        np.abs(x).max() / quantizer.fmt.max_finite, rel=2**-23
    )
    assert model.quantizer("0.weight").scale.numel() == 1
    assert model.quantizer("2.weight").scale.numel() == 4
    found, quantizer = scale_of(model, "2/linear")
    assert (quantizer.observer, quantizer.fmt.symmetric) == ("percentile", False)
    with torch.no_grad():
        kept = [
            model.quantizer(n)(v)
            for n, v in zip(
                model.routes["0/linear"].uses.values(),
                (torch.cat(batches), net[0].weight),
                strict=True,
            )
        ]
        hidden = (nn.functional.linear(*kept) + net[0].bias).relu().double().numpy()
    # the observer's bins: 2048 on a side, of a range that grew by doublings, are at most 1/1024 of the largest value wide;
    # biases are rounded to steps of the sums, far less
    assert found == pytest.approx(
        np.quantile(hidden[hidden > 0], 0.9) / 255, abs=hidden.max() / 1024 / 255 + 1e-6
    )


def test_readers_of_one_value_that_ask_for_other_observers_get_a_scale_each(Model):
    torch.manual_seed(0)
    net = Model(
        lambda s, x: s.b(h := s.a(x)) + s.c(h),
        a=nn.Linear(4, 6),
        b=nn.Linear(6, 3),
        c=nn.Linear(6, 3),
    )
    layers = {
        "c/*": Rounding(observer="percentile", parameters={"percentile": 0.8}, **PLAIN),
        "b/*": Rounding(observer="minmax", **PLAIN),
    }
    model = ro.quantize(
        net,
        "int8",
        data(64, 4),
        rounding=Rounding(observer="minmax", layers=layers, **PLAIN),
    )
    (wide, first), (narrow, second) = (
        scale_of(model, "b/linear"),
        scale_of(model, "c/linear"),
    )
    assert (first.observer, second.observer) == ("minmax", "percentile")
    assert narrow < 0.8 * wide
    assert model.remarks == [
        f"{first.name} has a second scale: c/linear asks for another observer than b/linear"
    ]
    assert (first.sites, second.sites) == (("b/linear",), ("c/linear",))
    same = {
        "c/*": Rounding(observer="minmax", **PLAIN),
        "b/*": Rounding(observer="minmax", **PLAIN),
    }
    model = ro.quantize(
        net,
        "int8",
        data(64, 4),
        rounding=Rounding(observer="minmax", layers=same, **PLAIN),
    )
    assert scale_of(model, "b/linear")[1] is scale_of(model, "c/linear")[1]
    assert model.remarks == []


@pytest.mark.parametrize(
    "how",
    [
        {"rounding": Rounding(layers={"3/*": Rounding()})},
        {"options": Options(layers={"3/*": Options()})},
    ],
)
def test_a_pattern_that_names_nothing(how):
    with pytest.raises(PatternError, match="matches no site"):
        ro.quantize(nn.Linear(4, 2), "int8", data(8, 4), **how)


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("observer", "median"),
        ("weights", "awq"),
        ("scales", "sear"),
        ("balance", "awg"),
    ],
)
def test_names_that_there_are_not(name, text):
    with pytest.raises(QuantizationError, match=f"unknown {name}") as error:
        Rounding(**{name: text})
    assert error.value.got == text


class Skewed(nn.Module):
    """A norm with two strong channels before a layer, as language models have."""

    def __init__(self):
        super().__init__()
        self.norm, self.up, self.down = (
            nn.LayerNorm(16),
            nn.Linear(16, 32),
            nn.Linear(32, 8),
        )
        with torch.no_grad():
            self.norm.weight[3], self.norm.weight[7] = 30.0, 12.0

    def forward(self, x):
        return self.down(nn.functional.gelu(self.up(self.norm(x))))


@pytest.mark.parametrize(
    ("method", "fmt", "gain"),
    [("awq", "w4", 0), ("smoothquant", "int8", 3), ("dmq", "int8", 3)],
)
def test_balancing_by_quantize(method, fmt, gain):
    torch.manual_seed(0)
    net, batches = Skewed().eval(), data(32, 16)
    model = ro.quantize(
        net, fmt, batches, rounding=Rounding(balance=method, weights="nearest")
    )
    step = model.steps[0]
    assert step.name == method
    assert step.after - step.before > gain
    balanced = ro.quantize(
        net,
        fmt,
        batches,
        spread=False,
        rounding=Rounding(balance=method, **PLAIN, observer="minmax"),
    )
    plain = ro.quantize(
        net, fmt, batches, spread=False, rounding=Rounding(**PLAIN, observer="minmax")
    )
    # the step's figures are those of this simulation, on the same two batches; the noise is a difference of fp32 outputs
    # 1e-7 apart at 40 dB below them, so it is known to 1e-7 / 1e-2 = 1e-5, which is 5e-5 dB; twice that
    assert balanced.steps[-1].after == pytest.approx(step.after, abs=1e-4)
    assert plain.steps[-1].after == pytest.approx(step.before, abs=1e-4)


def test_balancing_of_one_layer_is_in_the_record():
    torch.manual_seed(0)
    net, batches = Skewed().eval(), data(32, 16)
    how = Rounding(
        layers={
            "down/*": Rounding(
                balance="smoothquant",
                strength=0.5,
                observer="minmax",
                weights="nearest",
            )
        },
        observer="minmax",
        weights="nearest",
    )
    model = ro.quantize(net, "int8", batches, spread=False, rounding=how)
    assert model.steps[0].note.startswith("1 of 1 values")
    x = torch.cat(batches)
    with torch.no_grad():
        largest = nn.functional.gelu(net.up(net.norm(x))).abs().amax(0).double()
    weight = net.down.weight.detach().double().abs().amax(0)
    # equation 4 of arXiv:2211.10438 with α = 0.5, in fp32
    want = (largest / weight).sqrt()
    assert torch.tensor(
        model.record().balance["down.weight"]
    ).double() == pytest.approx(want.numpy(), rel=1e-5)


def branching(s, x):
    return s.a(x) if x.sum() > 0 else s.b(x)


def test_a_branch_of_a_late_batch_is_quantized_where_the_code_asks_for_a_value(Model):
    torch.manual_seed(0)
    net = Model(branching, a=nn.Linear(4, 2), b=nn.Linear(4, 2))
    batches = [torch.rand(3, 4) for _ in range(9)]
    batches[7] = -batches[
        7
    ]  # eight batches say otherwise, and four of them are traced first
    model = ro.quantize(net, "int8", batches, rounding=Rounding(observer="minmax"))
    assert rows(model)["b/linear"] == ("int8", "")
    assert float(model.quantizer("b/linear:0").scale) == pytest.approx(
        float(-batches[7].min()) / 255, rel=2**-23
    )


def test_a_call_that_only_a_late_batch_makes_is_a_row(Model):
    """A branch on a shape asks for no value: the graph, which is traced on some batches, has not seen it."""
    torch.manual_seed(0)
    net = Model(
        lambda s, x: s.a(x) if len(x) > 3 else s.b(s.a(x).tanh()),
        a=nn.Linear(4, 4),
        b=nn.Linear(4, 4),
    )
    batches = data(5, 4, count=9)
    batches[7] = batches[7][:2]
    model = ro.quantize(net, "int8", batches)  # warnings would be errors
    fmt, reason = rows(model)["b/linear"]
    assert fmt == "fp32"
    assert reason.startswith(
        "seen only in batch 7: the batches that the graph was traced on do not call it"
    )
    assert rows(model)["a/linear"] == ("int8", "")
    assert ("b/linear", reason) in model.record().skipped
    assert "b/linear" in model.graph.nodes
    model(batches[7])
    assert not model.unseen
    tied = Model(
        lambda s, x: (
            s.a(x) if len(x) > 3 else nn.functional.linear(x.abs(), s.a.weight)
        ),
        a=nn.Linear(4, 4),
    )
    assert rows(ro.quantize(tied, "int8", batches))["/linear"][1].endswith(
        "; reads a.weight as it is stored"
    )


@pytest.mark.parametrize(
    ("fmt", "levels", "rounding", "room"),
    [
        ("int8", 0, Rounding(), True),
        ("int8", 0, Rounding(room=1.2), True),
        ("int8", 0, Rounding(room=1.0), False),
        ("w8a4", 0, Rounding(), False),
        ("int8", 0, Rounding(observer="mse"), False),
        ("int8", 256, Rounding(), False),
    ],
)
def test_ranges_of_eight_bits_have_room(fmt, levels, rounding, room):
    """The best range of uniform values ends at their extremes; ours is ``room`` times as wide, or has their 256 levels."""
    torch.manual_seed(0)
    steps = levels or 2**20
    batches = [(torch.randint(0, steps, (4096, 6)) / (steps - 1)) for _ in range(2)]
    net = nn.Linear(6, 3)
    model = ro.quantize(net, fmt, batches, spread=False, rounding=rounding)
    scale, quantizer = scale_of(model, "/linear")
    codes = 2**quantizer.fmt.width - 1
    # bins of the histogram are at most 1/1024 of the largest value wide, and so may the best end be off; a clip of less
    # than a step at 15 codes costs less than the steps gain: (1 - c)^2 < 1 for c up to about 1/15 there
    off = {15: 1 / 15, 255: 2 / 255}[codes]
    assert scale * codes == pytest.approx(
        rounding.room if room else 1.0, rel=off / 2 if room or levels else off
    )
    if levels:
        assert scale == pytest.approx(1 / 255, rel=1e-3)
    assert (scale * codes > 1.02) is room


@pytest.mark.parametrize("room", [0.5, math.inf, math.nan])
def test_room_is_a_finite_number_of_at_least_one(room):
    with pytest.raises(QuantizationError, match="room .* at least 1"):
        Rounding(room=room)
