"""The answer of ``roundoff advise`` in the terminal."""

from __future__ import annotations

import io
from collections.abc import Sequence
from typing import TYPE_CHECKING

from rich.console import Console

from roundoff.report.advise_answer import (
    answer,
    bound,
    decibels,
    number,
    seconds_of,
    sentence,
    speed_of,
    spread_of,
    title_of,
)
from roundoff.report.bench_answer import times
from roundoff.report.figures import NONE, count, percent
from roundoff.report.terminal import HarmlessConsole, heading, print_table, say

if TYPE_CHECKING:
    from roundoff.advise import AdviceRow, AdviceSummary

TOP = 12


def print_advice(summary: AdviceSummary, console: Console, *, rows: int = TOP) -> None:
    """Print what ``roundoff advise`` shows: the answer, the advice, the operators."""
    kind = "training steps" if summary.train else "forward passes"
    threads = count(summary.roofline.threads, "thread")
    say(
        console,
        f"roundoff advise: {summary.workload}, {kind} on {summary.device}, {threads}",
    )
    console.print()
    for line in answer(summary):
        say(console, line)
    _print_rows(summary.rows, console)
    _print_operators(summary, console, rows)
    _print_times(summary, console, rows)
    _print_unknown(summary, console)


def advice_as_text(summary: AdviceSummary) -> str:
    """Return the same as text, 110 columns wide."""
    console = HarmlessConsole(file=io.StringIO(), width=110)
    print_advice(summary, console)
    text: str = console.file.getvalue()  # type: ignore[attr-defined]
    return text


def _print_rows(rows: Sequence[AdviceRow], console: Console) -> None:
    heading(console, "Advice, each tried here: speed and what it costs in precision")
    if not rows:
        say(console, "No rule applies to this workload.")
        return
    print_table(
        console,
        {
            "what": [title_of(row.name) for row in rows],
            "speed": [speed_of(row.speed) for row in rows],
            "of": [row.of if row.speed else NONE for row in rows],
            "quartiles": [spread_of(row.speed) for row in rows],
            "on top": [speed_of(row.on_top) for row in rows],
            "step": [times(row.step_speed) for row in rows],
            "SQNR dB": [decibels(row) for row in rows],
            "verdict": [row.verdict for row in rows],
            "at": [row.place for row in rows],
        },
    )
    for row in rows:
        say(console, f"{title_of(row.name)}: {sentence(row)} Do: {row.do}.")


def _print_operators(summary: AdviceSummary, console: Console, limit: int) -> None:
    heading(console, "Work of one step (1 MAC = 2 FLOP)")
    shown = summary.counts.rows[:limit]
    print_table(
        console,
        {
            "operator": [row.operator for row in shown],
            "at": [row.module for row in shown],
            "phase": [row.phase for row in shown],
            "dtype": [row.dtype for row in shown],
            "calls": [f"{row.calls:,}" for row in shown],
            "MACs": [number(row.macs) for row in shown],
            "FLOPs": [number(row.flops) for row in shown],
            "bytes": [number(row.bytes_moved) for row in shown],
            "FLOP/byte": [number(row.intensity) for row in shown],
            "bound by": [bound(row.intensity, summary.roofline) for row in shown],
        },
    )
    hidden = len(summary.counts.rows) - len(shown)
    if hidden:
        say(console, f"{count(hidden, 'more row')}.", style="dim")


def _print_times(summary: AdviceSummary, console: Console, limit: int) -> None:
    heading(console, "Time of one step, by torch.profiler")
    shown = summary.profile.rows[:limit]
    print_table(
        console,
        {
            "operator": [row.operator for row in shown],
            "at": [row.module for row in shown],
            "phase": [row.phase for row in shown],
            "calls": [f"{row.calls:g}" for row in shown],
            "time": [seconds_of(row.seconds) for row in shown],
            "share": [percent(summary.profile.share(row)) for row in shown],
        },
    )


def _print_unknown(summary: AdviceSummary, console: Console) -> None:
    unknown = summary.counts.unknown
    if not unknown:
        return
    names = [f"{row.operator} ({count(row.calls, 'call')})" for row in unknown]
    console.print()
    say(console, f"Without a formula, their FLOPs in no total: {', '.join(names)}.")
