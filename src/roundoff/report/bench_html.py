"""What ``roundoff bench`` found as one self-contained HTML page."""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import Any

from roundoff.files import open_output
from roundoff.report import bench_answer, bench_chart
from roundoff.report.bench_text import details
from roundoff.report.charts import COLOURS
from roundoff.report.html import _source, _templates

Row = Mapping[str, Any]


def write_bench(data: Row, path: str | os.PathLike[str]) -> None:
    """Write the page of ``Bench.summary`` to a path or URL, whole or not at all. Raises ``OutputError`` where it cannot."""
    page = render(data)
    with open_output(path) as temporary:
        # a file name that isn't UTF-8 has lone surrogates
        temporary.write_text(
            page, encoding="utf-8", errors="xmlcharrefreplace", newline="\n"
        )


def render(data: Row) -> str:
    """The page as a string. Every name is escaped."""
    names = list(data["curves"])
    return (
        _templates()
        .get_template("bench.html")
        .render(
            d=data,
            sentences=bench_answer.answer(data),
            said=bench_answer,
            details=details,
            curves=bench_chart.curves(data),
            differences=bench_chart.differences(data),
            colour=lambda name: f"c{names.index(name) % COLOURS}",
            well=not any(row["failed"] or row["worse"] for row in data["rows"]),
            style=_source("report.css") + _source("bench.css"),
        )
    )
