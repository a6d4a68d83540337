"""What ``roundoff bench`` prints: the answer, one table, then the details of single
configurations.
"""

from __future__ import annotations

import io
from collections.abc import Callable
from typing import TYPE_CHECKING

from rich.console import Console
from rich.text import Text

from roundoff.report import bench_answer as texts
from roundoff.report.figures import NONE, count
from roundoff.report.terminal import heading, print_table, print_text, say

if TYPE_CHECKING:
    from roundoff.train import BenchRow, BenchSummary

STYLES = {"different": "yellow", "undecided": ""}


def print_bench(summary: BenchSummary, console: Console) -> None:
    """Print a bench."""
    _print_header(summary, console)
    columns = _columns(summary)
    styles = [_style(row) for row in summary.rows]
    print_table(console, columns, styles=styles)
    for row in summary.rows:
        lines = details(row)
        if lines:
            heading(console, row.config)
        for line in lines:
            say(console, f"  {line}")
    console.print()
    text = f"Weights: {summary.weights}. Memory is {summary.memory_is}."
    say(console, text, style="dim")


def _print_header(summary: BenchSummary, console: Console) -> None:
    length = f"{count(summary.steps, 'step')}, {count(len(summary.seeds), 'seed')}"
    machine = f"{summary.device}, {count(summary.threads, 'thread')}"
    say(console, f"{summary.workload}: {length}, {machine}", "dim")
    console.print()
    verdict, *sentences = texts.answer(summary)
    style = "bold green" if summary.agrees else "bold red"
    print_text(console, Text.assemble((verdict, style), " ", " ".join(sentences)))
    console.print()


def _columns(summary: BenchSummary) -> dict[str, list[str]]:
    columns: dict[str, Callable[[BenchRow], str]] = {
        "configuration": lambda row: row.config,
        "speed": lambda row: texts.median_ratio(row.speed),
        "quartiles": lambda row: texts.quartiles(row.speed),
        "by CPU time": lambda row: texts.median_ratio(row.cpu),
        "memory": _memory,
        "final loss": lambda row: texts.mean(row.loss),
    }
    if summary.metric is not None:
        columns[summary.metric or "metric"] = lambda row: texts.mean(row.metric)
    if any(row.scaled for row in summary.rows):
        columns["skips"] = _skips
    columns["verdict"] = _verdict
    return {name: list(map(text, summary.rows)) for name, text in columns.items()}


def _memory(row: BenchRow) -> str:
    return texts.mebibytes(None if row.memory is None else row.memory.total)


def _skips(row: BenchRow) -> str:
    return str(row.skips) if row.scaled and not row.failed else NONE


def _verdict(row: BenchRow) -> str:
    return "failed" if row.failed else row.verdict or "reference"


def _style(row: BenchRow) -> str:
    if row.failed or row.worse:
        return "red"
    return STYLES.get(row.verdict or "", "")


def details(row: BenchRow) -> list[str]:
    """List everything about a configuration that the table has no room for."""
    if row.failed:
        return [f"failed: {row.failed}", *row.notes]
    judgements = {
        "loss": texts.judgement(row.loss),
        "metric": texts.judgement(row.metric),
    }
    lines = [f"{name} {text}" for name, text in judgements.items() if text]
    work = texts.formats(row)
    if work:
        lines.append(work)
    return [*lines, *row.findings, *row.notes]


def as_text(summary: BenchSummary, width: int = 120) -> str:
    """Return the same as a string."""
    page = io.StringIO()
    print_bench(summary, Console(file=page, width=width))
    return page.getvalue()
