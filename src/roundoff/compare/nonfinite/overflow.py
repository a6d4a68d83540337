"""Where a run's NaN and Inf come from and go, how near its values are to overflow, and
which loss scale fits.

>>> import polars as pl
>>> rows = [
...     {"record": 0, "call": -1, "operator": "input", "inputs": [], "max": 200.0},
...     {"record": 1, "call": 0, "operator": "exp", "inputs": [0], "posinf": 3},
... ]
>>> known = {"dtype": "float32", "numel": 4, "min": 0.0}
>>> result = trace_overflow(pl.DataFrame([known | row for row in rows]))
>>> result.first.site
'/exp'
>>> result.first.cause
'exp of values up to 200 passes the largest float32, 3.403e+38'
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import polars as pl

from roundoff.compare.nonfinite.births import (
    BORN,
    CarriedOrigins,
    Key,
    StepTrace,
    TracedEvent,
)
from roundoff.compare.nonfinite.cause import explain_birth
from roundoff.compare.nonfinite.loss_scale import LossScale, recommend
from roundoff.compare.nonfinite.ranges import (
    FormatShare,
    SiteMargin,
    format_shares,
    margins,
)
from roundoff.formats import LARGEST, parse_format
from roundoff.record import (
    OPS,
    TensorRecord,
    column,
    rows_of_table,
    site_name,
    table_of_rows,
)
from roundoff.site import matches

FORMATS = ("fp16", "bf16", "fp8_e4m3fn", "fp8_e5m2")

_COLUMNS = (
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


@dataclass(frozen=True, slots=True, kw_only=True)
class NonfiniteEvent:
    """What happened to NaN or Inf at one tensor value of a run.

    ``kind`` is birth, arrived, propagation, death, carried (by a parameter from an
    earlier step) or received (from another rank). ``source`` is the record that it came
    from in the same step, ``origin`` (with rank and step) the birth behind it. A birth
    has ``reached``, the number of tensors that it passed into, ``deaths``, ``cause``
    and ``advice``. The other fields are those of ``TensorRecord``.
    """

    kind: str = column(pl.Utf8)
    allowed: bool = column(pl.Boolean)
    rank: int = column(pl.Int32)
    step: int = column(pl.Int64)
    record: int = column(pl.Int64)
    call: int = column(pl.Int64)
    phase: str = column(pl.Utf8)
    site: str = column(pl.Utf8)
    place: int = column(pl.Int64)
    operator: str = column(pl.Utf8)
    name: str | None = column(pl.Utf8)
    line: str | None = column(pl.Utf8)
    dtype: str | None = column(pl.Utf8)
    numel: int | None = column(pl.Int64)
    nan: int | None = column(pl.Int64)
    posinf: int | None = column(pl.Int64)
    neginf: int | None = column(pl.Int64)
    source: int | None = column(pl.Int64)
    source_site: str | None = column(pl.Utf8)
    origin_rank: int | None = column(pl.Int32)
    origin_step: int | None = column(pl.Int64)
    origin: int | None = column(pl.Int64)
    origin_site: str | None = column(pl.Utf8)
    reached: int | None = column(pl.Int64)
    deaths: int | None = column(pl.Int64)
    cause: str | None = column(pl.Utf8)
    advice: str | None = column(pl.Utf8)
    note: str = column(pl.Utf8)

    @property
    def is_birth(self) -> bool:
        """Return True where NaN or Inf entered the run, on purpose or not."""
        return self.kind in BORN


@dataclass(frozen=True, kw_only=True)
class Overflow:
    """Where NaN and Inf of a run came from, and how near its values are to overflow.

    Attributes:
        first: the first birth or arrival that isn't allowed, in data-flow order.
        events: in the order of steps and calls.
        margins: of each phase, site and dtype, nearest to overflow first.
        formats: the shares that each format would lose, by phase.
        loss_scale: the one that fits.
        within: latent overflow is a largest magnitude within ``2**within`` of the
            largest finite value.
        tensors: how many there are.
        unknown: how many of them have no statistics.
    """

    first: NonfiniteEvent | None
    events: tuple[NonfiniteEvent, ...]
    margins: tuple[SiteMargin, ...]
    formats: tuple[FormatShare, ...]
    loss_scale: LossScale
    within: float
    tensors: int
    unknown: int

    @property
    def born(self) -> list[NonfiniteEvent]:
        """The births and arrivals that are not allowed."""
        return [event for event in self.events if event.is_birth and not event.allowed]

    @property
    def event_table(self) -> pl.DataFrame:
        """The events as a table."""
        return table_of_rows(NonfiniteEvent, self.events)

    @property
    def margin_table(self) -> pl.DataFrame:
        """The margins as a table."""
        return table_of_rows(SiteMargin, self.margins)

    @property
    def format_table(self) -> pl.DataFrame:
        """The shares that formats would lose as a table."""
        return table_of_rows(FormatShare, self.formats)


def trace_overflow(
    ops: pl.DataFrame | pl.LazyFrame,
    scalars: pl.DataFrame | pl.LazyFrame | None = None,
    *,
    within: float = 3.0,
    formats: Sequence[str] = FORMATS,
    allow: Sequence[str] = (),
    loss_format: str = "fp16",
    margin: float = 1.0,
) -> Overflow:
    """Follow every NaN and Inf of a run, and measure how near its values are to the
    ends of formats.

    Each step of each rank is read for itself; what a parameter carries into the next
    recorded step, and what a collective brings from another rank, is followed there.

    Args:
        ops: the run's rows; missing columns are taken as empty, missing counts of rows
            with a minimum as zero.
        scalars: rows of step, name, value (and rank): ``loss_scale`` is used.
        within: latent overflow is a largest magnitude within ``2**within`` of the
            largest finite value.
        formats: formats to ask what would be lost in.
        allow: glob patterns of sites whose NaN and Inf are meant.
        loss_format: the format of the gradients, for the loss scale.
        margin: powers of two that the loss scale leaves free
            (``loss_scale.recommend``).

    Raises:
        FormatError: a format is unknown, or only used with a scale.
    """
    names = [parse_format(name).name for name in formats]
    rows = prepare(ops)
    events, masked = _follow(rows, allow)
    marked = _mark_masked(rows, masked)
    # what a checkpoint computes again in the backward pass are activations
    recomputed = pl.when("recomputed").then(pl.lit("forward")).otherwise("phase")
    unmasked = marked.filter(~pl.col("masked")).with_columns(recomputed.alias("phase"))
    gradients = rows.filter(pl.col("phase") == "backward", ~pl.col("recomputed"))
    scale = recommend(
        gradients,
        _recorded_scales(rows, scalars),
        _lost_steps(events),
        loss_format,
        margin,
    )
    without = pl.col("nan").is_null() & pl.col("dtype").is_not_null()
    born = (event for event in events if event.is_birth and not event.allowed)
    return Overflow(
        first=next(born, None),
        events=tuple(events),
        margins=margins(marked, within=within),
        formats=format_shares(unmasked, names),
        loss_scale=scale,
        within=within,
        tensors=int(rows["dtype"].count()),
        unknown=rows.filter(without).height,
    )


def prepare(ops: pl.DataFrame | pl.LazyFrame) -> pl.DataFrame:
    """Return the columns used here with their types, and ``site``; sorted by step, rank and
    record."""
    lazy = ops.lazy()
    present = lazy.collect_schema().names()
    columns = [
        pl.col(name).cast(OPS[name])
        if name in present
        else pl.lit(None, dtype=OPS[name]).alias(name)
        for name in _COLUMNS
    ]
    defaults = [pl.col(name).fill_null(value) for name, value in _DEFAULTS.items()]
    has_count = [pl.col(name).is_not_null() for name in _COUNTS]
    is_measured = pl.any_horizontal(pl.col("min").is_not_null(), *has_count)
    counts = [
        pl.when(is_measured).then(pl.col(name).fill_null(0)).otherwise(pl.col(name))
        for name in _COUNTS
    ]
    rows = lazy.select(columns).with_columns(defaults).with_columns(counts)
    rows = rows.with_columns(site_name())
    return rows.sort("step", "rank", "record", maintain_order=True).collect()


def _mark_masked(rows: pl.DataFrame, masked: Sequence[Key]) -> pl.DataFrame:
    """Return the rows with ``masked``: their largest negative values are a mask's."""
    key = {name: OPS[name] for name in ("rank", "step", "record")}
    marks = pl.DataFrame(masked, schema=key, orient="row")
    marks = marks.with_columns(masked=pl.lit(True))
    marked = rows.join(marks, on=list(key), how="left", maintain_order="left")
    return marked.with_columns(pl.col("masked").fill_null(False))


