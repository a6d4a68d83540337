"""What ``roundoff tune`` shows: the answer, the runs beside each other, the Pareto curve, and what costs most."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from rich.console import Console

from roundoff.report.figures import amount, count, db, listing, metric, percent, ratio
from roundoff.report.terminal import PROSE_LEAST
from roundoff.report.terminal import heading as _heading
from roundoff.report.terminal import print_table as _print_table
from roundoff.report.terminal import say as _say

Row = Mapping[str, Any]


def print_tuning(summary: Row, console: Console, *, top: int = 20) -> None:
    """``summary`` is the dict of ``Tuning.summary``; ``top`` the number of ranked sites.

    >>> run = {"name": "fp32", "cost": 8.0, "fp32_operators": 2, "predicted_db": None, "measured_db": float("inf"),
    ...        "native_db": None, "loss_error": 0.0, "along": [], "losses": [2.0, 1.5], "sites": 0}
    >>> plan = run | {"name": "equal", "cost": 4.0, "fp32_operators": 1, "predicted_db": 41.0, "measured_db": 40.5,
    ...               "native_db": 40.1, "loss_error": 1e-4, "along": [(1, 40.2)], "losses": [2.0, 1.51]}
    >>> print_tuning({"version": "0.1.0", "workload": "tiny", "formats": ["bf16"], "target": "gradients", "probes": 12,
    ...     "batches": 1, "met": True, "reason": "40.5 dB against 36.0 dB of built-in autocast (+4.5)", "device": "cpu",
    ...     "half": "bf16", "cost_model": "bytes", "unit": "MB", "cost_fp32": 8.0, "runs": [run, plan], "steps": 2,
    ...     "operators": 2, "pareto": [], "ranking": [], "notes": [], "excluded": []}, Console(width=100))
    roundoff 0.1.0: tiny, training in bf16 (gradients; 12 probes, 1 batch)
    <BLANKLINE>
    The plan is better than built-in autocast: 40.5 dB against 36.0 dB of built-in autocast (+4.5).
    <BLANKLINE>
    Runs: 2 steps each, SQNR of the gradients in dB
    plan    cost   of fp32   in fp32   predicted   measured   native   then   loss error   last loss
    ────────────────────────────────────────────────────────────────────────────────────────────────
    fp32    8 MB      100%         2           ∞          ∞        –   –              0%         1.5
    equal   4 MB     50.0%         1        41.0       40.5     40.1   40.2        <0.1%        1.51
    'in fp32' counts operators, of 2; 'then' is later in training, at the weights of the fp32 run.
    """
    work = f"{summary['target']}; {count(summary['probes'], 'probe')}, {_batches(summary['batches'])}"
    formats = listing(summary["formats"])
    _say(
        console,
        f"roundoff {summary['version']}: {summary['workload']}, training in {formats} ({work})",
    )
    console.print()
    met = (
        "is better than built-in autocast"
        if summary["met"]
        else "is not better than built-in autocast"
    )
    _say(
        console,
        f"The plan {met}: {summary['reason']}.",
        style="bold green" if summary["met"] else "bold red",
    )
    _print_runs(summary, summary["runs"], console)
    _print_pareto(summary, console)
    _print_ranking(summary, console, top)
    for note in summary["notes"]:
        _say(console, f"Note: {note}")
    cut = [e for e in summary["excluded"] if "derivative" in e["reason"]]
    for row in cut:
        _say(console, f"! {listing(row['examples'])}: {row['reason']}", style="yellow")


def _batches(number: int) -> str:
    return f"{number:,} batch" + ("" if number == 1 else "es")


def _print_runs(summary: Row, runs: Sequence[Row], console: Console) -> None:
    _heading(
        console,
        f"Runs: {count(summary['steps'], 'step')} each, SQNR of the gradients in dB",
    )
    _print_table(
        console,
        {
            "plan": [_named(summary, run) for run in runs],
            "cost": [amount(run["cost"], summary["unit"]) for run in runs],
            "of fp32": [
                percent(ratio(run["cost"], summary["cost_fp32"])) for run in runs
            ],
            "in fp32": [f"{run['fp32_operators']:,}" for run in runs],
            "predicted": [
                "∞" if run["predicted_db"] is None else db(run["predicted_db"])
                for run in runs
            ],
            "measured": [db(run["measured_db"]) for run in runs],
            "native": [db(run["native_db"]) for run in runs],
            "then": [
                ", ".join(db(value) for _, value in run["along"]) or "–" for run in runs
            ],
            "loss error": [percent(run["loss_error"]) for run in runs],
            "last loss": [metric(run["losses"][-1]) for run in runs],
        },
    )
    _say(
        console,
        f"'in fp32' counts operators, of {summary['operators']:,}; 'then' is later in training, at the weights of "
        "the fp32 run.",
        style="dim",
    )


def _named(summary: Row, run: Row) -> str:
    return (
        f"autocast ({summary['half']}, {summary['device']} lists)"
        if run["name"] == "autocast"
        else str(run["name"])
    )


def _print_pareto(summary: Row, console: Console) -> None:
    points = summary["pareto"]
    if not points:
        return
    _heading(console, "Pareto curve: the most exact plan at each cost, predicted")
    base = next(
        (run["cost"] for run in summary["runs"] if run["name"] == "autocast"), None
    )
    _print_table(
        console,
        {
            "cost": [amount(p["cost"], summary["unit"]) for p in points],
            "of fp32": [percent(p["of_fp32"]) for p in points],
            "of autocast": [
                percent(ratio(p["cost"], base)) if base else "–" for p in points
            ],
            "SQNR": [
                "∞" if p["predicted_db"] is None else db(p["predicted_db"])
                for p in points
            ],
            "in fp32": [f"{p['fp32_operators']:,}" for p in points],
        },
    )


def _print_ranking(summary: Row, console: Console, top: int) -> None:
    rows = summary["ranking"][:top]
    if not rows:
        return
    _heading(
        console,
        f"What {summary['half']} costs the {summary['target']}, worst first (dB)",
    )
    _print_table(
        console,
        {
            "site": [row["site"] for row in rows],
            "SQNR": [db(row["sqnr_db"]) for row in rows],
            "noise": [percent(row["share"]) for row in rows],
            **{
                name: [db(row[f"{part}_db"]) for row in rows]
                for name, part in (
                    ("act.", "activation"),
                    ("wt.", "weight"),
                    ("out.", "output"),
                    ("grad.", "gradient"),
                )
            },
        },
        prose={"site"} if console.width < 60 + PROSE_LEAST else set(),
    )
    if len(summary["ranking"]) > len(rows):
        _say(
            console,
            f"{count(len(summary['ranking']) - len(rows), 'more row')} below.",
            style="dim",
        )
