"""Where a piece may begin is seen at once: it must leave out no place where one stands."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from roundoff.compare.portions import location
from roundoff.compare.portions.location import extremes, is_inside, locate

#: Far above the rounding of a factor in fp64, far below the gaps between drawn elements.
TOLERANCE = 1e-9


@settings(deadline=None, max_examples=60)
@given(st.data())
def test_a_stretch_is_found_wherever_it_begins(data):
    shape = data.draw(st.lists(st.integers(1, 6), min_size=2, max_size=3))
    seed = data.draw(st.integers(0, 2**16))
    factor = data.draw(st.sampled_from([1.0, 0.5, -3.0]))
    draw = torch.Generator().manual_seed(seed)
    whole = torch.randn(shape, generator=draw, dtype=torch.float64)
    ends = [(data.draw(st.integers(0, size - 1)), size) for size in shape]
    stretch = [
        slice(start, data.draw(st.integers(start + 1, size))) for start, size in ends
    ]
    piece = whole[tuple(stretch)] * factor
    found = locate(whole, piece, TOLERANCE, [factor])
    assert found is not None
    assert found.error <= TOLERANCE
    if is_inside(whole, piece):
        least, most, _ = extremes(whole * factor)
        low, high, _ = extremes(piece)
        assert least <= low <= high <= most


@pytest.mark.parametrize("special", [torch.nan, torch.inf])
def test_special_values_say_nothing_of_where_a_piece_begins(special):
    whole = torch.arange(24.0).view(4, 6)
    whole[2, 3] = special
    assert location._likely(whole, whole[:, 2:5], TOLERANCE, 1.0) is None
    assert locate(whole, whole[1:3, 2:5], TOLERANCE) is not None


def test_starts_are_those_of_the_first_element():
    whole = torch.arange(24.0).view(4, 6)
    assert location._likely(whole, whole[1:, 2:5], TOLERANCE, 1.0) == [[2]]
    assert location._likely(whole, whole[1:, 2:5] + 0.5, TOLERANCE, 1.0) == []
