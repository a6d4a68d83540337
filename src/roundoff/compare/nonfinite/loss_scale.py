"""A loss scale for half-precision gradients, from the gradients of a run.

Multiplying the loss by a scale multiplies every gradient by it, so that small ones don't become zero (Micikevicius et
al., Mixed Precision Training, ICLR 2018, section 3.2: choose it "so that its product with the maximum absolute gradient
value is below 65,504").
"""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np
import polars as pl

from roundoff.compare.nonfinite.ranges import Histograms, floating
from roundoff.formats import parse_format


@dataclass(frozen=True)
class LossScale:
    """A recommended power of two, and what it is made of.

    ``scale`` is the largest power of two s with ``largest * s < 2**-margin * (largest finite value of the format)``,
    None where there are no gradients (``note`` says why). ``largest`` is the largest gradient magnitude at scale 1, at
    ``site`` in ``step``. ``zero_at_1`` and ``zero_at_scale`` are the shares of nonzero gradients that the format rounds
    to zero without and with it, each with a standard error. ``recorded`` is the largest scale that the run itself
    used, which is divided out, and ``overflowed`` counts its steps whose gradients were not finite.
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

    def to_dict(self) -> dict[str, Any]:
        return asdict(self)


def recommend(
    ops: pl.DataFrame,
    recorded: Mapping[tuple[int, int], float],
    lost: Collection[tuple[int, int]] = (),
    fmt: str = "fp16",
    margin: float = 1.0,
) -> LossScale:
    """The loss scale for a run's backward pass in a format.

    Every floating-point value of the backward pass has to stay in range, so intermediate gradients count as those of
    parameters do. Leading scalars don't: the gradient of the loss to itself, 1, and what multiplies it while it is
    one number; autocast keeps the loss in fp32.

    The margin is in powers of two. The default, 1, leaves room for gradients twice as large as any recorded: it is
    where torch's GradScaler rests after it halved a scale that overflowed. 0 is the published rule.

    Where a step's gradients are not finite, their true maximum is unknown; if the run has a loss scale there, the
    recommendation is at most half of it, as the scale in use was too large (or, if the cause was another, as good).

    Args:
        ops: rows of the run.
        recorded: loss scale by (rank, step), where the run has one.
        lost: each (rank, step) with gradients that are not finite, and not meant to be.
        fmt: the format of the gradients.
        margin: powers of two below the largest finite value.
    """
    target = parse_format(fmt)
    backward = ops.filter(pl.col("phase") == "backward")
    about: dict[str, Any] = {
        "recorded": max(recorded.values(), default=None),
        "overflowed": len({step for _, step in lost}),
    }
    own = _after_the_seed(floating(backward))
    if not own.height:
        why = "the run has no backward pass with finite floating-point values"
        return LossScale(target.name, margin, None, note=why, **about)
    places = zip(own["rank"].to_list(), own["step"].to_list(), strict=True)
    scales = np.array([recorded.get(place, 1.0) for place in places])
    histograms = Histograms(own)
    gradients = histograms.amax / scales
    at = int(gradients.argmax())
    largest = float(gradients[at])
    if not largest:
        return LossScale(
            target.name, margin, None, note="every gradient is zero", **about
        )
    scale = power_below(target.max_finite * 2.0**-margin, largest)
    note = ""
    used = [recorded[place] for place in lost if place in recorded]
    if used and scale > min(used) / 2:
        scale = 2.0 ** math.floor(math.log2(min(used) / 2))
        note = f"half of {min(used):g}, at which gradients of this run were not finite"
    elif lost:
        note = "some gradients are not finite: the largest that is finite was used"
    if own["dtype"].is_in(["float16", "float8_e5m2", "float8_e4m3fn"]).any():
        note += "; " if note else ""
        note += "gradients recorded in a small format have lost what underflowed there already"
    now = histograms.together(histograms.fates(target.name, 1.0 / scales)["zero"])
    then = histograms.together(histograms.fates(target.name, scale / scales)["zero"])
    return LossScale(
        target.name,
        margin,
        scale,
        largest,
        str(own["site"][at]),
        int(own["step"][at]),
        now["share"],
        now["stderr"],
        then["share"],
        then["stderr"],
        own.height,
        note=note,
        **about,
    )


def power_below(limit: float, value: float) -> float:
    """The largest power of two s with ``value * s < limit``, for positive numbers; at most 2**127, as scales are fp32.

    >>> power_below(65504.0, 1.0), power_below(65536.0, 1.0), power_below(65504.0, 3e-5)
    (32768.0, 32768.0, 2147483648.0)
    """
    fraction, exponent = math.frexp(limit)
    part, power = math.frexp(value)
    return math.ldexp(1.0, min(exponent - power - (0 if part < fraction else 1), 127))


def _after_the_seed(own: pl.DataFrame) -> pl.DataFrame:
    """Without the scalars with which each backward pass starts."""
    scalar = pl.col("shape").list.len() == 0
    started = (~scalar).cum_sum().over("rank", "step", order_by="record") > 0
    return own.filter(started | ~scalar)
