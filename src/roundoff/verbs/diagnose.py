"""``roundoff.diagnose``: budget, plan, proof, and everything that a report shows."""

from __future__ import annotations

import inspect
import math
import time
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, overload

from roundoff.budget import (
    Budget,
    Goal,
    OutputRow,
    Problem,
    Progress,
    SiteCost,
    SqnrTarget,
    TargetText,
    budget,
    choose,
    parse_drop,
    parse_target,
)
from roundoff.errors import (
    ArgumentError,
    InfeasibleError,
    RunError,
    did_you_mean,
    nearest,
)
from roundoff.notebook import decibels, share
from roundoff.notebook import table as html_table
from roundoff.plan import Plan, PlanFigures, run_batches, worst_noise
from roundoff.report import (
    AskedTarget,
    Coverage,
    DiagnosisSummary,
    LeftOutCalls,
    OutputTotal,
    PlanCost,
    PlanSummary,
    RankingRow,
    ScatterPoint,
    TradeoffPoint,
    answer_diagnosis,
)
from roundoff.verbs.verify import Verification, verify
from roundoff.workload import Workload, as_workload

if TYPE_CHECKING:
    from roundoff.verbs.diagnose_candidate import CandidateDiagnosis

#: What is aimed for when nothing is asked: errors a hundredth of the output.
DEFAULT_TARGET = "40dB"
#: Points of the curve of cost against SQNR, and how far it goes beyond the target and
#: the cheapest plan, in dB.
PARETO_POINTS = 10
#: Programs that are solved for a point of it, at most.
PARETO_ROUNDS = 3
BEYOND_TARGET_DB = 15.0
PARETO_RANGE_DB = 30.0
#: What is called with each point of it.
OnPoint = Callable[[TradeoffPoint], None]
#: Sites that are rounded alone, each in a forward pass of the first batch.
CHECKED_SITES = 16


@dataclass(frozen=True, slots=True, kw_only=True)
class Sampling:
    """How a diagnosis is measured, and what it tries beyond the plan.

    Attributes:
        of: a part of the output, by name; None for all of it (see ``roundoff.budget``).
        probes: sign vectors a sample; None to reach the precision.
        precision: standard error of a site's SQNR in dB at which measuring may end.
        memory: bytes that probe gradients may take.
        seed: of the sign vectors.
        pareto: also solve for other targets, to show what accuracy costs.
        checks: sites to round alone, to check their predictions; 0 for none.
    """

    of: str | None = None
    probes: int | None = None
    precision: float | str | None = None
    memory: int | None = None
    seed: int = 0
    pareto: bool = True
    checks: int = CHECKED_SITES


@dataclass(frozen=True)
class Diagnosis:
    """The budget, the plan that stands, its proof, and the summary of a report."""

    budget: Budget
    plan: Plan
    verification: Verification
    summary: DiagnosisSummary

    def __repr__(self) -> str:
        met = "met" if self.verification.met else "missed"
        result = self.summary.result
        return (
            f"<Diagnosis of {self.summary.workload}: target {met}, "
            f"{decibels(result.measured_db)} measured>"
        )

    def _repr_html_(self) -> str:
        formats = self.summary.plan.formats
        ranking = [
            (
                row.site,
                row.format,
                decibels(row.sqnr_db),
                share(row.share),
                row.chosen,
            )
            for row in self.summary.ranking
        ]
        return html_table(
            f"{self.summary.workload}: {len(formats)} sites",
            answer_diagnosis(self.summary),
            ("site", "format", "SQNR", "share of the noise", "in the plan"),
            ranking,
        )


#: Arguments that a candidate alone has.
_RECORDING = ("output", "steps", "noise", "backend")


