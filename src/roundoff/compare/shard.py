"""One rank of both runs, all steps: what runs on one machine of many. Rows of the table come back as a frame."""

from __future__ import annotations

import functools
import operator
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import polars as pl
import torch

from roundoff.compare.alignment import MATCHED
from roundoff.compare.distance import VALUES, relative
from roundoff.compare.explain import Memory, Sides
from roundoff.compare.rounding_bound import MARGIN, unit
from roundoff.compare.step import compare_step
from roundoff.compare.table import frame_of
from roundoff.errors import RunError
from roundoff.record import Run, StepTensors, load, site_name

Row = dict[str, Any]

_KEYS = (
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
_COUNTS = ("nan", "posinf", "neginf")
#: What aligned rows of steps that agree need; the others are read only where something is to be explained.
_QUICK = (
    *_KEYS,
    "rank",
    "record",
    "call",
    "line",
    "dtype",
    "numel",
    "view_of",
    "hash",
    "reason",
    *VALUES,
    *_COUNTS,
)


@dataclass(frozen=True)
class Settings:
    """How two runs are compared; plain data, so that it can go to another machine."""

    modules: Mapping[str, str] = field(default_factory=dict)
    tensors: bool = True
    floor: Mapping[tuple[int, int], Mapping[int, float]] = field(default_factory=dict)
    candidate_floor: Mapping[tuple[int, int], Mapping[int, float]] = field(
        default_factory=dict
    )
    threads: int = field(default_factory=torch.get_num_threads)


def compare_rank(
    reference: str | Run,
    candidate: str | Run,
    rank: int,
    steps: Sequence[int],
    settings: Settings,
) -> tuple[pl.DataFrame, list[str]]:
    """The table of these steps of one rank, and what was damaged in them, a line each.

    Steps in which every row of one run has its counterpart at the same place, and no distance is above the least that
    rounding explains, are compared as columns; the others are aligned and explained row by row.
    """
    if torch.get_num_threads() != settings.threads:
        torch.set_num_threads(
            settings.threads
        )  # of another machine: sums in another order would not be the same
    ours, theirs = (
        run if isinstance(run, Run) else load(run) for run in (reference, candidate)
    )
    tensors = settings.tensors and all(
        run.about.keep in ("tensors", None) for run in (ours, theirs)
    )
    memory = Memory()
    frames: list[pl.DataFrame] = []
    damage: list[str] = []
    quick = {} if tensors or settings.modules else _quick(ours, theirs, rank, steps)
    for step in steps:
        if memory.parted is False and step in quick:
            frames.append(quick[step])
            memory.worst = max(memory.worst, float(quick[step]["error"].max() or 0.0))  # type: ignore[arg-type]
            continue
        try:
            frames.append(
                frame_of(
                    _in_full(
                        ours, theirs, rank, step, tensors, memory, settings, damage
                    )
                )
            )
        except RunError as error:
            damage.append(str(error).replace("\n", ";"))
            frames.append(
                frame_of(
                    [
                        {
                            "rank": rank,
                            "step": step,
                            "status": "damaged",
                            "reason": error.what,
                        }
                    ]
                )
            )
    return pl.concat(frames, how="diagonal") if frames else pl.DataFrame(), damage


def _in_full(
    ours: Run,
    theirs: Run,
    rank: int,
    step: int,
    tensors: bool,
    memory: Memory,
    settings: Settings,
    damage: list[str],
) -> list[Row]:
    one, other = rows_of(ours, rank, step), rows_of(theirs, rank, step)
    mine = StepTensors(ours, rank, step) if tensors else None
    their = StepTensors(theirs, rank, step) if tensors else None
    floors = (
        settings.floor.get((rank, step), {}),
        settings.candidate_floor.get((rank, step), {}),
    )
    rows = compare_step(
        Sides(one, other, mine, their), memory, modules=settings.modules, floors=floors
    )
    for side in (mine, their):
        damage += dict.fromkeys(side.damage.values()) if side is not None else ()
    return rows


def rows_of(run: Run, rank: int, step: int) -> dict[int, Row]:
    """The rows of one step by record, with their site."""
    table = run.part(rank, step).with_columns(site_name()).sort("record").collect()
    return {row["record"]: row for row in table.iter_rows(named=True)}


def _quick(
    ours: Run, theirs: Run, rank: int, steps: Sequence[int]
) -> dict[int, pl.DataFrame]:
    """The steps that agree, by number."""
    try:
        one, other = (
            run.part(rank)
            .filter(pl.col("step").is_in(list(steps)))
            .select(*_QUICK, site_name())
            .sort("step", "record")
            .collect()
            for run in (ours, theirs)
        )
    except RunError:
        return {}  # step by step, so that the sound ones are compared
    heights = [
        frame.group_by("step", maintain_order=True).len().rows()
        for frame in (one, other)
    ]
    if heights[0] != heights[1]:
        return {}
    same = (one.select(_KEYS).hash_rows() == other.select(_KEYS).hash_rows()).to_numpy()
    a, b = (
        {name: frame[name].to_numpy() for name in (*VALUES, "numel", *_COUNTS)}
        for frame in (one, other)
    )
    with np.errstate(all="ignore"):
        error = relative(a, b, lambda *values: functools.reduce(np.fmax, values))
    equal = np.logical_and.reduce(
        [(a[n] == b[n]) | (np.isnan(a[n]) & np.isnan(b[n])) for n in VALUES]
    )
    counts = functools.reduce(
        operator.and_, (one[c].eq_missing(other[c]) for c in _COUNTS)
    ).to_numpy()
    known = one["nan"].is_not_null().to_numpy()
    error = np.where(equal, 0.0, np.where(np.isfinite(error), error, np.inf))
    formats = {d: MARGIN * 2 * unit(d) for d in one["dtype"].drop_nulls().unique()}
    bound = (
        one["dtype"]
        .replace_strict(formats, default=0.0, return_dtype=pl.Float64)
        .to_numpy()
    )
    fine = (
        same
        & counts
        & ((error <= bound) | ~known)
        & one["dtype"].eq_missing(other["dtype"]).to_numpy()
    )
    table = one.select(
        "rank",
        "step",
        "phase",
        "site",
        "operator",
        "place",
        "role",
        "name",
        "line",
        "dtype",
        "shape",
        "numel",
        "record",
        "call",
        pl.col("view_of").is_not_null().alias("view"),
        pl.lit(MATCHED).alias("status"),
        pl.when(~pl.Series(known))
        .then(pl.coalesce("reason", pl.lit("no statistics on both sides")))
        .alias("reason"),
        *(
            pl.col(n).alias(f"reference_{n}")
            for n in ("site", "operator", "dtype", "shape")
        ),
        pl.Series("reference_line", one["line"]),
        pl.Series("reference_record", one["record"]),
        pl.Series("error", error).fill_nan(None),
        pl.Series("equal", equal & known),
        pl.Series("tolerance", bound),
    ).with_columns(
        record=other["record"],
        line=other["line"],
        call=other["call"],
        error=pl.when(pl.Series(known)).then("error"),
    )
    found: dict[int, pl.DataFrame] = {}
    start = 0
    for step, height in heights[0]:
        if fine[start : start + height].all():
            found[int(step)] = table.slice(start, height)
        start += height
    return found
