"""A comparison in the terminal: the answer, the culprits, the rows, coverage. Names are cut in the middle, numbers never."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from rich.console import Console
from rich.text import Text

from roundoff.report.comparison_answer import UNKNOWN, answer, called, size, times
from roundoff.report.figures import NONE, count, db, percent
from roundoff.report.run_text import Columns, number, print_fitting
from roundoff.report.terminal import heading as _heading
from roundoff.report.terminal import print_text as _print
from roundoff.report.terminal import say as _say

Row = Mapping[str, Any]
STYLES = {"fail": "red", "undecided": "yellow"}


def print_comparison(data: Row, console: Console, limit: int = 20) -> None:
    """What ``roundoff compare`` prints of ``Comparison.to_dict()``, with at most ``limit`` culprits and rows.

    A column for which the console is too narrow is left out, and a line says so. ``own`` is the relative error that the
    operator made itself, ``times`` the same in units of what rounding explains.

    >>> print_comparison({"reference": "a", "candidate": "b", "verdicts": {"pass": 2}, "agrees": True, "culprits": [],
    ...                   "rows": [], "coverage": {"rows": 2, "measured": 2, "equal": 2, "status": {"matched": 2}}},
    ...                  Console(width=80))
    a against b
    <BLANKLINE>
    The runs agree: all 2 values are equal, bit for bit. All 2 values have a
    counterpart.
    """
    _say(console, f"{data['reference']} against {data['candidate']}", style="dim")
    console.print()
    verdict, *rest = answer(data)
    colour = (
        "green"
        if data["agrees"] and not data["culprits"]
        else "red"
        if not data["agrees"]
        else "yellow"
    )
    _print(console, Text.assemble((verdict, f"bold {colour}"), " ", " ".join(rest)))
    if data["culprits"]:
        _print_culprits(data["culprits"], console, limit)
    if data["rows"]:
        _print_rows(data, console, limit)
    _print_coverage(data.get("coverage") or {}, console)


def _print_culprits(named: Sequence[Row], console: Console, limit: int) -> None:
    shown = named[:limit]
    _heading(console, "Operators that made an error of their own, likeliest first")
    columns: Columns = {
        "#": [str(i + 1) for i in range(len(shown))],
        "site": [called(c, line=False) for c in shown],
        "phase": [str(c["phase"]) for c in shown],
        "line": [c["line"] or "" for c in shown],
        "step": [str(c["step"]) for c in shown],
        "rank": [str(c["rank"]) for c in shown],
        "own error": [size(c["own"]) for c in shown],
        "times": [times(c["own"], c["tolerance"]) or NONE for c in shown],
        "share": [
            percent(c["contribution"]) if c["contribution"] else NONE for c in shown
        ],
        "looks like": [c["looks_like"] or "" for c in shown],
    }
    for key in ("step", "rank"):
        if len({c[key] for c in shown}) == 1:
            del columns[key]
    print_fitting(
        columns,
        console,
        ("times", "rank", "step", "phase", "share", "looks like", "line"),
    )
    for place, entry in enumerate(shown, 1):
        other = entry.get("reference_site")
        where = (
            f" In the reference: {other}" if other and other != entry["site"] else ""
        )
        where += (
            f" ({entry['reference_line']})"
            if where and entry.get("reference_line")
            else ""
        )
        said = (
            f"{entry['evidence']}."
            if entry.get("evidence") and entry.get("looks_like") != UNKNOWN
            else ""
        )
        if said or where:
            _say(console, f"{place}: {said}{where}".rstrip(), style="dim")
    _more(console, len(named) - len(shown), "more of them", len(named))


def _print_rows(data: Row, console: Console, limit: int) -> None:
    rows = data["rows"][:limit]
    verdicts = data.get("verdicts") or {}
    said = ", ".join(
        f"{verdicts[v]:,} {v}" for v in ("pass", "fail", "undecided") if verdicts.get(v)
    )
    _heading(console, f"Values, those that fail and weigh most first ({said})")
    columns: Columns = {
        "verdict": [r["verdict"] for r in rows],
        "site": [label(r) for r in rows],
        "phase": [r["phase"] or NONE for r in rows],
        "step": [NONE if r["step"] is None else str(r["step"]) for r in rows],
        "rank": [NONE if r["rank"] is None else str(r["rank"]) for r in rows],
        "error": [size(r["error"]) for r in rows],
        "tolerance": [size(r["tolerance"]) for r in rows],
        "cosine": [cosine(r["cosine"]) for r in rows],
        "SQNR": [db(r["sqnr_db"]) for r in rows],
        "ulp max": [number(r["ulp_max"]) for r in rows],
        "status": [r["status"] for r in rows],
        "from": [source(r) for r in rows],
    }
    for name, values in (("step", data.get("steps")), ("rank", data.get("ranks"))):
        if values is not None and len(values) < 2:
            del columns[name]
    for name, key in (
        ("cosine", "cosine"),
        ("SQNR", "sqnr_db"),
        ("ulp max", "ulp_max"),
    ):
        if all(r[key] is None for r in rows):
            del columns[name]
    if all(r["status"] == "matched" for r in rows):
        del columns["status"]
    styles = [STYLES.get(r["verdict"], "") for r in rows]
    print_fitting(
        columns,
        console,
        (
            "ulp max",
            "status",
            "SQNR",
            "cosine",
            "from",
            "phase",
            "tolerance",
            "rank",
            "step",
        ),
        styles,
    )
    every = max(data.get("rows_total", 0), len(data["rows"]))
    _more(console, every - len(rows), "more value", every)


def _print_coverage(covered: Row, console: Console) -> None:
    reasons = covered.get("reasons") or []
    if reasons:
        _heading(
            console, f"Not measured: {count(sum(r['count'] for r in reasons), 'value')}"
        )
        for entry in reasons:
            _say(console, f"{entry['count']:,}: {entry['reason']}")


def _more(console: Console, left: int, what: str, every: int) -> None:
    if left > 0:
        text = f"{left:,} {what}{'s' if left > 1 and what.endswith('value') else ''}"
        _say(console, f"{text} below: -l {every}.", style="dim")


def label(row: Row) -> str:
    """A row by its name: a parameter by its own, an output after the first with its place; one side's site where the other
    has none.

    >>> label({"site": "a/max", "place": 1, "name": None}), label({"site": "a/parameter", "name": "a.w", "call": -1})
    ('a/max[1]', 'a.w')
    """
    site = row["site"] or row.get("reference_site") or f"({row.get('status')})"
    if row.get("name"):
        return (
            str(row["name"]) if (row.get("call") or 0) < 0 else f"{site} {row['name']}"
        )
    return f"{site}[{row['place']}]" if row.get("place") else str(site)


def source(row: Row) -> str:
    """Where a row's error comes from: its own, or the site that it is inherited from."""
    if row.get("cause") == "own":
        return "its own"
    return str(row.get("origin") or "")


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