def _follow(
    rows: pl.DataFrame, allow: Sequence[str]
) -> tuple[list[NonfiniteEvent], list[Key]]:
    """Return events in order, and the records whose largest negative values are a mask's."""

    def is_allowed(site: str) -> bool:
        return any(matches(pattern, site) for pattern in allow)

    carried: dict[int, CarriedOrigins] = {}
    events: list[TracedEvent] = []
    masked: list[Key] = []
    for step, rank, is_suspect in _suspect_steps(rows):
        if not is_suspect:
            carried.pop(rank, None)  # every value was finite again
            continue
        of_step = (pl.col("step") == step) & (pl.col("rank") == rank)
        trace = StepTrace(
            rows_of_table(TensorRecord, rows.filter(of_step)),
            carried.setdefault(rank, CarriedOrigins()),
            is_allowed,
        )
        _explain(trace)
        events += trace.events
        states = trace.states.items()
        masked += [(rank, step, record) for record, state in states if state.masked]
    events.sort(key=lambda e: (e.row.step, e.row.call, e.row.rank, e.row.record))
    _receive(events)
    return _finished(events), masked


def _suspect_steps(rows: pl.DataFrame) -> Iterator[tuple[int, int, bool]]:
    """Yield (step, rank, True where a value is NaN, Inf or the lowest of its dtype)."""
    largest = pl.col("dtype").replace_strict(
        LARGEST, default=None, return_dtype=pl.Float64
    )
    not_finite = pl.sum_horizontal("nan", "posinf", "neginf") > 0
    suspect = (not_finite | (pl.col("min") == -largest)).fill_null(False)
    steps = rows.group_by("step", "rank").agg(suspect.alias("suspect").any())
    yield from steps.sort("step", "rank").iter_rows()


