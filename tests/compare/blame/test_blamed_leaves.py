"""A parameter is blamed where the calls agree once it holds other values, and else not."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
import torch.nn.functional as F

from roundoff.compare.blame.blamed_layouts import blamed_layout
from roundoff.compare.blame.blamed_leaves import blamed_leaf
from roundoff.compare.blame.blamed_steps import blamed_step
from roundoff.compare.blame.near_leaves import between, values_with
from roundoff.compare.blame.same_layouts import same_layout
from roundoff.compare.values.traced_calls import TracedProgram
from roundoff.compare.values.value_flow import flow_of
from roundoff.compare.values.value_regions import Part, parted


def drawn(*shape, seed=0):
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


WEIGHT = drawn(6, 6, seed=1)
WIDE = drawn(4, 6, seed=2)
X = drawn(5, 6, seed=3)


def last(flow):
    return max(key for key, value in flow.values.items() if not value.inner)


def part_of(sides):
    return parted(sides, [last(sides.reference)], [last(sides.candidate)], "forward")


def linear(m, x):
    return F.relu(F.linear(x, m.weight))


def product(m, x):
    return F.relu(x @ m.kernel)


@pytest.mark.parametrize(
    ("weight", "kernel"),
    [
        (WEIGHT, WEIGHT),  # not transposed: it fits because it is square
        (WIDE, WIDE.reshape(6, 4)),  # made to fit
        (WEIGHT, WEIGHT.t().roll(2, 0)),  # three blocks in another order
        (WEIGHT, drawn(6, 6, seed=9)),  # not loaded
    ],
)
def test_running_again_with_the_reference_s_values_proves_it(
    program, sides_of, weight, kernel
):
    sides = sides_of(program(linear, weight=weight), program(product, kernel=kernel), X)
    blamed = blamed_leaf(sides, part_of(sides))
    assert blamed.value.row.name == "kernel"
    assert blamed.reference.row.name == "weight"
    assert "kernel" in blamed.evidence
    assert "weight" in blamed.evidence


def test_a_part_of_a_joined_parameter(program, sides_of):
    joined = drawn(12, 6, seed=4)

    def halves(m, x):
        first, second = F.linear(x, m.joined).chunk(2, -1)
        return first.tanh() * second

    def apart(m, x):
        return (x @ m.first).tanh() * (x @ m.second)

    right = {"first": joined[:6].t(), "second": joined[6:].t()}
    wrong = right | {"second": joined[6:]}
    sides = sides_of(program(halves, joined=joined), program(apart, **wrong), X)
    blamed = blamed_leaf(sides, part_of(sides))
    assert (blamed.value.row.name, blamed.reference.row.name) == ("second", "joined")


@pytest.mark.parametrize(
    "theirs",
    [
        lambda m, x: F.gelu(x @ m.kernel),
        lambda m, x: F.relu((x @ m.kernel) * 1.1),
        lambda m, x: F.relu(x.flip(0).cumsum(0) @ m.kernel),
    ],
)
@pytest.mark.parametrize("tensors", [True, False])
def test_an_operator_is_not_a_parameter_s_fault(program, sides_of, theirs, tensors):
    candidate = program(theirs, kernel=WEIGHT.t())
    sides = sides_of(program(linear, weight=WEIGHT), candidate, X, tensors=tensors)
    assert blamed_leaf(sides, part_of(sides)) is None


def test_nothing_is_blamed_on_one_side_alone(program, sides_of):
    sides = sides_of(program(linear, weight=WEIGHT), program(product, kernel=WEIGHT), X)
    part = part_of(sides)
    missing = Part(part.reference, None, "forward", part.distance, (), part.wanted)
    assert blamed_leaf(sides, missing) is None
    assert blamed_layout(sides, missing) is None
    assert blamed_step(sides, missing) is None


def test_from_statistics_the_contents_speak(program, sides_of):
    leaves = {"a": WEIGHT, "b": drawn(6, 6, seed=5)}
    ours = program(lambda m, x: F.relu(F.linear(x, m.a)) @ m.b, **leaves)
    theirs = program(lambda m, x: F.relu(x @ m.a) @ m.b, a=leaves["b"], b=leaves["b"])
    sides = sides_of(ours, theirs, X, tensors=False)
    blamed = blamed_leaf(sides, part_of(sides))
    assert blamed.evidence == "a holds the reference's b, not a"


# -- calls again ---------------------------------------------------------------------


def key_of(flow, operator):
    return next(v.key for v in flow.in_order() if v.operator == operator)


def with_other(flow, leaf, other):
    """The last value as it would be with another leaf; None where it cannot be made."""
    needed = between(flow, leaf, [last(flow)])
    return dict(values_with(TracedProgram(flow), needed, leaf, other)).get(last(flow))


def test_a_value_as_it_would_be(program, step_of):
    flow = flow_of(step_of(program(linear, weight=WEIGHT), X))
    other = drawn(6, 6, seed=6)
    result = with_other(flow, key_of(flow, "parameter"), other)
    # sums of six products, maybe in another order: six roundings of 2**-24 of at most 20
    torch.testing.assert_close(
        result, F.relu(F.linear(X, other)), rtol=0.0, atol=2 * 6 * 20 * 2**-24
    )


def test_what_cannot_be_run_again(program, step_of):
    dropped = program(lambda m, x: F.dropout(F.linear(x, m.weight), 0.5), weight=WEIGHT)
    flow = flow_of(step_of(dropped, X))
    leaf = key_of(flow, "parameter")
    assert with_other(flow, leaf, drawn(6, 6, seed=6)) is None
    assert between(flow, leaf, [key_of(flow, "input")]) == set()

    rows = step_of(program(linear, weight=WEIGHT), X)
    without = {n: replace(row, arguments=None) for n, row in rows.rows.items()}
    flow = flow_of(replace(rows, rows=without))
    assert with_other(flow, key_of(flow, "parameter"), drawn(6, 6, seed=6)) is None


def test_a_call_that_cannot_be_run_again_proves_nothing(program, sides_of):
    # the wrong operator reads a parameter that is right, behind what is drawn
    ours = program(
        lambda m, x: F.relu(F.dropout(F.linear(x, m.weight), 0.5)), weight=WEIGHT
    )
    theirs = program(
        lambda m, x: F.gelu(F.dropout(x @ m.kernel, 0.5)), kernel=WEIGHT.t()
    )
    sides = sides_of(ours, theirs, X)
    assert blamed_leaf(sides, part_of(sides)) is None


# -- steps and layouts ---------------------------------------------------------------


def test_a_step_that_adds_zeros(program, sides_of):
    ours = program(lambda m, x: (x.exp() + m.bias).sin(), bias=drawn(6, seed=7))
    theirs = program(lambda m, x: (x.exp() + m.shift).sin(), shift=torch.zeros(6))
    sides = sides_of(ours, theirs, X)
    blamed = blamed_step(sides, part_of(sides))
    assert (blamed.value.row.name, blamed.evidence) == ("shift", "shift holds zeros")


def test_the_right_values_in_other_places(program, sides_of):
    x, kernel = drawn(2, 3, 4, seed=8), drawn(3, 5, seed=9)
    ours = program(lambda m, x: x.exp().transpose(1, 2) @ m.kernel, kernel=kernel)
    theirs = program(lambda m, x: x.exp().reshape(2, 4, 3) @ m.kernel, kernel=kernel)
    sides = sides_of(ours, theirs, x)
    part = part_of(sides)
    assert blamed_leaf(sides, part) is None
    assert "right values in other places" in blamed_layout(sides, part).evidence
    right = sides_of(ours, ours, x)
    twin = right.reference.values[last(right.reference)]
    value = right.candidate.values[last(right.candidate)]
    same = Part(twin, value, "forward", 0.0, (), ())
    assert blamed_layout(right, same) is None


@pytest.mark.parametrize(
    ("change", "is_same"),
    [
        (lambda x: x.permute(0, 2, 1), True),
        (lambda x: x.permute(2, 0, 1).flatten(1), True),
        (lambda x: x.unsqueeze(0), True),
        (lambda x: x.reshape(2, 4, 3), False),
        (lambda x: x.flip(1), False),
        (lambda x: x * 1.001, False),
    ],
)
def test_one_layout(change, is_same):
    x = drawn(2, 3, 4)
    assert same_layout(x, change(x)) == is_same
    assert same_layout(change(x), x) == is_same
