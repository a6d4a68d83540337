"""In the terminal: does a script repeat itself, and which operator does not?"""

from __future__ import annotations

from typing import TYPE_CHECKING

from rich.console import Console

from roundoff.report.figures import count
from roundoff.report.terminal import say

if TYPE_CHECKING:
    from roundoff.check import Baseline


def print_baseline(baseline: Baseline, console: Console, *, limit: int = 20) -> None:
    """Print what ``check --baseline`` found; at most ``limit`` settings that differ."""
    for sentence in baseline_sentences(baseline):
        say(console, sentence)
    for each in baseline.differences[:limit]:
        say(console, f"Differs between them: {each.text}.")


def baseline_sentences(baseline: Baseline) -> list[str]:
    """Return whether the repeats agree, the first value that does not, and why."""
    runs = count(baseline.runs, "run")
    steps = count(baseline.steps, "step")
    first = baseline.first
    if first is None:
        return [f"{runs} of {steps} agree bit for bit: a difference to them is real."]
    line = f" ({first.line})" if first.line else ""
    place = f"{first.site}{line} in the {first.phase} pass of step {first.step}"
    repeats = f"{first.runs} of {count(baseline.runs - 1, 'repeat')}"
    return [
        f"{runs} of {steps} do not agree.",
        f"The first value that differs is {place}, in {repeats}.",
        f"This is {baseline.kind}: {baseline.why}.",
        f"Try: {baseline.fix}.",
    ]
