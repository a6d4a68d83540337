"""The page of ``roundoff quantize``."""

from __future__ import annotations

import os

from roundoff.budget import OutputRow
from roundoff.export import NotPruned, Summary
from roundoff.report import quantize_answer, quantize_chart
from roundoff.report.output_columns import output_columns, together
from roundoff.report.page import Mark, Page


def write_quantize(summary: Summary, path: str | os.PathLike[str]) -> None:
    """Write the page of a summary to a path or URL, whole or not at all.

    Raises ``OutputError`` when it cannot be written.
    """
    page(summary).write(path)


def page(summary: Summary) -> Page:
    """Return the page of a summary."""
    headline, *sentences = quantize_answer.answer(summary)
    pruned = ""
    if not isinstance(summary.pruning, NotPruned):
        pruned = quantize_answer.pruned(summary.asked.prune, summary.pruning)
    return Page(
        template="quantize.html",
        title=f"{summary.workload} quantized",
        headline=headline,
        sentences=sentences,
        mark=_mark(summary),
        styles=["quantize.css"],
        values={
            "d": summary,
            "ranked": quantize_answer.is_ranked(summary),
            "outputs": output_columns(summary.result.outputs, _in_file(summary)),
            "together": together(summary.result.outputs),
            "against": quantize_answer.AGAINST,
            "size": quantize_answer.size,
            "pruned": pruned,
            "left": quantize_answer.sites_in_fp32(summary),
            "trials": quantize_answer.trials(summary),
            "by_size": quantize_chart.tradeoff(summary, "bytes"),
            "by_work": quantize_chart.tradeoff(summary, "work"),
        },
    )


def _in_file(summary: Summary) -> tuple[OutputRow, ...]:
    return () if summary.proof is None else summary.proof.outputs


def _mark(summary: Summary) -> Mark | None:
    """Return the mark of the target's verdict; None where none was asked for."""
    if not summary.asked.target:
        return None
    return "met" if summary.met else "missed"
