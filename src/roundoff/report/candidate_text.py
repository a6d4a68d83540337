"""What ``roundoff diagnose --candidate`` says: the answer first, then who is to blame; from the plain ``summary``."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from rich.console import Console

from roundoff.report.figures import db, percent

Row = Mapping[str, Any]


def sentences(summary: Row) -> list[str]:
    """The answer: what does not repeat itself, what parts first, bug or rounding, and the plan that repairs it.

    >>> sentences({"reference": "a", "candidate": "bf16", "agrees": True, "notes": [], "unstable": [], "plan": None,
    ...            "comparison": {"answer": "", "agrees": True, "divergence": None}, "rounding": [],
    ...            "higher_precision": None})
    ['bf16 agrees with a.']
    """
    said = [_unstable(summary["unstable"])] if summary["unstable"] else []
    said.append(summary["comparison"]["answer"] or _parted(summary))
    higher = summary["higher_precision"]
    if higher is not None:
        reason = higher["reason"]
        verdict = {"bug": "A bug: ", "rounding": "", "undecided": "Bug or rounding is undecided: "}[higher["verdict"]]
        said.append(f"{verdict}{reason if verdict else reason[0].upper() + reason[1:]}.")
    if summary["plan"] is not None:
        said.append(_plan(summary))
    return said


def print_candidate(summary: Row, console: Console, top: int = 20) -> None:
    """Print the sentences, and at most ``top`` culprits; for a format without any, the sites that cost most."""
    for sentence in sentences(summary):
        console.print(sentence, markup=False)
    for number, culprit in enumerate(summary["comparison"]["culprits"][:top], 1):
        looks = f", looks like {culprit['looks_like']}" if culprit["looks_like"] else ""
        line = f" ({culprit['line']})" if culprit["line"] else ""
        said = f"{culprit['phase']}, own error {culprit['own']:.1e}{looks}"
        console.print(f"{number:>3}  {culprit['site']}{line}: {said}", markup=False)
        for key in ("evidence", "try"):
            if culprit[key]:
                console.print(f"     {key}: {culprit[key]}", markup=False)
    rows = [row for row in summary["rounding"] if row["share"] is not None]
    if rows and not summary["comparison"]["culprits"]:
        console.print("What the rounding of each site costs the output:", markup=False)
        for row in rows[:top]:
            console.print(f"  {percent(row['share']):>6}  {row['site']}, {db(row['sqnr_db'])} dB", markup=False)
    for note in summary["notes"]:
        console.print(f"Note: {note}", markup=False)


def _unstable(rows: list[Row]) -> str:
    names = list(dict.fromkeys(f"{row['site']} ({row['note']})" for row in rows))
    shown = "; ".join(names[:3]) + (f"; and {len(names) - 3} more" if len(names) > 3 else "")
    sides = " and ".join(dict.fromkeys(f"the {row['side']}" for row in rows))
    return (f"Run twice, {sides} gives other numbers: {shown}. What it differs by from itself is not held against the "
            "candidate.")  # fmt: skip


def _parted(summary: Row) -> str:
    named = summary["comparison"]["divergence"]
    if named is None:
        agrees = "agrees with" if summary["comparison"]["agrees"] else "differs, by no operator that can be named, from"
        return f"{summary['candidate']} {agrees} {summary['reference']}."
    line = f", {named['line']}" if named["line"] else ""
    looks = f", and looks like {named['looks_like']}" if named["looks_like"] else ""
    return (f"{summary['candidate']} parts from {summary['reference']} at {named['site']}{line} ({named['phase']}, step "
            f"{named['step']}): its error of {named['own']:.1e} is more than rounding explains{looks}.")  # fmt: skip


def _plan(summary: Row) -> str:
    plan = summary["plan"]
    result, chosen = plan["result"], plan["plan"]["sites"]
    sites = ", ".join(f"{count} in {name}" for name, count in chosen.items())
    measured = db(result["measured_db"])
    met = "meets" if result["met"] else "misses"
    return f"The plan ({sites}) {met} {plan['target']['asked']}: {measured} dB measured."
