"""Noise powers: what errors that act together cost the target.

All are relative to the power of the target tensor: ``SQNR in dB = -10 log10(noise)``.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import numpy as np

from roundoff.formats import parse_format

Array = np.ndarray[Any, np.dtype[np.float64]]

#: How a term was measured.
ADJOINT = "adjoint"
TRIAL = "trial"

#: dB of a relative change of a power, to first order.
DB_PER_SHARE = 10 / math.log(10)


def decibels(noise: float) -> float | None:
    """SQNR of a relative noise power in dB; None for no and for infinite noise."""
    return sqnr_db(noise) if 0 < noise < math.inf else None


def sqnr_db(noise: float) -> float:
    """SQNR of a relative noise power in dB, ``-10 log10(noise)``.

    Infinite for no noise, -inf where all is lost, NaN where nothing could be compared.
    """
    if math.isnan(noise):
        return noise
    return -10 * math.log10(noise) if noise > 0 else math.inf


def stderr_db(noise: float, stderr: float) -> float | None:
    """Standard error in dB of a noise power; None where the power has no SQNR in dB."""
    return DB_PER_SHARE * stderr / noise if 0 < noise < math.inf else None


@dataclass(frozen=True, slots=True)
class Term:
    """One part of one site's error.

    Attributes:
        part: ``activation``, ``weight`` or ``output``, and for a target that holds
            gradients also ``gradient``.
        operand: number of the operand. Of a gradient, -1 is the one that comes back to
            the output, else the gradient of that operand.
        sources: where the values come from. Of a gradient the calls that use the
            output, empty where their gradients are added up.
        pooled: True where the projections are summed over the samples of a batch.
        overflow: elements that are infinite or NaN and that a probe looks at.
        values: projections, shape ``(probes, samples)``, pooled ``(probes, batches)``.
        measured: ``adjoint``, to first order; or ``trial``, by running the model with
            this site rounded, where the power has no sampling error.
        batch_error: what whole batches that were not measured may differ by, as a share
            of the power; see ``roundoff.budget.batch_noise``.
    """

    part: str
    operand: int
    sources: tuple[str, ...]
    pooled: bool
    overflow: int
    values: Array
    measured: str = ADJOINT
    batch_error: float = 0.0

    @property
    def absorbable(self) -> bool:
        """True where these values may arrive in the format, so that nothing is rounded.

        Values that overflow in the format never arrive in it: what made them would have
        overflowed too, or a constant was written among them on the way, a mask's
        -3.4e38 say.
        """
        if self.overflow:
            return False
        if self.part == "gradient":
            return bool(self.sources)
        return self.part == "activation"

    def take(self, columns: slice) -> Term:
        """Return the same term for some samples."""
        return replace(self, values=self.values[:, columns], batch_error=0.0)


def power(
    terms: Sequence[Term], *, unmeasured: float = 0.0, batches: Sequence[int] = ()
) -> tuple[float, float]:
    """Return the noise power of errors that act together, and its standard error.

    Projections are added, then squared, averaged over the probes and summed over the
    samples. A pooled projection is already the sum over the samples of its batch;
    because the probes of different samples are independent,
    ``E[(a + b)^2] = E a^2 + E b^2 + 2 E ab`` holds with any mixture of both. See
    ``standard_errors`` for ``unmeasured``, the share of the samples that stand for
    others, and ``batches``; for all samples measured by trial the error is zero.
    """
    single = [t.values for t in terms if not t.pooled]
    pooled = [t.values for t in terms if t.pooled]
    if not single and not pooled:
        return 0.0, 0.0
    with np.errstate(invalid="ignore", over="ignore"):
        a = np.sum(single, axis=0) if single else np.zeros((pooled[0].shape[0], 1))
        total = float((a**2).mean(axis=0).sum())
        is_exact = all(term.measured == TRIAL for term in terms)
        spread = partial(
            standard_errors,
            unmeasured=unmeasured,
            is_exact=is_exact,
            batches=batches,
        )
        stderr = float(spread(a**2, batch_error=_batch_error(terms, pooled=False)))
        if is_exact:
            stderr = max(stderr, _float_error(total))
        if pooled:
            b = np.sum(pooled, axis=0)
            # probes are independent between batches too: add batches, then multiply
            product = b.sum(axis=1) * a.sum(axis=1)
            total += float((b**2).mean(axis=0).sum() + 2 * product.mean())
            beyond = _batch_error(terms, pooled=True)
            stderr = math.hypot(stderr, float(spread(b**2, batch_error=beyond)))
    if math.isnan(total):
        return math.inf, math.inf
    return max(total, 0.0), stderr


def group_powers(
    groups: Sequence[Sequence[Term]],
    *,
    unmeasured: float = 0.0,
    batches: Sequence[int] = (),
) -> list[tuple[float, float]]:
    """Return ``power`` of many groups of terms: those of one shape at once."""
    results = [(0.0, 0.0)] * len(groups)
    places: dict[tuple[int, ...], list[int]] = defaultdict(list)
    for place, terms in enumerate(groups):
        if len({(term.pooled, term.values.shape) for term in terms}) == 1:
            places[terms[0].values.shape].append(place)
        elif terms:
            results[place] = power(terms, unmeasured=unmeasured, batches=batches)
    for alike in places.values():
        summed = [np.sum([t.values for t in groups[place]], axis=0) for place in alike]
        squares = np.square(np.stack(summed))
        with np.errstate(invalid="ignore", over="ignore"):
            noise = squares.mean(axis=1).sum(axis=1)
            shares = [max(t.batch_error for t in groups[place]) for place in alike]
            spread = partial(
                standard_errors,
                squares,
                unmeasured=unmeasured,
                batch_error=np.array(shares) * noise,
            )
            errors = spread()
            beyond = spread(is_exact=True, batches=batches)
        for number, place in enumerate(alike):
            terms = groups[place]
            is_exact = all(term.measured == TRIAL for term in terms)
            error = errors[number]
            if is_exact:
                error = max(beyond[number], _float_error(noise[number]))
            results[place] = (float(noise[number]), float(error))
            if not np.isfinite(noise[number]):
                results[place] = power(terms, unmeasured=unmeasured, batches=batches)
    return results


def together(terms: Sequence[Term]) -> list[Term]:
    """Return the parts of one site; as one part where they were measured by trial.

    What such parts do together is known exactly, so it is no matter of cross terms.
    """
    if len(terms) < 2 or any(term.measured != TRIAL for term in terms):
        return list(terms)
    values = np.sum([term.values for term in terms], axis=0)
    return [replace(terms[0], values=values)]


def significant(cross: float, terms: Sequence[Term]) -> float:
    """Return the part of summed cross terms that stands out of their sampling noise.

    Positive-part James-Stein shrinkage (James and Stein, Proc. 4th Berkeley Symp. 1,
    1961, eq. 10, one dimension): ``cross * max(0, 1 - stderr^2 / cross^2)``.
    Independent errors have cross terms of zero, whose estimate would only add noise to
    the sum of the powers.
    """
    if cross == 0 or not math.isfinite(cross):
        return cross
    single = [t.values for t in terms if not t.pooled]
    pooled = [t.values for t in terms if t.pooled]
    variance = sum(_cross_variance(group) for group in (single, pooled) if group)
    if single and pooled:
        products = 2 * np.sum(single, axis=(0, 2)) * np.sum(pooled, axis=(0, 2))
        variance += _mean_variance(products, default=cross**2)
    return cross * max(0.0, 1.0 - variance / cross**2)


def _mean_variance(values: Array, default: float) -> float:
    """Return the variance of the mean; ``default`` for a single value."""
    count = len(values)
    return float(values.var(ddof=1)) / count if count > 1 else default


def _cross_variance(group: Sequence[Array]) -> float:
    """Variance of the summed products of different terms."""
    cross = np.sum(group, axis=0) ** 2 - np.sum(np.square(group), axis=0)
    return _spread(cross) ** 2


def standard_errors(
    squares: Array,
    *,
    unmeasured: float = 0.0,
    is_exact: bool = False,
    batches: Sequence[int] = (),
    batch_error: Array | float = 0.0,
) -> Array:
    """Return the standard errors of powers: means over probes, summed over columns.

    That is the spread over the independent probes of each column, and at least what
    squares of Gaussian projections have, ``2 P^2 / K`` for each column's power P: a
    spread that was estimated from few values is as uncertain as the power, and small
    where that is small. 0 where all probes agree (a target of one element is exact).
    With one probe, the spread over the columns.

    Args:
        squares: of projections, shape ``(..., probes, columns)``.
        unmeasured: share of the columns that were not measured. The others stand for
            them, so the error holds what columns differ by, with the correction for a
            finite population (Cochran, Sampling Techniques, 1977, eq. 2.9).
        is_exact: the mean over the probes is exact in each column, as in a trial.
        batches: columns of each batch. Those of one may be alike (nodes of a graph), so
            an exact error is at least what whole batches differ by.
        batch_error: what is known of the batches that were not measured, shape
            ``(...)``: what columns differ by counts for at least so much.
    """
    probes, columns = squares.shape[-2:]
    means = squares.mean(axis=-2)
    between = np.zeros(means.shape[:-1])
    if columns > 1:
        between = math.sqrt(columns) * means.std(axis=-1, ddof=1)
    if is_exact:
        if len(batches) > 1 and sum(batches) == columns:
            between = np.maximum(between, _between_batches(means, batches))
        exact: Array = np.maximum(math.sqrt(unmeasured) * between, batch_error)
        return exact
    if probes == 1:
        alone: Array = np.maximum(between, batch_error)
        return alone
    spread = np.sqrt(squares.var(axis=-2, ddof=1).sum(axis=-1) / probes)
    # of a column's mean square, E mean^2 = P^2 (1 + 2/K)
    powers = np.square(means).sum(axis=-1) * probes / (probes + 2)
    error = np.where(spread > 0, np.maximum(spread, np.sqrt(2 * powers / probes)), 0.0)
    beyond = np.maximum(between**2 - error**2, 0.0)
    beyond = np.maximum(unmeasured * beyond, np.square(batch_error))
    total: Array = np.sqrt(error**2 + beyond)
    return total


def _batch_error(terms: Sequence[Term], *, pooled: bool) -> float:
    """Return what other batches may change the power of terms together by."""
    sharing = [t for t in terms if t.batch_error and t.pooled is pooled]
    if not sharing:
        return 0.0
    summed = np.sum([term.values for term in sharing], axis=0)
    noise = float((summed**2).mean(axis=0).sum())
    return noise * max(term.batch_error for term in sharing)


#: Roundings in fp32 that an output carries itself, relative to its rms.
_OWN_ROUNDING = 8 * 2.0**-24


def _float_error(noise: float) -> float:
    """Return what a noise power is off by because outputs are computed in fp32.

    A difference of relative rms ``d`` is off by about ``_OWN_ROUNDING``, its square by
    ``2 d`` times that.
    """
    return 2 * math.sqrt(noise) * _OWN_ROUNDING if 0 < noise < math.inf else 0.0


def _between_batches(means: Array, batches: Sequence[int]) -> Array:
    """Return the standard error of the sum of all columns, from whole batches."""
    starts = np.cumsum([0, *batches[:-1]])
    totals = np.add.reduceat(means, starts, axis=-1)
    error: Array = math.sqrt(len(batches)) * totals.std(axis=-1, ddof=1)
    return error


def term_powers(values: Array) -> tuple[Array, Array]:
    """Return the noise power of each term alone, and its standard error.

    ``values`` has shape ``(terms, probes, columns)``. See ``power``.
    """
    with np.errstate(invalid="ignore", over="ignore"):
        squares = np.square(values)
        noise = squares.mean(axis=1).sum(axis=1)
        errors = standard_errors(squares)
    is_lost = np.isnan(noise)
    noise[is_lost] = math.inf
    errors[is_lost] = math.inf
    return noise, errors


def _spread(values: Array) -> float:
    """Standard error of the mean over probes, summed over columns, of any values."""
    probes, columns = values.shape
    if columns > 1:
        return math.sqrt(columns) * float(values.mean(axis=0).std(ddof=1))
    if probes > 1:
        return float(values[:, 0].std(ddof=1) / math.sqrt(probes))
    return 0.0


def absorbed(term: Term, fmt: str, formats: Mapping[str, str]) -> bool:
    """Return True if rounding this operand, or gradient, to ``fmt`` changes nothing.

    So it is where everything that it comes from already ends in a format whose values
    ``fmt`` contains, by ``formats`` (site to format). Scaled formats choose new scales,
    so they absorb nothing.
    """
    if not (term.absorbable and term.sources and casts(fmt)):
        return False
    return all("/" in s and keeps(formats.get(s, "fp32"), fmt) for s in term.sources)


def casts(fmt: str) -> bool:
    """Return True if a format rounds operands by a plain cast.

    An operand that is already in the format then costs nothing.
    """
    rule = parse_format(fmt).execution
    return rule is not None and rule.activation == "exact"


def keeps(produced: str, fmt: str) -> bool:
    """Return True if a cast to ``fmt`` changes no output executed in ``produced``."""
    source = parse_format(produced)
    rule = source.execution
    return rule is not None and rule.output and parse_format(fmt).contains(source)
