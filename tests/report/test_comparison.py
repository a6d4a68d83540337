"""What a comparison says: sentences, tables and the HTML page, from plain data written here."""

from __future__ import annotations

import io
import math
import re
from html.parser import HTMLParser

import pytest
from rich.console import Console

from roundoff.compare import (
    About,
    ChartPoint,
    ComparisonCoverage,
    ComparisonSummary,
    Culprit,
    JudgedRow,
    LabelledValue,
    RoundingContribution,
    ValueDifference,
    ValueSide,
    ValueSides,
)
from roundoff.compare.summary import UnmeasuredCount
from roundoff.errors import OutputError
from roundoff.record import Setting
from roundoff.report import comparison_html
from roundoff.report.comparison_answer import answer_comparison, coverage_sentence
from roundoff.report.comparison_chart import error_chart
from roundoff.report.comparison_html import environment, write_comparison
from roundoff.report.comparison_text import print_comparison
from roundoff.report.diff_text import sentence
from roundoff.report.strict import plain


def culprit(**about):
    usual = {
        "site": "block.0/layer_norm",
        "reference_site": "block.0/layer_norm",
        "module": "block.0",
        "operator": "layer_norm",
        "phase": "forward",
        "line": "net.py:31",
        "reference_line": "net.py:31",
        "rank": 0,
        "step": 2,
        "record": 7,
        "call": 5,
        "dtype": "float32",
        "name": None,
        "error": 0.031,
        "own_error": 0.031,
        "inputs_error": 0.0,
        "tolerance": 2e-6,
        "contribution": 0.96,
        "looks_like": "wrong constant",
        "evidence": "eps: 1e-05, here 0.001",
        "advice": "compare this argument in the two programs",
        "semantic": None,
        "kernel_excess": None,
    }
    return Culprit(**usual | about)


def row(**about):
    usual = {
        "rank": 0,
        "step": 2,
        "phase": "forward",
        "site": "block.0/layer_norm",
        "reference_site": "block.0/layer_norm",
        "place": 0,
        "line": "net.py:31",
        "call": 5,
        "status": "matched",
        "dtype": "float32",
        "reference_dtype": "float32",
        "shape": [4, 8],
        "error": 0.031,
        "tolerance": 2e-6,
        "own_error": 0.031,
        "cause": "own",
        "contribution": 0.96,
        "verdict": "fail",
    }
    return JudgedRow(**usual | about)


LABEL = {
    "site": "block.0/layer_norm",
    "reference_site": "block.0/layer_norm",
    "name": None,
    "call": 5,
    "phase": "forward",
    "line": "net.py:31",
    "rank": 0,
    "step": 2,
    "error": 0.031,
}


def point(**about):
    usual = {"tolerance": 2e-6, "cause": "own", "verdict": "fail"}
    return ChartPoint(**LABEL | usual | about)


def rounding_share(**about):
    usual = {
        "phase": "forward",
        "site": "block.0/layer_norm",
        "reference_site": "block.0/layer_norm",
        "contribution": 0.4,
        "line": "net.py:31",
        "step": 2,
        "rank": 0,
        "dtype": "float32",
        "record": 7,
        "own_error": 1e-7,
        "error": 1e-7,
    }
    return RoundingContribution(**usual | about)


ABOUT = ("damage", "notes", "limits", "margin", "kept", "repeats", "verified")


def data(**about):
    first = culprit()
    told = {name: about.pop(name) for name in ABOUT if name in about}
    usual = {
        "about": About(reference="runs/a", candidate="runs/b", **told),
        "agrees": False,
        "verdicts": {"pass": 9, "fail": 3, "undecided": 1},
        "divergence": first,
        "culprits": [first],
        "inherited": 2,
        "coverage": ComparisonCoverage(
            rows=13, status={"matched": 13}, measured=12, equal=8
        ),
        "rows": [row()],
        "steps": [2],
        "ranks": [0],
        "rows_total": 13,
    }
    return ComparisonSummary(**usual | about)


def agreed(**about):
    return data(
        agrees=True,
        verdicts={"pass": 12, "undecided": 1},
        divergence=None,
        culprits=[],
        inherited=0,
        rows=[],
        **about,
    )


