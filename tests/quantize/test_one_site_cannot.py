"""What one site cannot have is a row or a remark, and the rest is quantized: gradients that are not finite, values that are
not, rows that the data choose, labels that no operator reads."""

import math

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import roundoff as ro
from roundoff.errors import QuantizationError
from roundoff.plan import noise
from roundoff.quantize.calibration import Calibration
from roundoff.quantize.graph import trace
from roundoff.quantize.importance import NoGradientError, importance
from roundoff.workload.workload import Workload


def data(*shape, count=2, seed=0):
    generator = torch.Generator().manual_seed(seed)
    return [torch.randn(*shape, generator=generator) for _ in range(count)]


def sites(model):
    return {row.site for row in model.rows if row.format != "fp32"}


def root(x):
    """The magnitude of two halves: its derivative at 0 is 0/0."""
    a, b = x.chunk(2, -1)
    return torch.sqrt(a**2 + b**2)


#: Each has a gradient that is not finite where its argument is 0, and is finite itself.
SINGULAR = {
    "root": root,
    "norm": lambda x: torch.sqrt((x * x).sum(-1, keepdim=True)) + x,
    "masked quotient": lambda x: torch.where(x != 0, x / (x * x).sum(-1, True), 0.0),
    "masked logarithm": lambda x: torch.where(x > 0, x * torch.log(x), 0.0),
    "power": lambda x: x.abs() ** 0.3,
}


@pytest.mark.parametrize("name", SINGULAR)
@pytest.mark.parametrize("fmt", ["int8", "w4a8", "int4"])
def test_gradients_that_are_not_finite(Model, name, fmt):
    torch.manual_seed(0)
    singular = SINGULAR[name]
    width = singular(torch.ones(1, 8)).shape[-1]
    net = Model(
        lambda s, x: s.b(singular(s.a(F.relu(x)))).sum(-1, keepdim=True),
        a=nn.Linear(6, 8, bias=False),
        b=nn.Linear(width, 4),
    )
    batches = data(8, 6)
    batches[0][:3] = 0.0
    model = ro.quantize(net, fmt, batches)
    assert sites(model) >= {"a/linear", "b/linear"}
    assert any("are NaN or Inf here" in remark for remark in model.remarks)
    reasons = [row.reason for row in model.rows if "are NaN or Inf" in row.reason]
    assert reasons
    assert math.isfinite(model.steps[-1].after)


def test_finite_samples_are_weighed_as_if_they_were_alone(laid, Model):
    """One output for each sample, so a sign is squared to 1: powers are exact."""
    torch.manual_seed(0)
    net = Model(
        lambda s, x: s.b(root(s.a(x))).tanh().sum(-1),
        a=nn.Linear(6, 8, bias=False),
        b=nn.Linear(4, 4),
    )
    (whole,) = data(5, 6, count=1)
    whole[0] = 0.0
    powers = []
    for x in (whole, whole[1:]):
        model, workload, _ = laid(net, [x])
        powers.append(importance(Calibration.of(model, workload)).values)
    # the derivative of the magnitude at 0 is 0/0, and becomes 0
    assert torch.allclose(
        powers[0]["a/linear:0"].power, powers[1]["a/linear:0"].power, rtol=1e-5
    )


def test_a_singular_gradient_stays_where_it_arises(laid, Model):
    """Before a sum over samples' features it would poison everything upstream."""
    torch.manual_seed(0)
    net = Model(
        lambda s, x: s.b(F.layer_norm(root(s.a(x)), (4,))),
        a=nn.Linear(6, 8, bias=False),
        b=nn.Linear(4, 4),
    )
    (x,) = data(5, 6, count=1)
    net.a.weight.data[[0, 4]] = 0.0  # one magnitude of four is always 0
    model, workload, _ = laid(net, [x])
    found = importance(Calibration.of(model, workload))
    power = found.values["a/linear:0"].power
    assert bool((power > 0).all())
    assert bool(power.isfinite().all())


