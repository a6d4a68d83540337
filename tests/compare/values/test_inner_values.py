"""Calls opened: what they compute inside, to the same result; what stays whole."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from roundoff.compare.values.inner_values import open_calls
from roundoff.compare.values.value_flow import flow_of


def drawn(*shape, seed=0):
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def opened(step):
    """The values of a step, its calls, and True where any of these was opened."""
    flow = flow_of(step)
    calls = [key for key, value in flow.values.items() if value.is_call]
    return flow, calls, open_calls(flow, calls)


@pytest.mark.parametrize(
    ("operator", "function", "x", "leaves"),
    [
        ("addmm", lambda m, x: F.linear(x, m.a, m.b), (5, 6), {"a": (4, 6), "b": (4,)}),
        (
            "native_layer_norm",
            lambda m, x: F.layer_norm(x, (6,), m.a, m.b),
            (5, 6),
            {"a": (6,), "b": (6,)},
        ),
        ("_softmax", lambda m, x: x.softmax(-1), (3, 7), {}),
    ],
)
def test_the_last_step_inside_is_the_result(
    program, step_of, operator, function, x, leaves
):
    net = program(function, **{name: drawn(*shape) for name, shape in leaves.items()})
    flow, calls, was_opened = opened(step_of(net, drawn(*x, seed=1)))
    assert was_opened
    first = next(v for v in flow.in_order() if v.operator == operator and not v.inner)
    (last,) = first.inputs
    assert flow.values[last].inner
    # a few roundings of fp32 in another order
    torch.testing.assert_close(
        flow.tensor(last), flow.tensor(first.key), rtol=1e-5, atol=1e-6
    )
    assert len([v for v in flow.values.values() if v.inner and v.computes]) > 1
    assert not open_calls(flow, calls)


@pytest.mark.parametrize("bidirectional", [False, True])
@pytest.mark.parametrize("batch_first", [False, True])
def test_an_lstm_opens_in_each_direction(step_of, bidirectional, batch_first):
    torch.manual_seed(0)
    net = nn.LSTM(4, 3, bidirectional=bidirectional, batch_first=batch_first)
    flow, _, was_opened = opened(step_of(net, drawn(5, 2, 4)))
    assert was_opened
    layers = [
        value
        for value in flow.in_order()
        if value.operator == "mkldnn_rnn_layer" and value.row.place == 0
    ]
    assert len(layers) == 1 + bidirectional
    for layer in layers:
        (last,) = layer.inputs
        assert flow.values[last].inner
        # sigmoids and products of numbers of size 1, a few roundings of fp32 each
        torch.testing.assert_close(
            flow.tensor(last), flow.tensor(layer.key), rtol=1e-5, atol=1e-6
        )


def test_an_lstm_layer_is_its_cells(step_of):
    torch.manual_seed(0)
    flow, _, was_opened = opened(step_of(nn.LSTM(4, 3), drawn(5, 2, 4)))
    assert was_opened
    inner = [v for v in flow.in_order() if v.inner]
    assert sum(v.operator == "tanh" for v in inner) == 2 * 5
    for value in flow.values.values():
        if (
            value.operator == "mkldnn_rnn_layer"
            and not value.inner
            and value.row.place in (0, 1, 2)
        ):
            # sums of seven products and of five steps, in another order
            torch.testing.assert_close(
                flow.tensor(value.inputs[0]).reshape(-1),
                flow.tensor(value.key).reshape(-1),
                rtol=1e-4,
                atol=1e-5,
            )


def test_what_stays_whole(program, step_of):
    linear = program(lambda m, x: F.linear(x, m.a, m.b), a=drawn(4, 6), b=drawn(4))
    x = drawn(5, 6)
    for step in (
        step_of(linear, x, tensors=False),  # nothing to run on
        step_of(nn.ReLU(), x),  # one step is no more than the call
        step_of(program(lambda m, x: x.t().contiguous()), x),  # it moves values
    ):
        flow, _, was_opened = opened(step)
        assert not was_opened
        assert not any(value.inner for value in flow.values.values())
