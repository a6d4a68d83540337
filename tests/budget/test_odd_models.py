"""Models that do unusual things in their forward pass: measured where it can be, and said where it cannot."""

from __future__ import annotations

import copy
import functools
import warnings

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

import roundoff
from roundoff import Workload
from roundoff.errors import GradientPathError, WorkloadError
from roundoff.plan.rounded_model import noise, run_batches

#: The adjoint alone.
budget = functools.partial(roundoff.budget, trials=0)

X = torch.randn(32, 6, generator=torch.Generator().manual_seed(1))


class Model(nn.Module):
    """``forward`` is given as a function of the model and its input."""

    def __init__(self, function):
        super().__init__()
        torch.manual_seed(0)
        self.function, self.linear, self.head = (
            function,
            nn.Linear(6, 6),
            nn.Linear(6, 2),
        )
        self.register_buffer("average", torch.zeros(6))
        self.register_buffer("count", torch.zeros(()))
        self.state = None

    def forward(self, x):
        return self.function(self, x)


def check(function, batches=(X,)):
    """The budget, with each site's power within a factor of 1.3 of the measured one.

    At least 400 products for a site whose noise lies in one sample: sigma 7 %, 4 of them 28 %, and 2 % of second order.
    """
    workload = Workload(Model(function), list(batches))
    found = budget(workload, ["bf16"], probes=400)
    reference = run_batches(workload).targets
    for row in found.table.to_dicts():
        single = noise(run_batches(workload, {row["site"]: "bf16"}).targets, reference)
        assert row["noise"] == pytest.approx(single, rel=0.3, abs=1e-15), row["site"]
    return found


def unreached(found):
    return {s.site for s in found.sites if s.no_path}


def moving_average(self, x):
    y = self.linear(x)
    self.average.mul_(0.9).add_(y.mean(0))
    self.count += 1.0
    return self.head(y - self.average)


def cached_rows(self, x):
    """As a key-value cache is filled: a slice of a buffer is assigned."""
    self.average[:3] = self.linear(x)[0, :3]
    return self.head(x.sin() + self.average)


def replaced_buffer(self, x):
    y = self.linear(x)
    self.average = 0.9 * self.average + y.mean(0)
    return self.head(y * self.average)


def kept_state(self, x):
    """A recurrent state that lives on from batch to batch, with its graph."""
    before = torch.zeros(6) if self.state is None else self.state[0]
    y = torch.tanh(self.linear(x) + before)
    self.state = (y.mean(0), 1)
    return self.head(y.exp())


@pytest.mark.parametrize(
    "function", [moving_average, cached_rows, replaced_buffer, kept_state]
)
def test_models_that_keep_something(function):
    """Several batches, each of which sees what those before it left; afterwards the model is as before."""
    model = Model(function)
    workload = Workload(model, [X, X[:8], X[:3]])
    found = check(function, [X, X[:8], X[:3]])
    assert found.about.batch_samples == (32, 8, 3)
    budget(workload, ["bf16"])
    assert model.state is None
    for buffer in model.buffers():
        assert not buffer.requires_grad
        assert buffer.grad_fn is None
        assert bool((buffer == 0).all())


def test_another_attempt_starts_from_the_same_buffers_and_random_numbers():
    def f(self, x):
        self.count += 1.0
        assert float(self.count) == 1.0, (
            "the second attempt found the first one's count"
        )
        y = (
            self.linear(x).exp().mul_(2.0)
        )  # plain autograd fails: the batch is measured again
        return self.head(y * torch.rand(6))

    budgets = [budget(Workload(Model(f), [X]), ["bf16"]) for _ in range(2)]
    assert budgets[0].about.batched


def test_numbers_taken_out_of_the_graph():
    def f(self, x):
        y = self.linear(x)
        largest = float(y.detach().abs().max())
        mean = y.detach().numpy().mean()
        return self.head(
            y / largest + float(mean) + copy.deepcopy(y.detach()) * y.mean().item()
        )

    found = budget(Workload(Model(f), [X]), ["bf16"])
    assert unreached(found) == {"/abs", "/max", "/mean"}
    assert ("deepcopy", "moves values, rounds nothing") in {
        (e.operator, e.reason) for e in found.about.excluded
    }


@pytest.mark.parametrize(
    "take",
    [
        lambda y: float(y.numpy().max()),  # refused to a tensor with a gradient
        lambda y: int(torch.cumsum(y.abs().floor(), 0, dtype=torch.int32)[0, 0]),
    ],
)
def test_what_a_tensor_with_a_gradient_refuses(take):
    """In the plain model, without parameters that require gradients, it works."""
    found = budget(
        Workload(
            Model(
                lambda self, x: self.head(self.linear(x) * (1 + take(self.linear(x))))
            ),
            [X],
        ),
        ["bf16"],
    )
    assert "head/linear" not in unreached(found)
    assert "linear/linear" not in unreached(found)