@overload
def diagnose(
    workload: Workload | str | Path,
    formats: Iterable[str] = ...,
    *,
    candidate: None = None,
    progress: Progress | None = None,
    **options: Any,
) -> Diagnosis: ...
@overload
def diagnose(
    workload: Workload | str | Path,
    formats: Iterable[str] = ...,
    *,
    candidate: str | Path,
    output: str | Path | None = None,
    steps: int = 1,
    noise: int = 0,
    backend: str | None = None,
    progress: Progress | None = None,
    **options: Any,
) -> CandidateDiagnosis: ...
def diagnose(
    workload: Workload | str | Path,
    formats: Iterable[str] = ("bf16", "fp16", "fp8_e4m3fn", "int8"),
    *,
    target: TargetText | None = None,
    metric_drop: float | str | None = None,
    cost: str = "bytes",
    cost_table: Any = None,
    pin: Mapping[str, str] | None = None,
    allow: Mapping[str, Sequence[str]] | None = None,
    of: str | None = None,
    probes: int | None = None,
    precision: float | str | None = None,
    memory: int | None = None,
    seed: int = 0,
    pareto: bool = True,
    checks: int = CHECKED_SITES,
    progress: Progress | None = None,
    candidate: str | Path | None = None,
    **recording: Any,
) -> Any:
    """Find the sites whose rounding costs most, and the cheapest plan for a target.

    The plan is run and proven. The model is left as it was. With a ``candidate`` the
    workload is also compared with it: both are recorded for ``steps`` batches into the
    folder ``output`` (one that is deleted again where it is None), ``noise`` more times
    with random last bits; the result is a ``CandidateDiagnosis``. For a candidate that
    is a format the rest follows with it, and ``formats`` is not used.

    Args:
        workload: model, batches and metric; or the Python file that defines them.
        formats: names of the number formats.
        target: least SQNR in dB, of every output or of each by name (see ``Goal``); 40
            where neither it nor ``metric_drop`` is given.
        metric_drop: most the metric may lose.
        cost: what to save, as in ``roundoff.plan``.
        cost_table: seconds per operation, for the cost ``seconds``.
        pin: format of sites, by pattern.
        allow: formats that sites may take, by pattern.
        of: what is measured (see ``roundoff.budget``).
        probes: sign vectors a sample.
        precision: where measuring may end, and
        memory: how much it may take, as in ``roundoff.budget``.
        seed: of the sign vectors.
        pareto: also solve for ten other targets, to show what accuracy costs.
        checks: how many sites to round alone, to check their predictions.
        progress: called as work goes on.
        candidate: ``bf16`` or ``fp16``, ``compile`` with its ``backend``, a device,
            ``channels_last``, ``threads=N``, ``mkldnn=off``, ``float64``, or another
            workload file.
        recording: ``output``, ``steps``, ``noise`` and ``backend`` of a candidate.

    Raises:
        RoundoffError: what ``budget``, ``plan`` and ``verify`` raise.
    """
    workload = as_workload(workload)
    goal = Goal(
        target=target,
        metric_drop=metric_drop,
        cost=cost,
        cost_table=cost_table,
        pin=pin or {},
        allow=allow or {},
    )
    sampling = Sampling(
        of=of,
        probes=probes,
        precision=precision,
        memory=memory,
        seed=seed,
        pareto=pareto,
        checks=checks,
    )
    if candidate is not None:
        from roundoff.verbs.diagnose_candidate import diagnose_candidate

        return diagnose_candidate(
            workload, candidate, goal, sampling, progress=progress, **recording
        )
    unknown = [name for name in recording if name not in _RECORDING]
    if unknown:
        names = [*inspect.signature(diagnose).parameters, *_RECORDING]
        raise ArgumentError(
            "no such argument",
            where=unknown[0],
            do=did_you_mean(nearest(unknown[0], names)),
        )
    if recording:
        raise RunError(
            "only used with a candidate",
            where=", ".join(recording),
            do="give candidate=, such as 'bf16'",
        )
    return diagnose_workload(workload, formats, goal, sampling, progress)


def diagnose_workload(
    workload: Workload,
    formats: Iterable[str],
    goal: Goal,
    sampling: Sampling | None = None,
    progress: Progress | None = None,
    on_point: OnPoint | None = None,
) -> Diagnosis:
    """Measure, plan and prove; ``roundoff.diagnose`` is the way to call it.

    ``on_point`` is called with each point of the curve of cost against SQNR when it is
    known.
    """
    if goal.target is None and goal.metric_drop is None:
        goal = replace(goal, target=DEFAULT_TARGET)
    sampling = sampling or Sampling()
    workload = workload.judging(apart=goal.apart)
    seconds: dict[str, float] = {}
    with _timed(seconds, "budget"):
        measured = budget(
            workload,
            formats,
            probes=sampling.probes,
            precision=sampling.precision,
            memory=sampling.memory,
            of=sampling.of,
            seed=sampling.seed,
            progress=progress,
        )
    with _timed(seconds, "plan"):
        if progress is not None:
            progress("cheapest plan", 0, 1)
        plan = choose(measured, goal)
        if progress is not None:
            progress("cheapest plan", 1, 1)
        curve: list[TradeoffPoint] = []
        if sampling.pareto:
            curve = tradeoff(Problem(measured, goal), plan, progress, on_point)
    with _timed(seconds, "verify"):
        drop = goal.metric_drop
        proof = verify(
            workload,
            plan,
            budget=measured,
            metric_drop=None if drop is None else parse_drop(drop),
            goal=goal,
            progress=progress,
        )
        points = scatter(workload, measured, proof.plan, sampling, progress)
    about = measured.about
    verification = proof.summary()
    summary = DiagnosisSummary(
        version=about.version,
        workload=about.workload,
        formats=about.formats,
        probes=about.probes,
        samples=about.samples,
        environment=about.environment,
        target=AskedTarget(
            asked=_asked(goal),
            sqnr_db=proof.target_db,
            note=proof.plan.figures.note,
        ),
        coverage=coverage(measured),
        ranking=ranked(measured, _formats(measured, proof.plan)),
        plan=plan_summary(measured, proof.plan),
        rounds=verification.rounds,
        result=verification.result,
        pareto=tuple(curve),
        scatter=tuple(points),
        seconds=seconds,
        totals=output_totals(measured),
    )
    return Diagnosis(measured, proof.plan, proof, summary)