def test_without_any_gradient_ranges_have_their_own_error(Model):
    net = Model(lambda s, x: torch.round(s.a(x)).detach(), a=nn.Linear(4, 6))
    model = ro.quantize(net, "int8", data(5, 4))
    assert sites(model) == {"a/linear"}
    assert any("no gradient reaches the output" in step.note for step in model.steps)
    assert {q.observer for _, q in model.named() if not q.weight} == {"mse"}


def test_values_that_leave_torch(Model):
    """``numpy()`` refuses tensors with a gradient."""
    torch.manual_seed(0)
    net = Model(
        lambda s, x: s.b(s.a(x) * float(s.a(x).numpy().max())),
        a=nn.Linear(4, 6),
        b=nn.Linear(6, 3),
    )
    with torch.no_grad():
        model = ro.quantize(net, "int8", data(5, 4))
    assert sites(model) >= {"a/linear", "a/linear#1", "b/linear"}
    assert any("Can't call numpy()" in step.note for step in model.steps)
    assert model.steps[-1].after > 20


def test_no_gradient_is_an_error_of_its_own(laid, Model):
    model, workload, _ = laid(
        Model(lambda s, x: s.a(x).detach(), a=nn.Linear(4, 2)), data(3, 4)
    )
    with pytest.raises(NoGradientError, match="no gradient reaches the output"):
        importance(Calibration.of(model, workload))


def test_values_that_a_derivative_needs_and_the_model_writes_over(laid, Model):
    """Autograd refuses ``h = relu(y); h += y``; the powers are those of ``relu(y) + y``."""

    def written(self, x):
        y = self.a(x)
        h = F.relu(y)
        h += y
        h.mul_(0.5)
        return self.b(h).sum(-1)

    def plain(self, x):
        y = self.a(x)
        return self.b((F.relu(y) + y) * 0.5).sum(-1)

    torch.manual_seed(0)
    parts = {"a": nn.Linear(4, 6), "b": nn.Linear(6, 3)}
    powers = []
    for forward in (written, plain):
        model, workload, _ = laid(Model(forward, **parts), data(5, 4))
        powers.append(importance(Calibration.of(model, workload)).values["a/linear:0"])
    assert torch.allclose(powers[0].power, powers[1].power, rtol=1e-6)


def test_labels_that_no_operator_reads_may_be_anything(Model):
    net = Model(lambda s, x: s.a(x), a=nn.Linear(4, 2))
    batches = [(x, torch.full((5,), math.nan)) for x in data(5, 4)]
    workload = Workload(net, batches, forward=lambda model, batch: model(batch[0]))
    assert sites(ro.quantize(workload, "int8")) == {"a/linear"}


@pytest.mark.parametrize("fmt", ["int8", "w4a8"])
def test_what_is_read_is_judged(Model, fmt):
    net = Model(lambda s, x: s.a(x), a=nn.Linear(4, 2))
    batches = data(5, 4)
    batches[1][2, 3] = math.inf
    with pytest.raises(QuantizationError, match=r"a/linear:0, first in batch 1: 1 of"):
        ro.quantize(net, fmt, batches)


@pytest.mark.parametrize("fmt", ["int8", "w4", "int4"])
def test_values_that_the_model_masks_cost_their_own_site(Model, fmt):
    """A logarithm of 0 goes through a product, and is masked behind it."""

    def forward(self, x):
        h = self.a(x)
        bad = self.b(torch.log(F.relu(x)))
        return h + self.c(torch.where(bad.isfinite(), bad, 0.0))

    torch.manual_seed(0)
    net = Model(forward, a=nn.Linear(4, 6), b=nn.Linear(4, 6), c=nn.Linear(6, 6))
    model = ro.quantize(net, fmt, data(5, 4))
    assert sites(model) >= {"a/linear", "c/linear"}
    if fmt != "w4":
        (row,) = (row for row in model.rows if row.site == "b/linear")
        assert row.format == "fp32"
        assert "values are NaN or Inf" in row.reason
    assert model(data(5, 4)[0]).isfinite().all()


