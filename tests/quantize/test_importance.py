"""Squared adjoints against the exact Jacobian."""

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from roundoff.errors import QuantizationError
from roundoff.quantize.calibration import Calibration
from roundoff.quantize.importance import importance


def data(*shape, count=2, seed=0):
    generator = torch.Generator().manual_seed(seed)
    return [torch.randn(*shape, generator=generator) for _ in range(count)]


def jacobian_power(after, values):
    """Sum over outputs of the squared Jacobian of ``after`` at each sample: [samples, *value] in float64."""
    found = []
    for value in values.double():
        jacobian = torch.autograd.functional.jacobian(
            lambda v: after(v[None])[0], value
        )
        found.append(
            jacobian.square().flatten(0, jacobian.ndim - value.ndim - 1).sum(0)
        )
    return torch.stack(found)


def test_powers_are_unbiased(laid):
    """For signs v, (vᵀJ)² has the mean |j|² and the variance 2 (|j|⁴ - Σ j_o⁴) ≤ 2 |j|⁴; all are independent."""
    torch.manual_seed(0)
    net, probes = (
        nn.Sequential(nn.Linear(4, 6), nn.Tanh(), nn.Linear(6, 5), nn.Tanh()),
        400,
    )
    model, workload, _ = laid(net, data(3, 4))
    found = importance(Calibration.of(model, workload), probes=probes, gradients=2)
    exact = net.double()
    x = torch.cat(workload.batches)
    hidden = exact[:2](x.double()).detach()
    for name, after, values in (
        ("0/linear:0", exact, x),
        ("1/tanh", exact[2:], hidden),
    ):
        each = jacobian_power(after, values)
        sigma = (2 * each.square() / probes).sum(0).sqrt()
        known = found.values[name]
        assert known.samples == 6 * probes
        assert known.power.shape == values.shape[1:]
        off = (known.power.double() / probes - each.sum(0)).abs() / sigma
        assert float(off.max()) < 5  # sigma, over 10 numbers
        assert float(
            (known.power.double() / probes / each.sum(0)).mean()
        ) == pytest.approx(1, abs=0.1)


def test_powers_of_results_and_channels_of_convolutions(laid):
    """One output, so one sign vector is exact: its square is 1."""
    torch.manual_seed(0)
    net = nn.Sequential(nn.Conv2d(2, 3, 3), nn.Tanh(), nn.Conv2d(3, 1, 2))
    batches = data(4, 2, 4, 4)
    model, workload, _ = laid(
        net, batches, {"0/conv2d": "int8", "2/conv2d": "int8"}, elementwise=False
    )
    found = importance(Calibration.of(model, workload, batches), gradients=1)
    exact = net.double()
    x = batches[0].double()
    made = exact[0](x).detach()
    want = jacobian_power(exact[1:], made).sum(0)
    known = found.results["0/conv2d"]
    assert torch.allclose(
        known.power.double(), want, rtol=1e-4, atol=1e-9
    )  # fp32 products of three layers
    assert torch.allclose(known.channel.double(), want.sum((1, 2)), rtol=1e-4)
    assert torch.allclose(
        known.square.double() / known.samples, made.square().mean((0, 2, 3)), rtol=1e-5
    )
    assert torch.allclose(
        known.low.double(),
        made.amin((0, 2, 3)).minimum(exact[0](batches[1].double()).amin((0, 2, 3))),
    )
    assert set(found.values) == {"0/conv2d:0", "1/tanh"}
    assert found.values["1/tanh"].channel.shape == (3,)


def test_channels_lie_where_the_reader_contracts(laid):
    """The channels of a sequence for a Conv1d are axis 1, of one for a Linear the last."""
    net = nn.Sequential(nn.Conv1d(2, 3, 1), nn.ReLU(), nn.Linear(5, 4))
    model, workload, _ = laid(
        net, data(4, 2, 5), {"0/conv1d": "int8", "2/linear": "int8"}
    )
    found = importance(Calibration.of(model, workload))
    assert len(found.values["0/conv1d:0"].channel) == 2
    assert len(found.results["0/conv1d"].channel) == 3
    assert len(found.values["1/relu"].channel) == 5
    assert len(found.results["2/linear"].channel) == 4


def test_power_of_a_batch(laid):
    torch.manual_seed(0)
    model, workload, _ = laid(nn.Linear(4, 1), [data(3, 7, 4)[0], data(3, 5, 4)[0]])
    found = importance(Calibration.of(model, workload))
    known = found.values["/linear:0"]
    assert known.power.isnan().all()  # samples of two shapes: kept for each channel
    power = found.power("/linear:0", torch.zeros(2, 6, 4), -1)
    assert torch.equal(power, known.channel.expand(2, 6, 4))
    weight = model.model.weight[0]
    assert torch.allclose(known.channel, weight.square() * (3 * 7 + 3 * 5), rtol=1e-5)
    assert found.power("/linear:0", torch.zeros(2, 6, 3), -1) is None
    assert found.power("no such value", torch.zeros(2, 4), -1) is None


