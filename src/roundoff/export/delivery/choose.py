"""Choose a format for each site, by a search for a target or as asked, and quantize."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from roundoff.budget import Progress, TargetText
from roundoff.export.delivery.records import TrialRow
from roundoff.export.delivery.request import Ask
from roundoff.formats import parse_format
from roundoff.plan import Plan, Rule
from roundoff.quantize import (
    QuantizedModel,
    quantize,
    reach,
    site_formats,
    trace_sampled,
)
from roundoff.site import select
from roundoff.workload import Workload


@dataclass(frozen=True, slots=True, kw_only=True)
class Chosen:
    """A quantized model and the plan that it follows.

    Attributes:
        model: the quantized model.
        plan: which site runs in which format.
        trials: what a target's search measured.
        note: the search's own remark; empty without one.
        shares: each site's share of the noise that the budget predicts for the plan;
            empty without a target.
    """

    model: QuantizedModel
    plan: Plan
    trials: tuple[TrialRow, ...] = ()
    note: str = ""
    shares: Mapping[str, float] = field(default_factory=dict)


def choose(start: Workload, ask: Ask, progress: Progress | None = None) -> Chosen:
    """Find a plan for the target, or take the one asked for, and quantize by it."""
    if ask.target is not None:
        return _search(start, ask, ask.target, progress)
    plan = ask.plan or whole_plan(start, ask.formats[0], ask)
    model = quantize(
        start,
        plan,
        options=ask.options,
        rounding=ask.rounding,
        fold=ask.fold,
        skip=ask.skip,
    )
    return Chosen(model=model, plan=plan)


def _search(
    start: Workload,
    ask: Ask,
    target: TargetText,
    progress: Progress | None,
) -> Chosen:
    reached = reach(
        start,
        target,
        list(ask.formats),
        cost=ask.cost,
        pin=dict(ask.pin),
        skip=ask.skip,
        options=ask.options,
        rounding=ask.rounding,
        progress=progress,
    )
    trials = [
        TrialRow(
            sites=_sites_by_format(trial.plan),
            predicted_db=trial.predicted_db,
            measured_db=trial.measured_db,
            metric=trial.metric,
            cost=trial.cost,
            met=trial.met,
            outputs=trial.outputs,
        )
        for trial in reached.trials
    ]
    return Chosen(
        model=reached.model,
        plan=reached.plan,
        trials=tuple(trials),
        note=reached.note,
        shares=dict(reached.shares),
    )


def whole_plan(start: Workload, fmt: str, ask: Ask) -> Plan:
    """Plan one format for all products with weights, but what is pinned or skipped."""
    graph = trace_sampled(start)
    formats = {site: f.name for site, f in site_formats(fmt, graph, ask.skip).items()}
    for pattern, name in ask.pin.items():
        pinned = select(pattern, list(graph.nodes))
        formats |= dict.fromkeys(pinned, parse_format(name).name)
    sites_of: dict[str, list[str]] = {}
    for site, name in formats.items():
        sites_of.setdefault(name, []).append(site)
    rules = [
        Rule(name, tuple(sites)) for name, sites in sites_of.items() if name != "fp32"
    ]
    return Plan(tuple(rules))


def _sites_by_format(plan: Plan) -> dict[str, int]:
    counts: dict[str, int] = {}
    for rule in plan.rules:
        counts[rule.format] = counts.get(rule.format, 0) + len(rule.sites)
    return counts
