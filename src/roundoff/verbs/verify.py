"""``roundoff.verify``: run a plan, and mend it where its prediction fails."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path

from roundoff.budget import (
    Budget,
    Goal,
    OutputRow,
    Prediction,
    Problem,
    Progress,
    SqnrTarget,
    TargetText,
    all_met,
    deciding,
    is_drop,
    metric_at,
    output_rows,
    parse_drop,
    parse_target,
    reached_db,
    rescaled,
    rows_aside,
)
from roundoff.budget import budget as measure
from roundoff.errors import InfeasibleError, PlanError, wrong_type
from roundoff.plan import Plan, Ran, Rounded, output_noises, run_batches
from roundoff.report import VerificationSummary, VerifiedResult, VerifiedRound
from roundoff.verbs.blame import blamed
from roundoff.workload import Workload, as_workload

#: Prediction and measurement that differ by more than this call for another round.
AGREEMENT_DB = 1.0
#: Plans tried at most.
ROUNDS = 6
#: Plans after which the model is linearised anew; later ones only leave more room.
LINEARISATIONS = 2
#: What is done after a round.
LINEARISED = "linearised again around the rounded model"
TRACED = "its noise traced to sites"
#: Where a plan leaves NaN in places that no output reads, a mask's say, no derivative
#: exists around it.
AS_MEASURED = "corrected by this run"
#: The linearisation stays, the plan is to reach more than the target.
ROOMIER = "more room left above the target"
#: dB asked for beyond the target, where the metric drops although the target is met.
EXTRA_DB = 3.0


@dataclass(frozen=True)
class Verification:
    """What ``verify`` found: every round, the plan that stands, and if it is met.

    Attributes:
        plan: the plan that stands at the end.
        rounds: every plan tried.
        last: the round of ``plan``.
        target_db: asked for of every output that has no target of its own; None where
            nothing was.
        met: True if every output of ``plan`` meets its target, and the metric does.
        outputs: each named output of ``plan``: predicted, measured, target.
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
    outputs: tuple[OutputRow, ...] = ()
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
            outputs=self.outputs,
        )
        return VerificationSummary(tuple(self.rounds), result)


def verify(
    workload: Workload | str | Path,
    plan: Plan | str | Path,
    *,
    budget: Budget | None = None,
    target: TargetText | None = None,
    metric_drop: float | str | None = None,
    of: str | None = None,
    goal: Goal | None = None,
    native: bool = True,
    rounds: int = ROUNDS,
    progress: Progress | None = None,
) -> Verification:
    """Run ``plan`` with simulated rounding and measure the SQNR of each output.

    The metric is measured too.

    With a ``budget``, a plan whose prediction and measurement differ by more than 1 dB,
    or that misses its target, is linearised again around the rounded model and solved
    again. Where that does not explain what was measured, as where decisions changed,
    the plan's noise is traced to its sites, by leaving them unrounded in turn. A plan
    that stands although its prediction was wrong has it corrected by the measurement.
    From the third on plans leave room for as much as earlier ones fell short. Without a budget the plan is only measured.

    Args:
        workload: model, batches and metric.
        plan: the plan, or its file.
        budget: that the plan comes from.
        target: least SQNR in dB, of every output or of each by name (see ``Goal``); the
            plan's own by default. ``"0.5%"`` is a ``metric_drop``.
        metric_drop: most that the measured metric may lose: ``0.005``, ``"0.5%"`` of 1.
            Without it and ``target`` the one that the plan was made for.
        of: a part of the output by name, a site or ``"loss"``; what the budget or else the
            plan was made for by default.
        goal: costs, pins and formats of a plan that is solved again.
        native: also run with real casts where this device has the format.
        rounds: plans tried at most.
        progress: called as work goes on.

    Raises:
        PlanError: the plan's sites are not this model's, the target names no output, or
            the workload has no metric that a drop could be measured of.
        WorkloadError: there is no such part.
    """
    workload = as_workload(workload)
    plan = _loaded(plan)
    asked, drop = _asked(plan, target, metric_drop)
    _check_metric(workload, drop)
    wanted = _target_of(plan) if asked is None else asked
    judged = workload.judging(apart=() if wanted is None else wanted.patterns)
    part = _part(plan, budget) if of is None else of
    verifier = _Verifier(judged, budget, wanted, drop, part, goal, progress)
    if asked is not None:
        asked.check(verifier.output_names)
    candidate: _Candidate | None = verifier.first(plan)
    for number in range(1, rounds + 1):
        if candidate is None:
            break
        trial = verifier.trial(number, candidate)
        is_last = budget is None or number == rounds
        is_late = number > LINEARISATIONS
        if is_last or (trial.good and (trial.agrees or is_late)):
            break
        if is_late:
            candidate = verifier.roomier(trial, AGREEMENT_DB * 2 ** (number - 3))
            continue
        leaves_room = number + 1 in (rounds, LINEARISATIONS + 1)
        candidate = verifier.mended(trial, leaves_room=leaves_room)
    best = verifier.best()
    verifier.correct(best)
    if not native:
        return verifier.verification(best, None, "not asked for")
    native_db, note = verifier.natively(best.candidate.formats)
    return verifier.verification(best, native_db, note)


