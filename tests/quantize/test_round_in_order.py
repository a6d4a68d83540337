"""One pass that calibrates and rounds a whole network, against doing it layer by layer by hand."""

import copy
import threading

import numpy as np
import pytest
import torch
from torch import nn
from torch.nn import functional as F

import roundoff as ro
from roundoff.errors import QuantizationError
from roundoff.formats import PerAxis, choose_qparams, fake_quantize, integer
from roundoff.quantize.join_batches import in_stacks, samples, stack
from roundoff.quantize.lockstep import Lockstep
from roundoff.quantize.observers import make_observer
from roundoff.quantize.options import Rounding
from roundoff.quantize.round_in_order import round_in_order_
from roundoff.workload.workload import Workload

NEAREST = Rounding(observer="minmax", weights="nearest", scales="minmax", bias=False)
ASYM = integer(8, symmetric=False)


def data(*shape, count=2, seed=0):
    generator = torch.Generator().manual_seed(seed)
    return [torch.randn(*shape, generator=generator) for _ in range(count)]


def rounded(laid, model, batches, how=NEAREST, formats="int8", **options):
    found, workload, _ = laid(model, batches, formats, **options)
    return found, round_in_order_(found, workload, workload.batches, how)


def on_grid(x, fmt, granularity=None, seen=None):
    return fake_quantize(
        x, choose_qparams(x if seen is None else seen, fmt, granularity), fmt
    )


def test_it_is_the_naive_calibration_layer_by_layer(laid):
    """Scale of each value from what the quantized layers before it give; weights to nearest."""
    torch.manual_seed(0)
    net = nn.Sequential(
        nn.Linear(4, 6), nn.ReLU(), nn.Linear(6, 6), nn.Tanh(), nn.Linear(6, 3)
    )
    batches = data(5, 4, count=3)
    model, gains = rounded(laid, net, batches, formats="int4", bias=False)
    x, fmt, own = torch.cat(batches), integer(4), integer(4, symmetric=False)
    with torch.no_grad():
        for i in (0, 2, 4):
            scale = choose_qparams(x, own)
            quantizer = model.quantizer(("0/linear:0", "", "1/relu", "", "3/tanh")[i])
            # other sizes of a batch may run other kernels, whose sums differ in the last bits
            assert torch.allclose(quantizer.scale, scale.scale, rtol=2**-20)
            assert torch.equal(quantizer.zero_point, scale.zero_point)
            weight = on_grid(net[i].weight, fmt, PerAxis(0))
            assert torch.equal(model.model[i].weight, weight)
            x = F.linear(fake_quantize(x, scale, own), weight, net[i].bias)
            x = (net[i + 1] if i < 4 else nn.Identity())(x)
        assert torch.allclose(model(torch.cat(batches)), x, atol=2**-20 * 10)
    assert gains == []


@pytest.mark.parametrize("observer", ["mse", "percentile", "moving_average"])
def test_observers_see_what_arrives(laid, observer):
    torch.manual_seed(0)
    batches = data(5, 4)
    model, _ = rounded(
        laid,
        nn.Linear(4, 2),
        batches,
        Rounding(observer=observer, weights="nearest", bias=False),
    )
    own = make_observer(observer)
    own.see(torch.cat(batches))
    assert torch.equal(model.quantizer("/linear:0").scale, own.qparams(ASYM).scale)
    assert model.quantizer("/linear:0").observer == observer


