"""The weights before the first update."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence

from roundoff.check.findings import CHANGES, ROUNDING, Difference
from roundoff.check.pair import Pair, shorten
from roundoff.check.rules import (
    ENVIRONMENT,
    FLOW,
    OTHER_MODEL,
    SAME_MODEL,
    WEIGHTS,
    Rule,
)
from roundoff.check.side import Side
from roundoff.record import TensorContent

#: Statistics that differ by this share of the spread differ by rounding: fp32 sums of
#: a sample of 2**14 elements are 2**-24 * 2**7 off.
ROUNDED = 1e-5
_RULE = Rule(
    group=WEIGHTS,
    name="initial weights",
    why="the trainings begin at another point",
    fix="load the same checkpoint, or draw with the same seed, in the same order, by "
    "the same functions",
    follows=(
        "initial seed",
        "seed",
        "modules",
        "default dtype",
        "dtype of the parameters",
        "parameters that modules share",
        ENVIRONMENT,
    ),
)
_SHAPES = Rule(
    group=FLOW,
    name="shapes of parameters",
    why=OTHER_MODEL,
    fix=SAME_MODEL,
    follows=("modules",),
)
_NAMES = Rule(
    group=WEIGHTS,
    name="names of parameters",
    why="what is called otherwise is not compared",
    fix=SAME_MODEL,
    follows=("modules", "parameters that modules share"),
)


def differing_weights(pair: Pair) -> Iterator[Difference]:
    """Yield what differs in the initial weights."""
    ours, theirs = (_parameters(side) for side in pair.sides)
    if not ours or not theirs:
        return
    differing = _differing_names(ours, theirs)
    reshaped = [name for name in differing if ours[name].shape != theirs[name].shape]
    others = [name for name in differing if name not in reshaped]
    yield from _shapes(pair, reshaped, ours, theirs)
    yield from _values(pair, others, ours, theirs)
    yield from _names(pair, ours, theirs)


def _differing_names(
    ours: Mapping[str, TensorContent], theirs: Mapping[str, TensorContent]
) -> list[str]:
    """Return the parameters that both have and that differ."""
    common = [name for name in ours if name in theirs]
    return [name for name in common if differs(ours[name], theirs[name])]


def _names(
    pair: Pair, ours: Mapping[str, TensorContent], theirs: Mapping[str, TensorContent]
) -> Iterator[Difference]:
    """Yield that each model has parameters that the other lacks."""
    only_ours = [name for name in ours if name not in theirs]
    only_theirs = [name for name in theirs if name not in ours]
    if only_ours or only_theirs:
        values = [shorten(", ".join(n) or "none") for n in (only_ours, only_theirs)]
        subject = "the parameters that the other model lacks"
        yield pair.difference(_NAMES, values, subject=subject)


def _shapes(
    pair: Pair,
    names: Sequence[str],
    ours: Mapping[str, TensorContent],
    theirs: Mapping[str, TensorContent],
) -> Iterator[Difference]:
    if not names:
        return
    first = names[0]
    more = f" (and {len(names) - 1} more)" if len(names) > 1 else ""
    values = [str(list(each[first].shape)) for each in (ours, theirs)]
    subject = f"the shape of parameter {first}{more}"
    yield pair.difference(_SHAPES, values, subject=subject)


def _parameters(side: Side) -> dict[str, TensorContent]:
    contents = () if side.set_up is None else side.set_up.parameters
    return {content.name: content for content in contents}


def _values(
    pair: Pair,
    names: Sequence[str],
    ours: Mapping[str, TensorContent],
    theirs: Mapping[str, TensorContent],
) -> Iterator[Difference]:
    if not names:
        return
    first = names[0]
    common = sum(name in theirs for name in ours)
    shown = ", ".join(names[:3])
    more = f" and {len(names) - 3} more" if len(names) > 3 else ""
    values = [described(each[first]) for each in (ours, theirs)]
    text = (
        f"the initial weights differ in {len(names)} of {common} parameters: "
        f"{shown}{more}; {first} has {values[1]} in {pair.candidate.name}, "
        f"{values[0]} in {pair.reference.name}"
    )
    is_rounded = all(is_close(ours[name], theirs[name]) for name in names)
    why = _RULE.why
    if is_rounded:
        why = "they differ in their last bits alone, as after a conversion"
    elif all(_alike_in_spread(ours[name], theirs[name]) for name in names):
        why = f"{why}; they have the same spread: drawn with other random numbers"
    severity = ROUNDING if is_rounded else CHANGES
    yield pair.difference(_RULE, values, text=text, why=why, severity=severity)


def differs(ours: TensorContent, theirs: TensorContent) -> bool:
    """Return True for other bits, or another shape or dtype; of samples the samples."""
    if (ours.shape, ours.dtype) != (theirs.shape, theirs.dtype):
        return True
    if ours.hash is None or theirs.hash is None or ours.whole != theirs.whole:
        return not is_close(ours, theirs)
    return ours.hash != theirs.hash


def is_close(ours: TensorContent, theirs: TensorContent) -> bool:
    """Return True where the statistics differ by rounding alone."""
    if ours.shape != theirs.shape:
        return False
    values = [(c.mean, c.std, c.min, c.max) for c in (ours, theirs)]
    size = max((abs(v) for side in values for v in side if v is not None), default=0.0)
    for mine, other in zip(*values, strict=True):
        if mine is None or other is None:
            return mine is other
        if abs(mine - other) > ROUNDED * size:
            return False
    return True


def _alike_in_spread(ours: TensorContent, theirs: TensorContent) -> bool:
    """Return True where the standard deviations agree as two samples' do, to 4 sigma."""
    if ours.std is None or theirs.std is None or ours.shape != theirs.shape:
        return False
    count = max(1, math.prod(ours.shape))
    allowed = 4 * math.sqrt(1 / count)  # of a difference of two: sqrt(2) * 1/sqrt(2n)
    return abs(ours.std - theirs.std) <= allowed * max(ours.std, theirs.std)


def described(content: TensorContent) -> str:
    """Return what a tensor held, in a few words."""
    if content.mean is None or content.std is None:
        return f"{content.dtype} {list(content.shape)}"
    return f"mean {content.mean:.4g} and std {content.std:.4g}"
