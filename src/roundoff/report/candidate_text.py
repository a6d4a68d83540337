"""What ``roundoff diagnose --candidate`` says beyond the comparison."""

from __future__ import annotations

from rich.console import Console

from roundoff.report.comparison_text import print_comparison
from roundoff.report.diagnosis import (
    CandidateSummary,
    DiagnosisSummary,
    HigherPrecision,
)
from roundoff.report.figures import db, percent


def candidate_sentences(
    higher: HigherPrecision | None, plan: DiagnosisSummary | None
) -> list[str]:
    """Return sentences for the answer of the comparison.

    What both sides give in fp64, and what the plan reaches.

    >>> higher = HigherPrecision(site=None, error=3e-4, error_fp64=3e-4,
    ...     output_error=None, output_error_fp64=None, verdict="bug",
    ...     reason="the difference stays at 3e-4 in fp64: not rounding")
    >>> candidate_sentences(higher, None)
    ['A bug: the difference stays at 3e-4 in fp64: not rounding.']
    """
    sentences = []
    if higher is not None:
        sentences.append(_verdict_sentence(higher))
    if plan is not None:
        formats = [f"{number} in {name}" for name, number in plan.plan.sites.items()]
        meets = "meets" if plan.result.met else "misses"
        sentences.append(
            f"The plan ({', '.join(formats)}) {meets} {plan.target.asked}: "
            f"{db(plan.result.measured_db)} dB measured."
        )
    return sentences


def _verdict_sentence(higher: HigherPrecision) -> str:
    reason = higher.reason
    if higher.verdict == "bug":
        return f"A bug: {reason}."
    if higher.verdict == "undecided":
        return f"Bug or rounding is undecided: {reason}."
    return f"{reason[0].upper()}{reason[1:]}."


def print_candidate(
    summary: CandidateSummary,
    console: Console,
    top: int = 20,
) -> None:
    """Print the comparison with at most ``top`` rows of each table.

    Where nothing is at fault the sites that cost most follow.
    """
    comparison = summary.comparison.summary
    print_comparison(comparison, console, top)
    rows = [row for row in summary.rounding if row.share is not None]
    if rows and not comparison.culprits:
        console.print(
            "\nWhat the rounding of each site costs the output:", markup=False
        )
        for row in rows[:top]:
            figures = f"{percent(row.share):>6}  {row.site}, {db(row.sqnr_db)} dB"
            console.print(f"  {figures}", markup=False)
    for note in summary.notes:
        console.print(f"Note: {note}", markup=False)
