"""Small edits are tried where a port parts from its reference: the edited call is named.

The network is none of the bank of ports: a gate over a normalised sequence, pooled.
"""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F

from roundoff.compare.judging.explain import EarlierSteps, Sides
from roundoff.compare.ports.port_comparison import compare_port
from roundoff.compare.repairs.repair_trials import Repair, first_end
from roundoff.compare.repairs.trials import families_of, places_of_runs
from roundoff.compare.values.traced_calls import TracedProgram
from roundoff.compare.values.value_flow import flow_of


def drawn(*shape, seed):
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


LEAVES = {
    "scale": drawn(12, seed=1).abs() + 0.5,
    "gate": drawn(10, 12, seed=2),
    "value": drawn(10, 12, seed=3),
    "out": drawn(5, 10, seed=4),
}
#: The port's leaves: matrices the other way round, gate and value in one.
OTHERS = {
    "gain": LEAVES["scale"],
    "both": torch.cat([LEAVES["gate"], LEAVES["value"]]).t().contiguous(),
    "last": LEAVES["out"].t().contiguous(),
}
X = 0.1 * drawn(3, 7, 12, seed=5)


def reference(m, x):
    x = F.layer_norm(x, (12,), m.scale, None, 1e-5)
    x = torch.sigmoid(F.linear(x, m.gate)) * F.linear(x, m.value)
    return F.linear(F.gelu(x).mean(1), m.out)


def port(
    m,
    x,
    *,
    eps=1e-5,
    halves=(0, 1),
    squash=torch.sigmoid,
):
    centered = x - x.mean(-1, keepdim=True)
    variance = (centered * centered).mean(-1, keepdim=True)
    x = centered * torch.rsqrt(variance + eps) * m.gain
    both = torch.einsum("btd,dk->bkt", x, m.both).unflatten(1, (2, 10))
    gate = both.select(1, halves[0])
    x = squash(gate) * both.select(1, halves[1])
    x = F.gelu(x).sum(-1) / 7
    return torch.mm(x, m.last)


def compared(program, step_of, ours, theirs, *, tensors, leaves=OTHERS):
    sides = Sides(
        step_of(program(ours, **LEAVES), X, tensors=tensors),
        step_of(program(theirs, **leaves), X, tensors=tensors),
    )
    rows = compare_port(sides, EarlierSteps())
    return [row for row in rows if row.cause == "own"]


@pytest.mark.parametrize("tensors", [True, False])
def test_the_port_is_right(program, step_of, tensors):
    assert not compared(program, step_of, reference, port, tensors=tensors)


@pytest.mark.parametrize("tensors", [True, False])
@pytest.mark.parametrize(
    ("wrong", "operator", "words"),
    [
        ({"eps": 1e-3}, "add", "1e-05"),
        ({"squash": torch.tanh}, "tanh", "sigmoid"),
        ({"halves": (1, 1)}, "select", "at 0"),
    ],
    ids=lambda value: "" if isinstance(value, str) else str(next(iter(value))),
)
def test_the_edited_call_is_named(program, step_of, tensors, wrong, operator, words):
    [row] = compared(
        program,
        step_of,
        reference,
        lambda m, x: port(m, x, **wrong),
        tensors=tensors,
    )
    assert row.operator == operator
    assert words in row.evidence


@pytest.mark.parametrize("tensors", [True, False])
def test_a_parameter_in_another_order_is_no_fault_of_the_program(
    program, step_of, tensors
):
    leaves = OTHERS | {"gain": LEAVES["scale"].flip(0)}
    [row] = compared(program, step_of, reference, port, tensors=tensors, leaves=leaves)
    assert row.name == "gain"


# -- a recurrent cell in a loop, and a softmax written out ---------------------------

GATES = {"kernel": drawn(6, 12, seed=6), "recurrent": drawn(4, 12, seed=7)}
SEQUENCE = drawn(2, 5, 6, seed=8)


def cell(m, x, order=(0, 1, 2), squash=torch.sigmoid):
    """A gate, a new value and one that is let out; ``order``: where they are read."""
    state = torch.zeros(x.shape[0], 4)
    states = []
    for step in x.unbind(1):
        parts = (step @ m.kernel + state @ m.recurrent).split(4, 1)
        gate, new, out = (parts[place] for place in order)
        state = squash(gate) * torch.tanh(new) + (1 - squash(gate)) * state
        states.append(torch.sigmoid(out) * state)
    return torch.stack(states, 1)


