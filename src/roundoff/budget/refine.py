"""Where first order does not hold, rows of a budget are measured by trial."""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import replace

import numpy as np
import polars as pl

from roundoff.budget.facts import MeasuredSite
from roundoff.budget.noise_power import TRIAL, Term, casts, power
from roundoff.budget.suspects import NO_EVIDENCE, SAMPLING, Suspect, every_row, suspects
from roundoff.budget.table import Budget, MeasuredTerm, term_frame
from roundoff.budget.trial_rows import Array, OutputView, TrialRows
from roundoff.budget.trial_signs import DrawnSigns
from roundoff.budget.trials import (
    Pair,
    Recording,
    measure_by_trial,
    record,
    same_shapes,
)
from roundoff.errors import WorkloadError
from roundoff.formats import parse_format
from roundoff.plan import run_batches
from roundoff.workload import Workload

#: Trials that are made whatever they cost: so many a format, or this share of the rows.
FEWEST = 4
SHARE = 0.1


def refine(
    workload: Workload,
    budget: Budget,
    signs: Sequence[DrawnSigns],
    weights: Mapping[str, float],
    of: str | None,
    trials: int | None,
    report: Callable[[str, int, int], None],
) -> Budget:
    """Return a budget whose doubtful rows are measured by trial.

    Args:
        workload: that the budget is of.
        budget: by the adjoint.
        signs: sign vectors of each batch.
        weights: of the target tensors, see ``OutputRows``.
        of: what it measures, see ``roundoff.budget``.
        trials: most rows to measure, strongest evidence first. None: a tenth of the
            rows or four a format; more, down to some strength of evidence, while they
            are no more than the probes; and every row where all are no more.
        report: called with the stage and how much of it is done.
    """
    last = max(drawn.index for drawn in signs) + 1
    recording = _recording(workload, budget, of, last)
    views = [
        OutputView({name: weights[name] for name in output.tensors}, output.signal)
        for output in budget.outputs
    ]

    def noise_of(formats: dict[str, str]) -> float:
        return _first_noise(workload, recording, views, formats)

    def measure(chosen: Sequence[Suspect]) -> dict[Pair, TrialRows]:
        if not chosen:
            return {}
        is_whole = len(recording.batches) >= last
        return measure_by_trial(
            workload,
            recording if is_whole else record(workload, of, last),
            map(_pair, chosen),
            views,
            signs,
            lambda done, total: report("trials", done, total),
        )

    doubtful = suspects(budget, recording, noise_of)
    if trials is not None:
        return with_trials(budget, measure(doubtful[:trials]))
    rows = every_row(budget, doubtful)
    fewest = max(FEWEST * len(budget.about.formats), math.ceil(SHARE * len(rows)))
    certain = [s for s in doubtful if s.strength < SAMPLING][:fewest]
    limit = _affordable(rows, budget.about.probes)
    further = [suspect for suspect in rows if suspect.strength < limit]
    return with_trials(budget, measure([*certain, *_without(further, certain)]))


def _recording(
    workload: Workload, budget: Budget, of: str | None, last: int
) -> Recording:
    """Return the first batch followed, or all ``last`` where that does not show enough.

    So it is where a decision is taken, which other batches may take otherwise, where a
    site has no gradient, and where another batch calls sites that the first does not.
    """
    first = record(workload, of, 1)
    [batch] = first.batches
    decides = any(place.decides for place in batch.places.values())
    is_seen = all(
        site.site in batch.places and site.no_path is None for site in budget.sites
    )
    return first if is_seen and not decides else record(workload, of, last)


def _first_noise(
    workload: Workload,
    recording: Recording,
    views: Sequence[OutputView],
    formats: dict[str, str],
) -> float:
    """Return the noise of a choice of formats on the first batch, at the worst output."""
    exact = recording.batches[0].targets
    try:
        ran = run_batches(
            workload, formats, target=recording.target, batches=slice(0, 1)
        )
    except WorkloadError:
        return math.inf  # the model refuses rounded values
    [targets] = ran.targets
    if not same_shapes(exact, targets):
        return math.inf
    return max(view.noise(targets, exact) for view in views)


