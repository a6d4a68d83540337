"""Where a run's NaN and Inf come from and go, how near its values are to overflow, and which loss scale fits.

>>> import polars as pl
>>> rows = [
...     {"record": 0, "call": -1, "operator": "input", "inputs": [], "min": 0.0, "max": 200.0, "numel": 4},
...     {"record": 1, "call": 0, "operator": "exp", "inputs": [0], "min": 1.0, "max": 1.0, "posinf": 3, "numel": 4},
... ]
>>> found = overflow(pl.DataFrame([{"dtype": "float32", **row} for row in rows]))
>>> found.first["site"], found.first["cause"]
('/exp', 'exp of values up to 200 passes the largest float32, 3.403e+38')
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import polars as pl

from roundoff.compare.nonfinite.births import BORN, Key, Memory, Step
from roundoff.compare.nonfinite.cause import cause
from roundoff.compare.nonfinite.loss_scale import LossScale, recommend
from roundoff.compare.nonfinite.ranges import format_shares, margins
from roundoff.formats import LARGEST, parse_format
from roundoff.record import OPS, site_name
from roundoff.site import matches

FORMATS = ("fp16", "bf16", "fp8_e4m3fn", "fp8_e5m2")

_COLUMNS: dict[str, Any] = {
    key: OPS[key]
    for key in (
        "rank",
        "step",
        "record",
        "call",
        "phase",
        "module",
        "operator",
        "index",
        "place",
        "role",
        "overload",
        "name",
        "line",
        "recomputed",
        "inputs",
        "view_of",
        "inplace",
        "dtype",
        "shape",
        "numel",
        "min",
        "max",
        "nan",
        "posinf",
        "neginf",
        "zero",
        "exponent",
        "exponents",
        "group",
        "reason",
    )
}
#: What a checkpoint computes again in the backward pass are activations.
_OF_THE_FORWARD = (
    pl.when("recomputed").then(pl.lit("forward")).otherwise("phase").alias("phase")
)
_DEFAULTS = {
    "rank": 0,
    "step": 0,
    "module": "",
    "index": 0,
    "place": 0,
    "phase": "forward",
    "inplace": False,
    "recomputed": False,
}
_COUNTS = ("nan", "posinf", "neginf", "zero")

EVENT_SCHEMA: dict[str, Any] = {
    "kind": pl.Utf8,
    "allowed": pl.Boolean,
    **{key: _COLUMNS[key] for key in ("rank", "step", "record", "call", "phase")},
    "site": pl.Utf8,
    "place": pl.Int64,
    "operator": pl.Utf8,
    "name": pl.Utf8,
    "line": pl.Utf8,
    "dtype": pl.Utf8,
    "numel": pl.Int64,
    "nan": pl.Int64,
    "posinf": pl.Int64,
    "neginf": pl.Int64,
    "source": pl.Int64,
    "source_site": pl.Utf8,
    "origin_rank": pl.Int32,
    "origin_step": pl.Int64,
    "origin": pl.Int64,
    "origin_site": pl.Utf8,
    "reached": pl.Int64,
    "deaths": pl.Int64,
    "cause": pl.Utf8,
    "advice": pl.Utf8,
    "note": pl.Utf8,
}


@dataclass(frozen=True)
class Overflow:
    """What ``overflow`` found.

    ``events`` (one row each, in the order of steps and calls): ``kind`` is birth, arrived, propagation, death,
    carried (by a parameter from an earlier step) or received (from another rank). ``source`` is the record that it came
    from in the same step, ``origin`` (with rank and step) the birth behind it. A birth has ``reached``, the number of
    tensors that it passed into, ``deaths``, ``cause`` and ``advice``.
    ``margins``: ``ranges.margins``; ``formats``: ``ranges.format_shares``. ``first`` is the first birth or arrival that
    isn't allowed, in data-flow order, as a row of ``events``, or None. ``unknown`` counts tensors without statistics.
    """

    events: pl.DataFrame
    margins: pl.DataFrame
    formats: pl.DataFrame
    first: dict[str, Any] | None
    loss_scale: LossScale
    within: float
    tensors: int
    unknown: int

    @property
    def born(self) -> pl.DataFrame:
        """The births and arrivals that are not allowed."""
        return self.events.filter(pl.col("kind").is_in(BORN) & ~pl.col("allowed"))

    def to_dict(self) -> dict[str, Any]:
        """Plain data: tables as lists of dicts."""
        return {
            "first": self.first,
            "events": self.events.to_dicts(),
            "margins": self.margins.to_dicts(),
            "formats": self.formats.to_dicts(),
            "loss_scale": self.loss_scale.to_dict(),
            "within": self.within,
            "tensors": self.tensors,
            "unknown": self.unknown,
        }


def overflow(
    ops: pl.DataFrame | pl.LazyFrame,
    scalars: pl.DataFrame | pl.LazyFrame | None = None,
    *,
    within: float = 3.0,
    formats: Sequence[str] = FORMATS,
    allow: Sequence[str] = (),
    loss_format: str = "fp16",
    margin: float = 1.0,
) -> Overflow:
    """Follow every NaN and Inf of a run, and measure how near its values are to the ends of formats.

    Each step of each rank is read for itself; what a parameter carries into the next recorded step, and what a
    collective brings from another rank, is followed there.

    Args:
        ops: the run's rows; missing columns are taken as empty, missing counts of rows with a minimum as zero.
        scalars: rows of step, name, value (and rank): ``loss_scale`` is used.
        within: latent overflow is a largest magnitude within ``2**within`` of the largest finite value.
        formats: formats to ask what would be lost in.
        allow: glob patterns of sites whose NaN and Inf are meant.
        loss_format: the format of the gradients, for the loss scale.
        margin: powers of two that the loss scale leaves free (``loss_scale.recommend``).

    Raises:
        FormatError: a format is unknown, or only used with a scale.
    """
    names = [parse_format(fmt).name for fmt in formats]
    rows = prepare(ops)
    events, masked = _follow(rows, allow)
    key = {c: _COLUMNS[c] for c in ("rank", "step", "record")}
    masks = pl.DataFrame(masked, schema=key, orient="row").with_columns(
        masked=pl.lit(True)
    )
    marked = rows.join(masks, on=list(key), how="left", maintain_order="left")
    marked = marked.with_columns(pl.col("masked").fill_null(False))
    table = pl.DataFrame(events, schema=EVENT_SCHEMA)
    born = table.filter(pl.col("kind").is_in(BORN) & ~pl.col("allowed"))
    return Overflow(
        events=table,
        margins=margins(marked, within=within),
        formats=format_shares(
            marked.filter(~pl.col("masked")).with_columns(_OF_THE_FORWARD), names
        ),
        first=born.row(0, named=True) if born.height else None,
        loss_scale=recommend(
            rows.filter(pl.col("phase") == "backward", ~pl.col("recomputed")),
            _recorded_scales(rows, scalars),
            _lost(table),
            loss_format,
            margin,
        ),
        within=within,
        tensors=rows["dtype"].count(),
        unknown=rows.filter(
            pl.col("nan").is_null() & pl.col("dtype").is_not_null()
        ).height,
    )


def prepare(ops: pl.DataFrame | pl.LazyFrame) -> pl.DataFrame:
    """The columns used here with their types, and ``site``; sorted by step, rank and record."""
    lazy = ops.lazy()
    there = lazy.collect_schema().names()
    columns = [
        (
            pl.col(key).cast(dtype)
            if key in there
            else pl.lit(None, dtype=dtype).alias(key)
        )
        for key, dtype in _COLUMNS.items()
    ]
    rows = lazy.select(columns).with_columns(
        pl.col(k).fill_null(v) for k, v in _DEFAULTS.items()
    )
    measured = pl.col("min").is_not_null()
    rows = rows.with_columns(
        pl.when(
            pl.any_horizontal(measured, *(pl.col(c).is_not_null() for c in _COUNTS))
        )
        .then(pl.col(key).fill_null(0))
        .otherwise(pl.col(key))
        for key in _COUNTS
    )
    rows = rows.with_columns(site_name())
    return rows.sort("step", "rank", "record", maintain_order=True).collect()


def _follow(
    rows: pl.DataFrame, allow: Sequence[str]
) -> tuple[list[dict[str, Any]], list[Key]]:
    """Events in order, and the records whose largest negative values are a mask's."""
    lowest = pl.col("dtype").replace_strict(
        LARGEST, default=None, return_dtype=pl.Float64
    )
    suspect = (pl.sum_horizontal("nan", "posinf", "neginf") > 0) | (
        pl.col("min") == -lowest
    )
    suspect = suspect.fill_null(False).alias("suspect")
    steps = rows.group_by("step", "rank").agg(suspect.any()).sort("step", "rank")
    memory: dict[int, Memory] = {}
    events: list[dict[str, Any]] = []
    masked: list[Key] = []
    for step, rank, suspected in steps.iter_rows():
        if not suspected:
            memory.pop(rank, None)  # every value was finite again
            continue
        here = rows.filter(
            (pl.col("step") == step) & (pl.col("rank") == rank)
        ).to_dicts()
        read = Step(
            here,
            memory.setdefault(rank, Memory()),
            lambda site: any(matches(p, site) for p in allow),
        )
        for event in read.events:
            event.update(cause=None, advice=None)
            row = read.rows[event["record"]]
            if event["kind"] == "birth" and not event["allowed"]:
                inputs = [read.rows[i] for i in row["inputs"] or () if i in read.rows]
                event["cause"], event["advice"] = cause(row, inputs)
            elif event["kind"] == "arrived":
                event["line"] = next(
                    (
                        r["line"]
                        for r in here
                        if row["record"] in (r["inputs"] or ()) and r["line"]
                    ),
                    None,
                )
                event["cause"] = "not finite before the step began"
                event["advice"] = "check the batch or the checkpoint that it came from"
        events += read.events
        masked += [(rank, step, r) for r, state in read.states.items() if state.masked]
    events.sort(key=lambda e: (e["step"], e["call"], e["rank"], e["record"]))
    _receive(events)
    _count(events)
    return events, masked