def test_where_the_runs_part():
    assert answer_comparison(data()) == [
        # 0.031 / 2e-6 = 15500
        "The runs part at block.0/layer_norm (net.py:31), step 2, in the forward pass: its inputs are equal to the "
        "reference's, its output is 3.1e-02 off, 1.6e+04 times what rounding explains.",
        "It looks like a wrong constant: eps: 1e-05, here 0.001.",
        "It makes 96.0% of the error at the end of the step.",
        "2 other values only inherit it.",
        "Try: compare this argument in the two programs.",
        "All 13 values have a counterpart.",
    ]


@pytest.mark.parametrize(
    ("about", "words"),
    [
        (
            {"error": math.inf},
            "its output is not finite where the reference's is, or of another shape.",
        ),
        ({"inputs_error": 1e-6}, "its inputs agree with the reference's, its"),
        ({"inputs_error": 0.5}, "its inputs are 5.0e-01 off already, its"),
        (
            {"call": -1, "name": "low.weight"},
            "The runs differ before anything ran: low.weight (net.py:31), step 2, is 3.1e-02",
        ),
        (
            {"name": "low.weight", "phase": "optimizer"},
            "part at block.0/layer_norm of low.weight (net.py:31), step 2, in the opt",
        ),
        ({"reference_site": "b/rms"}, "In the reference this is b/rms (net.py:31)."),
        ({"tolerance": 0.0}, "its output is 3.1e-02 off."),
        (
            {"looks_like": "gradient cut"},
            "in the gradient that passes block.0/layer_norm (net.py:31), step 2: it is",
        ),
    ],
)
def test_other_partings(about, words):
    first = culprit(**about)
    assert words in " ".join(
        answer_comparison(data(divergence=first, culprits=[first]))
    )


def test_a_fault_within_rounding_is_still_told():
    first = culprit(error=1e-6)
    said = answer_comparison(data(agrees=True, divergence=first, culprits=[first]))
    assert said[0].startswith(
        "The values agree within what rounding explains, the programs do not: block.0/layer_norm (net.py:31)"
    )


def test_agreement_equal_near_and_unknown():
    assert answer_comparison(agreed())[0] == (
        "The runs agree: 8 of 12 values are equal, and every difference is within what rounding explains."
    )
    every = ComparisonCoverage(rows=13, status={"matched": 13}, measured=13, equal=13)
    assert (
        answer_comparison(agreed(coverage=every))[0]
        == "The runs agree: all 13 values are equal, bit for bit."
    )
    assert (
        answer_comparison(agreed(coverage=every, tensors=False))[0]
        == "The runs agree: all 13 values are equal, by their statistics."
    )
    none = ComparisonCoverage(rows=13, status={"matched": 13}, measured=0, equal=0)
    assert answer_comparison(agreed(coverage=none))[0].startswith(
        "Nothing could be compared"
    )


def test_rounding_is_named_where_nothing_fails():
    said = answer_comparison(
        agreed(
            rounding=[
                rounding_share(contribution=0.4),
                rounding_share(site="head/mm", line=None, contribution=0.25),
            ]
        )
    )
    assert (
        "Most of the difference comes from the rounding of block.0/layer_norm (net.py:31) (40.0%) and head/mm (25.0%)."
        in said
    )


def test_further_culprits_damage_notes_and_limits():
    more = [
        culprit(site=f"m{i}/mm", record=20 + i, contribution=0.01, line=None)
        for i in range(5)
    ]
    said = " ".join(
        answer_comparison(
            data(
                culprits=[culprit(), *more],
                damage=["step000003: other bytes"],
                notes=["Only b has step 9"],
                limits={"cosine": 0.98},
                first=LabelledValue(**LABEL),
            )
        )
    )
    one = "[1.0%, wrong constant]"
    for part in (
        "Asked for cosine at least 0.98: 3 of 12 values do not keep to it; the first is block.0/layer_norm (net.py:31). The",
        f"m0/mm {one}, m1/mm {one} and m2/mm {one} and 2 more make errors of their own too.",
        "Damaged and left out: step000003: other bytes.",
        "Only b has step 9.",
    ):
        assert part in said


