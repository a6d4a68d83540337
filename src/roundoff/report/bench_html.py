"""The result of ``roundoff bench`` as one self-contained HTML page."""

from __future__ import annotations

import os

from roundoff.files import open_output
from roundoff.report import bench_answer, bench_chart
from roundoff.report.bench_text import details
from roundoff.report.charts import COLOURS
from roundoff.report.html import _source, _templates
from roundoff.train import BenchSummary


def write_bench(summary: BenchSummary, path: str | os.PathLike[str]) -> None:
    """Write the page to a path or URL, whole or not at all.

    Raises ``OutputError`` where it cannot be written.
    """
    page = render(summary)
    with open_output(path) as temporary:
        # a file name that isn't UTF-8 has lone surrogates
        temporary.write_text(
            page, encoding="utf-8", errors="xmlcharrefreplace", newline="\n"
        )


def render(summary: BenchSummary) -> str:
    """Return the page as a string. Every name is escaped."""
    names = list(summary.curves)
    template = _templates().get_template("bench.html")
    return template.render(
        d=summary,
        sentences=bench_answer.answer(summary),
        texts=bench_answer,
        details=details,
        curves=bench_chart.curves(summary),
        differences=bench_chart.differences(summary),
        colour=lambda name: f"c{names.index(name) % COLOURS}",
        well=summary.agrees,
        style=_source("report.css") + _source("bench.css"),
    )
