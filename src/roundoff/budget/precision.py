"""How many projections a budget takes, and how exact they make it."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from roundoff.budget.noise_power import DB_PER_SHARE, Array, standard_errors
from roundoff.budget.sqnr_target import parse_db
from roundoff.budget.terms import TermKey
from roundoff.errors import WorkloadError

#: Standard error of a site's SQNR in dB, when neither ``probes`` nor ``precision`` is
#: given.
PRECISION = 0.6
#: Fewest and most probes of a sample, when ``probes`` is not given.
FEWEST_PROBES = 2
MOST_PROBES = 96
#: More projections than Gaussian ones would need: those of some sites have longer tails,
#: and one more batch costs more than a few probes.
MARGIN = 1.5


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
    most: float
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
        most = MOST_PROBES if precision is None else math.inf
        may_stop = probes is None or precision is not None
        return cls(probes, decibels, most, may_stop, memory)

    def probes_for(
        self, samples: int, batches: int, mixed_share: float, fitting: float
    ) -> int:
        """Return K for so many batches of so many samples; ``fitting`` at most.

        The variances of all sites average to the square of the precision: a site that
        mixes samples (``mixed_share`` of them) has one projection a probe and batch,
        others one a sample. The relative standard error of a power estimated from n
        squares of near-Gaussian projections is sqrt(2/n).
        """
        needed = MARGIN * 2 * (DB_PER_SHARE / self.precision) ** 2
        per_probe = batches / ((1 - mixed_share) / samples + mixed_share)
        most = max(FEWEST_PROBES, min(self.most, fitting))
        return int(min(most, max(FEWEST_PROBES, math.ceil(needed / per_probe))))


#: Projections of the parts of a site in a format together, by their names.
SiteProjections = Mapping[tuple[str, str], Array]


def mean_error_db(
    batches: Sequence[SiteProjections],
    unmeasured: float,
    outputs: int = 1,
    *,
    is_exact: bool = False,
    samples: Sequence[int] = (),
    batch_errors: Mapping[str, float] | None = None,
) -> float:
    """Return the standard error of the SQNR in dB, root mean square over the sites.

    The share ``unmeasured`` of the workload's batches was not measured. Sites without
    noise do not count; 0 where none has any. Each of the ``outputs`` has its share of
    the probes, and is a site of its own here. ``is_exact``, and ``samples`` of each
    batch: see ``standard_errors``. ``batch_errors``: by the name of a format, what other
    batches may change a power by, as a share of it.
    """
    totals: dict[tuple[str, str], list[Array]] = defaultdict(list)
    for sites in batches:
        for name, values in sites.items():
            totals[name].append(values)
    errors = []
    for names, stacked in _of_one_shape(totals):
        sites, rows, columns = stacked.shape
        squares = np.square(stacked).reshape(sites * outputs, rows // outputs, columns)
        noise = squares.mean(axis=1).sum(axis=1)
        is_sound = (noise > 0) & np.isfinite(noise)
        shares = [(batch_errors or {}).get(fmt, 0.0) for _, fmt in names]
        error = standard_errors(
            squares[is_sound],
            unmeasured=unmeasured,
            is_exact=is_exact,
            batches=samples,
            batch_error=np.repeat(shares, outputs)[is_sound] * noise[is_sound],
        )
        errors.append(DB_PER_SHARE * error / noise[is_sound])
    joined = np.concatenate(errors) if errors else np.zeros(0)
    return math.sqrt(float(np.mean(np.square(joined)))) if joined.size else 0.0


def of_sites(terms: Mapping[TermKey, Array]) -> SiteProjections:
    """Return the projections of the parts of each site and format together."""
    sums: dict[tuple[str, str], Array] = {}
    for key, values in terms.items():
        name = (key.site, key.format)
        sums[name] = sums[name] + values if name in sums else values
    return sums


def _of_one_shape(
    sites: Mapping[tuple[str, str], Sequence[Array]],
) -> Iterator[tuple[Sequence[tuple[str, str]], Array]]:
    """Yield the sites that have equally many projections, ``(sites, K, columns)``."""
    groups: dict[tuple[int, ...], dict[tuple[str, str], Array]] = defaultdict(dict)
    for name, arrays in sites.items():
        probes = min(len(array) for array in arrays)
        joined = np.concatenate([array[:probes] for array in arrays], axis=1)
        groups[joined.shape][name] = joined
    for group in groups.values():
        yield list(group), np.stack(list(group.values()))
