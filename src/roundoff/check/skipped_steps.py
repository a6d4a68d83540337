"""Steps that the loss scale skipped: how many, and where the scale ended."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from roundoff.check.findings import Difference
from roundoff.check.pair import Pair, number
from roundoff.check.rules import SCALING, Rule
from roundoff.check.side import Side

_SCALE = "loss scale"
_SKIPPED = Rule(
    group=SCALING,
    name="skipped steps",
    why="a skipped step changes no weight, and its batch is lost to the training",
    fix="look for what overflows first where more are skipped, and give both "
    "GradScalers the same settings",
    follows=(_SCALE, "init scale", "growth interval", "growth factor"),
)


def differing_skips(pair: Pair) -> Iterator[Difference]:
    """Yield that other steps were skipped, of those that both runs have."""
    scales = [side.numbers.get(_SCALE, {}) for side in pair.sides]
    steps = sorted({*scales[0]} & {*scales[1]})
    skipped = [_within(skipped_steps(side), steps) for side in pair.sides]
    if skipped[0] == skipped[1]:
        return
    counts = [_counted(each, len(steps)) for each in skipped]
    ends = [number(each[steps[-1]]) for each in scales]
    ours, theirs = (side.name for side in pair.sides)
    text = (
        f"the loss scale skipped {counts[1]} in {theirs}, {counts[0]} in {ours}; it "
        f"ended at {ends[1]} in {theirs}, {ends[0]} in {ours}"
    )
    first = min({*skipped[0]} ^ {*skipped[1]})
    yield pair.difference(_SKIPPED, counts, text=text, step=first)


def skipped_steps(side: Side) -> Sequence[int]:
    """Return the steps that a scaler skipped, in order.

    A scaler that skips calls no optimizer. A fused optimizer is called and skips by
    itself; the scale falls all the same, which the first step cannot show.
    """
    numbers = side.numbers
    called = numbers.get("optimizer steps", {})
    asked = numbers.get("scaler steps", {})
    scales = numbers.get(_SCALE, {})
    uncalled = {step for step in asked if asked[step] > called.get(step, 0.0)}
    pairs = zip(sorted(scales), sorted(scales)[1:], strict=False)
    fallen = {step for before, step in pairs if scales[step] < scales[before]}
    return sorted(uncalled | fallen)


def _within(skipped: Sequence[int], steps: Sequence[int]) -> Sequence[int]:
    return [step for step in skipped if step in steps]


def _counted(skipped: Sequence[int], steps: int) -> str:
    if not skipped:
        return f"none of {steps} steps"
    return f"{len(skipped)} of {steps} steps (the first is step {skipped[0]})"
