"""A check in the terminal: the verdict, each difference, then what agrees."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from rich.console import Console
from rich.text import Text

from roundoff.report.figures import count
from roundoff.report.terminal import heading, print_text, say

if TYPE_CHECKING:
    from roundoff.check import Check, Difference

#: Where the losses differ and no setting does.
_LOSSES_ALONE = (
    "The set-ups agree as far as they were recorded, and the losses do not: "
    "'roundoff compare' names the first operator that differs."
)
_STYLES = {"changes the training": "bold red", "changes rounding": "yellow"}


def print_check(check: Check, console: Console, *, limit: int = 20) -> None:
    """Print what ``roundoff.check`` returns; at most ``limit`` differences.

    The first line is the most important difference, or the verdict where there is none.
    """
    sentences = check_sentences(check)
    first = check.differences[0] if check.differences else None
    if first is not None:
        say(console, _sentence(first.text), style=_STYLES.get(first.severity, ""))
    say(console, " ".join(sentences))
    _print_differences(check.differences, console, limit)
    if check.missing:
        heading(console, "Not compared")
        for each in check.missing:
            say(console, f"{each.group}: {each.text}")
    if check.agreements:
        heading(console, "The same in both")
        for agreement in check.agreements:
            say(console, f"{agreement.group}: {agreement.text}")
    for remark in check.remarks:
        say(console, f"({remark})", style="dim")


def check_sentences(check: Check) -> list[str]:
    """Return the verdict, and what the losses say."""
    changing = len(check.changing)
    followers = sum(each.follows is not None for each in check.changing)
    if check.verdict == "comparable":
        sentences = ["Nothing that changes numbers differs: the runs are comparable."]
    elif changing:
        more = ""
        if followers:
            more = f"; {followers} of them may follow from another"
        differences = count(changing, "difference")
        verb = "changes" if changing == 1 else "change"
        sentences = [f"{differences} that {verb} numbers{more}."]
    elif check.verdict == "differ":
        sentences = [_LOSSES_ALONE]
    else:
        sentences = ["Nothing recorded differs, and not all was recorded: undecided."]
    if check.losses is not None:
        sentences.append(f"{_sentence(check.losses.text)}.")
    return sentences


def _print_differences(
    differences: Sequence[Difference], console: Console, limit: int
) -> None:
    if not differences:
        return
    heading(console, "Differences, the likeliest cause first")
    for place, each in enumerate(differences[:limit], 1):
        text = Text(f"{place}. {_sentence(each.text)}")
        text.append(f" [{each.severity}]", style=_STYLES.get(each.severity, "dim"))
        print_text(console, text)
        say(console, f"   Why: {each.why}.{_places(each)}")
        if each.follows is None:
            say(console, f"   Do: {each.fix}.")
        else:
            say(console, f"   It may follow from the {each.follows}.", style="dim")
    hidden = len(differences) - limit
    if hidden > 0:
        say(console, f"{count(hidden, 'more difference')}: --rows {len(differences)}.")


def _places(difference: Difference) -> str:
    """Return source lines and ranks, where they say something."""
    lines = [difference.reference_line, difference.line]
    parts = []
    named = [line for line in lines if line]
    if named:
        parts.append("at " + " and ".join(dict.fromkeys(named)))
    if list(difference.ranks) != [0]:
        parts.append("on ranks " + ", ".join(map(str, difference.ranks)))
    return f" ({'; '.join(parts)})" if parts else ""


def _sentence(text: str) -> str:
    return text[:1].upper() + text[1:]
