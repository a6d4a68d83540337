"""One self-contained HTML page: no script, style, font or picture from outside, readable without JavaScript."""

from __future__ import annotations

from collections.abc import Mapping
from functools import cache
from pathlib import Path
from typing import Any

from jinja2 import Environment, PackageLoader, StrictUndefined
from markupsafe import Markup

from roundoff.files import atomic_path
from roundoff.report import answer, charts, figures

Row = Mapping[str, Any]

BARS = 10


def write_html(summary: Row, path: str | Path) -> None:
    """Write the report of a summary as one HTML file, whole or not at all.

    ``summary`` is the dict of ``roundoff.diagnose`` or what ``json.load`` reads from ``summary.json``; numbers that
    are None or not finite are shown as such. Every name is escaped. Raises ``OutputError`` when the file cannot be
    written. ``roundoff.report`` has an example.
    """
    page = render(summary)
    with atomic_path(path) as temporary:
        # a file name that isn't UTF-8 has lone surrogates
        temporary.write_text(
            page, encoding="utf-8", errors="xmlcharrefreplace", newline="\n"
        )


def render(summary: Row) -> str:
    """The page as a string."""
    totals = answer.totals(summary)
    shares = [r["share"] for t in totals for r in t.rows if not figures.is_lost(r)]
    sites = {r["site"] for r in summary["ranking"]}
    bars = [
        (
            t,
            charts.share_bars(
                t, summary["formats"], sites, top=BARS, full=max(shares, default=1.0)
            ),
            _covered(t),
        )
        for t in totals
        if t.rows and t.rows[0]["share"] > 0
    ]
    return (
        _templates()
        .get_template("report.html")
        .render(
            s=summary,
            verdict=answer.verdict(summary),
            sentences=answer.answer(summary),
            totals=totals,
            bars=bars,
            scatter=charts.scatter(summary["scatter"], summary["formats"]),
            pareto=charts.pareto(summary),
            agreement=answer.agreement(summary["scatter"]),
            points=answer.comparable(summary["scatter"]),
            colour=lambda name: charts.colour(summary["formats"], name),
            style=_source("report.css"),
            script=_source("report.js"),
        )
    )


def _covered(total: answer.FormatTotal) -> str:
    """How much of a format's noise the bars show."""
    shown = total.rows[:BARS]
    if total.lost:
        return f"{figures.count(len(total.lost), 'site')} of {len(total.rows)} lost"
    share = figures.percent(min(sum(row["share"] for row in shown), 1.0))
    return f"the first {len(shown)} of {figures.count(len(total.rows), 'site')} make {share}"


@cache
def _templates() -> Environment:
    templates = Environment(
        loader=PackageLoader("roundoff.report"),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    templates.filters |= {
        "db": figures.db,
        "stderr": figures.stderr,
        "percent": figures.percent,
        "amount": figures.amount,
        "metric": figures.metric,
        "sqnr": figures.sqnr,
        "order": _order,
        "units": _units,
    }
    templates.globals |= {
        "count": figures.count,
        "ratio": figures.ratio,
        "is_lost": figures.is_lost,
    }
    return templates


def _source(name: str) -> Markup:
    """A style sheet or script of ours, which must not be escaped."""
    loader = _templates().loader
    return (
        Markup("")
        if loader is None
        else Markup(loader.get_source(_templates(), name)[0])
    )


def _order(row: Row) -> str:
    """What a ranking row is sorted by in its SQNR column: lost results below all numbers, exact ones above."""
    if row["sqnr_db"] is not None:
        return repr(float(row["sqnr_db"]))
    return "-Infinity" if figures.is_lost(row) else "Infinity"


def _units(text: str) -> str:
    """A sentence in which no line ends between a number and its unit."""
    return text.replace(" dB", "\N{NO-BREAK SPACE}dB")
