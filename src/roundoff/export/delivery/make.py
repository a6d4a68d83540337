"""make: prune, choose, quantize, train, judge, as a user asked."""

from __future__ import annotations

import copy
import math
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor, nn

from roundoff.errors import InfeasibleError, QuantizationError
from roundoff.export.delivery.judge import Judge, Judged, size
from roundoff.export.delivery.request import SAMPLES, Ask, Prune
from roundoff.formats import parse_format
from roundoff.plan import Plan, Rule
from roundoff.preserve import preserve
from roundoff.quantize import (
    Distillation,
    QuantizedModel,
    Step,
    check_n_m,
    convert,
    finish_,
    latency_ratio,
    magnitude_scores,
    model_cost,
    n_m_masks,
    parameter_groups,
    prepare_qat,
    prune_channels_,
    quantize,
    reach,
    site_formats,
    sparsify_,
    traced,
    train,
    unstructured_masks,
)
from roundoff.site import select
from roundoff.workload import Workload, named_tensors

Progress = Callable[[str, int, int], None]
#: Scales learn at this share of the weights' rate.
SCALE_RATE = 0.1


@dataclass
class Made:
    """What came of an ``Ask``.

    Attributes:
        workload: the user's, with the batches that were calibrated on; ``start``: the same with what was quantized of it,
            its model itself or what pruning left of it.
        model: the quantized model; ``plan``: what it follows; ``judged``: how it does.
        trials: what a target's search measured, plain rows; ``reached``: its own verdict.
        shares: of each site, its share of the noise that the budget predicts for the plan; empty without a target.
        pruned: what pruning did, by parameter or channel group, as plain rows.
        pruning: what that saved in fp32: ``macs`` of one batch and ``bytes`` of parameters, each ``before`` and ``after``;
            ``time``, that of the pruned model over that of the whole one in PyTorch, measured in turns.
        seconds: of each stage.
    """

    workload: Workload
    start: Workload
    judge: Judge
    model: QuantizedModel
    plan: Plan
    judged: Judged
    trials: list[dict[str, Any]] = field(default_factory=list)
    shares: dict[str, float] = field(default_factory=dict)
    pruned: list[dict[str, Any]] = field(default_factory=list)
    pruning: dict[str, Any] = field(default_factory=dict)
    notes: list[str] = field(default_factory=list)
    seconds: dict[str, float] = field(default_factory=dict)

    def met(self, ask: Ask) -> bool:
        """Whether the judged model keeps the target; true without one."""
        goal = ask.goal
        if goal is None:
            return True
        if goal.kind == "db":
            return self.judged.db >= goal.value
        if self.judged.metric is None or self.judge.metric is None:
            return False
        return self.judge.metric - self.judged.metric <= goal.value + 1e-12


