"""The table of a comparison: one row for each value of either run, and the verdicts."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields
from typing import Any

import polars as pl

from roundoff.compare.pairing.alignment import EQUIVALENT
from roundoff.compare.records.recorded_rows import RecordedRow
from roundoff.compare.rounding.findings import INHERITED, OWN
from roundoff.errors import RunError

PASS = "pass"
FAIL = "fail"
UNDECIDED = "undecided"
#: Status of a step that could not be read.
DAMAGED = "damaged"
#: What a row looks like whose call is handed another number, and one that either program
#: changes from step to step.
WRONG_CONSTANT = "wrong constant"
SCHEDULE = "other schedule"
STALE = "stale or shared buffer"


@dataclass(frozen=True, slots=True, kw_only=True)
class ComparedRow:
    """One value of either run, its distance from the counterpart, and what made it.

    Without a prefix the candidate's; where only the reference has the value,
    the columns of both runs are the reference's. None where nothing is known.
    """

    rank: int | None = None
    step: int | None = None
    phase: str | None = None
    site: str | None = None
    reference_site: str | None = None
    operator: str | None = None
    reference_operator: str | None = None
    place: int | None = None
    role: str | None = None
    name: str | None = None
    line: str | None = None
    reference_line: str | None = None
    record: int | None = None
    reference_record: int | None = None
    call: int | None = None
    #: True for a view of another value's memory.
    view: bool | None = None
    #: matched, by use, equivalent, only in reference, only in candidate, damaged
    status: str
    #: Why it has no counterpart, or no metrics.
    reason: str | None = None
    dtype: str | None = None
    reference_dtype: str | None = None
    shape: Sequence[int] | None = None
    reference_shape: Sequence[int] | None = None
    numel: int | None = None
    #: Relative l2 distance, or largest difference of statistics; inf where NaN or Inf
    #: disagree.
    error: float | None = None
    #: Bitwise; all statistics equal, where no tensors were kept.
    equal: bool | None = None

    # of tensors, as in ``Metrics``
    cosine: float | None = None
    rel_l2: float | None = None
    sqnr_db: float | None = None
    max_abs: float | None = None
    mean_abs: float | None = None
    max_rel: float | None = None
    mean_rel: float | None = None
    rel_undefined: int | None = None
    ulp_max: float | None = None
    ulp_mean: float | None = None
    ulp_share: float | None = None
    share_equal: float | None = None
    l2_reference: float | None = None
    l2_candidate: float | None = None
    l2_error: float | None = None
    compared: int | None = None
    nan_both: int | None = None
    nan_reference: int | None = None
    nan_candidate: int | None = None
    inf_both: int | None = None
    inf_reference: int | None = None
    inf_candidate: int | None = None
    worst_index: Sequence[int] | None = None
    worst_reference: float | None = None
    worst_candidate: float | None = None

    # findings: errors are relative
    #: What rounding explains.
    tolerance: float | None = None
    #: The largest distance of what the call read.
    inputs_error: float | None = None
    #: The part of the error that was made here.
    own_error: float | None = field(default=None, metadata={"json": "own"})
    #: own or inherited; None: explained by rounding.
    cause: str | None = None
    #: True where statistics cannot say if the error was made here or came in.
    undecided: bool | None = None
    #: The site that an inherited error comes from.
    origin: str | None = None
    #: Share of the error at the end of the step.
    contribution: float | None = None
    #: The distance that stays when both calls run in fp64 on the same inputs.
    semantic: float | None = None
    #: The other part, in units of what rounding explains.
    kernel_excess: float | None = None
    blamed: str | None = None
    blamed_reference: str | None = None
    blamed_phase: str | None = None
    blamed_line: str | None = None
    blamed_reference_line: str | None = None
    #: A key of ``symptoms.ADVICE``.
    looks_like: str | None = None
    evidence: str | None = None
    advice: str | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class JudgedRow(ComparedRow):
    """A compared row with its verdict: pass, fail or undecided."""

    verdict: str


_DTYPES: dict[str, Any] = {
    "int": pl.Int64,
    "float": pl.Float64,
    "str": pl.Utf8,
    "bool": pl.Boolean,
    "Sequence[int]": pl.List(pl.Int64),
}

#: Each field of a row by its column, which has the name of the field in JSON.
_FIELDS = {each.metadata.get("json", each.name): each for each in fields(JudgedRow)}
#: The columns and their types, one for each field of ``ComparedRow``.
TABLE: dict[str, Any] = {
    column: _DTYPES[str(each.type).removesuffix(" | None")]
    for column, each in _FIELDS.items()
    if column != "verdict"
} | {"rank": pl.Int32}

#: The columns that each side has of its own.
_OF_ONE_SIDE = ("site", "operator", "line", "dtype", "shape", "record")

#: The metrics that a limit can be set on, and if a larger value is better.
LARGER_IS_BETTER = {
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


def names_of_both(
    reference: RecordedRow | None, candidate: RecordedRow | None
) -> dict[str, Any]:
    """Return the columns that name a value: of the candidate, and of its counterpart.

    Where only the reference has it, what both sides share is the reference's.
    """
    columns: dict[str, Any] = {}
    some = candidate or reference
    if some is not None:
        columns |= {
            "rank": some.rank,
            "step": some.step,
            "phase": some.phase,
            "place": some.place,
            "role": some.role,
            "name": some.name,
            "numel": some.numel,
            "view": some.view_of is not None,
            "call": some.call,
        }
    if candidate is not None:
        columns |= {name: getattr(candidate, name) for name in _OF_ONE_SIDE}
    if reference is not None:
        columns |= {
            f"reference_{name}": getattr(reference, name) for name in _OF_ONE_SIDE
        }
    return columns


def frame_of(rows: Sequence[ComparedRow]) -> pl.DataFrame:
    """Return the rows as a frame; columns without a value are left out (see ``whole``)."""
    columns = {}
    for name, dtype in TABLE.items():
        values = [getattr(row, _FIELDS[name].name) for row in rows]
        if any(value is not None for value in values):
            columns[name] = pl.Series(name, values, dtype=dtype, strict=False)
    return pl.DataFrame(columns)


def whole(frames: Sequence[pl.DataFrame]) -> pl.DataFrame:
    """Return the frames, one below the other, with all columns.

    A column that none of them has takes no memory.
    """
    table = pl.concat(frames, how="diagonal") if frames else pl.DataFrame()
    missing = [
        pl.lit(None, dtype).alias(name)
        for name, dtype in TABLE.items()
        if name not in table.columns
    ]
    return table.with_columns(missing).select(*TABLE)


def rows_in(table: pl.DataFrame) -> list[JudgedRow]:
    """Return the rows of a judged table."""
    names = {column: each.name for column, each in _FIELDS.items()}
    renamed = table.rename(names, strict=False)
    return [JudgedRow(**row) for row in renamed.iter_rows(named=True)]


def fault_in(table: pl.DataFrame) -> str | None:
    """Say where a judged table of a file is none; None where it is.

    A column of another type, or a row that blames an operator without saying which.
    """
    for name, dtype in {**TABLE, "verdict": pl.Utf8}.items():
        if table[name].dtype != dtype:
            return f"column {name} has type {table[name].dtype}, not {dtype}"
    for name in ("status", "verdict", "view", "call"):
        rows = table if name in ("status", "verdict") else _measured(table)
        if rows[name].null_count():
            return f"column {name} has nulls"
    blaming = table.filter(pl.col("cause") == OWN)
    for name in _OF_A_CULPRIT:
        if blaming[name].null_count():
            return f"column {name} has nulls where an operator is blamed"
    return None


def _measured(table: pl.DataFrame) -> pl.DataFrame:
    return table.filter(pl.col("error").is_not_null())


#: What is known of every value that an operator is blamed for.
_OF_A_CULPRIT = (
    *("rank", "step", "record", "call", "blamed"),
    *("inputs_error", "tolerance", "contribution", "own"),
)


def received(table: pl.DataFrame) -> pl.DataFrame:
    """Blame no collective for an error that another rank has put into it.

    An operator of another rank made an error of its own in this step or before: then
    the collective has inherited its error.
    """
    made_here = pl.col("cause") == OWN
    faults = (
        table.filter(made_here & (pl.col("phase") != "collective"))
        .select("rank", "step", "blamed")
        .sort("step", "rank")
    )
    if not faults.height or faults["rank"].n_unique() == table["rank"].n_unique() == 1:
        return table
    first = faults.row(0, named=True)
    passed_on = (
        made_here
        & (pl.col("phase") == "collective")
        & (pl.col("step") >= first["step"])
        & (pl.col("rank") != first["rank"])
    ).fill_null(False)
    site = pl.lit(first["blamed"])
    return table.with_columns(
        cause=pl.when(passed_on).then(pl.lit(INHERITED)).otherwise("cause"),
        origin=pl.when(passed_on).then(site).otherwise("origin"),
    )


def judged(
    table: pl.DataFrame, limits: Mapping[str, float], margin: float = 1.0
) -> pl.DataFrame:
    """Return the table with the column ``verdict``: ``pass``, ``fail`` or ``undecided``.

    Without ``limits`` a row fails where an operator made an error that rounding does
    not explain, or inherited one, and the distance is above ``margin`` times its
    tolerance; with limits, where one of them is not kept. A row without counterpart, or
    that could not be measured, is undecided. Raises ``RunError`` for a limit on
    something that is no metric.
    """
    for name in limits:
        if name not in LARGER_IS_BETTER:
            metrics = ", ".join(LARGER_IS_BETTER)
            raise RunError("there is no such metric", where=name, expected=metrics)
    broken, decidable = _by_limits(limits) if limits else _by_rounding(margin)
    verdict = (
        pl.when(broken.fill_null(False))
        .then(pl.lit(FAIL))
        .when(decidable.fill_null(False))
        .then(pl.lit(PASS))
        .otherwise(pl.lit(UNDECIDED))
    )
    return table.with_columns(verdict.alias("verdict"))


def left_open(table: pl.DataFrame) -> int:
    """Return how many rows of a judged table can be called neither right nor wrong.

    Those that were measured, and parts of values, which statistics cannot measure.
    """
    return int(table.select(is_left_open().sum()).item() or 0)


def is_left_open() -> pl.Expr:
    """Return which rows of a judged table can be called neither right nor wrong."""
    is_value = pl.col("error").is_not_null() | pl.col("undecided").fill_null(False)
    return (pl.col("verdict") == UNDECIDED) & is_value


def _by_limits(limits: Mapping[str, float]) -> tuple[pl.Expr, pl.Expr]:
    """Return which rows break one of the limits, and which can be decided."""
    broken = [
        pl.col(name) < limit if LARGER_IS_BETTER[name] else pl.col(name) > limit
        for name, limit in limits.items()
    ]
    measured = pl.all_horizontal(pl.col(name).is_not_null() for name in limits)
    return pl.any_horizontal(broken), measured | pl.col("equal")


def _by_rounding(margin: float) -> tuple[pl.Expr, pl.Expr]:
    """Return which rows have an error beyond rounding, and which can be decided.

    What statistics show beyond rounding may have come in with the inputs, or not.
    """
    beyond = pl.col("error") > margin * pl.col("tolerance")
    broken = beyond
    if margin <= 1:
        # an operator that does something else is a finding however little comes of it
        broken = broken | (pl.col("cause") == OWN)
    is_open = pl.col("undecided").fill_null(False) & beyond
    made_otherwise = (pl.col("status") == EQUIVALENT) & pl.col("cause").is_null()
    measured = pl.col("error").is_not_null() | made_otherwise
    decidable = measured & ~is_open.fill_null(False)
    return pl.col("cause").is_not_null() & broken, decidable
