"""What ``roundoff quantize`` made as one self-contained HTML page."""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import Any

from roundoff.files import open_output
from roundoff.report import quantize_answer, quantize_chart
from roundoff.report.html import _source, _templates

Row = Mapping[str, Any]


def write_quantize(data: Row, path: str | os.PathLike[str]) -> None:
    """Write the page of a summary to a path or URL, whole or not at all. Raises ``OutputError`` where it cannot."""
    page = render(data)
    with open_output(path) as temporary:
        # a file name that isn't UTF-8 has lone surrogates
        temporary.write_text(
            page, encoding="utf-8", errors="xmlcharrefreplace", newline="\n"
        )


def render(data: Row) -> str:
    """The page as a string. Every name is escaped."""
    first, *rest = quantize_answer.answer(data)
    return (
        _templates()
        .get_template("quantize.html")
        .render(
            d=data,
            ranked=quantize_answer.ranked(data),
            against=quantize_answer.AGAINST,
            verdict=first,
            sentences=rest,
            said=quantize_answer,
            left=quantize_answer.left(data),
            trials=quantize_answer.trials(data),
            by_size=quantize_chart.tradeoff(data, "bytes"),
            by_work=quantize_chart.tradeoff(data, "work"),
            style=_source("report.css") + _source("quantize.css"),
        )
    )