class Experts(nn.Module):
    """Each token goes to the best of three experts."""

    def __init__(self):
        super().__init__()
        self.router = nn.Linear(6, 3)
        self.experts = nn.ModuleList(nn.Linear(6, 6) for _ in range(3))

    def forward(self, x):
        tokens = x.reshape(-1, 6)
        best = self.router(tokens).argmax(-1)
        out = torch.zeros_like(tokens)
        for number, expert in enumerate(self.experts):
            chosen = (best == number).nonzero().flatten()
            out = out.index_add(0, chosen, F.gelu(expert(tokens[chosen])))
        return out.view_as(x)


@pytest.mark.parametrize("fmt", ["int8", "w4a8", "int4"])
def test_rows_that_the_data_choose(fmt):
    torch.manual_seed(0)
    net = Experts()
    biases = [expert.bias.detach().clone() for expert in net.experts]
    model = ro.quantize(net, fmt, data(6, 5, 6, count=3), spread=False)
    assert sites(model) >= {"router/linear", "experts.0/linear"}
    # their rows are other tokens in the quantized run: there is no mean error to add
    kept = [expert.bias for expert in model.model.experts]
    assert all(torch.equal(a, b) for a, b in zip(biases, kept, strict=True))
    assert not torch.equal(net.router.bias, model.model.router.bias)


def test_sizes_that_vary_are_known_from_batches_of_one_shape():
    torch.manual_seed(0)
    graph = trace(Workload(Experts(), data(6, 5, 6, count=3)))
    assert "experts.0/linear" in graph.sizes_vary
    assert "router/linear" not in graph.sizes_vary
    longer = [torch.ones(2, 6), torch.ones(3, 6)]
    assert not trace(Workload(nn.Linear(6, 2), longer)).sizes_vary


def test_an_expert_that_gets_no_token(Model):
    torch.manual_seed(0)
    net = Experts()
    net.router.bias.data[2] = -100.0
    model = ro.quantize(net, "int8", data(6, 5, 6))
    (row,) = (row for row in model.rows if row.site == "experts.2/linear")
    assert (row.format, row.reason.partition(": ")[2]) == (
        "fp32",
        "no calibration batch has an element here",
    )


def test_noise_compares_outputs_of_one_shape_where_the_reference_is_finite():
    """2² / (3² + 4²) of the output that agrees; NaN without any."""
    want = [{"a": torch.tensor([3.0, 4.0, -math.inf]), "b": torch.ones(3)}]
    got = [{"a": torch.tensor([3.0, 6.0, 5.0]), "b": torch.ones(2)}]
    assert noise(got, want) == pytest.approx(4 / 25)
    assert math.isnan(noise([{"b": torch.ones(2)}], [{"b": torch.ones(3)}]))
    bad = [{"a": torch.tensor([3.0, math.nan, 5.0]), "b": torch.ones(3)}]
    assert noise(bad, want) == math.inf


def detections(self, x):
    scores = self.a(x).sigmoid()
    return self.b(x[scores[:, 0] > 0.5]), scores


@pytest.mark.parametrize("bias", [0.0, -100.0])
def test_outputs_with_as_many_rows_as_the_data_ask_for(Model, bias):
    torch.manual_seed(0)
    net = Model(detections, a=nn.Linear(4, 1), b=nn.Linear(4, 4))
    net.a.bias.data[:] = bias
    model = ro.quantize(net, "int8", data(9, 4, count=3))
    assert "a/linear" in sites(model)
    if not bias:
        assert model.steps[-1].after > 20


def by_value(self, x):
    count = int(x.abs().max())
    for _ in range(count):
        x = torch.tanh(self.a(x))
    if x.mean() > 0:
        x = x * float(x.std())
    return self.b(x) * count


@pytest.mark.parametrize("fmt", ["int8", "w4a8", "int4"])
def test_loops_and_branches_by_value(Model, fmt):
    torch.manual_seed(0)
    net = Model(by_value, a=nn.Linear(8, 8), b=nn.Linear(8, 4))
    batches = [x * (1 + i) for i, x in enumerate(data(16, 8, count=3))]
    model = ro.quantize(net, fmt, batches)
    assert "b/linear" in sites(model)
    assert math.isfinite(model.steps[-1].after)