def test_an_operator_with_a_backward_of_its_own():
    class Exponential(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x):
            ctx.save_for_backward(x)
            return x.exp()

        @staticmethod
        def backward(ctx, gradient):
            return gradient * ctx.saved_tensors[0].exp()

    found = check(lambda self, x: self.head(Exponential.apply(self.linear(x))))
    assert {s.site: s.no_path for s in found.sites} == {
        "linear/linear": None,
        "/exp": "computed under torch.no_grad",
        "head/linear": None,
    }


def test_complex_numbers():
    def f(self, x):
        turned = torch.view_as_complex(self.linear(x).view(-1, 3, 2)) * torch.polar(
            torch.ones(3), torch.arange(3.0)
        )
        return self.head(torch.view_as_real(turned).flatten(1))

    found = check(f)
    assert [s.site for s in found.sites] == ["linear/linear", "head/linear"]
    assert {e.reason for e in found.about.excluded if e.operator == "mul"} == {
        "complex numbers"
    }


def test_transforms_inside_the_model():
    found = check(
        lambda self, x: self.head(
            torch.vmap(lambda row: self.linear(row).tanh())(x.sin())
        )
    )
    assert [s.site for s in found.sites] == ["/sin", "head/linear"]
    reasons = {(e.operator, e.reason) for e in found.about.excluded}
    assert {
        ("linear", "inside torch.vmap or torch.func"),
        ("tanh", "inside torch.vmap or torch.func"),
    } <= reasons


def test_parts_in_torchscript_are_counted():
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # torch.jit is going
        scripted = torch.jit.script(nn.Sequential(nn.Linear(6, 6), nn.Tanh()))

    class Partly(nn.Module):
        def __init__(self):
            super().__init__()
            self.inner, self.head = scripted, nn.Linear(6, 2)

        def forward(self, x):
            return self.head(self.inner(x))

    found = budget(Workload(Partly(), [X, X]), ["bf16"])
    assert [s.site for s in found.sites] == ["head/linear"]
    (row,) = [e for e in found.about.excluded if "TorchScript" in e.reason]
    assert (row.operator, row.count, row.examples) == (
        "forward",
        1,
        ("inner/forward",),
    )
    with pytest.raises(GradientPathError, match="TorchScript"):
        budget(Workload(scripted, [X]), ["bf16"])


def test_gradient_checkpointing_is_refused_with_advice():
    def f(self, x):
        return self.head(
            checkpoint(lambda y: self.linear(y).tanh(), x, use_reentrant=False)
        )

    with pytest.raises(WorkloadError) as error:
        budget(Workload(Model(f), [X]), ["bf16"])
    assert "workload, batch 0: the backward pass through the model failed" in str(
        error.value
    )
    assert "turn gradient checkpointing off" in str(error.value)


def test_a_backward_pass_that_fails_says_where():
    def f(self, x):
        y = self.linear(x)
        y.register_hook(lambda gradient: gradient[:, :1])
        return self.head(y)

    with pytest.raises(WorkloadError) as error:
        budget(Workload(Model(f), [X, X]), ["bf16"])
    assert "workload, batch 0: the backward pass through the model failed" in str(
        error.value
    )
    assert error.value.__cause__ is not None


def test_inputs_that_require_gradients():
    """Left over from other code: the graph is not cut short at them, and no gradient is left in them."""
    x = X.clone().requires_grad_()
    found = budget(
        Workload(Model(lambda self, x: self.head(self.linear(x))), [x]), ["bf16"]
    )
    assert unreached(found) == set()
    assert found.table.height == 2
    assert x.grad is None
    assert x.requires_grad


def test_a_reference_in_low_precision():
    """A bf16 model rounded to bf16 has no error; int8 does."""
    model = Model(lambda self, x: self.head(self.linear(x).tanh())).bfloat16()
    found = budget(Workload(model, [X.bfloat16()]), ["bf16", "int8"])
    noises = {(r["site"], r["format"]): r["noise"] for r in found.table.to_dicts()}
    assert {v for (_, fmt), v in noises.items() if fmt == "bf16"} == {0.0}
    assert noises["linear/linear", "int8"] > 0
    (row,) = [e for e in found.about.environment if e.name == "parameters"]
    assert "the reference itself is low precision" in row.note


def test_weights_that_are_computed():
    """Weight normalisation: the weight is the result of a site, and the site is measured."""
    model = Model(lambda self, x: self.head(self.linear(x)))
    nn.utils.parametrizations.weight_norm(model.linear)
    found = budget(Workload(model, [X]), ["bf16", "int8"])
    (site,) = [s for s in found.sites if s.site == "linear/linear"]
    assert site.params == ("linear.bias",)
    (norm,) = [s for s in found.sites if s.operator == "_weight_norm"]
    assert norm.no_path is None
