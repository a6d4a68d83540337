"""What ``roundoff show`` shows, as plain data: a row for each site of one step, or one site in full."""

from __future__ import annotations

from typing import Any

import polars as pl

from roundoff.errors import PatternError, RunError, examples
from roundoff.record.disk.schema import OPS, site_name
from roundoff.site import matches

#: sort key -> expression, largest first; "order" is the order of execution.
SORTS: dict[str, pl.Expr] = {
    "nan": pl.sum_horizontal("nan", "posinf", "neginf"),
    "inf": pl.sum_horizontal("posinf", "neginf"),
    "max": pl.max_horizontal(pl.col("max").abs(), pl.col("min").abs()),
    "mean": pl.col("mean").abs(),
    "l2": pl.col("l2"),
    "std": pl.col("std"),
    "zero": (pl.col("zero") / pl.col("numel")).fill_nan(None),
    "subnormal": (pl.col("subnormal") / pl.col("numel")).fill_nan(None),
    "size": pl.col("numel"),
    "own": (pl.col("own_l2") / pl.col("l2")).fill_nan(None),
}
ORDER = "order"
PHASES = ("forward", "backward", "optimizer", "collective")

_SHOWN = (
    "record",
    "phase",
    "site",
    "name",
    "line",
    "operator",
    "dtype",
    "shape",
    "numel",
    "min",
    "max",
    "mean",
    "l2",
    "std",
    "nan",
    "posinf",
    "neginf",
    "zero",
    "subnormal",
    "own_l2",
    "own_max",
    "reason",
)
_FULL = (
    "call",
    "overload",
    "device",
    "layout",
    "inplace",
    "view_of",
    "arguments",
    "exponent",
    "exponents",
    "sampled",
    "own_reason",
    "blob",
    "group",
    "role",
)
_INPUT = (
    "record",
    "site",
    "name",
    "operator",
    "phase",
    "line",
    "dtype",
    "shape",
    "min",
    "max",
    "nan",
    "posinf",
    "neginf",
)


def show(
    ops: pl.DataFrame | pl.LazyFrame,
    site: str | None = None,
    *,
    phase: str | None = None,
    rank: int | None = None,
    step: int | None = None,
    sort: str = ORDER,
    views: bool = False,
) -> dict[str, Any]:
    """One step of one rank as plain data.

    Args:
        ops: the rows of a run.
        site: a site, a parameter's name, or a glob over both; one site is shown in full (key ``site``, a list with an
            entry for each phase and output that it has).
        phase: by default every phase.
        rank: by default the first.
        step: by default the last.
        sort: ``order`` of execution, or a key of ``SORTS``: largest first, unknown last.
        views: list views of tensors too.

    Raises:
        PatternError: an unknown site, phase or sort key; the message has the nearest names.
        RunError: the run has no such rank or step, or no rows at all.
    """
    lazy = complete(ops)
    there = lazy.select("rank", "step").unique().sort("rank", "step").collect()
    ranks, steps = sorted(set(there["rank"])), sorted(set(there["step"]))
    if not ranks:
        raise _empty()
    rank = _choose("rank", rank, ranks, ranks[0])
    steps = sorted(set(there.filter(pl.col("rank") == rank)["step"]))
    step = _choose("step", step, steps, steps[-1])
    _known("phase", phase, PHASES)
    _known("sort key", None if sort == ORDER else sort, (ORDER, *SORTS))
    every = (
        lazy.filter((pl.col("rank") == rank) & (pl.col("step") == step))
        .sort("record")
        .collect()
    )
    rows = every if phase is None else every.filter(pl.col("phase") == phase)
    about = {
        "rank": rank,
        "step": step,
        "ranks": ranks,
        "steps": steps,
        "coverage": coverage(rows),
    }
    if site is not None:
        rows = _matching(rows, site)
        if rows["site"].n_unique() == 1 or site in rows["name"].to_list():
            return about | {
                "site": [
                    _in_full(row, every, lazy) for row in rows.iter_rows(named=True)
                ]
            }
    elif not views:
        # A call whose results are no tensors, .item(), has a row only for what it reads.
        rows = rows.filter(pl.col("view_of").is_null() & pl.col("dtype").is_not_null())
    if sort != ORDER:
        rows = rows.sort(
            SORTS[sort], descending=True, nulls_last=True, maintain_order=True
        )
    return about | {
        "sort": sort,
        "rows": rows.select(*_label(), *_SHOWN[3:]).to_dicts(),
    }


def select_steps(ops: pl.LazyFrame, rank: int | None, step: int | None) -> pl.LazyFrame:
    """The rows of one rank, one step, or both; all of them for None. Raises ``RunError`` where there are none."""
    if ops.head(1).collect().is_empty():
        raise _empty()
    for what, asked in (("rank", rank), ("step", step)):
        if asked is not None:
            there = ops.select(what).unique().sort(what).collect()[what].to_list()
            ops = ops.filter(pl.col(what) == _choose(what, asked, there, asked))
    return ops


