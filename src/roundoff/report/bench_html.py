"""The page of ``roundoff bench``."""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import Any

from roundoff.report import bench_answer, bench_chart, figures
from roundoff.report.bench_text import details
from roundoff.report.page import Page
from roundoff.report.svg import COLOURS

Row = Mapping[str, Any]


def write_bench(data: Row, path: str | os.PathLike[str]) -> None:
    """Write the page of ``Bench.summary`` to a path or URL, whole or not at all.

    Raises ``OutputError`` when it cannot be written.
    """
    page(data).write(path)


def page(data: Row) -> Page:
    """Return the page of ``Bench.summary``."""
    names = list(data["curves"])
    headline, *sentences = bench_answer.answer(data)
    in_doubt = any(row["failed"] or row["worse"] for row in data["rows"])
    configurations = figures.count(len(data["rows"]), "configuration")
    return Page(
        template="bench.html",
        title=f"Training {data['workload']} in {configurations}",
        headline=headline,
        sentences=sentences,
        mark="missed" if in_doubt else "met",
        styles=["bench.css"],
        values={
            "d": data,
            "said": bench_answer,
            "details": details,
            "curves": bench_chart.curves(data),
            "differences": bench_chart.differences(data),
            "colour": lambda name: f"c{names.index(name) % COLOURS}",
        },
    )
