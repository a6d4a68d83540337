"""Verdicts on rows written by hand, and the frames that rows become."""

from __future__ import annotations

import math

import polars as pl
import pytest

from roundoff.compare.judging.table import (
    FAIL,
    LARGER_IS_BETTER,
    PASS,
    TABLE,
    UNDECIDED,
    ComparedRow,
    frame_of,
    judged,
    rows_in,
    whole,
)
from roundoff.errors import RunError


def compared(**columns):
    return ComparedRow(**{"status": "matched", **columns})


def verdict(limits=None, margin=1.0, **row):
    table = whole([frame_of([compared(**{"record": 0, **row})])])
    return judged(table, limits or {}, margin)["verdict"][0]


INF = math.inf


@pytest.mark.parametrize(
    ("row", "margin", "expected"),
    [
        ({"error": 0.5, "tolerance": 1e-6, "cause": "own"}, 1, FAIL),
        ({"error": 0.5, "tolerance": 1e-6, "cause": "inherited"}, 1, FAIL),
        (
            {"error": 0.5, "tolerance": 1e-6},
            1,
            PASS,
        ),  # rounding explains it: its inputs differ, or terms cancel
        (
            {"error": 1e-7, "tolerance": 1e-6, "cause": "own"},
            1,
            FAIL,
        ),  # another operator, however little comes of it
        ({"error": 1e-7, "tolerance": 1e-6, "cause": "inherited"}, 1, PASS),
        (
            {"error": 1e-6, "tolerance": 1e-6, "cause": "inherited"},
            1,
            PASS,
        ),  # at the bound is within
        (
            {"error": 1e-5, "tolerance": 1e-6, "cause": "own"},
            100,
            PASS,
        ),  # asked to look away
        ({"error": 1e-3, "tolerance": 1e-6, "cause": "own"}, 100, FAIL),
        ({"error": 1e-7, "tolerance": 1e-6, "cause": "inherited"}, 0.01, FAIL),
        ({"error": INF, "tolerance": 1e-6, "cause": "own"}, 1e12, FAIL),
        ({"error": INF, "tolerance": 0.0, "cause": "own"}, 1, FAIL),
        ({"error": 0.0, "equal": True}, 1, PASS),
        (
            {"error": None, "cause": None, "reason": "no statistics on both sides"},
            1,
            UNDECIDED,
        ),
        ({"error": None, "status": "only in candidate"}, 1, UNDECIDED),
        (
            {"error": None, "tolerance": 1e-6, "cause": "own"},
            1,
            FAIL,
        ),  # an argument differs, its values were not recorded
    ],
)
def test_derived_verdicts(row, margin, expected):
    assert verdict(margin=margin, **row) == expected


@pytest.mark.parametrize(
    ("limits", "row", "expected"),
    [
        ({"cosine": 0.98}, {"cosine": 0.97}, FAIL),
        ({"cosine": 0.98}, {"cosine": 0.98}, PASS),
        ({"cosine": 0.98}, {"cosine": None}, UNDECIDED),
        (
            {"cosine": 0.98},
            {"cosine": None, "equal": True},
            PASS,
        ),  # both zero: there is no angle, and no difference
        ({"max_abs": 1e-3}, {"max_abs": 1e-2}, FAIL),
        ({"max_abs": 1e-3}, {"max_abs": 1e-3}, PASS),
        ({"max_abs": 0.0}, {"max_abs": 0.0}, PASS),
        ({"max_abs": 1e9}, {"max_abs": INF}, FAIL),
        ({"sqnr_db": 40}, {"sqnr_db": INF}, PASS),
        ({"sqnr_db": 40}, {"sqnr_db": 39.9}, FAIL),
        ({"share_equal": 1.0}, {"share_equal": 0.5}, FAIL),
        ({"ulp_max": 1}, {"ulp_max": 2.0}, FAIL),
        # each of them has to be kept; one that is broken decides, one that is unknown leaves it open
        ({"cosine": 0.9, "max_abs": 1.0}, {"cosine": 0.95, "max_abs": 2.0}, FAIL),
        ({"cosine": 0.9, "max_abs": 1.0}, {"cosine": 0.95, "max_abs": 0.5}, PASS),
        ({"cosine": 0.9, "max_abs": 1.0}, {"cosine": 0.95}, UNDECIDED),
        ({"cosine": 0.9, "max_abs": 1.0}, {"cosine": 0.5}, FAIL),
        # the derived verdict does not count
        ({"error": 1.0}, {"error": 0.5, "tolerance": 1e-6, "cause": "own"}, PASS),
    ],
)
def test_verdicts_by_limits(limits, row, expected):
    assert verdict(limits, **row) == expected


def test_every_limit_has_a_side_to_fail_on():
    for name, larger_is_better in LARGER_IS_BETTER.items():
        assert TABLE[name] == pl.Float64
        assert [verdict({name: 0.5}, **{name: v}) for v in (0.4, 0.6)] == (
            [FAIL, PASS] if larger_is_better else [PASS, FAIL]
        )


def test_the_own_error_keeps_its_column():
    row = ComparedRow(status="matched", own_error=0.5)
    table = whole([frame_of([row])])
    assert table["own"].to_list() == [0.5]
    assert "own_error" not in TABLE
    [judged_row] = rows_in(judged(table, {}))
    assert judged_row.own_error == 0.5


def test_a_metric_that_is_none():
    with pytest.raises(RunError) as caught:
        judged(whole([]), {"cosinus": 0.9})
    assert str(caught.value).splitlines()[0] == "cosinus: there is no such metric"
    assert "expected: cosine, sqnr_db, share_equal, error" in str(caught.value)


def test_judging_keeps_the_table():
    table = whole([frame_of([compared(record=3, error=1.0)])])
    again = judged(judged(table, {}).drop("verdict"), {"error": 0.5})
    assert again.drop("verdict").equals(table)
    assert again["verdict"].to_list() == [FAIL]


def test_frames():
    frame = frame_of(
        [
            compared(record=1, error=math.inf, shape=[2, 3]),
            compared(record=2, site="a/mm", cosine=None),
        ]
    )
    assert frame.columns == ["site", "record", "status", "shape", "error"]
    assert frame.rows() == [
        (None, 1, "matched", [2, 3], math.inf),
        ("a/mm", 2, "matched", None, None),
    ]
    assert frame_of([]).shape == (0, 0)
    table = whole([frame, frame_of([compared(rank=1, worst_index=[0])])])
    assert dict(table.schema) == TABLE
    assert table["record"].to_list() == [1, 2, None]
    assert table["rank"].to_list() == [None, None, 1]
    for empty in (whole([]), whole([frame_of([])])):
        assert (dict(empty.schema), empty.height) == (TABLE, 0)
        assert judged(empty, {})["verdict"].to_list() == []
