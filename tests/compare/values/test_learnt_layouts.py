"""Where elements of one tensor stand in another one, and what is moved alike."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from roundoff.compare.values.learnt_layouts import (
    _places,
    layouts_for,
    orders_of,
    stand_in,
)


def drawn(*shape, seed):
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def in_pairs(x):
    """Halves of the last axis as pairs of neighbours."""
    halves = x.reshape(*x.shape[:-1], 2, x.shape[-1] // 2)
    return halves.transpose(-1, -2).reshape(x.shape)


@given(st.permutations(range(24)))
def test_any_order_of_different_elements_is_found(order):
    content = drawn(24, seed=1).reshape(2, 3, 4)
    held = content.reshape(-1)[list(order)].reshape(4, 6)
    assert _places(content, held).tolist() == list(order)


def test_equal_elements_keep_their_order():
    words = drawn(4, 6, seed=2)[[0, 1, 0, 2, 1]]
    places = _places(words, in_pairs(words))
    other = drawn(5, 6, seed=3)
    assert torch.equal(other.reshape(-1)[places].reshape(5, 6), in_pairs(other))


def test_nothing_is_found_where_elements_differ_or_all_are_alike():
    assert _places(drawn(24, seed=1), drawn(24, seed=2)) is None
    assert _places(torch.ones(24), torch.ones(24)) is None
    # seven different values say too little
    few = torch.arange(24.0) % 7
    assert _places(few, few.flip(0)) is None


def test_a_rounding_exchanges_no_elements():
    content = drawn(40, seed=4)
    held = content.flip(0).to(torch.float64) * (1 + 1e-7)
    assert _places(content, held).tolist() == list(range(39, -1, -1))


def test_values_that_agree_teach_how_another_one_stands(program, sides_of):
    weight = drawn(6, 6, seed=5)
    x = drawn(4, 6, seed=6)

    def reference(m, x):
        return torch.tanh(x @ m.weight) * 2

    def candidate(m, x):
        return torch.tanh(in_pairs(x @ m.weight)) * 3

    sides = sides_of(
        program(reference, weight=weight), program(candidate, weight=weight), x
    )
    content = drawn(4, 6, seed=7)
    moved = [
        stand_in(layout, content, torch.empty(4, 6))
        for layout in layouts_for(sides, content, torch.empty(4, 6))
    ]
    assert torch.equal(moved[0], in_pairs(content))
    # the orders of axes come after it
    assert any(torch.equal(each, content) for each in moved)


@pytest.mark.parametrize(
    ("content", "held", "count"),
    [((2, 3, 4), (4, 6), 2), ((2, 3), (6,), 2), ((2, 3), (3, 2), 1), ((5,), (6,), 0)],
)
def test_the_orders_of_axes_that_a_shape_allows(content, held, count):
    # (4, 6) of (2, 3, 4): the axis of 4 first, the others joined in either order
    orders = list(orders_of(torch.zeros(content), torch.zeros(held)))
    assert len(orders) == count


def test_complex_numbers_stand_in_for_pairs(program, sides_of):
    sides = sides_of(program(lambda m, x: x * 2), program(lambda m, x: x * 2), X)
    content = drawn(3, 4, 2, seed=8)
    held = torch.zeros(3, 4, dtype=torch.complex64)
    first = next(layouts_for(sides, content, held))
    assert torch.equal(stand_in(first, content, held), torch.view_as_complex(content))


X = drawn(3, 8, seed=9)
