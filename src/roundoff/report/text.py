"""What the terminal shows, from 60 columns up: names are cut in the middle where they must be, numbers never."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from typing import Any

from rich import box
from rich.console import Console
from rich.padding import Padding
from rich.table import Table
from rich.text import Text

from roundoff.report import answer, figures
from roundoff.report.figures import NONE, amount, count, db, listing, metric, percent
from roundoff.report.names import elide

Row = Mapping[str, Any]

#: From this many columns on, headings and footnotes are spelled out.
WIDE = 110
SITE_LEAST = 16
EXAMPLES = 10


def print_summary(summary: Row, console: Console, *, top: int = 20) -> None:
    """What ``roundoff diagnose`` shows: the answer, environment, ranked table, plan, verification and coverage.

    ``summary`` is the dict of ``roundoff.diagnose`` (``summary.json``), ``top`` the number of ranked rows. Fits the
    console's width; names may contain brackets. Without any site there are the sentence that says so, the
    environment and the coverage. See ``roundoff.report`` for an example.
    """
    samples = f"{count(summary['probes'], 'probe')}, {count(summary['samples'], 'sample')}"
    _say(console, f"roundoff {summary['version']}: {summary['workload']}, {', '.join(summary['formats'])}; {samples}")
    console.print()
    style = "green" if summary["result"]["met"] else "red"
    for index, sentence in enumerate(answer.answer(summary)):
        _say(console, sentence, style=f"bold {style}" if index == 0 and summary["coverage"]["sites"] else "")
    if summary["target"]["note"]:
        _say(console, f"Target: {summary['target']['note']}.")
    _print_environment(summary["environment"], console)
    if summary["coverage"]["sites"]:
        print_ranking(summary["ranking"], console, top=top)
        print_plan(summary["plan"], console)
        print_verify(summary, console)
        _say(console, answer.agreement(summary["scatter"]))
    _print_coverage(summary["coverage"], console)
    seconds = summary["seconds"]
    _say(console, "Seconds: " + ", ".join(f"{name} {value:.1f}" for name, value in seconds.items()), style="dim")


def print_ranking(rows: Sequence[Row], console: Console, *, top: int = 20) -> None:
    """The ranked table, site by format, worst first: SQNR in dB with standard error, share of the noise, own parts.

    ``share`` is of the noise with every site in that format. A part without a number (–) does not apply or makes no
    error; SQNR reads ``exact`` where rounding changes nothing and ``lost`` where the result is not finite. Where the
    console is too narrow, own parts and then the plan's format are left out, and a line says so.

    >>> row = {"rank": 1, "site": "head/linear", "operator": "linear", "kind": "linear", "format": "int8",
    ...        "sqnr_db": 31.26, "stderr_db": 0.4, "share": 0.5, "activation_db": 33.1, "weight_db": 35.9,
    ...        "output_db": None, "chosen": "int8", "note": ""}
    >>> print_ranking([row], Console(width=80))
    <BLANKLINE>
    Ranking: what the rounding of each site costs the output
    #   site          format   SQNR     ±   noise   act.    wt.   out.   plan
    ──────────────────────────────────────────────────────────────────────────
    1   head/linear   int8     31.3   0.4   50.0%   33.1   35.9      –   int8
    """
    _heading(console, "Ranking: what the rounding of each site costs the output")
    if not rows:
        _say(console, "No site was measured in any format.")
        return
    shown = rows[:top]
    table, left_out = _ranking_table(shown, {row["site"] for row in rows}, console.width)
    console.print(table)
    for row in shown:
        if row["note"] not in ("", "exact"):
            _say(console, f"! {row['rank']}: {row['site']} in {row['format']}: {row['note']}", style="yellow")
    if left_out:
        _say(console, f"Left out at {console.width} columns: {listing(left_out)}.", style="dim")
    if len(rows) > len(shown):
        _say(console, f"{len(rows) - len(shown):,} more rows below these {len(shown)} (--top).", style="dim")


def _ranking_table(rows: Sequence[Row], sites: Collection[str], width: int) -> tuple[Table, list[str]]:
    """The table, with the site column as wide as the numbers leave it, and what had to be left out."""
    wide = width >= WIDE
    gap = 3 if wide else 1
    names = ("activation", "weight", "output") if wide else ("act.", "wt.", "out.")
    columns = {
        "#": [f"{row['rank']}{'!' if row['note'] not in ('', 'exact') else ''}" for row in rows],
        "format": [row["format"] for row in rows],
        "SQNR dB" if wide else "SQNR": [figures.sqnr(row) for row in rows],
        "±": [figures.stderr(row["stderr_db"]) for row in rows],
        "share of noise" if wide else "noise": [percent(row["share"]) for row in rows],
        **{n: [db(row[f"{p}_db"]) for row in rows] for n, p in zip(names, PARTS, strict=True)},
        "plan": [row["chosen"] for row in rows],
    }
    left_out = []
    for group, label in ((names, "own parts (activation, weight, output)"), (("plan",), "the plan's format")):
        if _site_width(columns, gap, width) < SITE_LEAST:
            columns = {name: cells for name, cells in columns.items() if name not in group}
            left_out.append(label)
    longest = max(len(row["site"]) for row in rows)
    room = max(_site_width(columns, gap, width), 3)
    if longest < room:
        gap = 3 if _site_width(columns, 3, width) >= longest else gap
    table = Table(box=box.SIMPLE_HEAD, padding=(0, gap, 0, 0), pad_edge=False, show_edge=False, collapse_padding=True)
    table = _plain_table(gap)
    cells = {"#": columns.pop("#"), "site": [elide(row["site"], room, sites) for row in rows], **columns}
    for name in cells:
        table.add_column(name, justify="left" if name in ("site", "format", "plan") else "right", no_wrap=True)
    for row, values in zip(rows, zip(*cells.values(), strict=True), strict=True):
        style = "bold" if row["format"] == row["chosen"] else ""
        table.add_row(*(Text(value) for value in values), style=style)
    return table, left_out