def coverage(rows: pl.DataFrame) -> dict[str, Any]:
    """How many tensors, sites and views there are, and how many are without statistics, by reason."""
    rows = rows.filter(
        pl.col("dtype").is_not_null()
    )  # a call whose results are no tensors has a row too
    missing = rows.filter(pl.col("nan").is_null())
    reasons = missing.group_by(
        pl.col("reason").fill_null("no reason recorded"), maintain_order=True
    ).len("count")
    return {
        "tensors": rows.height,
        "sites": rows.select("phase", "site").n_unique(),
        "views": rows["view_of"].is_not_null().sum(),
        "not_finite": rows.filter(
            pl.sum_horizontal("nan", "posinf", "neginf") > 0
        ).height,
        "without": missing.height,
        "reasons": reasons.to_dicts(),
    }


def _label() -> list[pl.Expr]:
    """Record, phase and site; the site of a further output of a call with its place, and of what is no output its role."""
    told = pl.col("role").is_in(["input", "grad"])  # a parameter's operator says it
    role = pl.when(told).then(" " + pl.col("role")).otherwise(pl.lit(""))
    count = "[" + pl.col("place").cast(pl.Utf8) + "]"
    place = pl.when(pl.col("place") > 0).then(count).otherwise(pl.lit(""))
    return [
        pl.col("record"),
        pl.col("phase"),
        (pl.col("site") + role + place).alias("site"),
    ]


def complete(ops: pl.DataFrame | pl.LazyFrame) -> pl.LazyFrame:
    """All columns of OPS with their types, nulls where one is missing, and ``site``."""
    lazy = ops.lazy()
    there = lazy.collect_schema().names()
    columns = [
        (pl.col(c) if c in there else pl.lit(None)).cast(t).alias(c)
        for c, t in OPS.items()
    ]
    whole = {
        "rank": 0,
        "step": 0,
        "place": 0,
        "index": 0,
        "module": "",
        "operator": "",
        "phase": "forward",
        "role": "output",
    }
    return (
        lazy.select(columns)
        .with_columns(pl.col(c).fill_null(v) for c, v in whole.items())
        .with_columns(site_name())
    )


def _matching(rows: pl.DataFrame, site: str) -> pl.DataFrame:
    names = dict.fromkeys(
        [*rows["site"].to_list(), *rows["name"].drop_nulls().to_list()]
    )
    found = [site] if site in names else [name for name in names if matches(site, name)]
    if not found:
        raise PatternError(
            "the run has no such site",
            where=site,
            expected="such as " + examples(site, names)
            if names
            else "the step has no site",
            do="roundoff show RUN lists them; * stands for any characters",
        )
    return rows.filter(pl.col("site").is_in(found) | pl.col("name").is_in(found))


def _in_full(
    row: dict[str, Any], every: pl.DataFrame, lazy: pl.LazyFrame
) -> dict[str, Any]:
    """Statistics, histogram, inputs, users and the same tensor in other steps."""
    inputs = every.filter(pl.col("record").is_in(row["inputs"] or []))
    by_record = {
        i["record"]: {key: i[key] for key in _INPUT}
        for i in inputs.iter_rows(named=True)
    }
    readers = every.filter(pl.col("inputs").list.contains(row["record"]))
    users = readers.select("phase", "site", "line").unique(maintain_order=True)
    same = ("rank", "phase", "module", "operator", "index", "place", "role")
    alike = lazy.filter(pl.all_horizontal(pl.col(key) == row[key] for key in same))
    if row["name"] is not None:
        alike = alike.filter(pl.col("name") == row["name"])
    history = (
        alike.select("step", "min", "max", "l2", "nan", "posinf", "neginf")
        .sort("step")
        .collect()
    )
    counts = row["exponents"] or []
    return (
        {key: row[key] for key in (*_SHOWN, *_FULL, "place")}
        | {
            "histogram": [
                {"exponent": row["exponent"] + i, "count": n}
                for i, n in enumerate(counts)
            ]
        }
        | {
            "inputs": [
                by_record.get(i, {"record": i, "site": None})
                for i in row["inputs"] or []
            ]
        }
        | {"used_by": users.to_dicts(), "history": history.to_dicts()}
    )


def _choose(what: str, asked: int | None, there: list[int], default: int) -> int:
    if asked is not None and asked not in there:
        listed = ", ".join(map(str, there[:8])) + (", ..." if len(there) > 8 else "")
        raise RunError(
            f"the run has no {what} {asked}",
            where=f"--{what}",
            expected=f"one of {listed}",
        )
    return default if asked is None else asked


def _empty() -> RunError:
    return RunError(
        "the run has no tensors", do="let the recorded program finish at least one step"
    )


def _known(what: str, asked: str | None, there: tuple[str, ...]) -> None:
    if asked is not None and asked not in there:
        raise PatternError(
            f"unknown {what}", where=asked, expected="one of " + ", ".join(there)
        )