def scored(x, axis=-1):
    e = torch.exp(x)
    return e / e.sum(axis, keepdim=True)


@pytest.mark.parametrize(
    ("port", "operator", "words"),
    [
        (lambda m, x: scored(cell(m, x, (1, 0, 2))), "split", "parts 0 and 1"),
        (
            lambda m, x: scored(cell(m, x, squash=F.hardsigmoid)),
            "hardsigmoid",
            "as sig",
        ),
        (lambda m, x: scored(cell(m, x), 1), "sum", "[2], not [1]"),
    ],
    ids=["parts exchanged", "another gate", "another axis"],
)
def test_turns_of_a_loop_are_edited_alike(program, step_of, port, operator, words):
    def linear_cells(m, x):
        # the gates in another layout, so that the two programs are of different hands
        fused = torch.einsum("btd,dk->tbk", x, m.kernel)
        state = torch.zeros(x.shape[0], 4)
        states = []
        for step in fused:
            gates = F.linear(state, m.recurrent.t()) + step
            gate = gates[:, :4].sigmoid()
            state = torch.lerp(state, gates[:, 4:8].tanh(), gate)
            states.append(gates[:, 8:].sigmoid() * state)
        return torch.softmax(torch.stack(states), -1)

    ours = step_of(program(linear_cells, **GATES), SEQUENCE)
    theirs = step_of(program(port, **GATES), SEQUENCE)
    rows = compare_port(Sides(ours, theirs), EarlierSteps())
    [row] = [row for row in rows if row.cause == "own"]
    assert row.operator == operator
    assert words in row.evidence


@pytest.mark.parametrize("tensors", [True, False])
def test_a_parameter_held_twice(program, step_of, tensors):
    def two(m, x):
        return F.linear(torch.relu(F.linear(x, m.first)), m.second)

    def port_of_two(m, x):
        return torch.mm(torch.mm(x[:, 0], m.a).clamp(min=0), m.b)

    first = drawn(12, 12, seed=9)
    second = drawn(12, 12, seed=10)
    ours = program(lambda m, x: two(m, x[:, 0]), first=first, second=second)
    theirs = program(port_of_two, a=first.t(), b=first.t())
    sides = Sides(
        step_of(ours, X, tensors=tensors), step_of(theirs, X, tensors=tensors)
    )
    rows = compare_port(sides, EarlierSteps())
    [row] = [row for row in rows if row.cause == "own"]
    assert row.name == "b"
    assert "holds the reference's first" in row.evidence


def halves_in_turns(m, x):
    for _ in range(3):
        a, b = x[..., :5], x[..., 5:]
        x = torch.cat([b, a * m.by], -1)
    return x


def test_calls_at_one_place_of_a_line_in_each_turn(program, step_of):
    step = step_of(program(halves_in_turns, by=torch.ones(5)), drawn(2, 10, seed=6))
    traced = TracedProgram(flow_of(step))
    cuts = [c.first.call for c in traced.calls.values() if c.first.operator == "slice"]
    families = families_of(traced)
    places = places_of_runs(traced)
    assert [c.first.call for c in families[cuts[0]]] == cuts
    assert [c.first.call for c in places[cuts[0]]] == cuts[::2]
    assert [c.first.call for c in places[cuts[1]]] == cuts[1::2]


def test_a_number_that_agrees_alone_waits_for_what_explains_more():
    def repair(words, *, ends=True, may_be_chance=False, gained=0):
        return Repair(
            call=None,
            words=words,
            ends=ends,
            gained=gained,
            unlikely=1,
            may_be_chance=may_be_chance,
        )

    chance = repair("chance", may_be_chance=True)
    again = repair("again", may_be_chance=True)
    helps = repair("helps", ends=False, gained=3)
    sure = repair("sure", gained=2)
    assert first_end([chance, helps, sure], None) == (sure, helps, chance)
    assert first_end([chance, helps, again], None) == (None, helps, chance)
