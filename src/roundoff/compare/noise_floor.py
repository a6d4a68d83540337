"""How far honest runs of one program lie apart: the floor under a comparison, and what does not even repeat itself.

Rows of two runs are the same when ``rank, step, phase, module, operator, index, place, role`` are. Their distance is

- where both kept the tensor, all of it or the same sample: ``|x - y| / |x|``, l2 norms in fp64 over the elements that are
  finite; equal NaN and infinities at the same places are no difference;
- otherwise from statistics, the largest of: the difference of the l2 norms relative to the reference's, those of mean and
  standard deviation relative to its root mean square, those of minimum and maximum relative to its largest magnitude. It
  says less: values that change places have none.

Where it cannot be computed the number is null and ``reason`` says why: the reference is zero and the other is not, NaN or
Inf in other places, another shape, no such row.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import polars as pl
import torch
from torch import Tensor

from roundoff.compare.distance import VALUES
from roundoff.compare.distance import relative as of_columns
from roundoff.errors import RunError
from roundoff.ops import operators_that
from roundoff.record import Run, StoredTensor, complete, own_error

KEY = ("rank", "step", "phase", "module", "operator", "index", "place", "role")
_COUNTS = ("nan", "posinf", "neginf")
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
    "min",
    "max",
    "mean",
    "l2",
    "std",
    *_COUNTS,
    "zero",
    "subnormal",
    "exponent",
    "exponents",
    "hash",
    "blob",
    "reason",
)
ZERO, SPECIALS = "the reference is zero, the other is not", "NaN or Inf in other places"
SHAPE, ABSENT, GARBAGE = "another shape", "not in the other run", "uninitialised memory"


def noise_floor(reference: Run, others: Sequence[Run]) -> pl.DataFrame:
    """The floor of each row of ``reference``, a row each: the key, ``site``, ``record``, and

    - ``floor``, the largest distance to one of ``others`` (runs of the same program with ``noise``, or repeated), and
      ``rms``, the root of the mean of their squares; both relative, without unit;
    - ``runs``, how many of ``others`` they are from;
    - ``measure``: ``tensors``, ``sample`` or ``statistics``; the same for all of ``others`` in a row;
    - ``reason``: why a distance to one of them, or to all, is missing.

    Raises ``RunError`` without ``others``, and for a damaged table; a damaged tensor is a reason.
    """
    if not others:
        raise RunError(
            "no other run of the same program",
            where="noise_floor",
            expected="runs with noise, or repeated",
            do="roundoff capture -o runs/a --noise 3 --repeats 2 -- train.py",
        )
    rows = rows_of(reference)
    found = distances(reference, others, rows, [pair(rows, other) for other in others])
    return pl.concat([rows.select(*KEY, "site", "record"), found], how="horizontal")


def rows_of(run: Run) -> pl.DataFrame:
    """What finds and measures a row, in order of rank, step and record; ``garbage``: memory that nothing was written to."""
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
    return rows.with_columns(
        (empty | pl.col("shows").fill_null(False)).alias("garbage")
    ).drop("shows")


def pair(rows: pl.DataFrame, other: Run) -> pl.DataFrame:
    """``rows`` with the columns of the same row of ``other``, which end in ``_other`` and are null where it has none."""
    theirs = (
        rows_of(other)
        .unique(KEY, keep="first", maintain_order=True)
        .drop("site", "garbage")
    )
    return rows.join(theirs, on=KEY, how="left", suffix="_other", maintain_order="left")


def distances(
    reference: Run,
    others: Sequence[Run],
    rows: pl.DataFrame,
    pairs: Sequence[pl.DataFrame],
) -> pl.DataFrame:
    """``floor``, ``rms``, ``runs``, ``measure`` and ``reason`` of each row, from its pairs in ``others``."""
    kept = [comparable(reference, other) for other in others]
    whole = rows["blob"].is_not_null() & ~rows["garbage"]
    for couples, what in zip(
        pairs, kept, strict=True
    ):  # one that lacks the row does not decide how it is measured
        here = couples["blob_other"].is_not_null() & (what is not None)
        whole &= here | couples["record_other"].is_null()
    columns: dict[str, pl.Series] = {}
    for number, (other, couples) in enumerate(zip(others, pairs, strict=True)):
        found = _statistics(couples)
        number_of, why = found["distance"].to_list(), found["reason"].to_list()
        for place in (whole & couples["record_other"].is_not_null()).arg_true():
            number_of[place], why[place] = _tensors(
                reference, other, couples.row(place, named=True)
            )
        columns[f"d{number}"] = pl.Series(number_of, dtype=pl.Float64)
        columns[f"r{number}"] = pl.Series(why, dtype=pl.Utf8)
    d, r = ([f"{letter}{i}" for i in range(len(others))] for letter in "dr")
    runs = pl.sum_horizontal(pl.col(c).is_not_null() for c in d)
    measure = (
        pl.when(pl.col("whole")).then(pl.lit(kept[0])).otherwise(pl.lit("statistics"))
    )
    return pl.DataFrame({"whole": whole, **columns}).select(
        pl.max_horizontal(d).alias("floor"),
        pl.when(runs > 0)
        .then((pl.sum_horizontal(pl.col(c) ** 2 for c in d) / runs).sqrt())
        .alias("rms"),
        runs.cast(pl.Int64).alias("runs"),
        pl.when(runs > 0).then(measure).alias("measure"),
        pl.coalesce(r).alias("reason"),
    )


def comparable(one: Run, other: Run) -> str | None:
    """What both keep of a tensor: ``tensors``, ``sample`` at the same places, or None."""
    keep = one.about.keep
    if keep != other.about.keep or keep not in ("tensors", "sample"):
        return None
    return (
        None if keep == "sample" and one.about.seed != other.about.seed else str(keep)
    )


def relative(x: Tensor, y: Tensor) -> tuple[float | None, str | None]:
    """``|x - y| / |x|``, or None and why not. Zero for equal tensors, also for zeros and empty ones.

    >>> import torch
    >>> relative(torch.tensor([3.0, 4.0, torch.inf]), torch.tensor([3.0, 3.5, torch.inf]))
    (0.1, None)
    >>> relative(torch.zeros(2), torch.ones(2))
    (None, 'the reference is zero, the other is not')
    """
    if x.shape != y.shape:
        return None, SHAPE
    wide = torch.complex128 if x.is_complex() else torch.float64
    (found,) = own_error(y, x.to(wide))
    if found is None:
        return None, "values that cannot be read"
    if math.isinf(found.l2):
        return None, SPECIALS
    if not found.l2:
        return 0.0, None
    return (found.l2 / found.reference, None) if found.reference else (None, ZERO)


def _tensors(
    one: Run, other: Run, couple: dict[str, Any]
) -> tuple[float | None, str | None]:
    try:
        return relative(
            one.kept(StoredTensor.of_row(couple)),
            other.kept(StoredTensor.of_row(theirs(couple))),
        )
    except RunError as error:  # a damaged file
        return None, str(error).splitlines()[0]


def theirs(couple: dict[str, Any]) -> dict[str, Any]:
    """The other run's row of a pair."""
    return {
        name: couple.get(f"{name}_other", couple[name]) for name in (*KEY, *_NEEDED)
    }


