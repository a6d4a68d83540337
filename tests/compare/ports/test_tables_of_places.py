"""Tables of places that a port computes itself: which way round their axes stand."""

from __future__ import annotations

import linecache

import pytest
import torch
from torch import nn

from roundoff.compare.judging.explain import EarlierSteps, Sides
from roundoff.compare.ports.port_comparison import compare_port

LENGTH, WIDTH = 5, 6
X = torch.randn(3, LENGTH, WIDTH, generator=torch.Generator().manual_seed(1))


class Reference(nn.Module):
    """Two layers that ask how far the others are away."""

    def __init__(self):
        super().__init__()
        self.distances = nn.ParameterList(
            [nn.Parameter(torch.randn(2 * LENGTH - 1, WIDTH)) for _ in range(2)]
        )
        self.last = nn.Linear(WIDTH, 3)

    def forward(self, x):
        place = torch.arange(LENGTH)
        away = place[:, None] - place[None] + LENGTH - 1
        for table in self.distances:
            scores = torch.einsum("bqw,qkw->bqk", x, table[away])
            x = torch.tanh(x + scores.softmax(-1) @ x)
        return self.last(x)


def looked_up(table, fault):
    query, key = torch.arange(LENGTH)[:, None], torch.arange(LENGTH)
    relative = key - query if fault else query - key
    gathered = torch.index_select(table, 0, (relative + LENGTH - 1).flatten())
    return gathered.reshape(LENGTH, LENGTH, -1)


class Port(nn.Module):
    def __init__(self, reference, fault):
        super().__init__()
        self.fault = fault
        self.near = nn.Parameter(reference.distances[0].detach().clone())
        self.far = nn.Parameter(reference.distances[1].detach().clone())
        self.kernel = nn.Parameter(reference.last.weight.detach().t().clone())
        self.shift = nn.Parameter(reference.last.bias.detach().clone())

    def forward(self, x):
        for table in (self.near, self.far):
            places = looked_up(table, self.fault)
            weights = torch.exp((x[:, :, None] * places).sum(-1))
            weights = weights / weights.sum(-1, keepdim=True)
            x = x + torch.matmul(weights, x)
            x = 2 * torch.sigmoid(2 * x) - 1
        return torch.matmul(x, self.kernel) + self.shift


@pytest.mark.parametrize("fault", [False, True])
def test_distances_from_keys_to_queries_are_named(step_of, fault):
    torch.manual_seed(0)
    reference = Reference()
    steps = Sides(step_of(reference, X), step_of(Port(reference, fault), X))
    wrong = [row for row in compare_port(steps, EarlierSteps()) if row.cause == "own"]
    assert bool(wrong) == fault
    for row in wrong[:1]:
        line = linecache.getline(__file__, int(row.blamed_line.rpartition(":")[2]))
        assert line.strip().startswith("relative = ")
        assert "its last two axes exchanged" in row.evidence