@dataclass(frozen=True)
class _Candidate:
    """A plan, and the SQNRs in dB that are predicted of it, by output."""

    plan: Plan
    formats: dict[str, str]
    predicted: Mapping[str, float]
    additive: Mapping[str, float]

    @classmethod
    def of(
        cls,
        plan: Plan,
        formats: dict[str, str],
        prediction: Prediction,
        shift: Mapping[str, float],
    ) -> _Candidate:
        """Return a plan with its prediction, which is ``shift`` dB too high."""
        outputs = prediction.outputs
        return cls(
            plan,
            formats,
            {o.output: o.db - shift.get(o.output, 0.0) for o in outputs},
            {o.output: o.additive_db - shift.get(o.output, 0.0) for o in outputs},
        )


@dataclass
class _PlanTrial:
    """One plan, run: ``good`` if it meets the target, ``agrees`` if as predicted."""

    number: int
    candidate: _Candidate
    outputs: tuple[OutputRow, ...]
    metric_predicted: float | None
    metric_measured: float | None
    agrees: bool
    good: bool
    action: str

    @property
    def measured_db(self) -> float:
        """SQNR of the output closest to its target, or furthest below it."""
        return reached_db(self.outputs)

    @property
    def round(self) -> VerifiedRound:
        """The trial as reports show it, by the output that decides."""
        row = deciding(self.outputs)
        return VerifiedRound(
            round=self.number,
            predicted_db=row.predicted_db,
            measured_db=self.measured_db,
            additive_db=self.candidate.additive.get(row.output),
            metric_predicted=self.metric_predicted,
            metric_measured=self.metric_measured,
            action=self.action,
            output=row.output if len(self.outputs) > 1 else "",
        )

    @property
    def merit(self) -> tuple[bool, bool, float, int]:
        """What trials are compared by: good, as predicted, exact, late."""
        exactness = 0.0 if self.good else deciding(self.outputs).margin_db
        return self.good, self.good and self.agrees, exactness, self.number


@dataclass(frozen=True)
class _Linearised:
    """A budget around a plan that ran; its predictions are ``shift`` dB too high.

    ``way`` says how it was made.
    """

    budget: Budget
    shift: Mapping[str, float]
    way: str


