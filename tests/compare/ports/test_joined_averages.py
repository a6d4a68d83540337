"""Layers that a port joins, in a program that averages what it learns.

The average begins with what the layers hold: nothing of them stands in one place alone.
"""

from __future__ import annotations

import copy

import torch
import torch.nn.functional as F
from torch import nn

import roundoff
from roundoff.compare.judging.explain import RecordedStep
from roundoff.compare.ports.counterparts import counterparts
from roundoff.compare.records.recorded_rows import rows_of
from roundoff.compare.values.value_flow import flow_of
from roundoff.compare.values.value_regions import Sides, limit_of
from roundoff.record import StepTensors

X = torch.randn(8, 6, generator=torch.Generator().manual_seed(1))
Y = torch.randint(0, 3, (8,), generator=torch.Generator().manual_seed(2))
RATE, SHARE = 0.1, 0.05


class Reference(nn.Module):
    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.names = ("query", "key", "value")
        for name in self.names:
            setattr(self, name, nn.Linear(6, 6))
        self.last = nn.Linear(6, 3)

    def forward(self, x):
        q, k, v = (getattr(self, name)(x) for name in self.names)
        return self.last((q @ k.t()).softmax(1) @ v)


class Joined(nn.Module):
    def __init__(self, reference):
        super().__init__()
        layers = [getattr(reference, name) for name in reference.names]
        self.w = nn.Parameter(torch.cat([layer.weight.detach() for layer in layers]))
        self.b = nn.Parameter(torch.cat([layer.bias.detach() for layer in layers]))
        self.out = copy.deepcopy(reference.last)

    def forward(self, x):
        q, k, v = (x @ self.w.t() + self.b).chunk(3, 1)
        return self.out(torch.softmax(q @ k.t(), 1) @ v)


def values_of(folder, net):
    """The values of one step in which all learn, and an average follows."""
    average = copy.deepcopy(net).requires_grad_(False)
    both = nn.ModuleDict({"net": net, "average": average})
    optimizer = torch.optim.SGD(net.parameters(), RATE)
    with roundoff.capture(folder, both, keep="tensors") as run:
        F.cross_entropy(net(X), Y).backward()
        optimizer.step()
        with torch.no_grad():
            for slow, now in zip(average.parameters(), net.parameters(), strict=True):
                slow.lerp_(now, SHARE)
        run.step()
    recorded = roundoff.load(folder)
    kept = StepTensors(recorded, 0, 0)
    return flow_of(RecordedStep(rows_of(recorded, 0, 0), kept))


def test_joined_layers_are_found_where_an_average_holds_the_same(tmp_path):
    net = Reference()
    ours = values_of(tmp_path / "ours", net)
    theirs = values_of(tmp_path / "theirs", Joined(Reference()))
    sides = Sides(ours, theirs, limit_of(ours, theirs))
    sides.match()
    found = {each.theirs: each.ours for each in counterparts(sides)}
    for whose in ("net", "average"):
        weights = tuple(f"{whose}.{name}.weight" for name in ("key", "query", "value"))
        assert found[(f"{whose}.w",)] == weights


IDS = torch.tensor([[1, 4, 2, 0], [5, 3, 0, 0], [2, 6, 1, 3]])


class Words(nn.Module):
    """A table with a row of zeros for the padding."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(1)
        self.words = nn.Embedding(7, 4, padding_idx=0)
        self.last = nn.Linear(4, 3)

    def forward(self, ids):
        return self.last(torch.tanh(self.words(ids)).sum(1))


class WithoutPadding(nn.Module):
    def __init__(self, reference):
        super().__init__()
        self.table = nn.Parameter(reference.words.weight.detach()[1:].clone())
        self.out = copy.deepcopy(reference.last)

    def forward(self, ids):
        rows = torch.tanh(self.table[(ids - 1).clamp(min=0)])
        return self.out((rows * (ids > 0)[..., None]).sum(1))


def clipped_step(net, *, in_place):
    gradients = [p.grad for p in net.parameters()]
    norm = torch.stack([g.norm() for g in gradients]).norm()
    scale = 0.1 / norm.clamp(min=0.1)
    for p in net.parameters():
        gradient = p.grad.mul_(scale) if in_place else p.grad * scale
        p.sub_(RATE * gradient.square())


def clipped(folder, net, *, in_place):
    average = copy.deepcopy(net).requires_grad_(False)
    both = nn.ModuleDict({"net": net, "average": average})
    with roundoff.capture(folder, both, keep="tensors") as run:
        F.cross_entropy(net(IDS), Y[:3]).backward()
        with torch.no_grad():
            clipped_step(net, in_place=in_place)
            for slow, now in zip(average.parameters(), net.parameters(), strict=True):
                slow.lerp_(now, SHARE)
        run.step()
    return folder


def test_a_table_without_the_row_of_the_padding_is_clipped_alike(tmp_path):
    ours = clipped(tmp_path / "ours", Words(), in_place=True)
    theirs = clipped(tmp_path / "theirs", WithoutPadding(Words()), in_place=False)
    assert roundoff.compare(reference=ours, candidate=theirs).agrees
