"""An average of some of a model's values, in a program of another hand."""

from __future__ import annotations

import copy

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import roundoff

X = torch.randn(8, 6, generator=torch.Generator().manual_seed(1)) + 0.5
Y = torch.randint(0, 3, (8,), generator=torch.Generator().manual_seed(2))
RATE, SHARE = 0.1, 0.05


def slowed(model):
    """A copy that is behind: nothing in it is what the model has."""
    copied = copy.deepcopy(model).requires_grad_(False)
    generator = torch.Generator().manual_seed(3)
    with torch.no_grad():
        for value in [*copied.parameters(), *copied.buffers()]:
            if value.is_floating_point():
                value += 0.1 * torch.randn(value.shape, generator=generator)
    return copied


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.first = nn.Linear(6, 5)
        self.norm = nn.BatchNorm1d(5)
        self.last = nn.Linear(5, 3)

    def forward(self, x):
        return self.last(torch.relu(self.norm(self.first(x))))


class Both(nn.Module):
    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.net = Net()
        self.slow = slowed(self.net)

    def step(self, optimizer):
        F.cross_entropy(self.net(X), Y).backward()
        optimizer.step()
        with torch.no_grad():
            now = self.net.state_dict()
            for name, value in self.slow.state_dict().items():
                if value.is_floating_point():
                    value.lerp_(now[name], SHARE)


class Written(nn.Module):
    """All in matrices that the columns of are the reference's rows."""

    def __init__(self, reference, what):
        super().__init__()
        self.what = what
        # the average as it began, which nothing moves
        for name, value in reference.slow.state_dict().items():
            if what == "all" and value.is_floating_point():
                self.register_buffer(f"first_{name}".replace(".", "_"), value.clone())
        for root in ("net", "slow"):
            for name, value in getattr(reference, root).state_dict().items():
                held = value.clone().t().contiguous() if value.dim() > 1 else value
                key = f"{root}_{name}".replace(".", "_")
                if name.endswith(("weight", "bias")):
                    learns = root == "net"
                    held = nn.Parameter(held.clone(), requires_grad=learns)
                    self.register_parameter(key, held)
                elif value.is_floating_point():
                    self.register_buffer(key, held.clone())

    def forward(self, x):
        x = torch.addmm(self.net_first_bias, x, self.net_first_weight)
        mean, spread = x.mean(0), x.var(0, correction=0)
        with torch.no_grad():
            self.net_norm_running_mean.mul_(0.9).add_(0.1 * mean)
            self.net_norm_running_var.mul_(0.9).add_(0.1 * spread * 8 / 7)
        x = (x - mean) / (spread + 1e-5).sqrt()
        x = torch.clamp(x * self.net_norm_weight + self.net_norm_bias, min=0)
        return x @ self.net_last_weight + self.net_last_bias

    def step(self, optimizer):
        scores = self(X).log_softmax(1)
        (-scores.gather(1, Y[:, None]).mean()).backward()
        optimizer.step()
        named = [*self.named_parameters()]
        named += [] if self.what == "parameters" else self.named_buffers()
        with torch.no_grad():
            values = dict([*self.named_parameters(), *self.named_buffers()])
            for name, value in named:
                if name.startswith("slow_"):
                    now = values[name.replace("slow_", "net_", 1)]
                    value.mul_(1 - SHARE).add_(now, alpha=SHARE)


def recorded(path, model):
    learnt = [p for p in model.parameters() if p.requires_grad]
    optimizer = torch.optim.SGD(learnt, RATE)
    with roundoff.capture(path, model, keep="tensors") as run:
        model.step(optimizer)
        run.step()
    return path


@pytest.mark.parametrize("what", ["all", "parameters"])
def test_what_the_average_leaves_out_is_named(tmp_path, what):
    reference = Both()
    candidate = Written(reference, what)
    ours = recorded(tmp_path / "ours", reference)
    theirs = recorded(tmp_path / "theirs", candidate)
    comparison = roundoff.compare(reference=ours, candidate=theirs)
    assert comparison.agrees == (what == "all")
    for first in comparison.culprits(1):
        assert first.name == "slow_norm_running_mean"
        assert first.looks_like == "missing update"
        assert "slow_norm_running_var" in first.evidence