class _Verifier:
    """The measurements of one verification, against one reference."""

    def __init__(
        self,
        workload: Workload,
        budget: Budget | None,
        target: SqnrTarget | None,
        metric_drop: float | None,
        part: str | None,
        goal: Goal | None,
        progress: Progress | None,
    ) -> None:
        self.workload = workload
        self.budget = budget
        self.target = target
        self.metric_drop = metric_drop
        self.goal = goal
        self.progress = progress
        self.part = part
        self.curve = None if budget is None else budget.about.metric
        self.reference = self._run(None, "reference")
        outputs = self.reference.outputs
        self.exact_metric = workload.evaluate(outputs, outputs)
        self.trials: list[_PlanTrial] = []
        self.latest: _Linearised | None = None

    @property
    def output_names(self) -> list[str]:
        """The named outputs that are judged."""
        return [row.output for row in self._rows(self.reference, {})]

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
        if self.budget is not None:
            return _Candidate.of(plan, formats, self.budget.predict(formats), {})
        figures = plan.figures
        names = self.output_names
        additive: dict[str, float] = {}
        predicted = dict(figures.outputs_db)
        if len(names) == 1 and figures.predicted_db is not None:
            predicted.setdefault(names[0], figures.predicted_db)
        if len(names) == 1 and figures.additive_db is not None:
            additive[names[0]] = figures.additive_db
        return _Candidate(plan, formats, predicted, additive)

    def trial(self, number: int, candidate: _Candidate) -> _PlanTrial:
        """Run a plan, and judge it by the target and by its prediction."""
        rows, metric = self._measured(candidate, f"verify {number}")
        closest = deciding(rows)
        agrees = _agrees(closest.predicted_db, closest.sqnr_db)
        good = all_met(rows) and not self._dropped(metric)
        lowest = min(candidate.predicted.values(), default=None)
        trial = _PlanTrial(
            number=number,
            candidate=candidate,
            outputs=rows,
            metric_predicted=self._metric_at(lowest)[0],
            metric_measured=metric,
            agrees=agrees,
            good=good,
            action=_action(good, agrees),
        )
        self.trials.append(trial)
        return trial

    def _measured(
        self, candidate: _Candidate, stage: str
    ) -> tuple[tuple[OutputRow, ...], float | None]:
        """Return each output and the metric; formats that ran before do not run again."""
        for trial in self.trials:
            if trial.candidate.formats == candidate.formats:
                rows = [
                    replace(row, predicted_db=candidate.predicted.get(row.output))
                    for row in trial.outputs
                ]
                return tuple(rows), trial.metric_measured
        ran = self._run(candidate.formats, stage)
        metric = self.workload.evaluate(ran.outputs, self.reference.outputs)
        return self._rows(ran, candidate.predicted), metric

    def _rows(self, ran: Ran, predicted: Mapping[str, float]) -> tuple[OutputRow, ...]:
        noises = output_noises(
            ran.targets, self.reference.targets, self.workload.judged.apart
        )
        return output_rows(noises, self.target, predicted)

    def _aside(self) -> tuple[OutputRow, ...]:
        """Return what of the output is no target."""
        if self.part is not None:
            return ()
        return rows_aside(self.workload.judged.left_out(self.reference.outputs[0]))

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

    def mended(self, trial: _PlanTrial, *, leaves_room: bool) -> _Candidate | None:
        """Return what to try next: linearised around the rounded model, solved again.

        A plan just meets its target as predicted, so about every second one that is
        run comes out below it. With ``leaves_room`` the plan is to reach as much more
        as earlier plans fell short of their predictions.

        None where there is nothing; the trial says why.
        """
        budget = self.budget
        if budget is None or trial.measured_db == -math.inf:
            trial.action = (
                "the rounded model overflows: no linearisation exists around it"
            )
            return None
        candidate = trial.candidate
        output = deciding(trial.outputs).output
        around = self._around(trial, budget)
        way = LINEARISED
        refreshed = around.predict(candidate.formats)
        if not math.isfinite(_noise_at(refreshed, output)):
            around = budget
            way = AS_MEASURED
            refreshed = budget.predict(candidate.formats)
        # what even the new linearisation leaves unexplained is carried over to the
        # next plan's prediction
        shift = _shift(refreshed, trial.outputs)
        if not math.isfinite(shift.get(output, math.nan)):
            trial.action = "the plan's noise is not finite in any prediction"
            return None
        if self.target is None:
            trial.action = way
            return _Candidate.of(candidate.plan, candidate.formats, refreshed, {})
        if abs(shift[output]) > AGREEMENT_DB:
            learned = self._learned(trial, budget)
            left = _shift(learned.predict(candidate.formats), trial.outputs)
            if abs(left[output]) <= abs(shift[output]):
                self.budget = learned
                around = learned
                shift = left
                way = TRACED
        self.latest = _Linearised(around, shift, way)
        room = self._fell_short() if leaves_room else 0.0
        solved = self._solved_again(trial, self.latest, self.target, room)
        if solved is None and room:
            solved = self._solved_again(trial, self.latest, self.target, 0.0)
        return solved

    def roomier(self, trial: _PlanTrial, more: float) -> _Candidate | None:
        """Return a plan of the latest linearisation, ``more`` dB of room added.

        None where there is nothing; the trial says why.
        """
        if self.latest is None or self.target is None:
            return None
        latest = replace(self.latest, way=ROOMIER)
        room = self._fell_short() + more
        return self._solved_again(trial, latest, self.target, room)

    def _fell_short(self) -> float:
        """Return by how many dB a plan so far came out below its prediction, at most.

        No more than AGREEMENT_DB: what differs by more has its prediction mended.
        """
        short = 0.0
        for trial in self.trials:
            for row in trial.outputs:
                if row.predicted_db is not None and row.sqnr_db is not None:
                    short = max(short, row.predicted_db - row.sqnr_db)
        return min(short, AGREEMENT_DB)

    def _around(self, trial: _PlanTrial, known: Budget) -> Budget:
        """Return a budget like the known one, around a plan that ran."""
        return measure(
            self.workload,
            known.about.formats,
            probes=known.about.probes,
            of=self.part,
            around=trial.candidate.formats,
            seed=trial.number,
            progress=self.progress,
        )

    def _learned(self, trial: _PlanTrial, known: Budget) -> Budget:
        """Return the known budget with rows as the run of a plan shows them.

        No derivative explains that plan: what each of its sites costs there is measured
        by leaving it unrounded, and rows that say less are raised.
        """
        output = deciding(trial.outputs).output
        formats = {
            site: fmt for site, fmt in trial.candidate.formats.items() if fmt != "fp32"
        }
        noise = 10 ** (-trial.measured_db / 10)

        def noise_of(others: dict[str, str]) -> float:
            ran = self._run(others, f"trace {trial.number}")
            rows = {row.output: row.sqnr_db for row in self._rows(ran, {})}
            reached = rows[output]
            return math.inf if reached is None else 10 ** (-reached / 10)

        factors: dict[tuple[str, str], float] = {}
        for blame in blamed(formats, noise, noise_of):
            chosen = {site: formats[site] for site in blame.sites}
            predicted = _noise_at(known.predict(chosen), output)
            if 0 < predicted < blame.noise:
                factor = blame.noise / predicted
                factors |= dict.fromkeys(chosen.items(), factor)
        return rescaled(known, factors, output)

    def _solved_again(
        self,
        trial: _PlanTrial,
        latest: _Linearised,
        target: SqnrTarget,
        room: float,
    ) -> _Candidate | None:
        """Return the cheapest plan that is predicted ``room`` dB above the target."""
        way = latest.way
        shift = {name: db for name, db in latest.shift.items() if math.isfinite(db)}
        has_dropped = all_met(trial.outputs) and not trial.good
        extra = max(room, EXTRA_DB) if has_dropped else room
        problem = Problem(latest.budget, self.goal)
        asked = target.of_each(output.name for output in latest.budget.outputs)
        needed = {
            name: db + extra + shift.get(name, 0.0)
            for name, db in asked.items()
            if db is not None
        }
        try:
            chosen = problem.cheapest(SqnrTarget(None, tuple(needed.items())))
        except InfeasibleError as error:
            reached = _reached(target.moved(extra), error.short_db)
            trial.action = f"{way}: no plan reaches {reached}"
            return None
        trial.action = f"{way}, solved again"
        plan = problem.plan(chosen, asked=target)
        return _Candidate.of(plan, chosen, latest.budget.predict(chosen), shift)

    def best(self) -> _PlanTrial:
        """Return the last plan that is good and as predicted.

        Else one that is good, else the most exact one.
        """
        return max(self.trials, key=lambda trial: trial.merit)

    def correct(self, trial: _PlanTrial) -> None:
        """Correct the prediction of a plan that stands although it was wrong."""
        predicted = deciding(trial.outputs).predicted_db
        is_finite = math.isfinite(trial.measured_db)
        if self.budget is None or trial.agrees or predicted is None or not is_finite:
            return
        measured = {
            row.output: row.sqnr_db for row in trial.outputs if row.sqnr_db is not None
        }
        trial.candidate = replace(trial.candidate, predicted=measured)
        trial.outputs = tuple(
            replace(row, predicted_db=row.sqnr_db) for row in trial.outputs
        )
        trial.metric_predicted = self._metric_at(trial.measured_db)[0]
        trial.action += f" (predicted {predicted:.1f} dB, corrected by this run)"

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
        return deciding(self._rows(ran, {})).sqnr_db, note

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
            target_db=None if self.target is None else self.target.db,
            met=best.good,
            outputs=best.outputs + self._aside(),
            metric_name=name,
            metric_reference=self.exact_metric,
            metric_predicted_std=self._metric_at(
                min(best.candidate.predicted.values(), default=None)
            )[1],
            native_db=native_db,
            native_note=note,
        )


