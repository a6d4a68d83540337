"""What the terminal shows, at 80 and 140 columns and where there is hardly room."""

from __future__ import annotations

import io
import json
import math

import pytest
from rich.console import Console

from roundoff.report import (
    DiagnosisSummary,
    PlanSummary,
    RankingRow,
    VerificationSummary,
    strict,
)
from roundoff.report.answer import NO_SITES
from roundoff.report.strict import from_plain
from roundoff.report.text import print_plan, print_ranking, print_summary, print_verify

KINDS = {
    print_summary: DiagnosisSummary,
    print_plan: PlanSummary,
    print_verify: VerificationSummary,
}


def as_record(function, data):
    if function is print_ranking:
        return [RankingRow(**row) for row in data]
    return from_plain(KINDS[function], data)


def show(function, data, width, **options):
    file = io.StringIO()
    console = Console(width=width, file=file, highlight=False, force_terminal=False)
    function(as_record(function, data), console, **options)
    return file.getvalue()


def words(text):
    return " ".join(text.split())


@pytest.mark.parametrize("width", [72, 80, 100, 140, 240])
def test_no_line_is_wider_and_no_number_is_cut(summary, width):
    text = show(print_summary, summary, width)
    lines = text.splitlines()
    assert max(map(len, lines)) <= width
    for row in summary["ranking"][1:20]:
        start = (f"{row['rank']} ", f"{row['rank']}! ")
        (line,) = [
            li
            for li in lines
            if li.lstrip().startswith(start) and row["format"] in li.split()
        ]
        cells = line.split()
        assert f"{row['sqnr_db']:.1f}" in cells
        assert f"{100 * row['share']:.1f}%" in cells
        parts = [row[key] for key in ("activation_db", "weight_db", "output_db")]
        shown = ["–" if part is None else f"{part:.1f}" for part in parts]
        if width >= 80:
            assert [*shown, row["chosen"]] == cells[-4:]


@pytest.mark.parametrize("width", [60, 80, 140])
def test_names_wrap_and_are_never_cut(summary, width):
    text = show(print_summary, summary, width)
    assert "…" not in text
    table = text.split("Ranking")[1].split("Plan:")[0]
    # a wrapped name goes on in the lines below, in the same column
    heading = next(li for li in table.splitlines() if " format " in li)
    column = slice(heading.index("site"), heading.index("format"))
    names = "".join(line[column].strip() for line in table.splitlines())
    assert all(row["site"] in names for row in summary["ranking"][:20])


def test_brackets_are_names_and_not_markup(summary):
    summary["ranking"] = [r for r in summary["ranking"] if r["site"].startswith("[")]
    for console in (80, 140):
        assert "[red]heads[/red].[0]/matmul#1" in show(print_summary, summary, console)
    assert "[bias]/add: its result is not used by the output" in show(
        print_summary, summary, 80
    )


@pytest.mark.parametrize("width", [80, 140])
def test_everything_is_said(summary, width):
    text = words(show(print_summary, summary, width))
    for part in (
        "The plan meets the target: 31.3 dB measured, 31.1 dB predicted, 30.0 dB asked",
        "for a drop of spearman by at most 0.5%",
        "costs 31.42 MB, 35.4% of all-fp32; every site in its cheapest format, mostly int8, would cost 27.2%.",
        "spearman: 0.84255 measured, 0.84213 ± 0.001 predicted, 0.84512 before rounding.",
        "The result is not finite with <script>alert('x')&amp;</script>/linear in fp16.",
        "float32 matmul precision: high (fp32 products are computed in fewer bits)",
        "torch: 2.8.0+cpu; subnormals: kept",
        "overflow: 12 elements",
        "220 more rows below.",
        "Plan: 60 sites by 9 rules",
        "all cheapest (mostly int8) 24.1 MB 27.2%",
        "30.6 28.3 30.9 0.8412 0.8377",
        "31.1 31.3 31.4 0.84213 0.84255 accepted",
        "With real casts: 31.2 dB; 22 calls with real casts, 31 simulated.",
        "Coverage: 60 sites from 77 calls, 103 parameters",
        "5 argmax<int> not a site: integer result",
        "Without a path to the output, so in fp32: 2 sites",
        "Seconds: budget 5.3, plan 0.2, verify 3.9",
    ):
        assert part in text


