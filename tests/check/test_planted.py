"""Each planted difference is the first line of the report, with both values."""

from __future__ import annotations

import pytest

import roundoff

from .planted import ALIKE, PLANTED, record_pair


@pytest.mark.parametrize("case", PLANTED, ids=lambda case: case.name)
def test_a_planted_difference_is_named_first(case, tmp_path):
    check = roundoff.check(*record_pair(case, tmp_path))
    text = check.differences[0].text
    assert all(word in text for word in case.words), text
    assert check.differences[0].follows is None


@pytest.mark.parametrize("case", ALIKE, ids=lambda case: case.name)
def test_pairs_that_are_alike_have_no_difference(case, tmp_path):
    check = roundoff.check(*record_pair(case, tmp_path))
    assert not check.differences
    assert not check.missing
    assert check.comparable
