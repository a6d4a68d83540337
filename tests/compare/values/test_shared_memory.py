"""Tensors that are read after views of them were written: batches that are cut in place.

What is expected is what torch makes when the same program runs on another leaf.
"""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch import Tensor

from roundoff.compare.values.traced_calls import TracedProgram
from roundoff.compare.values.value_flow import flow_of

X = torch.arange(24.0).reshape(4, 6) / 7
SCALE = torch.tensor([1.0, -2.0, 0.5, 3.0, 0.25, -1.5])
OTHER = torch.tensor([0.5, 1.0, -4.0, 2.0, 1.5, 0.125])


def items_cut(whole: Tensor) -> Tensor:
    """Cutout: each item is cut through a view that was made before the first cut."""
    for number, item in enumerate(whole):
        item[number : number + 2] = 0
    return whole.exp()


def items_that_read_each_other(whole: Tensor) -> Tensor:
    first, second, *_ = whole.unbind(0)
    first.mul_(2)
    second.add_(first)
    return torch.stack([first, second, whole.sum(0)])


def gates_of_one_tensor(whole: Tensor) -> Tensor:
    left, middle, right = whole.chunk(3, 1)
    left.sigmoid_()
    right.tanh_()
    return left * middle + right * whole[:, 1:3]


def through_a_transposed_view(whole: Tensor) -> Tensor:
    whole.t()[2:4].mul_(-1)
    return whole.reshape(-1).cumsum(0)


def a_cache(whole: Tensor) -> Tensor:
    kept = torch.zeros(5, 4, 6)
    for turn in range(3):
        kept[turn] = whole + turn
        whole = kept[: turn + 1].mean(0)
    return whole + kept[3]


def only_parts_are_read(whole: Tensor) -> Tensor:
    corner = whole[:2, :3]
    whole[1].mul_(2)
    whole[:, 2].mul_(3)
    return corner + 1


PROGRAMS = (
    items_cut,
    items_that_read_each_other,
    gates_of_one_tensor,
    through_a_transposed_view,
    a_cache,
    only_parts_are_read,
)


def traced_with(step_of, program, work: Callable[[Tensor], Tensor]) -> TracedProgram:
    net = program(lambda m, x: work(x * m.scale), scale=SCALE)
    return TracedProgram(flow_of(step_of(net, X)))


def with_another_leaf(traced: TracedProgram) -> Tensor:
    """Return the last value that another ``scale`` makes."""
    rows = traced.flow.step.rows.values()
    [leaf] = [row.record for row in rows if row.name == "scale"]
    *_, (_, tensor) = traced.again({}, {leaf: OTHER})
    return tensor


@pytest.mark.parametrize("work", PROGRAMS)
def test_each_value_is_made_again_as_it_was(program, step_of, work):
    traced = traced_with(step_of, program, work)
    for entry in traced.order:
        for row, tensor in traced.one(entry):
            torch.testing.assert_close(tensor, traced.tensor(row.record))


@pytest.mark.parametrize("work", PROGRAMS)
def test_what_another_leaf_changes_goes_through_the_writes(program, step_of, work):
    made = with_another_leaf(traced_with(step_of, program, work))
    # the same kernels on the same numbers
    torch.testing.assert_close(made, work(X * OTHER), rtol=0.0, atol=0.0)


SIZES = (4, 6)


@st.composite
def views(draw: st.DrawFn) -> Callable[[Tensor], Tensor]:
    """Views of a matrix: a block of it, with steps, turned or not."""
    places = []
    for size in SIZES:
        start = draw(st.integers(0, size - 1))
        end = draw(st.integers(start + 1, size))
        places.append(slice(start, end, draw(st.integers(1, 2))))
    is_turned = draw(st.booleans())

    def view(whole: Tensor) -> Tensor:
        seen = whole[places[0], places[1]]
        return seen.t() if is_turned else seen

    return view


@settings(
    max_examples=25,
    deadline=None,
    suppress_health_check=[HealthCheck.function_scoped_fixture],
)
@given(st.lists(st.tuples(views(), st.sampled_from("awr")), min_size=2, max_size=8))
def test_views_made_written_and_read_in_any_order(program, step_of, turns):
    def work(whole: Tensor) -> Tensor:
        early = [view(whole) for view, _ in turns]
        read = whole.new_zeros(())
        for (view, what), before in zip(turns, early, strict=True):
            if what == "a":
                view(whole).add_(1)
            elif what == "w":
                before.mul_(2)
            else:
                read = read + before.amax() + view(whole).amax()
        return torch.cat([whole.reshape(-1), read.reshape(1)])

    made = with_another_leaf(traced_with(step_of, program, work))
    torch.testing.assert_close(made, work(X * OTHER), rtol=0.0, atol=0.0)
