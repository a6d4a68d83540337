"""What ``roundoff bench`` prints: the answer, one table, then what has to be known of single configurations."""

from __future__ import annotations

import io
from collections.abc import Mapping
from typing import Any

from rich.console import Console
from rich.text import Text

from roundoff.report import bench_answer as said
from roundoff.report.figures import NONE, count
from roundoff.report.terminal import heading as _heading
from roundoff.report.terminal import print_table as _print_table
from roundoff.report.terminal import print_text as _print
from roundoff.report.terminal import say as _say

Row = Mapping[str, Any]
STYLES = {"different": "yellow", "undecided": "", None: ""}


def print_bench(data: Row, console: Console) -> None:
    """``data`` is ``Bench.summary``. Columns for which the console is too narrow are left out, and a line says so."""
    where = f"{data['device']}, {count(data['threads'], 'thread')}"
    length = f"{count(data['steps'], 'step')}, {count(len(data['seeds']), 'seed')}"
    _say(console, f"{data['workload']}: {length}, {where}", "dim")
    console.print()
    verdict, *rest = said.answer(data)
    bad = any(row["failed"] or row["worse"] for row in data["rows"])
    _print(
        console,
        Text.assemble(
            (verdict, "bold red" if bad else "bold green"), " ", " ".join(rest)
        ),
    )
    console.print()
    rows = data["rows"]
    columns = {
        "configuration": [row["config"] for row in rows],
        "speed": [said.times(row["speed"] and row["speed"]["median"]) for row in rows],
        "quartiles": [said.spread(row["speed"]) for row in rows],
        "by CPU time": [
            said.times(row["cpu"] and row["cpu"]["median"]) for row in rows
        ],
        "memory": [
            said.mebibytes(row["memory"] and row["memory"]["total"]) for row in rows
        ],
        "final loss": [said.value(row["loss"]) for row in rows],
        data["metric"] or "metric": [said.value(row["metric"]) for row in rows],
        "skips": [
            str(row["skips"]) if row["scaled"] and not row["failed"] else NONE
            for row in rows
        ],
        "verdict": [
            "failed" if row["failed"] else row["verdict"] or "reference" for row in rows
        ],
    }
    if data["metric"] is None:
        del columns["metric"]
    if not any(row["scaled"] for row in rows):
        del columns["skips"]
    left_out = []
    for name in ("by CPU time", "quartiles", "memory"):
        if (
            sum(max(map(len, [key, *cells])) + 2 for key, cells in columns.items())
            <= console.width
        ):
            break
        left_out.append(name)
        del columns[name]
    styles = [
        "red" if row["failed"] or row["worse"] else STYLES.get(row["verdict"], "")
        for row in rows
    ]
    _print_table(console, columns, prose=("verdict",), styles=styles)
    if left_out:
        _say(
            console,
            f"Left out at {console.width} columns: {', '.join(left_out)}.",
            style="dim",
        )
    for row in rows:
        lines = details(row)
        if lines:
            _heading(console, row["config"])
            for line in lines:
                _say(console, f"  {line}")
    console.print()
    _say(
        console,
        f"Weights: {data['weights']}. Memory is {data['memory_is']}.",
        style="dim",
    )


def details(row: Row) -> list[str]:
    """Everything about a configuration that the table has no room for."""
    if row["failed"]:
        return [f"failed: {row['failed']}", *row["notes"]]
    judged = [
        f"{key} {text}" for key in ("loss", "metric") if (text := said.seen(row[key]))
    ]
    work = said.formats(row)
    return [*judged, *([work] if work else []), *row["findings"], *row["notes"]]


def as_text(data: Row, width: int = 120) -> str:
    """The same as a string."""
    page = io.StringIO()
    print_bench(data, Console(file=page, width=width))
    return page.getvalue()
