"""The page of ``roundoff compare``."""

from __future__ import annotations

import math
import os
from collections.abc import Mapping
from typing import Any

from roundoff.report import comparison_answer, comparison_text, figures, run_text
from roundoff.report.comparison_chart import error_chart
from roundoff.report.page import Mark, Page

Row = Mapping[str, Any]


def write_comparison(data: Row, path: str | os.PathLike[str]) -> None:
    """Write the page to a path or URL, whole or not at all.

    ``data`` is ``Comparison.to_dict(limit)``; its ``points``, where it has them, are
    drawn. Every name is escaped. Raises ``OutputError`` when it cannot be written.
    """
    page(data).write(path)


def page(data: Row) -> Page:
    """Return the page of a comparison."""
    headline, *sentences = comparison_answer.answer(data)
    return Page(
        template="comparison.html",
        title=f"{data['candidate']} against {data['reference']}",
        headline=headline,
        sentences=sentences,
        mark=_mark(data),
        styles=["comparison.css"],
        script="report.js",
        values={
            "d": data,
            "chart": error_chart(data.get("points") or [], data.get("divergence")),
            "environment": environment(data.get("environment") or {}),
            "bounds": comparison_answer.bounds,
            "called": comparison_answer.called,
            "size": comparison_answer.size,
            "times": comparison_answer.times,
            "label": comparison_text.label,
            "source": comparison_text.source,
            "cosine": comparison_text.cosine,
            "number": run_text.number,
            "shape": run_text.shape,
            "whole": run_text.whole,
            "value": value,
            "percent": figures.percent,
            "db": figures.db,
        },
    )


def _mark(data: Row) -> Mark:
    """Return ``doubt`` for sides that agree although an operator is at fault."""
    if not data["agrees"]:
        return "missed"
    return "doubt" if data["culprits"] else "met"


def environment(both: Row) -> list[dict[str, Any]]:
    """What is known of the environments, a row each, those that differ first.

    >>> environment({"reference": [{"name": "threads", "value": "2", "note": ""}], "candidate": []})
    [{'name': 'threads', 'reference': '2', 'candidate': None, 'note': '', 'differs': True}]
    """
    sides = {
        side: {e["name"]: e for e in both.get(side) or ()}
        for side in ("reference", "candidate")
    }
    ours, theirs = sides["reference"], sides["candidate"]
    rows = [
        {
            "name": name,
            "reference": ours.get(name, {}).get("value"),
            "candidate": theirs.get(name, {}).get("value"),
            "note": (theirs.get(name) or ours[name]).get("note") or "",
        }
        for name in dict.fromkeys([*ours, *theirs])
    ]
    for row in rows:
        row["differs"] = row["reference"] != row["candidate"]
    return sorted(rows, key=lambda row: not row["differs"])


def value(number: float | None) -> str:
    """What a cell is sorted by: empty where nothing is known."""
    if number is None or math.isnan(number):
        return ""
    return (
        "Infinity"
        if number == math.inf
        else "-Infinity"
        if number == -math.inf
        else repr(float(number))
    )
