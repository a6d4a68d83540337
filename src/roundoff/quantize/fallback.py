"""From a target to a quantized model: which sites fall back to more bits is planned from the budget, not tried site by site.

The budget prices every site in every format from one reference pass. The plan it leads to is quantized and measured; what
calibration and repair gained over the budget's plain rounding is then known, and the next plan is solved with it. Each
measurement is one evaluation of the metric; there are at most four.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from roundoff.budget import (
    Budget,
    Problem,
    Progress,
    budget,
    drop_to_db,
    parse_drop,
    parse_target,
    sqnr_db,
)
from roundoff.errors import InfeasibleError, QuantizationError
from roundoff.formats import parse_format
from roundoff.ops import MATRIX_KINDS
from roundoff.plan import Plan, detached, noise
from roundoff.preserve import preserve
from roundoff.quantize.model import QuantizedModel
from roundoff.quantize.options import Options, Rounding
from roundoff.quantize.pipeline import quantize
from roundoff.site import select
from roundoff.workload import Workload, named_tensors

#: What calibration and repair are expected to gain over plain rounding, in dB, before anything is measured.
EXPECTED_GAIN = 6.0
#: A plan this much above its target is worth trying to make cheaper, in dB.
SLACK = 3.0
#: Batches that the budget is measured on.
BATCHES = 4


@dataclass(frozen=True)
class Trial:
    """One plan, quantized and measured: SQNR of the output in dB (predicted for plain rounding), metric, cost."""

    plan: Plan
    predicted_db: float
    measured_db: float
    metric: float | None
    cost: float
    met: bool


@dataclass(frozen=True)
class Reached:
    """The model with the cheapest plan that meets the target, or where none does the best one.

    ``trials`` are in the order in which they were made, one evaluation of the metric each; ``model`` is that of ``plan``.
    ``shares`` has each site's share of the noise that the budget predicts for the plan, errors taken as independent.
    """

    model: QuantizedModel
    plan: Plan
    trials: list[Trial]
    met: bool
    target: str
    target_db: float
    metric_name: str | None = None
    metric_reference: float | None = None
    note: str = ""
    shares: Mapping[str, float] = field(default_factory=dict)


@dataclass
class _Search:
    """How far the measured SQNR was above the budget's prediction, and between which bounds the answer lies."""

    goal: float
    gain: float = EXPECTED_GAIN
    low: float = -math.inf
    high: float = math.inf
    tried: set[tuple[tuple[str, str], ...]] = field(default_factory=set)

    def aim(self) -> float:
        """The SQNR to ask the budget for."""
        wanted = self.goal - self.gain
        if self.low < wanted < self.high:
            return wanted
        if math.isinf(self.high):
            return self.low + SLACK
        if math.isinf(self.low):
            return self.high - SLACK
        return (self.low + self.high) / 2


