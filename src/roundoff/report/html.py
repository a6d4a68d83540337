"""The report of ``roundoff diagnose`` as one HTML page."""

from __future__ import annotations

import os
from collections.abc import Sequence

from markupsafe import Markup

from roundoff.report import answer, charts
from roundoff.report.answer import FormatTotal, totals_sentences
from roundoff.report.diagnosis import DiagnosisSummary
from roundoff.report.figures import count, percent
from roundoff.report.output_columns import output_columns, together
from roundoff.report.page import Mark, Page

#: Bars drawn for one format.
BARS = 10


def write_html(summary: DiagnosisSummary, path: str | os.PathLike[str]) -> None:
    """Write the report of a summary as one HTML file, whole or not at all.

    Numbers that are None or not finite are shown as such. Every name is escaped. Raises
    ``OutputError`` when the file cannot be written. ``roundoff.report`` has an example.
    """
    page(summary).write(path)


def page(summary: DiagnosisSummary) -> Page:
    """Return the page of a summary."""
    sentences = answer.answer_diagnosis(summary)
    mark: Mark = "met" if summary.result.met else "missed"
    totals = answer.totals(summary.formats, summary.ranking)
    return Page(
        template="report.html",
        title=f"{summary.workload}: error budget",
        headline=answer.verdict(summary),
        # without a site the only sentence is not the verdict
        sentences=sentences[1:] if summary.has_sites else sentences,
        mark=mark if summary.has_sites else None,
        script="report.js",
        values={
            "s": summary,
            "totals": totals,
            "bars": _bars(summary, totals),
            "scatter": charts.scatter(summary.scatter, summary.formats),
            "pareto": charts.pareto(summary),
            "every_call": answer.every_call(summary.coverage),
            "outputs": output_columns(summary.result.outputs),
            "together": [
                *(totals_sentences(summary) if summary.totals else ()),
                *together(summary.result.outputs),
            ],
            "agreement": answer.agreement(summary.scatter),
            "points": answer.comparable(summary.scatter),
            "colour": lambda name: charts.colour(summary.formats, name),
        },
    )


def _bars(
    summary: DiagnosisSummary, totals: Sequence[FormatTotal]
) -> list[tuple[FormatTotal, Markup, str]]:
    """Return total, bars and caption of each format that makes noise.

    All bars have one scale.
    """
    shares = [row.share for row in summary.ranking if not row.is_lost]
    largest = max(shares, default=1.0)
    sites = {row.site for row in summary.ranking}
    noisy = [total for total in totals if total.rows and total.rows[0].share > 0]

    def bars(total: FormatTotal) -> Markup:
        formats = summary.formats
        return charts.share_bars(total, formats, sites, top=BARS, full=largest)

    return [(total, bars(total), _covered(total)) for total in noisy]


def _covered(total: FormatTotal) -> str:
    """Say how much of a format's noise the bars show."""
    if total.lost:
        return f"{count(len(total.lost), 'site')} of {len(total.rows)} lost"
    shown = total.rows[:BARS]
    share = percent(min(sum(row.share for row in shown), 1.0))
    return f"the first {len(shown)} of {count(len(total.rows), 'site')} make {share}"
