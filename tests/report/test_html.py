"""report.html: one page, everything in it, nothing from outside, every name escaped."""

from __future__ import annotations

import importlib.resources
import json
import re
from html.parser import HTMLParser

import pytest

from roundoff.report import DiagnosisSummary, strict
from roundoff.report.answer import NO_SITES
from roundoff.report.html import write_html

VOID = {"meta", "input"}
HOSTILE = "<script>alert('x')&amp;</script>/linear"


class Page(HTMLParser):
    """Tags in order, attributes, text, and the cells of each table row."""

    def __init__(self, text):
        super().__init__(convert_charrefs=True)
        self.open, self.tags, self.attributes, self.text, self.rows, self.cell = (
            [],
            [],
            [],
            [],
            [],
            None,
        )
        self.feed(text)
        self.close()

    def handle_starttag(self, tag, attrs):
        self.tags.append(tag)
        self.attributes += [(tag, name, value) for name, value in attrs]
        if tag not in VOID:
            self.open.append(tag)
        if tag == "tr":
            self.rows.append([])
        if tag in ("td", "th"):
            self.cell = []

    def handle_startendtag(self, tag, attrs):
        self.tags.append(tag)
        self.attributes += [(tag, name, value) for name, value in attrs]

    def handle_endtag(self, tag):
        assert self.open.pop() == tag, f"</{tag}> closes something else"
        if tag in ("td", "th"):
            self.rows[-1].append("".join(self.cell).strip())
            self.cell = None

    def handle_data(self, data):
        if self.open and self.open[-1] in ("style", "script"):
            return
        self.text.append(data)
        if self.cell is not None:
            self.cell.append(data)

    @property
    def words(self):
        return " ".join("".join(self.text).split())  # also makes no-break spaces plain


@pytest.fixture
def written(tmp_path):
    def write(summary):
        record = DiagnosisSummary.from_dict(summary)
        write_html(record, tmp_path / "report.html")
        text = (tmp_path / "report.html").read_text(encoding="utf-8")
        page = Page(text)
        assert page.open == []
        return text, page

    return write


def test_the_table_has_every_row_with_its_numbers(summary, written):
    _, page = written(summary)
    rows = [cells for cells in page.rows if len(cells) == 10][1:]  # after the head
    assert len(rows) == 240
    for cells, row in zip(rows, summary["ranking"], strict=True):
        rank, site, fmt, sqnr, stderr, share, activation, weight, output, chosen = cells
        note = "" if row["note"] == "exact" else row["note"]
        assert (rank, fmt, chosen) == (str(row["rank"]), row["format"], row["chosen"])
        assert site == f"{row['site']} {note}".rstrip()
        if row["sqnr_db"] is not None:
            assert sqnr == f"{row['sqnr_db']:.1f}"
            assert float(stderr) == pytest.approx(row["stderr_db"], abs=0.051)
        for shown, key in (
            (activation, "activation_db"),
            (weight, "weight_db"),
            (output, "output_db"),
        ):
            assert shown == ("–" if row[key] is None else f"{row[key]:.1f}")
        if 0.0005 < row["share"] < 0.9995:
            assert share == f"{100 * row['share']:.1f}%"
    assert {r[3] for r in rows if not r[3][0].isdigit()} == {"lost", "exact"}


def test_names_are_escaped_and_only_our_script_runs(summary, written):
    text, page = written(summary)
    assert "<script>alert" not in text
    assert page.tags.count("script") == page.tags.count("style") == 1
    assert HOSTILE in page.words  # as text, exactly
    assert "[red]heads[/red].[0]/matmul#1" in page.words
    assert 'tower["a"].&b/softmax' in page.words
    assert "argmax<int>" in page.words
    assert not [a for a in page.attributes if a[1].startswith("on")]


