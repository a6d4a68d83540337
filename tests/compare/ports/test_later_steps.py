"""Several steps of two programs by different hands: gradients that are summed up over two
calls, and parameters that rounding alone moves.

The bias before the normalization gets no gradient in exact arithmetic: an optimizer that
divides by the size of gradients moves it anywhere, and the running mean follows it.
"""

from __future__ import annotations

import pytest
import torch
from torch import nn

import roundoff as ro

RATE = 0.02
LARGEST = 0.5
CALLS = 2
STEPS = 4


class Reference(nn.Module):
    def __init__(self):
        super().__init__()
        self.first = nn.Linear(6, 8)
        self.norm = nn.BatchNorm1d(8)
        self.second = nn.Linear(8, 3)

    def forward(self, x, y):
        scores = self.second(torch.relu(self.norm(self.first(x))))
        return nn.functional.cross_entropy(scores, y)


class Port(nn.Module):
    def __init__(self, reference):
        super().__init__()
        self.w = nn.ParameterList(
            [
                layer.weight.detach().t().clone()
                for layer in (reference.first, reference.second)
            ]
        )
        self.b = nn.ParameterList(
            [
                layer.bias.detach().clone()
                for layer in (reference.first, reference.second)
            ]
        )
        self.gain = nn.Parameter(reference.norm.weight.detach().clone())
        self.shift = nn.Parameter(reference.norm.bias.detach().clone())
        self.register_buffer("mean", reference.norm.running_mean.clone())
        self.register_buffer("var", reference.norm.running_var.clone())

    def forward(self, x, y):
        h = torch.einsum("bi,io->bo", x, self.w[0]) + self.b[0]
        mean = h.mean(0)
        var = (h - mean).square().mean(0)
        with torch.no_grad():
            self.mean.mul_(0.9).add_(0.1 * mean)
            self.var.mul_(0.9).add_(0.1 * var * len(h) / (len(h) - 1))
        h = (h - mean) * torch.rsqrt(var + 1e-5) * self.gain + self.shift
        scores = torch.einsum("bi,io->bo", h.clamp(min=0), self.w[1]) + self.b[1]
        shares = scores.softmax(-1)
        return -shares[torch.arange(len(y)), y].log().mean()


class Accumulating(torch.optim.Adam):
    """Updates after every second call; the mean of the gradients is put in their place."""

    calls = 0

    def step(self):  # type: ignore[override]
        parameters = self.param_groups[0]["params"]
        if self.calls % CALLS == 0:
            self.total = [torch.zeros_like(p) for p in parameters]
        for total, p in zip(self.total, parameters, strict=True):
            total.add_(p.grad, alpha=1 / CALLS)
        self.calls += 1
        if self.calls % CALLS == 0:
            for total, p in zip(self.total, parameters, strict=True):
                p.grad = total
            nn.utils.clip_grad_norm_(parameters, LARGEST)
            super().step()


class Flat(torch.optim.Optimizer):
    """The same with all gradients and moments in one tensor each."""

    def __init__(self, parameters, fault):
        super().__init__(list(parameters)[::-1], {})
        self.fault = fault
        self.parameters = self.param_groups[0]["params"]
        size = sum(p.numel() for p in self.parameters)
        self.sum, self.m, self.v = (torch.zeros(size) for _ in range(3))
        self.calls = self.updates = 0

    def views(self, flat):
        parts = flat.split([p.numel() for p in self.parameters])
        return [part.view_as(p) for part, p in zip(parts, self.parameters, strict=True)]

    @torch.no_grad()
    def step(self):  # type: ignore[override]
        for total, p in zip(self.views(self.sum), self.parameters, strict=True):
            total.add_(p.grad)
        self.calls += 1
        if self.calls % CALLS:
            return
        if self.fault != "sum":
            self.sum.div_(CALLS)
        norm = self.sum.norm()
        self.sum.mul_(torch.clamp(LARGEST / (norm + 1e-6), max=1.0))
        self.updates += 1
        self.m.lerp_(self.sum, 0.1)
        self.v.mul_(0.999).addcmul_(self.sum, self.sum, value=0.001)
        m = self.m / (1 - 0.9**self.updates)
        v = self.v / (1 - 0.999**self.updates)
        update = m / (v.sqrt() + 1e-8)
        if self.fault == "slow":
            update = update / 2
        for part, p in zip(self.views(update), self.parameters, strict=True):
            p.sub_(part, alpha=RATE)
        if self.fault != "kept":
            self.sum.zero_()


def recorded(folder, module, optimizer):
    generator = torch.Generator().manual_seed(3)
    with ro.capture(folder, module, keep="tensors") as run:
        for _ in range(STEPS):
            x = torch.randn(7, 6, generator=generator)
            y = torch.randint(0, 3, (7,), generator=generator)
            module.zero_grad()
            module(x, y).backward()
            optimizer.step()
            run.step()
    return str(folder)


@pytest.mark.parametrize("fault", ["", "slow", "kept"])
def test_gradients_that_are_summed_up(fault, tmp_path):
    torch.manual_seed(0)
    reference = Reference()
    port = Port(reference)
    optimizer = Accumulating(reference.parameters(), RATE)
    comparison = ro.compare(
        reference=recorded(tmp_path / "ours", reference, optimizer),
        candidate=recorded(tmp_path / "theirs", port, Flat(port.parameters(), fault)),
    )
    assert comparison.agrees == (not fault)
    assert {culprit.phase for culprit in comparison.culprits(3)} <= {"optimizer"}
