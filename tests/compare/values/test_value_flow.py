"""What each value is made of, in the order of execution, and what only hands values on."""

from __future__ import annotations

import torch
import torch.nn.functional as F

from roundoff.compare.values.value_flow import constants_of, flow_of
from roundoff.compare.values.value_regions import upstream


def drawn(*shape, seed=0):
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def by_operator(flow):
    return {value.operator: value for value in flow.in_order()}


def test_values_and_what_they_are_made_of(program, step_of):
    net = program(lambda m, x: F.relu(F.linear(x, m.weight)), weight=drawn(3, 4))
    x = drawn(2, 4)
    flow = flow_of(step_of(net, x))
    values = by_operator(flow)
    assert values["relu"].inputs == (values["mm"].key,)
    assert set(values["mm"].inputs) == {values["input"].key, values["t"].key}
    assert flow.readers[values["mm"].key] == [values["relu"].key]
    assert not values["parameter"].is_call
    assert values["t"].is_call
    assert not values["t"].computes
    assert values["mm"].computes
    assert torch.equal(flow.tensor(values["input"].key), x)


def test_behind_views_is_the_value(program, step_of):
    net = program(lambda m, x: x.exp().t().reshape(-1) @ m.weight, weight=drawn(6))
    flow = flow_of(step_of(net, drawn(2, 3)))
    values = by_operator(flow)
    last = flow.values[max(flow.values)]
    sources = {flow.behind(key).operator for key in last.inputs}
    assert sources == {"exp", "parameter"}
    assert [v.row.name for v in flow.parameters_read(last.key)] == ["weight"]
    assert flow.behind(values["exp"].key) is values["exp"]


def test_constants_and_unknown_values_say_nothing(program, step_of):
    net = program(lambda m, x: (m.zeros + x, x.sum(), x > 0), zeros=torch.zeros(3))
    step = step_of(net, torch.tensor([1.0, 2.0, 3.0]))
    values = by_operator(flow_of(step))
    assert values["parameter"].says_nothing
    assert not values["add"].says_nothing
    assert not values["sum"].says_nothing
    assert values["sum"].is_number
    assert not values["gt"].is_number


def test_what_is_drawn_is_no_constant(program, step_of):
    def function(m, x):
        weight = torch.empty(3).uniform_()  # what a layer made in the step begins with
        noise = torch.randn(3).tanh()
        table = torch.arange(3.0).cos()
        return x * weight + noise * table

    values = flow_of(step_of(program(function), drawn(3)))
    constants = {values.values[key].operator for key in constants_of(values)}
    assert {"arange", "cos"} <= constants
    assert constants.isdisjoint({"uniform", "randn", "tanh", "mul", "add"})


def test_from_statistics_nothing_is_kept(program, step_of):
    net = program(lambda m, x: x.exp())
    flow = flow_of(step_of(net, drawn(5), tensors=False))
    assert all(flow.tensor(key) is None for key in flow.values)
    assert not by_operator(flow)["exp"].sketch.exact


def test_gradients_say_what_is_trained(program, step_of):
    net = program(lambda m, x: (m.weight * x).sum(), weight=drawn(5))
    net.register_buffer("table", drawn(5))
    step = step_of(net, drawn(5))
    assert flow_of(step).trained == frozenset()
    # of the forward pass alone, run again on other numbers
    assert flow_of(step, frozenset({"weight"})).trained == {"weight"}


def test_a_tensor_of_which_views_were_written_is_made_of_all_of_them(program, step_of):
    def differences(_, x):
        whole = torch.empty_like(x)
        whole[:, :-1] = x[:, 1:] - x[:, :-1]
        whole[:, -1] = 0.5
        return whole * 2

    flow = flow_of(step_of(program(differences), drawn(3, 4)))
    values = by_operator(flow)
    made_of = upstream(flow, [values["mul"].key], lambda _value: True)
    assert values["sub"].key in made_of
    assert values["input"].key in made_of


def test_a_tensor_that_was_written_as_a_whole_is_made_of_what_was_written(
    program, step_of
):
    def copied(_, x):
        whole = x.exp()
        whole.copy_(x.sin())
        return whole * 2

    flow = flow_of(step_of(program(copied), drawn(3, 4)))
    values = by_operator(flow)
    made_of = upstream(flow, [values["mul"].key], lambda _value: True)
    assert values["sin"].key in made_of
    assert values["exp"].key not in made_of


def test_memory_that_nothing_was_written_to_has_no_values(program, step_of):
    """It holds what an earlier tensor has left, which may be a value of the other side."""
    net = program(lambda m, x: torch.empty_like(x).copy_(x * 2))
    for tensors in (True, False):
        values = by_operator(flow_of(step_of(net, drawn(5), tensors=tensors)))
        assert values["empty_like"].sketch is None
        assert values["copy"].sketch is not None
