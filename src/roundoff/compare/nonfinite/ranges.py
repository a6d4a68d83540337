"""How near a run's values are to the ends of number formats: margins of each site, and
shares that would be lost.

Values are floating point and not views, so that nothing counts twice.

**Margins** use the exact minimum and maximum. **Shares** are estimates: the histogram of
exponents is that of a strided sample of each tensor, and the standard error is the
binomial one of that sample (smaller where the sample is a good part of the tensor, zero
where it is all of it). It takes the sample for a random one. A bound inside of a
histogram's bin, that is, between powers of two, is taken to cut the bin as if its values
were spread evenly; ``low`` and ``high`` are the shares in the sample if all or none of
them lay beyond. The exact maximum corrects the estimate: where it is beyond the bound,
at least one value of the tensor is, also when the sample missed it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass

import numpy as np
import numpy.typing as npt
import polars as pl

from roundoff.formats import LARGEST, limits, parse_format
from roundoff.ops import operators_that
from roundoff.record import column, rows_of_table

Floats = npt.NDArray[np.float64]
FATES = ("overflow", "subnormal", "zero")


@dataclass(frozen=True, slots=True, kw_only=True)
class SiteMargin:
    """How near the values of one phase, site and dtype are to overflow.

    Attributes:
        line: the user's source line.
        amax: the largest magnitude; of ``record``, on ``rank`` in ``step``.
        largest: the largest finite value of the dtype.
        saturated: tensors whose minimum or maximum is that value itself.
        infinite: tensors with an Inf.
        tensors: how many there are.
        margin: log2(largest / amax); None where all values are zero.
        latent: the margin is at most ``within``.
    """

    phase: str = column(pl.Utf8)
    site: str = column(pl.Utf8)
    dtype: str = column(pl.Utf8)
    line: str | None = column(pl.Utf8)
    amax: float = column(pl.Float64)
    largest: float = column(pl.Float64)
    saturated: int = column(pl.Int64)
    infinite: int = column(pl.Int64)
    tensors: int = column(pl.Int64)
    rank: int = column(pl.Int32)
    step: int = column(pl.Int64)
    record: int = column(pl.Int64)
    margin: float | None = column(pl.Float64)
    latent: bool = column(pl.Boolean)


@dataclass(frozen=True, slots=True, kw_only=True)
class TotalShare:
    """One share of the values of several tensors; None of no values.

    Attributes:
        share: the estimate, with its standard error ``stderr``.
        low: the share in the sample if none of the values in a cut bin count.
        high: the share if all of them do.
        site: where the share is largest, None where it is 0 everywhere.
        site_share: the share there.
    """

    share: float | None = column(pl.Float64, default=None)
    stderr: float | None = column(pl.Float64, default=None)
    low: float | None = column(pl.Float64, default=None)
    high: float | None = column(pl.Float64, default=None)
    site: str | None = column(pl.Utf8, default=None)
    site_share: float | None = column(pl.Float64, default=None)


@dataclass(frozen=True, slots=True, kw_only=True)
class FormatShare:
    """The share of a phase's finite nonzero values that one format would lose.

    ``fate`` is overflow, subnormal or zero; ``values`` and ``tensors`` count what was
    measured. The others are those of ``TotalShare``.
    """

    phase: str = column(pl.Utf8)
    format: str = column(pl.Utf8)
    fate: str = column(pl.Utf8)
    share: float | None = column(pl.Float64)
    stderr: float | None = column(pl.Float64)
    low: float | None = column(pl.Float64)
    high: float | None = column(pl.Float64)
    values: int = column(pl.Int64)
    tensors: int = column(pl.Int64)
    site: str | None = column(pl.Utf8)
    site_share: float | None = column(pl.Float64)


def floating(ops: pl.DataFrame) -> pl.DataFrame:
    """Return the rows with floating-point values that have statistics, with ``amax``, the
    largest magnitude.

    Views are left out, and memory that was only allocated: it holds no values yet.
    """
    empty = operators_that("leave memory unwritten")
    is_empty = pl.col("operator").str.strip_chars_end("_").is_in(list(empty))
    rows = ops.filter(
        pl.col("dtype").is_in(list(LARGEST)),
        pl.col("view_of").is_null(),
        pl.col("max").is_not_null(),
        ~is_empty,
    )
    amax = pl.max_horizontal(pl.col("max").abs(), pl.col("min").abs())
    return rows.with_columns(amax=amax)


def margins(ops: pl.DataFrame, *, within: float = 3.0) -> tuple[SiteMargin, ...]:
    """Return one row for each phase, site and dtype, nearest to overflow first.

    Where ``ops`` has a column ``masked``, the negative side of these rows, a mask's,
    does not count.
    """
    rows = floating(ops)
    if "masked" not in rows.columns:
        rows = rows.with_columns(masked=pl.lit(False))
    largest = pl.col("dtype").replace_strict(LARGEST, return_dtype=pl.Float64)
    positive = pl.col("max").clip(lower_bound=0.0)
    rows = rows.with_columns(
        largest=largest,
        amax=pl.when("masked").then(positive).otherwise("amax"),
        infinite=(pl.col("posinf") > 0) | ((pl.col("neginf") > 0) & ~pl.col("masked")),
    )
    nearest = pl.col("amax").arg_max()
    table = rows.group_by("phase", "site", "dtype", maintain_order=True).agg(
        pl.col("line").drop_nulls().first(),
        pl.col("amax").max(),
        pl.col("largest").first(),
        saturated=(pl.col("amax") >= pl.col("largest")).sum().cast(pl.Int64),
        infinite=pl.col("infinite").sum().cast(pl.Int64),
        tensors=pl.len().cast(pl.Int64),
        rank=pl.col("rank").get(nearest),
        step=pl.col("step").get(nearest),
        record=pl.col("record").get(nearest),
    )
    distance = pl.col("largest").log(2) - pl.col("amax").log(2)
    margin = pl.when(pl.col("amax") > 0).then(distance)
    is_latent = (pl.col("margin") <= within).fill_null(False)
    table = table.with_columns(margin=margin).with_columns(latent=is_latent)
    table = table.sort("margin", nulls_last=True, maintain_order=True)
    return tuple(rows_of_table(SiteMargin, table))


@dataclass(frozen=True)
class RowShares:
    """Of each row: the estimated share of its finite nonzero values, bounds within the
    sample, and the variance of the estimate."""

    share: Floats
    low: Floats
    high: Floats
    variance: Floats


@dataclass(frozen=True)
class _BinParts:
    """Of each bin of the histograms: the part of its values beyond a bound, as
    estimated, at least and at most."""

    estimate: Floats
    least: Floats
    most: Floats

    def complement(self) -> _BinParts:
        """Return the parts on the other side of the bound."""
        return _BinParts(1.0 - self.estimate, 1.0 - self.most, 1.0 - self.least)


class Histograms:
    """The exponent histograms of rows (from ``floating``), laid out flat once, so that
    many bounds can be asked for."""

    def __init__(self, rows: pl.DataFrame) -> None:
        self.rows = rows
        lost = rows["nan"] + rows["posinf"] + rows["neginf"] + rows["zero"]
        self.size = (rows["numel"] - lost).to_numpy().astype(np.float64)
        self.amax = rows["amax"].to_numpy().astype(np.float64)
        length = pl.col("exponents").list.len()
        bins = (
            rows.select(pl.int_range(pl.len()).alias("row"), "exponent", "exponents")
            .filter(length > 0)
            .with_columns(place=pl.int_ranges(length))
            .explode("exponents", "place")
            .filter(pl.col("exponents") > 0)
        )
        exponent = bins["exponent"] + bins["place"]
        self._row = bins["row"].to_numpy().astype(np.int64)
        self._count = bins["exponents"].to_numpy().astype(np.float64)
        self._exponent = exponent.to_numpy().astype(np.int64)
        self.sampled = np.bincount(self._row, self._count, minlength=rows.height)

    def beyond(
        self, bound: float | Floats, *, tie: bool, below: bool = False
    ) -> RowShares:
        """The shares of magnitudes above a bound (of all rows, or one each), of it too
        if ``tie``; or ``below`` it."""
        limit = np.broadcast_to(np.asarray(bound, dtype=np.float64), self.size.shape)
        tie_is_above = tie != below
        parts = self._parts_above(limit, tie_is_above)
        if below:
            parts = parts.complement()
        estimate = self._share(parts.estimate)
        low = self._share(parts.least)
        high = self._share(parts.most)
        variance = self._variance(estimate)
        is_unsampled = (self.sampled == 0) & (self.size > 0)
        high[is_unsampled] = 1.0
        variance[is_unsampled] = 0.25
        # the exact maximum lies above the bound: so does at least one value
        one_value = 1.0 / np.maximum(self.size, 1.0)
        is_over = (self.amax > limit) | ((self.amax == limit) & tie_is_above)
        if below:
            most = 1.0 - one_value
            estimate = np.where(is_over, np.minimum(estimate, most), estimate)
            high = np.where(is_over, np.minimum(high, most), high)
        else:
            is_over = is_over & (self.size > 0)
            estimate = np.where(is_over, np.maximum(estimate, one_value), estimate)
            low = np.where(is_over, np.maximum(low, one_value), low)
        return RowShares(estimate, low, high, variance)

    def fates(self, fmt: str, scale: float | Floats = 1.0) -> dict[str, RowShares]:
        """Return the shares that would overflow, become subnormal, and become zero, when
        rounded to nearest in a format after multiplication by ``scale`` (of all rows,
        or one each)."""
        ends = limits(parse_format(fmt))
        zero = self.beyond(ends.zero / scale, tie=ends.zero_tie, below=True)
        small = self.beyond(ends.normal / scale, tie=False, below=True)
        subnormal = RowShares(
            np.maximum(small.share - zero.share, 0.0),
            np.maximum(small.low - zero.high, 0.0),
            np.clip(small.high - zero.low, 0.0, 1.0),
            small.variance + zero.variance,
        )
        over = self.beyond(ends.overflow / scale, tie=ends.overflow_tie)
        return {"overflow": over, "subnormal": subnormal, "zero": zero}

    def together(
        self, shares: RowShares, chosen: npt.NDArray[np.bool_] | None = None
    ) -> TotalShare:
        """Return one share of the values of all rows (or of the chosen), and the site
        where it is largest.
        """
        weight = self.size if chosen is None else np.where(chosen, self.size, 0.0)
        total = weight.sum()
        if not total:
            return TotalShare()
        lost = np.where(weight > 0, shares.share, 0.0)
        worst = int(lost.argmax())
        deviation = np.sqrt((weight**2 * shares.variance).sum())
        return TotalShare(
            share=float((weight * shares.share).sum() / total),
            stderr=float(deviation / total),
            low=float((weight * shares.low).sum() / total),
            high=float((weight * shares.high).sum() / total),
            site=self.rows["site"][worst] if lost[worst] > 0 else None,
            site_share=float(lost[worst]),
        )

    def _parts_above(self, limit: Floats, tie_is_above: bool) -> _BinParts:
        cut = limit[self._row]
        amax = self.amax[self._row]
        with np.errstate(invalid="ignore", divide="ignore", over="ignore"):
            start = np.ldexp(1.0, self._exponent)
            stop = np.ldexp(2.0, self._exponent)
            end = np.minimum(stop, amax)
            inside = np.clip((end - cut) / (end - start), 0.0, 1.0)
        is_all = (start > cut) | ((start == cut) & tie_is_above)
        is_none = (stop <= cut) | (end < cut) | ((end == cut) & (not tie_is_above))
        estimate = np.where(is_all | (start >= cut), 1.0, inside)
        return _BinParts(
            estimate=np.where(is_none, 0.0, estimate),
            least=np.where(is_all & ~is_none, 1.0, 0.0),
            most=np.where(is_none, 0.0, 1.0),
        )

    def _share(self, part: Floats) -> Floats:
        """Return the share of each row's sample, from the part of each bin."""
        count = np.maximum(self.sampled, 1.0)
        lost = np.bincount(self._row, part * self._count, minlength=self.size.size)
        return np.asarray(lost / count)

    def _variance(self, estimate: Floats) -> Floats:
        """Of a binomial sample without replacement."""
        count = np.maximum(self.sampled, 1.0)
        unseen = (self.size - self.sampled) / np.maximum(self.size - 1.0, 1.0)
        return np.asarray(
            estimate * (1.0 - estimate) / count * np.clip(unseen, 0.0, 1.0)
        )


def format_shares(ops: pl.DataFrame, formats: Sequence[str]) -> tuple[FormatShare, ...]:
    """By phase, format and fate (overflow, subnormal, zero): the share of finite
    nonzero values that would meet it; see the module."""
    rows = floating(ops)
    histograms = Histograms(rows)
    phases = rows["phase"].unique(maintain_order=True).to_list()
    shares = []
    for fmt in map(parse_format, formats):
        fates = histograms.fates(fmt.name)
        for phase in phases:
            of_phase = (rows["phase"] == phase).to_numpy()
            for fate in FATES:
                total = histograms.together(fates[fate], of_phase)
                shares.append(
                    FormatShare(
                        phase=phase,
                        format=fmt.name,
                        fate=fate,
                        values=int(histograms.size[of_phase].sum()),
                        tensors=int(of_phase.sum()),
                        **asdict(total),
                    )
                )
    return tuple(shares)