def test_nothing_comes_from_outside(summary, written):
    text, page = written(summary)
    assert not re.search(r"https?:|url\(|@import|//\w+\.\w", text)
    assert {value for _, name, value in page.attributes if name in ("src", "href")} <= {
        "#noise",
        "#table",
        "#plan",
        "#proof",
        "#coverage",
        "#environment",
        "#reading",
    }
    (policy,) = [
        v
        for tag, n, v in page.attributes
        if tag == "meta" and n == "content" and v.startswith("default-src")
    ]
    assert policy.startswith("default-src 'none'")
    anchors = {value for _, name, value in page.attributes if name == "id"}
    assert {v[1:] for _, n, v in page.attributes if n == "href"} <= anchors


def test_the_answer_stands_first(summary, written):
    _, page = written(summary)
    answer = (
        "The plan meets the target: 31.3 dB measured, 31.1 dB predicted, 30.0 dB asked"
    )
    for part in (
        answer,
        "costs 31.42 MB, 35.4% of all-fp32",
        "spearman: 0.84255 measured, 0.84213 ± 0.001 predicted",
    ):
        assert part in page.words
    assert page.words.index(answer) < page.words.index("Where the noise comes from")


def test_rounds_coverage_and_environment_are_there(summary, written):
    _, page = written(summary)
    assert [
        "1",
        "30.6 dB",
        "28.3 dB",
        "30.9 dB",
        "0.8412",
        "0.8377",
        "linearised again around the rounded model, solved again",
    ] in page.rows
    assert ["5", "argmax<int>", "not a site: integer result", ""] in page.rows
    assert [
        "float32 matmul precision",
        "high",
        "fp32 products are computed in fewer bits",
    ] in page.rows
    assert "pooler/tanh: its result is detached" in page.words
    assert ["all fp32", "88.75 MB", "100%"] in page.rows


def test_it_can_be_read_without_a_mouse_or_a_script(summary, written):
    text, page = written(summary)
    assert '<html lang="en">' in text
    assert page.tags.count("h1") == 1
    assert all(f"<label>{name} <" in text for name in ("Find", "Format"))
    assert page.tags.count("svg") == 6  # four formats, cost, scatter
    assert (
        sum((tag, name) == ("svg", "aria-label") for tag, name, _ in page.attributes)
        == 6
    )
    assert page.attributes.count(("svg", "role", "img")) == 6
    assert (
        "form",
        "hidden",
        None,
    ) in page.attributes  # controls without JavaScript would do nothing
    assert "prefers-color-scheme: dark" in text
    assert "@media print" in text


def test_one_site_without_a_metric(one_site, written):
    text, page = written(one_site)
    assert "The plan misses the target: 12.3 dB measured, 30.0 dB asked." in page.words
    assert "No site was measured alone." in page.words
    assert "No other target was tried." in page.words
    assert "spearman" not in text
    assert 'class="scatter"' not in text


def test_no_site_at_all(no_sites, written):
    text, page = written(no_sites)
    assert NO_SITES in page.words
    assert "only moves or selects elements" in page.words
    assert "svg" not in page.tags
    assert 'id="ranking"' not in text


def test_a_plan_that_is_exact(summary, written):
    for row in summary["rounds"] + [summary["result"]]:
        row |= {"predicted_db": float("inf"), "measured_db": float("inf")}
    _, page = written(summary)
    assert "∞ dB measured, ∞ dB predicted" in page.words


@pytest.mark.parametrize("which", ["summary", "one_site", "no_sites"])
def test_the_page_can_be_made_from_summary_json(which, request, written):
    made = request.getfixturevalue(which)
    made["result"]["measured_db"] = float("nan")
    _, page = written(json.loads(json.dumps(strict(made))))
    assert "nan" not in page.words.lower().split()
    assert "None" not in page.words


def test_templates_are_part_of_the_package():
    names = {
        file.name
        for file in (
            importlib.resources.files("roundoff.report") / "templates"
        ).iterdir()
    }
    pages = {
        "page.html",
        "report.html",
        "comparison.html",
        "bench.html",
        "quantize.html",
        "outputs.html",
        "advise.html",
    }
    assert names == pages | {
        "advise.css",
        "report.css",
        "comparison.css",
        "bench.css",
        "quantize.css",
        "report.js",
    }
