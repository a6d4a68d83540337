"""Tables that a port makes itself: places whose axes stand the other way round, angles."""

from __future__ import annotations

import linecache

import numpy as np
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


class Turning(nn.Module):
    """Both numbers of a pair are turned by the same angle, which the table has twice."""

    def __init__(self):
        super().__init__()
        self.enter = nn.Linear(WIDTH, 8, bias=False)
        self.leave = nn.Linear(8, 3)

    def forward(self, x):
        angles = torch.arange(LENGTH)[:, None] * 100.0 ** -(torch.arange(4) / 4)
        angles = torch.cat([angles, angles], -1)
        x = self.enter(x)
        turned = torch.cat([-x[..., 4:], x[..., :4]], -1)
        return self.leave(torch.tanh(x * angles.cos() + turned * angles.sin()))


def angles_of_another_library(base):
    angles = np.arange(LENGTH)[:, None] / base ** (np.arange(4) / 4)
    return torch.tensor(np.cos(angles)).float(), torch.tensor(np.sin(angles)).float()


class TurningByPairs(nn.Module):
    def __init__(self, reference, base):
        super().__init__()
        self.base = base
        self.kernel = nn.Parameter(reference.enter.weight.detach().t().clone())
        self.last = nn.Parameter(reference.leave.weight.detach().t().clone())
        self.shift = nn.Parameter(reference.leave.bias.detach().clone())

    def forward(self, x):
        cos, sin = angles_of_another_library(self.base)
        first, second = torch.matmul(x, self.kernel).chunk(2, -1)
        turned = torch.cat([first * cos - second * sin, second * cos + first * sin], -1)
        return torch.matmul(2 * torch.sigmoid(2 * turned) - 1, self.last) + self.shift


@pytest.mark.parametrize("base", [100.0, 10.0])
def test_a_table_of_another_library_with_each_angle_once_is_named(step_of, base):
    torch.manual_seed(0)
    reference = Turning()
    steps = Sides(step_of(reference, X), step_of(TurningByPairs(reference, base), X))
    wrong = [row for row in compare_port(steps, EarlierSteps()) if row.cause == "own"]
    assert bool(wrong) == (base == 10.0)
    for row in wrong[:1]:
        assert "a table of constants differs" in row.evidence