def test_biases_take_up_the_mean_error(laid):
    """By hand: shift of each channel = mean over the samples of exact minus quantized output."""
    torch.manual_seed(0)
    layer, batches = nn.Linear(4, 3), data(6, 4)
    how = Rounding(observer="minmax", weights="nearest", scales="minmax", bias=True)
    model, _ = rounded(laid, layer, batches, how, "int2", bias=False)
    x = torch.cat(batches)
    weight, value = (
        on_grid(layer.weight, integer(2), PerAxis(0)),
        on_grid(x, integer(2, symmetric=False)),
    )
    shift = (
        (F.linear(x, layer.weight) - F.linear(value, weight)).double().mean(0).detach()
    )
    assert float(shift.abs().max()) > 0.01
    assert torch.allclose(
        model.model.bias.double(), layer.bias.double() + shift, atol=1e-6
    )  # sums of 12 numbers near 1
    assert torch.allclose(
        (model(x) - layer(x)).mean(0).detach(), torch.zeros(3), atol=1e-6
    )


def test_biases_of_convolutions_and_of_integer_sums(laid):
    """With biases on the grid of the sums the mean is met up to half a step."""
    torch.manual_seed(0)
    layer, batches = nn.Conv2d(2, 3, 3), data(4, 2, 6, 6)
    how = Rounding(observer="minmax", weights="nearest", scales="minmax", bias=True)
    model, _ = rounded(laid, layer, batches, how, "int4", elementwise=False)
    x = torch.cat(batches)
    off = (model(x) - layer(x)).mean((0, 2, 3)).abs()
    step = (
        model.quantizer("/conv2d:0").scale.flatten()
        * model.quantizer("weight").scale.flatten()
    )
    assert (off <= step * 0.5 + 1e-6).all()
    assert (off > 0).any()


@pytest.mark.parametrize(
    ("net", "shape"),
    [
        (nn.Sequential(nn.Linear(8, 12), nn.ReLU(), nn.Linear(12, 4)), (16, 8)),
        (
            nn.Sequential(
                nn.Conv2d(3, 6, 3, groups=3), nn.ReLU6(), nn.Conv2d(6, 4, 2, stride=2)
            ),
            (6, 3, 7, 7),
        ),
        (
            nn.Sequential(
                nn.ConvTranspose2d(4, 6, 2, groups=2), nn.ReLU(), nn.Conv2d(6, 2, 1)
            ),
            (6, 4, 4, 4),
        ),
    ],
)
@pytest.mark.parametrize(
    ("fmt", "weight"),
    [
        ("int8", "format"),
        ("int4", "format"),
        ("int4", "tensor"),
        ("w2", "format"),
        ("w4g4", "format"),
        ("fp4", "format"),
        ("ternary", "format"),
    ],
)
def test_gptq_never_loses_to_nearest_in_a_layer(laid, net, shape, fmt, weight):
    """Each layer's own loss, as its gain says, and by hand that of the first layer where its inputs are exact: with rounded
    ones the loss that is promised is the one on the half of the data that corrections are judged on."""
    torch.manual_seed(0)
    net, batches = copy.deepcopy(net), data(*shape)
    options = {"bias": False, "weight": weight}
    model, gains = rounded(
        laid,
        net,
        batches,
        Rounding(observer="minmax", scales="minmax", bias=False),
        fmt,
        **options,
    )
    plain, _ = rounded(laid, net, batches, NEAREST, fmt, **options)
    assert [g.name for g in gains] == [
        n for n in ("0.weight", "2.weight") if n in model.weight_names()
    ]
    assert all(g.after_db >= g.before_db - 1e-6 for g in gains)
    if any(n.endswith(":0") for n, _ in model.named()):
        return
    x = torch.cat(batches)
    with torch.no_grad():
        losses = []
        for found in (model, plain):
            layer = copy.deepcopy(net[0])
            layer.weight.copy_(found.model[0].weight)
            losses.append(float((layer(x) - net[0](x)).square().sum()))
    assert losses[0] <= losses[1] * (1 + 1e-5)


