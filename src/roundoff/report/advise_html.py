"""The page of ``roundoff advise``."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING

from roundoff.report import advise_answer, advise_chart
from roundoff.report.page import Page

if TYPE_CHECKING:
    from roundoff.advise import AdviceSummary

#: Rows of the tables of operators.
TOP = 25


def write_advice(summary: AdviceSummary, path: str | os.PathLike[str]) -> None:
    """Write the page of an advice to a path or URL, whole or not at all.

    Raises ``OutputError`` when it cannot be written.
    """
    page(summary).write(path)


def page(summary: AdviceSummary) -> Page:
    """Return the page of an advice."""
    headline, *sentences = advise_answer.answer(summary)
    return Page(
        template="advise.html",
        title=f"Where the time of {summary.workload} goes",
        headline=headline,
        sentences=sentences,
        mark="met" if summary.combination.changes else None,
        styles=["bench.css", "advise.css"],
        values={
            "d": summary,
            "texts": advise_answer,
            "roofline": advise_chart.roofline(summary),
            "top": TOP,
        },
    )
