"""Budget: what each part of each site's rounding costs the target, in each format.

All noise powers are relative to the power of the target tensor:
``SQNR in dB = -10 log10(noise)``.
"""

from __future__ import annotations

import json
import math
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import polars as pl

from roundoff.budget.facts import MeasuredOutput, MeasuredSite, Measurement
from roundoff.budget.noise_power import (
    ADJOINT,
    Term,
    absorbed,
    decibels,
    group_powers,
    power,
    significant,
    sqnr_db,
    stderr_db,
    term_powers,
    together,
)
from roundoff.budget.outputs import each_output, worst_power
from roundoff.errors import PlanError
from roundoff.files import as_path, atomic_path
from roundoff.foreign import fault_of, parse_json, regular
from roundoff.formats import parse_format
from roundoff.notebook import decibels as shown_db
from roundoff.notebook import share
from roundoff.notebook import table as html_table
from roundoff.record import column, fault_of_table, schema_of
from roundoff.unforeseen import panics_raised

if TYPE_CHECKING:
    from roundoff.budget.sqnr_target import TargetText
    from roundoff.plan import Plan


@dataclass(frozen=True, slots=True)
class TermRow:
    """A row of ``Budget.terms``: one part of one site's error in one format."""

    site: str = column(pl.String)
    format: str = column(pl.String)
    part: str = column(pl.String)
    #: -1 for an output
    operand: int = column(pl.Int32)
    sources: tuple[str, ...] = column(pl.List(pl.String))
    pooled: bool = column(pl.Boolean)
    overflow: int = column(pl.Int64)
    #: noise power of this part alone at the output that has most of it, and its
    #: standard error
    power: float = column(pl.Float64)
    stderr: float = column(pl.Float64)
    #: (outputs * probes, columns), flattened
    projections: Sequence[float] = column(pl.List(pl.Float32))
    #: "adjoint", to first order, or "trial"
    measured: str = column(pl.String)


@dataclass(frozen=True, slots=True, kw_only=True)
class SiteCost:
    """A row of ``Budget.table``: what rounding one site to one format costs.

    ``sqnr_db`` and the parts are None without any error; ``sqnr_db`` is None too where
    the noise is infinite. Of several outputs all are at the one that has most noise.
    """

    site: str = column(pl.String)
    operator: str = column(pl.String)
    kind: str = column(pl.String)
    format: str = column(pl.String)
    noise: float = column(pl.Float64)
    sqnr_db: float | None = column(pl.Float64)
    stderr_db: float | None = column(pl.Float64)
    #: of the noise that all sites in the format make together; 1 where all is lost
    share: float = column(pl.Float64)
    activation_db: float | None = column(pl.Float64)
    weight_db: float | None = column(pl.Float64)
    output_db: float | None = column(pl.Float64)
    #: "adjoint", to first order, or "trial": the model ran with this site rounded
    measured: str = column(pl.String)
    note: str = column(pl.String)
    #: the one that has most noise; empty where there is no other
    output: str = column(pl.String)


#: Of the file: 2 has several outputs, each with its rows of the projections.
SCHEMA = 2
TERM_SCHEMA = schema_of(TermRow)
TABLE_SCHEMA = schema_of(SiteCost)
PARAMETER_SCHEMA: Mapping[str, Any] = {
    "parameter": pl.String,
    "format": pl.String,
    "noise": pl.Float64,
    "sqnr_db": pl.Float64,
}


@dataclass(frozen=True)
class OutputPrediction:
    """What a choice of formats costs one output.

    ``noise`` counts correlations between sites, ``additive`` is the sum of powers;
    ``stderr_db`` is the standard error of the SQNR, None where it is not finite.
    """

    output: str
    noise: float
    additive: float
    stderr_db: float | None

    @property
    def db(self) -> float:
        """SQNR with correlations, in dB; infinite when nothing is rounded."""
        return sqnr_db(self.noise)

    @property
    def additive_db(self) -> float:
        """SQNR if all errors were independent, in dB."""
        return sqnr_db(self.additive)


