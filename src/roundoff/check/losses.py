"""Do the two loss curves differ by more than repeats do, and from which step on?

Repeats of the reference, where there are some, say how far honest runs lie apart: the
largest distance of any of them up to a step, times three, is allowed there. Without
repeats the bound is derived: rounding moves a loss by some units in the last place of
the format that ran, and training makes that grow from step to step. Steps whose
difference is at most ``GROWTH`` times the largest one before them are growth; a jump
beyond that is none.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import replace

from roundoff.check.findings import LossCurves
from roundoff.check.low_precision import dtypes_of, is_low
from roundoff.check.pair import Pair, number
from roundoff.record import Run

#: How many times the distance of repeats is allowed.
MARGIN = 3.0
#: How much rounding may grow from one step to the next.
GROWTH = 4.0
#: Units in the last place by which rounding alone may move a loss before training has
#: amplified it: a loss is a mean over logits that each take some hundred roundings,
#: which add up like the square root of their number.
UNITS = 32.0
_UNIT_OF_FP32 = 2.0**-24
_UNIT_OF_BF16 = 2.0**-9
#: Of a low format these are fewer: losses themselves are computed in fp32, as a mean in
#: which the roundings of many samples cancel.
UNITS_OF_BF16 = 4.0
_LOSS = "loss"


def losses_of_ranks(pairs: Sequence[Pair], repeats: Sequence[Run]) -> LossCurves | None:
    """Compare the losses of every rank; return those of the rank that parts first, with
    its name where it is not the only one. None where there are none."""
    curves = [
        (pair.reference.rank, compared)
        for pair in pairs
        if (compared := compare_losses(pair, repeats)) is not None
    ]
    if not curves:
        return None
    parting = [each for each in curves if each[1].first is not None]
    if not parting:
        return curves[0][1]
    rank, first = min(parting, key=_parts_at)
    if len(pairs) > 1:
        first = replace(first, text=f"on rank {rank} {first.text}")
    return first


def _parts_at(curve: tuple[int, LossCurves]) -> tuple[int, int]:
    rank, losses = curve
    return losses.first or 0, rank


def compare_losses(pair: Pair, repeats: Sequence[Run]) -> LossCurves | None:
    """Compare the losses of all steps that both have; None where there are none."""
    ours, theirs = (side.numbers.get(_LOSS, {}) for side in pair.sides)
    steps = sorted({*ours} & {*theirs})
    if not steps:
        return None
    curves = [_losses(run, pair.reference.rank) for run in repeats]
    curves = [curve for curve in curves if curve]
    floor = _floor(ours, curves, steps) if curves else {}
    distances = [(step, relative(ours[step], theirs[step])) for step in steps]
    first, allowed = _first_beyond(distances, floor, _rounding(pair))
    at = steps[-1] if first is None else first
    return _curves(pair, steps, first, at, allowed, bool(curves), len(curves))


def _first_beyond(
    distances: Sequence[tuple[int, float]], floor: Mapping[int, float], rounding: float
) -> tuple[int | None, float]:
    """Return the first step whose losses lie further apart than is allowed; None without.

    And what is allowed there, or at the last step: by what repeats differ in, or, where
    there are none, by rounding and how far it went at the steps before.
    """
    largest = 0.0
    allowed = 0.0
    for step, distance in distances:
        derived = max(rounding, GROWTH * largest)
        allowed = MARGIN * floor[step] + UNITS * _UNIT_OF_FP32 if floor else derived
        if distance > allowed:
            return step, allowed
        largest = max(largest, distance)
    return None, allowed


def _curves(
    pair: Pair,
    steps: Sequence[int],
    first: int | None,
    at: int,
    allowed: float,
    by_repeats: bool,
    count: int,
) -> LossCurves:
    ours, theirs = (side.numbers[_LOSS] for side in pair.sides)
    bound = f"{count} repeats" if by_repeats else "a derived bound on rounding"
    distance = relative(ours[at], theirs[at])
    if first is None:
        is_equal = all(ours[step] == theirs[step] for step in steps)
        same = (
            "are equal bit for bit"
            if is_equal
            else f"lie no further apart than {bound} explains"
        )
        text = f"the losses of {len(steps)} steps {same}"
    else:
        text = (
            f"the losses part at step {first}: {number(theirs[at])} in "
            f"{pair.candidate.name}, {number(ours[at])} in {pair.reference.name}, "
            f"a relative {distance:.2g} apart where {bound} explains {allowed:.2g}"
        )
    return LossCurves(
        steps=len(steps),
        differs=first is not None,
        first=first,
        reference=ours[at],
        candidate=theirs[at],
        difference=distance,
        allowed=allowed,
        bound="repeats" if by_repeats else "derived",
        text=text,
    )


def relative(ours: float, theirs: float) -> float:
    """Return the distance relative to the larger loss; infinite where one is not finite.

    >>> relative(1.0, 1.5), relative(0.0, 0.0), relative(math.nan, 1.0)
    (0.3333333333333333, 0.0, inf)
    """
    if ours == theirs or (math.isnan(ours) and math.isnan(theirs)):
        return 0.0
    size = max(abs(ours), abs(theirs))
    if not math.isfinite(size):
        return math.inf
    distance = abs(ours - theirs) / size
    return distance if math.isfinite(distance) else math.inf


def _losses(run: Run, rank: int) -> Mapping[int, float]:
    rows = run.step_numbers.collect()
    return {
        step: value
        for row_rank, step, name, value in rows.rows()
        if row_rank == rank and name == _LOSS
    }


def _floor(
    ours: Mapping[int, float],
    curves: Sequence[Mapping[int, float]],
    steps: Sequence[int],
) -> Mapping[int, float]:
    """Return the largest distance of any repeat up to each step."""
    largest = 0.0
    floor = {}
    for step in steps:
        distances = [relative(ours[step], c[step]) for c in curves if step in c]
        largest = max([largest, *distances])
        floor[step] = largest
    return floor


def _rounding(pair: Pair) -> float:
    """Return how far rounding alone may move the first loss, relative to it."""
    low = [
        any(is_low(d) for names in dtypes_of(side).values() for d in names)
        for side in pair.sides
    ]
    return UNITS_OF_BF16 * _UNIT_OF_BF16 if all(low) else UNITS * _UNIT_OF_FP32
