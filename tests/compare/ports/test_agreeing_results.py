"""Calls that differ by name, of which all results agree: a formula that is written otherwise."""

from __future__ import annotations

import itertools
from functools import partial

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import roundoff

X = torch.randn(6, 5, generator=torch.Generator().manual_seed(1))
Y = torch.randint(0, 3, (6,), generator=torch.Generator().manual_seed(2))


class Net(nn.Module):
    """``before`` and ``after`` a matrix a number is multiplied with: their product counts."""

    def __init__(self):
        super().__init__()
        self.first = nn.Linear(5, 8)
        self.mixed = nn.Linear(8, 8, bias=False)
        self.last = nn.Linear(8, 3)
        self.before = 2.0
        self.after = 0.5

    def forward(self, x):
        h = torch.tanh(self.first(x)) * self.before
        return self.last(torch.relu(self.mixed(h) * self.after))


def likeness(net):
    a, b = F.normalize(net(X), dim=1), F.normalize(net(X + 1), dim=1)
    return a @ b.T / 0.2


def by_cross_entropy(net):
    """Each is like its own other view, from both sides."""
    logits = likeness(net)
    same = torch.arange(len(logits))
    contrast = 0.5 * (F.cross_entropy(logits, same) + F.cross_entropy(logits.T, same))
    (contrast + net(X).square().mean() / 3).backward()


def by_trace(net, temperature=1.0):
    logits = likeness(net) * temperature
    others = torch.stack([logits.logsumexp(0), logits.logsumexp(1)])
    contrast = others.mean() - logits.trace() / len(logits)
    (contrast + net(X).square().mean() / 3).backward()


@pytest.fixture
def recorded(tmp_path):
    """``recorded(step)``: the folder of a recorded step of a network."""
    count = itertools.count()

    def record(step):
        torch.manual_seed(0)
        net = Net()
        optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
        folder = tmp_path / str(next(count))
        with roundoff.capture(folder, net, keep="tensors"):
            step(net)
            optimizer.step()
        return folder

    return record


def at_once(net, before=2.0, after=0.5):
    net.before, net.after = before, after
    F.cross_entropy(net(X), Y).backward()


def in_halves(net):
    for half in (slice(0, 3), slice(3, 6)):
        (F.cross_entropy(net(X[half]), Y[half]) / 2).backward()


def halves_together(net, factor=1.0):
    halves = (slice(0, 3), slice(3, 6))
    losses = [F.cross_entropy(net(X[half]), Y[half]) for half in halves]
    (factor * torch.stack(losses).mean()).backward()


@pytest.mark.parametrize(
    ("ours", "theirs"),
    [
        (at_once, partial(at_once, before=0.5, after=2.0)),
        (by_cross_entropy, by_trace),
        (in_halves, halves_together),
    ],
)
def test_another_way_to_the_same_results_agrees(recorded, ours, theirs):
    found = roundoff.compare(reference=recorded(ours), candidate=recorded(theirs))
    assert found.agrees


@pytest.mark.parametrize(
    ("ours", "theirs"),
    [
        (at_once, partial(at_once, before=0.5)),
        (at_once, partial(at_once, before=0.5, after=2.01)),
        (by_cross_entropy, partial(by_trace, temperature=1.02)),
        (in_halves, partial(halves_together, factor=1.01)),
    ],
)
def test_another_way_to_other_results_does_not(recorded, ours, theirs):
    found = roundoff.compare(reference=recorded(ours), candidate=recorded(theirs))
    assert not found.agrees


def test_an_average_that_stays_as_it_was_is_no_agreement(recorded):
    """What it holds is what the parameter held, which the reference has too."""

    def follow(net, share):
        average = [p.detach().clone() for p in net.parameters()]
        at_once(net)
        with torch.no_grad():
            for mean, parameter in zip(average, net.parameters(), strict=True):
                mean.lerp_(parameter + 1, share)

    found = roundoff.compare(
        reference=recorded(lambda net: follow(net, 0.1)),
        candidate=recorded(lambda net: follow(net, 0.0)),
    )
    assert not found.agrees
