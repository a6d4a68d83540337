"""Where two programs of other operators part, and which of their values agree."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
import torch.nn.functional as F

from roundoff.compare.values.value_flow import flow_of
from roundoff.compare.values.value_regions import first_of, limit_of, parted, upstream


def drawn(*shape, seed=0):
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


WEIGHT = drawn(6, 6, seed=1)
X = drawn(5, 6, seed=2)


def last(flow):
    return max(key for key, value in flow.values.items() if not value.inner)


def part_of(sides):
    return parted(sides, [last(sides.reference)], [last(sides.candidate)], "forward")


def operators(flow, keys):
    return {flow.values[key].operator for key in keys}


@pytest.mark.parametrize("tensors", [True, False])
def test_values_agree_in_any_layout(program, sides_of, tensors):
    rows = program(lambda m, x: F.linear(x, m.weight).tanh(), weight=WEIGHT)
    columns = program(lambda m, x: torch.tanh(m.kernel @ x.t()), kernel=WEIGHT)
    sides = sides_of(rows, columns, X, tensors=tensors)
    assert sides.twins[last(sides.candidate)][0] == last(sides.reference)
    assert sides.agreeing[last(sides.reference)][0] == last(sides.candidate)


@pytest.mark.parametrize("tensors", [True, False])
def test_they_part_at_the_operator_that_differs(program, sides_of, tensors):
    ours = program(lambda m, x: F.relu(F.linear(x, m.weight)).exp(), weight=WEIGHT)
    theirs = program(lambda m, x: F.gelu(x @ m.kernel).exp(), kernel=WEIGHT.t())
    part = part_of(sides_of(ours, theirs, X, tensors=tensors))
    assert (part.reference.operator, part.candidate.operator) == ("relu", "gelu")
    assert 0 < part.distance < 1


def test_a_call_is_opened_where_it_parts(program, sides_of):
    # one call of the reference; its product agrees, and what is done to it does not
    leaves = {"weight": WEIGHT, "bias": drawn(6, seed=4)}
    ours = program(lambda m, x: F.linear(x, m.weight, m.bias), **leaves)
    theirs = program(lambda m, x: x @ m.weight.t() - m.bias, **leaves)
    sides = sides_of(ours, theirs, X)
    assert not any(value.inner for value in sides.reference.values.values())
    part = part_of(sides)
    assert (part.reference.inner, part.reference.operator) == (True, "add")
    assert part.candidate.operator == "sub"


def test_turns_of_a_loop_agree_with_the_whole(program, sides_of):
    x = drawn(4, 3, 6, seed=3)

    def loop(m, x):
        outputs = []
        for turn in x:
            outputs.append(torch.tanh(turn @ m.kernel))
        return torch.stack(outputs)

    ours = program(lambda m, x: F.linear(x, m.weight).tanh(), weight=WEIGHT)
    sides = sides_of(ours, program(loop, kernel=WEIGHT.t()), x)
    assert operators(sides.candidate, sides.several) == {"mm", "tanh"}
    assert len(sides.several) == 8
    assert operators(sides.reference, sides.several.values()) == {"mm", "tanh"}
    for key in sides.several:
        twin = sides.twins[key][0]
        assert sides.all_twins(sides.candidate.values[key]) == [twin]
        assert twin in sides.agreeing


def scaled_twice(x):
    return torch.tanh(x * 0.5) * 0.5 + x.sin() * 0.5


def test_turns_agree_where_a_line_calls_an_operator_several_times(program, sides_of):
    x = drawn(5, 3, 6, seed=4)

    def loop(_, x):
        return torch.stack([scaled_twice(turn) for turn in x])

    sides = sides_of(program(lambda _, x: scaled_twice(x)), program(loop), x)
    wanted = {"mul", "tanh", "sin", "add"}
    assert operators(sides.candidate, sides.several) == wanted
    assert len(sides.several) == 5 * 6


def test_turns_agree_where_a_function_is_called_in_several_places(program, sides_of):
    x = drawn(5, 3, 6, seed=5)

    def halved(x):
        return x * 0.5

    def loop(_, x):
        turns = []
        for turn in x:
            once = halved(turn)
            # what is wrong in one place is no reason against the other one
            turns.append(torch.tanh(once) + halved(once.cos()))
        return torch.stack(turns)

    def whole(_, x):
        return torch.tanh(x * 0.5) + (x * 0.5).sin() * 0.5

    sides = sides_of(program(whole), program(loop), x)
    assert operators(sides.candidate, sides.several) == {"mul", "tanh"}
    assert len(sides.several) == 2 * 5


def test_large_turns_agree_with_the_whole(program, sides_of):
    # more elements than a sketch keeps one by one
    x = drawn(3, 40, 40, seed=6)

    def loop(_, x):
        return torch.stack([torch.tanh(turn) for turn in x])

    sides = sides_of(program(lambda _, x: torch.tanh(x)), program(loop), x)
    assert operators(sides.candidate, sides.several) == {"tanh"}
    assert len(sides.several) == 3


def test_the_call_that_is_wrong_in_later_turns_is_named(program, sides_of):
    x = drawn(5, 3, 6, seed=7)
    speeds = torch.tensor([1.0, 0.5, 0.25, 0.125, 0.0625, 0.03125])

    def whole(_, x):
        angles = torch.arange(5.0)[:, None, None] * speeds
        return x * torch.cos(angles)

    def loop(_, x):
        turns = []
        for place, turn in enumerate(x):
            angles = speeds.sqrt() * place  # of place zero they are right
            turns.append(turn * torch.cos(angles))
        return torch.stack(turns)

    part = part_of(sides_of(program(whole), program(loop), x))
    assert part.candidate.operator in ("sqrt", "mul")
    assert part.candidate.row.line.startswith(
        "tests/compare/values/test_value_regions.py"
    )
    line = int(part.candidate.row.line.rpartition(":")[2])
    assert "speeds.sqrt()" in Path(__file__).read_text().splitlines()[line - 1]


def test_what_later_turns_compute_again_is_not_named(program, sides_of):
    """A factor in two parts, of which the reference has none, is right in the first turn."""

    def ours(m, x, t):
        for weight in (m.a, m.b):
            x = torch.tanh(F.linear(x, weight) * torch.exp(-t))
        return x

    def layer(x, weight, t):
        half = torch.exp(-0.5 * t)
        return torch.erf(x @ weight.t() * half * half)

    def theirs(m, x, t):
        return layer(layer(x, m.a, t), m.b, t)

    leaves = {"a": WEIGHT, "b": drawn(6, 6, seed=4)}
    t = torch.linspace(0.1, 1, 5)[:, None]
    part = part_of(sides_of(program(ours, **leaves), program(theirs, **leaves), X, t))
    assert part.candidate.operator == "erf"
    assert {head.operator for head in part.heads} == {"erf", "mul"}


def test_what_layers_before_use_is_not_what_the_candidate_lacks(program, sides_of):
    """Its table in another form was right in the first layer; the second one is wrong."""

    def ours(m, x, t):
        table = torch.exp(-t)
        for weight in (m.a, m.b):
            x = torch.tanh(F.linear(x, weight) * table)
        return x

    def theirs(m, x, t):
        half = torch.exp(-0.5 * t)
        x = torch.tanh(x @ m.a.t() * half * half)
        return torch.erf((x @ m.b.t() + 0.1) * half * half)

    leaves = {"a": WEIGHT, "b": drawn(6, 6, seed=4)}
    t = torch.linspace(0.1, 1, 5)[:, None]
    part = part_of(sides_of(program(ours, **leaves), program(theirs, **leaves), X, t))
    assert {value.operator for value in part.wanted} == {"mul"}


def test_a_table_that_one_side_lays_out_twice_agrees(program, sides_of):
    def ours(m, x, t):
        angles = torch.cat([t, t], dim=-1)
        return x * angles.cos()

    def theirs(m, x, t):
        table = torch.cos(t)
        return torch.stack([x[:, :3] * table, x[:, 3:] * table], dim=1)

    sides = sides_of(program(ours), program(theirs), X, drawn(5, 3, seed=8))
    cosines = [
        next(v for v in flow.values.values() if v.operator == "cos")
        for flow in (sides.reference, sides.candidate)
    ]
    assert sides.twins[cosines[1].key][0] == cosines[0].key
    assert sides.agreeing[cosines[0].key][0] == cosines[1].key


def test_a_single_number_is_the_counterpart_of_one_that_is_very_near(program, sides_of):
    """Twice the wrong mean is as near to the right one as numbers are by chance."""
    counted = torch.tensor([1.0, 1.0, 1.0, 0.0, 0.0, 0.0])

    def ours(m, x):
        return 2.0 * ((x.abs() * counted).sum() / counted.sum())

    def theirs(m, x):
        return 2.0 * (x.abs() * counted).mean()

    part = part_of(sides_of(program(ours), program(theirs), X[0]))
    assert (part.candidate.row.operator, part.candidate.operator) == ("mean", "div")


def test_nothing_is_named_without_results(program, sides_of):
    net = program(lambda m, x: x.exp())
    assert parted(sides_of(net, net, X), [], [], "forward") is None


@pytest.mark.parametrize(
    ("dtype", "limit"),
    # 1024 units of roundoff, and at most a tenth
    [
        (torch.float32, 1024 * 2**-24),
        (torch.bfloat16, 0.1),
        (torch.float64, 1024 * 2**-53),
    ],
)
def test_the_limit_is_that_of_the_coarser_format(program, step_of, dtype, limit):
    net = program(lambda m, x: x.exp())
    fine = flow_of(step_of(net, X.double()))
    other = flow_of(step_of(net, X.to(dtype)))
    assert limit_of(fine, other) == limit_of(other, fine) == limit


def test_the_first_of_a_region_look_through_what_hands_on(program, step_of):
    net = program(lambda m, x: x.exp().t().tanh() + 1)
    flow = flow_of(step_of(net, X))
    region = upstream(flow, [last(flow)], lambda value: value.operator != "exp")
    assert operators(flow, region) == {"t", "tanh", "add"}
    assert [value.operator for value in first_of(flow, region)] == ["tanh"]


def routed(m, x):
    """Words of which one of three experts is chosen; how many take each is a result."""
    scores = x @ m.weight
    chosen = scores[:, :3].softmax(-1).argmax(-1)
    shares = F.one_hot(chosen, 3).float().mean(0)
    return scores.exp().sum() + shares.square().sum()


def test_what_a_region_chooses_is_no_beginning_of_it(program, sides_of):
    ours = program(routed, weight=WEIGHT)
    theirs = program(lambda m, x: routed(m, x.roll(1, -1)), weight=WEIGHT)
    part = part_of(sides_of(ours, theirs, drawn(40, 6, seed=8)))
    assert {head.operator for head in part.heads} == {"mm"}
    assert part.wanted[0].operator == "mm"