def _receive(events: list[dict[str, Any]]) -> None:
    """A collective that seems to give birth had its NaN or Inf from a rank on which its input was not finite."""
    senders: dict[tuple[int, str, int], list[dict[str, Any]]] = {}
    for event in events:
        if event["group"] is not None and event["kind"] in ("propagation", "death"):
            senders.setdefault(
                (event["step"], event["site"], event["place"]), []
            ).append(event)
    moved: dict[Key, Key] = {}
    for event in events:
        if event["group"] is not None and event["kind"] == "birth":
            group = event["group"].split(",")
            for sent in senders.get((event["step"], event["site"], event["place"]), ()):
                if str(sent["rank"]) in group and sent["rank"] != event["rank"]:
                    moved[event["origin"]] = sent["origin"]
                    event.update(
                        kind="received",
                        note=f"from rank {sent['rank']}",
                        cause=None,
                        advice=None,
                    )
                    break
    for event in events:
        while event["origin"] in moved:
            event["origin"] = moved[event["origin"]]


def _count(events: list[dict[str, Any]]) -> None:
    """Each birth's reach and deaths; origins as columns."""
    births = {
        (e["rank"], e["step"], e["record"]): e for e in events if e["kind"] in BORN
    }
    for event in events:
        birth = births.get(event["origin"])
        origin = event["origin"] or (None, None, None)
        event["origin_rank"], event["origin_step"], event["origin"] = origin
        event["origin_site"] = None if birth is None else birth["site"]
        if event["kind"] not in BORN and birth is not None:
            key = "deaths" if event["kind"] == "death" else "reached"
            birth[key] = birth.get(key, 0) + 1
    for event in births.values():
        event.setdefault("reached", 0)
        event.setdefault("deaths", 0)


def _lost(events: pl.DataFrame) -> set[tuple[int, int]]:
    """Each (rank, step) whose gradients are not finite, and not meant to be."""
    here = (
        ~pl.col("allowed")
        & (pl.col("phase") == "backward")
        & (pl.col("kind") != "death")
    )
    return set(events.filter(here).select("rank", "step").iter_rows())


def _recorded_scales(
    rows: pl.DataFrame, scalars: pl.DataFrame | pl.LazyFrame | None
) -> dict[tuple[int, int], float]:
    """The loss scale of each (rank, step) that has one; without a column ``rank`` it is that of every rank."""
    if scalars is None:
        return {}
    found = (
        scalars.lazy()
        .filter((pl.col("name") == "loss_scale") & (pl.col("value") > 0))
        .collect()
    )
    if "rank" in found.columns:
        return {
            (r, s): v for r, s, v in found.select("rank", "step", "value").iter_rows()
        }
    ranks = rows["rank"].unique().to_list()
    return {
        (r, s): v for s, v in found.select("step", "value").iter_rows() for r in ranks
    }
