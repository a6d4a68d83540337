"""Budget: what each part of each site's rounding costs the output, in each format.

All noise powers are relative to the power of the target tensor: ``SQNR in dB = -10 log10(noise)``.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import polars as pl

from roundoff.errors import PlanError
from roundoff.files import atomic_path
from roundoff.formats import parse_format

if TYPE_CHECKING:
    from roundoff.plan import Plan

Array = np.ndarray[Any, np.dtype[np.float64]]

#: one row per site, format, part and operand; projections are flattened (probes, columns)
TERM_SCHEMA: dict[str, Any] = {
    "site": pl.String,
    "format": pl.String,
    "part": pl.String,
    "operand": pl.Int32,
    "sources": pl.List(pl.String),
    "pooled": pl.Boolean,
    "overflow": pl.Int64,
    "power": pl.Float64,
    "stderr": pl.Float64,
    "projections": pl.List(pl.Float32),
}


TABLE_SCHEMA: dict[str, Any] = {
    "site": pl.String,
    "operator": pl.String,
    "kind": pl.String,
    "format": pl.String,
    "noise": pl.Float64,
    "sqnr_db": pl.Float64,
    "stderr_db": pl.Float64,
    "share": pl.Float64,
    "activation_db": pl.Float64,
    "weight_db": pl.Float64,
    "output_db": pl.Float64,
    "note": pl.String,
}


def decibels(noise: float) -> float | None:
    """SQNR of a relative noise power in dB; None (infinite) for no noise, -inf is None too (all is lost)."""
    return sqnr_db(noise) if 0 < noise < math.inf else None


def sqnr_db(noise: float) -> float:
    """SQNR of a relative noise power in dB, ``-10 log10(noise)``: infinite for no noise, -inf where all is lost."""
    return -10 * math.log10(noise) if noise > 0 else math.inf


@dataclass(frozen=True)
class Prediction:
    """What a choice of formats costs: ``noise`` with correlations, ``additive`` as a sum of powers, their dB."""

    noise: float
    additive: float
    stderr_db: float | None

    @property
    def db(self) -> float:
        """SQNR with the correlations between sites, in dB; infinite when nothing is rounded."""
        return sqnr_db(self.noise)

    @property
    def additive_db(self) -> float:
        """SQNR if all errors were independent, in dB."""
        return sqnr_db(self.additive)


@dataclass(frozen=True)
class Budget:
    """The measured error budget of one workload; made by ``roundoff.budget``, kept in one parquet file.

    ``terms`` is a polars frame (see ``TERM_SCHEMA``); ``sites`` describes every site (operator, kind, params,
    sizes, the formats it refuses and why, why it has no path); ``about`` holds formats, probes, samples,
    environment, coverage and, where the workload has a metric, the metric at each noise level.
    """

    terms: pl.DataFrame
    sites: list[dict[str, Any]]
    about: dict[str, Any] = field(default_factory=dict)

    @cached_property
    def _rows(self) -> dict[tuple[str, str], list[Term]]:
        rows: dict[tuple[str, str], list[Term]] = {}
        probes = int(self.about["probes"])
        for row in self.terms.iter_rows(named=True):
            values = np.asarray(row["projections"], dtype=np.float64).reshape(
                probes, -1
            )
            term = Term(
                row["part"],
                row["operand"],
                tuple(row["sources"]),
                row["pooled"],
                row["overflow"],
                values,
            )
            rows.setdefault((row["site"], row["format"]), []).append(term)
        return rows

    def rows(self, site: str, format: str) -> list[Term]:
        """The measured parts of one site in one format; empty where the site does not run in it."""
        return self._rows.get((site, format), [])

    @cached_property
    def table(self) -> pl.DataFrame:
        """One row per site and format, worst first: SQNR in dB with standard error, share of the noise that all
        sites in that format make together, and the same of its parts. Null dB means no error at all."""
        rows: list[dict[str, Any]] = []
        kinds = {s["site"]: s for s in self.sites}
        totals: dict[str, float] = {}
        for (site, fmt), terms in self._rows.items():
            noise, stderr = power(terms)
            overflow = sum(t.overflow for t in terms)
            totals[fmt] = totals.get(fmt, 0.0) + (
                noise if math.isfinite(noise) else 0.0
            )
            parts = {
                p: power([t for t in terms if t.part == p])[0]
                for p in ("activation", "weight", "output")
            }
            has = {t.part for t in terms}
            rows.append(
                {
                    "site": site,
                    "operator": kinds[site]["operator"],
                    "kind": kinds[site]["kind"],
                    "format": fmt,
                    "noise": noise,
                    "sqnr_db": decibels(noise),
                    "stderr_db": 10 / math.log(10) * stderr / noise
                    if 0 < noise < math.inf
                    else None,
                    **{
                        f"{p}_db": decibels(v) if p in has else None
                        for p, v in parts.items()
                    },
                    "note": f"overflow: {overflow} elements"
                    if overflow
                    else ""
                    if noise
                    else "exact",
                }
            )
        for row in rows:
            total = totals[row["format"]]
            lost = not math.isfinite(row["noise"])
            row["share"] = 1.0 if lost else row["noise"] / total if total else 0.0
        frame = pl.DataFrame(
            [{k: r[k] for k in TABLE_SCHEMA} for r in rows], schema=TABLE_SCHEMA
        )
        return frame.sort("noise", "site", descending=[True, False])

    @cached_property
    def parameters(self) -> pl.DataFrame:
        """One row per parameter and format: SQNR when the parameter alone is rounded, over all its uses."""
        grouped: dict[tuple[str, str], list[Term]] = {}
        for (_, fmt), terms in self._rows.items():
            for term in terms:
                if term.part == "weight":
                    for name in term.sources:
                        grouped.setdefault((name, fmt), []).append(term)
        rows = [(name, fmt, power(terms)[0]) for (name, fmt), terms in grouped.items()]
        data = [(n, f, p, decibels(p)) for n, f, p in rows]
        schema = {
            "parameter": pl.String,
            "format": pl.String,
            "noise": pl.Float64,
            "sqnr_db": pl.Float64,
        }
        return pl.DataFrame(data, schema=schema, orient="row").sort(
            "noise", descending=True
        )

    def predict(
        self, formats: Mapping[str, str], *, batch: int | None = None
    ) -> Prediction:
        """The noise of a choice of formats (site to format; sites left out stay in the reference format).

        ``batch`` restricts it to one batch. The projections of all rounded parts are added before they are
        squared, so correlations between sites count where they stand out of the sampling noise; ``additive`` is
        the sum of the separate powers.
        """
        active = [
            t
            for s, f in formats.items()
            for t in self.rows(s, f)
            if not absorbed(t, f, formats)
        ]
        signal = 1.0
        if batch is not None:
            stops = np.cumsum([0, *self.about["batch_samples"]])
            active = [
                t.take(
                    slice(batch, batch + 1)
                    if t.pooled
                    else slice(*stops[batch : batch + 2])
                )
                for t in active
            ]
            signal = float(self.about["batch_signal"][batch])
        noise, stderr = power(active)
        additive = sum(power([t])[0] for t in active)
        if math.isfinite(noise):
            noise = additive + _significant(noise - additive, active)
        db = 10 / math.log(10) * stderr / noise if 0 < noise < math.inf else None
        return Prediction(noise / signal, additive / signal, db)

    def plan(
        self,
        target: float | str | None = None,
        *,
        metric_drop: float | str | None = None,
        max_cost: float | None = None,
        cost: str = "bytes",
        cost_table: Any = None,
        pin: Mapping[str, str] | None = None,
        allow: Mapping[str, Sequence[str]] | None = None,
        formats: Iterable[str] | None = None,
    ) -> Plan:
        """The cheapest plan whose predicted SQNR is at least ``target`` dB; see ``roundoff.budget.choose_formats``."""
        from roundoff.budget.choose_formats import choose

        return choose(
            self,
            target=target,
            metric_drop=metric_drop,
            max_cost=max_cost,
            cost=cost,
            cost_table=cost_table,
            pin=pin or {},
            allow=allow or {},
            formats=formats,
        )

    def save(self, path: str | Path) -> None:
        """Write one parquet file, whole or not at all."""
        about = {
            "roundoff": json.dumps(
                {"about": self.about, "sites": self.sites}, allow_nan=False
            )
        }
        with atomic_path(path) as temporary:
            self.terms.write_parquet(temporary, metadata=about)

    @classmethod
    def load(cls, path: str | Path) -> Budget:
        """Read a budget. Raises ``PlanError`` when the file is no budget."""
        try:
            stored = pl.read_parquet_metadata(path)["roundoff"]
            data = json.loads(stored)
            return cls(pl.read_parquet(path), data["sites"], data["about"])
        except (OSError, KeyError, ValueError, pl.exceptions.PolarsError) as error:
            raise PlanError(
                f"not a readable budget: {error}",
                where=str(path),
                expected="a parquet file written by roundoff budget",
                do="roundoff budget WORKLOAD.py -o budget.parquet",
            ) from error


@dataclass(frozen=True)
class Term:
    """One part of one site's error: ``values`` are its projections, shape ``(probes, samples or batches)``.

    ``part`` is ``activation``, ``weight`` or ``output``, and for a target that holds gradients also ``gradient``: with
    ``operand`` -1 the gradient that comes back to the output, else the gradient of an operand. ``sources`` are where the
    values come from: of a gradient the calls that use the output, empty where their gradients are added up.
    """

    part: str
    operand: int
    sources: tuple[str, ...]
    pooled: bool
    overflow: int
    values: Array

    @property
    def absorbable(self) -> bool:
        """Whether these values may arrive in the format, so that rounding them changes nothing."""
        return self.part == "activation" or (
            self.part == "gradient" and bool(self.sources)
        )

    def take(self, columns: slice) -> Term:
        """The same for some samples."""
        return Term(
            self.part,
            self.operand,
            self.sources,
            self.pooled,
            self.overflow,
            self.values[:, columns],
        )


def power(terms: Sequence[Term]) -> tuple[float, float]:
    """Noise power of errors that act together, and its standard error over samples (or probes, if one sample).

    Projections are added, then squared and averaged over the probes and summed over the samples. A pooled
    projection is already the sum over the samples of its batch; because the probes of different samples are
    independent, ``E[(a + b)^2] = E a^2 + E b^2 + 2 E ab`` holds with any mixture of both.
    """
    single = [t.values for t in terms if not t.pooled]
    pooled = [t.values for t in terms if t.pooled]
    if not single and not pooled:
        return 0.0, 0.0
    with np.errstate(invalid="ignore", over="ignore"):
        a = np.sum(single, axis=0) if single else np.zeros((pooled[0].shape[0], 1))
        square = (a**2).mean(axis=0)
        total = float(square.sum())
        stderr = _spread(a**2)
        if pooled:
            b = np.sum(pooled, axis=0)
            # probes are independent between batches too, so batches may be added before the product
            both = b.sum(axis=1)
            total += float(
                (b**2).mean(axis=0).sum() + 2 * (both * a.sum(axis=1)).mean()
            )
            stderr = math.hypot(stderr, _spread(b**2))
    if math.isnan(total):
        return math.inf, math.inf
    return max(total, 0.0), stderr


def _significant(cross: float, terms: Sequence[Term]) -> float:
    """The part of the summed cross terms that stands out of their own sampling noise.

    Positive-part James-Stein shrinkage (James and Stein, Proc. 4th Berkeley Symp. 1, 1961, eq. 10, one dimension):
    ``cross * max(0, 1 - stderr^2 / cross^2)``. Independent errors have cross terms of zero, whose estimate would only
    add noise to the sum of the powers.
    """
    if cross == 0 or not math.isfinite(cross):
        return cross
    single = [t.values for t in terms if not t.pooled]
    pooled = [t.values for t in terms if t.pooled]
    variance = sum(
        _spread(np.sum(group, axis=0) ** 2 - np.sum(np.square(group), axis=0)) ** 2
        for group in (single, pooled)
        if group
    )
    if single and pooled:
        products = 2 * np.sum(single, axis=(0, 2)) * np.sum(pooled, axis=(0, 2))
        variance += (
            float(products.var(ddof=1)) / len(products)
            if len(products) > 1
            else cross**2
        )
    return cross * max(0.0, 1.0 - variance / cross**2)


def _spread(squares: Array) -> float:
    probes, columns = squares.shape
    if columns > 1:
        return float(math.sqrt(columns) * squares.mean(axis=0).std(ddof=1))
    return float(squares[:, 0].std(ddof=1) / math.sqrt(probes)) if probes > 1 else 0.0


def absorbed(term: Term, fmt: str, formats: Mapping[str, str]) -> bool:
    """Whether rounding this operand, or gradient, changes nothing, because everything it comes from already ends in a
    format whose values ``fmt`` contains. Scaled formats choose new scales, so nothing is ever absorbed by them."""
    rule = parse_format(fmt).execution
    if (
        not term.absorbable
        or not term.sources
        or rule is None
        or rule.activation != "exact"
    ):
        return False
    return all("/" in s and keeps(formats.get(s, "fp32"), fmt) for s in term.sources)


def keeps(produced: str, fmt: str) -> bool:
    """Whether an output executed in ``produced`` is unchanged by a cast to ``fmt``."""
    source, wanted = parse_format(produced), parse_format(fmt)
    rule = source.execution
    return rule is not None and rule.output and wanted.contains(source)
