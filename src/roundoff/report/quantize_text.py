"""What ``roundoff quantize`` prints: the answer, the search, the sites, the files."""

from __future__ import annotations

from rich.console import Console
from rich.text import Text

from roundoff.export import Summary
from roundoff.report import quantize_answer
from roundoff.report.figures import NONE, count, db, metric, percent
from roundoff.report.output_table import print_outputs
from roundoff.report.terminal import heading, print_table, print_text, say

EXAMPLES = 3


def print_quantize(summary: Summary, console: Console, *, top: int = 10) -> None:
    """Print a summary; ``top`` is the number of sites shown, worst first."""
    samples = count(summary.calibration.samples, "sample")
    say(
        console,
        f"roundoff {summary.version}: {summary.workload}, calibrated on {samples}",
        "dim",
    )
    console.print()
    headline, *sentences = quantize_answer.answer(summary)
    style = _verdict_style(summary)
    print_text(console, Text.assemble((headline, style), " ", " ".join(sentences)))
    file = summary.proof.outputs if summary.proof is not None else ()
    print_outputs(summary.result.outputs, console, file)
    _print_steps(summary, console)
    _print_trials(summary, console)
    _print_weakest(summary, console, top)
    _print_coverage(summary, console)
    _print_tradeoff(summary, console)
    _print_notes(summary, console)
    console.print()
    spent = [f"{name} {value:.1f}" for name, value in summary.seconds.items()]
    say(console, f"Seconds: {', '.join(spent)}", style="dim")


def print_files(summary: Summary, folder: str, console: Console) -> None:
    """Print what was written, and what could not be."""
    heading(console, f"Written to {folder}")
    print_table(
        console,
        {
            "file": [file.name for file in summary.files],
            "size": [quantize_answer.size(file.bytes) for file in summary.files],
            "what": [file.reason or file.what for file in summary.files],
        },
    )


def _verdict_style(summary: Summary) -> str:
    if summary.asked.target is None:
        return "bold"
    return "bold green" if summary.met else "bold red"


def _print_steps(summary: Summary, console: Console) -> None:
    if not summary.steps:
        return
    heading(console, "Steps: SQNR of the output (dB)")
    print_table(
        console,
        {
            "step": [step.name for step in summary.steps],
            "before": [db(step.before) for step in summary.steps],
            "after": [db(step.after) for step in summary.steps],
            "note": [step.note for step in summary.steps],
        },
    )


def _print_trials(summary: Summary, console: Console) -> None:
    lines = quantize_answer.trials(summary)
    if not lines:
        return
    evaluations = count(len(lines), "evaluation")
    heading(console, f"Search for the target: {evaluations} of the model")
    print_table(
        console,
        {
            "trial": [line.trial for line in lines],
            "formats": [line.formats for line in lines],
            "predicted": [line.predicted for line in lines],
            "measured": [line.measured for line in lines],
            "metric": [line.metric for line in lines],
            summary.asked.cost: [line.cost for line in lines],
        },
    )


def _print_weakest(summary: Summary, console: Console, top: int) -> None:
    rows = quantize_answer.weakest(summary, top)
    if not rows:
        return
    ranked = quantize_answer.is_ranked(summary)
    title = "Furthest from fp32"
    if ranked:
        title = "What costs the output most, as the budget predicts"
    against = quantize_answer.AGAINST
    heading(console, f"{title}; {against}, and of rounding it alone (dB)")
    columns = {
        "site": [row.site for row in rows],
        "format": [row.format for row in rows],
    }
    if ranked:
        columns["share"] = [percent(row.share) for row in rows]
    columns |= {
        "SQNR": [db(row.sqnr_db) for row in rows],
        "own": [db(row.own_db) for row in rows],
        "observer": [row.observer or NONE for row in rows],
    }
    if summary.proof is not None:
        differing = {
            row.site: row.differing for row in quantize_answer.proved_sites(summary)
        }
        columns["codes off"] = [percent(differing.get(row.site)) for row in rows]
    print_table(console, columns)


def _print_coverage(summary: Summary, console: Console) -> None:
    coverage = summary.coverage
    heading(
        console,
        f"Coverage: {count(coverage.sites, 'site')}, {coverage.quantized} quantized, "
        f"{coverage.codes} on codes, {coverage.fp32} in fp32",
    )
    groups = quantize_answer.sites_in_fp32(summary)
    if groups:
        print_table(
            console,
            {
                "sites": [f"{len(sites):,}" for _, sites in groups],
                "reason": [reason for reason, _ in groups],
                "for example": [", ".join(sites[:EXAMPLES]) for _, sites in groups],
            },
        )
    for row in quantize_answer.without_integer_kernel(summary)[:EXAMPLES]:
        say(
            console,
            f"! {row.site} has no integer kernel in ONNX Runtime: {row.kernel_reason}",
            style="yellow",
        )


def _print_tradeoff(summary: Summary, console: Console) -> None:
    rows = summary.tradeoff
    if not rows:
        return
    heading(console, "Each format alone, simulated, beside what was chosen")
    columns = {
        "format": [row.name for row in rows],
        "weights": [quantize_answer.size(row.bytes) for row in rows],
        "work": [percent(row.work) for row in rows],
        "SQNR": [db(row.db) for row in rows],
    }
    if summary.result.metric_name is not None:
        columns[summary.result.metric_name] = [metric(row.metric) for row in rows]
    if any(row.reason for row in rows):
        columns["reason"] = [row.reason for row in rows]
    print_table(console, columns)
    say(
        console,
        "Work: bit operations as a share of fp32's, by a cost model; speed is measured for model.onnx alone.",
        style="dim",
    )


def _print_notes(summary: Summary, console: Console) -> None:
    lost = [f"record.txt leaves out {line}" for line in summary.lost]
    for line in (*summary.notes, *lost[:EXAMPLES]):
        say(console, f"! {line}", style="yellow")
    if len(lost) > EXAMPLES:
        more = len(lost) - EXAMPLES
        say(console, f"  and {more} more, in the report", style="dim")
