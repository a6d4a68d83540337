"""How far honest runs of one program lie apart: the floor under a comparison.

Rows of two runs are the same when ``rank, step, phase, module, operator, index, place,
role`` are. Their distance is

- where both kept the tensor, all of it or the same sample: ``|x - y| / |x|``, l2 norms
  in fp64 over the elements that are finite; equal NaN and infinities at the same places
  are no difference;
- otherwise from statistics, the largest of: the difference of the l2 norms relative to
  the reference's, those of mean and standard deviation relative to its root mean
  square, those of minimum and maximum relative to its largest magnitude. It says less:
  values that change places have none.

Where it cannot be computed the number is null and ``reason`` says why: the reference is
zero and the other is not, NaN or Inf in other places, another shape, no such row.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import fields
from typing import Any

import polars as pl
import torch
from torch import Tensor

from roundoff.compare.rounding.distance import (
    COUNTS,
    VALUES,
    StatisticColumns,
    largest_difference,
)
from roundoff.errors import RunError
from roundoff.ops import operators_that
from roundoff.record import Run, StoredTensor, complete, own_error

#: The columns that find a tensor.
_PLACE = tuple(field.name for field in fields(StoredTensor))
KEY = ("rank", "step", "phase", "module", "operator", "index", "place", "role")
_NEEDED = (
    "record",
    "call",
    "line",
    "name",
    "overload",
    "inputs",
    "view_of",
    "dtype",
    "shape",
    "stride",
    "offset",
    "device",
    "numel",
    *VALUES,
    *COUNTS,
    "zero",
    "subnormal",
    "exponent",
    "exponents",
    "hash",
    "blob",
    "reason",
)
ZERO = "the reference is zero, the other is not"
SPECIALS = "NaN or Inf in other places"
SHAPE = "another shape"
ABSENT = "not in the other run"
GARBAGE = "uninitialised memory"


def noise_floor(reference: Run, others: Sequence[Run]) -> pl.DataFrame:
    """Return the floor of each row of ``reference``.

    Args:
        reference: a run.
        others: runs of the same program with ``noise``, or repeated.

    Returns:
        A row each: the key, ``site``, ``record``, and

        - ``floor``, the largest distance to one of ``others``, and ``rms``, the root of
          the mean of their squares; both relative, without unit;
        - ``runs``, how many of ``others`` they are from;
        - ``measure``: ``tensors``, ``sample`` or ``statistics``; the same for all of
          ``others`` in a row;
        - ``reason``: why a distance to one of them, or to all, is missing.

    Raises ``RunError`` without ``others``, and for a damaged table; a damaged tensor is
    a reason.
    """
    if not others:
        raise RunError(
            "no other run of the same program",
            where="noise_floor",
            expected="runs with noise, or repeated",
            do="roundoff capture -o runs/a --noise 3 --repeats 2 -- train.py",
        )
    rows = measurable_rows(reference)
    pairs = [paired(rows, other) for other in others]
    floors = distances(reference, others, rows, pairs)
    names = rows.select(*KEY, "site", "record")
    return pl.concat([names, floors], how="horizontal")


def measurable_rows(run: Run) -> pl.DataFrame:
    """Return the columns that find and measure a row, in order of rank, step and record.

    ``garbage`` marks memory that nothing was written to, and views of it.
    """
    rows = (
        complete(run.ops)
        .select(*KEY, "site", *_NEEDED)
        .sort("rank", "step", "record")
        .collect()
    )
    empty = (
        pl.col("operator")
        .str.strip_chars_end("_")
        .is_in(list(operators_that("leave memory unwritten")))
    )
    views = rows.filter(empty).select(
        "rank", "step", pl.col("record").alias("view_of"), pl.lit(True).alias("shows")
    )
    rows = rows.join(
        views, on=["rank", "step", "view_of"], how="left", maintain_order="left"
    )
    garbage = empty | pl.col("shows").fill_null(False)
    return rows.with_columns(garbage.alias("garbage")).drop("shows")


def paired(rows: pl.DataFrame, other: Run) -> pl.DataFrame:
    """Return ``rows`` beside the same rows of ``other``, whose columns end in ``_other``.

    They are null where ``other`` has no such row.
    """
    theirs = measurable_rows(other).unique(KEY, keep="first", maintain_order=True)
    theirs = theirs.drop("site", "garbage")
    return rows.join(theirs, on=KEY, how="left", suffix="_other", maintain_order="left")


def distances(
    reference: Run,
    others: Sequence[Run],
    rows: pl.DataFrame,
    pairs: Sequence[pl.DataFrame],
) -> pl.DataFrame:
    """Return ``floor``, ``rms``, ``runs``, ``measure`` and ``reason`` of each row.

    ``pairs`` are the rows beside those of each of ``others``.
    """
    kept = [kept_by_both(reference, other) for other in others]
    by_tensor = rows["blob"].is_not_null() & ~rows["garbage"]
    for couples, what in zip(pairs, kept, strict=True):
        # a run that lacks the row does not decide how it is measured
        measurable = couples["blob_other"].is_not_null() & (what is not None)
        by_tensor &= measurable | couples["record_other"].is_null()
    columns: dict[str, pl.Series] = {"by_tensor": by_tensor}
    for number, (other, couples) in enumerate(zip(others, pairs, strict=True)):
        by_statistics = _statistics_distance(couples)
        distance = by_statistics["distance"].to_list()
        reason = by_statistics["reason"].to_list()
        for place in (by_tensor & couples["record_other"].is_not_null()).arg_true():
            couple = couples.row(place, named=True)
            distance[place], reason[place] = _tensor_distance(reference, other, couple)
        columns[f"distance{number}"] = pl.Series(distance, dtype=pl.Float64)
        columns[f"reason{number}"] = pl.Series(reason, dtype=pl.Utf8)
    return _floors(pl.DataFrame(columns), len(others), kept[0])


def _floors(columns: pl.DataFrame, count: int, kept: str | None) -> pl.DataFrame:
    """Put the distances to ``count`` runs together."""
    distance = [f"distance{number}" for number in range(count)]
    reason = [f"reason{number}" for number in range(count)]
    runs = pl.sum_horizontal(pl.col(name).is_not_null() for name in distance)
    squares = pl.sum_horizontal(pl.col(name) ** 2 for name in distance)
    measure = pl.when("by_tensor").then(pl.lit(kept)).otherwise(pl.lit("statistics"))
    return columns.select(
        pl.max_horizontal(distance).alias("floor"),
        pl.when(runs > 0).then((squares / runs).sqrt()).alias("rms"),
        runs.cast(pl.Int64).alias("runs"),
        pl.when(runs > 0).then(measure).alias("measure"),
        pl.coalesce(reason).alias("reason"),
    )


def kept_by_both(one: Run, other: Run) -> str | None:
    """Return what both keep of a tensor: ``tensors``, ``sample`` at the same places, or None."""
    keep = one.about.keep
    if keep != other.about.keep or keep not in ("tensors", "sample"):
        return None
    if keep == "sample" and one.about.seed != other.about.seed:
        return None
    return str(keep)


def relative_distance(x: Tensor, y: Tensor) -> tuple[float | None, str | None]:
    """Return ``|x - y| / |x|``, or None and why not.

    Zero for equal tensors, also for zeros and empty ones.

    >>> import torch
    >>> x = torch.tensor([3.0, 4.0, torch.inf])
    >>> relative_distance(x, torch.tensor([3.0, 3.5, torch.inf]))
    (0.1, None)
    >>> relative_distance(torch.zeros(2), torch.ones(2))
    (None, 'the reference is zero, the other is not')
    """
    if x.shape != y.shape:
        return None, SHAPE
    wide = torch.complex128 if x.is_complex() else torch.float64
    [error] = own_error(y, x.to(wide))
    if error is None:
        return None, "values that cannot be read"
    if math.isinf(error.l2):
        return None, SPECIALS
    if not error.l2:
        return 0.0, None
    if not error.reference:
        return None, ZERO
    return error.l2 / error.reference, None


def _tensor_distance(
    one: Run, other: Run, couple: dict[str, Any]
) -> tuple[float | None, str | None]:
    try:
        x = one.kept(own_tensor(couple))
        y = other.kept(other_tensor(couple))
    except RunError as error:  # a damaged file
        return None, str(error).splitlines()[0]
    return relative_distance(x, y)


def own_tensor(couple: dict[str, Any]) -> StoredTensor:
    """Return where the tensor of the first run's row of a pair is."""
    return StoredTensor(**{name: couple[name] for name in _PLACE})