@contextmanager
def _timed(seconds: dict[str, float], stage: str) -> Iterator[None]:
    """Keep how long the block takes."""
    start = time.perf_counter()
    yield
    seconds[stage] = time.perf_counter() - start


def _asked(goal: Goal) -> str:
    """Return the aim as it was written."""
    if goal.target is None:
        return str(goal.metric_drop)
    is_text = isinstance(goal.target, str | float | int)
    return str(goal.target if is_text else parse_target(goal.target))


def _formats(measured: Budget, plan: Plan) -> dict[str, str]:
    """Return the format of each site that leaves fp32."""
    return plan.formats(site.site for site in measured.sites)


def tradeoff(
    problem: Problem,
    plan: Plan,
    progress: Progress | None = None,
    on_point: OnPoint | None = None,
) -> list[TradeoffPoint]:
    """Return the cheapest plans at evenly spaced targets, each reported when it is there.

    From everything in its cheapest format to almost exact. A plan that meets the next
    target too is the cheapest for it as well, so nothing is solved for that.
    """
    lowest_formats, _ = problem.lowest()
    lowest_db = problem.budget.predict(lowest_formats).db
    figures = plan.figures
    asked = float(figures.target_db or figures.predicted_db or lowest_db)
    low = max(lowest_db, 0.0) if math.isfinite(lowest_db) else 0.0
    high = max(asked + BEYOND_TARGET_DB, low + PARETO_RANGE_DB)
    full = problem.cost_of({})
    points: list[TradeoffPoint] = []
    predicted = -math.inf
    for index in range(PARETO_POINTS):
        target_db = low + (high - low) * index / (PARETO_POINTS - 1)
        if predicted < target_db:
            try:
                chosen = problem.cheapest(target_db, PARETO_ROUNDS)
            except InfeasibleError:
                break
            predicted = problem.budget.predict(chosen).db
        if progress is not None:
            progress("cost of each target", index + 1, PARETO_POINTS)
        if target_db <= predicted < math.inf:
            cost = problem.cost_of(chosen)
            point = TradeoffPoint(
                target_db=target_db,
                predicted_db=predicted,
                cost=cost,
                relative_cost=cost / full,
            )
            points.append(point)
            if on_point is not None:
                on_point(point)
    return points


def scatter(
    workload: Workload,
    measured: Budget,
    plan: Plan,
    sampling: Sampling,
    progress: Progress | None = None,
) -> list[ScatterPoint]:
    """Round each of ``sampling.checks`` sites alone on the first batch, predicted and
    measured.

    The sites are spread over the ranking. The format is the plan's for that site, or
    the first one measured where the plan leaves the site alone.
    """
    if not sampling.checks:
        return []
    part = sampling.of
    costs = _as_planned(measured, plan)
    step = max(1, math.ceil(len(costs) / sampling.checks))
    picked = costs[::step]
    first = slice(0, 1)
    reference = run_batches(workload, target=part, batches=first).targets
    points = []
    for index, cost in enumerate(picked):
        if progress is not None:
            progress("one site at a time", index + 1, len(picked))
        alone = {cost.site: cost.format}
        predicted = measured.predict(alone, batch=0).db
        rounded = run_batches(workload, alone, target=part, batches=first).targets
        error = worst_noise(rounded, reference)
        if 0 < error < math.inf and math.isfinite(predicted):
            point = ScatterPoint(
                site=cost.site,
                format=cost.format,
                predicted_db=predicted,
                measured_db=-10 * math.log10(error),
            )
            points.append(point)
    return points


