"""The page of ``roundoff bench``."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING

from roundoff.report import bench_answer, bench_chart, figures
from roundoff.report.bench_text import details
from roundoff.report.page import Page
from roundoff.report.svg import COLOURS

if TYPE_CHECKING:
    from roundoff.train import BenchSummary


def write_bench(summary: BenchSummary, path: str | os.PathLike[str]) -> None:
    """Write the page of a bench to a path or URL, whole or not at all.

    Raises ``OutputError`` when it cannot be written.
    """
    page(summary).write(path)


def page(summary: BenchSummary) -> Page:
    """Return the page of a bench."""
    names = list(summary.curves)
    headline, *sentences = bench_answer.answer(summary)
    configurations = figures.count(len(summary.rows), "configuration")
    return Page(
        template="bench.html",
        title=f"Training {summary.workload} in {configurations}",
        headline=headline,
        sentences=sentences,
        mark="met" if summary.agrees else "missed",
        styles=["bench.css"],
        values={
            "d": summary,
            "texts": bench_answer,
            "details": details,
            "curves": bench_chart.curves(summary),
            "differences": bench_chart.differences(summary),
            "colour": lambda name: f"c{names.index(name) % COLOURS}",
        },
    )