def test_gptq_helps_the_network(laid):
    torch.manual_seed(0)
    net = nn.Sequential(
        nn.Linear(16, 16), nn.ReLU(), nn.Linear(16, 16), nn.ReLU(), nn.Linear(16, 4)
    )
    mix = torch.randn(16, 16, generator=torch.Generator().manual_seed(3))
    batches = [x @ mix for x in data(64, 16)]
    test = data(64, 16, seed=1)[0] @ mix
    errors = []
    for how in (
        NEAREST,
        Rounding(observer="minmax", bias=False),
        Rounding(observer="mse"),
    ):
        model, _ = rounded(laid, net, batches, how, "w3a8")
        errors.append(float((model(test) - net(test)).detach().square().sum()))
    assert errors[1] < errors[0] / 2
    assert errors[2] < errors[0] / 2


@pytest.mark.parametrize("zeros", [True, False])
def test_zeros_stay_where_they_are_asked_to(laid, zeros):
    """Half of the weights of each kind of layer are 0; the layers' gains show that the others still make up for rounding."""
    torch.manual_seed(0)
    net = nn.Sequential(
        nn.Conv2d(4, 8, 3, groups=2),
        nn.ReLU(),
        nn.ConvTranspose2d(8, 4, 2),
        nn.Flatten(),
        nn.Linear(64, 4),
    )
    pruned = {}
    with torch.no_grad():
        for name, weight in net.named_parameters():
            if weight.ndim > 1:
                pruned[name] = torch.rand(weight.shape) < 0.5
                weight.masked_fill_(pruned[name], 0.0)
    model, gains = rounded(
        laid, net, data(8, 4, 5, 5), Rounding(keep_zeros=zeros), "int4"
    )
    moved = sum(
        int((model.model.get_parameter(n)[mask] != 0).sum())
        for n, mask in pruned.items()
    )
    assert (moved == 0) == zeros
    assert len(gains) == 3
    assert all(g.after_db >= g.before_db - 1e-6 for g in gains)
    assert sum(g.db for g in gains) > 0.5


def test_weights_lie_on_their_grids_and_stay(laid):
    """Every weight is its quantizer's: rounding once more changes no bit."""
    torch.manual_seed(0)
    net = nn.Sequential(nn.Conv2d(3, 4, 3), nn.ReLU(), nn.Flatten(), nn.Linear(16, 5))
    for fmt in ("int8", "int4", "w4g4", "fp8_e4m3fn", "ternary", "binary"):
        model, _ = rounded(
            laid, net, data(4, 3, 4, 4), Rounding(observer="minmax"), fmt
        )
        for name, quantizer in model.named():
            if quantizer.weight:
                weight = model.model.get_parameter(name)
                assert torch.equal(quantizer(weight), weight), (fmt, name)


def test_a_shared_weight_is_rounded_once(laid, Model, Tied):
    torch.manual_seed(0)
    net = Model(lambda s, x: s.a(s.a(x).relu()), a=nn.Linear(4, 4))
    model, gains = rounded(laid, net, data(8, 4), Rounding(observer="minmax"), "int4")
    assert [g.name for g in gains] == ["a.weight"]
    quantizer, weight = model.quantizer("a.weight"), model.model.a.weight
    assert torch.equal(quantizer(weight), weight)
    ids = [torch.arange(9).view(3, 3), torch.arange(9).flip(0).view(3, 3)]
    model, gains = rounded(laid, Tied(), ids, Rounding(observer="minmax"), "w4")
    quantizer, weight = model.quantizer("table.weight"), model.model.table.weight
    assert torch.equal(quantizer(weight), weight)
    assert model.model.head.weight is weight


def linear_models(Model):
    """Networks in which batch and tokens lie in other orders, all of the same function of a sample as ``plain``."""
    a, b = nn.Linear(4, 6), nn.Linear(6, 3)
    return {
        "plain": Model(lambda s, x: s.b(s.a(x).relu()), a=a, b=b),
        "tokens first": Model(
            lambda s, x: s.b(s.a(x.transpose(0, 1)).relu()).transpose(0, 1), a=a, b=b
        ),
        "merged": Model(
            lambda s, x: s.b(s.a(x.reshape(-1, 4)).relu()).view(*x.shape[:2], 3),
            a=a,
            b=b,
        ),
        "merged, tokens first": Model(
            lambda s, x: (
                s.b(s.a(x.transpose(0, 1).reshape(-1, 4)).relu())
                .view(x.shape[1], -1, 3)
                .transpose(0, 1)
            ),
            a=a,
            b=b,
        ),
        "flattened": Model(
            lambda s, x: torch.stack([s.b(s.a(t).relu()) for t in x.unbind(1)], 1),
            a=a,
            b=b,
        ),
    }


