"""``roundoff.verify``: run a plan, and mend it where its prediction fails."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, replace

from roundoff.budget import (
    Budget,
    Goal,
    Problem,
    Progress,
    metric_at,
    sqnr_db,
)
from roundoff.budget import budget as measure
from roundoff.errors import InfeasibleError
from roundoff.plan import Plan, Ran, Rounded, noise, run_batches
from roundoff.report import VerificationSummary, VerifiedResult, VerifiedRound
from roundoff.workload import Workload

#: Prediction and measurement that differ by more than this call for another round.
AGREEMENT_DB = 1.0
#: Plans tried at most.
ROUNDS = 3
#: dB asked for beyond the target, where the metric drops although the target is met.
EXTRA_DB = 3.0


@dataclass(frozen=True)
class Verification:
    """What ``verify`` found: every round, the plan that stands, and if it is met.

    Attributes:
        plan: the plan that stands at the end.
        rounds: every plan tried.
        last: the round of ``plan``.
        target_db: asked for; None where nothing was.
        met: True if ``plan`` meets the target, in dB and by the metric.
        metric_name: None without a metric.
        metric_reference: the metric of the unrounded model.
        metric_predicted_std: standard deviation of the predicted metric.
        native_db: SQNR with real casts where this device has the format; None when
            nothing ran natively.
        native_note: how many calls did.
    """

    plan: Plan
    rounds: list[VerifiedRound]
    last: VerifiedRound
    target_db: float | None
    met: bool
    metric_name: str | None = None
    metric_reference: float | None = None
    metric_predicted_std: float | None = None
    native_db: float | None = None
    native_note: str = ""

    def summary(self) -> VerificationSummary:
        """Return rounds and result as reports show them."""
        last = self.last
        result = VerifiedResult(
            target_db=self.target_db,
            predicted_db=last.predicted_db,
            measured_db=last.measured_db,
            native_db=self.native_db,
            native_note=self.native_note,
            metric_name=self.metric_name,
            metric_reference=self.metric_reference,
            metric_predicted=last.metric_predicted,
            metric_predicted_std=self.metric_predicted_std,
            metric_measured=last.metric_measured,
            met=self.met,
        )
        return VerificationSummary(tuple(self.rounds), result)


def verify(
    workload: Workload,
    plan: Plan,
    *,
    budget: Budget | None = None,
    target: float | None = None,
    metric_drop: float | None = None,
    goal: Goal | None = None,
    native: bool = True,
    rounds: int = ROUNDS,
    progress: Progress | None = None,
) -> Verification:
    """Run ``plan`` with simulated rounding and measure its SQNR and metric.

    With a ``budget``, a plan whose prediction and measurement differ by more than 1 dB,
    or that misses its target, is linearised again around the rounded model and solved
    again; without one the plan is only measured.

    Args:
        workload: model, batches and metric.
        plan: the plan.
        budget: that the plan comes from.
        target: in dB; the plan's own by default.
        metric_drop: most that the measured metric may lose.
        goal: costs, pins and formats of a plan that is solved again.
        native: also run with real casts where this device has the format.
        rounds: plans tried at most.
        progress: called as work goes on.

    Raises:
        PlanError: the plan's sites are not this model's.
    """
    target = plan.figures.target_db if target is None else target
    verifier = _Verifier(workload, budget, target, metric_drop, goal, progress)
    candidate: _Candidate | None = verifier.first(plan)
    for number in range(1, rounds + 1):
        if candidate is None:
            break
        trial = verifier.trial(number, candidate)
        is_last = budget is None or number == rounds
        if is_last or (trial.agrees and trial.good):
            break
        candidate = verifier.mended(trial)
    best = verifier.best()
    if not native:
        return verifier.verification(best, None, "not asked for")
    native_db, note = verifier.natively(best.candidate.formats)
    return verifier.verification(best, native_db, note)


@dataclass(frozen=True)
class _Candidate:
    """A plan, and the SQNRs in dB that are predicted of it."""

    plan: Plan
    formats: dict[str, str]
    predicted_db: float | None
    additive_db: float | None


@dataclass
class _PlanTrial:
    """One plan, run: ``good`` if it meets the target, ``agrees`` if as predicted."""

    number: int
    candidate: _Candidate
    measured_db: float
    metric_predicted: float | None
    metric_measured: float | None
    agrees: bool
    good: bool
    action: str

    @property
    def round(self) -> VerifiedRound:
        """The trial as reports show it."""
        return VerifiedRound(
            round=self.number,
            predicted_db=self.candidate.predicted_db,
            measured_db=self.measured_db,
            additive_db=self.candidate.additive_db,
            metric_predicted=self.metric_predicted,
            metric_measured=self.metric_measured,
            action=self.action,
        )

    @property
    def merit(self) -> tuple[bool, bool, float, int]:
        """What trials are compared by: good, as predicted, exact, late."""
        exactness = 0.0 if self.good else self.measured_db
        return self.good, self.good and self.agrees, exactness, self.number


class _Verifier:
    """The measurements of one verification, against one reference."""

    def __init__(
        self,
        workload: Workload,
        budget: Budget | None,
        target: float | None,
        metric_drop: float | None,
        goal: Goal | None,
        progress: Progress | None,
    ) -> None:
        self.workload = workload
        self.budget = budget
        self.target = target
        self.metric_drop = metric_drop
        self.goal = goal
        self.progress = progress
        self.part = None if budget is None else _part(budget)
        self.curve = None if budget is None else budget.about.metric
        self.reference = self._run(None, "reference")
        outputs = self.reference.outputs
        self.exact_metric = workload.evaluate(outputs, outputs)
        self.trials: list[_PlanTrial] = []

    def _run(
        self, formats: dict[str, str] | None, stage: str, *, native: bool = False
    ) -> Ran:
        """Run the model in these formats; None is the plain model."""
        return run_batches(
            self.workload,
            formats,
            target=self.part,
            native=native,
            progress=_named(self.progress, stage),
        )

    def first(self, plan: Plan) -> _Candidate:
        """Return the plan with what its budget predicts, or what it says itself."""
        formats = plan.formats(self.reference.handler.sites)
        if self.budget is None:
            figures = plan.figures
            return _Candidate(plan, formats, figures.predicted_db, figures.additive_db)
        prediction = self.budget.predict(formats)
        return _Candidate(plan, formats, prediction.db, prediction.additive_db)

    def trial(self, number: int, candidate: _Candidate) -> _PlanTrial:
        """Run a plan, and judge it by the target and by its prediction."""
        measured, metric = self._measured(candidate.formats, f"verify {number}")
        predicted = candidate.predicted_db
        agrees = _agrees(predicted, measured)
        is_accurate = self.target is None or measured >= self.target
        good = is_accurate and not self._dropped(metric)
        trial = _PlanTrial(
            number=number,
            candidate=candidate,
            measured_db=measured,
            metric_predicted=self._metric_at(predicted)[0],
            metric_measured=metric,
            agrees=agrees,
            good=good,
            action=_action(good, agrees),
        )
        self.trials.append(trial)
        return trial

    def _measured(
        self, formats: dict[str, str], stage: str
    ) -> tuple[float, float | None]:
        """Return SQNR in dB and metric; formats that ran before do not run again."""
        for trial in self.trials:
            if trial.candidate.formats == formats:
                return trial.measured_db, trial.metric_measured
        ran = self._run(formats, stage)
        metric = self.workload.evaluate(ran.outputs, self.reference.outputs)
        return self._sqnr_db(ran), metric

    def _sqnr_db(self, ran: Ran) -> float:
        return sqnr_db(noise(ran.targets, self.reference.targets))

    def _metric_at(self, db: float | None) -> tuple[float | None, float | None]:
        """Return the predicted metric and its standard deviation at an SQNR."""
        if not self.curve or db is None:
            return None, None
        return metric_at(self.curve, db)

    def _dropped(self, metric: float | None) -> bool:
        """Return True if the metric fell by more than was allowed."""
        if self.metric_drop is None or metric is None or self.exact_metric is None:
            return False
        return metric < self.exact_metric - self.metric_drop

    def mended(self, trial: _PlanTrial) -> _Candidate | None:
        """Return what to try next: linearised around the rounded model, solved again.

        None where there is nothing; the trial says why.
        """
        if self.budget is None or trial.measured_db == -math.inf:
            trial.action = (
                "the rounded model overflows: no linearisation exists around it"
            )
            return None
        candidate = trial.candidate
        budget = measure(
            self.workload,
            self.budget.about.formats,
            probes=self.budget.about.probes,
            of=self.part,
            around=candidate.formats,
            seed=trial.number,
            progress=self.progress,
        )
        refreshed = budget.predict(candidate.formats)
        # what even the new linearisation leaves unexplained is carried over to the
        # next plan's prediction
        shift = refreshed.db - trial.measured_db
        if not math.isfinite(shift):
            trial.action = (
                "the plan's noise is not finite: no linearisation exists around it"
            )
            return None
        if self.target is None:
            trial.action = "linearised again around the rounded model"
            return replace(
                candidate,
                predicted_db=refreshed.db,
                additive_db=refreshed.additive_db,
            )
        return self._solved_again(trial, budget, self.target, shift)

    def _solved_again(
        self, trial: _PlanTrial, budget: Budget, target: float, shift: float
    ) -> _Candidate | None:
        """Return the cheapest plan for the target; predictions are ``shift`` too high."""
        is_accurate = trial.measured_db >= target
        asked = target + (EXTRA_DB if is_accurate and not trial.good else 0.0)
        problem = Problem(budget, self.goal)
        try:
            chosen = problem.cheapest(asked + shift)
        except InfeasibleError as error:
            best = error.best_db - shift
            trial.action = (
                f"linearised again: no plan reaches {asked:.1f} dB, best {best:.1f} dB"
            )
            return None
        trial.action = "linearised again around the rounded model, solved again"
        prediction = budget.predict(chosen)
        return _Candidate(
            problem.plan(chosen, asked=target),
            chosen,
            prediction.db - shift,
            prediction.additive_db - shift,
        )

    def best(self) -> _PlanTrial:
        """Return the last plan that is good and as predicted.

        Else one that is good, else the most exact one.
        """
        return max(self.trials, key=lambda trial: trial.merit)

    def natively(self, formats: dict[str, str]) -> tuple[float | None, str]:
        """Return the SQNR with real casts, and how many calls had them."""
        ran = self._run(formats, "verify natively", native=True)
        ways = ran.handler.how if isinstance(ran.handler, Rounded) else {}
        native = ways.get("native", 0)
        if not native:
            note = "no site of this plan has native arithmetic on this device; all are simulated"
            return None, note
        simulated = ways.get("simulated", 0)
        note = f"{native} calls with real casts, {simulated} simulated"
        return self._sqnr_db(ran), note

    def verification(
        self, best: _PlanTrial, native_db: float | None, note: str
    ) -> Verification:
        """Return the result, with ``best`` as the plan that stands."""
        name = None
        if self.exact_metric is not None:
            name = getattr(self.workload.metric, "__name__", "metric")
        return Verification(
            plan=best.candidate.plan,
            rounds=[trial.round for trial in self.trials],
            last=best.round,
            target_db=self.target,
            met=best.good,
            metric_name=name,
            metric_reference=self.exact_metric,
            metric_predicted_std=self._metric_at(best.candidate.predicted_db)[1],
            native_db=native_db,
            native_note=note,
        )


def _agrees(predicted: float | None, measured: float) -> bool:
    """Return True if an SQNR is as predicted; both may be infinite."""
    if predicted is None or predicted == measured:
        return True
    return abs(predicted - measured) <= AGREEMENT_DB


def _action(good: bool, agrees: bool) -> str:
    if not good:
        return "target missed"
    return "accepted" if agrees else "prediction off by more than 1 dB"


def _part(budget: Budget) -> str | None:
    name = budget.about.target.name
    return None if name == "output" else name


def _named(progress: Progress | None, name: str) -> Callable[[int, int], None] | None:
    return None if progress is None else lambda done, total: progress(name, done, total)