def make(workload: Workload, ask: Ask, progress: Progress | None = None) -> Made:
    """Everything that was asked for but files. The workload and its model are left as they were.

    Raises:
        QuantizationError: a target in metric without one, training without loss, or what ``roundoff.quantize`` refuses.
        InfeasibleError: no plan can meet the target.
        PlanError, PatternError: a plan for another model; a ``skip`` or ``pin`` that names no site.
    """
    goal = ask.goal
    if goal is not None and goal.kind == "drop" and workload.metric is None:
        raise QuantizationError(
            "a target in the metric needs one",
            where=workload.name,
            got=goal.text,
            expected="a metric in the workload, or decibels such as 38dB",
        )
    if ask.epochs and workload.loss is None and not ask.distill:
        raise QuantizationError(
            "training needs a loss",
            where=workload.name,
            expected="loss(output, batch) in the workload",
            do="define it, or learn from the fp32 model: --distill",
        )
    clock, notes = _Clock(), list(ask.notes)
    with clock("judge"):
        judge = Judge(workload)
    own = calibration(
        workload, SAMPLES if ask.samples is None else ask.samples, ask.batches
    )
    start, steps = own, list[Step]()
    pruned: list[dict[str, Any]] = []
    masks: dict[str, Tensor] = {}
    if ask.pruning is not None:
        with clock("prune"):
            start, pruned, masks = _prune(own, ask.pruning)
            steps.append(
                Step(f"prune {ask.prune}", math.inf, judge.judge(start.model).db, "")
            )
            if all(row["before"] == row["after"] for row in pruned):
                why = "; ".join(
                    sorted({row["reason"] for row in pruned if row["reason"]})[:3]
                )
                notes.append(
                    f"nothing could be pruned: {why or 'no weight that it is for'}"
                )
        if ask.epochs:
            with clock("train"):
                _train(start.model, workload, ask)
                steps.append(
                    Step(
                        "training",
                        steps[-1].after,
                        judge.judge(start.model).db,
                        f"{ask.epochs} epochs",
                    )
                )
        else:
            notes.append(
                "nothing was trained after pruning: --epochs 2 (and --distill) brings back much of what it costs"
            )
        if masks:
            finish_(start.model)
            ask = replace(ask, rounding=ask.rounding.keeping_zeros())
    with clock("quantize"):
        model, plan, trials, more, shares = _quantize(start, ask, progress)
    notes += [*more, *model.remarks]
    notes += [f"{name}: {note}" for name, note in model.notes.items()]
    beside = "beside the pruned model" if ask.pruning is not None else ""
    steps += [
        step._replace(note="; ".join(filter(None, (step.note, beside))))
        for step in model.steps
    ]
    if ask.qat:
        with clock("train with quantization"):
            before = judge.judge(model).db
            notes += [
                f"{name} is not trained: {why}"
                for name, why in prepare_qat(model).items()
            ]
            if masks:
                sparsify_(model.model, masks)
            _train(model, workload, ask)
            if masks:
                finish_(model.model)
            convert(model)
            steps.append(
                Step(
                    "qat",
                    before,
                    judge.judge(model).db,
                    f"lsq, lsq+, {ask.epochs} epochs",
                )
            )
    model.eval()
    model.steps = steps
    if masks:
        notes += _still_zero(model, masks, ask.pruning)
    with clock("judge"):
        judged = judge.judge(model)
    made = Made(
        own,
        start,
        judge,
        model,
        plan,
        judged,
        trials,
        shares,
        pruned,
        {},
        notes,
        clock.seconds,
    )
    if pruned:
        with clock("cost of the pruned model"):
            made.pruning = _saved(own, start)
    return made


def calibration(
    workload: Workload, samples: int, batches: int | None = None
) -> Workload:
    """The same workload with its first batches, until there are so many samples, or that number of ``batches``."""
    own, have = [], 0
    for batch in workload.batches if batches is None else ():
        if have >= samples:
            break
        own.append(batch)
        have += size(batch)
    twin = copy.copy(workload)
    twin.batches = own if batches is None else workload.batches[:batches]
    return twin


def _quantize(
    start: Workload, ask: Ask, progress: Progress | None
) -> tuple[QuantizedModel, Plan, list[dict[str, Any]], list[str], dict[str, float]]:
    if ask.target is not None:
        reached = reach(
            start,
            ask.target,
            list(ask.formats),
            cost=ask.cost,
            pin=dict(ask.pin),
            skip=ask.skip,
            options=ask.options,
            rounding=ask.rounding,
            progress=progress,
        )
        trials = [
            {
                "sites": _counts(t.plan),
                "predicted_db": t.predicted_db,
                "measured_db": t.measured_db,
                "metric": t.metric,
                "cost": t.cost,
                "met": t.met,
            }
            for t in reached.trials
        ]
        return (
            reached.model,
            reached.plan,
            trials,
            [reached.note] if reached.note else [],
            dict(reached.shares),
        )
    plan = ask.plan or whole_plan(start, ask.formats[0], ask)
    model = quantize(
        start,
        plan,
        options=ask.options,
        rounding=ask.rounding,
        fold=ask.fold,
        skip=ask.skip,
    )
    return model, plan, [], [], {}