def test_a_margin_is_said():
    said = answer_comparison(data(agrees=True, verdicts={"pass": 12}, margin=50.0))
    assert (
        said[0]
        == "Asked for at most 50 times what rounding explains: all 12 values that could be judged keep to it."
    )
    assert said[1].startswith("The runs part at block.0/layer_norm")


def test_statistics_say_what_they_leave_open():
    kept = {"reference": "tensors", "candidate": "stats"}
    assert (
        "This is from statistics alone (the candidate did not keep tensors)."
        in " ".join(answer_comparison(data(tensors=False, kept=kept)))
    )
    computed = " ".join(answer_comparison(data(tensors=True, kept=kept)))
    assert "statistics alone" not in computed
    assert "Tensors that were not kept were computed again" in computed
    both = dict.fromkeys(kept, "tensors")
    assert "statistics" not in " ".join(
        answer_comparison(data(tensors=True, kept=both))
    )


def test_coverage_counts_each_value_once():
    status = {
        "matched": 8,
        "by use": 2,
        "only in reference": 1,
        "only in candidate": 3,
        "damaged": 1,
    }
    reasons = [
        UnmeasuredCount("sparse", 2),
        UnmeasuredCount("the reference has no such call", 3),
    ]
    found = coverage_sentence(
        ComparisonCoverage(rows=15, status=status, measured=10, reasons=reasons)
    )
    assert found == (
        "8 of 15 values have a counterpart by name or structure, 2 by use; 1 is only in the reference; 3 are only in the "
        "candidate; 1 step could not be read; 2 could not be measured: sparse."
    )
    reasons += [UnmeasuredCount(f"reason {n}", 5 - n) for n in range(4)]
    found = coverage_sentence(
        ComparisonCoverage(rows=15, status=status, measured=10, reasons=reasons)
    )
    told = "16 could not be measured: sparse (2), reason 0 (5), reason 1 (4)."
    assert found.endswith(told)
    assert (
        coverage_sentence(ComparisonCoverage()) == "Neither run has a value to compare."
    )


@pytest.mark.parametrize("width", [40, 60, 80, 100, 140])
def test_the_terminal_fits(width):
    out = io.StringIO()
    print_comparison(
        data(
            rows=[
                row(),
                row(
                    site="a.very.long.path." * 4 + "/mm",
                    cause="inherited",
                    origin="b/mm",
                ),
            ]
        ),
        Console(width=width, file=out),
        5,
    )
    text = out.getvalue()
    assert width < 60 or max(len(line.rstrip()) for line in text.splitlines()) <= width
    assert (
        text.index("The runs part")
        < text.index("likeliest first")
        < text.index("Values, those")
    )
    assert "3.1e-02" in text.split("likeliest first")[1]


class Page(HTMLParser):
    def __init__(self, text):
        super().__init__()
        self.tags, self.words = [], ""
        self.feed(text)

    def handle_starttag(self, tag, attrs):
        self.tags.append((tag, dict(attrs)))

    def handle_data(self, text):
        self.words += text


def points(n):
    return [
        point(
            at=i,
            error=10.0 ** -(i % 9),
            cause="own" if i == 3 else None,
            verdict="fail" if i > 2 else "pass",
        )
        for i in range(n)
    ]


def test_the_page_stands_alone():
    evil = culprit(site="<script>alert(1)</script>/mm", evidence="a & b")
    page = Page(
        comparison_html.page(
            data(culprits=[evil], divergence=evil, points=points(20))
        ).render()
    )
    assert "<script>alert(1)</script>/mm" in page.words
    assert [
        a
        for t, a in page.tags
        if t in ("script", "link", "img") and (a.get("src") or a.get("href"))
    ] == []
    assert sum(t == "circle" for t, _ in page.tags) == 20
    assert "None" not in page.words
    assert "nan" not in page.words.lower().split()


