"""The table of a comparison: one row for each value of either run, and the verdicts on it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import polars as pl

from roundoff.compare.findings import INHERITED, OWN
from roundoff.errors import RunError

PASS, FAIL, UNDECIDED = "pass", "fail", "undecided"

TABLE: dict[str, Any] = {
    "rank": pl.Int32,
    "step": pl.Int64,
    "phase": pl.Utf8,
    "site": pl.Utf8,
    "reference_site": pl.Utf8,
    "operator": pl.Utf8,
    "reference_operator": pl.Utf8,
    "place": pl.Int64,
    "role": pl.Utf8,
    "name": pl.Utf8,
    "line": pl.Utf8,
    "reference_line": pl.Utf8,
    "record": pl.Int64,
    "reference_record": pl.Int64,
    "call": pl.Int64,
    "view": pl.Boolean,
    "status": pl.Utf8,  # matched | by use | only in reference | only in candidate | damaged
    "reason": pl.Utf8,  # why it has no counterpart, or no metrics
    "dtype": pl.Utf8,
    "reference_dtype": pl.Utf8,
    "shape": pl.List(pl.Int64),
    "reference_shape": pl.List(pl.Int64),
    "numel": pl.Int64,
    "error": pl.Float64,  # relative l2 distance, or largest difference of statistics; inf where NaN or Inf disagree
    "equal": pl.Boolean,  # bitwise (all statistics equal, where no tensors were kept)
    # of tensors
    "cosine": pl.Float64,
    "rel_l2": pl.Float64,
    "sqnr_db": pl.Float64,
    "max_abs": pl.Float64,
    "mean_abs": pl.Float64,
    "max_rel": pl.Float64,
    "mean_rel": pl.Float64,
    "rel_undefined": pl.Int64,
    "ulp_max": pl.Float64,
    "ulp_mean": pl.Float64,
    "ulp_share": pl.Float64,
    "share_equal": pl.Float64,
    "l2_reference": pl.Float64,
    "l2_candidate": pl.Float64,
    "l2_error": pl.Float64,
    "compared": pl.Int64,
    "nan_both": pl.Int64,
    "nan_reference": pl.Int64,
    "nan_candidate": pl.Int64,
    "inf_both": pl.Int64,
    "inf_reference": pl.Int64,
    "inf_candidate": pl.Int64,
    "worst_index": pl.List(pl.Int64),
    "worst_reference": pl.Float64,
    "worst_candidate": pl.Float64,
    # what was found: relative errors
    "tolerance": pl.Float64,  # what rounding explains
    "inputs_error": pl.Float64,  # the largest distance of what the call read
    "own": pl.Float64,  # of the error, what was made here
    "cause": pl.Utf8,  # own | inherited; null: explained by rounding
    "origin": pl.Utf8,  # the site that an inherited error comes from
    "contribution": pl.Float64,  # share of the error at the end of the step
    "semantic": pl.Float64,  # that stays when both calls run in fp64 on the same inputs
    "kernel_excess": pl.Float64,  # the rest, in units of what rounding explains
    "blamed": pl.Utf8,
    "blamed_reference": pl.Utf8,
    "blamed_phase": pl.Utf8,
    "blamed_line": pl.Utf8,
    "blamed_reference_line": pl.Utf8,
    "looks_like": pl.Utf8,
    "evidence": pl.Utf8,
    "advice": pl.Utf8,
}


def received(table: pl.DataFrame) -> pl.DataFrame:
    """The table in which a collective is not blamed for what another rank has put into it: an operator there made an error
    of its own in this step or before."""
    own = pl.col("cause") == OWN
    made = (
        table.filter(own & (pl.col("phase") != "collective"))
        .select("rank", "step", "blamed")
        .sort("step", "rank")
    )
    if not made.height or made["rank"].n_unique() == table["rank"].n_unique() == 1:
        return table
    step, rank, site = made["step"][0], made["rank"][0], made["blamed"][0]
    passed = (
        own
        & (pl.col("phase") == "collective")
        & (pl.col("step") >= step)
        & (pl.col("rank") != rank)
    ).fill_null(False)
    return table.with_columns(
        cause=pl.when(passed).then(pl.lit(INHERITED)).otherwise("cause"),
        origin=pl.when(passed).then(pl.lit(site)).otherwise("origin"),
    )


#: What a threshold can be set on: column -> whether larger is better.
LIMITS = {
    "cosine": True,
    "sqnr_db": True,
    "share_equal": True,
    "error": False,
    "rel_l2": False,
    "max_abs": False,
    "mean_abs": False,
    "max_rel": False,
    "mean_rel": False,
    "ulp_max": False,
    "ulp_mean": False,
    "ulp_share": False,
}


def frame_of(rows: Sequence[Mapping[str, Any]]) -> pl.DataFrame:
    """The rows as a frame; columns without a value are left out (see ``whole``)."""
    names = {name for row in rows for name, value in row.items() if value is not None}
    return pl.DataFrame(
        {
            n: pl.Series(n, [row.get(n) for row in rows], dtype=TABLE[n], strict=False)
            for n in TABLE
            if n in names
        }
    )


def whole(frames: Sequence[pl.DataFrame]) -> pl.DataFrame:
    """The frames, one below the other, with all columns; one that none of them has takes no memory."""
    table = pl.concat(frames, how="diagonal") if frames else pl.DataFrame()
    missing = [
        pl.lit(None, dtype).alias(name)
        for name, dtype in TABLE.items()
        if name not in table.columns
    ]
    return table.with_columns(missing).select(*TABLE)


def judged(
    table: pl.DataFrame, limits: Mapping[str, float], margin: float = 1.0
) -> pl.DataFrame:
    """The table with the column ``verdict``: ``pass``, ``fail`` or ``undecided``.

    Without ``limits`` a row fails where an operator made an error that rounding does not explain, or inherited one, and
    the distance is above ``margin`` times its tolerance; with limits, where one of them is not kept. What has no
    counterpart, or could not be measured, is undecided. Raises ``RunError`` for a limit on something that is no metric.
    """
    for name in limits:
        if name not in LIMITS:
            raise RunError(
                "there is no such metric", where=name, expected=", ".join(LIMITS)
            )
    if limits:
        broken = pl.any_horizontal(
            (pl.col(n) < v) if LIMITS[n] else (pl.col(n) > v) for n, v in limits.items()
        )
        known = pl.all_horizontal(pl.col(n).is_not_null() for n in limits) | pl.col(
            "equal"
        )
    else:
        beyond = pl.col("error") > margin * pl.col("tolerance")
        # an operator that does something else is a finding however little comes of it
        broken = pl.col("cause").is_not_null() & (
            beyond | (pl.col("cause") == OWN) & (margin <= 1)
        )
        known = pl.col("error").is_not_null()
    verdict = (
        pl.when(broken.fill_null(False))
        .then(pl.lit(FAIL))
        .when(known.fill_null(False))
        .then(pl.lit(PASS))
        .otherwise(pl.lit(UNDECIDED))
    )
    return table.with_columns(verdict.alias("verdict"))
