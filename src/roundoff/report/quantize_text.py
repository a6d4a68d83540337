"""What ``roundoff quantize`` prints: the answer, what was tried, the weakest sites, what stays in fp32, the files."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from rich.console import Console
from rich.text import Text

from roundoff.report import quantize_answer as said
from roundoff.report.figures import NONE, count, db, metric, percent
from roundoff.report.terminal import heading as _heading
from roundoff.report.terminal import print_table as _print_table
from roundoff.report.terminal import print_text as _print
from roundoff.report.terminal import say as _say

Row = Mapping[str, Any]
EXAMPLES = 3


def print_quantize(data: Row, console: Console, *, top: int = 10) -> None:
    """``data`` is ``summary.json``; ``top`` the number of sites shown, worst first."""
    data_from = count(data["calibration"]["samples"], "sample")
    _say(
        console,
        f"roundoff {data['version']}: {data['workload']}, calibrated on {data_from}",
        "dim",
    )
    console.print()
    first, *rest = said.answer(data)
    asked, met = data["asked"]["target"] is not None, data["result"]["met"]
    style = f"bold {'green' if met else 'red'}" if asked else "bold"
    _print(console, Text.assemble((first, style), " ", " ".join(rest)))
    _steps(data, console)
    _trials(data, console)
    _weakest(data, console, top)
    _left(data, console)
    _tradeoff(data, console)
    for line in (
        *data["notes"],
        *(f"record.txt leaves out {line}" for line in data["lost"][:EXAMPLES]),
    ):
        _say(console, f"! {line}", style="yellow")
    if len(data["lost"]) > EXAMPLES:
        _say(
            console,
            f"  and {len(data['lost']) - EXAMPLES} more, in the report",
            style="dim",
        )
    console.print()
    spent = ", ".join(f"{name} {value:.1f}" for name, value in data["seconds"].items())
    _say(console, f"Seconds: {spent}", style="dim")


def print_files(data: Row, folder: str, console: Console) -> None:
    """What was written, and what could not be."""
    _heading(console, f"Written to {folder}")
    _print_table(
        console,
        {
            "file": [f["name"] for f in data["files"]],
            "size": [said.size(f["bytes"]) for f in data["files"]],
            "what": [f["reason"] or f["what"] for f in data["files"]],
        },
        prose={"what"},
    )


def _steps(data: Row, console: Console) -> None:
    if not data["steps"]:
        return
    _heading(console, "Steps: SQNR of the output (dB)")
    _print_table(
        console,
        {
            "step": [s["name"] for s in data["steps"]],
            "before": [db(s["before"]) for s in data["steps"]],
            "after": [db(s["after"]) for s in data["steps"]],
            "note": [s["note"] for s in data["steps"]],
        },
        prose={"note"},
    )


def _trials(data: Row, console: Console) -> None:
    rows = said.trials(data)
    if rows:
        _heading(
            console,
            f"Search for the target: {count(len(rows), 'evaluation')} of the model",
        )
        _print_table(
            console,
            {key: [row[key] for row in rows] for key in rows[0]},
            prose={"formats"},
        )


def _weakest(data: Row, console: Console, top: int) -> None:
    rows = said.weakest(data, top)
    if not rows:
        return
    first = (
        "What costs the output most, as the budget predicts"
        if said.ranked(data)
        else "Furthest from fp32"
    )
    _heading(console, f"{first}; {said.AGAINST}, and of rounding it alone (dB)")
    columns = {"site": [r["site"] for r in rows], "format": [r["format"] for r in rows]}
    if said.ranked(data):
        columns["share"] = [percent(r["share"]) for r in rows]
    columns |= {
        "SQNR": [db(r["sqnr_db"]) for r in rows],
        "own": [db(r["own_db"]) for r in rows],
        "observer": [r["observer"] or NONE for r in rows],
    }
    if data["proof"] is not None:
        columns["codes off"] = [percent(r.get("differing")) for r in rows]
    _print_table(console, columns)


def _left(data: Row, console: Console) -> None:
    cover, rows = data["coverage"], said.left(data)
    parts = [
        f"{cover['quantized']} quantized",
        f"{cover['codes']} on codes",
        f"{cover['fp32']} in fp32",
    ]
    _heading(console, f"Coverage: {count(cover['sites'], 'site')}, {', '.join(parts)}")
    if rows:
        _print_table(
            console,
            {
                "sites": [f"{len(sites):,}" for _, sites in rows],
                "reason": [why for why, _ in rows],
                "for example": [", ".join(sites[:EXAMPLES]) for _, sites in rows],
            },
            prose={"reason", "for example"},
        )
    for row in said.slow(data)[:EXAMPLES]:
        _say(
            console,
            f"! {row['site']} has no integer kernel in ONNX Runtime: {row['kernel_reason']}",
            style="yellow",
        )


def _tradeoff(data: Row, console: Console) -> None:
    rows = data["tradeoff"]
    if not rows:
        return
    name = data["result"]["metric_name"]
    _heading(console, "Each format alone, simulated, beside what was chosen")
    columns = {
        "format": [r["name"] for r in rows],
        "weights": [said.size(r["bytes"]) for r in rows],
        "work": [percent(r["work"]) for r in rows],
        "SQNR": [db(r["db"]) for r in rows],
    }
    if name is not None:
        columns[name] = [metric(r["metric"]) for r in rows]
    if any(r["reason"] for r in rows):
        columns["reason"] = [r["reason"] for r in rows]
    _print_table(console, columns, prose={"reason"})
    _say(
        console,
        "Work: bit operations of fp32's, a cost model; speed is measured for model.onnx alone.",
        style="dim",
    )
