"""Which rows of a budget first order may have wrong, strongest evidence first.

Four kinds of evidence. A site has no gradient, yet its errors reach the target. A
decision is taken on its result (``roundoff.budget.decisions``). Sites rounded together,
in one forward pass, cost another power than their rows say; groups that disagree are
divided. And the sampling error of a row is large.

Errors that reach a decision from further away change it now and then, in any batch: no
group of such sites on a single batch would show it, and one on all batches costs as
much as trials of its sites. The others are run in groups on the first batch.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import chain, zip_longest

from roundoff.budget.noise_power import DB_PER_SHARE, casts
from roundoff.budget.table import Budget, SiteCost
from roundoff.budget.trials import Recording
from roundoff.formats import parse_format

#: A prediction this far from a measurement, in dB, beyond its standard error.
DISAGREEMENT_DB = 1.0
#: A standard error of a row, in dB, that makes it doubtful.
DOUBTFUL_DB = 0.75
#: Strengths of evidence, see ``Suspect``.
UNSEEN, DECIDER, DECIDES, CURVED, SAMPLING, NO_EVIDENCE = range(6)
#: Fewest sites that are rounded together, and most groups of a format.
GROUP = 4
BANDS = 4
#: Most groups that come from halving those.
MOST_HALVINGS = 12
#: The least exponent of a normal number in fp32.
LEAST_EXPONENT = -126

#: Measures the noise of a choice of formats on the first batch, as a relative power.
NoiseOf = Callable[[dict[str, str]], float]


@dataclass(frozen=True, slots=True)
class Suspect:
    """A row of a budget to be measured by trial.

    The evidence is, from the strongest: the site has no gradient; a decision is taken
    on its result; it reaches a decision; groups that it is in cost another power; its
    sampling error is large; none.

    Attributes:
        site: name of the site.
        format: name of the format.
        strength: place of the evidence in that list, from 0.
        noise: noise power by the adjoint.
    """

    site: str
    format: str
    strength: int
    noise: float

    @property
    def order(self) -> tuple[int, float]:
        """What suspects of one format are sorted by."""
        return self.strength, -self.noise


def suspects(budget: Budget, recording: Recording, noise_of: NoiseOf) -> list[Suspect]:
    """Return the rows to measure by trial, those of different formats in turn.

    Formats are looked at from the one with the most noise. Where its sites cost what
    was predicted, so do the same sites with less noise, unless they may underflow.
    """
    total: dict[str, float] = dict.fromkeys(budget.about.formats, 0.0)
    for cost in budget.costs:
        total[cost.format] += cost.noise
    search = _Search(budget, recording, noise_of)
    by_format = [search.of_format(f) for f in sorted(total, key=lambda f: -total[f])]
    in_turn = chain.from_iterable(zip_longest(*by_format))
    return [suspect for suspect in in_turn if suspect is not None]


def every_row(budget: Budget, suspected: Sequence[Suspect]) -> list[Suspect]:
    """Return all rows of a budget: the suspects, then the others, worst first."""
    pairs = {(suspect.site, suspect.format) for suspect in suspected}
    others = [
        Suspect(cost.site, cost.format, NO_EVIDENCE, cost.noise)
        for cost in budget.costs
        if (cost.site, cost.format) not in pairs
    ]
    return [*suspected, *others]


class _Search:
    """Looks for suspects, format by format."""

    def __init__(self, budget: Budget, recording: Recording, noise_of: NoiseOf) -> None:
        self.budget = budget
        self.recording = recording
        self.noise_of = noise_of
        self.agreed: list[frozenset[str]] = []

    def of_format(self, fmt: str) -> list[Suspect]:
        """Return the suspects of one format, strongest evidence first."""
        costs = {c.site: c for c in self.budget.costs if c.format == fmt}
        strengths = dict(_by_flow(self.budget, self.recording, fmt))
        others = [cost for site, cost in costs.items() if site not in strengths]
        for cost in others:
            if _sampling_db(self.budget, cost) > DOUBTFUL_DB:
                strengths[cost.site] = SAMPLING
        for site in self._curved(fmt, others):
            strengths[site] = CURVED
        noises = {site: cost.noise for site, cost in costs.items()}
        by_site = [
            Suspect(site, fmt, strength, noises.get(site, 0.0))
            for site, strength in strengths.items()
        ]
        return sorted(by_site, key=lambda suspect: suspect.order)

    def _curved(self, fmt: str, costs: Sequence[SiteCost]) -> set[str]:
        """Return the sites of groups whose prediction is wrong."""
        sites = frozenset(cost.site for cost in costs)
        is_known = any(sites <= agreed for agreed in self.agreed)
        if is_known and not _may_underflow(fmt):
            return set()
        groups = _Groups(self.budget, fmt, self.noise_of)
        curved = groups.disagreeing([cost.site for cost in costs])
        if not curved:
            self.agreed.append(sites)
        return curved


def _may_underflow(fmt: str) -> bool:
    """Return True if small values are lost that other formats keep."""
    return casts(fmt) and parse_format(fmt).emin > LEAST_EXPONENT


def _sampling_db(budget: Budget, cost: SiteCost) -> float:
    """Return the standard error of a row in dB.

    A few projections can agree by chance: it is at least that of near-Gaussian ones,
    ``sqrt(2 / n)`` of the power.
    """
    fewest = min(term.values.size for term in budget.rows(cost.site, cost.format))
    return max(cost.stderr_db or 0.0, DB_PER_SHARE * math.sqrt(2 / fewest))


def _by_flow(
    budget: Budget, recording: Recording, fmt: str
) -> Iterator[tuple[str, int]]:
    """Yield the sites whose errors go where no derivative follows."""
    for site in budget.sites:
        if fmt in site.refused:
            continue
        places = recording.places(site.site)
        if not any(place.reaches for place in places):
            continue
        if site.no_path is not None:
            yield site.site, UNSEEN
        elif any(place.is_direct for place in places):
            yield site.site, DECIDER
        elif any(place.decides for place in places):
            yield site.site, DECIDES


class _Groups:
    """Sites of one format rounded together, against what their rows predict."""

    def __init__(self, budget: Budget, fmt: str, noise_of: NoiseOf) -> None:
        self.budget = budget
        self.fmt = fmt
        self.noise_of = noise_of

    def disagreeing(self, sites: Sequence[str]) -> set[str]:
        """Return the sites of groups whose prediction is wrong.

        Groups are of like noise, because a small one beside a large one is not seen;
        those that disagree are halved.
        """
        size = max(GROUP, math.ceil(len(sites) / BANDS))
        groups = [sites[i : i + size] for i in range(0, len(sites), size)]
        passes = len(groups) + MOST_HALVINGS
        wrong: list[Sequence[str]] = []
        while groups and passes > 0:
            group = groups.pop(0)
            passes -= 1
            if not self._is_wrong(group):
                continue
            if len(group) == 1:
                wrong.append(group)
                continue
            middle = len(group) // 2
            groups += [group[:middle], group[middle:]]
        return set(chain.from_iterable(wrong + groups))

    def _is_wrong(self, sites: Sequence[str]) -> bool:
        formats = dict.fromkeys(sites, self.fmt)
        prediction = self.budget.predict(formats, batch=0)
        measured = self.noise_of(formats)
        if not (prediction.noise > 0 and measured > 0):
            return prediction.noise != measured
        if not math.isfinite(prediction.noise) or not math.isfinite(measured):
            return False
        off = DB_PER_SHARE * abs(math.log(measured / prediction.noise))
        return off > DISAGREEMENT_DB + (prediction.stderr_db or 0.0)
