"""What ``roundoff diagnose --candidate`` says beyond the comparison: bug or rounding, the plan that repairs it, costs."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from rich.console import Console

from roundoff.report.comparison_text import print_comparison
from roundoff.report.figures import db, percent

if TYPE_CHECKING:
    from roundoff.compare import ComparisonSummary

Row = Mapping[str, Any]


def verified(higher: Row | None, plan: Row | None) -> list[str]:
    """Sentences for the answer of the comparison: what both sides give in fp64, and what the plan reaches.

    ``higher`` has ``verdict`` (bug, rounding, undecided) and ``reason``; ``plan`` is the summary of ``roundoff.diagnose``.

    >>> verified({"verdict": "bug", "reason": "the difference stays at 3e-4 in fp64: not rounding"}, None)
    ['A bug: the difference stays at 3e-4 in fp64: not rounding.']
    """
    said = []
    if higher is not None:
        reason = higher["reason"]
        verdict = {
            "bug": "A bug: ",
            "rounding": "",
            "undecided": "Bug or rounding is undecided: ",
        }[higher["verdict"]]
        said.append(
            f"{verdict}{reason if verdict else reason[0].upper() + reason[1:]}."
        )
    if plan is not None:
        result, chosen = plan["result"], plan["plan"]["sites"]
        sites = ", ".join(f"{count} in {name}" for name, count in chosen.items())
        met = "meets" if result["met"] else "misses"
        said.append(
            f"The plan ({sites}) {met} {plan['target']['asked']}: {db(result['measured_db'])} dB measured."
        )
    return said


def print_candidate(
    summary: Row, comparison: ComparisonSummary, console: Console, top: int = 20
) -> None:
    """The comparison with at most ``top`` rows of each table; where nothing is at fault the sites that cost most."""
    print_comparison(comparison, console, top)
    rows = [row for row in summary["rounding"] if row["share"] is not None]
    if rows and not comparison.culprits:
        console.print(
            "\nWhat the rounding of each site costs the output:", markup=False
        )
        for row in rows[:top]:
            console.print(
                f"  {percent(row['share']):>6}  {row['site']}, {db(row['sqnr_db'])} dB",
                markup=False,
            )
    for note in summary["notes"]:
        console.print(f"Note: {note}", markup=False)
