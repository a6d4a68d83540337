"""The page of ``roundoff compare``."""

from __future__ import annotations

import math
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from roundoff.report import comparison_answer, comparison_text, figures, run_text
from roundoff.report.comparison_chart import error_chart
from roundoff.report.page import Mark, Page

if TYPE_CHECKING:
    from roundoff.compare import ComparisonSummary
    from roundoff.record import Setting


def write_comparison(summary: ComparisonSummary, path: str | os.PathLike[str]) -> None:
    """Write the page to a path or URL, whole or not at all.

    The summary's ``points``, where it has them, are drawn. Every name is escaped.
    Raises ``OutputError`` when it cannot be written.
    """
    page(summary).write(path)


def page(summary: ComparisonSummary) -> Page:
    """Return the page of a comparison."""
    headline, *sentences = comparison_answer.answer_comparison(summary)
    about = summary.about
    return Page(
        template="comparison.html",
        title=f"{about.candidate} against {about.reference}",
        headline=headline,
        sentences=sentences,
        mark=_mark(summary),
        styles=["comparison.css"],
        script="report.js",
        values={
            "d": summary,
            "about": about,
            "chart": error_chart(summary.points, summary.divergence),
            "environment": environment(about.environment),
            "bounds": comparison_answer.bounds,
            "called": comparison_answer.called,
            "size": comparison_answer.size,
            "times": comparison_answer.times,
            "label": comparison_text.label,
            "row_label": comparison_text.row_label,
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


def _mark(summary: ComparisonSummary) -> Mark:
    """Return ``doubt`` for sides that agree although an operator is at fault."""
    if not summary.agrees:
        return "missed"
    return "doubt" if summary.culprits else "met"


@dataclass(frozen=True, slots=True)
class SettingOfBoth:
    """One setting of both environments; None where a run does not say."""

    name: str
    reference: str | None
    candidate: str | None
    #: Why it matters.
    note: str

    @property
    def differs(self) -> bool:
        return self.reference != self.candidate


def environment(
    sides: Mapping[str, Sequence[Setting]],
) -> list[SettingOfBoth]:
    """The settings of both runs, those that differ first.

    >>> from roundoff.record import Setting
    >>> environment({"reference": [Setting("threads", "2")]})
    [SettingOfBoth(name='threads', reference='2', candidate=None, note='')]
    """
    ours = {setting.name: setting for setting in sides.get("reference", ())}
    theirs = {setting.name: setting for setting in sides.get("candidate", ())}
    settings = [
        _of_both(name, ours.get(name), theirs.get(name))
        for name in dict.fromkeys([*ours, *theirs])
    ]
    return sorted(settings, key=lambda setting: not setting.differs)


def _of_both(name: str, ours: Setting | None, theirs: Setting | None) -> SettingOfBoth:
    latest = theirs or ours
    return SettingOfBoth(
        name=name,
        reference=ours.value if ours else None,
        candidate=theirs.value if theirs else None,
        note=latest.note if latest else "",
    )


def value(number: float | None) -> str:
    """The text by which a cell is sorted: empty where nothing is known."""
    if number is None or math.isnan(number):
        return ""
    if math.isinf(number):
        return "Infinity" if number > 0 else "-Infinity"
    return repr(float(number))
