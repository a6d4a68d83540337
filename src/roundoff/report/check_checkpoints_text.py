"""Two checkpoints in the terminal: what differs most, and what is called otherwise."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from rich.console import Console

from roundoff.report.figures import NONE, count
from roundoff.report.run_text import columns_of
from roundoff.report.terminal import heading, print_table, say

if TYPE_CHECKING:
    from roundoff.check import CheckpointCheck, TensorChange

_MOST_NAMES = 10


def print_checkpoints(
    check: CheckpointCheck, console: Console, *, limit: int = 20
) -> None:
    """Print what ``roundoff.check`` returns of two checkpoints."""
    say(console, " ".join(checkpoint_sentences(check)))
    differing = check.differing
    if differing:
        heading(console, "Tensors that differ, the largest relative change first")
        cells = [_cells(change) for change in differing[:limit]]
        print_table(console, columns_of(cells))
    hidden = len(differing) - limit
    if hidden > 0:
        say(console, f"{count(hidden, 'more tensor')}: --rows {len(differing)}.")
    for each in check.renamed:
        say(
            console,
            f"{each.reference} is {each.candidate} in the candidate, {each.how}.",
        )
    _print_names(console, "Only in the reference", check.only_reference)
    _print_names(console, "Only in the candidate", check.only_candidate)


def checkpoint_sentences(check: CheckpointCheck) -> list[str]:
    """Return what two checkpoints have otherwise, in sentences."""
    common = len(check.changes)
    differing = check.differing
    if not common:
        sentences = ["No tensor has the same name in both."]
    elif not differing:
        sentences = [f"All {count(common, 'tensor')} of both are equal bit for bit."]
    else:
        first = differing[0]
        share = f"{len(differing)} of {count(common, 'tensor')}"
        sentences = [f"{share} differ, most of all {first.name}: {_in_words(first)}."]
    only = (len(check.only_reference), len(check.only_candidate))
    if any(only):
        sentences.append(
            f"{only[0]} only in the reference, {only[1]} only in the candidate."
        )
    if any(check.prefixes):
        shown = [prefix or "nothing" for prefix in check.prefixes]
        sentences.append(f"Names are matched without {shown[0]} and {shown[1]}.")
    return sentences


def _in_words(change: TensorChange) -> str:
    if change.hint:
        return f"it holds the reference's values {change.hint}"
    if change.shapes[0] != change.shapes[1]:
        shapes = [list(shape) for shape in change.shapes]
        return f"shape {shapes[1]} in the candidate, {shapes[0]} in the reference"
    if change.nonfinite:
        return f"NaN or Inf at {count(change.nonfinite, 'place')} of one of them"
    if change.change:
        return f"a relative change of {change.change:.3g}"
    return f"dtype {change.dtypes[1]} in the candidate, {change.dtypes[0]} in the reference"


def _cells(change: TensorChange) -> dict[str, str]:
    dtypes = dict.fromkeys(change.dtypes)
    shapes = dict.fromkeys(str(list(shape)) for shape in change.shapes)
    return {
        "site": change.name,
        "dtype": " → ".join(dtypes),
        "shape": " → ".join(shapes),
        "change": _number(change.change),
        "cosine": NONE if change.cosine is None else f"{change.cosine:.7g}",
        "largest": _number(change.largest),
        "note": change.hint
        or (f"{change.nonfinite} NaN or Inf" if change.nonfinite else ""),
    }


def _number(value: float | None) -> str:
    return NONE if value is None else f"{value:.3g}"


def _print_names(console: Console, title: str, names: Sequence[str]) -> None:
    if not names:
        return
    shown = ", ".join(names[:_MOST_NAMES])
    more = len(names) - _MOST_NAMES
    say(console, f"{title}: {shown}" + (f" and {more} more" if more > 0 else ""))
