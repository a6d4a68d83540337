"""Rows that made an error themselves become operators to name, the likeliest first."""

from __future__ import annotations

import math
import random

import pytest

from roundoff.compare.judging.culprits import culprits
from roundoff.compare.judging.table import ComparedRow


def row(record, blamed="net/mm", **columns):
    usual = {
        "rank": 0,
        "step": 0,
        "record": record,
        "call": record,
        "dtype": "float32",
        "name": None,
        "error": 0.1,
        "own_error": 0.1,
        "inputs_error": 0.0,
        "tolerance": 1e-6,
        "contribution": 0.2,
        "blamed": blamed,
        "blamed_line": "train.py:7",
        "blamed_phase": "forward",
        "blamed_reference": columns.get("blamed_reference", blamed),
        "blamed_reference_line": "train.py:9",
        "looks_like": "noise",
        "evidence": "none",
        "advice": "look",
        "semantic": None,
        "kernel_excess": None,
    }
    return ComparedRow(status="matched", **usual | columns)


def named(rows):
    return [entry.site for entry in culprits(rows)]


def test_nothing_is_nobodys_fault():
    assert culprits([]) == []


def test_an_entry_names_the_operator_the_place_and_what_it_looks_like():
    [entry] = culprits(
        [
            row(
                3,
                "blocks.1.norm/native_layer_norm#2",
                blamed_reference="other/norm",
                semantic=0.1,
            )
        ]
    )
    assert {
        k: getattr(entry, k)
        for k in (
            "site",
            "reference_site",
            "module",
            "operator",
            "phase",
            "line",
            "reference_line",
        )
    } == {
        "site": "blocks.1.norm/native_layer_norm#2",
        "reference_site": "other/norm",
        "module": "blocks.1.norm",
        "operator": "native_layer_norm",
        "phase": "forward",
        "line": "train.py:7",
        "reference_line": "train.py:9",
    }
    assert (
        entry.looks_like,
        entry.evidence,
        entry.advice,
        entry.semantic,
    ) == ("noise", "none", "look", 0.1)
    assert (entry.calls, entry.ranks, entry.steps) == (1, [0], [0])


def test_an_unknown_own_error_is_as_large_as_can_be():
    assert culprits([row(1, own_error=None)])[0].own_error == math.inf


def test_the_first_step_comes_before_what_follows_from_it():
    late = row(1, "late/mm", step=2, contribution=0.9)
    assert named([late, row(9, "early/mm", contribution=0.1)]) == [
        "early/mm",
        "late/mm",
    ]


def test_equal_inputs_come_before_inputs_that_were_off():
    far = row(1, "b/mm", inputs_error=0.01, contribution=0.9)
    assert named([far, row(5, "a/mm", contribution=0.1)]) == ["a/mm", "b/mm"]


def test_then_the_share_of_the_error_at_the_end_then_the_order():
    rows = [
        row(1, "a/mm", contribution=0.2),
        row(2, "b/mm", contribution=0.7),
        row(3, "c/mm", contribution=0.2),
    ]
    assert named(rows) == ["b/mm", "a/mm", "c/mm"]


def test_calls_that_are_handed_the_same_wrong_number_stand_as_they_run():
    wrong = {"looks_like": "wrong constant", "evidence": "index: 4, here 0"}
    rows = [
        row(1, "a/select", contribution=0.1, **wrong),
        row(2, "b/mm", contribution=0.9),
        row(3, "c/select", dtype="bool", blamed_line="train.py:8", **wrong),
        row(
            4, "d/select", contribution=0.3, **wrong | {"evidence": "index: 5, here 1"}
        ),
    ]
    assert named(rows) == ["a/select", "c/select", "b/mm", "d/select"]


@pytest.mark.parametrize("dtype", ["int64", "uint8", "bool"])
def test_integers_choose_what_runs_and_have_no_share(dtype):
    rows = [
        row(5, "a/add", dtype=dtype, contribution=0.0),
        row(1, "b/mm", contribution=0.9),
    ]
    assert named(rows) == ["a/add", "b/mm"]


def test_calls_ranks_and_steps_are_counted_and_shares_of_the_first_step_added():
    later, elsewhere = (
        row(1, step=1, contribution=0.9),
        row(1, rank=3, contribution=0.9),
    )
    [entry] = culprits(
        [row(1, contribution=0.1), row(2, contribution=0.3), later, elsewhere]
    )
    assert (entry.calls, entry.ranks, entry.steps) == (4, [0, 3], [0, 1])
    assert entry.contribution == pytest.approx(0.4)


