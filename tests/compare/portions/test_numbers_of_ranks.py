"""One number of each rank: which sums over the ranks say that it is right."""

from __future__ import annotations

import pytest
import torch

from roundoff.compare.portions.pieces import _says_something


@pytest.mark.parametrize(
    ("factor", "says"), [(1.0, True), (2.0, True), (0.5, True), (1.16, False)]
)
def test_a_number_is_a_term_of_its_sum_or_mean_alone(factor, says):
    assert _says_something(torch.tensor(3.0), factor, 2) == says


def test_many_values_that_are_one_multiple_are_terms_by_any_factor():
    assert _says_something(torch.tensor([3.0, 4.0]), 1.16, 2)
