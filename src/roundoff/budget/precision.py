"""How many projections a budget takes, and how exact they make it."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from roundoff.budget.frame import Frame
from roundoff.budget.noise_power import (
    DB_PER_SHARE,
    WHOLE,
    Array,
    Left,
    standard_errors,
)
from roundoff.budget.sqnr_target import parse_db
from roundoff.budget.terms import TermKey
from roundoff.errors import WorkloadError

#: Standard error of a site's SQNR in dB, when neither ``probes`` nor ``precision`` is
#: given.
PRECISION = 0.6
#: Fewest and most probes of a sample, when ``probes`` is not given.
FEWEST_PROBES = 2
MOST_PROBES = 96
#: Most where a precision is given.
MOST_ASKED = 2**12
#: More projections than Gaussian ones would need: those of some sites have longer tails,
#: and one more batch costs more than a few probes.
MARGIN = 1.5


@dataclass(frozen=True, slots=True)
class Drawing:
    """What the number of probes depends on.

    Attributes:
        samples: of a batch.
        frame: the directions of its target.
        mixed_share: share of the sites that mix samples.
        unevenness: see ``Probe``.
        fitting: probes whose gradients fit in memory one by one.
    """

    samples: int
    frame: Frame
    mixed_share: float
    unevenness: float
    fitting: int


@dataclass(frozen=True, slots=True)
class Sampled:
    """What was asked of the sampling.

    Attributes:
        probes: sign vectors a sample; None to reach the precision.
        precision: standard error of a site's SQNR, in dB.
        most: most probes of a sample.
        may_stop: True where measuring may end before the last batch.
        memory: bytes that probe gradients may take; None for the default.
    """

    probes: int | None
    precision: float
    most: int
    may_stop: bool
    memory: int | None

    @classmethod
    def of(
        cls, probes: int | None, precision: float | str | None, memory: int | None
    ) -> Sampled:
        """Check the arguments of ``budget``. Raises ``WorkloadError``, ``PlanError``."""
        if probes is not None and probes < 1:
            raise WorkloadError(
                "no probes to draw",
                where="probes",
                expected="a whole number above 0",
                got=str(probes),
            )
        decibels = PRECISION if precision is None else parse_db(precision)
        if not 0 < decibels < math.inf:
            raise WorkloadError(
                "not a precision",
                where="precision",
                expected="a positive number of decibels, such as 0.5dB",
                got=str(precision),
            )
        most = MOST_PROBES if precision is None else MOST_ASKED
        may_stop = probes is None or precision is not None
        return cls(probes, decibels, most, may_stop, memory)

    def probes_for(self, drawing: Drawing, fewest: int, batches: int) -> int:
        """Return K, which with as many batches as then needed costs least.

        The variances of all sites average to the square of the precision. The relative
        variance of a power estimated from n squares of near-Gaussian projections is
        2/n: a site that mixes samples has one projection a probe and batch, others one
        a sample. Samples whose powers differ by a relative variance ``u`` count as
        ``1 / (1 + u)`` of one, and those that are not measured may be others.

        Args:
            drawing: what is known of the first batch.
            fewest: batches that are measured at least.
            batches: of the workload.
        """
        most = max(FEWEST_PROBES, min(self.most, drawing.fitting))
        wanted = (self.precision / DB_PER_SHARE) ** 2 / MARGIN
        best = (math.inf, most)
        for measured in range(fewest, batches + 1):
            beyond = _unmeasured(drawing, measured, batches)
            for probes in range(1, most + 1):
                if beyond + _sampling(drawing, measured, probes) <= wanted:
                    best = min(best, (measured * (BATCH + PROBE * probes), probes))
                    break
        probes = best[1]
        is_exact = not drawing.frame.left(probes)
        return probes if is_exact else max(FEWEST_PROBES, probes)


#: What a batch costs, and what a probe, in forward passes of it.
BATCH = 15.0
PROBE = 2.5
#: Powers of errors differ more than those of gradients, by this factor of the variance.
UNEVEN = 3.0


def _unmeasured(drawing: Drawing, measured: int, batches: int) -> float:
    """Return the relative variance because some batches are not measured."""
    uneven = UNEVEN * drawing.unevenness
    return (1 - measured / batches) * uneven / (measured * drawing.samples)


def _sampling(drawing: Drawing, measured: int, probes: int) -> float:
    """Return the relative variance because there are few probes."""
    uneven = 1 + UNEVEN * drawing.unevenness
    of_sample = drawing.frame.left(probes) * uneven / drawing.samples
    of_batch = drawing.frame.left_mixed(probes)
    mixed = drawing.mixed_share
    return 2 / (probes * measured) * ((1 - mixed) * of_sample + mixed * of_batch)


def mean_error_db(
    batches: Sequence[Mapping[TermKey, Array]],
    unmeasured: float,
    outputs: int = 1,
    *,
    is_exact: bool = False,
    samples: Sequence[int] = (),
    left: Left = WHOLE,
) -> float:
    """Return the standard error of the SQNR in dB, root mean square over the sites.

    The share ``unmeasured`` of the workload's batches was not measured. Sites without
    noise do not count; 0 where none has any. Each of the ``outputs`` has its share of
    the probes, and is a site of its own here. ``is_exact``, and ``samples`` of each
    batch, and ``left``: see ``standard_errors``.
    """
    totals: dict[tuple[str, str], list[Array]] = defaultdict(list)
    for terms in batches:
        for name, values in _of_sites(terms).items():
            totals[name].append(values)
    errors = []
    for stacked in _of_one_shape(totals.values()):
        sites, rows, columns = stacked.shape
        squares = np.square(stacked).reshape(sites * outputs, rows // outputs, columns)
        noise = squares.mean(axis=1).sum(axis=1)
        is_sound = (noise > 0) & np.isfinite(noise)
        error = standard_errors(
            squares[is_sound],
            unmeasured=unmeasured,
            is_exact=is_exact,
            batches=samples,
            left=left.of(is_pooled=columns < sum(samples)),
        )
        errors.append(DB_PER_SHARE * error / noise[is_sound])
    joined = np.concatenate(errors) if errors else np.zeros(0)
    return math.sqrt(float(np.mean(np.square(joined)))) if joined.size else 0.0


def _of_sites(terms: Mapping[TermKey, Array]) -> dict[tuple[str, str], Array]:
    """Return the projections of the parts of each site and format together."""
    sums: dict[tuple[str, str], Array] = {}
    for key, values in terms.items():
        name = (key.site, key.format)
        sums[name] = sums[name] + values if name in sums else values
    return sums


def _of_one_shape(sites: Iterable[Sequence[Array]]) -> Iterator[Array]:
    """Yield the projections of sites that have equally many, ``(sites, K, columns)``."""
    groups: dict[tuple[int, ...], list[Array]] = defaultdict(list)
    for arrays in sites:
        probes = min(len(array) for array in arrays)
        joined = np.concatenate([array[:probes] for array in arrays], axis=1)
        groups[joined.shape].append(joined)
    for group in groups.values():
        yield np.stack(group)
