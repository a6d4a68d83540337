"""Roundings of operators in a row add by their squares; sums round with the root of their length."""

from __future__ import annotations

import math

import pytest

from roundoff.compare.portions.accumulated_rounding import (
    accumulated_rounding,
    explained,
    left_behind,
)
from roundoff.compare.records.recorded_rows import RecordedRow

U = 2.0**-24
UNIT_OF_BF16 = 2.0**-8


def rows(*listed, dtype="float32"):
    """(operator, inputs, shape) each; without inputs a value from before the step."""
    made = {}
    for record, (operator, inputs, shape) in enumerate(listed):
        made[record] = RecordedRow(
            record,
            record if inputs else -1,
            operator,
            inputs=inputs,
            shape=shape,
            dtype=dtype,
            name=None if inputs else f"p{record}",
        )
    return made


def test_a_value_from_before_the_step_has_the_rounding_of_the_steps_before():
    step = rows(("parameter", [], [4]))
    assert accumulated_rounding(step, {}) == {0: 0.0}
    assert accumulated_rounding(step, {"p0": 3 * U}) == {0: 3 * U}
    assert left_behind(step, {0: 3 * U}) == {"p0": 3 * U}


def test_a_chain_adds_by_squares():
    step = rows(("parameter", [], [4]), *(("mul", [n], [4]) for n in range(9)))
    # one rounding of the result and one of its only term, nine times
    assert accumulated_rounding(step, {})[9] == pytest.approx(2 * U * math.sqrt(9))


def test_a_sum_rounds_with_the_root_of_its_length():
    step = rows(("parameter", [], [64, 100]), ("sum", [0], [64]))
    assert accumulated_rounding(step, {})[1] == pytest.approx(U + 10 * U)


def test_views_round_nothing_and_the_worst_input_counts():
    step = rows(
        ("parameter", [], [4]),
        ("mul", [0], [4]),
        ("mul", [1], [4]),
        ("view", [2], [2, 2]),
        ("add", [3, 0], [2, 2]),
    )
    made = accumulated_rounding(step, {})
    assert made[3] == made[2]
    # the longer way has two products, and the sum rounds once more
    assert made[2] < made[4] <= math.hypot(made[2], 2 * U)


def test_bf16_adds_up_in_fp32():
    step = rows(("parameter", [], [64, 100]), ("sum", [0], [64]), dtype="bfloat16")
    expected = UNIT_OF_BF16 + 10 * U
    assert accumulated_rounding(step, {})[1] == pytest.approx(expected)


def test_what_is_explained_is_never_less_than_one_rounding_and_never_a_tenth():
    assert explained(0.0, "float32") == 16 * U
    assert explained(2 * U, "float32") == 32 * U
    assert explained(1.0, "float32") == 0.1
    assert explained(0.0, "int64") == 0.0