def _statistics(p: pl.DataFrame) -> pl.DataFrame:
    """``distance`` and ``reason`` of each pair, from statistics."""

    def differ(*names: str) -> pl.Expr:
        return pl.any_horizontal(
            pl.col(n).ne_missing(pl.col(f"{n}_other")) for n in names
        )

    one, other = (
        {n: pl.col(n + suffix) for n in (*VALUES, "numel", *_COUNTS)}
        for suffix in ("", "_other")
    )
    distance = of_columns(one, other, pl.max_horizontal)
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
        .when(
            pl.any_horizontal(
                pl.col("numel").ne_missing(pl.col("numel_other")),
                pl.col("shape").ne_missing(pl.col("shape_other")),
            )
        )
        .then(pl.lit(SHAPE))
        .when(pl.col("nan").is_null() | pl.col("nan_other").is_null())
        .then(pl.coalesce("reason", "reason_other", pl.lit("no statistics")))
        .when(differ(*_COUNTS))
        .then(pl.lit(SPECIALS))
        .when((pl.col("l2") == 0) & (pl.col("l2_other") != 0))
        .then(pl.lit(ZERO))
    )
    # without finite elements, or all of them zero: nothing that could differ is left
    nothing = pl.col("l2").is_null() | (pl.col("l2") == 0)
    value = pl.when(same | nothing).then(0.0).otherwise(distance)
    return p.select(
        pl.when(reason.is_null()).then(value).cast(pl.Float64).alias("distance"),
        reason.cast(pl.Utf8).alias("reason"),
    )