def _as_planned(measured: Budget, plan: Plan) -> list[SiteCost]:
    """Return the cost of each site in the plan's format, where that is finite."""
    formats = _formats(measured, plan)
    costs = [cost for cost in measured.costs if cost.sqnr_db is not None]
    default = measured.about.formats[0] if costs else ""
    return [cost for cost in costs if cost.format == formats.get(cost.site, default)]


def plan_summary(measured: Budget, plan: Plan) -> PlanSummary:
    """Return the plan in numbers.

    Sites in each format, cost against all-fp32 and all-lowest, predicted SQNR in dB.
    """
    formats = _formats(measured, plan)
    counts = Counter(formats.get(site.site, "fp32") for site in measured.sites)
    figures = plan.figures
    cost = PlanCost(
        model=figures.cost_model,
        unit=figures.unit,
        plan=figures.cost,
        fp32=figures.cost_fp32,
        lowest=figures.cost_lowest,
        lowest_format=figures.lowest_format,
    )
    return PlanSummary(
        sites=dict(counts.most_common()),
        rules=len(plan.rules),
        formats={s.site: formats.get(s.site, "fp32") for s in measured.sites},
        target_db=figures.target_db,
        predicted_db=figures.predicted_db,
        outputs=_predicted(figures),
        shared=figures.shared,
        note=figures.note,
        cost=cost,
    )


def output_totals(measured: Budget) -> tuple[OutputTotal, ...]:
    """Return what each format costs each of several outputs; nothing for one."""
    if len(measured.outputs) == 1:
        return ()
    predictions = {
        fmt: measured.predict({site.site: fmt for site in measured.sites})
        for fmt in measured.about.formats
    }
    return tuple(
        OutputTotal(
            output.name,
            {
                fmt: prediction.outputs[number].additive_db
                for fmt, prediction in predictions.items()
            },
        )
        for number, output in enumerate(measured.outputs)
    )


def _predicted(figures: PlanFigures) -> tuple[OutputRow, ...]:
    """Return what a plan says of each of several outputs."""
    target = SqnrTarget.of_plan(figures)
    return tuple(
        OutputRow(output=name, predicted_db=db, target_db=target.of_output(name))
        for name, db in figures.outputs_db.items()
    )


def ranked(measured: Budget, formats: Mapping[str, str]) -> tuple[RankingRow, ...]:
    """Return the ranked table, worst first, with the format chosen for each site."""
    return tuple(
        RankingRow(
            rank=rank,
            site=cost.site,
            operator=cost.operator,
            kind=cost.kind,
            format=cost.format,
            sqnr_db=cost.sqnr_db,
            stderr_db=cost.stderr_db,
            share=cost.share,
            activation_db=cost.activation_db,
            weight_db=cost.weight_db,
            output_db=cost.output_db,
            measured=cost.measured,
            chosen=formats.get(cost.site, "fp32"),
            note=cost.note,
            output=cost.output,
        )
        for rank, cost in enumerate(measured.costs, 1)
    )


def coverage(measured: Budget) -> Coverage:
    """Return how many operators became sites, and each kind that did not, with why."""
    sites = measured.sites
    not_sites = [
        LeftOutCalls(
            operator=row.operator,
            reason=row.reason,
            count=row.count,
            examples=row.examples,
            where="not a site",
        )
        for row in measured.about.excluded
    ]
    excluded = [*not_sites, *_sites_in_no_format(measured)]
    return Coverage(
        calls=measured.about.calls,
        sites=len(sites),
        params=len({name for site in sites for name in site.params}),
        excluded=tuple(sorted(excluded, key=lambda row: -row.count)),
        no_path=tuple(f"{s.site}: {s.no_path}" for s in sites if s.no_path),
        mixed=len(measured.mixing_sites),
        measured_batches=len(measured.about.batch_samples),
        batches=measured.about.workload_batches,
    )


def _sites_in_no_format(measured: Budget) -> list[LeftOutCalls]:
    """Return the sites that run in none of the measured formats."""
    formats = set(measured.about.formats)
    refused: dict[tuple[str, str], list[str]] = defaultdict(list)
    for site in measured.sites:
        if not site.no_path and set(site.refused) == formats:
            reasons = "; ".join(sorted(set(site.refused.values())))
            refused[site.operator, reasons].append(site.site)
    return [
        LeftOutCalls(
            operator=operator,
            reason=reason,
            count=len(sites),
            examples=tuple(sites[:3]),
            where="a site in no format",
        )
        for (operator, reason), sites in refused.items()
    ]
