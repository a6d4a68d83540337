"""A loss scale for half-precision gradients, from the gradients of a run.

Multiplying the loss by a scale multiplies every gradient by it, so that small ones don't
become zero (Micikevicius et al., Mixed Precision Training, ICLR 2018, section 3.2:
choose it "so that its product with the maximum absolute gradient value is below
65,504").
"""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping
from dataclasses import dataclass, replace

import numpy as np
import polars as pl

from roundoff.compare.nonfinite.ranges import Histograms, floating
from roundoff.formats import parse_format


@dataclass(frozen=True)
class LossScale:
    """A recommended power of two, and what it is made of.

    Attributes:
        format: of the gradients.
        margin: powers of two that stay free.
        scale: the largest power of two s with ``largest * s < 2**-margin * (largest
            finite value of the format)``; None where there are no gradients (``note``
            says why).
        largest: the largest gradient magnitude at scale 1, at ``site`` in ``step``.
        zero_at_1: the share of nonzero gradients that the format rounds to zero without
            a scale, with its standard error.
        zero_at_scale: the share with the scale, with its standard error.
        gradients: how many tensors there are.
        recorded: the largest scale that the run itself used, which is divided out.
        overflowed: its steps whose gradients were not finite.
        note: what limits the recommendation.
    """

    format: str
    margin: float
    scale: float | None
    largest: float | None = None
    site: str | None = None
    step: int | None = None
    zero_at_1: float | None = None
    zero_at_1_stderr: float | None = None
    zero_at_scale: float | None = None
    zero_at_scale_stderr: float | None = None
    gradients: int = 0
    recorded: float | None = None
    overflowed: int = 0
    note: str = ""


def recommend(
    ops: pl.DataFrame,
    recorded: Mapping[tuple[int, int], float],
    lost: Collection[tuple[int, int]] = (),
    fmt: str = "fp16",
    margin: float = 1.0,
) -> LossScale:
    """Recommend the loss scale for a run's backward pass in a format.

    Every floating-point value of the backward pass has to stay in range, so
    intermediate gradients count as those of parameters do. Leading scalars don't: the
    gradient of the loss to itself, 1, and what multiplies it while it is one number;
    autocast keeps the loss in fp32.

    The margin is in powers of two. The default, 1, leaves room for gradients twice as
    large as any recorded: it is where torch's GradScaler rests after it halved a scale
    that overflowed. 0 is the published rule.

    Where a step's gradients are not finite, their true maximum is unknown; if the run
    has a loss scale there, the recommendation is at most half of it, as the scale in
    use was too large (or, if the cause was another, as good).

    Args:
        ops: rows of the run.
        recorded: loss scale by (rank, step), where the run has one.
        lost: each (rank, step) with gradients that are not finite, and not meant to be.
        fmt: the format of the gradients.
        margin: powers of two below the largest finite value.
    """
    target = parse_format(fmt)
    empty = LossScale(
        format=target.name,
        margin=margin,
        scale=None,
        recorded=max(recorded.values(), default=None),
        overflowed=len({step for _, step in lost}),
    )
    backward = ops.filter(pl.col("phase") == "backward")
    rows = _without_leading_scalars(floating(backward))
    if rows.is_empty():
        why = "the run has no backward pass with finite floating-point values"
        return replace(empty, note=why)
    places = zip(rows["rank"].to_list(), rows["step"].to_list(), strict=True)
    scales = np.array([recorded.get(place, 1.0) for place in places])
    histograms = Histograms(rows)
    gradients = histograms.amax / scales
    largest_row = int(gradients.argmax())
    largest = float(gradients[largest_row])
    if not largest:
        return replace(empty, note="every gradient is zero")
    scale = power_below(target.max_finite * 2.0**-margin, largest)
    scale, notes = _limited_by_lost_steps(scale, recorded, lost)
    if rows["dtype"].is_in(["float16", "float8_e5m2", "float8_e4m3fn"]).any():
        notes.append(
            "gradients recorded in a small format have lost what underflowed there "
            "already"
        )
    unscaled = histograms.fates(target.name, 1.0 / scales)["zero"]
    scaled = histograms.fates(target.name, scale / scales)["zero"]
    zero_at_1 = histograms.together(unscaled)
    zero_at_scale = histograms.together(scaled)
    return replace(
        empty,
        scale=scale,
        largest=largest,
        site=str(rows["site"][largest_row]),
        step=int(rows["step"][largest_row]),
        zero_at_1=zero_at_1.share,
        zero_at_1_stderr=zero_at_1.stderr,
        zero_at_scale=zero_at_scale.share,
        zero_at_scale_stderr=zero_at_scale.stderr,
        gradients=rows.height,
        note="; ".join(notes),
    )


def _limited_by_lost_steps(
    scale: float,
    recorded: Mapping[tuple[int, int], float],
    lost: Collection[tuple[int, int]],
) -> tuple[float, list[str]]:
    """Return the scale, at most half of those at which gradients were not finite; and notes."""
    failed = min((recorded[place] for place in lost if place in recorded), default=None)
    if failed is not None and scale > failed / 2:
        note = f"half of {failed:g}, at which gradients of this run were not finite"
        return 2.0 ** math.floor(math.log2(failed / 2)), [note]
    if lost:
        note = "some gradients are not finite: the largest that is finite was used"
        return scale, [note]
    return scale, []


def power_below(limit: float, value: float) -> float:
    """Return the largest power of two s with ``value * s < limit``, for positive
    numbers; at most 2**127, as scales are fp32.

    >>> power_below(65504.0, 1.0), power_below(65536.0, 1.0)
    (32768.0, 32768.0)
    >>> power_below(65504.0, 3e-5)
    2147483648.0
    """
    limit_fraction, limit_exponent = math.frexp(limit)
    fraction, exponent = math.frexp(value)
    power = limit_exponent - exponent
    if fraction >= limit_fraction:
        power -= 1
    return math.ldexp(1.0, min(power, 127))


def _without_leading_scalars(rows: pl.DataFrame) -> pl.DataFrame:
    """Without the scalars with which each backward pass starts."""
    is_scalar = pl.col("shape").list.len() == 0
    started = (~is_scalar).cum_sum().over("rank", "step", order_by="record") > 0
    return rows.filter(started | ~is_scalar)
