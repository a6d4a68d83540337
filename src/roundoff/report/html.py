"""The report of ``roundoff diagnose`` as one HTML page."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from typing import Any

from markupsafe import Markup

from roundoff.report import answer, charts, figures
from roundoff.report.page import Mark, Page

Row = Mapping[str, Any]

#: Bars drawn for one format.
BARS = 10


def write_html(summary: Row, path: str | os.PathLike[str]) -> None:
    """Write the report of a summary as one HTML file, whole or not at all.

    ``summary`` is the dict of ``roundoff.diagnose`` or what ``json.load`` reads from
    ``summary.json``; numbers that are None or not finite are shown as such. Every name
    is escaped. Raises ``OutputError`` when the file cannot be written.
    ``roundoff.report`` has an example.
    """
    page(summary).write(path)


def page(summary: Row) -> Page:
    """Return the page of a summary."""
    sentences = answer.answer(summary)
    has_sites = summary["coverage"]["sites"] > 0
    met: Mark = "met" if summary["result"]["met"] else "missed"
    totals = answer.totals(summary)
    points = summary["scatter"]
    return Page(
        template="report.html",
        title=f"{summary['workload']}: error budget",
        headline=answer.verdict(summary),
        # without a site the only sentence is not the verdict
        sentences=sentences[1:] if has_sites else sentences,
        mark=met if has_sites else None,
        script="report.js",
        values={
            "s": summary,
            "totals": totals,
            "bars": _bars(summary, totals),
            "scatter": charts.scatter(points, summary["formats"]),
            "pareto": charts.pareto(summary),
            "agreement": answer.agreement(points),
            "points": answer.comparable(points),
            "colour": lambda name: charts.colour(summary["formats"], name),
        },
    )


def _bars(
    summary: Row, totals: Sequence[answer.FormatTotal]
) -> list[tuple[answer.FormatTotal, Markup, str]]:
    """Return total, bars and caption of each format that makes noise."""
    shares = [_largest_share(total) for total in totals]
    sites = {row["site"] for row in summary["ranking"]}
    return [
        (
            total,
            charts.share_bars(
                total,
                summary["formats"],
                sites,
                top=BARS,
                full=max((s for s in shares if s is not None), default=1.0),
            ),
            _covered(total),
        )
        for total in totals
        if total.rows and total.rows[0]["share"] > 0
    ]


def _largest_share(total: answer.FormatTotal) -> float | None:
    """Return the largest share of a site whose result is finite."""
    shares = [row["share"] for row in total.rows if not figures.is_lost(row)]
    return max(shares, default=None)


def _covered(total: answer.FormatTotal) -> str:
    """Say how much of a format's noise the bars show."""
    sites = figures.count(len(total.rows), "site")
    if total.lost:
        return f"{figures.count(len(total.lost), 'site')} of {len(total.rows)} lost"
    shown = total.rows[:BARS]
    share = figures.percent(min(sum(row["share"] for row in shown), 1.0))
    return f"the first {len(shown)} of {sites} make {share}"
