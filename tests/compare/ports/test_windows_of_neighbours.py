"""Windows of neighbours by unfolding and by tables of places, where the reference indexes."""

from __future__ import annotations

import linecache

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from roundoff.compare.judging.explain import EarlierSteps, Sides
from roundoff.compare.ports.port_comparison import compare_port

LENGTH, WIDTH, WINDOW = 9, 6, 3
X = torch.randn(4, LENGTH, WIDTH, generator=torch.Generator().manual_seed(1))


def neighbours():
    """The places of each window, and how far they are away, counted from 0."""
    place = torch.arange(LENGTH)
    start = (place - WINDOW // 2).clamp(0, LENGTH - WINDOW)
    inside = start[:, None] + torch.arange(WINDOW)
    return inside, inside - place[:, None] + WINDOW - 1


class Reference(nn.Module):
    """Each place attends to a window that stays inside; a bias for each distance."""

    def __init__(self):
        super().__init__()
        self.enter = nn.Linear(WIDTH, 3 * WIDTH)
        self.norm = nn.LayerNorm(WIDTH)
        self.distances = nn.Parameter(torch.randn(2 * WINDOW - 1))
        self.last = nn.Linear(WIDTH, 3)

    def forward(self, x):
        q, k, v = self.enter(self.norm(x)).chunk(3, -1)
        places, away = neighbours()
        scores = (q[:, :, None] * k[:, places]).sum(-1) + self.distances[away]
        mixed = (scores.softmax(-1)[..., None] * v[:, places]).sum(2)
        return self.last(x + mixed)


class Port(nn.Module):
    """The same with features before places."""

    def __init__(self, reference, fault=""):
        super().__init__()
        self.fault = fault
        held = {name: p.detach().clone() for name, p in reference.named_parameters()}
        self.kernel = nn.Parameter(held["enter.weight"][..., None])
        self.shift = nn.Parameter(held["enter.bias"])
        self.gain = nn.Parameter(held["norm.weight"][:, None])
        self.offset = nn.Parameter(held["norm.bias"][:, None])
        self.table = nn.Parameter(held["distances"])
        self.out = nn.Parameter(held["last.weight"].t().clone())
        self.out_shift = nn.Parameter(held["last.bias"])

    def normed(self, x):
        axes = (1, 2) if self.fault == "all places" else 1
        centred = x - x.mean(axes, keepdim=True)
        power = centred.pow(2).mean(axes, keepdim=True)
        return centred / torch.sqrt(power + 1e-5) * self.gain + self.offset


class Unfolding(Port):
    def windows(self, x):
        mode = "constant" if self.fault == "zeros at the border" else "replicate"
        cut = x.unfold(2, WINDOW, 1).permute(0, 1, 3, 2).flatten(1, 2)
        cut = F.pad(cut, (WINDOW // 2, WINDOW // 2), mode=mode)
        return cut.unflatten(1, (WIDTH, WINDOW))

    def bias(self):
        cut = self.table.unfold(0, WINDOW, 1)
        if self.fault != "first offsets first":
            cut = cut.flip(0)
        counts = torch.ones(WINDOW, dtype=torch.long)
        counts[WINDOW // 2] = LENGTH - WINDOW + 1
        return cut.repeat_interleave(counts, 0).t()

    def forward(self, x):
        x = x.transpose(1, 2)
        mixed = F.conv1d(self.normed(x), self.kernel, self.shift)
        q, k, v = mixed.split(WIDTH, 1)
        scores = (q[:, :, None] * self.windows(k)).sum(1) + self.bias()
        weights = F.softmax(scores, dim=1)
        x = x + (weights[:, None] * self.windows(v)).sum(2)
        return x.transpose(1, 2) @ self.out + self.out_shift


class Gathering(Port):
    def __init__(self, reference, fault=""):
        super().__init__(reference, fault)
        places, away = neighbours()
        if fault == "other places":
            places[2:5] = places[1:4].clone()
        self.register_buffer("places", places.flatten())
        self.register_buffer("away", away)

    def forward(self, x):
        x = x.transpose(1, 2)
        mixed = F.conv1d(self.normed(x), self.kernel, self.shift)
        q, k, v = mixed.split(WIDTH, 1)
        near = k.index_select(2, self.places).unflatten(2, (LENGTH, WINDOW))
        scores = torch.einsum("bct,bctw->btw", q, near) + self.table[self.away]
        near = v.index_select(2, self.places).unflatten(2, (LENGTH, WINDOW))
        weights = torch.exp(scores - scores.amax(-1, keepdim=True))
        weights = weights / weights.sum(-1, keepdim=True)
        x = x + torch.einsum("btw,bctw->bct", weights, near)
        return x.transpose(1, 2) @ self.out + self.out_shift


def found(step_of, port, fault):
    torch.manual_seed(0)
    reference = Reference()
    steps = Sides(step_of(reference, X), step_of(port(reference, fault), X))
    return [row for row in compare_port(steps, EarlierSteps()) if row.cause == "own"]


def named_line(row):
    return linecache.getline(__file__, int(row.blamed_line.rpartition(":")[2])).strip()


@pytest.mark.parametrize("port", [Unfolding, Gathering])
def test_both_ways_to_read_windows_agree(step_of, port):
    assert not found(step_of, port, "")


@pytest.mark.parametrize(
    ("fault", "line", "words"),
    [
        ("zeros at the border", "cut = F.pad(", "padded with the values of the border"),
        ("first offsets first", "return cut.repeat_interleave(", "the other way round"),
        ("all places", "centred = x - x.mean(", "along axis 1, not axes 1 and 2"),
    ],
)
def test_the_line_is_named(step_of, fault, line, words):
    first = found(step_of, Unfolding, fault)[0]
    assert named_line(first).startswith(line)
    assert words in first.evidence


def test_the_table_is_named_by_which_other_places_are_read(step_of):
    first = found(step_of, Gathering, "other places")[0]
    assert first.name == "places"
    assert "by places other places are read than those of index" in first.evidence
