"""The sentences, with totals computed a second time from the noise powers."""

from __future__ import annotations

import math

import pytest

from roundoff.report import DiagnosisSummary, RankingRow, ScatterPoint
from roundoff.report.answer import (
    agreement,
    answer_diagnosis,
    totals,
    totals_sentence,
    worst_sentences,
)


def row(site, fmt, sqnr, share):
    return RankingRow(
        rank=1, site=site, format=fmt, sqnr_db=sqnr, stderr_db=None, share=share
    )


def point(site, fmt, predicted, measured):
    return ScatterPoint(
        site=site, format=fmt, predicted_db=predicted, measured_db=measured
    )


def test_total_of_a_format_is_the_sum_of_its_noise_powers():
    # 1e-3 + 3e-3 = 4e-3
    rows = [
        row("b", "int8", -10 * math.log10(3e-3), 0.75),
        row("a", "int8", 30.0, 0.25),
        row("c", "bf16", None, 0.0),
    ]
    int8, bf16, fp16 = totals(["int8", "bf16", "fp16"], rows)
    # a handful of float64 operations on numbers near 24
    assert int8.sqnr_db == pytest.approx(-10 * math.log10(4e-3), abs=1e-12)
    assert [r.site for r in int8.rows] == ["b", "a"]
    assert (bf16.text, fp16.rows) == ("exact", [])
    assert (
        totals_sentence([int8, bf16, fp16])
        == "With every site in one format: int8 24.0 dB, bf16 exact."
    )


def test_a_lost_site_makes_its_format_not_finite_but_leaves_the_rest_known():
    rows = [row("a", "fp16", None, 1.0), row("b", "fp16", 40.0, 1.0)]
    (fp16,) = totals(["fp16"], rows)
    assert (fp16.text, fp16.sqnr_db) == ("not finite", 40.0)
    assert worst_sentences([fp16]) == [
        "The result is not finite with a in fp16.",
        "In fp16, the coarsest here, the noise comes from b (100%).",
    ]


def test_more_lost_sites_than_are_named():
    lost = totals(["fp16"], [row(name, "fp16", None, 1.0) for name in "abcde"])
    assert worst_sentences(lost) == [
        "The result is not finite with a in fp16, b in fp16 and c in fp16, and 2 more."
    ]


def test_nothing_but_exact_sites():
    exact = totals(["fp64"], [row("a", "fp64", None, 0.0)])
    assert worst_sentences(exact) == [
        "Rounding changes no site in any of these formats."
    ]


def test_a_plan_that_changes_nothing(summary):
    summary["plan"]["sites"] = {"fp32": 60, "int8": 0}
    assert (
        answer_diagnosis(DiagnosisSummary.from_dict(summary))[1]
        == "It leaves all 60 sites in fp32, at 31.42 MB."
    )


def test_a_target_in_decibels_needs_no_explanation(summary):
    summary["target"] |= {"asked": "30dB"}
    assert answer_diagnosis(DiagnosisSummary.from_dict(summary))[0].endswith(
        "30.0 dB asked."
    )


def test_agreement():
    points = [
        point("a", "int8", 30.0, 30.5),
        point("b", "int8", 30.0, 29.0),
        point("c", "bf16", 30.0, 32.5),
        point("d", "bf16", 30.0, None),
    ]
    assert agreement(points) == (
        "3 sites rounded alone: 2 of 3 predictions within 1 dB, median difference 1.0 dB, largest 2.5 dB at c in bf16. "
        "1 point without a finite SQNR left out."
    )
    assert agreement(points[3:]) == agreement([]) == "No site was measured alone."
    # 130 dB for 160 dB predicted: fp32's own rounding is all that was measured
    unresolved = point("e", "fp16", 160.0, 130.0)
    assert agreement([points[0], unresolved]) == (
        "1 site rounded alone: 1 of 1 predictions within 1 dB, median difference 0.5 dB, "
        "largest 0.5 dB at a in int8. "
        "1 point left out: more than 120 dB, below fp32's own rounding."
    )