@pytest.mark.parametrize("name", ["tokens first", "merged", "merged, tokens first"])
def test_samples_are_found_wherever_they_lie(laid, Model, name):
    """The same arithmetic on the same elements, so the same scales and weights (GPTQ splits its rows as they come)."""
    torch.manual_seed(0)
    nets, batches = linear_models(Model), data(3, 5, 4)
    plain, _ = rounded(laid, nets["plain"], batches, NEAREST, "int4")
    found, _ = rounded(laid, nets[name], batches, NEAREST, "int4")
    scales = [[q.scale for _, q in m.named() if not q.weight] for m in (plain, found)]
    assert all(torch.allclose(a, b, rtol=1e-6) for a, b in zip(*scales, strict=True))
    for part in (
        "a",
        "b",
    ):  # GPTQ's second moments are sums in another order: weights near a tie may differ
        a, b = (getattr(m.model, part).weight for m in (plain, found))
        assert float(((a - b).abs() > 1e-6).float().mean()) <= 0.1


@pytest.mark.filterwarnings("ignore:enable_nested_tensor")
@pytest.mark.parametrize(
    ("make", "site"),
    [
        (
            lambda: nn.TransformerEncoderLayer(8, 2, 16, batch_first=True),
            "self_attn/linear",
        ),
        (lambda: nn.LSTM(8, 6, batch_first=True), "/lstm"),
        (lambda: nn.GRU(8, 6, 2, batch_first=True, bidirectional=True), "/gru"),
    ],
)
def test_layers_of_torch(laid, make, site):
    torch.manual_seed(0)
    layer = make().eval()
    batches = data(4, 5, 8)
    model, _ = rounded(laid, layer, batches, Rounding(observer="minmax"))
    assert {r.site: r.format for r in model.rows}[site] == "int8"
    x = batches[0]
    found, exact = model(x), layer(x)
    found, exact = (found[0], exact[0]) if isinstance(exact, tuple) else (found, exact)
    error = float(((found - exact).norm() / exact.norm()).detach())
    # a step of values is range / 255 ~ 5 sigma / 255, of rms step / sqrt(12) = 0.6 % of sigma; a few such roundings add up
    assert 0 < error < 0.025


def test_matrices_of_products_are_rounded_by_gptq_too(laid, Model):
    """GPT-2's layers are addmm(bias, x, weight)."""
    torch.manual_seed(0)
    net = Model(
        lambda s, x: torch.addmm(s.b, x, s.w),
        w=nn.Parameter(torch.randn(8, 4)),
        b=nn.Parameter(torch.randn(4)),
    )
    twin = nn.Linear(8, 4)
    with torch.no_grad():
        twin.weight.copy_(net.w.t())
        twin.bias.copy_(net.b)
    batches = data(16, 8)
    (model, gains), (other, _) = (
        rounded(laid, n, batches, Rounding(observer="minmax"), "w3")
        for n in (net, twin)
    )
    assert [g.name for g in gains] == ["w"]
    assert torch.allclose(model.model.w, other.model.weight.t(), atol=1e-6)
    assert torch.allclose(model.model.b, other.model.bias, atol=1e-6)


