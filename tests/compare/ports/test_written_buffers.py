"""What a forward pass writes to buffers: a port that keeps mean and variance in one."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import roundoff as ro

MOMENTUM = 0.1


class Reference(nn.Module):
    def __init__(self):
        super().__init__()
        self.first = nn.Linear(6, 8)
        self.norm = nn.BatchNorm1d(8)
        self.second = nn.Linear(8, 16)
        self.wide_norm = nn.BatchNorm1d(16)

    def forward(self, x):
        x = torch.relu(self.norm(self.first(x)))
        return self.wide_norm(self.second(x)).pow(3).mean()


class Norm(nn.Module):
    """``seen``: the running mean over the running variance, (2, channels)."""

    def __init__(self, norm, fault):
        super().__init__()
        self.affine = nn.Parameter(torch.stack([norm.weight, norm.bias]).detach())
        seen = torch.stack([norm.running_mean, norm.running_var])
        self.register_buffer("seen", seen)
        self.fault = fault

    def forward(self, x):
        mean = x.mean(0)
        var = (x - mean).square().mean(0)
        with torch.no_grad():
            unbiased = var if self.fault == "biased" else var * len(x) / (len(x) - 1)
            momentum = 0.2 if self.fault == "momentum" else MOMENTUM
            self.seen.lerp_(torch.stack([mean, unbiased]), momentum)
        gain, shift = self.affine
        return (x - mean) / (var + 1e-5).sqrt() * gain + shift


class Port(nn.Module):
    def __init__(self, reference, fault):
        super().__init__()
        linear = (reference.first, reference.second)
        self.w = nn.ParameterList([layer.weight.detach().t() for layer in linear])
        self.b = nn.ParameterList([layer.bias.detach().clone() for layer in linear])
        norms = (reference.norm, reference.wide_norm)
        self.norms = nn.ModuleList(Norm(norm, fault) for norm in norms)

    def forward(self, x):
        x = self.norms[0](x @ self.w[0] + self.b[0]).clamp(min=0)
        x = self.norms[1](x @ self.w[1] + self.b[1])
        return (x * x * x).sum() / x.numel()


@pytest.mark.parametrize("tensors", [True, False])
@pytest.mark.parametrize("fault", ["", "momentum", "biased"])
def test_mean_and_variance_in_one_buffer(fault, tensors, tmp_path):
    torch.manual_seed(0)
    reference = Reference()
    port = Port(reference, fault)
    x = torch.randn(9, 6, generator=torch.Generator().manual_seed(1))
    folders = {"reference": tmp_path / "ours", "candidate": tmp_path / "theirs"}
    for folder, module in zip(folders.values(), (reference, port), strict=True):
        with ro.capture(folder, module, keep="tensors"):
            module(x).backward()
    paths = {side: str(folder) for side, folder in folders.items()}
    comparison = ro.compare(**paths, tensors=tensors)
    assert comparison.agrees == (fault == "")
    assert {culprit.module for culprit in comparison.culprits(3)} <= {"norms.0"}


class NormWithSums(nn.Module):
    """Running sums over ``1 / MOMENTUM`` steps in the place of means."""

    def __init__(self, norm, fault):
        super().__init__()
        self.gain = nn.Parameter(norm.weight.detach().clone())
        self.shift = nn.Parameter(norm.bias.detach().clone())
        self.register_buffer("mean", norm.running_mean / MOMENTUM)
        self.register_buffer("var", norm.running_var / MOMENTUM)
        self.fault = fault

    def forward(self, x):
        mean = x.mean(0)
        var = (x - mean).square().mean(0)
        kept = 0.8 if self.fault == "momentum" else 1 - MOMENTUM
        with torch.no_grad():
            self.mean.mul_(kept).add_(mean)
            self.var.mul_(kept).add_(var * len(x) / (len(x) - 1))
        return (x - mean) / (var + 1e-5).sqrt() * self.gain + self.shift


def compared(norm_of, fault, tensors, tmp_path):
    """Compare a port with norms of another kind; no running statistic is a constant."""
    torch.manual_seed(0)
    reference = Reference()
    norms = (reference.norm, reference.wide_norm)
    for norm in norms:
        norm.running_mean.normal_()
        norm.running_var.uniform_(0.5, 2)
    port = Port(reference, "")
    port.norms = nn.ModuleList(norm_of(norm, fault) for norm in norms)
    x = torch.randn(9, 6, generator=torch.Generator().manual_seed(1))
    folders = {"reference": tmp_path / "ours", "candidate": tmp_path / "theirs"}
    for folder, module in zip(folders.values(), (reference, port), strict=True):
        with ro.capture(folder, module, keep="tensors"):
            module(x).backward()
    paths = {side: str(folder) for side, folder in folders.items()}
    return ro.compare(**paths, tensors=tensors)


@pytest.mark.parametrize("tensors", [True, False])
@pytest.mark.parametrize("fault", ["", "momentum"])
def test_sums_in_the_place_of_means(fault, tensors, tmp_path):
    comparison = compared(NormWithSums, fault, tensors, tmp_path)
    assert comparison.agrees == (not fault), comparison.answer


class NormThatDrops(NormWithSums):
    """Mean and variance as the reference has them; ``dropped``: what they were is stored."""

    def __init__(self, norm, fault):
        super().__init__(norm, fault)
        self.mean.copy_(norm.running_mean)
        self.var.copy_(norm.running_var)

    def forward(self, x):
        mean = x.mean(0)
        var = (x - mean).square().mean(0)
        unbiased = var * len(x) / (len(x) - 1)
        seen = 0.9 * self.mean + MOMENTUM * mean.detach()
        seen_var = 0.9 * self.var + MOMENTUM * unbiased.detach()
        is_dropped = self.fault == "dropped"
        self.mean.copy_(self.mean if is_dropped else seen)
        self.var.copy_(self.var if is_dropped else seen_var)
        return (x - mean) / (var + 1e-5).sqrt() * self.gain + self.shift


@pytest.mark.parametrize("tensors", [True, False])
@pytest.mark.parametrize("fault", ["", "dropped"])
def test_buffers_that_are_written_and_stay_as_they_were(fault, tensors, tmp_path):
    comparison = compared(NormThatDrops, fault, tensors, tmp_path)
    assert comparison.agrees == (not fault), comparison.answer
    assert [culprit.module for culprit in comparison.culprits(1)] == (
        ["norms.0"] if fault else []
    )