@dataclass(frozen=True)
class Prediction:
    """What a choice of formats costs each output.

    Everything else is that of ``worst``, the output with most noise.
    """

    outputs: tuple[OutputPrediction, ...]

    @property
    def worst(self) -> OutputPrediction:
        """The output with most noise."""
        return max(self.outputs, key=lambda output: output.noise)

    @property
    def noise(self) -> float:
        """Noise power with correlations."""
        return self.worst.noise

    @property
    def additive(self) -> float:
        """Sum of the noise powers."""
        return self.worst.additive

    @property
    def stderr_db(self) -> float | None:
        """Standard error of the SQNR."""
        return self.worst.stderr_db

    @property
    def db(self) -> float:
        """SQNR with correlations, in dB; infinite when nothing is rounded."""
        return self.worst.db

    @property
    def additive_db(self) -> float:
        """SQNR if all errors were independent, in dB."""
        return self.worst.additive_db


@dataclass(frozen=True)
class Budget:
    """The measured error budget of one workload, kept in one parquet file.

    ``roundoff.budget`` makes it.

    Attributes:
        terms: polars frame, a row per site, format, part and operand (``TermRow``).
        sites: every site, in the order of the first calls.
        about: how it was measured.
    """

    terms: pl.DataFrame
    sites: tuple[MeasuredSite, ...]
    about: Measurement

    def __repr__(self) -> str:
        about = self.about
        worst = next((c for c in self.costs if c.sqnr_db is not None), None)
        worst_row = ""
        if worst is not None:
            worst_row = (
                f"; most noise: {worst.site} in {worst.format}, {worst.sqnr_db:.1f} dB"
            )
        formats = ", ".join(about.formats)
        return f"<Budget of {about.workload}: {len(self.sites)} sites in {formats}{worst_row}>"

    def _repr_html_(self) -> str:
        rows = [
            (c.site, c.format, shown_db(c.sqnr_db), share(c.share), c.note)
            for c in self.costs
        ]
        about = self.about
        return html_table(
            f"Budget of {about.workload}",
            [f"{len(self.sites)} sites, {about.samples} samples"],
            ("site", "format", "SQNR", "share of the noise", ""),
            rows,
        )

    @cached_property
    def outputs(self) -> tuple[MeasuredOutput, ...]:
        """The named outputs that are measured, at least one."""
        about = self.about
        tensors = tuple(about.target.tensors)
        whole = MeasuredOutput(
            about.target.name, tensors, about.signal, about.batch_signal
        )
        return about.outputs or (whole,)

    @cached_property
    def _terms(self) -> dict[tuple[str, str], list[Term]]:
        terms: dict[tuple[str, str], list[Term]] = defaultdict(list)
        probes = self.about.probes * len(self.outputs)
        projections = _arrays(self.terms["projections"])
        facts = self.terms.select(_TERM_FACTS).iter_rows()
        names = self.terms["format"].unique()
        batch_error = {
            name: self.about.batch_error * parse_format(name).shares_scale
            for name in names
        }
        for row, values in zip(facts, projections, strict=True):
            site, fmt, part, operand, sources, pooled, overflow, measured = row
            term = Term(
                part,
                operand,
                tuple(sources),
                pooled,
                overflow,
                values.reshape(probes, -1),
                measured,
                batch_error[fmt],
            )
            terms[site, fmt].append(term)
        return dict(terms)

    def rows(self, site: str, format: str) -> list[Term]:
        """Return the parts of one site in one format; none if it does not run in it."""
        return self._terms.get((site, format), [])

    @cached_property
    def mixing_sites(self) -> frozenset[str]:
        """Names of the measured sites whose samples could not be told apart."""
        rows = self.terms.filter(pl.col("pooled"))
        return frozenset(rows["site"]) if self.about.samples > 1 else frozenset()

    @cached_property
    def costs(self) -> tuple[SiteCost, ...]:
        """What each site costs in each format, worst first; equal costs by name."""
        sites = {site.site: site for site in self.sites}
        worst = self._worst_outputs()
        totals: dict[str, float] = defaultdict(float)
        for (_, fmt), cost in worst.items():
            totals[fmt] += cost.noise if math.isfinite(cost.noise) else 0.0
        parts = _part_powers([cost.terms for cost in worst.values()])
        costs = [
            _site_cost(sites[site], fmt, cost, totals[fmt], powers)
            for ((site, fmt), cost), powers in zip(worst.items(), parts, strict=True)
        ]
        return tuple(
            sorted(costs, key=lambda cost: (-_compared(cost.noise), cost.site))
        )

    def _worst_outputs(self) -> dict[tuple[str, str], _WorstOutput]:
        """Return what the terms of each row cost the output that they cost most."""
        count = len(self.outputs)
        seen = [each_output(terms, count) for terms in self._terms.values()]
        of_rows = group_powers(
            [terms for row in seen for terms in row],
            unmeasured=self.about.unmeasured,
            batches=self.about.batch_samples,
        )
        worst = {}
        for number, (key, row) in enumerate(zip(self._terms, seen, strict=True)):
            noises = of_rows[number * count : (number + 1) * count]
            place = noises.index(max(noises))
            name = self.outputs[place].name if count > 1 else ""
            worst[key] = _WorstOutput(name, *noises[place], row[place])
        return worst

    @cached_property
    def table(self) -> pl.DataFrame:
        """``costs`` as a frame."""
        return _frame(self.costs, TABLE_SCHEMA)

    @cached_property
    def parameters(self) -> pl.DataFrame:
        """A row per parameter and format: SQNR when it alone is rounded, in all uses."""
        terms: dict[tuple[str, str], list[Term]] = defaultdict(list)
        for (_, fmt), parts in self._terms.items():
            for term in parts:
                for name in term.sources if term.part == "weight" else ():
                    terms[name, fmt].append(term)
        outputs = len(self.outputs)
        powers = {key: worst_power(parts, outputs)[0] for key, parts in terms.items()}
        rows = [(*key, noise, decibels(noise)) for key, noise in powers.items()]
        frame = pl.DataFrame(rows, schema=PARAMETER_SCHEMA, orient="row")
        return frame.sort("noise", descending=True)

    def predict(
        self, formats: Mapping[str, str], *, batch: int | None = None
    ) -> Prediction:
        """Predict the noise of a choice of formats, site to format.

        Sites left out stay in the reference format. ``batch`` restricts it to one
        batch. The projections of all rounded parts are added before they are squared,
        so correlations between sites count where they stand out of the sampling noise;
        ``additive`` is the sum of the separate powers.
        """
        active = []
        for site, fmt in formats.items():
            rows = self.rows(site, fmt)
            parts = [term for term in rows if not absorbed(term, fmt, formats)]
            active += together(parts)
        if batch is not None:
            active = self._of_batch(active, batch)
        seen = each_output(active, len(self.outputs))
        return Prediction(
            tuple(
                _predicted(output, terms, batch, self.about)
                for output, terms in zip(self.outputs, seen, strict=True)
            )
        )

    def _of_batch(self, terms: Sequence[Term], batch: int) -> list[Term]:
        """Return the columns of one batch."""
        stops = np.cumsum([0, *self.about.batch_samples])
        samples = slice(*stops[batch : batch + 2])
        pooled = slice(batch, batch + 1)
        return [term.take(pooled if term.pooled else samples) for term in terms]

    def plan(
        self,
        target: TargetText | None = None,
        *,
        metric_drop: float | str | None = None,
        max_cost: float | None = None,
        cost: str = "bytes",
        cost_table: Any = None,
        pin: Mapping[str, str] | None = None,
        allow: Mapping[str, Sequence[str]] | None = None,
        formats: Iterable[str] | None = None,
        tie: str = "site",
    ) -> Plan:
        """Choose the cheapest plan whose outputs' predicted SQNR is at least ``target``.

        The arguments are the fields of ``Goal``; see ``roundoff.plan``, which also
        takes a file.
        """
        from roundoff.budget.choose_formats import choose
        from roundoff.budget.goal import Goal

        goal = Goal(
            target=target,
            metric_drop=metric_drop,
            max_cost=max_cost,
            cost=cost,
            cost_table=cost_table,
            pin=pin or {},
            allow=allow or {},
            formats=None if formats is None else tuple(formats),
            tie=tie,
        )
        return choose(self, goal)

    def save(self, path: str | Path) -> None:
        """Write one parquet file, whole or not at all."""
        facts = {
            "schema": SCHEMA,
            "about": self.about.to_dict(),
            "sites": [asdict(site) for site in self.sites],
        }
        metadata = {"roundoff": json.dumps(facts, allow_nan=False)}
        with atomic_path(path) as temporary:
            self.terms.write_parquet(temporary, metadata=metadata)

    @classmethod
    def load(cls, path: str | Path) -> Budget:
        """Read a budget. Raises ``PlanError`` when the file is no budget, or a newer one."""
        path = as_path(path, "path", "the file of a budget")
        try:
            with panics_raised():
                metadata = pl.read_parquet_metadata(regular(Path(path)))
                table = pl.read_parquet(path, glob=False)
            facts = parse_json(metadata["roundoff"])
            _check_schema(facts.get("schema", 1), path)
            budget = cls(
                _whole(table),
                tuple(MeasuredSite.from_dict(site) for site in facts["sites"]),
                Measurement.from_dict(facts["about"]),
            )
            _check_contents(budget)
            return budget
        except (
            OSError,
            AttributeError,
            KeyError,
            TypeError,
            ValueError,
            pl.exceptions.PolarsError,
        ) as error:
            raise PlanError(
                f"not a readable budget: {error}",
                where=str(path),
                expected="a parquet file written by roundoff budget",
                do="roundoff budget WORKLOAD.py -o budget.parquet",
            ) from error