def test_a_value_with_other_channels_in_each_batch_has_no_power(laid, Model):
    """Scores of attention: as many columns as tokens."""
    net = Model(lambda s, x: (x @ x.mT).softmax(-1) @ x)
    batches = [data(2, 5, 3)[0].requires_grad_(), data(2, 4, 3)[0]]
    model, workload, _ = laid(net, batches, {"/matmul": "int8", "/matmul#1": "int8"})
    found = importance(Calibration.of(model, workload))
    assert "/softmax" not in found.values
    assert found.power("/softmax", torch.zeros(2, 5, 5), -1) is None


def test_in_place_operators_and_two_readers(laid, Model):
    """Both readers of a value read it behind one edge: its adjoint is the sum of both."""

    def forward(self, x):
        y = F.relu_(self.a(x))
        z = self.b(y) + self.c(y)
        return z.relu_().sum(1, keepdim=True)

    torch.manual_seed(0)
    net = Model(forward, a=nn.Linear(3, 4), b=nn.Linear(4, 2), c=nn.Linear(4, 2))
    model, workload, _ = laid(
        net, data(6, 3), dict.fromkeys(("a/linear", "b/linear", "c/linear"), "int8")
    )
    found = importance(Calibration.of(model, workload, workload.batches[:1]))
    y = net.a(workload.batches[0]).relu().detach()
    want = jacobian_power(
        lambda v: (net.double().b(v) + net.c(v)).relu().sum(1, keepdim=True), y
    )
    assert torch.allclose(
        found.values["/relu"].power.double(), want.sum(0), rtol=1e-4, atol=1e-9
    )


def test_gradients_through_in_place_residuals(laid, calibrated, Model):
    """Of the calibration and of training: what a backward pass needs is not written."""

    def forward(self, x):
        y = self.a(x)
        y += self.b(y)
        y = F.relu_(y)
        z = self.c(y).clamp_(-1, 1)
        return z.sigmoid_()

    torch.manual_seed(0)
    net = Model(
        forward, a=nn.Conv2d(2, 3, 1), b=nn.Conv2d(3, 3, 1), c=nn.Conv2d(3, 2, 1)
    )
    plain = Model(
        lambda s, x: s.c((s.a(x) + s.b(s.a(x))).relu()).clamp(-1, 1).sigmoid(),
        a=net.a,
        b=net.b,
        c=net.c,
    )
    found = []
    for each in (net, plain):
        model, workload, _ = laid(each, data(3, 2, 4, 4))
        known = importance(Calibration.of(model, workload))
        found.append(known.values["/relu"].power)
        trained = calibrated(each, data(3, 2, 4, 4))
        trained(data(3, 2, 4, 4)[0]).square().sum().backward()
        found.append(trained.model.b.weight.grad)
    assert torch.allclose(found[0], found[2], rtol=1e-5, atol=1e-8)
    assert found[1].abs().sum() > 0


def test_a_batch_without_gradients_counts_for_ranges(laid, Model):
    net = Model(
        lambda s, x: s.a(x) if x.sum() > 0 else s.a(x).detach(), a=nn.Linear(3, 2)
    )
    batches = [-torch.ones(4, 3), torch.ones(4, 3)]
    model, workload, _ = laid(net, batches)
    assert (
        importance(Calibration.of(model, workload, batches))
        .values["a/linear:0"]
        .samples
        == 4
    )


def test_nothing_is_left_behind(laid):
    torch.manual_seed(0)
    model, workload, _ = laid(
        nn.Sequential(nn.Linear(3, 3), nn.Dropout(), nn.Linear(3, 1)), data(4, 3)
    )
    state, before = (
        torch.get_rng_state(),
        {k: v.clone() for k, v in model.state_dict().items()},
    )
    model.model[0].weight.grad = torch.ones(3, 3)
    importance(Calibration.of(model, workload))
    assert torch.equal(torch.get_rng_state(), state)
    assert all(torch.equal(before[k], v) for k, v in model.state_dict().items())
    assert all(p.requires_grad for p in model.model.parameters())
    assert torch.equal(model.model[0].weight.grad, torch.ones(3, 3))
    assert not any(m._forward_hooks or m._forward_pre_hooks for m in model.modules())


def test_no_gradient(laid, Model):
    model, workload, _ = laid(
        Model(lambda s, x: s.a(x).detach(), a=nn.Linear(3, 3)), data(4, 3)
    )
    with pytest.raises(
        QuantizationError, match="no gradient reaches the output"
    ) as error:
        importance(Calibration.of(model, workload))
    assert error.value.do == "choose an observer that needs none: mse"