def test_values_without_samples_are_left_as_they_are(laid, Model):
    """Positions are looked up by arange: a table of tokens, not of samples."""

    def forward(self, x):
        positions = self.p(torch.arange(x.shape[1]))
        return self.a(x) @ self.b(positions).mT

    torch.manual_seed(0)
    net = Model(forward, a=nn.Linear(4, 6), b=nn.Linear(3, 6), p=nn.Embedding(5, 3))
    model, _ = rounded(laid, net, data(2, 5, 4))
    assert model.quantizer("b/linear").scale is not None
    x = data(2, 5, 4, seed=1)[0]
    assert float(((model(x) - net(x)).norm() / net(x).norm()).detach()) < 0.03


def test_batches_of_other_shapes_are_seen_together(laid, Model):
    torch.manual_seed(0)
    net = Model(lambda s, x: s.a(x), a=nn.Linear(4, 3))
    batches = [data(2, 5, 4)[0], 3 * data(2, 7, 4, seed=1)[0]]
    model, _ = rounded(laid, net, batches)
    want = choose_qparams(torch.cat([x.flatten() for x in batches]), ASYM)
    assert torch.equal(
        model.quantizer("a/linear:0").scale.flatten(), want.scale.flatten()
    )


def test_batches_of_other_ranks_correct_one_bias(laid):
    torch.manual_seed(0)
    batches = [data(2, 5, 4)[0], data(6, 4, seed=1)[0]]
    layer = nn.Linear(4, 3)
    model, _ = rounded(
        laid, layer, batches, Rounding(observer="minmax"), "int2", bias=False
    )
    lost = torch.cat([(layer(x) - model(x)).reshape(-1, 3) for x in batches]).detach()
    assert torch.allclose(
        lost.mean(0), torch.zeros(3), atol=1e-6
    )  # sums of 16 numbers near 1


def test_both_branches_are_calibrated(laid, Model):
    torch.manual_seed(0)
    net = Model(
        lambda s, x: s.a(x) if x.sum() > 0 else s.b(x),
        a=nn.Linear(4, 2),
        b=nn.Linear(4, 2),
    )
    up, down = torch.rand(3, 4), -5 * torch.rand(3, 4)
    model, _ = rounded(laid, net, [up, down])
    assert torch.equal(
        model.quantizer("a/linear:0").scale.flatten(),
        choose_qparams(up, ASYM).scale.flatten(),
    )
    assert torch.equal(
        model.quantizer("b/linear:0").scale.flatten(),
        choose_qparams(down, ASYM).scale.flatten(),
    )
    assert {r.format for r in model.rows if r.site.endswith("linear")} == {"int8"}


def test_a_branch_that_no_batch_takes_is_a_row(laid, Model):
    torch.manual_seed(0)
    net = Model(
        lambda s, x: s.a(x) if x.sum() > 0 else s.b(x),
        a=nn.Linear(4, 2),
        b=nn.Linear(4, 2),
    )
    up, down = torch.rand(3, 4), -torch.rand(3, 4)
    model, workload, _ = laid(net, [up, down])
    round_in_order_(model, workload, [up], NEAREST)
    assert {r.site: (r.format, r.reason) for r in model.rows}["b/linear"] == (
        "fp32",
        "calibration never reached it",
    )
    assert torch.equal(model(down), net.b(down))


MIXING = {
    "batch statistics": lambda s, x: F.batch_norm(
        s.b(s.a(x)), None, None, training=True
    ),
    "mean": lambda s, x: (y := s.b(s.a(x))) - y.mean(0),
    "roll": lambda s, x: s.b(s.a(x)).roll(1, 0),
    "one number": lambda s, x: s.b(s.a(x)).sum(),
}


@pytest.mark.parametrize("name", list(MIXING))
def test_models_that_mix_samples_get_their_own_batches(laid, Model, name):
    """What arrives at a layer is what the model computes for each batch: ranges by hand, from batches of their own."""
    torch.manual_seed(0)
    net, batches = (
        Model(MIXING[name], a=nn.Linear(4, 4), b=nn.Linear(4, 3)),
        data(5, 4, count=3),
    )
    model, _ = rounded(laid, net, batches, bias=False)
    x = torch.cat(batches)
    weight = on_grid(net.a.weight, integer(8), PerAxis(0))
    hidden = F.linear(on_grid(x, ASYM), weight, net.a.bias)
    want = choose_qparams(hidden, ASYM)
    assert torch.allclose(
        model.quantizer("a/linear").scale.flatten(), want.scale.flatten(), rtol=1e-5
    )


