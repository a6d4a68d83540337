"""The steps of one rank that agree by their statistics, compared as columns."""

from __future__ import annotations

import functools
from collections.abc import Sequence

import numpy as np
import polars as pl

from roundoff.compare.pairing.alignment import MATCHED
from roundoff.compare.rounding.distance import (
    COUNTS,
    VALUES,
    StatisticColumns,
    largest_difference,
)
from roundoff.compare.rounding.rounding_bound import MARGIN, unit
from roundoff.compare.tensors.exact import Array
from roundoff.errors import RunError
from roundoff.record import Run, site_name

#: Two rows are at the same place of the program where these agree.
_PLACE = (
    "step",
    "phase",
    "module",
    "operator",
    "index",
    "place",
    "role",
    "name",
    "shape",
)
#: What aligned rows of steps that agree need; the others are read only where something
#: is to be explained.
_NEEDED = (
    *_PLACE,
    "rank",
    "record",
    "call",
    "line",
    "dtype",
    "numel",
    "view_of",
    "hash",
    "blob",
    "reason",
    "arguments",
    *VALUES,
    *COUNTS,
)


def agreeing_steps(
    reference: Run, candidate: Run, rank: int, steps: Sequence[int]
) -> dict[int, pl.DataFrame]:
    """Return the tables of the steps that agree by their statistics, by number.

    A step does where every row of one run has its counterpart at the same place, and no
    distance is above the least that rounding explains. None of a run that is damaged.
    """
    try:
        ours = _columns(reference, rank, steps)
        theirs = _columns(candidate, rank, steps)
    except RunError:
        return {}  # step by step, so that the sound ones are compared
    heights = ours.group_by("step", maintain_order=True).len().rows()
    if heights != theirs.group_by("step", maintain_order=True).len().rows():
        return {}
    table, agrees = _compared_as_columns(ours, theirs)
    agreeing: dict[int, pl.DataFrame] = {}
    start = 0
    for step, height in heights:
        if agrees[start : start + height].all():
            agreeing[int(step)] = table.slice(start, height)
        start += height
    return agreeing


def _columns(run: Run, rank: int, steps: Sequence[int]) -> pl.DataFrame:
    return (
        run.part(rank)
        .filter(pl.col("step").is_in(list(steps)))
        .select(*_NEEDED, site_name())
        .sort("step", "record")
        .collect()
    )


def _compared_as_columns(
    ours: pl.DataFrame, theirs: pl.DataFrame
) -> tuple[pl.DataFrame, Array]:
    """Return the rows of both runs side by side, and which of them agree.

    Statistics agree where their difference is within the least that rounding explains
    in the format.
    """
    same_place = ours.select(_PLACE).hash_rows() == theirs.select(_PLACE).hash_rows()
    same_format = ours["dtype"].eq_missing(theirs["dtype"])
    same_counts = functools.reduce(
        pl.Series.__and__, (ours[c].eq_missing(theirs[c]) for c in COUNTS)
    )
    same_arguments = ours["arguments"].eq(theirs["arguments"]).fill_null(True)
    measured = ours["nan"].is_not_null()
    error, equal = _statistics_error(ours, theirs)
    dtypes = ours["dtype"].drop_nulls().unique()
    bounds = {dtype: MARGIN * 2 * unit(dtype) for dtype in dtypes}
    bound = ours["dtype"].replace_strict(bounds, default=0.0, return_dtype=pl.Float64)
    unmeasured = ~measured.to_numpy()
    same_calls = same_place & same_arguments & same_format & same_counts
    agrees = same_calls.to_numpy() & ((error <= bound.to_numpy()) | unmeasured)
    if all(side["blob"].is_not_null().any() for side in (ours, theirs)):
        same_leaves = ours["hash"].eq_missing(theirs["hash"]).to_numpy()
        agrees &= (equal & same_leaves) | unmeasured
    table = _side_by_side(ours, theirs).with_columns(
        reason=pl.when(measured.not_()).then(
            pl.coalesce("reason", pl.lit("no statistics on both sides"))
        ),
        error=pl.when(measured).then(pl.Series(error).fill_nan(None)),
        equal=pl.Series(equal) & measured,
        tolerance=bound,
    )
    return table, agrees


def _statistics_error(ours: pl.DataFrame, theirs: pl.DataFrame) -> tuple[Array, Array]:
    """Return the relative difference of the statistics of each row, and where it is none."""
    our_columns = _statistic_columns(ours)
    their_columns = _statistic_columns(theirs)

    def maximum(*values: Array) -> Array:
        return functools.reduce(np.fmax, values)

    with np.errstate(all="ignore"):
        error = largest_difference(our_columns, their_columns, maximum)
    equal = np.ones(ours.height, dtype=bool)
    for name in VALUES:
        x = getattr(our_columns, name)
        y = getattr(their_columns, name)
        equal &= (x == y) | (np.isnan(x) & np.isnan(y))
    error = np.where(np.isfinite(error), error, np.inf)
    return np.where(equal, 0.0, error), equal


def _statistic_columns(rows: pl.DataFrame) -> StatisticColumns:
    names = (*VALUES, *COUNTS, "numel")
    return StatisticColumns(**{name: rows[name].to_numpy() for name in names})


def _side_by_side(ours: pl.DataFrame, theirs: pl.DataFrame) -> pl.DataFrame:
    """Return the names of both sides of rows at the same places."""
    return ours.select(
        "rank",
        "step",
        "phase",
        "site",
        "operator",
        "place",
        "role",
        "name",
        "dtype",
        "shape",
        "numel",
        "reason",
        pl.col("view_of").is_not_null().alias("view"),
        pl.lit(MATCHED).alias("status"),
        theirs["record"],
        theirs["line"],
        theirs["call"],
        pl.col("site").alias("reference_site"),
        pl.col("operator").alias("reference_operator"),
        pl.col("dtype").alias("reference_dtype"),
        pl.col("shape").alias("reference_shape"),
        pl.col("line").alias("reference_line"),
        pl.col("record").alias("reference_record"),
    )