def _check_metric(workload: Workload, drop: float | None) -> None:
    if drop is not None and workload.metric is None:
        raise PlanError(
            "the drop of a metric cannot be measured: the workload has none",
            where="metric_drop",
            expected="metric(outputs, batches) in the workload",
            got=f"a drop of {drop:g} at most",
            do="define metric, or ask for dB: target=40",
        )


def _asked(
    plan: Plan, target: TargetText | None, metric_drop: float | str | None
) -> tuple[SqnrTarget | None, float | None]:
    """Return the SQNR and the drop of the metric that were asked for.

    A target that is a percentage is a drop, unless there is another. Where nothing was
    asked the drop is the one that the plan was made for.
    """
    if is_drop(target) and metric_drop is None:
        return None, parse_drop(str(target))
    drop = None if metric_drop is None else parse_drop(metric_drop)
    if target is None:
        return None, plan.figures.metric_drop if drop is None else drop
    return parse_target(target), drop


def _loaded(plan: Plan | str | Path) -> Plan:
    if isinstance(plan, Plan):
        return plan
    if isinstance(plan, str | Path):
        return Plan.load(plan)
    raise wrong_type("plan", plan, "a roundoff.Plan, or the file of one")


def _target_of(plan: Plan) -> SqnrTarget | None:
    """Return the target that a plan was made for; None without one."""
    target = SqnrTarget.of_plan(plan.figures)
    return None if target.db is None and not target.of else target


