"""Bug or rounding: both sides once more in fp64. What stays there is no rounding; what shrinks with the format is.

An error of rounding is proportional to the unit roundoff u of the format: from a format with u to fp64 it shrinks by
2**-53 / u. An error of the program does not depend on the format. Between the two the geometric mean decides, with a
factor of 16 to both sides that stays undecided.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

import polars as pl
import torch
from torch import Tensor

from roundoff.compare import Culprit, relative_distance
from roundoff.verbs.compare import Comparison

GREY = 16.0
BUG, ROUNDING, UNDECIDED = "bug", "rounding", "undecided"


def verdict(error: float, error_fp64: float, unit: float) -> str:
    """``bug``, ``rounding`` or ``undecided`` of two relative errors; ``unit`` is the unit roundoff that ``error`` is from.

    An infinite error (NaN on one side) counts as 1; so does NaN. No error in fp64 is rounding.

    >>> verdict(3e-3, 2e-16, 2**-8), verdict(3e-3, 3e-3, 2**-8), verdict(1e-7, 0.0, 2**-24)
    ('rounding', 'bug', 'rounding')
    >>> verdict(1e-7, 1e-12, 2**-24)
    'undecided'
    """
    measured, stays = (min(e, 1.0) if e == e else 1.0 for e in (error, error_fp64))
    limit = max(measured, unit) * math.sqrt(2.0**-53 / unit)
    if stays <= limit / GREY:
        return ROUNDING
    return BUG if stays > limit * GREY else UNDECIDED


def decided(
    low: Comparison,
    high: Comparison | str,
    outputs: float | None,
    outputs_fp64: float | None,
    unit: float,
) -> dict[str, Any]:
    """``site``, ``error`` and ``error_fp64`` there (relative; of the outputs where no site is named), ``output_error``,
    ``output_error_fp64``, ``verdict`` and ``reason``. ``high`` is the comparison in fp64, or why there is none."""
    named = low.divergence
    found: dict[str, Any] = {
        "site": named.site if named else None,
        "error": (site_error(low, named) if named else None) or outputs,
        "error_fp64": None,
        "output_error": outputs,
        "output_error_fp64": outputs_fp64,
    }
    if isinstance(high, str):
        return found | {"verdict": UNDECIDED, "reason": f"not run in fp64: {high}"}
    stays = site_error(high, named) if named else None
    if stays is None:
        # not found there (a cast, an operator of another format): what the program ends with decides
        found["site"], found["error"], stays = None, outputs, outputs_fp64
    found["error_fp64"] = stays
    if found["error"] is None or stays is None:
        return found | {
            "verdict": UNDECIDED,
            "reason": "there is nothing to measure in fp64",
        }
    where = f"at {found['site']}" if found["site"] else "of the outputs"
    judged = verdict(found["error"], stays, unit)
    if judged == BUG and named and named.call < 0:
        judged = UNDECIDED
        reason = f"the two differ at {named.site} before anything runs: weights or data, not arithmetic"
    elif judged == BUG:
        reason = f"the difference {where} stays at {stays:.1e} in fp64 ({found['error']:.1e} before): not rounding"
    elif judged == ROUNDING:
        reason = f"the difference {where} shrinks from {found['error']:.1e} to {stays:.1e} in fp64: rounding"
    else:
        reason = (
            f"the difference {where} is {found['error']:.1e}, and {stays:.1e} in fp64: less than before, more than "
            "rounding leaves"
        )
    return found | {"verdict": judged, "reason": reason}


def site_error(comparison: Comparison, named: Culprit) -> float | None:
    """The error of a named operator's result (the largest, where its first one is not measured); None without any."""
    rows = comparison.table.filter(
        (pl.col("site") == named.site)
        & (pl.col("phase") == named.phase)
        & (pl.col("step") == named.step)
        & (pl.col("rank") == named.rank)
        & pl.col("error").is_not_null()
    )
    first = rows.filter(pl.col("place") == 0)
    rows = (
        rows if first.is_empty() else first
    )  # others are what its backward pass needs
    return None if rows.is_empty() else float(rows["error"].max())  # type: ignore[arg-type]


def outputs_error(
    ours: Sequence[Mapping[str, Tensor]], theirs: Sequence[Mapping[str, Tensor]]
) -> float | None:
    """The largest relative distance of two runs' outputs, one mapping a step; infinite where shapes or NaN disagree, None
    where they have no tensor in common."""
    found: list[float] = []
    for one, two in zip(ours, theirs, strict=True):
        for name in one.keys() & two.keys():
            wide = torch.complex128 if one[name].is_complex() else torch.float64
            distance, _ = relative_distance(one[name].to(wide), two[name].to(wide))
            found.append(math.inf if distance is None else distance)
    return max(found, default=None)