def test_of_several_results_of_a_call_the_worst_says_what_it_looks_like():
    rows = [
        row(1, own_error=0.1, call=4),
        row(
            2,
            own_error=0.5,
            call=4,
            looks_like="overflow",
            evidence="Inf",
            advice="scale",
        ),
        row(3, own_error=0.9, call=5, looks_like="NaN"),
    ]
    [entry] = culprits(rows)
    assert (entry.looks_like, entry.evidence, entry.advice, entry.own_error) == (
        "overflow",
        "Inf",
        "scale",
        0.5,
    )


def test_the_same_site_in_another_place_of_the_reference_is_another_fault():
    assert (
        len(
            culprits([row(1, blamed_reference="a/mm"), row(2, blamed_reference="b/mm")])
        )
        == 2
    )


def test_a_backward_kernel_belongs_to_its_forward_operator():
    forward = row(1, "act/gelu")
    assert (
        len(
            culprits(
                [
                    forward,
                    row(
                        5,
                        "act/gelu_backward",
                        blamed_phase="backward",
                        blamed_line=None,
                    ),
                ]
            )
        )
        == 1
    )
    assert len(culprits([forward, row(5, "act/mul", blamed_phase="backward")])) == 1, (
        "the same line"
    )
    assert (
        len(
            culprits(
                [
                    forward,
                    row(
                        5, "act/mul", blamed_phase="backward", blamed_line="train.py:8"
                    ),
                ]
            )
        )
        == 2
    )
    assert (
        len(
            culprits(
                [
                    forward,
                    row(
                        5,
                        "other/gelu_backward",
                        blamed_phase="backward",
                        blamed_line=None,
                    ),
                ]
            )
        )
        == 2
    )
    assert (
        len(
            culprits(
                [
                    row(1, "act/gelu", rank=1),
                    row(5, "act/gelu_backward", blamed_phase="backward"),
                ]
            )
        )
        == 2
    )
    unknown = (
        row(1, "act/gelu", blamed_line=None),
        row(5, "act/mul", blamed_phase="backward", blamed_line=None),
    )
    assert len(culprits(unknown)) == 2, "lines that are not known are not the same line"


def test_the_order_of_the_rows_does_not_matter_and_they_stay_as_they_are():
    rows = [
        row(
            i,
            f"m{i % 5}/mm",
            step=i % 3,
            contribution=i / 50,
            inputs_error=float(i % 2),
        )
        for i in range(20)
    ]
    before = list(rows)
    expected = culprits(rows)
    assert rows == before
    draw = random.Random(0)
    for _ in range(5):
        draw.shuffle(rows)
        assert culprits(rows) == expected


def test_a_row_that_names_nothing():
    [entry] = culprits([row(1, None, blamed_line=None)])
    assert (entry.site, entry.module, entry.operator) == (None, "", "")


def test_what_goes_back_through_a_fault_comes_behind_it():
    """The gradient of a loss that is another one differs more than the loss."""
    loss = row(3, "/mean", contribution=0.04)
    back = row(
        5, "/add", contribution=0.9, blamed_phase="backward", blamed_line="train.py:8"
    )
    assert named([loss, back]) == ["/mean", "/add"]


def test_a_by_product_of_the_forward_pass_does_not_hide_a_gradient():
    logged = row(3, "/mean", contribution=0.001)
    back = row(
        5, "/add", contribution=0.9, blamed_phase="backward", blamed_line="train.py:8"
    )
    assert named([logged, back]) == ["/add", "/mean"]


def test_inputs_that_differ_by_less_than_fp64_can_tell_agree():
    first = row(3, "/attention", inputs_error=7e-39, contribution=0.0)
    later = row(4, "/view", inputs_error=0.4, contribution=0.5)
    assert named([first, later]) == ["/attention", "/view"]


def test_a_size_that_follows_from_what_is_chosen_comes_behind_it():
    chosen = row(3, "/where", inputs_error=0.1)
    size = row(5, "/zeros", error=math.inf)
    assert named([chosen, size]) == ["/where", "/zeros"]
    # alone, or before anything else, it is the fault
    assert named([size]) == ["/zeros"]
    assert named([row(2, "/zeros", error=math.inf), chosen]) == ["/zeros", "/where"]


def test_a_draw_of_another_size_follows_from_what_is_wrong_before_it():
    wrong = row(2, "/add", contribution=0.0)
    drawn = row(5, "/randperm", error=math.inf, dtype="int64")
    assert named([wrong, drawn]) == ["/add", "/randperm"]
    assert named([row(1, "/randperm", error=math.inf), wrong])[0] == "/randperm"