def test_the_page_of_nothing_and_of_much():
    bare = ComparisonSummary(
        about=About(reference="a", candidate="b"), agrees=True, verdicts={}
    )
    assert "Nothing could be compared" in comparison_html.page(bare).render()
    rows = [
        row(
            error=math.inf,
            status="only in candidate",
            reference_site=None,
            reason="no such call",
        )
    ] * 2000
    assert (
        comparison_html.page(data(rows=rows)).render().count("<tr data-format") == 2000
    )


def test_write(tmp_path):
    write_comparison(data(), tmp_path / "deep" / "r.html")
    assert (tmp_path / "deep" / "r.html").read_text().startswith("<!doctype html>")
    write_comparison(data(), "memory://reports/r.html")
    (tmp_path / "file").write_text("")
    with pytest.raises(OutputError, match="cannot write here"):
        write_comparison(data(), tmp_path / "file" / "r.html")


def test_the_chart_orders_sizes_and_marks():
    svg = str(
        error_chart(
            [
                point(at=0, error=0.0, cause=None, verdict="pass"),
                point(at=1, error=1e-6, cause=None, verdict="pass"),
                point(at=2, error=1e-2),
                point(at=3, error=math.inf, cause="inherited"),
            ],
            culprit(),
        )
    )
    dots = [
        (kind, float(x), float(y))
        for kind, x, y in re.findall(
            r'<circle class="(\w+)" cx="([\d.]+)" cy="([\d.]+)"', svg
        )
    ]
    assert [kind for kind, _, _ in dots] == [
        "plain",
        "plain",
        "inherited",
        "own",
    ]  # what matters is drawn last
    equal, small, infinite, own = dots
    assert equal[1] < small[1] < own[1] < infinite[1]
    assert infinite[2] < own[2] < small[2] < equal[2]  # y grows downwards
    assert '<text class="note strong"' in svg
    assert str(error_chart([])) == ""


def test_environments_that_differ_come_first():
    one = [
        Setting("torch", "2.6", ""),
        Setting("threads", "1", "sums"),
    ]
    other = [
        Setting("torch", "2.6", ""),
        Setting("threads", "2", "sums"),
    ]
    assert [
        (e.name, e.differs) for e in environment({"reference": one, "candidate": other})
    ] == [
        ("threads", True),
        ("torch", False),
    ]


def side(**about):
    usual = {
        "site": "a/mm",
        "name": None,
        "line": None,
        "phase": "forward",
        "place": 0,
        "operator": "mm",
        "overload": None,
        "dtype": "float32",
        "shape": None,
        "numel": None,
        "record": 0,
        "call": 0,
        "reason": None,
    }
    return ValueSide(**usual | about)


def difference(**about):
    usual = {
        "reference": "runs/a",
        "candidate": "runs/b",
        "asked": "a/mm",
        "rank": 0,
        "step": 0,
        "status": "matched",
        "reason": None,
        "sides": ValueSides(side(), side()),
        "error": 0.1,
        "tolerance": 1e-6,
    }
    return ValueDifference(**usual | about)


@pytest.mark.parametrize(
    ("about", "words"),
    [
        ({"error": None}, "a/mm could not be measured: no statistics on both sides."),
        ({"error": 0.0}, "a/mm is equal in both runs."),
        (
            {"error": 0.02},
            "a/mm is 2.0e-02 off (relative), 2.0e+04 times what rounding explains.",
        ),
        (
            {"error": math.inf},
            "a/mm is not finite where the reference is, or the reverse.",
        ),
        (
            {
                "error": math.inf,
                "sides": ValueSides(side(shape=[2]), side(shape=[3])),
            },
            "a/mm has another shape: 2 in the reference, 3 here.",
        ),
        (
            {
                "sides": ValueSides(None, side()),
                "status": "only in candidate",
                "reason": "no such",
            },
            "a/mm is only in candidate: no such.",
        ),
    ],
)
def test_sentences_of_diff(about, words):
    assert sentence(difference(**about)) == words


def test_the_own_error_keeps_its_key():
    for record in (culprit(), row(), rounding_share()):
        encoded = plain(record)
        assert encoded["own"] == record.own_error
        assert "own_error" not in encoded