def reach(
    workload: Workload,
    target: str | float,
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
    """Quantize a workload's model so that a target is met, with the cheapest formats that the budget finds for it.

    Args:
        workload: ``batches`` are the calibration data; the target is measured on ``held_out`` where there is some.
        target: a drop of the metric, ``"0.5%"`` (of 1: half a point of accuracy) or ``"0.005"`` as text with ``%`` or a
            number below 1; or decibels of SQNR of the output, ``"38dB"`` or a number of 1 and more.
        formats: offered to each site beside fp32.
        cost: what is made least: ``bytes``, ``storage``, ``bitops`` or ``operators`` (see ``plan.cost``).
        pin: pattern → format of sites that the user fixes.
        skip: patterns of sites that stay in fp32.
        options: see ``quantize``.
        rounding: see ``quantize``.
        evaluations: how many plans are quantized and measured at most.
        progress: called as ``progress(stage, done, total)``.

    Raises:
        InfeasibleError: sites are pinned so that no plan can reach the target, with the best reachable SQNR.
        QuantizationError: a metric drop was asked for and the workload has no metric; what ``quantize`` raises.

    Example:
        >>> from torch import nn
        >>> torch.manual_seed(0)
        <torch...>
        >>> net = nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 4))
        >>> found = reach(Workload(net, [torch.randn(32, 8) for _ in range(2)]), "30dB", ["w8a8", "w4a4"])
        >>> found.met, len(found.trials) <= 4
        (True, True)
    """
    formats, skip = list(formats), list(skip)
    if evaluations < 1:
        raise QuantizationError(
            "no evaluation is allowed",
            where="evaluations",
            expected="1 or more",
            got=str(evaluations),
        )
    drop, goal = _target(target, workload)
    judged = _judged(workload)
    reference = _run(judged, judged)
    exact = [named_tensors(o) for o in reference]
    metric_reference = judged.evaluate(reference, reference)
    few = workload.with_model(workload.model)
    few.batches = workload.batches[:BATCHES]
    if drop is not None and few.metric is not None:
        few.batches = (
            judged.batches[:BATCHES] if judged is not workload else few.batches
        )
    pins = dict(pin or {}) | dict.fromkeys(skip, "fp32")
    others = [
        fmt
        for fmt in dict.fromkeys(pins.values())
        if parse_format(fmt).name not in map(_name, [*formats, "fp32"])
    ]
    measured = budget(few, [*formats, *others], progress=progress)
    for pattern in pins:
        select(pattern, [site["site"] for site in measured.sites])
    problem = Problem(
        measured, cost, None, pins, {"*": ["fp32", *formats]} if others else {}
    )
    note = ""
    if drop is not None:
        goal, note = drop_to_db(measured.about.get("metric"), drop)
    search = _Search(goal)
    trials: list[Trial] = []
    best: tuple[QuantizedModel, Trial] | None = None
    for number in range(evaluations):
        if progress is not None:
            progress("quantize", number, evaluations)
        chosen = _cheapest(
            problem, search.aim(), last=number + 1 == evaluations and best is None
        )
        key = tuple(sorted(chosen.items()))
        if key in search.tried:
            break
        search.tried.add(key)
        plan, predicted = problem.plan(chosen, asked=goal), measured.predict(chosen).db
        if not any(name != "fp32" for name in chosen.values()):
            break
        model = quantize(workload, plan, options=options, rounding=rounding)
        outputs = _run(judged, judged.with_model(model))
        db = sqnr_db(noise([named_tensors(o) for o in outputs], exact))
        metric = judged.evaluate(outputs, reference)
        if drop is None or metric is None or metric_reference is None:
            met = db >= goal
        else:
            met = metric >= metric_reference - drop
        trial = Trial(plan, predicted, db, metric, problem.cost_of(chosen), met)
        trials.append(trial)
        best = _better(best, model, trial)
        search.gain = db - predicted
        if met:
            search.high = min(search.high, predicted)
            if drop is None and db - goal < SLACK / 3:
                break
            if drop is not None:
                search.goal = min(search.goal, db - SLACK)
        else:
            search.low = max(search.low, predicted)
            if drop is not None:
                search.goal = db + SLACK
        if search.high - search.low < SLACK / 3:
            break
    if best is None:
        raise InfeasibleError(
            "no plan with the offered formats meets the target",
            where=workload.name,
            best_db=math.inf,
            pinned=list(pins),
            expected=str(target)
            if drop is None
            else f"{target} less, about {goal:.0f} dB",
            got=f"fp32 for every site; {quietest(problem)}" + f" ({note})" * bool(note),
            do="offer wider formats, or ask for less",
        )
    model, trial = best
    if not trial.met:
        note = "; ".join(
            filter(
                None, (note, in_the_way(problem, trial.plan, trial.measured_db, pins))
            )
        )
    return Reached(
        model,
        trial.plan,
        trials,
        trial.met,
        str(target),
        goal,
        workload.metric_name if workload.metric else None,
        metric_reference,
        note,
        shares(measured, trial.plan.formats(list(problem.info))),
    )


def _target(target: str | float, workload: Workload) -> tuple[float | None, float]:
    """(drop of the metric or None, decibels)."""
    text = str(target)
    number = isinstance(target, int | float) and not isinstance(target, bool)
    if text.strip().endswith("%") or (number and 0 <= float(target) < 1):
        if workload.metric is None:
            raise QuantizationError(
                "a drop of the metric was asked for, and the workload has no metric",
                where=workload.name,
                expected="metric(outputs, ...) in the workload",
                got=text,
                do="define it, or give a target in dB",
            )
        return parse_drop(target), math.nan
    return None, parse_target(target)


def _judged(workload: Workload) -> Workload:
    """The workload whose batches are the data that the target is measured on."""
    if not workload.held_out:
        return workload
    twin = workload.with_model(workload.model)
    twin.batches = workload.held_out
    return twin


def _run(judged: Workload, workload: Workload) -> list[Any]:
    with preserve(workload.model), torch.no_grad():
        workload.model.eval()
        return [detached(workload.run(batch)) for batch in judged.batches]


def _cheapest(problem: Problem, aim: float, *, last: bool) -> dict[str, str]:
    """The cheapest formats for an SQNR; those with the least noise where it is out of reach, or nothing else is left."""
    if last:
        aim = max(aim, 0.0) + 2 * SLACK
    try:
        return dict(problem.cheapest(aim))
    except InfeasibleError as error:
        if not math.isfinite(error.best_db):
            raise
        try:
            return dict(problem.cheapest(math.floor(error.best_db * 100) / 100))
        except InfeasibleError:  # errors that add up: what is pinned, and nothing else
            pinned = {
                d.name: d.pinned
                for d in problem.decisions
                if d.pinned is not None and d.pinned != "fp32"
            }
            return {
                site: fmt
                for name, fmt in pinned.items()
                for site in problem.groups[name]
            }


def _name(fmt: str) -> str:
    return parse_format(fmt).name


def _better(
    best: tuple[QuantizedModel, Trial] | None, model: QuantizedModel, trial: Trial
) -> tuple[QuantizedModel, Trial]:
    """A plan that meets the target before one that does not; then the cheaper one, or the one with less noise."""
    if best is None:
        return model, trial
    old = best[1]
    if trial.met != old.met:
        return (model, trial) if trial.met else best
    better = trial.cost < old.cost if trial.met else trial.measured_db > old.measured_db
    return (model, trial) if better else best


def average_bits(model: QuantizedModel) -> tuple[float, float]:
    """Bits per weight and per activation of a quantized model: over the weights of all calls that multiply, and over the
    activations that those calls read; what has no quantizer counts 32."""
    weights: dict[str, tuple[int, float]] = {}
    activations: list[tuple[int, float]] = []
    for site, route in model.routes.items():
        node = model.graph.nodes.get(site)
        if node is None or node.kind not in MATRIX_KINDS:
            continue
        for use in node.uses:
            name = route.uses.get(use.operand.leaf)
            bits = model.quantizer(name).fmt.bits if name is not None else 32.0
            size = math.prod(use.shape)
            if use.weight:
                weights[use.value] = (size, bits)
            elif use.operand.role == "activation":
                activations.append((math.prod(use.shape[1:]), bits))
    for node in model.graph.nodes.values():
        if node.site in model.routes or node.kind not in MATRIX_KINDS:
            continue
        for use in node.uses:
            if use.weight:
                weights.setdefault(use.value, (math.prod(use.shape), 32.0))
            elif use.operand.role == "activation":
                activations.append((math.prod(use.shape[1:]), 32.0))
    return _mean(list(weights.values())), _mean(activations)


def _mean(pairs: Sequence[tuple[int, float]]) -> float:
    total = sum(size for size, _ in pairs)
    return sum(size * bits for size, bits in pairs) / total if total else math.nan


def quietest(problem: Problem) -> str:
    """How far all sites that may leave fp32 come, each in the best format that it was offered."""
    chosen: dict[str, str] = {}
    for decision in problem.decisions:
        offered = [choice for choice in decision.choices if choice.format != "fp32"]
        if offered:
            chosen |= dict.fromkeys(
                problem.groups[decision.name],
                min(offered, key=lambda c: c.noise).format,
            )
    if not chosen:
        return "none can run in another format"
    reached = problem.budget.predict(chosen).db + EXPECTED_GAIN
    return f"quantized as well as they can be, {len(chosen)} sites reach about {reached:.0f} dB; {_loudest(problem, chosen)}"


def in_the_way(
    problem: Problem, plan: Plan, reached: float, pins: Mapping[str, str]
) -> str:
    """Why the best plan, which reaches so many dB, misses the target."""
    chosen = plan.formats(list(problem.info))
    fixed = [f"{pattern}={fmt}" for pattern, fmt in pins.items() if fmt != "fp32"]
    return (
        f"the best plan found reaches {reached:.1f} dB: {_loudest(problem, chosen)}"
        + (f"; fixed: {', '.join(fixed)}" * bool(fixed))
    )


def shares(budget: Budget, formats: Mapping[str, str]) -> dict[str, float]:
    """Each site's share of the noise that a budget predicts, errors taken as independent, the largest first.

    Sites without noise are left out; infinite noise (an overflow) is a share of 1.
    """
    noise = {
        site: budget.predict({site: fmt}).additive
        for site, fmt in formats.items()
        if fmt != "fp32"
    }
    total = sum(value for value in noise.values() if math.isfinite(value))
    found = {
        site: value / total if math.isfinite(value) else 1.0
        for site, value in noise.items()
        if value > 0
    }
    return dict(sorted(found.items(), key=lambda item: -item[1]))


def _loudest(problem: Problem, chosen: Mapping[str, str], top: int = 3) -> str:
    """The sites that a plan's noise comes from."""
    worst = list(shares(problem.budget, chosen).items())[:top]
    said = ", ".join(f"{site} in {chosen[site]} ({share:.0%})" for site, share in worst)
    return f"most noise comes from {said}" if said else "none of them makes noise"
