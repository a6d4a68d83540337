"""A port that holds its features in an order of its own: do its parameters follow?"""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F

from roundoff.compare.judging.explain import EarlierSteps, Sides
from roundoff.compare.ports.port_comparison import compare_port

WAVES = 4


def drawn(*shape, seed):
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


LEAVES = {
    "scale": drawn(2 * WAVES, seed=1).abs() + 0.5,
    "shift": drawn(2 * WAVES, seed=2),
    "enter": drawn(6, 2 * WAVES, seed=3) / 2,
    "leave": drawn(3, 6, seed=4) / 2,
}
X = drawn(7, 1, seed=5)
SPEEDS = torch.arange(1.0, WAVES + 1)
#: Sines and cosines in turns, of which the reference has one after the other.
TURNS = torch.arange(2 * WAVES).reshape(2, WAVES).t().flatten()


def reference(m, x):
    angles = x * SPEEDS
    x = torch.cat([angles.sin(), angles.cos()], 1)
    x = torch.tanh(x * m.scale + m.shift)
    return F.linear(torch.tanh(F.linear(x, m.enter)), m.leave)


def port(m, x):
    angles = x * SPEEDS
    x = torch.stack([angles.sin(), angles.cos()], 2).flatten(1)
    x = torch.tanh(x * m.gain + m.offset)
    x = torch.tanh(x @ m.first)
    return x @ m.second


def leaves(left):
    """Return the port's parameters, in its order but for those that are ``left``."""
    held = {
        "gain": LEAVES["scale"][TURNS],
        "offset": LEAVES["shift"][TURNS],
        "first": LEAVES["enter"][:, TURNS].t().contiguous(),
        "second": LEAVES["leave"].t().contiguous(),
    }
    as_they_were = {
        "gain": LEAVES["scale"],
        "offset": LEAVES["shift"],
        "first": LEAVES["enter"].t().contiguous(),
    }
    return held | {name: as_they_were[name] for name in left}


def named(program, step_of, *left):
    sides = Sides(
        step_of(program(reference, **LEAVES), X, tensors=True),
        step_of(program(port, **leaves(left)), X, tensors=True),
    )
    rows = compare_port(sides, EarlierSteps())
    return [row for row in rows if row.cause == "own"]


def test_a_port_whose_parameters_follow_is_right(program, step_of):
    assert not named(program, step_of)


@pytest.mark.parametrize(
    ("name", "wanted"), [("gain", "scale"), ("offset", "shift"), ("first", "enter")]
)
def test_a_parameter_that_does_not_follow_is_named(program, step_of, name, wanted):
    row, *_ = named(program, step_of, name)
    assert row.name == name
    assert f"{name} is not in the order of what it is used with" in row.evidence
    assert f"as the reference's {wanted} is" in row.evidence


def test_what_follows_is_known_once_those_before_are_right(program, step_of):
    row, *_ = named(program, step_of, "gain", "offset")
    assert row.name == "gain"
    assert "gain is not in the order of what it is used with" in row.evidence


def test_where_none_follows_the_features_are_in_the_wrong_order(program, step_of):
    [row] = named(program, step_of, "gain", "offset", "first")
    assert row.operator == "stack"
    assert row.evidence.startswith("along axis 1, not 2")


def test_features_in_the_wrong_order_are_no_fault_of_parameters(program, step_of):
    def wrong(m, x):
        angles = x * SPEEDS
        x = torch.stack([angles.cos(), angles.sin()], 2).flatten(1)
        return torch.tanh(torch.tanh(x * m.gain + m.offset) @ m.first) @ m.second

    sides = Sides(
        step_of(program(reference, **LEAVES), X, tensors=True),
        step_of(program(wrong, **leaves(())), X, tensors=True),
    )
    [row] = [row for row in compare_port(sides, EarlierSteps()) if row.cause == "own"]
    assert row.name is None, row.evidence
    assert row.operator == "stack", row.evidence