#: Columns of ``Budget.terms`` that say what a term is.
_TERM_FACTS = (
    *("site", "format", "part", "operand"),
    *("sources", "pooled", "overflow", "measured"),
)


def _arrays(lists: pl.Series) -> list[np.ndarray]:
    """Return the numbers of each list of a column, float64."""
    lengths = lists.list.len().to_numpy()
    flat = lists.filter(lengths > 0).explode().to_numpy().astype(np.float64)
    return np.split(flat, np.cumsum(lengths)[:-1]) if len(lengths) else []


def _check_contents(budget: Budget) -> None:
    """Raise ``ValueError`` where the parts of a file are not of their types, or do not fit."""
    faults = [fault_of_table(TermRow, budget.terms), fault_of(budget.about)]
    faults += [fault_of(site) for site in budget.sites]
    first = next((fault for fault in faults if fault is not None), None)
    if first is not None:
        raise ValueError(first)
    about = budget.about
    if (
        min(about.probes, about.samples, len(about.batch_samples), *about.batch_samples)
        < 1
    ):
        raise ValueError("no probes, samples or batches")
    batches = len(about.batch_samples)
    lengths = [len(about.batch_signal), *(len(o.batch_signal) for o in about.outputs)]
    if any(length != batches for length in lengths):
        raise ValueError("not one share of the signal for each batch")
    if about.outputs and not all(output.tensors for output in about.outputs):
        raise ValueError("an output without tensors")
    names = {site.site for site in budget.sites}
    if len(names) < len(budget.sites) or not names >= {*budget.terms["site"]}:
        raise ValueError("terms of a site that is none, or a site twice")
    _check_projections(budget)


