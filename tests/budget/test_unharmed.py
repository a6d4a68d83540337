"""A measurement leaves model, process and batches as they were, also after an exception at any place."""

from __future__ import annotations

import random

import numpy as np
import pytest
import torch
from torch import nn

from roundoff import Workload, budget
from roundoff.errors import NonFiniteError, WorkloadError


class Net(nn.Module):
    """Mixed training flags, frozen parameters, gradients, hooks, running statistics, dropout."""

    def __init__(self):
        super().__init__()
        self.layers = nn.Sequential(
            nn.Linear(4, 6),
            nn.BatchNorm1d(6),
            nn.ReLU(inplace=True),
            nn.Dropout(0.5),
            nn.Linear(6, 2),
        )
        self.fail = None
        self.layers[0].weight.requires_grad_(False)
        self.layers[4].weight.grad = torch.full((2, 6), 3.0)
        self.layers[4].weight.register_hook(lambda g: g)
        self.layers.register_forward_hook(lambda *_: None)
        self.train()
        self.layers[1].eval()

    def forward(self, x):
        if self.fail == "early":
            raise self.error("early")
        y = self.layers(x)
        if self.fail == "late":
            raise self.error("late")
        if self.fail == "nan":
            return y * float("nan")
        if self.fail == "backward":
            y.register_hook(self.explode)
        return y

    def explode(self, gradient):
        raise self.error("backward")


def state(model):
    found = {"grad mode": torch.is_grad_enabled(), "dtype": torch.get_default_dtype()}
    found["rng"] = (
        torch.get_rng_state().tolist(),
        random.getstate(),
        str(np.random.get_state()),
    )
    for name, module in model.named_modules():
        found["training", name] = module.training
        for kind in (
            "_forward_hooks",
            "_forward_pre_hooks",
            "_forward_hooks_always_called",
            "_backward_hooks",
        ):
            found[kind, name] = dict(getattr(module, kind))
    for name, p in model.named_parameters():
        found["p", name] = (
            p.tolist(),
            p.requires_grad,
            None if p.grad is None else p.grad.tolist(),
            id(p),
        )
        found["hooks", name] = dict(p._backward_hooks or {})
    for name, b in model.named_buffers():
        found["b", name] = (b.tolist(), id(b))
    return found


@pytest.fixture
def net():
    torch.manual_seed(0)
    return Net()


def test_after_a_measurement(net):
    workload = Workload(net, [torch.randn(5, 4), torch.randn(2, 4)])
    batches = [b.clone() for b in workload.batches]
    before = state(net)
    budget(workload, ["bf16", "int8"])
    assert state(net) == before
    assert all(
        torch.equal(a, b) for a, b in zip(workload.batches, batches, strict=True)
    )


@pytest.mark.parametrize("error", [ValueError, RuntimeError, KeyboardInterrupt])
@pytest.mark.parametrize("place", ["early", "late", "backward"])
def test_after_an_exception(net, place, error):
    net.fail, net.error = place, error
    workload = Workload(net, [torch.randn(5, 4)])
    before = state(net)
    with pytest.raises((error, WorkloadError), match=place):
        budget(workload, ["bf16"])
    assert state(net) == before


def test_after_a_reference_that_is_not_finite(net):
    net.fail = "nan"
    workload = Workload(net, [torch.randn(5, 4)])
    before = state(net)
    with pytest.raises(NonFiniteError, match="first NaN is made by /mul"):
        budget(workload, ["bf16"])
    assert state(net) == before


def test_evaluation_mode_is_used_whatever_the_model_came_in(net):
    """In training mode, dropout would make two equal seeds differ and batch statistics would mix the samples."""
    x = torch.randn(5, 4)
    trained = budget(Workload(net, [x]), ["bf16"])
    evaluated = budget(Workload(net.eval(), [x]), ["bf16"])
    assert trained.terms.equals(evaluated.terms)
    assert not trained.terms["pooled"].any()


@pytest.mark.parametrize("grad", [True, False])
def test_the_grad_mode_of_the_caller_does_not_matter(net, grad):
    x = torch.randn(5, 4)
    with torch.set_grad_enabled(grad):
        found = budget(Workload(net, [x]), ["bf16"])
        assert torch.is_grad_enabled() is grad
    assert found.terms.equals(budget(Workload(net, [x]), ["bf16"]).terms)


def test_a_model_that_writes_into_its_batch_does_not_change_the_workload(net):
    """Or else the second evaluation, of the plan, would see other batches than the first."""

    class Doubles(nn.Module):
        def forward(self, x):
            x *= 2.0
            return x.sin()

    x = torch.randn(3, 4)
    before = x.clone()
    workload = Workload(Doubles(), [x])
    first = budget(workload, ["bf16"])
    assert torch.equal(workload.batches[0], before)
    assert first.terms.equals(budget(workload, ["bf16"]).terms)