def other_tensor(couple: dict[str, Any]) -> StoredTensor:
    """Return where the tensor of the other run's row of a pair is."""
    return StoredTensor(
        **{name: couple.get(f"{name}_other", couple[name]) for name in _PLACE}
    )


def _statistics_distance(pairs: pl.DataFrame) -> pl.DataFrame:
    """Return ``distance`` and ``reason`` of each pair, from statistics."""
    names = (*VALUES, *COUNTS, "numel")
    distance = largest_difference(
        StatisticColumns(**{name: pl.col(name) for name in names}),
        StatisticColumns(**{name: pl.col(f"{name}_other") for name in names}),
        pl.max_horizontal,
    )
    same = pl.col("hash").is_not_null() & (pl.col("hash") == pl.col("hash_other"))
    reason = (
        pl.when("garbage")
        .then(pl.lit(GARBAGE))
        .when(pl.col("record_other").is_null())
        .then(pl.lit(ABSENT))
        .when(same)
        .then(None)
        .when(pl.col("dtype").is_null())
        .then(pl.col("reason").fill_null("no tensor"))
        .when(_differ("numel", "shape"))
        .then(pl.lit(SHAPE))
        .when(pl.col("nan").is_null() | pl.col("nan_other").is_null())
        .then(pl.coalesce("reason", "reason_other", pl.lit("no statistics")))
        .when(_differ(*COUNTS))
        .then(pl.lit(SPECIALS))
        .when((pl.col("l2") == 0) & (pl.col("l2_other") != 0))
        .then(pl.lit(ZERO))
    )
    # without finite elements, or all of them zero: nothing that could differ is left
    nothing = pl.col("l2").is_null() | (pl.col("l2") == 0)
    value = pl.when(same | nothing).then(0.0).otherwise(distance)
    return pairs.select(
        pl.when(reason.is_null()).then(value).cast(pl.Float64).alias("distance"),
        reason.cast(pl.Utf8).alias("reason"),
    )


def _differ(*names: str) -> pl.Expr:
    return pl.any_horizontal(
        pl.col(name).ne_missing(pl.col(f"{name}_other")) for name in names
    )
