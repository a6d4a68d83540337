"""The operators to name, from rows written by hand: which rows are one fault, and which comes first."""

from __future__ import annotations

import math
import random

import pytest

from roundoff.compare.culprits import culprits


def row(site, record=0, **columns):
    usual = {
        "rank": 0, "step": 0, "record": record, "call": record, "blamed": site, "blamed_reference": site,
        "blamed_phase": "forward", "blamed_line": None, "blamed_reference_line": None, "dtype": "float32", "name": None,
        "error": 0.1, "own": 0.1, "inputs_error": 0.0, "tolerance": 1e-6, "contribution": 0.5, "looks_like": "rounding",
        "evidence": "e", "advice": "a", "semantic": None, "kernel_excess": None,
    }  # fmt: skip
    return usual | columns


def named(*rows):
    return [c["site"] for c in culprits(rows)]


@pytest.mark.parametrize(("first", "second"), [
    ({"contribution": 0.9}, {"contribution": 0.1}),
    ({"step": 0, "contribution": 0.1}, {"step": 1, "contribution": 0.9}),  # a later step goes on from the first
    ({"contribution": 0.1}, {"inputs_error": 1e-5, "contribution": 0.9}),  # its inputs agreed exactly
    ({"inputs_error": 0.3, "contribution": 0.2}, {"inputs_error": 0.1, "contribution": 0.1}),
    ({"dtype": "int64", "contribution": 0.0}, {"contribution": 0.9}),  # an index chooses what runs
    ({"dtype": "bool", "contribution": 0.0}, {"contribution": 0.9}),
    ({"contribution": None, "record": 1}, {"contribution": None, "record": 2}),  # nothing known: the first in order
])  # fmt: skip
def test_which_comes_first(first, second):
    rows = [row("a/mm", **first), row("b/mm", **{"record": 7, **second})]
    assert named(*rows) == named(*rows[::-1]) == ["a/mm", "b/mm"]


def test_one_operator_is_one_entry():
    """Two results of a call, the same call of another rank, and of another step."""
    rows = [
        row("a/norm", 3, contribution=0.2, own=0.1), row("a/norm", 4, call=3, contribution=0.3, own=0.4, looks_like="NaN"),
        row("a/norm", 3, rank=1, contribution=0.9), row("a/norm", 3, step=2, contribution=0.9),
    ]  # fmt: skip
    (entry,) = culprits(rows)
    assert (entry["calls"], entry["ranks"], entry["steps"]) == (4, [0, 1], [0, 2])
    assert (entry["module"], entry["operator"], entry["record"], entry["rank"], entry["step"]) == ("a", "norm", 3, 0, 0)
    # the shares of one step of one rank add up: those of others are of other errors
    assert entry["contribution"] == pytest.approx(0.5, rel=1e-15)
    assert (entry["own"], entry["looks_like"]) == (0.4, "NaN")  # the plainest of its results


def test_forward_and_backward_of_one_operator():
    forward = row("a/gelu", 1, blamed_line="net.py:3")
    backward = row("a/gelu_backward", 9, blamed_phase="backward", blamed_line="net.py:3", contribution=0.1)
    assert named(forward, backward) == ["a/gelu"]
    assert culprits([forward, backward])[0]["contribution"] == pytest.approx(0.6, rel=1e-15)
    assert named(forward, backward | {"blamed_line": None}) == ["a/gelu"]  # by its name
    other = backward | {"blamed": "a/mm", "blamed_line": "net.py:4"}
    assert named(forward, other) == ["a/gelu", "a/mm"]
    assert named(forward, backward | {"rank": 1}) == ["a/gelu", "a/gelu_backward"]
    assert named(backward) == ["a/gelu_backward"]
    assert named(forward, backward | {"blamed": "b/gelu_backward"}) == ["a/gelu", "b/gelu_backward"]


def test_what_has_no_site_or_size():
    (entry,) = culprits([row(None, blamed_reference="a/exp#2", own=None, contribution=None)])
    assert (entry["site"], entry["reference_site"], entry["module"], entry["operator"]) == (None, "a/exp#2", "", "")
    assert (entry["own"], entry["contribution"]) == (math.inf, 0.0)
    assert culprits([row("a.b/mm#3")])[0]["module"] == "a.b"
    assert culprits([row("a.b/mm#3")])[0]["operator"] == "mm"
    assert culprits([]) == []


def test_the_order_of_rows_does_not_matter():
    rng = random.Random(4)
    rows = [row(f"m{rng.randrange(4)}/op{rng.randrange(3)}", i, step=rng.randrange(2), contribution=rng.random(),
                inputs_error=rng.choice([0.0, 0.1])) for i in range(30)]  # fmt: skip
    expected = culprits(rows)
    for _ in range(10):
        rng.shuffle(rows)
        assert culprits(rows) == expected