def _explain(trace: StepTrace) -> None:
    """Add cause and advice to the births and arrivals of a step."""
    for event in trace.events:
        row = event.row
        if event.kind == "birth" and not event.allowed:
            inputs = [trace.rows[i] for i in row.inputs or () if i in trace.rows]
            event.cause, event.advice = explain_birth(row, inputs)
        elif event.kind == "arrived":
            event.line = _first_reader_line(trace, row.record)
            event.cause = "not finite before the step began"
            event.advice = "check the batch or the checkpoint that it came from"


def _first_reader_line(trace: StepTrace, record: int) -> str | None:
    for row in trace.rows.values():
        if row.line and record in (row.inputs or ()):
            return row.line
    return None


def _receive(events: Sequence[TracedEvent]) -> None:
    """A collective that seems to give birth had its NaN or Inf from a rank on which its
    input was not finite."""
    senders: dict[tuple[int, str, int], list[TracedEvent]] = {}
    for event in events:
        if event.row.group is not None and event.kind in ("propagation", "death"):
            senders.setdefault(_collective_key(event.row), []).append(event)
    moved: dict[Key | None, Key | None] = {}
    for event in events:
        if event.row.group is None or event.kind != "birth":
            continue
        sender = _sender(event.row, senders.get(_collective_key(event.row), []))
        if sender is None:
            continue
        moved[event.origin] = sender.origin
        event.kind = "received"
        event.note = f"from rank {sender.row.rank}"
        event.cause = None
        event.advice = None
    for event in events:
        while event.origin in moved:
            event.origin = moved[event.origin]


def _collective_key(row: TensorRecord) -> tuple[int, str, int]:
    return row.step, row.site, row.place


def _sender(row: TensorRecord, candidates: Sequence[TracedEvent]) -> TracedEvent | None:
    """Return the event on another rank of the collective's group."""
    group = (row.group or "").split(",")
    for candidate in candidates:
        rank = candidate.row.rank
        if str(rank) in group and rank != row.rank:
            return candidate
    return None


def _finished(events: Sequence[TracedEvent]) -> list[NonfiniteEvent]:
    """Return the events with each birth's reach and deaths, and origins in columns."""
    births: dict[Key | None, TracedEvent] = {}
    for event in events:
        if event.kind in BORN:
            births[event.row.rank, event.row.step, event.row.record] = event
    for event in events:
        birth = births.get(event.origin)
        if birth is None or event.kind in BORN:
            continue
        if event.kind == "death":
            birth.deaths += 1
        else:
            birth.reached += 1
    return [_finished_event(event, births.get(event.origin)) for event in events]


def _finished_event(event: TracedEvent, birth: TracedEvent | None) -> NonfiniteEvent:
    row = event.row
    is_birth = event.kind in BORN
    origin_rank, origin_step, origin = event.origin or (None, None, None)
    return NonfiniteEvent(
        kind=event.kind,
        allowed=event.allowed,
        rank=row.rank,
        step=row.step,
        record=row.record,
        call=row.call,
        phase=row.phase,
        site=row.site,
        place=row.place,
        operator=row.operator,
        name=row.name,
        line=event.line,
        dtype=row.dtype,
        numel=row.numel,
        nan=row.nan,
        posinf=row.posinf,
        neginf=row.neginf,
        source=event.source,
        source_site=event.source_site,
        origin_rank=origin_rank,
        origin_step=origin_step,
        origin=origin,
        origin_site=None if birth is None else birth.row.site,
        reached=event.reached if is_birth else None,
        deaths=event.deaths if is_birth else None,
        cause=event.cause,
        advice=event.advice,
        note=event.note,
    )


def _lost_steps(events: Sequence[NonfiniteEvent]) -> set[tuple[int, int]]:
    """Return each (rank, step) whose gradients are not finite, and not meant to be."""
    lost = set()
    for event in events:
        is_gradient = event.phase == "backward" and event.kind != "death"
        if is_gradient and not event.allowed:
            lost.add((event.rank, event.step))
    return lost


def _recorded_scales(
    rows: pl.DataFrame, scalars: pl.DataFrame | pl.LazyFrame | None
) -> dict[tuple[int, int], float]:
    """Return the loss scale of each (rank, step) that has one; without a column
    ``rank`` it is that of every rank.
    """
    if scalars is None:
        return {}
    is_scale = (pl.col("name") == "loss_scale") & (pl.col("value") > 0)
    scales: Any = scalars.lazy().filter(is_scale).collect()
    if "rank" not in scales.columns:
        ranks = rows.select(pl.col("rank").unique())
        scales = scales.join(ranks, how="cross")
    return {
        (rank, step): value
        for rank, step, value in scales.select("rank", "step", "value").iter_rows()
    }
