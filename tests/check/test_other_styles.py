"""Differences of programs without a loader, a module or a plain loop are named first."""

from __future__ import annotations

import pytest

import roundoff

from .other_styles import FRESH, FRESH_ALIKE
from .planted import record_pair


@pytest.mark.parametrize("case", FRESH[::4], ids=lambda case: case.name)
def test_a_difference_in_another_style_is_named_first(case, tmp_path):
    check = roundoff.check(*record_pair(case, tmp_path))
    text = check.differences[0].text
    assert all(word in text for word in case.words), text
    assert check.differences[0].follows is None


@pytest.mark.parametrize("case", FRESH_ALIKE[::3], ids=lambda case: case.name)
def test_programs_in_other_styles_that_are_alike_have_no_difference(case, tmp_path):
    check = roundoff.check(*record_pair(case, tmp_path))
    assert not check.differences
    assert check.comparable
