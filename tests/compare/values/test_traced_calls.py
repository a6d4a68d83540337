"""A recorded forward pass run again: with other calls, other leaves, through views."""

from __future__ import annotations

import pytest
import torch

from roundoff.compare.records.recorded_calls import CannotRun
from roundoff.compare.values.traced_calls import Edit, EditStep, TracedProgram
from roundoff.compare.values.value_flow import flow_of

X = torch.arange(12.0).reshape(3, 4) / 7


def into_views(m, x):
    whole = torch.zeros(3, 5)
    whole[:, 0] = m.first
    whole[:, 1:] = x * 2
    return whole.exp().sum(1)


LEAVES = {"first": torch.tensor([1.0, -2.0, 0.5])}


@pytest.fixture
def traced(program, step_of):
    return TracedProgram(flow_of(step_of(program(into_views, **LEAVES), X)))


def call_of(traced, operator):
    [call] = [c for c in traced.calls.values() if c.first.base_operator == operator]
    return call


def last_of(traced, *, edits=None, leaves=None):
    *_, (_, tensor) = traced.again(edits or {}, leaves)
    return tensor


def test_nothing_runs_without_a_change(traced):
    assert list(traced.again({})) == []


def test_another_constant_goes_through_views(traced):
    call = call_of(traced, "mul")
    arguments = [[call.parsed[0][0], 3.0], {}]
    edit = Edit((EditStep(call.first.overload, arguments),), "times 3")
    result = last_of(traced, edits={call.first.call: edit})
    wanted = LEAVES["first"].exp() + (3 * X).exp().sum(1)
    # sums of five terms in fp32: four roundings of 2**-24 each way
    torch.testing.assert_close(result, wanted, rtol=1e-6, atol=0.0)


def test_another_leaf(traced):
    [leaf] = [r.record for r in traced.flow.step.rows.values() if r.name == "first"]
    other = torch.tensor([0.0, 1.0, 2.0])
    result = last_of(traced, leaves={leaf: other})
    wanted = other.exp() + (2 * X).exp().sum(1)
    torch.testing.assert_close(result, wanted, rtol=1e-6, atol=0.0)


def test_a_number_that_python_reads_stops_no_trial(program, step_of):
    def one_hot(m, x):
        bins = (x * 4).long()
        assert bins.min().item() >= 0
        return torch.nn.functional.one_hot(bins, 8).float() @ m.table

    table = torch.linspace(0.0, 1.0, 8)[:, None]
    traced = TracedProgram(flow_of(step_of(program(one_hot, table=table), X)))
    call = call_of(traced, "mul")
    arguments = [[call.parsed[0][0], 3.0], {}]
    edit = Edit((EditStep(call.first.overload, arguments),), "times 3")
    result = last_of(traced, edits={call.first.call: edit})
    # a row of the identity picks one number: nothing is rounded
    torch.testing.assert_close(result, table[(X * 3).long()], rtol=0.0, atol=0.0)


def test_a_kernel_that_trusts_its_sizes_gets_no_others(program, step_of):
    def norm(m, x):
        return torch.native_layer_norm(x, (4,), m.weight, None, 1e-5)[0]

    net = program(norm, weight=torch.ones(4))
    traced = TracedProgram(flow_of(step_of(net, X)))
    [leaf] = [r.record for r in traced.flow.step.rows.values() if r.name == "weight"]
    with pytest.raises(CannotRun):
        list(traced.again({}, {leaf: torch.ones(2)}))


def test_what_cannot_run_says_so(traced):
    call = call_of(traced, "mul")
    edit = Edit((EditStep("aten.mm.default", call.parsed),), "as a product")
    with pytest.raises(CannotRun):
        list(traced.again({call.first.call: edit}))


@pytest.mark.parametrize("starts", [0, 1])
def test_memory_that_nothing_was_written_to_holds_no_number(program, step_of, starts):
    def filled(m, x):
        whole = torch.empty_like(x)
        whole[starts:] = x[starts:] * 2
        return whole[1:].exp() if starts else whole.exp()

    traced = TracedProgram(flow_of(step_of(program(filled), X)))
    call = call_of(traced, "mul")
    edit = Edit((EditStep(call.first.overload, [[call.parsed[0][0], 3.0], {}]),), "")
    result = last_of(traced, edits={call.first.call: edit})
    # one product and one exponential in fp32
    torch.testing.assert_close(result, (3 * X[starts:]).exp(), rtol=1e-6, atol=0.0)


def test_a_call_that_torch_no_longer_knows_cannot_run(program, step_of):
    library = torch.library.Library("roundoff_gone", "DEF")
    library.define("twice(Tensor x) -> Tensor")
    library.impl("twice", lambda x: x * 2, "CPU")
    net = program(
        lambda m, x: torch.ops.roundoff_gone.twice(x * m.scale), scale=torch.ones(4)
    )
    traced = TracedProgram(flow_of(step_of(net, X)))
    [leaf] = [r.record for r in traced.flow.step.rows.values() if r.name == "scale"]
    library._destroy()
    with pytest.raises(CannotRun):
        list(traced.again({}, {leaf: torch.full((4,), 2.0)}))
