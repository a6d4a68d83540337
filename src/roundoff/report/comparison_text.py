"""A comparison in the terminal: the answer, the culprits, the rows, coverage.

Names are cut in the middle, numbers never.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING

from rich.console import Console
from rich.text import Text

from roundoff.report.comparison_answer import (
    UNKNOWN,
    Labelled,
    answer_comparison,
    called,
    size,
    times,
)
from roundoff.report.figures import NONE, count, db, percent
from roundoff.report.run_text import Columns, number
from roundoff.report.terminal import heading as _heading
from roundoff.report.terminal import print_table
from roundoff.report.terminal import print_text as _print
from roundoff.report.terminal import say as _say

if TYPE_CHECKING:
    from roundoff.compare import (
        ComparisonCoverage,
        ComparisonSummary,
        Culprit,
        JudgedRow,
    )

STYLES = {"fail": "red", "undecided": "yellow"}


def print_comparison(
    summary: ComparisonSummary,
    console: Console,
    limit: int = 20,
) -> None:
    """Print the comparison with at most ``limit`` culprits and rows.

    ``own error`` is the relative error that the operator made itself, ``times`` the
    same in units of what rounding explains.
    """
    about = summary.about
    _say(console, f"{about.reference} against {about.candidate}", style="dim")
    console.print()
    verdict, *sentences = answer_comparison(summary)
    style = f"bold {_colour(summary)}"
    _print(console, Text.assemble((verdict, style), " ", " ".join(sentences)))
    if summary.culprits:
        _print_culprits(summary.culprits, console, limit)
    if summary.rows:
        _print_rows(summary, console, limit)
    _print_reasons(summary.coverage, console)


def _colour(summary: ComparisonSummary) -> str:
    if not summary.agrees:
        return "red"
    return "yellow" if summary.culprits else "green"


def _print_culprits(culprits: Sequence[Culprit], console: Console, limit: int) -> None:
    shown = culprits[:limit]
    _heading(console, "Operators that made an error of their own, likeliest first")
    print_table(console, _culprit_columns(shown))
    for place, culprit in enumerate(shown, 1):
        detail = _detail(culprit)
        if detail:
            _say(console, f"{place}: {detail}", style="dim")
    left = len(culprits) - len(shown)
    if left > 0:
        _say_more(console, f"{left:,} more of them", len(culprits))


def _culprit_columns(culprits: Sequence[Culprit]) -> Columns:
    """The columns of culprits: steps and ranks only where there are several."""
    columns: Columns = {"#": [str(place) for place in range(1, len(culprits) + 1)]}
    for name, cell in _CULPRIT_CELLS.items():
        columns[name] = [cell(culprit) for culprit in culprits]
    for name in ("step", "rank"):
        if len(set(columns[name])) == 1:
            del columns[name]
    return columns


def _share(culprit: Culprit) -> str:
    return percent(culprit.contribution) if culprit.contribution else NONE


#: The columns of culprits after their place, and how a culprit fills each.
_CULPRIT_CELLS: Mapping[str, Callable[[Culprit], str]] = {
    "site": lambda culprit: called(culprit, line=False),
    "phase": lambda culprit: str(culprit.phase),
    "line": lambda culprit: culprit.line or "",
    "step": lambda culprit: str(culprit.step),
    "rank": lambda culprit: str(culprit.rank),
    "own error": lambda culprit: size(culprit.own_error),
    "times": lambda culprit: times(culprit.own_error, culprit.tolerance) or NONE,
    "share": _share,
    "looks like": lambda culprit: culprit.looks_like or "",
}


def _detail(culprit: Culprit) -> str:
    """The evidence, and the operator's name in the reference where it differs."""
    parts = []
    if culprit.evidence and culprit.looks_like != UNKNOWN:
        parts.append(f"{culprit.evidence}.")
    other = culprit.reference_site
    if other and other != culprit.site:
        line = f" ({culprit.reference_line})" if culprit.reference_line else ""
        parts.append(f"In the reference: {other}{line}")
    return " ".join(parts)