def test_the_answer_comes_before_the_tables(summary):
    text = show(print_summary, summary, 100)
    places = [
        text.index(p)
        for p in (
            "The plan meets",
            "Environment",
            "Ranking",
            "Plan:",
            "Verification",
            "Coverage",
        )
    ]
    assert places == sorted(places)


@pytest.mark.parametrize("top", [1, 5, 240, 1000])
def test_top_is_the_number_of_rows(summary, top):
    text = show(print_ranking, summary["ranking"], 140, top=top)
    table = [
        line
        for line in text.splitlines()
        if line.lstrip(" 0123456789!") != line and not line.startswith("! ")
    ]
    assert len([line for line in table if "/" in line]) == min(top, 240)
    rest = [line for line in text.splitlines() if line.endswith("below.")]
    expected = {1: "239 more rows below.", 5: "235 more rows below."}
    assert rest == ([expected[top]] if top in expected else [])


@pytest.mark.parametrize("width", [20, 40, 60])
def test_where_there_is_no_room_columns_stand_below_and_numbers_stay(summary, width):
    text = show(print_ranking, summary["ranking"], width)
    assert all(heading in text for heading in ("act.", "wt.", "out.", "plan"))
    for row in summary["ranking"][1:20]:
        assert f"{row['sqnr_db']:.1f}" in text.split()
        assert f"{100 * row['share']:.1f}%" in text.split()


def test_an_overflow_is_marked_in_its_row_and_spelled_out_below(summary):
    lines = show(print_ranking, summary["ranking"], 140).splitlines()
    (row,) = [line for line in lines if line.lstrip().startswith("1!")]
    assert "lost" in row.split()
    assert (
        "! 1: <script>alert('x')&amp;</script>/linear in fp16: overflow: 12 elements"
        in lines
    )


def test_one_site_without_a_metric(one_site):
    text = words(show(print_summary, one_site, 80))
    assert "The plan misses the target: 12.3 dB measured, 30.0 dB asked." in text
    assert "1 – 12.3 – target missed" in text
    assert "No site was measured alone." in text
    assert "Plan: 1 site by 9 rules" in text
    assert "spearman" not in text
    assert "None" not in text


def test_no_site_at_all(no_sites):
    text = words(show(print_summary, no_sites, 80))
    assert NO_SITES in text
    assert "Coverage: 0 sites from 17 calls, 0 parameters" in text
    assert "12 view not a site: only moves or" in text
    assert "Ranking" not in text


def test_from_summary_json(summary):
    summary["result"]["measured_db"] = math.inf
    text = show(print_summary, json.loads(json.dumps(strict(summary))), 100)
    assert "– dB measured" in text
    assert "None" not in text


def test_ranking_of_nothing():
    assert "No site was measured in any format." in show(print_ranking, [], 80)


def test_plan_alone(summary):
    text = words(show(print_plan, summary["plan"], 80))
    assert "Predicted 30.6 dB, target 30.0 dB." in text
    assert "int8" in text
    costs = summary["plan"] | {
        "target_db": None,
        "predicted_db": None,
        "note": "the budget allows no more",
    }
    text = words(show(print_plan, costs, 80))
    assert "Predicted" not in text
    assert "About the target: the budget allows no more." in text


def test_verification_alone(summary):
    unknown = dict.fromkeys(
        ["predicted_db", "metric_predicted", "metric_predicted_std"]
    )
    result = summary["result"] | unknown | {"met": False}
    rounds = [
        r | {"predicted_db": None, "additive_db": None, "metric_predicted": None}
        for r in summary["rounds"][:1]
    ]
    text = words(show(print_verify, {"rounds": rounds, "result": result}, 80))
    assert (
        "Target missed: SQNR – dB predicted, 31.3 dB measured (target 30.0 dB)." in text
    )
    assert "spearman: 0.84512 before rounding, – predicted, 0.84255 measured." in text


def test_a_target_missed_by_the_metric_alone_says_so(summary):
    summary["result"] |= {"met": False, "metric_measured": 0.81}
    text = words(show(print_summary, summary, 120))
    assert (
        "The plan misses the target: 31.3 dB measured, 31.1 dB predicted, 30.0 dB asked"
        in text
    )
    assert "but spearman falls to 0.81." in text
