"""State that one step writes for the next: what the reference alone writes is named."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import nn

import roundoff

KEEP = pytest.mark.parametrize("keep", ["tensors", "stats"])


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.inner = nn.Linear(4, 6)
        self.norm = nn.BatchNorm1d(6)
        self.outer = nn.Linear(6, 2)

    def forward(self, x):
        return self.outer(torch.relu(self.norm(self.inner(x))))


def local(server, x):
    """The gradients of a copy of the server, and the statistics of its batch."""
    net = copy.deepcopy(server)
    loss = net(x).square().mean()
    slopes = torch.autograd.grad(loss, list(net.parameters()))
    return slopes, dict(net.named_buffers())


def rounds(folder, keep, *, averages=True):
    """Two rounds in which copies of a server train, and the server takes what they give."""
    torch.manual_seed(0)
    draw = torch.Generator().manual_seed(2)
    server = Net()
    with torch.no_grad():
        server.norm.running_mean.copy_(torch.randn(6, generator=draw))
    with roundoff.capture(folder, keep=keep) as run:
        for _ in range(2):
            given = [local(server, torch.randn(8, 4, generator=draw)) for _ in range(2)]
            with torch.no_grad():
                for p, *slopes in zip(
                    server.parameters(), *(slopes for slopes, _ in given), strict=True
                ):
                    p -= 0.1 * (slopes[0] + slopes[1])
                if averages:
                    for name in ("norm.running_mean", "norm.running_var"):
                        both = given[0][1][name] + given[1][1][name]
                        server.get_buffer(name).copy_(both / 2)
            run.step()
    return folder


@KEEP
def test_statistics_that_a_server_keeps_as_they_were(keep, tmp_path):
    right = rounds(tmp_path / "right", keep)
    wrong = rounds(tmp_path / "wrong", keep, averages=False)
    found = roundoff.compare(reference=right, candidate=wrong)
    assert not found.agrees
    first = found.culprits()[0]
    assert first.looks_like == "missing update"
    assert "here that memory stays as it was" in first.evidence
    assert "/copy_" in first.evidence


@KEEP
def test_the_same_rounds_agree(keep, tmp_path):
    folders = [rounds(tmp_path / name, keep) for name in ("one", "other")]
    found = roundoff.compare(reference=folders[0], candidate=folders[1])
    assert found.agrees
    assert not found.culprits()


class Meter(nn.Module):
    """An average that nothing in a step reads."""

    def __init__(self):
        super().__init__()
        self.register_buffer("value", torch.zeros(()))
        self.register_buffer("seen", torch.zeros((), dtype=torch.long))

    def forward(self, new):
        self.seen.add_(1)
        self.value.mul_(0.9).add_(0.1 * new)
        return self.value.item()


class Metered(nn.Module):
    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(4, 2)
        self.meter = Meter()


def metered(folder, keep, change):
    """Two steps; after each an average is moved, or counted, or not."""
    torch.manual_seed(0)
    net = Metered()
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    with roundoff.capture(folder, net, keep=keep) as run:
        for _ in range(2):
            optimizer.zero_grad()
            loss = net.layer(torch.ones(3, 4)).square().mean()
            loss.backward()
            optimizer.step()
            if not change:
                net.meter(loss.detach())
            elif change == "not counted":
                net.meter.value.mul_(0.9).add_(0.1 * loss.detach())
            run.step()
    return folder


@KEEP
def test_an_average_in_a_module_that_is_never_called(keep, tmp_path):
    right = metered(tmp_path / "right", keep, "")
    wrong = metered(tmp_path / "wrong", keep, "left out")
    first = roundoff.compare(reference=right, candidate=wrong).culprits()[0]
    assert first.looks_like == "missing update"
    assert first.name == "meter.value"


@KEEP
def test_a_counter_may_be_left_out(keep, tmp_path):
    right = metered(tmp_path / "right", keep, "")
    other = metered(tmp_path / "other", keep, "not counted")
    assert roundoff.compare(reference=right, candidate=other).agrees


def loaded_and_copied(folder, keep, is_copied_first):
    """Two steps of a net that is loaded, with an average that begins as its copy."""
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(4, 6), nn.BatchNorm1d(6))
    saved = torch.randn(6, generator=torch.Generator().manual_seed(3))
    with roundoff.capture(folder, keep=keep) as run:
        if is_copied_first:
            average = copy.deepcopy(net)
        with torch.no_grad():
            net[1].running_mean.copy_(saved)
        if not is_copied_first:
            average = copy.deepcopy(net)
        for _ in range(2):
            x = torch.randn(8, 4, generator=torch.Generator().manual_seed(4))
            net(x).square().mean().backward()
            with torch.no_grad():
                for p in net.parameters():
                    p -= 0.1 * p.grad
                    p.grad = None
                average[1].running_mean.add(net[1].running_mean).sum()
            run.step()
    return folder


@KEEP
def test_what_is_written_after_a_copy_is_not_called_left_out(keep, tmp_path):
    right = loaded_and_copied(tmp_path / "right", keep, False)
    wrong = loaded_and_copied(tmp_path / "wrong", keep, True)
    found = roundoff.compare(reference=right, candidate=wrong)
    assert not found.agrees
    assert not any(c.looks_like == "missing update" for c in found.culprits())


def counted(folder, keep, *, observes=True):
    """Two steps of a head whose evidence is summed up sample by sample."""
    torch.manual_seed(0)
    body = nn.Linear(4, 3)
    evidence = torch.eye(3)
    optimizer = torch.optim.SGD(body.parameters(), lr=0.1)
    draw = torch.Generator().manual_seed(3)
    with roundoff.capture(folder, body, keep=keep) as run:
        for _ in range(2):
            optimizer.zero_grad()
            seen = body(torch.randn(5, 4, generator=draw))
            (seen @ evidence).square().mean().backward()
            optimizer.step()
            if observes:
                for sample in seen.detach():
                    evidence += torch.outer(sample, sample)
            run.step()
    return folder


@KEEP
def test_sums_that_are_not_kept_sample_by_sample(keep, tmp_path):
    right = counted(tmp_path / "right", keep)
    wrong = counted(tmp_path / "wrong", keep, observes=False)
    first = roundoff.compare(reference=right, candidate=wrong).culprits()[0]
    assert first.looks_like == "missing update"
    assert "/add_" in first.evidence


class SlowWeights(torch.optim.Optimizer):
    """Half the way back to weights that move slowly, behind every step of another one."""

    def __init__(self, inner, *, goes_back=True):
        self.inner, self.goes_back = inner, goes_back
        super().__init__(inner.param_groups, inner.defaults)
        for group in self.param_groups:
            for p in group["params"]:
                self.state[p]["slow"] = p.detach().clone()

    @torch.no_grad()
    def step(self, closure=None):
        self.inner.step()
        for p, state in self.state.items() if self.goes_back else ():
            state["slow"].lerp_(p, 0.5)
            p.copy_(state["slow"])


def stepped_once(folder, keep, **options):
    torch.manual_seed(0)
    net = Net()
    inner = torch.optim.SGD(net.parameters(), lr=0.1)
    optimizer = SlowWeights(inner, **options)
    with roundoff.capture(folder, net, keep=keep) as run:
        net(torch.randn(8, 4)).square().mean().backward()
        optimizer.step()
        run.step()
    return folder


@KEEP
def test_what_an_optimizer_around_another_writes_in_the_last_step(keep, tmp_path):
    right = stepped_once(tmp_path / "right", keep)
    same = stepped_once(tmp_path / "same", keep)
    assert roundoff.compare(reference=right, candidate=same).agrees
    wrong = stepped_once(tmp_path / "wrong", keep, goes_back=False)
    first, *_ = roundoff.compare(reference=right, candidate=wrong).culprits()
    assert first.looks_like == "missing update"
    assert "inner.weight" in first.evidence
    assert "written once more in the reference, by /copy_" in first.evidence
