"""From a target to a quantized model: which sites fall back to more bits is planned.

The budget prices every site in every format from one reference pass. The plan it leads to
is quantized and measured; what calibration and repair gained over the budget's plain
rounding is then known, and the next plan is solved with it. Each measurement is one
evaluation of the metric; there are at most four. Sites are not tried one by one.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor, nn

from roundoff.budget import (
    Budget,
    Goal,
    OutputRow,
    Problem,
    Progress,
    SqnrTarget,
    TargetText,
    all_met,
    budget,
    deciding,
    drop_to_db,
    is_drop,
    output_rows,
    parse_drop,
    parse_target,
    reached_db,
)
from roundoff.errors import InfeasibleError, QuantizationError
from roundoff.formats import parse_format
from roundoff.plan import Plan, detached, output_noises
from roundoff.preserve import preserve, same_draws
from roundoff.quantize.calibration import with_batches
from roundoff.quantize.model import QuantizedModel
from roundoff.quantize.options import Options, Rounding
from roundoff.quantize.pipeline import quantize
from roundoff.site import select
from roundoff.workload import Workload, named_tensors

#: What calibration and repair are expected to gain over plain rounding, in dB, before
#: anything is measured.
EXPECTED_GAIN = 6.0
#: A plan this much above its target is worth trying to make cheaper, in dB.
SLACK = 3.0
#: Batches that the budget is measured on.
BUDGET_BATCHES = 4


@dataclass(frozen=True)
class PlanTrial:
    """One plan, quantized and measured.

    Attributes:
        plan: which site ran in which format.
        predicted_db: SQNR in dB of the output closest to its target, or furthest below
            it, as the budget predicts for plain rounding; None where it predicts nothing.
        measured_db: that of the quantized model.
        metric: of the workload; None without one.
        cost: as the problem counts it.
        met: True where the target was met, of every output.
        outputs: each named output: predicted, measured, target.
    """

    plan: Plan
    predicted_db: float | None
    measured_db: float
    metric: float | None
    cost: float
    met: bool
    outputs: tuple[OutputRow, ...] = ()


@dataclass(frozen=True)
class Reached:
    """The model with the cheapest plan that meets the target, or else the best one.

    Attributes:
        model: quantized by ``plan``.
        plan: which site runs in which format.
        trials: in the order in which they were made, one evaluation of the metric each.
        met: True where ``plan`` meets the target.
        target: as it was asked for.
        target_db: the SQNR in dB that it comes to, of each output without a target of
            its own; None where nothing is asked of those.
        metric_name: of the workload; None without a metric.
        metric_reference: the metric of the unquantized model.
        note: how ``target_db`` was found, and why the target was missed.
        shares: each site's share of the noise that the budget predicts for the plan,
            errors taken as independent.
    """

    model: QuantizedModel
    plan: Plan
    trials: list[PlanTrial]
    met: bool
    target: str
    target_db: float | None
    metric_name: str | None = None
    metric_reference: float | None = None
    note: str = ""
    shares: Mapping[str, float] = field(default_factory=dict)


def reach(
    workload: Workload,
    target: TargetText,
    formats: Iterable[str] = ("int8",),
    *,
    cost: str = "bitops",
    pin: Mapping[str, str] | None = None,
    skip: Iterable[str] = (),
    options: Options | None = None,
    rounding: Rounding | None = None,
    evaluations: int = 4,
    progress: Progress | None = None,
) -> Reached:
    """Quantize a workload's model so that a target is met, as cheaply as can be found.

    Args:
        workload: ``batches`` are the calibration data; the target is measured on
            ``held_out`` where there is some.
        target: a drop of the metric, ``"0.5%"`` (of 1: half a point of accuracy) or
            ``"0.005"`` as text with ``%`` or a number below 1; or decibels of SQNR of
            every output, ``"38dB"`` or a number of 1 and more, or of each by name:
            ``"cls=40dB,price=30dB"``, ``{"cls": 40, "price": 30}``.
        formats: offered to each site beside fp32.
        cost: what is made least: ``bytes``, ``storage``, ``bitops`` or ``operators`` (see
            ``plan.cost``).
        pin: pattern → format of sites that the user fixes.
        skip: patterns of sites that stay in fp32.
        options: see ``quantize``.
        rounding: see ``quantize``.
        evaluations: how many plans are quantized and measured at most.
        progress: called as ``progress(stage, done, total)``.

    Raises:
        InfeasibleError: sites are pinned so that no plan can reach the target, with the
            best reachable SQNR.
        QuantizationError: a metric drop was asked for and the workload has no metric;
            what ``quantize`` raises.

    Example:
        >>> from torch import nn
        >>> torch.manual_seed(0)
        <torch...>
        >>> net = nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 4))
        >>> workload = Workload(net, [torch.randn(32, 8) for _ in range(2)])
        >>> result = reach(workload, "30dB", ["w8a8", "w4a4"])
        >>> result.met, len(result.trials) <= 4
        (True, True)
    """
    if evaluations < 1:
        raise QuantizationError(
            "no evaluation is allowed",
            where="evaluations",
            expected="1 or more",
            got=str(evaluations),
        )
    wanted = _RequestedQuality.parse(target, workload)
    workload = workload.judging(workload.judged.part, wanted.target.patterns)
    judge = _Judge(workload)
    pins = dict(pin or {}) | dict.fromkeys(skip, "fp32")
    sample = _budget_workload(workload, judge, wanted)
    problem = _price(sample, list(formats), cost, pins, progress)
    if wanted.drop is not None:
        db, note = drop_to_db(problem.budget.about.metric, wanted.drop)
        wanted = replace(wanted, target=SqnrTarget(db), note=note)
    problem.check(wanted.target)

    search = _PlanSearch(problem, wanted)
    for number in range(evaluations):
        if progress is not None:
            progress("quantize", number, evaluations)
        last = number + 1 == evaluations
        chosen = search.next_formats(last=last)
        if chosen is None:
            break
        plan = problem.plan(chosen, asked=wanted.target)
        model = quantize(workload, plan, options=options, rounding=rounding)
        search.add(model, judge.try_(model, plan, chosen, problem, wanted))
        if search.settled():
            break
    if search.best is None:
        raise _infeasible(workload, problem, wanted, pins)
    model, trial = search.best
    notes = [wanted.note]
    if not trial.met:
        notes.append(in_the_way(problem, trial, pins))
    return Reached(
        model=model,
        plan=trial.plan,
        trials=search.trials,
        met=trial.met,
        target=wanted.text,
        target_db=wanted.target.db,
        metric_name=workload.metric_name if workload.metric else None,
        metric_reference=judge.metric_reference,
        note="; ".join(filter(None, notes)),
        shares=shares(problem.budget, trial.plan.formats(list(problem.info))),
    )


@dataclass(frozen=True)
class _RequestedQuality:
    """What was asked for: a drop of the metric, or the SQNR of each output in dB.

    ``target`` of a drop is known once the budget is measured, and ``note`` says from what.
    """

    text: str
    drop: float | None
    target: SqnrTarget
    note: str = ""

    @classmethod
    def parse(cls, target: TargetText, workload: Workload) -> _RequestedQuality:
        if not is_drop(target):
            wanted = parse_target(target)
            is_text = isinstance(target, str | float | int)
            return cls(str(target if is_text else wanted), None, wanted)
        text = str(target)
        if workload.metric is None:
            raise QuantizationError(
                "a drop of the metric was asked for, and the workload has no metric",
                where=workload.name,
                expected="metric(outputs, ...) in the workload",
                got=text,
                do="define it, or give a target in dB",
            )
        return cls(text, parse_drop(text), SqnrTarget(None))


class _Judge:
    """The data that the target is measured on, and the unquantized outputs for them."""

    def __init__(self, workload: Workload) -> None:
        held_out = workload.held_out
        self.data = with_batches(workload, held_out) if held_out else workload
        self.reference = self._run(workload.model)
        judged = workload.judged
        self.exact = [judged.tensors(output) for output in self.reference]
        self.metric_reference = self.data.evaluate(self.reference, self.reference)

    def try_(
        self,
        model: QuantizedModel,
        plan: Plan,
        chosen: Mapping[str, str],
        problem: Problem,
        target: _RequestedQuality,
    ) -> PlanTrial:
        """Measure a quantized model."""
        outputs = self._run(model)
        prediction = problem.budget.predict(chosen)
        predicted = {output.output: output.db for output in prediction.outputs}
        apart = self.data.judged.apart
        noises = output_noises(_tensors(outputs), self.exact, apart)
        rows = output_rows(noises, target.target, predicted)
        metric = self.data.evaluate(outputs, self.reference)
        if target.drop is None or metric is None or self.metric_reference is None:
            met = all_met(rows)
        else:
            met = metric >= self.metric_reference - target.drop
        closest = deciding(rows)
        return PlanTrial(
            plan,
            closest.predicted_db,
            reached_db(rows),
            metric,
            problem.cost_of(chosen),
            met,
            rows,
        )

    def _run(self, model: nn.Module) -> list[Any]:
        workload = self.data.with_model(model)
        with preserve(model), same_draws(), torch.no_grad():
            model.eval()
            return [detached(workload.run(batch)) for batch in self.data.batches]


def _tensors(outputs: Sequence[Any]) -> list[dict[str, Tensor]]:
    return [named_tensors(output) for output in outputs]


@dataclass
class _OutputSearch:
    """Between which bounds of the prediction of one output the answer lies.

    Attributes:
        goal: the SQNR to reach in dB.
        gain: how far the measured SQNR was above the budget's prediction.
        low: highest prediction that missed the target.
        high: lowest prediction that met it.
    """

    goal: float
    gain: float = EXPECTED_GAIN
    low: float = -math.inf
    high: float = math.inf

    def add(self, predicted: float, measured: float, *, met: bool, drop: bool) -> None:
        """Learn from a trial; ``drop`` says that the metric decides, not the SQNR."""
        if math.isfinite(measured) and math.isfinite(predicted):
            self.gain = measured - predicted
        if met:
            self.high = min(self.high, predicted)
            if drop:
                self.goal = min(self.goal, measured - SLACK)
        else:
            self.low = max(self.low, predicted)
            if drop:
                self.goal = measured + SLACK

    @property
    def closed(self) -> bool:
        """True where the bounds are so close that no trial between them is worth it."""
        return self.high - self.low < SLACK / 3

    def aim(self) -> float:
        """Return the SQNR to ask the budget for."""
        wanted = self.goal - self.gain
        if self.low < wanted < self.high:
            return wanted
        if math.isinf(self.high):
            return self.low + SLACK
        if math.isinf(self.low):
            return self.high - SLACK
        return (self.low + self.high) / 2


class _PlanSearch:
    """Which plans were tried, and what each output asks of the next one."""

    def __init__(self, problem: Problem, target: _RequestedQuality) -> None:
        self.problem = problem
        self.target = target
        names = [output.name for output in problem.budget.outputs]
        asked = target.target.of_each(names)
        self.outputs = {
            name: _OutputSearch(db) for name, db in asked.items() if db is not None
        }
        self.trials: list[PlanTrial] = []
        self.best: tuple[QuantizedModel, PlanTrial] | None = None
        self._tried: set[tuple[tuple[str, str], ...]] = set()

    def next_formats(self, *, last: bool) -> dict[str, str] | None:
        """Return the formats to try next; None where nothing new is left.

        Only fp32 is not worth a trial. The last trial is on the safe side while no plan
        was quantized.
        """
        safely = last and self.best is None
        aims = {name: output.aim() for name, output in self.outputs.items()}
        chosen = _cheapest(self.problem, aims, safely=safely)
        key = tuple(sorted(chosen.items()))
        if key in self._tried:
            return None
        self._tried.add(key)
        return chosen if any(fmt != "fp32" for fmt in chosen.values()) else None

    def add(self, model: QuantizedModel, trial: PlanTrial) -> None:
        """Learn from a trial."""
        self.trials.append(trial)
        if self.best is None or _is_better(trial, self.best[1]):
            self.best = model, trial
        drop = self.target.drop is not None
        for row in trial.outputs:
            output = self.outputs.get(row.output)
            if output is None or row.predicted_db is None or row.sqnr_db is None:
                continue
            met = trial.met if drop else bool(row.met)
            output.add(row.predicted_db, row.sqnr_db, met=met, drop=drop)

    def settled(self) -> bool:
        """Return True where another trial would not be worth it."""
        trial = self.trials[-1]
        if trial.met and self.target.drop is None:
            closest = deciding(trial.outputs)
            if closest.target_db is not None and closest.margin_db < SLACK / 3:
                return True
        return all(output.closed for output in self.outputs.values())


def _is_better(trial: PlanTrial, best: PlanTrial) -> bool:
    """Compare two plans.

    One that meets the target goes before one that does not; then the cheaper one, or the
    one with less noise.
    """
    if trial.met != best.met:
        return trial.met
    if trial.met:
        return trial.cost < best.cost
    return deciding(trial.outputs).margin_db > deciding(best.outputs).margin_db


def _budget_workload(
    workload: Workload, judge: _Judge, target: _RequestedQuality
) -> Workload:
    """Return the workload with the few batches that the budget is measured on.

    A drop of the metric is priced on the data that it is measured on.
    """
    data = workload if target.drop is None else judge.data
    return with_batches(workload, data.batches[:BUDGET_BATCHES])


def _price(
    workload: Workload,
    formats: Sequence[str],
    cost: str,
    pins: Mapping[str, str],
    progress: Progress | None,
) -> Problem:
    """Measure the budget of the offered and the pinned formats."""
    offered = {_full_name(fmt) for fmt in (*formats, "fp32")}
    others = [f for f in dict.fromkeys(pins.values()) if _full_name(f) not in offered]
    measured = budget(workload, [*formats, *others], progress=progress)
    for pattern in pins:
        select(pattern, [site.site for site in measured.sites])
    # what is pinned alone is no choice for the others
    allow = {"*": ["fp32", *formats]} if others else {}
    return Problem(measured, Goal(cost=cost, pin=pins, allow=allow))


def _full_name(fmt: str) -> str:
    return parse_format(fmt).name


def _cheapest(
    problem: Problem, aims: Mapping[str, float], *, safely: bool
) -> dict[str, str]:
    """Return the cheapest formats for an SQNR of each output.

    Where it is out of reach, those with the least noise. ``safely`` asks for more.
    """
    if safely:
        aims = {name: max(aim, 0.0) + 2 * SLACK for name, aim in aims.items()}
    wanted = SqnrTarget(None, tuple(aims.items()))
    try:
        return dict(problem.cheapest(wanted))
    except InfeasibleError as error:
        if not math.isfinite(error.best_db) or math.isinf(error.short_db):
            raise
        short = math.ceil(error.short_db * 100) / 100
    try:
        return dict(problem.cheapest(wanted.moved(-short)))
    except InfeasibleError:  # errors that add up: what is pinned, and nothing else
        return _pinned_formats(problem)


def _pinned_formats(problem: Problem) -> dict[str, str]:
    pinned: dict[str, str] = {}
    for decision in problem.decisions:
        if decision.pinned not in (None, "fp32"):
            sites = problem.groups[decision.name]
            pinned |= dict.fromkeys(sites, str(decision.pinned))
    return pinned


def _infeasible(
    workload: Workload,
    problem: Problem,
    target: _RequestedQuality,
    pins: Mapping[str, str],
) -> InfeasibleError:
    """The error for a target that only fp32 meets."""
    expected = target.text
    if target.drop is not None:
        expected = f"{target.text} less, about {target.target.db:.0f} dB"
    got = f"fp32 for every site; {quietest(problem)}"
    if target.note:
        got += f" ({target.note})"
    return InfeasibleError(
        "no plan with the offered formats meets the target",
        where=workload.name,
        best_db=math.inf,
        pinned=list(pins),
        expected=expected,
        got=got,
        do="offer wider formats, or ask for less",
    )


def quietest(problem: Problem) -> str:
    """Say how far all sites that may leave fp32 come, each in its best offered format."""
    chosen: dict[str, str] = {}
    for decision in problem.decisions:
        offered = [choice for choice in decision.choices if choice.format != "fp32"]
        if offered:
            best = min(offered, key=lambda choice: choice.worst)
            chosen |= dict.fromkeys(problem.groups[decision.name], best.format)
    if not chosen:
        return "none can run in another format"
    reached = problem.budget.predict(chosen).db + EXPECTED_GAIN
    return f"quantized as well as they can be, {len(chosen)} sites reach about {reached:.0f} dB; {_loudest(problem, chosen)}"


def in_the_way(problem: Problem, trial: PlanTrial, pins: Mapping[str, str]) -> str:
    """Say why the best plan misses the target."""
    chosen = trial.plan.formats(list(problem.info))
    output = f" at {deciding(trial.outputs).output}" if len(trial.outputs) > 1 else ""
    reached = f"{trial.measured_db:.1f} dB{output}"
    parts = [f"the best plan found reaches {reached}: {_loudest(problem, chosen)}"]
    fixed = [f"{pattern}={fmt}" for pattern, fmt in pins.items() if fmt != "fp32"]
    if fixed:
        parts.append(f"fixed: {', '.join(fixed)}")
    return "; ".join(parts)


def _loudest(problem: Problem, chosen: Mapping[str, str], top: int = 3) -> str:
    """Name the sites that a plan's noise comes from."""
    worst = list(shares(problem.budget, chosen).items())[:top]
    if not worst:
        return "none of them makes noise"
    sites = [f"{site} in {chosen[site]} ({share:.0%})" for site, share in worst]
    return f"most noise comes from {', '.join(sites)}"


def shares(measured: Budget, formats: Mapping[str, str]) -> dict[str, float]:
    """Return each site's share of the noise that a budget predicts, the largest first.

    Errors are taken as independent. Sites without noise are left out; infinite noise (an
    overflow) is a share of 1.
    """
    noise_of = {
        site: measured.predict({site: fmt}).additive
        for site, fmt in formats.items()
        if fmt != "fp32"
    }
    total = sum(value for value in noise_of.values() if math.isfinite(value))
    share_of = {
        site: value / total if math.isfinite(value) else 1.0
        for site, value in noise_of.items()
        if value > 0
    }
    return dict(sorted(share_of.items(), key=lambda item: -item[1]))