def whole_plan(start: Workload, fmt: str, ask: Ask) -> Plan:
    """All products with weights in one format, but what is pinned or skipped."""
    graph = traced(start)
    formats = {site: f.name for site, f in site_formats(fmt, graph, ask.skip).items()}
    for pattern, name in ask.pin.items():
        formats |= dict.fromkeys(
            select(pattern, list(graph.nodes)), parse_format(name).name
        )
    by: dict[str, list[str]] = {}
    for site, name in formats.items():
        by.setdefault(name, []).append(site)
    return Plan(
        tuple(Rule(name, tuple(sites)) for name, sites in by.items() if name != "fp32")
    )


def _counts(plan: Plan) -> dict[str, int]:
    found: dict[str, int] = {}
    for rule in plan.rules:
        found[rule.format] = found.get(rule.format, 0) + len(rule.sites)
    return found


def _prune(
    own: Workload, how: Prune
) -> tuple[Workload, list[dict[str, Any]], dict[str, Tensor]]:
    model = copy.deepcopy(own.model)
    start = own.with_model(model)
    if how.kind == "channel":
        groups = prune_channels_(
            model, own.batches, ratio=how.share, forward=own.forward
        )
        return (
            start,
            [
                {
                    "name": g.group,
                    "before": g.before,
                    "after": g.after,
                    "reason": g.reason,
                }
                for g in groups
            ],
            {},
        )
    masks = (
        n_m_masks(model, how.n, how.m)
        if how.kind == "n_m"
        else unstructured_masks(magnitude_scores(model), how.share)
    )
    rows = sparsify_(model, masks)
    return (
        start,
        [
            {
                "name": r.name,
                "before": r.elements,
                "after": r.elements - r.zeros,
                "reason": "",
            }
            for r in rows
        ],
        masks,
    )


def _saved(own: Workload, pruned: Workload) -> dict[str, Any]:
    """See ``Made.pruning``."""
    batch = own.batches[0]
    before, after = (
        model_cost(w.model, batch, forward=own.forward) for w in (own, pruned)
    )
    return {
        "macs": {"before": before.macs, "after": after.macs},
        "bytes": {"before": before.bytes, "after": after.bytes},
        "time": latency_ratio(own.model, pruned.model, batch, forward=own.forward),
    }


def _still_zero(
    model: QuantizedModel, masks: dict[str, Tensor], how: Prune | None
) -> list[str]:
    """What of the sparsity did not last, one line each weight."""
    lost = []
    parameters = dict(model.model.named_parameters())
    for name, mask in masks.items():
        weight = parameters.get(name)
        if weight is None or weight.shape != mask.shape:
            continue
        moved = int((weight.detach()[~mask] != 0).sum())
        if moved:
            lost.append(
                f"{name}: {moved} of {int((~mask).sum())} pruned weights are no longer 0"
            )
        elif (
            how is not None
            and how.kind == "n_m"
            and weight.ndim > 1
            and check_n_m(weight.detach(), how.n, how.m)
        ):
            lost.append(f"{name}: not {how.text} along its input channels")
    return lost


def _train(model: nn.Module, workload: Workload, ask: Ask) -> None:
    steps = ask.epochs * len(workload.batches)
    hard = workload.loss
    teacher = (
        Distillation(workload.model, share=0.5 if hard is not None else 1.0)
        if ask.distill
        else None
    )

    def loss(output: Any, batch: Any) -> Tensor:
        if hard is None:
            return next(iter(named_tensors(output).values())).sum() * 0.0
        found: Tensor = hard(output, batch)
        return found

    def forward(net: nn.Module, batch: Any) -> Any:
        return workload.with_model(net).run(batch)

    optimizer = torch.optim.AdamW(parameter_groups(model, ask.lr, ask.lr * SCALE_RATE))
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, steps)
    with preserve(workload.model), torch.random.fork_rng():
        torch.manual_seed(0)
        train(
            model,
            workload.batches,
            loss,
            optimizer,
            ask.epochs,
            forward=forward,
            teacher=teacher,
            schedule=schedule,
        )


class _Clock:
    def __init__(self) -> None:
        self.seconds: dict[str, float] = {}

    @contextmanager
    def __call__(self, name: str) -> Iterator[None]:
        start = time.perf_counter()
        yield
        self.seconds[name] = self.seconds.get(name, 0.0) + time.perf_counter() - start


__all__ = ["InfeasibleError", "Made", "calibration", "make", "whole_plan"]
