"""One step of two programs by different hands: when they are, what agrees, what is named once."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F

from roundoff.compare.judging.explain import EarlierSteps, Sides
from roundoff.compare.pairing.alignment import MATCHED
from roundoff.compare.ports.difference import Difference
from roundoff.compare.ports.port_comparison import by_different_hands, compare_port
from roundoff.compare.ports.port_rows import _description
from roundoff.compare.values.value_flow import flow_of
from roundoff.compare.values.value_regions import Part
from roundoff.compare.values.value_regions import Sides as PortSides


def drawn(*shape, seed=0):
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


LEAVES = {"first": drawn(8, 6, seed=1), "second": drawn(3, 8, seed=2)}
X = drawn(5, 6, seed=3)


def reference(m, x):
    return F.linear(F.linear(x, m.first).tanh(), m.second).sigmoid()


def port(m, x):
    hidden = torch.einsum("bi,hi->hb", x, m.first).tanh()
    return 1 / (1 + torch.exp(-torch.einsum("hb,oh->bo", hidden, m.second)))


def wrong_port(m, x):
    hidden = torch.einsum("bi,hi->hb", x, m.first).erf()
    return 1 / (1 + torch.exp(-torch.einsum("hb,oh->bo", hidden, m.second)))


def test_by_different_hands(program, step_of):
    ours = step_of(program(reference, **LEAVES), X).rows
    again = step_of(program(reference, **LEAVES), X).rows
    theirs = step_of(program(port, **LEAVES), X).rows
    assert not by_different_hands(ours, again, {})
    assert by_different_hands(ours, theirs, {})
    assert not by_different_hands(ours, {}, {})


def test_one_hand_whatever_the_modules_are_called(step_of):
    torch.manual_seed(0)
    net = torch.nn.Sequential(torch.nn.Linear(6, 4), torch.nn.Tanh())
    renamed = torch.nn.ModuleDict({"layer": net[0], "act": net[1]})
    renamed.forward = lambda x: renamed["act"](renamed["layer"](x))
    assert not by_different_hands(step_of(net, X).rows, step_of(renamed, X).rows, {})


@pytest.mark.parametrize("tensors", [True, False])
def test_a_right_port_is_equivalent(program, step_of, tensors):
    sides = Sides(
        step_of(program(reference, **LEAVES), X, tensors=tensors),
        step_of(program(port, **LEAVES), X, tensors=tensors),
    )
    memory = EarlierSteps()
    rows = compare_port(sides, memory)
    assert not any(row.cause for row in rows)
    assert not memory.parted
    assert rows[0].record is not None
    leaves = {row.name: row.status for row in rows if row.name}
    assert leaves == {"first": MATCHED, "second": MATCHED}


@pytest.mark.parametrize("tensors", [True, False])
def test_a_difference_is_named_once(program, step_of, tensors):
    sides = Sides(
        step_of(program(reference, **LEAVES), X, tensors=tensors),
        step_of(program(wrong_port, **LEAVES), X, tensors=tensors),
    )
    memory = EarlierSteps()
    named = [row for row in compare_port(sides, memory) if row.cause == "own"]
    assert [row.operator for row in named] == ["erf"]
    assert memory.parted
    assert not any(row.cause for row in compare_port(sides, memory))


def one_more(m, x):
    return port(m, x) * 1.1


def one_less(m, x):
    hidden = torch.einsum("bi,hi->hb", x, m.first).tanh()
    return torch.einsum("hb,oh->bo", hidden, m.second)


def with_a_count(m, x):
    result = port(m, x)
    (result > 0.5).float().mean()
    return result


@pytest.mark.parametrize("tensors", [True, False])
@pytest.mark.parametrize("wrong", [one_more, one_less])
def test_an_operator_more_or_less_at_the_end(program, step_of, wrong, tensors):
    sides = Sides(
        step_of(program(reference, **LEAVES), X, tensors=tensors),
        step_of(program(wrong, **LEAVES), X, tensors=tensors),
    )
    rows = compare_port(sides, EarlierSteps())
    assert [row for row in rows if row.cause is not None]


def test_what_is_computed_beside_the_result_is_no_difference(program, step_of):
    sides = Sides(
        step_of(program(reference, **LEAVES), X),
        step_of(program(with_a_count, **LEAVES), X),
    )
    rows = compare_port(sides, EarlierSteps())
    assert not [row for row in rows if row.cause is not None]


def unread_pool(x):
    """What the last turn of a loop makes for the next, which does not come."""
    return (x[:, ::2] + x[:, 1::2]) / 2


@pytest.mark.parametrize("both", [True, False])
def test_what_nothing_reads_hides_no_result_that_differs(program, step_of, both):
    def ours(m, x):
        if both:
            return reference(m, x).mean(), unread_pool(x * 3)
        hidden = unread_pool(x * 3)
        return hidden, reference(m, x).mean()

    def theirs(m, x, is_wrong):
        mean = (wrong_port if is_wrong else port)(m, x).mean()
        return mean, unread_pool(x * 3)

    def named(is_wrong):
        candidate = program(lambda m, x: theirs(m, x, is_wrong), **LEAVES)
        sides = Sides(step_of(program(ours, **LEAVES), X), step_of(candidate, X))
        return [r for r in compare_port(sides, EarlierSteps()) if r.cause == "own"]

    assert not named(False)
    [row] = named(True)
    assert "erf" in row.site


@pytest.mark.parametrize("shape", [(8,), (4, 2)])
def test_a_constant_is_named_where_two_calls_work_on_one_shape(program, step_of, shape):
    """In another layout axes and sizes are others, and say nothing."""

    def normed(epsilon, shape):
        def run(m, x):
            hidden = F.linear(x, m.first).reshape(5, *shape)
            return F.layer_norm(hidden, shape, eps=epsilon)

        flow = flow_of(step_of(program(run, **LEAVES), X))
        values = flow.values.values()
        return flow, next(v for v in values if v.operator == "native_layer_norm")

    ours, expected = normed(1e-5, (8,))
    theirs, value = normed(0.1, shape)
    part = Part(expected, value, "forward", 0.25, (value,), (expected,))
    label, words = _description(
        PortSides(ours, theirs, 1e-6), Difference(part, None, 1e-6)
    )
    if shape == (8,):
        assert label == "wrong constant"
        assert words.startswith("eps: 1e-05, here 0.1: the reference's is ")
    else:
        assert label == "other operator"
        assert words.startswith("what it is made of agrees; it is 0.25 off, relative")


def scored(loss):
    def run(m, x):
        return loss(F.linear(x, m.second), torch.tensor([0, 2, 1, 0, 1]))

    return run


def by_exponentials(scores, labels):
    shares = scores.exp()
    shares = shares / shares.sum(1, keepdim=True)
    return -shares[torch.arange(5), labels].log().mean()


def of_half_the_scores(scores, labels):
    return by_exponentials(scores / 2, labels)


@pytest.mark.parametrize("tensors", [True, False])
@pytest.mark.parametrize(
    ("other", "named"), [(by_exponentials, 0), (of_half_the_scores, 1)]
)
def test_a_loss_by_another_formula_is_the_same_loss(
    program, step_of, other, named, tensors
):
    x = drawn(5, 8, seed=6)
    leaves = {"second": LEAVES["second"]}
    sides = Sides(
        step_of(program(scored(F.cross_entropy), **leaves), x, tensors=tensors),
        step_of(program(scored(other), **leaves), x, tensors=tensors),
    )
    rows = compare_port(sides, EarlierSteps())
    assert sum(row.cause == "own" for row in rows) == named
