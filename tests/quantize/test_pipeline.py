"""The full-precision twin of a quantized model: what each value inside is compared with."""

import copy

import pytest
import torch
from torch import nn

import roundoff as ro
from roundoff.export.delivery.request import Ask
from roundoff.export.delivery.sites import compare, site_rows
from roundoff.ops.calls import float_tensors, watch
from roundoff.quantize.options import Rounding
from roundoff.quantize.pipeline import unrounded
from roundoff.verbs.quantize import make
from roundoff.workload.workload import Workload


def skewed(seed=0):
    """conv, BatchNorm, ReLU twice, with channels whose sizes differ by 64, and a head."""
    torch.manual_seed(seed)
    net = nn.Sequential(
        nn.Conv2d(1, 8, 3, padding=1),
        nn.BatchNorm2d(8),
        nn.ReLU(),
        nn.Conv2d(8, 8, 3, padding=1),
        nn.BatchNorm2d(8),
        nn.ReLU(),
        nn.Flatten(),
        nn.Linear(8 * 36, 4),
    )
    with torch.no_grad():
        factors = 2.0 ** torch.linspace(-3, 3, 8)
        net[1].weight.mul_(factors)
        net[3].weight.div_(factors[:, None, None])
        net[4].running_mean.uniform_(-0.1, 0.1)
        net[4].running_var.uniform_(0.5, 2)
    return net.eval()


def data(count=3):
    generator = torch.Generator().manual_seed(1)
    return [torch.rand(16, 1, 6, 6, generator=generator) for _ in range(count)]


class Outputs:
    def __init__(self):
        self.found = {}

    def before_write(self, _):
        pass

    def call(self, call):
        result = call.run()
        for tensor in float_tensors(result)[:1]:
            self.found[str(call.site)] = tensor.detach().clone().double()
        return result


def outputs(model, batch):
    handler = Outputs()
    with torch.no_grad(), watch(model, handler) as mode:
        mode.begin()
        with mode:
            model(batch)
    return handler.found


@pytest.mark.parametrize("balance", ["", "smoothquant"])
def test_its_weights_are_those_before_rounding(balance):
    """Rounded to nearest, a weight of the quantized model is half a step from the twin's at most; the outputs are equal."""
    net, batches = skewed(), data()
    workload = Workload(net, batches)
    how = Rounding(
        observer="minmax",
        weights="nearest",
        scales="minmax",
        bias=False,
        balance=balance,
    )
    made = ro.quantize(workload, "int8", rounding=how)
    twin = unrounded(made, workload)
    assert made.rescalings
    assert isinstance(twin[1], nn.Identity)
    moved = 0
    for name, quantizer in made.named():
        if quantizer.weight:
            exact, rounded = (
                twin.get_parameter(name).double(),
                made.model.get_parameter(name).double(),
            )
            if (
                name not in made.record().balance
            ):  # else the weight has taken factors that its input is divided by
                # the scale is rounded to fp32 once, the code times the scale as well
                assert (
                    (exact - rounded).abs() <= quantizer.scale.double() * (0.5 + 2**-16)
                ).all()
            moved += not torch.allclose(
                exact, copy.deepcopy(net).get_parameter(name).double(), rtol=1e-3
            )
    assert moved >= 2
    with torch.no_grad():
        x = batches[0]
        # three layers of sums in fp32 with other factors
        assert torch.allclose(
            twin(x), net(x), rtol=1e-4, atol=1e-4 * float(net(x).abs().max())
        )
    before = {k: v.clone() for k, v in net.state_dict().items()}
    unrounded(made, workload)
    assert all(torch.equal(before[k], v) for k, v in net.state_dict().items())


def test_sites_have_the_plain_sqnr_against_it():
    net, batches = skewed(), data()
    made = make(Workload(net, batches), Ask(tradeoff=False))
    exact = outputs(unrounded(made.model, made.start), batches[0])
    found = compare(made)
    (last,) = [s for s in found if s == "7/linear"]
    with torch.no_grad():
        error = made.model(batches[0]).double() - exact[last]
    # the noise is 40 dB below values of fp32's digits: known to 2**-24 / 1e-2 = 6e-6, which is 5e-5 dB; twice that
    want = 10 * torch.log10(exact[last].square().sum() / error.square().sum())
    assert found[last][0] == pytest.approx(want.item(), abs=1e-4)
    # noise of step² / 12 with steps of 1/255 of a range is 50 dB below a value of that size, and not all of them are
    assert all(db > 35 for db, _ in found.values())
    user = outputs(net, batches[0])["2/relu"]
    assert (
        (exact["2/relu"] - user).square().sum() > user.square().sum() / 100
    )  # the channels are others: 20 dB at best
    assert {row.share for row in site_rows(made, Ask())} == {None}


def test_a_pruned_model_is_compared_with_what_pruning_left():
    net, batches = skewed(), data()
    made = make(Workload(net, batches), Ask(prune="channel:0.5", tradeoff=False))
    assert len(unrounded(made.model, made.start)[0].weight) < 8
    assert all(db > 35 for db, _ in compare(made).values())
