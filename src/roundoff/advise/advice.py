"""Rows of advice: what was tried, what it gained, what it cost, and what is kept."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import torch

from roundoff.advise.changes import Change
from roundoff.advise.facts import Facts
from roundoff.advise.rules import RULES, Evidence, Rule
from roundoff.advise.setup import Observation, Setup
from roundoff.advise.trial import Precision, Speed, compare_precision, compare_setups
from roundoff.errors import RoundoffError

#: A change pays from this median ratio on, where three quarters of the pairs agree.
PAYS = 1.02

#: What a change may raise in the user's model.
TRIAL_ERRORS = (
    RoundoffError,
    RuntimeError,
    TypeError,
    ValueError,
    AttributeError,
    KeyError,
    IndexError,
    AssertionError,
    OSError,
)


@dataclass(frozen=True, slots=True, kw_only=True)
class AdviceRow:
    """One advice on this workload.

    Attributes:
        name: of the rule.
        seen: what was seen here.
        place: module and line, where there is one.
        do: what to write to follow it.
        why: the reason.
        source: who says so.
        verdict: ``pays``, ``does not pay``, ``costs precision`` (faster, below the
            least SQNR asked for), ``by hand`` (pays, but only the user can do it) or
            ``not tried``.
        reason: why it was not tried; "" where it was.
        speed: None where it was not tried.
        precision: likewise.
        share: of the step's time that is concerned, where that is known.
        change: what was tried, to be applied; None for what only the user can do.
    """

    name: str
    seen: str
    place: str
    do: str
    why: str
    source: str
    verdict: str
    reason: str = ""
    speed: Speed | None = None
    precision: Precision | None = None
    share: float | None = None
    change: Change | None = None

    @property
    def pays(self) -> bool:
        """True for what is kept."""
        return self.verdict == "pays"


@dataclass(frozen=True, slots=True, kw_only=True)
class Combination:
    """The winners together.

    Attributes:
        changes: those that are kept, in the order they are made.
        dropped: names of winners that lose beside the others.
        speed: of all together.
        precision: of all together.
    """

    changes: tuple[Change, ...]
    dropped: tuple[str, ...]
    speed: Speed | None
    precision: Precision | None


@dataclass(frozen=True)
class Trials:
    """How changes are tried on one workload.

    Attributes:
        setup: the unchanged.
        observed: what it computes.
        device: of the model.
        seconds: for the turns of one trial.
        least_db: SQNR below which a faster change is no winner.
    """

    setup: Setup
    observed: Observation
    device: torch.device
    seconds: float
    least_db: float

    def try_changes(self, changes: Sequence[Change]) -> tuple[Precision, Speed]:
        """Return precision and speed with changes."""
        precision = compare_precision(self.observed, self.setup, changes)
        speed = compare_setups(
            self.setup, changes, seconds=self.seconds, device=self.device
        )
        return precision, speed

    def verdict(self, precision: Precision, speed: Speed) -> str:
        """Judge a change."""
        if speed.median < PAYS or speed.low <= 1:
            return "does not pay"
        least = precision.least_db
        if least is None or least < self.least_db:
            return "costs precision"
        return "pays"


def try_rules(
    facts: Facts,
    trials: Trials,
    *,
    progress: Callable[[int, int], None],
    left_out: Sequence[str] = (),
) -> list[AdviceRow]:
    """Try every rule whose condition holds, but those ``left_out``."""
    rows = []
    for number, rule in enumerate(RULES, start=1):
        evidence = None if rule.name in left_out else rule.condition(facts)
        if evidence is not None:
            rows.append(try_one(rule, evidence, trials))
        progress(number, len(RULES))
    return rows


def try_one(rule: Rule, evidence: Evidence, trials: Trials) -> AdviceRow:
    """Try what a rule advises; a change that fails is a row with the reason."""
    row = AdviceRow(
        name=rule.name,
        seen=evidence.text,
        place=evidence.place,
        do=rule.do,
        why=rule.why,
        source=rule.source,
        verdict="not tried",
        reason=evidence.untried,
        share=evidence.share,
        change=evidence.change,
    )
    if evidence.change is None:
        return row
    try:
        precision, speed = trials.try_changes([evidence.change])
    except TRIAL_ERRORS as error:
        return replace(row, reason=f"it failed: {first_line(error)}", change=None)
    verdict = trials.verdict(precision, speed)
    return replace(row, verdict=verdict, speed=speed, precision=precision)


def first_line(error: BaseException) -> str:
    """Return the first line of an error's message."""
    lines = str(error).splitlines() or [type(error).__name__]
    return lines[0][:200]


def combine(rows: Sequence[AdviceRow], trials: Trials) -> Combination:
    """Measure all winners together; where they are slower than the best of them, add
    them one by one and keep those that help."""
    winners = [row for row in rows if row.pays and row.change is not None]
    winners.sort(key=lambda row: -_median(row.speed))
    changes = [row.change for row in winners if row.change is not None]
    if not changes:
        return Combination(changes=(), dropped=(), speed=None, precision=None)
    if len(changes) == 1:
        first = winners[0]
        return Combination(
            changes=tuple(changes),
            dropped=(),
            speed=first.speed,
            precision=first.precision,
        )
    together = _try_together(changes, trials)
    best = _median(winners[0].speed)
    if together is not None and together.speed is not None:
        is_precise = _is_precise(together, trials)
        if is_precise and together.speed.median >= 0.98 * best:
            return together
    return _one_by_one(changes, trials)


def _median(speed: Speed | None) -> float:
    return speed.median if speed is not None else 0.0


def _is_precise(combination: Combination, trials: Trials) -> bool:
    precision = combination.precision
    least = precision.least_db if precision is not None else None
    return least is not None and least >= trials.least_db


def _try_together(changes: Sequence[Change], trials: Trials) -> Combination | None:
    try:
        precision, speed = trials.try_changes(changes)
    except TRIAL_ERRORS:
        return None
    return Combination(
        changes=tuple(changes), dropped=(), speed=speed, precision=precision
    )


def _one_by_one(changes: Sequence[Change], trials: Trials) -> Combination:
    """Start with the best, and keep each further change that makes it faster."""
    kept = _try_together(changes[:1], trials)
    if kept is None:
        names = tuple(change.name for change in changes)
        return Combination(changes=(), dropped=names, speed=None, precision=None)
    dropped: list[str] = []
    for change in changes[1:]:
        longer = _try_together([*kept.changes, change], trials)
        gains = longer is not None and _median(longer.speed) > _median(kept.speed)
        if longer is not None and gains and _is_precise(longer, trials):
            kept = longer
        else:
            dropped.append(change.name)
    return replace(kept, dropped=tuple(dropped))
