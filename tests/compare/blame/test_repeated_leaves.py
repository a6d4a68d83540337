"""Parameters that hold the same beside each other, and averages that only begin so."""

from __future__ import annotations

import pytest
import torch

import roundoff
from roundoff.compare.blame.near_leaves import parameters_of
from roundoff.compare.blame.repeated_leaves import _in_groups
from roundoff.compare.judging.explain import RecordedStep
from roundoff.compare.records.recorded_rows import rows_of
from roundoff.compare.values.value_flow import flow_of
from roundoff.record import StepTensors

W = torch.randn(6, 6, generator=torch.Generator().manual_seed(1))
X = torch.randn(7, 6, generator=torch.Generator().manual_seed(2))


def layers(m, x):
    return (torch.tanh(x @ m.first) @ m.second).square().mean()


@pytest.fixture
def groups(program, tmp_path):
    """``groups(second)``: the names of what a step that keeps averages holds alike."""

    def of(second):
        net = program(layers, first=W, second=second)
        for name, value in list(net.named_parameters()):
            net.register_buffer(f"average_{name}", value.detach().clone())
        with roundoff.capture(tmp_path, net, keep="tensors") as run:
            net(X).backward()
            with torch.no_grad():
                net.average_first.lerp_(net.first, 0.1)
                net.average_second.lerp_(net.second, 0.1)
            run.step()
        loaded = roundoff.load(tmp_path)
        flow = flow_of(RecordedStep(rows_of(loaded, 0, 0), StepTensors(loaded, 0, 0)))
        alike = _in_groups(flow, parameters_of(flow))
        return sorted(sorted(leaf.row.name or "" for leaf in group) for group in alike)

    return of


def test_averages_are_no_repeats_of_what_learns(groups):
    names = ["average_first", "average_second", "first", "second"]
    assert groups(W.t().contiguous()) == [[name] for name in names]


def test_a_layer_that_was_loaded_twice_is_one(groups):
    assert groups(W) == [["average_first", "average_second"], ["first", "second"]]
