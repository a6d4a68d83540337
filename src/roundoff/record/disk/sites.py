"""What one step of a run holds: a row for each site, or one site in full."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import polars as pl

from roundoff.errors import PatternError, RunError, examples
from roundoff.record.disk.schema import OPS, TensorRecord, site_name
from roundoff.record.disk.typed_rows import rows_of_table
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
#: What the sites of a step may be sorted by.
SORT_KEYS = (ORDER, *SORTS)
PHASES = ("forward", "backward", "optimizer", "collective")

#: What a missing value of these columns stands for.
_DEFAULTS = {
    "rank": 0,
    "step": 0,
    "place": 0,
    "index": 0,
    "module": "",
    "operator": "",
    "phase": "forward",
    "role": "output",
}


@dataclass(frozen=True, slots=True, kw_only=True)
class ReasonCount:
    """How many tensors lack statistics for one reason."""

    reason: str
    count: int


@dataclass(frozen=True, slots=True, kw_only=True)
class TensorCoverage:
    """How much of what was recorded was measured.

    Attributes:
        tensors: rows with a tensor.
        sites: distinct sites, by phase.
        views: rows that are views of other rows' memory.
        not_finite: rows with NaN or Inf.
        without: rows without statistics.
        reasons: why, in the order of the rows.
    """

    tensors: int
    sites: int
    views: int
    not_finite: int
    without: int
    reasons: tuple[ReasonCount, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class SiteRow:
    """One tensor of a step; the fields are those of ``TensorRecord``.

    In a table ``site`` ends with the role where that is not ``output`` and with the
    place where that is not 0: ``head/addmm[1]``.
    """

    record: int
    phase: str
    site: str
    name: str | None
    line: str | None
    operator: str
    dtype: str | None
    shape: Sequence[int] | None
    numel: int | None
    min: float | None
    max: float | None
    mean: float | None
    l2: float | None
    std: float | None
    nan: int | None
    posinf: int | None
    neginf: int | None
    zero: int | None
    subnormal: int | None
    own_l2: float | None
    own_max: float | None
    reason: str | None


@dataclass(frozen=True, slots=True, kw_only=True)
class SiteInput:
    """A tensor that a call has read; the fields are those of ``TensorRecord``."""

    record: int
    site: str
    name: str | None
    operator: str
    phase: str
    line: str | None
    dtype: str | None
    shape: Sequence[int] | None
    min: float | None
    max: float | None
    nan: int | None
    posinf: int | None
    neginf: int | None


@dataclass(frozen=True, slots=True, kw_only=True)
class UnrecordedInput:
    """A tensor that a call has read and that has no row."""

    record: int
    site: None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class HistogramBin:
    """``count`` sampled elements with ``floor(log2|x|)`` equal to ``exponent``."""

    exponent: int
    count: int


@dataclass(frozen=True, slots=True, kw_only=True)
class SiteUser:
    """A call that has read a tensor."""

    phase: str
    site: str
    line: str | None


@dataclass(frozen=True, slots=True, kw_only=True)
class SiteStep:
    """The statistics of one tensor in another step."""

    step: int
    min: float | None
    max: float | None
    l2: float | None
    nan: int | None
    posinf: int | None
    neginf: int | None


@dataclass(frozen=True, slots=True, kw_only=True)
class SiteInFull(SiteRow):
    """All that is recorded of one tensor, what it was made of and who used it."""

    call: int
    overload: str | None
    device: str | None
    layout: str | None
    inplace: bool | None
    view_of: int | None
    arguments: str | None
    exponent: int | None
    exponents: Sequence[int] | None
    sampled: int | None
    own_reason: str | None
    blob: str | None
    group: str | None
    role: str
    place: int
    histogram: tuple[HistogramBin, ...]
    inputs: tuple[SiteInput | UnrecordedInput, ...]
    used_by: tuple[SiteUser, ...]
    history: tuple[SiteStep, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class StepSummary:
    """One step of one rank, the ranks and steps that there are, and what it covers."""

    rank: int
    step: int
    ranks: list[int]
    steps: list[int]
    coverage: TensorCoverage


@dataclass(frozen=True, slots=True, kw_only=True)
class SiteTable(StepSummary):
    """A row for each tensor of a step, sorted by the key ``sort``."""

    sort: str
    rows: tuple[SiteRow, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class SiteDetails(StepSummary):
    """One site in full: an entry for each phase and output that it has."""

    site: tuple[SiteInFull, ...]


_ROW_FIELDS = tuple(SiteRow.__dataclass_fields__)
_INPUT_FIELDS = tuple(SiteInput.__dataclass_fields__)
_STEP_FIELDS = tuple(SiteStep.__dataclass_fields__)
_COPIED_FIELDS = tuple(
    name
    for name in SiteInFull.__dataclass_fields__
    if name == "site" or (name in OPS and name != "inputs")
)
#: Two rows of the same tensor in different steps have the same values here.
_IDENTITY = ("rank", "phase", "module", "operator", "index", "place", "role")


def describe_sites(
    ops: pl.DataFrame | pl.LazyFrame,
    site: str | None = None,
    *,
    phase: str | None = None,
    rank: int | None = None,
    step: int | None = None,
    sort: str = ORDER,
    views: bool = False,
) -> SiteTable | SiteDetails:
    """Describe the sites of one step of one rank.

    Args:
        ops: the rows of a run.
        site: a site, a parameter's name, or a glob over both; one site is described in
            full.
        phase: by default every phase.
        rank: by default the first.
        step: by default the last.
        sort: ``order`` of execution, or a key of ``SORTS``: largest first, unknown
            last.
        views: list views of tensors too.

    Raises:
        PatternError: an unknown site, phase or sort key; the message has the nearest
            names.
        RunError: the run has no such rank or step, or no rows at all.
    """
    lazy = complete(ops)
    pairs = lazy.select("rank", "step").unique().sort("rank", "step").collect()
    if pairs.is_empty():
        raise _empty()
    ranks = sorted(set(pairs["rank"]))
    rank = _choose("rank", rank, ranks, ranks[0])
    steps = sorted(set(pairs.filter(pl.col("rank") == rank)["step"]))
    step = _choose("step", step, steps, steps[-1])
    _check_name("phase", phase, PHASES)
    _check_name("sort key", sort, SORT_KEYS)
    this_step = (pl.col("rank") == rank) & (pl.col("step") == step)
    all_rows = lazy.filter(this_step).sort("record").collect()
    rows = all_rows if phase is None else all_rows.filter(pl.col("phase") == phase)
    summary: dict[str, Any] = {
        "rank": rank,
        "step": step,
        "ranks": ranks,
        "steps": steps,
        "coverage": coverage(rows),
    }
    if site is not None:
        rows = _matching(rows, site)
        if rows["site"].n_unique() == 1 or site in rows["name"].to_list():
            entries = tuple(
                _in_full(r, all_rows, lazy) for r in rows_of_table(TensorRecord, rows)
            )
            return SiteDetails(**summary, site=entries)
    elif not views:
        # a call without tensors as results, .item(), has a row for what it reads
        rows = rows.filter(pl.col("view_of").is_null() & pl.col("dtype").is_not_null())
    table = _sorted(rows, sort).with_columns(_label()).select(_ROW_FIELDS)
    site_rows = tuple(SiteRow(**row) for row in table.iter_rows(named=True))
    return SiteTable(**summary, sort=sort, rows=site_rows)


def select_steps(ops: pl.LazyFrame, rank: int | None, step: int | None) -> pl.LazyFrame:
    """Return the rows of one rank, one step, or both; all of them for None.

    Raises ``RunError`` where there are none.
    """
    if ops.head(1).collect().is_empty():
        raise _empty()
    for column, number in (("rank", rank), ("step", step)):
        if number is None:
            continue
        numbers = ops.select(column).unique().sort(column).collect()[column].to_list()
        _choose(column, number, numbers, number)
        ops = ops.filter(pl.col(column) == number)
    return ops


def coverage(rows: pl.DataFrame) -> TensorCoverage:
    """Count tensors, sites and views, and what has no statistics, by reason."""
    # a call without tensors as results has a row too
    rows = rows.filter(pl.col("dtype").is_not_null())
    missing = rows.filter(pl.col("nan").is_null())
    reason = pl.col("reason").fill_null("no reason recorded")
    reasons = missing.group_by(reason, maintain_order=True).len("count")
    not_finite = pl.sum_horizontal("nan", "posinf", "neginf") > 0
    return TensorCoverage(
        tensors=rows.height,
        sites=rows.select("phase", "site").n_unique(),
        views=int(rows["view_of"].is_not_null().sum()),
        not_finite=rows.filter(not_finite).height,
        without=missing.height,
        reasons=tuple(ReasonCount(**row) for row in reasons.iter_rows(named=True)),
    )


def complete(ops: pl.DataFrame | pl.LazyFrame) -> pl.LazyFrame:
    """Return all columns of OPS with their types, null where one is missing, and ``site``."""
    lazy = ops.lazy()
    present = lazy.collect_schema().names()
    columns = [
        (pl.col(name) if name in present else pl.lit(None)).cast(dtype).alias(name)
        for name, dtype in OPS.items()
    ]
    filled = [pl.col(name).fill_null(value) for name, value in _DEFAULTS.items()]
    return lazy.select(columns).with_columns(filled).with_columns(site_name())


def _sorted(rows: pl.DataFrame, sort: str) -> pl.DataFrame:
    if sort == ORDER:
        return rows
    return rows.sort(SORTS[sort], descending=True, nulls_last=True, maintain_order=True)


def _label() -> pl.Expr:
    """Return the site with its role if that is not output, and its place if that is not 0."""
    # a parameter's operator says its role
    has_role = pl.col("role").is_in(["input", "grad"])
    role = pl.when(has_role).then(" " + pl.col("role")).otherwise(pl.lit(""))
    number = "[" + pl.col("place").cast(pl.Utf8) + "]"
    place = pl.when(pl.col("place") > 0).then(number).otherwise(pl.lit(""))
    return (pl.col("site") + role + place).alias("site")


def _matching(rows: pl.DataFrame, site: str) -> pl.DataFrame:
    names = list(
        dict.fromkeys([*rows["site"].to_list(), *rows["name"].drop_nulls().to_list()])
    )
    if site in names:
        chosen = [site]
    else:
        chosen = [name for name in names if matches(site, name)]
    if not chosen:
        raise _no_such_site(site, names)
    return rows.filter(pl.col("site").is_in(chosen) | pl.col("name").is_in(chosen))


def _no_such_site(site: str, names: Sequence[str]) -> PatternError:
    choices = "such as " + examples(site, names)
    return PatternError(
        "the run has no such site",
        where=site,
        expected=choices if names else "the step has no site",
        do="roundoff show RUN lists them; * stands for any characters",
    )


def _in_full(
    row: TensorRecord, step_rows: pl.DataFrame, lazy: pl.LazyFrame
) -> SiteInFull:
    """Statistics, histogram, inputs, users and the same tensor in other steps."""
    copied = {name: getattr(row, name) for name in _COPIED_FIELDS}
    histogram = [
        HistogramBin(exponent=(row.exponent or 0) + i, count=count)
        for i, count in enumerate(row.exponents or [])
    ]
    return SiteInFull(
        **copied,
        histogram=tuple(histogram),
        inputs=_inputs(row, step_rows),
        used_by=_users(row, step_rows),
        history=_history(row, lazy),
    )


def _inputs(
    row: TensorRecord, step_rows: pl.DataFrame
) -> tuple[SiteInput | UnrecordedInput, ...]:
    numbers = row.inputs or []
    recorded = step_rows.filter(pl.col("record").is_in(numbers)).select(_INPUT_FIELDS)
    by_record = {r["record"]: SiteInput(**r) for r in recorded.iter_rows(named=True)}
    return tuple(by_record.get(n) or UnrecordedInput(record=n) for n in numbers)


def _users(row: TensorRecord, step_rows: pl.DataFrame) -> tuple[SiteUser, ...]:
    readers = step_rows.filter(pl.col("inputs").list.contains(row.record))
    users = readers.select("phase", "site", "line").unique(maintain_order=True)
    return tuple(SiteUser(**user) for user in users.iter_rows(named=True))


def _history(row: TensorRecord, lazy: pl.LazyFrame) -> tuple[SiteStep, ...]:
    is_same = pl.all_horizontal(pl.col(c) == getattr(row, c) for c in _IDENTITY)
    same = lazy.filter(is_same)
    if row.name is not None:
        same = same.filter(pl.col("name") == row.name)
    steps = same.select(_STEP_FIELDS).sort("step").collect()
    return tuple(SiteStep(**step) for step in steps.iter_rows(named=True))


def _choose(noun: str, number: int | None, present: list[int], default: int) -> int:
    """Return ``number`` if it is present, ``default`` for None; ``RunError`` otherwise."""
    if number is None:
        return default
    if number not in present:
        listed = ", ".join(map(str, present[:8]))
        more = ", ..." if len(present) > 8 else ""
        raise RunError(
            f"the run has no {noun} {number}",
            where=f"--{noun}",
            expected=f"one of {listed}{more}",
        )
    return number


def _empty() -> RunError:
    return RunError(
        "the run has no tensors", do="let the recorded program finish at least one step"
    )


def _check_name(noun: str, name: str | None, allowed: tuple[str, ...]) -> None:
    if name is not None and name not in allowed:
        raise PatternError(
            f"unknown {noun}", where=name, expected="one of " + ", ".join(allowed)
        )
