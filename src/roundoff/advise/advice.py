"""Rows of advice: what was tried, what it gained, what it cost, and what is kept."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace

import torch

from roundoff.advise.changes import CHANGES, Change
from roundoff.advise.facts import Facts
from roundoff.advise.rules import RULES, Evidence, Rule
from roundoff.advise.setup import Observation, Setup
from roundoff.advise.trial import Precision, Speed, compare_precision, compare_setups
from roundoff.errors import RoundoffError

#: A change pays from this median ratio on, where three quarters of the pairs agree.
PAYS = 1.02

#: A change helps beside others from this median ratio on.
HELPS = 1.01
#: One that is slower than this alone is not tried beside others.
HARMLESS = 0.95

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
        verdict: ``pays``, ``pays on top`` (beside others, not alone), ``does not pay``,
            ``costs precision`` (faster, below the least SQNR asked for), ``by hand``
            (pays, but only the user can do it) or ``not tried``.
        reason: why it was not tried, or what else to know; "" without.
        speed: None where it was not tried.
        on_top: speed beside the changes that were kept before it; None where it was not
            tried so.
        precision: likewise.
        share: of the step's time that is concerned, where that is known.
        of: what the speed is of: ``step``, ``layer`` or ``loading``.
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
    on_top: Speed | None = None
    precision: Precision | None = None
    share: float | None = None
    of: str = "step"
    change: Change | None = None

    @property
    def pays(self) -> bool:
        """True for what makes this workload faster by itself."""
        return self.verdict == "pays"

    @property
    def step_speed(self) -> float | None:
        """Return the speed of the whole step: measured, or from that of the part by its
        share of the time (Amdahl 1967); None where neither is known."""
        if self.speed is None or self.of == "step":
            return None if self.speed is None else self.speed.median
        if self.share is None:
            return None
        return 1 / (1 - self.share + self.share / self.speed.median)


@dataclass(frozen=True, slots=True, kw_only=True)
class Combination:
    """The winners together.

    Attributes:
        changes: those that are kept, in the order they are made.
        dropped: names of winners that gain nothing beside the others.
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
    untried: Mapping[str, str],
) -> list[AdviceRow]:
    """Try every rule whose condition holds; of ``untried`` ones the reason is said."""
    rows = []
    for number, rule in enumerate(RULES, start=1):
        evidence = rule.condition(facts)
        if evidence is not None and rule.name in untried:
            evidence = replace(evidence, change=None, untried=untried[rule.name])
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


def combine(
    rows: Sequence[AdviceRow],
    trials: Trials,
    *,
    progress: Callable[[int, int], None],
) -> tuple[list[AdviceRow], Combination]:
    """Put the changes together that help beside each other, and measure them as one.

    The best of those that pay is first; every other change is tried on top of those
    kept so far, also where it did not pay alone: beside a slow step it may not show.

    Returns:
        The rows, with what each gains on top, and the combination.
    """
    candidates = sorted(filter(_may_help, rows), key=lambda row: -_median(row.speed))
    if not candidates:
        return list(rows), NOTHING
    kept: list[AdviceRow] = []
    measured: dict[str, Speed | None] = {}
    for number, row in enumerate(candidates, start=1):
        on_top = _on_top(row, kept, trials)
        measured[row.name] = on_top
        if _helps(row, on_top, kept):
            kept = [*_without_rivals(kept, row), row]
        progress(number, len(candidates))
    combination = _together(kept, trials)
    dropped = [
        row for row in rows if row.pays and row.change not in combination.changes
    ]
    names = tuple(row.name for row in dropped)
    shown = [_shown(row, measured.get(row.name), combination.changes) for row in rows]
    return shown, replace(combination, dropped=names)


def _shown(row: AdviceRow, on_top: Speed | None, kept: Sequence[Change]) -> AdviceRow:
    """Return a row with what it gains on top, and whether that alone makes it pay."""
    verdict = row.verdict
    if row.change in kept and not row.pays:
        verdict = "pays on top"
    return replace(row, on_top=on_top, verdict=verdict)


def _may_help(row: AdviceRow) -> bool:
    """Return True for a change that was tried, keeps the precision, and is not slow."""
    if row.change is None or row.speed is None or row.verdict == "costs precision":
        return False
    least = row.precision.least_db if row.precision is not None else None
    return least is not None and row.speed.median >= HARMLESS


def _on_top(row: AdviceRow, kept: Sequence[AdviceRow], trials: Trials) -> Speed | None:
    """Return the speed of a change beside those kept; None where it fails."""
    if not kept or row.change is None:
        return row.speed
    base = _changes(kept)
    try:
        return compare_setups(
            trials.setup,
            [*base, row.change],
            base=base,
            seconds=trials.seconds,
            device=trials.device,
        )
    except TRIAL_ERRORS:
        return None


def _helps(row: AdviceRow, on_top: Speed | None, kept: Sequence[AdviceRow]) -> bool:
    if on_top is None:
        return False
    if not kept:
        return row.pays
    return on_top.median >= HELPS and on_top.low > 1


def _without_rivals(kept: Sequence[AdviceRow], row: AdviceRow) -> list[AdviceRow]:
    """Leave out those kept that set the same options of the optimizer."""
    flags = set(_flags(row))
    return [other for other in kept if not flags & set(_flags(other))]


def _flags(row: AdviceRow) -> Sequence[str]:
    return [] if row.change is None else list(CHANGES[row.change.name].flags)


def _changes(rows: Sequence[AdviceRow]) -> list[Change]:
    return [row.change for row in rows if row.change is not None]


def _median(speed: Speed | None) -> float:
    return speed.median if speed is not None else 0.0


def _together(kept: Sequence[AdviceRow], trials: Trials) -> Combination:
    """Measure changes as one; the last is left out until the precision is kept."""
    for number in range(len(kept), 0, -1):
        changes = _changes(kept[:number])
        try:
            precision, speed = trials.try_changes(changes)
        except TRIAL_ERRORS:
            continue
        if trials.verdict(precision, speed) == "pays":
            return Combination(
                changes=tuple(changes), dropped=(), speed=speed, precision=precision
            )
    return NOTHING


#: No change at all.
NOTHING = Combination(changes=(), dropped=(), speed=None, precision=None)