def test_statistics_before_a_layer_are_those_of_each_batch(laid, Model):
    net = Model(lambda s, x: s.a(x - x.mean(0)), a=nn.Linear(4, 3))
    batches = [x + 10 * i for i, x in enumerate(data(5, 4, count=3))]
    model, _ = rounded(laid, net, batches)
    want = choose_qparams(torch.cat([x - x.mean(0) for x in batches]), ASYM)
    assert torch.allclose(
        model.quantizer("/sub").scale.flatten(), want.scale.flatten(), rtol=1e-6
    )


@pytest.mark.parametrize("when", ["first layer", "last layer"])
def test_an_error_in_the_middle_leaves_everything_as_it_was(laid, Model, when):
    """In the observer of one value, after other weights have been rounded."""
    threads = threading.active_count()  # other tests' libraries may keep some
    torch.manual_seed(0)

    def forward(self, x):
        return self.b(self.a(x).log() if when == "last layer" else self.a(x.log()))

    net = Model(forward, a=nn.Linear(4, 4), b=nn.Linear(4, 3))
    model, workload, _ = laid(net, data(5, 4), "int4")
    before, state = (
        {k: v.clone() for k, v in model.state_dict().items()},
        torch.get_rng_state(),
    )
    with pytest.raises(QuantizationError, match=r"/log.* values are NaN or Inf"):
        round_in_order_(model, workload, workload.batches, Rounding(observer="minmax"))
    after = model.state_dict()
    assert list(after) == list(before)
    assert all(torch.equal(before[k], v) for k, v in after.items())
    assert torch.equal(torch.get_rng_state(), state)
    assert all(q.scale is None and q.observer == "" for _, q in model.named())
    assert not any(m._forward_hooks or m._forward_pre_hooks for m in model.modules())
    assert threading.active_count() == threads


@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
def test_bad_data_is_named_and_nothing_changes(laid, Model, bad):
    torch.manual_seed(0)
    net = Model(
        lambda s, x: s.b(s.a(x[0]).relu() + x[1]), a=nn.Linear(4, 4), b=nn.Linear(4, 4)
    )
    batches = [((torch.ones(n, 4), torch.ones(n, 4)),) for n in (2, 3, 4)]
    batches[2][0][1][1, 3] = bad
    model, workload, _ = laid(net, batches, "int8")
    before = {k: v.clone() for k, v in model.state_dict().items()}
    with pytest.raises(
        QuantizationError,
        match=r"/add, first in batch 2: 1 of 36 values are NaN or Inf",
    ):
        round_in_order_(model, workload, workload.batches, Rounding(observer="minmax"))
    assert list(model.state_dict()) == list(before)
    assert all(torch.equal(before[k], v) for k, v in model.state_dict().items())


def test_other_errors(laid):
    model, workload, _ = laid(nn.Linear(4, 2), data(3, 4))
    with pytest.raises(QuantizationError, match="no calibration data"):
        round_in_order_(model, workload, [], NEAREST)
    with pytest.raises(QuantizationError, match="unknown observer"):
        round_in_order_(model, workload, workload.batches, Rounding(observer="median"))
    broken = nn.Linear(4, 2)
    with torch.no_grad():
        broken.weight[1, 2] = torch.nan
    model, workload, _ = laid(broken, data(3, 4), "w4")
    with pytest.raises(QuantizationError, match="weight"):
        round_in_order_(model, workload, workload.batches, NEAREST)


