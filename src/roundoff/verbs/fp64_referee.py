"""Bug or rounding: both sides once more in fp64.

What stays there is no rounding; what shrinks with the format is. An error of rounding
is proportional to the unit roundoff u of the format: from a format with u to fp64 it
shrinks by 2**-53 / u. An error of the program does not depend on the format. Between
the two the geometric mean decides, with a factor of 16 to both sides that stays
undecided.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import replace

import polars as pl
import torch
from torch import Tensor

from roundoff.compare import (
    FAIL,
    REGION,
    REGION_LIMIT,
    Culprit,
    relative_distance,
)
from roundoff.report import HigherPrecision, Verdict
from roundoff.verbs.compare import Comparison

#: Unit roundoff of fp64.
FP64_UNIT = 2.0**-53
#: Factor on both sides of the limit within which nothing is decided.
GREY = 16.0
#: Outputs of two fp64 runs that are the same but for rounding differ by no more: REGION
#: of its roundings, the depth of a whole program.
FP64_END = REGION * FP64_UNIT
#: Columns that say who made an error.
_BLAME = ("cause", "origin", "blamed", "looks_like")


def verdict(error: float, error_fp64: float, unit: float) -> Verdict:
    """Judge two relative errors; ``unit`` is the unit roundoff that ``error`` is from.

    An infinite error (NaN on one side) counts as 1; so does NaN. No error in fp64 is
    rounding.

    >>> verdict(3e-3, 2e-16, 2**-8), verdict(3e-3, 3e-3, 2**-8)
    ('rounding', 'bug')
    >>> verdict(1e-7, 0.0, 2**-24), verdict(1e-7, 1e-12, 2**-24)
    ('rounding', 'undecided')
    """
    stays = _bounded(error_fp64)
    limit = max(_bounded(error), unit) * math.sqrt(FP64_UNIT / unit)
    if stays <= limit / GREY:
        return "rounding"
    return "bug" if stays > limit * GREY else "undecided"


def _bounded(error: float) -> float:
    return 1.0 if math.isnan(error) else min(error, 1.0)


def decided(
    low: Comparison,
    high: Comparison | str,
    outputs: float | None,
    outputs_fp64: float | None,
    unit: float,
) -> HigherPrecision:
    """Decide between bug and rounding.

    Args:
        low: the comparison in the candidate's format.
        high: the comparison in fp64, or why there is none.
        outputs: relative distance of the outputs.
        outputs_fp64: the same in fp64.
        unit: unit roundoff of the candidate's format.
    """
    named = low.divergence
    site: str | None = named.site if named else None
    error = (site_error(low, named) if named else None) or outputs
    stays: float | None = None
    if isinstance(high, str):
        judged: Verdict = "undecided"
        reason = f"not run in fp64: {high}"
    else:
        stays = site_error(high, named) if named else None
        if stays is None:
            # not found there (a cast, an operator of another format): what the program
            # ends with decides
            site = None
            error = outputs
            stays = outputs_fp64
        judged, reason = _judged(site, error, stays, unit, named)
        if judged == "bug" and site and _ends_agree(high, outputs_fp64):
            judged = "rounding"
            reason = _another_way(site, stays, outputs_fp64)
    return HigherPrecision(
        site=site,
        error=error,
        error_fp64=stays,
        output_error=outputs,
        output_error_fp64=outputs_fp64,
        verdict=judged,
        reason=reason,
    )


def _judged(
    site: str | None,
    error: float | None,
    stays: float | None,
    unit: float,
    named: Culprit | None,
) -> tuple[Verdict, str]:
    """Return the verdict and its reason; ``named`` is the operator that is blamed."""
    if error is None or stays is None:
        return "undecided", "there is nothing to measure in fp64"
    judged = verdict(error, stays, unit)
    difference = f"the difference {f'at {site}' if site else 'of the outputs'}"
    if judged == "rounding":
        return (
            judged,
            f"{difference} shrinks from {error:.1e} to {stays:.1e} in fp64: rounding",
        )
    if judged == "undecided":
        less = "less than before, more than rounding leaves"
        return judged, f"{difference} is {error:.1e}, and {stays:.1e} in fp64: {less}"
    if named and named.call < 0:
        before = f"the two differ at {named.site} before anything runs"
        return "undecided", f"{before}: weights or data, not arithmetic"
    return (
        judged,
        f"{difference} stays at {stays:.1e} in fp64 ({error:.1e} before): not rounding",
    )


def _ends_agree(high: Comparison, outputs_fp64: float | None) -> bool:
    """Return True where all that fp64 runs end with is the same but for its rounding.

    That is their outputs, parameters, buffers and gradients. What differs before them
    is another way to the same.
    """
    if outputs_fp64 is None or outputs_fp64 > FP64_END:
        return False
    return _ends(high).filter(pl.col("verdict") == FAIL).is_empty()


def _ends(comparison: Comparison) -> pl.DataFrame:
    """Return the rows of the last value of each parameter, buffer and gradient."""
    named = comparison.table.filter(pl.col("name").is_not_null())
    last = named.sort("step", "record").group_by("rank", "name", maintain_order=True)
    return last.last().filter(pl.col("error").is_not_null())


def _another_way(site: str, stays: float | None, outputs: float | None) -> str:
    return (
        f"another formula: the values at {site} differ by {stays or 0:.1e} in fp64 too, "
        f"and what the two runs end with agrees there (outputs to {outputs or 0:.1e})"
    )


def cleared(low: Comparison, higher: HigherPrecision, unit: float) -> Comparison:
    """Return the comparison without its culprits, where fp64 has proven them rounding.

    That is where the two programs end with the same in fp64, and in the candidate's
    format with no more between them than rounding through many operators leaves. A
    kernel that is wrong in this format alone leaves more, and stays.

    Args:
        low: the comparison in the candidate's format.
        higher: what fp64 says of it.
        unit: unit roundoff of the candidate's format.
    """
    allowed = min(REGION * unit, REGION_LIMIT)
    outputs = higher.output_error
    if low.agrees or outputs is None or outputs > allowed:
        return low
    if (higher.output_error_fp64 or 0.0) > FP64_END:
        return low
    beyond = (pl.col("error") > allowed) & (pl.col("error") > pl.col("tolerance"))
    if not _ends(low).filter((pl.col("verdict") == FAIL) & beyond).is_empty():
        return low
    blameless = low.table.with_columns(
        pl.lit(None, dtype=low.table.schema[name]).alias(name) for name in _BLAME
    )
    return replace(low, table=blameless).judge(margin=low.about.margin)


def site_error(comparison: Comparison, named: Culprit) -> float | None:
    """Return the error of a named operator's result.

    The largest of all its values where its first one is not measured; None without any.
    """
    rows = comparison.table.filter(
        (pl.col("site") == named.site)
        & (pl.col("phase") == named.phase)
        & (pl.col("step") == named.step)
        & (pl.col("rank") == named.rank)
        & pl.col("error").is_not_null()
    )
    first = rows.filter(pl.col("place") == 0)
    if not first.is_empty():
        rows = first  # others are what its backward pass needs
    return None if rows.is_empty() else float(rows["error"].max())  # type: ignore[arg-type]


def outputs_error(
    ours: Sequence[Mapping[str, Tensor]], theirs: Sequence[Mapping[str, Tensor]]
) -> float | None:
    """Return the largest relative distance of two runs' outputs, one mapping a step.

    Infinite where shapes or NaN disagree, None where they have no tensor in common.
    """
    distances = [
        _distance(reference[name], candidate[name])
        for reference, candidate in zip(ours, theirs, strict=True)
        for name in reference.keys() & candidate.keys()
    ]
    return max(distances, default=None)


def _distance(reference: Tensor, candidate: Tensor) -> float:
    wide = torch.complex128 if reference.is_complex() else torch.float64
    distance, _ = relative_distance(reference.to(wide), candidate.to(wide))
    return math.inf if distance is None else distance