def _check_projections(budget: Budget) -> None:
    """Raise ``ValueError`` for terms without a number for each probe, output and sample."""
    about = budget.about
    rows = about.probes * len(budget.outputs)
    columns = {False: about.samples, True: len(about.batch_samples)}
    facts = budget.terms.select("pooled", pl.col("projections").list.len(), "format")
    for pooled, length, name in facts.unique().iter_rows():
        parse_format(name)
        if length != rows * columns[pooled]:
            raise ValueError(f"{length} projections, not {rows * columns[pooled]}")


def _whole(terms: pl.DataFrame) -> pl.DataFrame:
    """Return the terms of a file with all columns; older files knew no trials."""
    if "measured" in terms.columns:
        return terms
    return terms.with_columns(pl.lit(ADJOINT).alias("measured"))


@dataclass(frozen=True, slots=True)
class MeasuredTerm:
    """A term, and the site and format that it belongs to."""

    site: str
    format: str
    term: Term


def term_frame(measured: Iterable[MeasuredTerm], outputs: int = 1) -> pl.DataFrame:
    """Return terms of so many outputs as ``Budget.terms``, in their order."""
    rows = list(measured)
    noise = np.zeros(len(rows))
    stderr = np.zeros(len(rows))
    places: dict[tuple[int, ...], list[int]] = defaultdict(list)
    for place, row in enumerate(rows):
        places[row.term.values.shape].append(place)
    for alike in places.values():
        values = np.stack([rows[place].term.values for place in alike])
        probes, columns = values.shape[1:]
        by_output = values.reshape(-1, probes // outputs, columns)
        noises, errors = (
            figures.reshape(-1, outputs) for figures in term_powers(by_output)
        )
        worst = noises.argmax(axis=1)
        noise[alike] = noises[np.arange(len(worst)), worst]
        stderr[alike] = errors[np.arange(len(worst)), worst]
    projections = [row.term.values.astype(np.float32).ravel() for row in rows]
    columns = {
        "site": [row.site for row in rows],
        "format": [row.format for row in rows],
        "part": [row.term.part for row in rows],
        "operand": [row.term.operand for row in rows],
        "sources": [list(row.term.sources) for row in rows],
        "pooled": [row.term.pooled for row in rows],
        "overflow": [row.term.overflow for row in rows],
        "power": noise,
        "stderr": stderr,
        "projections": projections,
        "measured": [row.term.measured for row in rows],
    }
    return pl.DataFrame(columns, schema=TERM_SCHEMA)


def _frame(rows: Iterable[Any], schema: Mapping[str, Any]) -> pl.DataFrame:
    data = [tuple(getattr(row, name) for name in schema) for row in rows]
    return pl.DataFrame(data, schema=schema, orient="row")


def _check_schema(schema: int, path: str | Path) -> None:
    if schema > SCHEMA:
        raise PlanError(
            "a budget of a newer roundoff",
            where=str(path),
            expected=f"schema {SCHEMA} or below",
            got=f"schema {schema}",
            do="read it with the version that wrote it",
        )


@dataclass(frozen=True, slots=True)
class _WorstOutput:
    """The output that a site costs most, and what of it: noise power, error, terms."""

    name: str
    noise: float
    stderr: float
    terms: Sequence[Term]


def _predicted(
    output: MeasuredOutput,
    terms: Sequence[Term],
    batch: int | None,
    about: Measurement,
) -> OutputPrediction:
    """Return the noise of rounded parts at one output."""
    signal = 1.0 if batch is None else output.batch_signal[batch]
    noise, stderr = power(
        terms, unmeasured=about.unmeasured, batches=about.batch_samples
    )
    additive = sum(noise for noise, _ in group_powers([[term] for term in terms]))
    if math.isfinite(noise):
        noise = additive + significant(noise - additive, terms)
    if signal <= 0:  # zero in this batch: nothing is relative to it
        return OutputPrediction(output.name, 0.0, 0.0, None)
    error_db = stderr_db(noise, stderr)
    return OutputPrediction(output.name, noise / signal, additive / signal, error_db)


def _site_cost(
    site: MeasuredSite,
    fmt: str,
    worst: _WorstOutput,
    total: float,
    parts: Mapping[str, float],
) -> SiteCost:
    """Return the row of one site in one format.

    ``total`` is the noise of all sites in the format, the infinite left out; ``parts``
    are the powers of the row's parts.
    """
    noise = worst.noise
    terms = worst.terms
    return SiteCost(
        site=site.site,
        operator=site.operator,
        kind=site.kind,
        format=fmt,
        noise=noise,
        sqnr_db=decibels(noise),
        stderr_db=stderr_db(noise, worst.stderr),
        share=_share(noise, total),
        activation_db=decibels(parts["activation"]),
        weight_db=decibels(parts["weight"]),
        output_db=decibels(parts["output"]),
        measured=terms[0].measured,
        note=_note(noise, sum(term.overflow for term in terms)),
        output=worst.name,
    )


def _part_powers(rows: Sequence[Sequence[Term]]) -> list[dict[str, float]]:
    """Return the noise power of each part of each row."""
    groups = [
        [term for term in terms if term.part == part]
        for terms in rows
        for part in _PARTS
    ]
    noises = [noise for noise, _ in group_powers(groups)]
    count = len(_PARTS)
    return [
        dict(zip(_PARTS, noises[start : start + count], strict=True))
        for start in range(0, len(noises), count)
    ]


#: The parts of a call that have columns of their own.
_PARTS = ("activation", "weight", "output")


#: Digits in which every processor agrees: runs in fp32 sum to about seven.
_COMPARED_DIGITS = 6


def _compared(noise: float) -> float:
    """Return a noise power as costs are ordered by it: without its last digits."""
    return float(f"{noise:.{_COMPARED_DIGITS}g}")


def _share(noise: float, total: float) -> float:
    if not math.isfinite(noise):
        return 1.0
    return noise / total if total else 0.0


def _note(noise: float, overflow: int) -> str:
    if overflow:
        return f"overflow: {overflow} elements"
    return "" if noise else "exact"
