"""A parameter that is read where another one should be: its reader is named, not its loader."""

from __future__ import annotations

import itertools
from pathlib import Path

import torch
import torch.nn.functional as F

import roundoff
from roundoff.compare.judging.explain import EarlierSteps, RecordedStep, Sides
from roundoff.compare.ports.port_comparison import compare_port
from roundoff.compare.records.recorded_rows import rows_of
from roundoff.record import StepTensors


def drawn(*shape, seed):
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


LEAVES = {
    "first": drawn(6, seed=1).abs() + 0.5,
    "second": drawn(6, seed=2).abs() + 0.5,
    "mix": drawn(6, 6, seed=3) / 2,
    "wide": drawn(6, 6, seed=4) / 2,
}
X = drawn(7, 6, seed=5)


def reference(m, x):
    for _ in range(2):
        x = F.layer_norm(x + F.linear(x, m.mix), (6,), m.first)
        x = F.layer_norm(x + torch.tanh(F.linear(x, m.wide)), (6,), m.second)
    return x


def norm(x, gain):
    x = x - x.mean(-1, keepdim=True)
    return x * torch.rsqrt(x.square().mean(-1, keepdim=True) + 1e-5) * gain


def port(m, x, is_wrong):
    for _ in range(2):
        x = norm(x + x @ m.mix.t(), m.first)
        y = x + (x @ m.wide.t()).tanh()
        if is_wrong:
            x = norm(y, m.first)
        else:
            x = norm(y, m.second)
    return x


def right(m, x):
    return port(m, x, False)


def wrong(m, x):
    return port(m, x, True)


def test_a_norm_that_is_called_twice_is_named_where_it_is_called(program, tmp_path):
    numbers = itertools.count()

    def recorded(function):
        net = program(function, **LEAVES)
        folder = tmp_path / str(next(numbers))
        with roundoff.capture(folder, net, keep="tensors"):
            net(X).square().mean().backward()
        run = roundoff.load(folder)
        return RecordedStep(rows_of(run, 0, 0), StepTensors(run, 0, 0))

    def rows(function):
        sides = Sides(recorded(reference), recorded(function))
        return [r for r in compare_port(sides, EarlierSteps()) if r.cause == "own"]

    assert not rows(right)
    [row] = rows(wrong)
    lines = Path(__file__).read_text().splitlines()
    number = int(row.blamed_line.rpartition(":")[2])
    assert "x = norm(y, m.first)" in lines[number - 1], row.evidence
    assert "it reads first, where the reference reads second" in row.evidence
