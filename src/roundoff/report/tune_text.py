"""What ``roundoff tune`` prints: the answer, the runs beside each other, the Pareto
curve, and what costs most.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from rich.console import Console

from roundoff.report.figures import (
    NONE,
    amount,
    count,
    db,
    listing,
    metric,
    percent,
    ratio,
)
from roundoff.report.terminal import heading, print_table, say

if TYPE_CHECKING:
    from roundoff.train import TunedRun, Tuning


def print_tuning(tuning: Tuning, console: Console, *, top: int = 20) -> None:
    """Print a tuning; ``top`` is the number of ranked sites."""
    _print_answer(tuning, console)
    _print_runs(tuning, console)
    _print_pareto(tuning, console)
    _print_ranking(tuning, console, top)
    for note in tuning.notes:
        say(console, f"Note: {note}")
    for row in tuning.excluded:
        if "derivative" in row.reason:
            text = f"! {listing(row.examples)}: {row.reason}"
            say(console, text, style="yellow")


def _print_answer(tuning: Tuning, console: Console) -> None:
    batches = "batch" if tuning.batches == 1 else "batches"
    work = f"{tuning.target}; {count(tuning.probes, 'probe')}, {tuning.batches:,} {batches}"
    subject = f"{tuning.workload}, training in {listing(tuning.formats)}"
    say(console, f"roundoff {tuning.version}: {subject} ({work})")
    console.print()
    verdict = "is better" if tuning.met else "is not better"
    style = "bold green" if tuning.met else "bold red"
    text = f"The plan {verdict} than built-in autocast: {tuning.reason}."
    say(console, text, style=style)


def _print_runs(tuning: Tuning, console: Console) -> None:
    runs = tuning.runs
    steps = count(tuning.steps, "step")
    heading(console, f"Runs: {steps} each, SQNR of the gradients in dB")
    columns = {
        "plan": [_run_name(tuning, run) for run in runs],
        "cost": [amount(run.cost, tuning.unit) for run in runs],
        "of fp32": [percent(ratio(run.cost, tuning.cost_fp32)) for run in runs],
        "in fp32": [f"{run.fp32_operators:,}" for run in runs],
        "predicted": [_predicted(run.predicted_db) for run in runs],
        "measured": [db(run.measured_db) for run in runs],
        "native": [db(run.native_db) for run in runs],
        "then": [_along(run) for run in runs],
        "loss error": [percent(run.loss_error) for run in runs],
        "last loss": [metric(run.losses[-1]) for run in runs],
    }
    print_table(console, columns)
    say(
        console,
        f"'in fp32' counts operators, of {tuning.operators:,}; 'then' is later in training, at the weights of "
        "the fp32 run.",
        style="dim",
    )


def _run_name(tuning: Tuning, run: TunedRun) -> str:
    if run.name == "autocast":
        return f"autocast ({tuning.half}, {tuning.device} lists)"
    return run.name


def _predicted(value: float | None) -> str:
    """Write a prediction; None is that of a plan without noise."""
    return "∞" if value is None else db(value)


def _along(run: TunedRun) -> str:
    return ", ".join(db(value) for _, value in run.along) or NONE


def _print_pareto(tuning: Tuning, console: Console) -> None:
    points = tuning.pareto
    if not points:
        return
    heading(console, "Pareto curve: the most exact plan at each cost, predicted")
    costs = [run.cost for run in tuning.runs if run.name == "autocast"]
    autocast = costs[0] if costs else None
    columns = {
        "cost": [amount(point.cost, tuning.unit) for point in points],
        "of fp32": [percent(point.of_fp32) for point in points],
        "of autocast": [percent(ratio(point.cost, autocast)) for point in points],
        "SQNR": [_predicted(point.predicted_db) for point in points],
        "in fp32": [f"{point.fp32_operators:,}" for point in points],
    }
    print_table(console, columns)


def _print_ranking(tuning: Tuning, console: Console, top: int) -> None:
    sites = tuning.ranking[:top]
    if not sites:
        return
    heading(console, f"What {tuning.half} costs the {tuning.target}, worst first (dB)")
    columns = {
        "site": [site.site for site in sites],
        "SQNR": [db(site.sqnr_db) for site in sites],
        "noise": [percent(site.share) for site in sites],
        "act.": [db(site.activation_db) for site in sites],
        "wt.": [db(site.weight_db) for site in sites],
        "out.": [db(site.output_db) for site in sites],
        "grad.": [db(site.gradient_db) for site in sites],
    }
    print_table(console, columns)
    left = len(tuning.ranking) - len(sites)
    if left:
        say(console, f"{count(left, 'more row')} below.", style="dim")