def _affordable(rows: Sequence[Suspect], allowed: int) -> int:
    """Return how strong the evidence must be: the last strength not to be tried.

    ``allowed`` is the number of trials, one for each probe that was sent back: a trial
    is a forward pass. Rows without evidence are tried where that is enough for all.
    """
    if len(rows) <= allowed:
        return NO_EVIDENCE + 1
    for strength in range(NO_EVIDENCE):
        if sum(suspect.strength <= strength for suspect in rows) > allowed:
            return strength
    return NO_EVIDENCE


def _without(chosen: Sequence[Suspect], others: Sequence[Suspect]) -> list[Suspect]:
    """Return the suspects whose rows are not those of ``others``."""
    pairs = {_pair(suspect) for suspect in others}
    return [suspect for suspect in chosen if _pair(suspect) not in pairs]


def _pair(suspect: Suspect) -> Pair:
    return suspect.site, parse_format(suspect.format)


def with_trials(budget: Budget, results: Mapping[Pair, TrialRows]) -> Budget:
    """Return a budget with the rows of trials in the place of its own."""
    if not results:
        return replace(budget, about=replace(budget.about, trials=0))
    rows = [
        row
        for (site, fmt), result in results.items()
        for row in _term_rows(budget, site, fmt.name, result)
    ]
    tried = {(site, fmt.name) for site, fmt in results}
    pairs = pl.DataFrame(list(tried), schema=["site", "format"], orient="row")
    kept = budget.terms.join(pairs, on=["site", "format"], how="anti")
    return Budget(
        pl.concat([kept, term_frame(rows, len(budget.outputs))]),
        tuple(_seen(site, budget.about.formats, tried) for site in budget.sites),
        replace(budget.about, trials=len(tried)),
    )


def _seen(
    site: MeasuredSite, formats: Sequence[str], tried: Collection[tuple[str, str]]
) -> MeasuredSite:
    """Return a site with a path to the target, where every format of it was tried."""
    runs = [fmt for fmt in formats if fmt not in site.refused]
    is_seen = all((site.site, fmt) in tried for fmt in runs)
    return replace(site, no_path=None) if runs and is_seen else site


def _term_rows(
    budget: Budget, site: str, fmt: str, result: TrialRows
) -> Iterator[MeasuredTerm]:
    """Yield the row of each part of one trial, relative to the target."""
    keys = dict.fromkeys(key for batch in result.batches for key in batch)
    for key in keys:
        columns = [
            _columns(batch.get(key), budget, samples)
            for batch, samples in zip(
                result.batches, budget.about.batch_samples, strict=True
            )
        ]
        values = np.concatenate(columns, axis=1)
        overflow = result.overflow[key]
        whole = Term(key.part, key.operand, key.sources, False, overflow, values, TRIAL)
        is_alone = key.part == "activation" and casts(fmt)
        shares = [] if is_alone else budget.rows(site, fmt)
        for term in _divided(whole, shares):
            yield MeasuredTerm(site, fmt, term)


def _divided(whole: Term, rows: Sequence[Term]) -> list[Term]:
    """Return a part that was measured as one, divided as the adjoint divides it.

    The shares of the adjoint are kept, and what is missing to the sum is added in
    proportion to their powers. Undivided where the adjoint says nothing.
    """
    shares = [row for row in rows if row.part == whole.part]
    powers = [power([row])[0] for row in shares]
    if len(shares) < 2 or not 0 < sum(powers) < math.inf:
        return [whole]
    is_alike = all(_has_columns_of(row, whole) for row in shares)
    if not is_alike or not np.isfinite(whole.values).all():
        return [whole]
    missing = whole.values - np.sum([row.values for row in shares], axis=0)
    return [
        replace(
            row, values=row.values + missing * (noise / sum(powers)), measured=TRIAL
        )
        for row, noise in zip(shares, powers, strict=True)
    ]


def _has_columns_of(row: Term, whole: Term) -> bool:
    return not row.pooled and row.values.shape == whole.values.shape


def _columns(projections: Array | None, budget: Budget, samples: int) -> Array:
    """Return the columns of one batch; zeros without a call.

    A target of one number has one projection: with alternating signs it stands beside
    batches that have more.
    """
    probes = budget.about.probes
    rows = len(budget.outputs) * probes
    if projections is None:
        return np.zeros((rows, samples))
    if len(projections) == rows:
        return projections
    signs = np.where(np.arange(rows) % 2, -1.0, 1.0)
    return np.repeat(projections, probes, axis=0) * signs[:, None]