def test_the_model_keeps_its_mode_and_random_state(laid):
    torch.manual_seed(0)
    model, workload, _ = laid(
        nn.Sequential(nn.Linear(4, 4), nn.Dropout(), nn.Linear(4, 2)), data(8, 4)
    )
    model.model.train()
    state = torch.get_rng_state()
    round_in_order_(model, workload, workload.batches, Rounding(observer="minmax"))
    assert torch.equal(torch.get_rng_state(), state)
    assert model.model[1].training
    assert not any(m._forward_hooks or m._forward_pre_hooks for m in model.modules())


def test_again_gives_the_same(laid):
    """Scales are chosen anew; weights on a grid stay there with min-max scales."""
    torch.manual_seed(0)
    model, workload, _ = laid(nn.Linear(4, 4), data(8, 4))
    round_in_order_(model, workload, [5 * x for x in workload.batches], NEAREST)
    round_in_order_(model, workload, workload.batches, NEAREST)
    want = choose_qparams(torch.cat(data(8, 4)), ASYM)
    assert torch.equal(
        model.quantizer("/linear:0").scale.flatten(), want.scale.flatten()
    )


@pytest.mark.parametrize("fmt", ["bf16", "mxfp4", "int8"])
def test_in_place_calls_in_a_cast(laid, Model, fmt):
    """The exact half is not what the cast wrote."""
    torch.manual_seed(0)

    def forward(self, x):
        y = self.a(x)
        y.relu_()
        y += x
        return self.b(y)

    model, _ = rounded(
        laid,
        Model(forward, a=nn.Linear(4, 4), b=nn.Linear(4, 2)),
        data(8, 4),
        formats={"a/linear": fmt, "/relu": "bf16", "/add": "bf16", "b/linear": "int8"},
    )
    assert {r.site: r.format for r in model.rows} == {
        "a/linear": fmt,
        "/relu": "bf16",
        "/add": "bf16",
        "b/linear": "int8",
    }


# -- the two halves


def test_stack():
    a, b = {"x": torch.ones(2, 3), "mask": None}, {"x": torch.zeros(1, 3), "mask": None}
    assert torch.equal(
        stack([a, b])["x"], torch.tensor([[1.0] * 3, [1.0] * 3, [0.0] * 3])
    )
    assert stack([torch.ones(2, 3), torch.ones(2, 4)]) is None
    assert stack([torch.ones(2, 3), (torch.ones(2, 3),)]) is None
    shared, x = torch.eye(3), torch.ones(2, 3)
    joined = stack([(x, shared, 0.5), (x, shared.clone(), 0.5)])
    assert [getattr(v, "shape", v) for v in joined] == [(4, 3), (3, 3), 0.5]
    assert stack([(x, shared), (x, 2 * shared)]) is None
    assert stack([(x, 1), (x, 2)]) is None
    assert stack([np.ones((2, 3)), np.ones((1, 3))]).shape == (3, 3)
    assert stack([(x, torch.tensor(0.5)), (x, torch.tensor(0.5))])[1].shape == ()
    assert samples((torch.tensor(1.0), None, torch.ones(5, 2))) == 5
    assert samples("text") == 0