def _print_rows(summary: ComparisonSummary, console: Console, limit: int) -> None:
    rows = summary.rows[:limit]
    counts = ", ".join(
        f"{summary.verdicts[verdict]:,} {verdict}"
        for verdict in ("pass", "fail", "undecided")
        if summary.verdicts.get(verdict)
    )
    _heading(console, f"Values, those that fail and weigh most first ({counts})")
    styles = [STYLES.get(row.verdict, "") for row in rows]
    print_table(console, _row_columns(summary, rows), styles=styles)
    every = max(summary.rows_total, len(summary.rows))
    left = every - len(rows)
    if left > 0:
        _say_more(console, count(left, "more value"), every)


#: The columns of compared values, and how a row fills each.
_ROW_CELLS: Mapping[str, Callable[[JudgedRow], str]] = {
    "verdict": lambda row: row.verdict,
    "site": lambda row: row_label(row),
    "phase": lambda row: row.phase or NONE,
    "step": lambda row: _or_none(row.step),
    "rank": lambda row: _or_none(row.rank),
    "error": lambda row: size(row.error),
    "tolerance": lambda row: size(row.tolerance),
    "cosine": lambda row: cosine(row.cosine),
    "SQNR": lambda row: db(row.sqnr_db),
    "ulp max": lambda row: number(row.ulp_max),
    "status": lambda row: row.status,
    "from": lambda row: source(row),
}


def _row_columns(summary: ComparisonSummary, rows: Sequence[JudgedRow]) -> Columns:
    """The columns that say something: not those with one value, or none."""
    columns: Columns = {
        name: [cell(row) for row in rows] for name, cell in _ROW_CELLS.items()
    }
    for name in _silent_columns(summary, columns):
        del columns[name]
    return columns


def _silent_columns(summary: ComparisonSummary, columns: Columns) -> list[str]:
    """The columns that say the same of every row."""
    silent = [
        name for name in ("cosine", "SQNR", "ulp max") if set(columns[name]) == {NONE}
    ]
    if len(summary.steps) < 2:
        silent.append("step")
    if len(summary.ranks) < 2:
        silent.append("rank")
    if set(columns["status"]) == {"matched"}:
        silent.append("status")
    return silent


def _or_none(value: int | None) -> str:
    return NONE if value is None else str(value)


def _print_reasons(coverage: ComparisonCoverage, console: Console) -> None:
    """Print why values were not measured."""
    if not coverage.reasons:
        return
    unmeasured = sum(reason.count for reason in coverage.reasons)
    _heading(console, f"Not measured: {count(unmeasured, 'value')}")
    for reason in coverage.reasons:
        _say(console, f"{reason.count:,}: {reason.reason}")


def _say_more(console: Console, hidden: str, every: int) -> None:
    _say(console, f"{hidden} below: --rows {every}.", style="dim")


def label(value: Labelled) -> str:
    """A value by its name: a parameter by its own, an operator by its site."""
    return value_name(value.site or value.reference_site or "", value.name, value.call)


def row_label(row: JudgedRow) -> str:
    """A row by its name; its status where it stands for a whole rank or step."""
    site = row.site or row.reference_site or f"({row.status})"
    return value_name(site, row.name, row.call, row.place)


def value_name(
    site: str, name: str | None, call: int | None, place: int | None = None
) -> str:
    """A value in a table: an output after the first with its place.

    >>> value_name("a/max", None, 3, 1), value_name("a/parameter", "a.w", -1)
    ('a/max[1]', 'a.w')
    """
    if name:
        return name if (call or 0) < 0 else f"{site} {name}"
    return f"{site}[{place}]" if place else site


def source(row: JudgedRow) -> str:
    """Where a row's error comes from: its own, or the site it is inherited from."""
    return "its own" if row.cause == "own" else row.origin or ""


def cosine(value: float | None) -> str:
    """A cosine with as many digits as tell it from one; ``1`` only where it is.

    >>> cosine(0.98), cosine(1 - 3e-9), cosine(1.0), cosine(None)
    ('0.98000', '1-3e-09', '1', '–')
    """
    if value is None:
        return NONE
    if value == 1:
        return "1"
    return f"1-{1 - value:.0e}" if value > 0.99999 else f"{value:.5f}"