def _shift(refreshed: Prediction, rows: tuple[OutputRow, ...]) -> dict[str, float]:
    """Return by how many dB a prediction is too high, by output."""
    measured = {row.output: row.sqnr_db for row in rows}
    return {
        output.output: output.db - db
        for output in refreshed.outputs
        if (db := measured.get(output.output)) is not None
    }


def _noise_at(prediction: Prediction, output: str) -> float:
    """Return the predicted noise power of one output; NaN where nothing is."""
    noises = {row.output: row.noise for row in prediction.outputs}
    return noises.get(output, math.nan)


def _reached(target: SqnrTarget, short_db: float) -> str:
    """Say what is out of reach, and how far a plan comes."""
    if target.db is not None and not target.of:
        return f"{target.db:.1f} dB, best {target.db - short_db:.1f} dB"
    return f"{target}: {short_db:.1f} dB are missing"


def _agrees(predicted: float | None, measured: float | None) -> bool:
    """Return True if an SQNR is as predicted; both may be infinite."""
    if predicted is None or measured is None or predicted == measured:
        return True
    return abs(predicted - measured) <= AGREEMENT_DB


def _action(good: bool, agrees: bool) -> str:
    if not good:
        return "target missed"
    return "accepted" if agrees else "prediction off by more than 1 dB"


def _part(plan: Plan, budget: Budget | None) -> str | None:
    """Return what a budget measured, or else a plan was made for; None for the output."""
    name = plan.figures.of if budget is None else budget.about.target.name
    return None if name in ("", "output") else name


def _named(progress: Progress | None, name: str) -> Callable[[int, int], None] | None:
    return None if progress is None else lambda done, total: progress(name, done, total)
