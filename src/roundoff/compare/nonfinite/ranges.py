"""How near a run's values are to the ends of number formats: margins of each site, and shares that would be lost.

Values are floating point and not views, so that nothing counts twice.

**Margins** use the exact minimum and maximum. **Shares** are estimates: the histogram of exponents is that of a strided
sample of each tensor, and the standard error is the binomial one of that sample (smaller where the sample is a good
part of the tensor, zero where it is all of it). It takes the sample for a random one. A bound inside of a histogram's
bin, that is, between powers of two, is taken to cut the bin as if its values were spread evenly; ``low`` and ``high`` are
the shares in the sample if all or none of them lay beyond. The exact maximum corrects the estimate: where it is
beyond the bound, at least one value of the tensor is, also when the sample missed it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import polars as pl

from roundoff.formats import LARGEST, limits, parse_format
from roundoff.ops import operators_that

Floats = npt.NDArray[np.float64]
FATES = ("overflow", "subnormal", "zero")
FORMAT_SCHEMA = {
    "phase": pl.Utf8,
    "format": pl.Utf8,
    "fate": pl.Utf8,
    "share": pl.Float64,
    "stderr": pl.Float64,
    "low": pl.Float64,
    "high": pl.Float64,
    "values": pl.Int64,
    "tensors": pl.Int64,
    "site": pl.Utf8,
    "site_share": pl.Float64,
}


def floating(ops: pl.DataFrame) -> pl.DataFrame:
    """The rows with floating-point values of their own that have statistics, with ``amax``, the largest magnitude.

    Memory that was only allocated holds no values yet.
    """
    own = ops.filter(
        pl.col("dtype").is_in(list(LARGEST))
        & pl.col("view_of").is_null()
        & pl.col("max").is_not_null(),
        ~pl.col("operator")
        .str.strip_chars_end("_")
        .is_in(list(operators_that("leave memory unwritten"))),
    )
    return own.with_columns(
        amax=pl.max_horizontal(pl.col("max").abs(), pl.col("min").abs())
    )


def margins(ops: pl.DataFrame, *, within: float = 3.0) -> pl.DataFrame:
    """One row for each phase, site and dtype, nearest to overflow first.

    ``margin`` is log2(largest finite value / largest magnitude), in powers of two, None where all values are zero;
    ``latent``: at most ``within``. ``saturated`` counts tensors whose minimum or maximum is the largest finite value
    itself, ``infinite`` those with an Inf. Where ``ops`` has a column ``masked``, the negative side of these rows, a
    mask's, does not count. ``step``, ``rank`` and ``record`` are those of the largest magnitude.
    """
    own = floating(ops)
    if "masked" not in own.columns:
        own = own.with_columns(masked=pl.lit(False))
    largest = pl.col("dtype").replace_strict(LARGEST, return_dtype=pl.Float64)
    own = own.with_columns(
        largest=largest,
        amax=pl.when("masked")
        .then(pl.col("max").clip(lower_bound=0.0))
        .otherwise("amax"),
        infinite=(pl.col("posinf") > 0) | ((pl.col("neginf") > 0) & ~pl.col("masked")),
    )
    nearest = pl.col("amax").arg_max()
    table = own.group_by("phase", "site", "dtype", maintain_order=True).agg(
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
    margin = pl.when(pl.col("amax") > 0).then(
        pl.col("largest").log(2) - pl.col("amax").log(2)
    )
    return (
        table.with_columns(margin=margin)
        .with_columns(latent=(pl.col("margin") <= within).fill_null(False))
        .sort("margin", nulls_last=True, maintain_order=True)
    )


@dataclass(frozen=True)
class Shares:
    """Of each row: the estimated share of its finite nonzero values, bounds within the sample, and the variance."""

    share: Floats
    low: Floats
    high: Floats
    variance: Floats


class Histograms:
    """The exponent histograms of rows (from ``floating``), laid out flat once, so that many bounds can be asked for."""

    def __init__(self, own: pl.DataFrame) -> None:
        self.rows = own
        lost = own["nan"] + own["posinf"] + own["neginf"] + own["zero"]
        self.size = (own["numel"] - lost).to_numpy().astype(np.float64)
        self.amax = own["amax"].to_numpy().astype(np.float64)
        flat = (
            own.select(pl.int_range(pl.len()).alias("row"), "exponent", "exponents")
            .filter(pl.col("exponents").list.len() > 0)
            .with_columns(step=pl.int_ranges(pl.col("exponents").list.len()))
            .explode("exponents", "step")
            .filter(pl.col("exponents") > 0)
        )
        self._row = flat["row"].to_numpy().astype(np.int64)
        self._count = flat["exponents"].to_numpy().astype(np.float64)
        self._exponent = (flat["exponent"] + flat["step"]).to_numpy().astype(np.int64)
        self.sampled = np.bincount(self._row, self._count, minlength=own.height)

    def beyond(
        self, bound: float | Floats, *, tie: bool, below: bool = False
    ) -> Shares:
        """The shares of magnitudes above a bound (of all rows, or one each), of it too if ``tie``; or ``below`` it."""
        limit = np.broadcast_to(np.asarray(bound, dtype=np.float64), self.size.shape)
        cut = limit[self._row]
        open_tie = tie != below  # what lies on the bound is above it
        with np.errstate(invalid="ignore", divide="ignore", over="ignore"):
            start, after = np.ldexp(1.0, self._exponent), np.ldexp(2.0, self._exponent)
            end = np.minimum(after, self.amax[self._row])
            inside = np.clip((end - cut) / (end - start), 0.0, 1.0)
        whole = (start > cut) | ((start == cut) & open_tie)
        none = (after <= cut) | (end < cut) | ((end == cut) & (not open_tie))
        above = np.where(none, 0.0, np.where(whole | (start >= cut), 1.0, inside))
        surely, possibly = np.where(whole & ~none, 1.0, 0.0), np.where(none, 0.0, 1.0)
        if below:
            above, surely, possibly = 1.0 - above, 1.0 - possibly, 1.0 - surely
        count = np.maximum(self.sampled, 1.0)

        def share(part: Floats) -> Floats:
            return np.asarray(
                np.bincount(self._row, part * self._count, minlength=self.size.size)
                / count
            )

        estimate, low, high = share(above), share(surely), share(possibly)
        unsampled = (self.sampled == 0) & (self.size > 0)
        high[unsampled] = 1.0
        rest = np.clip(
            (self.size - self.sampled) / np.maximum(self.size - 1.0, 1.0), 0.0, 1.0
        )
        variance = estimate * (1.0 - estimate) / count * rest
        variance[unsampled] = 0.25
        least = 1.0 / np.maximum(self.size, 1.0)
        over = (self.amax > limit) | ((self.amax == limit) & open_tie)
        if not below:
            estimate = np.where(
                over & (self.size > 0), np.maximum(estimate, least), estimate
            )
            low = np.where(over & (self.size > 0), np.maximum(low, least), low)
        else:
            estimate = np.where(over, np.minimum(estimate, 1.0 - least), estimate)
            high = np.where(over, np.minimum(high, 1.0 - least), high)
        return Shares(estimate, low, high, variance)

    def fates(self, fmt: str, scale: float | Floats = 1.0) -> dict[str, Shares]:
        """The shares that would overflow, become subnormal, and become zero, when rounded to nearest in a format after
        multiplication by ``scale`` (of all rows, or one each)."""
        ends = limits(parse_format(fmt))
        zero = self.beyond(ends.zero / scale, tie=ends.zero_tie, below=True)
        low = self.beyond(ends.normal / scale, tie=False, below=True)
        subnormal = Shares(
            np.maximum(low.share - zero.share, 0.0),
            np.maximum(low.low - zero.high, 0.0),
            np.clip(low.high - zero.low, 0.0, 1.0),
            low.variance + zero.variance,
        )
        over = self.beyond(ends.overflow / scale, tie=ends.overflow_tie)
        return {"overflow": over, "subnormal": subnormal, "zero": zero}

    def together(
        self, shares: Shares, which: npt.NDArray[np.bool_] | None = None
    ) -> dict[str, Any]:
        """One share of the values of all rows (or of ``which``), and the site where it is largest."""
        weight = self.size if which is None else np.where(which, self.size, 0.0)
        total = weight.sum()
        if not total:
            return dict.fromkeys(
                ("share", "stderr", "low", "high", "site", "site_share")
            )
        lost = np.where(weight > 0, shares.share, 0.0)
        worst = int(lost.argmax())
        mean = {
            key: float((weight * getattr(shares, key)).sum() / total)
            for key in ("share", "low", "high")
        }
        return mean | {
            "stderr": float(np.sqrt((weight**2 * shares.variance).sum()) / total),
            "site": self.rows["site"][worst] if lost[worst] > 0 else None,
            "site_share": float(lost[worst]),
        }


def format_shares(ops: pl.DataFrame, formats: Sequence[str]) -> pl.DataFrame:
    """By phase, format and fate (overflow, subnormal, zero): the share of finite nonzero values; see the module."""
    own = floating(ops)
    histograms = Histograms(own)
    phases = own["phase"].unique(maintain_order=True).to_list()
    rows = []
    for fmt in map(parse_format, formats):
        fates = histograms.fates(fmt.name)
        for phase in phases:
            here = (own["phase"] == phase).to_numpy()
            size = {
                "values": int(histograms.size[here].sum()),
                "tensors": int(here.sum()),
            }
            for fate in FATES:
                found = histograms.together(fates[fate], here)
                rows.append(
                    {"phase": phase, "format": fmt.name, "fate": fate} | found | size
                )
    return pl.DataFrame(rows, schema=FORMAT_SCHEMA)