@torch.no_grad()
def test_batches_are_joined_where_that_changes_nothing(Model):
    def groups(forward, batches, **most):
        return in_stacks(
            Workload(Model(forward, a=nn.Linear(4, 4)), batches), batches, **most
        )

    batches = [
        torch.randn(n, 4, generator=torch.Generator().manual_seed(n)) for n in (2, 3, 4)
    ]
    assert groups(lambda s, x: s.a(x), batches) == [[0, 1, 2]]
    assert groups(lambda s, x: s.a(x), batches, most=5) == [[0, 1], [2]]
    assert groups(lambda s, x: s.a(x), batches, most=6) == [[0, 1], [2]]
    assert groups(lambda s, x: s.a(x), batches, most=1) == [
        [0],
        [1],
        [2],
    ]  # a batch is never split
    assert groups(lambda s, x: (s.a(x), x.mean()), batches) == [
        [0, 1, 2]
    ]  # a number for all is not compared
    for mixing in (
        lambda s, x: x - x.mean(0),
        lambda s, x: x.roll(1, 0),
        lambda s, x: x.sum(),
        lambda s, x: x.t(),
        lambda s, x: torch.full((len(x), 1), len(x)) * 1.0,
    ):
        assert groups(mixing, batches) == [[0], [1], [2]]
    assert groups(
        lambda s, x: x.view(-1, 2), [batches[0], torch.ones(2, 3, 4), batches[1]]
    ) == [[0], [1], [2]]
    assert groups(
        lambda s, x: s.a(x), [batches[0], torch.ones(2, 3, 4), batches[1]]
    ) == [[0, 2], [1]]
    assert groups(lambda s, x: x[:2] if len(x) < 4 else 1 / 0, batches[:2]) == [
        [0],
        [1],
    ]  # only takes batches so long


def test_large_values_are_not_joined(Model, monkeypatch):
    """Up to JOINED_BYTES together; the scales and weights are those of all batches either way."""
    calls = []

    def forward(s, x):
        calls.append(len(x))
        return s.b(s.a(x).relu())

    torch.manual_seed(0)
    model, batches = (
        Model(forward, a=nn.Linear(4, 8), b=nn.Linear(8, 3)),
        [torch.randn(4, 4) for _ in range(6)],
    )
    found, plain = [], Rounding(observer="minmax", weights="nearest", bias=False)
    for joined, stacks in (
        (2**24, [24]),
        (8 * 8 * 4, [8, 8, 8]),
        (1, [4] * 6),
    ):  # the largest value: 8 numbers of fp32
        monkeypatch.setattr("roundoff.quantize.round_in_order.JOINED_BYTES", joined)
        calls.clear()
        found.append(ro.quantize(model, "int8", batches, rounding=plain))
        # without GPTQ and bias correction no full-precision run goes beside the quantized one
        assert calls[-2 - len(stacks) : -2] == stacks  # two more measure the gain
    for other in found[1:]:
        for (name, a), (_, b) in zip(found[0].named(), other.named(), strict=True):
            # extremes of sums of 8 products, in batches of other lengths: kernels may add in another order
            torch.testing.assert_close(
                a.scale, b.scale, rtol=8 * 2**-23, atol=0, msg=name
            )


# -- runs in step


def test_runs_decide_together_in_order():
    """Two runs that take other ways: the earliest that anyone waits for is decided with those who wait."""
    decided = []

    def decide(requests):
        decided.append((requests[0].key, [r.run for r in requests]))
        for request in requests:
            request.answer = 10 * request.subject

    answers = {0: [], 1: []}
    steps = Lockstep(decide)

    def body(number, keys):
        for key in keys:
            answers[number].append(steps.ask(key, "abc".index(key), number + 1))

    steps.run([lambda: body(0, "abc"), lambda: body(1, "ac")])
    assert decided == [("a", [0, 1]), ("b", [0]), ("c", [0, 1])]
    assert answers == {0: [10, 10, 10], 1: [20, 20]}


@pytest.mark.parametrize("where", ["body", "decide"])
def test_an_error_in_one_run_stops_all(where):
    threads = threading.active_count()  # other tests' libraries may keep some
    ended = []

    def decide(_requests):
        if where == "decide":
            raise ValueError("in decide")

    steps = Lockstep(decide)

    def body(number):
        try:
            steps.ask("a", 0, None)
            if number == 1:
                raise ValueError("in body")
            steps.ask("b", 1, None)
        finally:
            ended.append(number)

    with pytest.raises(ValueError, match=f"in {where}"):
        steps.run([lambda i=i: body(i) for i in range(3)])
    assert sorted(ended) == [0, 1, 2]
    assert threading.active_count() == threads
