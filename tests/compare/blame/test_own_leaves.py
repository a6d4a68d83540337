"""Tables that a layer makes anew: of one of them the length is wrong."""

from __future__ import annotations

import math

import torch

from roundoff.compare.judging.explain import EarlierSteps, Sides
from roundoff.compare.ports.port_comparison import compare_port

WIDTH, LENGTH, PADDING, MODES = 3, 12, 4, 4


def drawn(*shape, seed):
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


LEAVES = {
    "first": drawn(WIDTH, WIDTH, seed=1),
    "second": drawn(WIDTH, WIDTH, seed=2),
    "leave": drawn(MODES, 2, seed=3),
}
X = drawn(2, WIDTH, LENGTH, seed=4)


def padded(h):
    return torch.nn.functional.pad(h, (0, PADDING))


def by_library(m, x):
    h = torch.einsum("bcn,cd->bdn", x, m.first)
    low = torch.fft.rfft(h).real[..., :MODES]
    h = torch.einsum("bcn,cd->bdn", h * low.mean(), m.second)
    return torch.tanh(torch.fft.rfft(padded(h)).real[..., :MODES] @ m.leave)


class Waves(torch.nn.Module):
    def __init__(self, length, of_waves):
        super().__init__()
        angles = 2 * math.pi * torch.outer(torch.arange(length), torch.arange(MODES))
        self.register_buffer("cos", torch.cos(angles / of_waves))

    def forward(self, h):
        return (h.flatten(0, 1) @ self.cos).unflatten(0, h.shape[:2])


class ByTables(torch.nn.Module):
    def __init__(self, of_waves):
        super().__init__()
        for name, tensor in LEAVES.items():
            self.register_parameter(name, torch.nn.Parameter(tensor.clone()))
        self.inner = Waves(LENGTH, LENGTH)
        self.outer = Waves(LENGTH + PADDING, of_waves)

    def forward(self, x):
        h = (x.transpose(1, 2) @ self.first).transpose(1, 2)
        low = self.inner(h)
        h = h * (low.sum() / low.numel())
        h = (h.transpose(1, 2) @ self.second).transpose(1, 2)
        return torch.tanh(self.outer(padded(h)) @ self.leave)


def own_rows(program, step_of, candidate):
    sides = Sides(step_of(program(by_library, **LEAVES), X), step_of(candidate, X))
    rows = compare_port(sides, EarlierSteps())
    return [row for row in rows if row.cause == "own"]


def test_the_right_port_agrees(program, step_of):
    assert not own_rows(program, step_of, ByTables(LENGTH + PADDING))


def test_the_table_of_one_layer_is_named(program, step_of):
    [row] = own_rows(program, step_of, ByTables(LENGTH))
    assert row.name == "outer.cos"
    assert "holds nothing that the reference has" in row.evidence
