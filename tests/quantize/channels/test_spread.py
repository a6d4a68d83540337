"""Channel scales that cost the output least."""

import copy
import math

import numpy as np
import pytest
import torch
from torch import nn
from torch.nn import functional as F

from roundoff.quantize.calibration import Calibration
from roundoff.quantize.channels import spread
from roundoff.quantize.channels.follow import follow_channels
from roundoff.quantize.channels.groups import groups_of
from roundoff.quantize.channels.spread import spread_
from roundoff.quantize.importance import importance


def data(*shape, count=2, seed=0):
    generator = torch.Generator().manual_seed(seed)
    return [torch.randn(*shape, generator=generator) for _ in range(count)]


def prepared(laid, net, batches, formats="int8", **options):
    if isinstance(formats, str):
        model, workload, graph = laid(net, batches)
        formats = {
            s: formats for s, n in graph.nodes.items() if n.kind in ("conv", "linear")
        }
    model, workload, graph = laid(net, batches, formats, **options)
    return model, workload, graph, importance(Calibration.of(model, workload))


def skewed(net, exponents, first, second):
    """The same function with other channel ranges: outputs of ``first`` times 2**e, inputs of ``second`` by it."""
    net = copy.deepcopy(net)
    factors = 2.0**exponents
    with torch.no_grad():
        shape = [-1] + [1] * (net[first].weight.ndim - 1)
        net[first].weight.mul_(factors.view(shape))
        net[first].bias.mul_(factors)
        net[second].weight.div_(
            factors.view([1, -1] + [1] * (net[second].weight.ndim - 2))
        )
    return net


def convolutions(clip=None):
    torch.manual_seed(0)
    return nn.Sequential(
        nn.Conv2d(2, 6, 3),
        clip or nn.ReLU(),
        nn.Conv2d(6, 5, 3),
        clip or nn.ReLU(),
        nn.Flatten(),
        nn.Linear(5 * 4, 3),
    )


@pytest.mark.parametrize(
    "make", [convolutions, lambda: convolutions(nn.LeakyReLU(0.1))]
)
def test_the_function_stays_and_the_predicted_noise_falls(laid, make):
    net = skewed(make(), torch.tensor([3.0, -2.0, 0.0, 1.0, -3.0, 2.0]), 0, 2)
    model, workload, _graph, weights = prepared(laid, net, data(4, 2, 6, 6))
    gain = spread_(Calibration.of(model, workload), weights)
    assert gain.db > 3
    assert gain.note == "predicted, 2 of 3 groups of channels"
    x = data(4, 2, 6, 6, seed=1)[0]
    exact, found = net(x), model.model(x)
    # each product of a sum is scaled and scaled back, with two roundings a weight, and summed anew: 54 terms at most
    assert (
        float((found - exact).detach().norm() / exact.detach().norm())
        < (2 + 54**0.5) * 3 * 2**-24
    )
    assert not torch.equal(model.model[0].weight, net[0].weight)


def test_relu6_is_the_same_on_the_calibration_data(laid):
    """Channels that reach 6 keep their scale, others grow until they nearly do."""
    net = convolutions(nn.ReLU6())
    with torch.no_grad():
        net[0].weight.mul_(
            torch.tensor([9.0, 1.0, 0.1, 0.01, 3.0, 0.5]).view(6, 1, 1, 1)
        )
    batches = data(4, 2, 6, 6, count=3)
    model, workload, _graph, weights = prepared(laid, net, batches)
    gain = spread_(Calibration.of(model, workload), weights)
    assert gain.db > 1
    for x in batches:
        assert torch.allclose(model.model(x), net(x), rtol=1e-4, atol=1e-5)
    first = net[:1](torch.cat(batches)).amax((0, 2, 3))
    now = model.model[:1](torch.cat(batches)).amax((0, 2, 3))
    reached = first >= 6
    assert reached.any()
    assert torch.equal(first[reached], now[reached])
    assert (now[~reached] <= 6 / spread.ROOM * (1 + 1e-5)).all()
    assert (now[~reached] >= first[~reached] * (1 - 1e-5)).all()


def test_skewed_channels_end_at_the_same_scales(laid):
    """The sum that is minimised does not depend on the scales that the channels have: both descents reach one minimum.

    They start elsewhere and stop before it: what the channels cost agrees within 0.3 dB, and their sizes within 20 %.
    """
    net = convolutions()
    exponents = torch.empty(6).uniform_(
        -3, 3, generator=torch.Generator().manual_seed(5)
    )
    batches, found, ends = data(8, 2, 6, 6), [], []
    for start in (net, skewed(net, exponents, 0, 2)):
        model, workload, _graph, weights = prepared(laid, start, batches)
        ends.append(spread_(Calibration.of(model, workload), weights).after_db)
        found.append(model.model[0].weight.detach().abs().amax((1, 2, 3)))
    assert ends[0] == pytest.approx(ends[1], abs=0.3)
    ratio = found[0] / found[1]
    assert float(ratio.max() / ratio.min()) < 1.2


