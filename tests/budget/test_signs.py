"""Sign vectors: the values, the dtype, the stream."""

from __future__ import annotations

import pytest
import torch

from roundoff.budget.signs import draw_signs


def generator():
    return torch.Generator().manual_seed(7)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
def test_signs_are_one_or_minus_one_and_the_same_in_every_dtype(dtype):
    signs = draw_signs((3, 100), generator(), torch.empty(0, dtype=dtype))
    assert signs.dtype == dtype
    assert set(signs.unique().tolist()) == {-1.0, 1.0}
    assert torch.equal(signs.double(), draw_signs((3, 100), generator()))


def test_both_signs_are_equally_likely():
    count = 10_000
    total = float(draw_signs((count,), generator()).sum())
    assert abs(total) < 4 * count**0.5  # four standard deviations


def test_a_generator_goes_on_with_other_signs():
    shared = generator()
    first = draw_signs((64,), shared)
    assert not torch.equal(first, draw_signs((64,), shared))
