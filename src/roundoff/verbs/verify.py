"""``roundoff.verify``: run a plan, compare prediction and measurement, and mend the plan where they part."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, replace
from typing import Any

from roundoff.budget import Budget, Problem, Progress, metric_at, sqnr_db
from roundoff.budget import budget as measure
from roundoff.errors import InfeasibleError
from roundoff.plan import Plan, Ran, Rounded, noise, run_batches
from roundoff.workload import Workload

#: Prediction and measurement that differ by more than this call for another round.
AGREEMENT_DB = 1.0
ROUNDS = 3


@dataclass(frozen=True)
class Round:
    """One plan tried: predicted and measured SQNR in dB and metric, and what was done next."""

    round: int
    predicted_db: float | None
    measured_db: float
    additive_db: float | None
    metric_predicted: float | None
    metric_measured: float | None
    action: str


@dataclass(frozen=True)
class Verification:
    """What ``verify`` found: every round, the plan that stands at the end, and whether it meets its target.

    ``last`` is the round of ``plan``. ``native_db`` is the SQNR with real casts where this device
    has the format, None when nothing ran natively.
    """

    plan: Plan
    rounds: list[Round]
    last: Round
    target_db: float | None
    met: bool
    metric_name: str | None = None
    metric_reference: float | None = None
    metric_predicted_std: float | None = None
    native_db: float | None = None
    native_note: str = ""

    def summary(self) -> dict[str, Any]:
        """Plain data for JSON: rounds and result."""
        last = self.last
        return {
            "rounds": [asdict(r) for r in self.rounds],
            "result": {
                "target_db": self.target_db,
                "predicted_db": last.predicted_db,
                "measured_db": last.measured_db,
                "native_db": self.native_db,
                "native_note": self.native_note,
                "metric_name": self.metric_name,
                "metric_reference": self.metric_reference,
                "metric_predicted": last.metric_predicted,
                "metric_predicted_std": self.metric_predicted_std,
                "metric_measured": last.metric_measured,
                "met": self.met,
            },
        }


def verify(
    workload: Workload,
    plan: Plan,
    *,
    budget: Budget | None = None,
    target: float | None = None,
    metric_drop: float | None = None,
    problem: Callable[[Budget], Problem] | None = None,
    native: bool = True,
    rounds: int = ROUNDS,
    progress: Progress | None = None,
) -> Verification:
    """Run ``plan`` on the workload with simulated rounding and measure its SQNR and metric.

    With a ``budget``, a plan whose prediction and measurement differ by more than 1 dB, or that misses its target, is
    linearised again around the rounded model and solved again, at most ``rounds`` plans in all; without one the
    plan is only measured. ``target`` in dB defaults to the plan's own; ``metric_drop`` also asks the measured metric
    to hold. ``problem`` turns a budget into the optimisation (``Problem`` by default), for other costs and pins.

    Raises ``PlanError`` when the plan's sites are not this model's.
    """
    target = plan.about.get("target_db") if target is None else target
    part = None if budget is None else _part(budget)
    reference = run_batches(
        workload, target=part, progress=_named(progress, "reference")
    )
    formats = plan.formats(reference.handler.sites)
    check = _Check(workload, reference, budget, target, metric_drop, progress)
    expected = _expected(plan, budget, formats)
    for number in range(1, rounds + 1):
        trial = check.trial(number, plan, formats, expected)
        if budget is None or (trial.agrees and trial.good) or number == rounds:
            break
        if trial.round.measured_db == -math.inf:
            trial.note("the rounded model overflows: no linearisation exists around it")
            break
        budget = measure(
            workload,
            budget.about["formats"],
            probes=budget.about["probes"],
            target=part,
            around=formats,
            seed=number,
            progress=progress,
        )
        refreshed = budget.predict(formats)
        # what even the new linearisation leaves unexplained is carried over to the next plan's prediction
        shift = refreshed.db - trial.round.measured_db
        if not math.isfinite(shift):
            trial.note(
                "the plan's noise is not finite: no linearisation exists around it"
            )
            break
        if target is None:
            trial.note("linearised again around the rounded model")
            expected = (refreshed.db, refreshed.additive_db)
            continue
        extra = 3.0 if trial.round.measured_db >= target and not trial.good else 0.0
        try:
            task = (problem or Problem)(budget)
            chosen = task.cheapest(target + shift + extra)
        except InfeasibleError as error:
            trial.note(
                f"linearised again: no plan reaches {target + extra:.1f} dB, best {error.best_db - shift:.1f} dB"
            )
            break
        trial.note("linearised again around the rounded model, solved again")
        prediction = budget.predict(chosen)
        expected = (prediction.db - shift, prediction.additive_db - shift)
        formats = chosen
        plan = task.plan(chosen, asked=target)
    best = check.best()
    native_db, note = (
        check.natively(best.formats) if native else (None, "not asked for")
    )
    return check.verification(best, native_db, note)


@dataclass
class _Trial:
    """One plan, run."""

    round: Round
    plan: Plan
    formats: dict[str, str]
    agrees: bool
    good: bool

    def note(self, action: str) -> None:
        self.round = replace(self.round, action=action)


class _Check:
    """The measurements of one verification, against one reference."""

    def __init__(
        self,
        workload: Workload,
        reference: Ran,
        budget: Budget | None,
        target: float | None,
        metric_drop: float | None,
        progress: Progress | None,
    ) -> None:
        self.workload, self.reference, self.target, self.metric_drop = (
            workload,
            reference,
            target,
            metric_drop,
        )
        self.progress = progress
        self.part = None if budget is None else _part(budget)
        self.curve = None if budget is None else budget.about.get("metric")
        self.exact = workload.evaluate(reference.outputs, reference.outputs)
        self.trials: list[_Trial] = []

    def trial(
        self,
        number: int,
        plan: Plan,
        formats: dict[str, str],
        expected: tuple[float | None, float | None],
    ) -> _Trial:
        """Run one plan and say whether it meets the target and its prediction."""
        same = next((t for t in self.trials if t.formats == formats), None)
        if same is None:
            ran = run_batches(
                self.workload,
                formats,
                target=self.part,
                progress=_named(self.progress, f"verify {number}"),
            )
            measured = sqnr_db(noise(ran.targets, self.reference.targets))
            metric = self.workload.evaluate(ran.outputs, self.reference.outputs)
        else:
            measured, metric = same.round.measured_db, same.round.metric_measured
        predicted = expected[0]
        value = (
            metric_at(self.curve, predicted)[0]
            if self.curve and predicted is not None
            else None
        )
        agrees = (
            predicted is None
            or predicted == measured
            or abs(predicted - measured) <= AGREEMENT_DB
        )
        good = (self.target is None or measured >= self.target) and not self._dropped(
            metric
        )
        action = (
            "accepted"
            if good and agrees
            else "target missed"
            if not good
            else "prediction off by more than 1 dB"
        )
        entry = Round(number, predicted, measured, expected[1], value, metric, action)
        self.trials.append(_Trial(entry, plan, dict(formats), agrees, good))
        return self.trials[-1]

    def _dropped(self, metric: float | None) -> bool:
        if self.metric_drop is None or metric is None or self.exact is None:
            return False
        return metric < self.exact - self.metric_drop

    def best(self) -> _Trial:
        """The last plan that is good and as predicted, else one that is good, else the most exact one."""
        ranked = [
            (
                t.good,
                t.good and t.agrees,
                0.0 if t.good else t.round.measured_db,
                t.round.round,
            )
            for t in self.trials
        ]
        return self.trials[ranked.index(max(ranked))]

    def natively(self, formats: dict[str, str]) -> tuple[float | None, str]:
        """SQNR with real casts where this device has the format."""
        ran = run_batches(
            self.workload,
            formats,
            target=self.part,
            native=True,
            progress=_named(self.progress, "verify natively"),
        )
        how = ran.handler.how if isinstance(ran.handler, Rounded) else Counter[str]()
        count, rest = how["native"], how["simulated"]
        if not count:
            return (
                None,
                "no site of this plan has native arithmetic on this device; all are simulated",
            )
        return sqnr_db(
            noise(ran.targets, self.reference.targets)
        ), f"{count} calls with real casts, {rest} simulated"

    def verification(
        self, best: _Trial, native_db: float | None, note: str
    ) -> Verification:
        """The result, with ``best`` as the plan that stands."""
        predicted = best.round.predicted_db
        std = (
            metric_at(self.curve, predicted)[1]
            if self.curve and predicted is not None
            else None
        )
        name = (
            None
            if self.exact is None
            else getattr(self.workload.metric, "__name__", "metric")
        )
        return Verification(
            best.plan,
            [t.round for t in self.trials],
            best.round,
            self.target,
            best.good,
            name,
            self.exact,
            std,
            native_db,
            note,
        )


def _expected(
    plan: Plan, budget: Budget | None, formats: Mapping[str, str]
) -> tuple[float | None, float | None]:
    if budget is None:
        return plan.about.get("predicted_db"), plan.about.get("additive_db")
    prediction = budget.predict(formats)
    return prediction.db, prediction.additive_db


def _part(budget: Budget) -> str | None:
    name: str = budget.about["target"]["name"]
    return None if name == "output" else name


def _named(progress: Progress | None, name: str) -> Callable[[int, int], None] | None:
    return None if progress is None else lambda done, total: progress(name, done, total)