def problem(laid, net, batches, formats="int8"):
    model, workload, graph, weights = prepared(laid, net, batches, formats)
    groups = [
        g
        for g in groups_of(follow_channels(workload, workload.batches[:1]), "rescale")
        if g.consumers
    ]
    groups = [g for g in groups if g.producers and g.pinned is None]
    return spread.OutputNoise(model, graph, weights, groups, 0.3), weights


def test_the_sum_by_hand(laid):
    """In numpy, float64: values Σ Δ²/12 Σ a s², weights γ Σ a_o Δ_o²/12 Σ E[x²]/s², for one hidden layer."""
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(3, 4), nn.ReLU(), nn.Linear(4, 2))
    noise_of, weights = problem(laid, net, data(8, 3))
    log = np.array([0.3, -0.2, 0.0, 1.0])

    def noise(log):
        s = np.exp(log)
        total = 0.0
        known = weights.values["1/relu"]
        a, high, low = (
            getattr(known, n).double().numpy() for n in ("channel", "high", "low")
        )

        def norm(x):
            return (np.maximum(x, 1e-9) ** spread.NORM).mean() ** (1 / spread.NORM)

        total += (a * s * s).sum() * ((norm(high / s) + norm(-low / s)) / 255) ** 2 / 12
        w = net[2].weight.detach().double().numpy()
        power = known.square.double().numpy() / known.samples
        adjoint = weights.results["2/linear"].channel.double().numpy()
        step = np.abs(w * s).max(1) / 127
        total += 0.3 * (adjoint * step**2 / 12).sum() * (power / s**2).sum()
        first = np.abs(net[0].weight.detach().double().numpy()).max(1) / 127
        inputs = weights.values["0/linear:0"]
        made = weights.results["0/linear"].channel.double().numpy()
        total += (
            0.3
            * (made * first**2 / 12).sum()
            * (inputs.square.double().numpy() / inputs.samples).sum()
        )
        return total

    ours = torch.tensor(log, dtype=torch.float32, requires_grad=True)
    (found,) = [noise_of([ours])]
    constant = noise(log) - float(
        found.detach()
    )  # weights and values that no scale stands at may be left out
    other = np.array([-0.5, 0.1, 0.4, 0.0])
    again = float(noise_of([torch.tensor(other, dtype=torch.float32)]))
    assert noise(other) - again == pytest.approx(
        constant, rel=1e-3, abs=1e-5 * noise(log)
    )
    found.backward()
    each = [(noise(log + 1e-5 * e) - noise(log - 1e-5 * e)) / 2e-5 for e in np.eye(4)]
    assert torch.allclose(
        ours.grad.double(),
        torch.tensor(each),
        rtol=1e-3,
        atol=1e-4 * float(np.abs(each).max()),
    )


@pytest.mark.parametrize(
    ("layers", "batch"),
    [
        ((nn.Conv2d(4, 4, 3, groups=4), nn.ReLU(), nn.Conv2d(4, 2, 1)), (4, 4, 5, 5)),
        (
            (
                nn.ConvTranspose2d(4, 6, 2, groups=2, stride=2),
                nn.ReLU(),
                nn.Conv2d(6, 4, 1, groups=2),
            ),
            (4, 4, 3, 3),
        ),
        ((nn.Conv1d(3, 4, 2), nn.ReLU(), nn.Conv1d(4, 2, 2)), (4, 3, 6)),
        ((nn.Conv2d(2, 3, 2), nn.ReLU(), nn.Flatten(), nn.Linear(12, 2)), (4, 2, 3, 3)),
    ],
    ids=["depthwise", "transposed", "conv1d", "flatten"],
)
def test_all_kinds_of_layers(laid, layers, batch):
    torch.manual_seed(0)
    net = nn.Sequential(*copy.deepcopy(layers))
    with torch.no_grad():
        axis = 1 if isinstance(net[0], nn.ConvTranspose2d) else 0
        count = net[0].weight.shape[axis]
        net[0].weight.mul_(
            torch.logspace(-1, 1, count).view(
                [-1 if i == axis else 1 for i in range(net[0].weight.ndim)]
            )
        )
    model, workload, _graph, weights = prepared(laid, net, data(*batch))
    gain = spread_(Calibration.of(model, workload), weights)
    assert gain.db > 0
    x = data(*batch, seed=1)[0]
    assert torch.allclose(model.model(x), net(x), rtol=1e-4, atol=1e-5)


