"""A loader that gives one tensor to two layers ties them."""

from __future__ import annotations

import itertools

import pytest
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
    "enter": drawn(6, 6, seed=2) / 2,
    "second": drawn(6, seed=3).abs() + 0.5,
    "leave": drawn(4, 6, seed=4) / 2,
}
X = drawn(7, 6, seed=5)


def reference(m, x):
    x = torch.tanh(F.linear(F.layer_norm(x, (6,), m.first), m.enter))
    return F.linear(F.layer_norm(x, (6,), m.second), m.leave).square().mean()


def norm(x, gain):
    x = x - x.mean(-1, keepdim=True)
    return x * torch.rsqrt(x.square().mean(-1, keepdim=True) + 1e-5) * gain


def port(m, x):
    x = torch.tanh(norm(x, m.gain_one) @ m.w_in)
    return (norm(x, m.gain_two) @ m.w_out).square().mean()


OTHERS = {
    "gain_one": LEAVES["first"],
    "w_in": LEAVES["enter"].t().contiguous(),
    "gain_two": LEAVES["second"],
    "w_out": LEAVES["leave"].t().contiguous(),
}


@pytest.fixture
def recorded(program, tmp_path):
    """``recorded(function, leaves)``: a step of it; ``tied``: one leaf in another's memory."""
    numbers = itertools.count()

    def record(function, leaves, tied=()):
        net = program(function, **leaves)
        for name, other in [tied] if tied else []:
            setattr(net, name, torch.nn.Parameter(getattr(net, other).data))
        optimizer = torch.optim.SGD(net.parameters(), 0.1)
        folder = tmp_path / str(next(numbers))
        with roundoff.capture(folder, net, keep="tensors"):
            net(X).backward()
            optimizer.step()
        run = roundoff.load(folder)
        return RecordedStep(rows_of(run, 0, 0), StepTensors(run, 0, 0))

    return record


def compared(reference, candidate):
    rows = compare_port(Sides(reference, candidate), EarlierSteps())
    return [row for row in rows if row.cause == "own"]


def test_a_parameter_in_the_memory_of_another_one_is_named(recorded):
    [row] = compared(
        recorded(reference, LEAVES),
        recorded(port, OTHERS, tied=("gain_two", "gain_one")),
    )
    assert row.name == "gain_two"
    assert "gain_two shares its memory with gain_one" in row.evidence
    assert "the reference second holds other values" in row.evidence


def test_the_one_that_holds_the_other_s_values_is_named(recorded):
    """Whichever of the two a loader has made first."""
    first = {**OTHERS, "gain_one": LEAVES["second"]}
    [row] = compared(
        recorded(reference, LEAVES),
        recorded(port, first, tied=("gain_two", "gain_one")),
    )
    assert row.name == "gain_one"
    assert "the reference first holds other values" in row.evidence


def test_parameters_that_are_tied_in_both_are_right(recorded):
    assert not compared(
        recorded(reference, LEAVES, tied=("second", "first")),
        recorded(port, OTHERS, tied=("gain_two", "gain_one")),
    )
