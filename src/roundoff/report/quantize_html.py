"""The page of ``roundoff quantize``."""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import Any

from roundoff.report import quantize_answer, quantize_chart
from roundoff.report.page import Mark, Page

Row = Mapping[str, Any]


def write_quantize(data: Row, path: str | os.PathLike[str]) -> None:
    """Write the page of a summary to a path or URL, whole or not at all.

    Raises ``OutputError`` when it cannot be written.
    """
    page(data).write(path)


def page(data: Row) -> Page:
    """Return the page of a summary."""
    headline, *sentences = quantize_answer.answer(data)
    return Page(
        template="quantize.html",
        title=f"{data['workload']} quantized",
        headline=headline,
        sentences=sentences,
        mark=_mark(data),
        styles=["quantize.css"],
        values={
            "d": data,
            "ranked": quantize_answer.ranked(data),
            "against": quantize_answer.AGAINST,
            "said": quantize_answer,
            "left": quantize_answer.left(data),
            "trials": quantize_answer.trials(data),
            "by_size": quantize_chart.tradeoff(data, "bytes"),
            "by_work": quantize_chart.tradeoff(data, "work"),
        },
    )


def _mark(data: Row) -> Mark | None:
    """Return whether the target is met; None where none was asked for."""
    if not data["asked"]["target"]:
        return None
    return "met" if data["result"]["met"] else "missed"