def test_residual_channels_share_one_scale(laid, Model):
    """Both branches of an add are divided by the same, so that their sum is."""

    def forward(self, x):
        y = F.relu(self.a(x))
        return self.c(F.relu(y + self.b(y)))

    torch.manual_seed(0)
    net = Model(
        forward, a=nn.Conv2d(2, 4, 1), b=nn.Conv2d(4, 4, 1), c=nn.Conv2d(4, 2, 1)
    )
    with torch.no_grad():
        net.a.weight[0].mul_(20)
    model, workload, _graph, weights = prepared(laid, net, data(4, 2, 4, 4))
    assert spread_(Calibration.of(model, workload), weights).db > 0
    x = data(4, 2, 4, 4, seed=1)[0]
    assert torch.allclose(model.model(x), net(x), rtol=1e-4, atol=1e-5)
    ratios = (model.model.a.weight / net.a.weight).detach()[:, 0, 0, 0]
    assert torch.allclose(
        ratios, (net.c.weight / model.model.c.weight).detach()[0, :, 0, 0], rtol=1e-4
    )


def test_nothing_to_rescale(laid):
    model, workload, _graph, weights = prepared(laid, nn.Linear(3, 2), data(4, 3))
    before = model.model.weight.clone()
    gain = spread_(Calibration.of(model, workload), weights)
    assert math.isnan(gain.after_db)
    assert gain.note == "no group of channels can be rescaled"
    assert torch.equal(model.model.weight, before)
    net = nn.Sequential(nn.Linear(3, 4), nn.Sigmoid(), nn.Linear(4, 2))
    model, workload, _graph, weights = prepared(laid, net, data(4, 3))
    assert math.isnan(spread_(Calibration.of(model, workload), weights).after_db)


def test_dead_channels_and_constant_values(laid):
    """A channel that is always zero has no range and no adjoint; scales stay finite."""
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(3, 4), nn.ReLU(), nn.Linear(4, 2))
    with torch.no_grad():
        net[0].weight[1].zero_()
        net[0].bias[1] = -1.0
        net[2].weight[:, 2].zero_()
    model, workload, _graph, weights = prepared(laid, net, data(4, 3))
    gain = spread_(Calibration.of(model, workload), weights)
    assert math.isfinite(gain.after_db)
    assert all(bool(p.isfinite().all()) for p in model.model.parameters())
    x = data(4, 3, seed=1)[0]
    assert torch.allclose(model.model(x), net(x), rtol=1e-4, atol=1e-6)


def test_the_prediction_is_the_signal_to_noise_ratio_of_the_output(laid):
    """Against noise of the sums' own kind put into a linear network: uniform in each step of values and weights."""
    torch.manual_seed(0)
    net, batches = (
        nn.Sequential(nn.Linear(6, 16), nn.Linear(16, 5)),
        data(400, 6, count=2),
    )
    model, workload, _graph, weights = prepared(laid, net, batches)
    gain = spread_(Calibration.of(model, workload), weights, gamma=1.0, steps=1)
    x, (first, second) = (
        torch.cat(batches).double(),
        (m.double() for m in copy.deepcopy(net)),
    )
    hidden = first(x).detach()
    generator = torch.Generator().manual_seed(1)

    def shake(value, step):
        return (
            value
            + (torch.rand(value.shape, generator=generator, dtype=torch.float64) - 0.5)
            * step
        )

    def extent(ends):
        return ends.pow(spread.NORM).mean().pow(1 / spread.NORM)

    step = (extent(hidden.amax(0)) + extent(-hidden.amin(0))) / 255
    exact, noise = second(hidden), 0.0
    for _ in range(20):
        weight = shake(second.weight, second.weight.abs().amax(1, keepdim=True) / 127)
        noise += (
            float(
                (F.linear(shake(hidden, step), weight, second.bias) - exact)
                .detach()
                .square()
                .sum()
            )
            / 20
        )
    # only the value and the weight that read channels which can be rescaled are in the sums; uniform noise has variance
    # step²/12; 5 outputs of 800 samples, but 80 weights shaken 20 times: within a tenth, 0.4 dB
    assert gain.before_db == pytest.approx(
        10 * math.log10(float(exact.detach().square().sum()) / noise), abs=0.5
    )
