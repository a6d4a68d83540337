"""Where first order does not hold, rows of a budget are measured by trial."""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import replace

import numpy as np
import polars as pl

from roundoff.budget.facts import MeasuredSite
from roundoff.budget.noise_power import TRIAL, Term, casts, power
from roundoff.budget.prepared import kept
from roundoff.budget.suspects import (
    CURVED,
    DECIDES,
    NO_EVIDENCE,
    Suspect,
    every_row,
    suspects,
)
from roundoff.budget.table import Budget, MeasuredTerm, term_frame
from roundoff.budget.trial_rows import Array, OutputView, TrialRows
from roundoff.budget.trial_signs import DrawnSigns
from roundoff.budget.trials import (
    Pair,
    Programs,
    measure_by_trial,
    record,
    same_shapes,
)
from roundoff.formats import parse_format
from roundoff.workload import Workload

#: Rows with strong evidence that are tried whatever it costs: so many a format, or this
#: share of the rows.
MOST_CERTAIN = 12
SHARE = 0.1
#: So many a format where errors go where no derivative follows: one that changes a
#: decision outweighs the rounding of all other sites.
MOST_DECIDING = 96


def refine(
    workload: Workload,
    budget: Budget,
    programs: Programs,
    signs: Sequence[DrawnSigns],
    weights: Mapping[str, float],
    trials: int | None,
    report: Callable[[str, int, int], None],
) -> Budget:
    """Return a budget whose doubtful rows are measured by trial.

    Args:
        workload: that the budget is of; its model is ``prepared``.
        budget: by the adjoint.
        programs: of the first batch, which was followed.
        signs: sign vectors of each batch.
        weights: of the target tensors, see ``OutputRows``.
        trials: most rows to measure, strongest evidence first. None: those with strong
            evidence, a tenth of the rows or four a format at most, 24 a format where
            the model decides; more, down to some strength of evidence, while they are
            no more than the probes; and every row where all are no more.
        report: called with the stage and how much of it is done.
    """
    last = max(drawn.index for drawn in signs) + 1
    first = programs.recording
    is_alike = _is_enough(budget, programs, last)
    if not is_alike:
        programs = _followed(workload, programs, last)
    views = [
        OutputView({name: weights[name] for name in output.tensors}, output.signal)
        for output in budget.outputs
    ]

    def noise_of(formats: dict[str, str]) -> float:
        return _noise(programs, views, formats)

    def measure(chosen: Sequence[Suspect]) -> dict[Pair, TrialRows]:
        if not chosen:
            return {}
        pairs = [_pair(suspect) for suspect in chosen]
        followed = programs
        if is_alike and programs.like_first(last) is None:
            followed = _followed(workload, programs, last)
        with kept(workload.model, first.is_pure):
            return measure_by_trial(
                workload,
                followed.recording,
                pairs,
                views,
                signs,
                lambda done, total: report("trials", done, total),
                in_one={pair for pair in pairs if _is_divisible(budget, pair)},
                programs=followed,
            )

    doubtful = suspects(budget, programs.recording, noise_of)
    if trials is not None:
        return with_trials(budget, measure(doubtful[:trials]))
    rows = every_row(budget, doubtful)
    formats = len(budget.about.formats)
    decides = any(suspect.strength <= DECIDES for suspect in doubtful)
    of_format = MOST_DECIDING if decides else MOST_CERTAIN
    most = max(of_format * formats, math.ceil(SHARE * len(rows)))
    certain = [suspect for suspect in doubtful if suspect.strength <= CURVED][:most]
    limit = _affordable(rows, budget.about.probes)
    further = [suspect for suspect in rows if suspect.strength < limit]
    return with_trials(budget, measure([*certain, *_without(further, certain)]))


def _is_enough(budget: Budget, programs: Programs, last: int) -> bool:
    """Return True if the first batch shows enough of where errors go.

    So it is not where a decision is taken, which other batches may take otherwise, and
    where another batch calls sites that the first does not. A site without a gradient
    may reach the target in one batch alone, unless all call the same.
    """
    first = programs.recording
    places = first.batches[0].places
    is_seen = all(site.site in places for site in budget.sites)
    has_paths = all(site.no_path is None for site in budget.sites)
    if is_seen and has_paths and not first.decides:
        return True
    # batches that call the same have their values go the same ways
    return programs.like_first(last) is not None


def _followed(workload: Workload, programs: Programs, last: int) -> Programs:
    """Return the programs of the first ``last`` batches, each followed."""
    first = programs.recording
    with kept(workload.model, first.is_pure):
        recording = record(workload, first.target, last)
    return Programs(workload, recording, programs.seen)


def _noise(
    programs: Programs, views: Sequence[OutputView], formats: dict[str, str]
) -> float:
    """Return the noise of formats on the first batch, at the worst output."""
    exact = programs.recording.batches[0].targets
    rounded = programs.rounded(0, formats)
    if rounded is None or not same_shapes(exact, rounded):
        return math.inf
    return max(view.noise([rounded], [exact]) for view in views)


def _is_divisible(budget: Budget, pair: Pair) -> bool:
    """Return True if the adjoint says what share of a row each part of it has."""
    site, fmt = pair
    return 0 < power(budget.rows(site, fmt.name))[0] < math.inf


def _affordable(rows: Sequence[Suspect], allowed: int) -> int:
    """Return how strong the evidence must be: the last strength not to be tried.

    ``allowed`` is the number of trials. Rows without evidence are tried where that is
    enough for all.
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
        rows = [] if is_alone else budget.rows(site, fmt)
        shares = [r for r in rows if result.in_one or r.part == key.part]
        for term in divided_parts(whole, shares):
            yield MeasuredTerm(site, fmt, term)


def divided_parts(whole: Term, rows: Sequence[Term]) -> list[Term]:
    """Return parts that were measured as one, divided as the adjoint divides them.

    With ``w`` the share of the power that the adjoint ``a`` gives a part, and ``c`` the
    ratio of the amplitudes of ``whole`` and of the sum of all ``a``, a part becomes
    ``c a + w (whole - c sum a)``. The sum is ``whole``. Where the adjoint is right a
    part is ``a``; and where the two have nothing to do with each other, parts that are
    independent have their shares of the power and stay so.

    Undivided where the adjoint says nothing.
    """
    powers = [power([row])[0] for row in rows]
    total = sum(powers)
    if not rows or not 0 < total < math.inf or not np.isfinite(whole.values).all():
        return [whole]
    parts = _of_shape(whole.values, rows, powers)
    summed = np.sum(parts, axis=0)
    squares = float(np.square(summed).sum())
    if not squares:
        return [whole]
    ratio = math.sqrt(float(np.square(whole.values).sum()) / squares)
    missing = whole.values - ratio * summed
    return [
        replace(
            row,
            values=ratio * part + (noise / total) * missing,
            pooled=False,
            overflow=whole.overflow,
            measured=TRIAL,
        )
        for row, part, noise in zip(rows, parts, powers, strict=True)
    ]


def _of_shape(
    whole: Array, rows: Sequence[Term], powers: Sequence[float]
) -> list[Array]:
    """Return the values of rows in the shape of those of a trial.

    Those that are summed over samples say nothing of single ones: in their place stand
    values with their power and without any correlation.
    """
    if all(not row.pooled and row.values.shape == whole.shape for row in rows):
        return [row.values for row in rows]
    generator = np.random.default_rng(0)
    signs = [generator.choice((-1.0, 1.0), whole.shape) for _ in rows]
    return [
        math.sqrt(noise) * sign * whole
        for noise, sign in zip(powers, signs, strict=True)
    ]


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
