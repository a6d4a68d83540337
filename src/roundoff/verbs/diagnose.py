"""``roundoff.diagnose``: budget, plan, verify, and everything a report shows, as plain data."""

from __future__ import annotations

import math
import time
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, overload

from roundoff.budget import Budget, Problem, Progress, budget, choose, parse_drop
from roundoff.errors import InfeasibleError, RunError
from roundoff.plan import Plan, noise, run_batches
from roundoff.verbs.verify import Verification, verify
from roundoff.workload import Workload

if TYPE_CHECKING:
    from roundoff.verbs.diagnose_candidate import CandidateDiagnosis

#: What is aimed for when nothing is asked: errors a hundredth of the output.
DEFAULT_TARGET = "40dB"
PARETO_POINTS = 10
SCATTER_SITES = 48


@dataclass(frozen=True)
class Diagnosis:
    """The budget, the plan that stands, its verification, and the summary that reports and JSON show."""

    budget: Budget
    plan: Plan
    verification: Verification
    summary: dict[str, Any]


@overload
def diagnose(
    workload: Workload,
    formats: Iterable[str] = ...,
    *,
    candidate: None = None,
    progress: Progress | None = None,
    **options: Any,
) -> Diagnosis: ...
@overload
def diagnose(
    workload: Workload,
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
    workload: Workload,
    formats: Iterable[str] = ("bf16", "fp16", "fp8_e4m3fn", "int8"),
    *,
    target: float | str | None = None,
    metric_drop: float | str | None = None,
    cost: str = "bytes",
    cost_table: Any = None,
    pin: Mapping[str, str] | None = None,
    allow: Mapping[str, Sequence[str]] | None = None,
    part: str | None = None,
    probes: int | None = None,
    seed: int = 0,
    progress: Progress | None = None,
    candidate: str | Path | None = None,
    **recording: Any,
) -> Any:
    """Which operators' rounding costs the output most, the cheapest plan that meets the target, and the proof.

    ``target`` in dB (40 by default) or ``metric_drop``; ``part`` names what is measured (see ``roundoff.budget``);
    ``cost``, ``pin`` and ``allow`` as in ``Budget.plan``. The model is left as it was. Raises what ``budget``, ``plan``
    and ``verify`` raise.

    With a ``candidate`` (``bf16`` or ``fp16``, ``compile`` with its ``backend``, a device, ``channels_last``, ``threads=N``,
    ``mkldnn=off``, ``float64``, or another workload file) both are recorded for ``steps`` batches into the folder
    ``output`` (one that is deleted again where it is None), ``noise`` more times with random last bits, and compared; see
    ``CandidateDiagnosis``, which is what this gives then. For a format the rest follows with it, ``formats`` is not used.
    """
    options = {
        "target": target,
        "metric_drop": metric_drop,
        "cost": cost,
        "cost_table": cost_table,
        "pin": pin,
        "allow": allow,
        "part": part,
        "probes": probes,
        "seed": seed,
    }
    if candidate is not None:
        from roundoff.verbs.diagnose_candidate import diagnose_candidate

        return diagnose_candidate(
            workload, candidate, progress=progress, **recording, **options
        )
    if recording:
        raise RunError(
            "only used with a candidate",
            where=", ".join(recording),
            do="give candidate=, such as 'bf16'",
        )
    return _diagnose(workload, formats, progress=progress, **options)


def _diagnose(
    workload: Workload,
    formats: Iterable[str],
    *,
    target: float | str | None,
    metric_drop: float | str | None,
    cost: str,
    cost_table: Any,
    pin: Mapping[str, str] | None,
    allow: Mapping[str, Sequence[str]] | None,
    part: str | None,
    probes: int | None,
    seed: int,
    progress: Progress | None,
) -> Diagnosis:
    clock = [time.perf_counter()]
    if target is None and metric_drop is None:
        target = DEFAULT_TARGET
    measured = budget(
        workload, formats, probes=probes, target=part, seed=seed, progress=progress
    )
    clock.append(time.perf_counter())
    plan = choose(
        measured,
        target=target,
        metric_drop=metric_drop,
        cost=cost,
        cost_table=cost_table,
        pin=pin or {},
        allow=allow or {},
    )

    def problem(of: Budget) -> Problem:
        return Problem(of, cost, cost_table, pin or {}, allow or {})

    task = problem(measured)
    curve = pareto(task, plan)
    clock.append(time.perf_counter())
    drop = None if metric_drop is None else parse_drop(metric_drop)
    proof = verify(
        workload,
        plan,
        budget=measured,
        metric_drop=drop,
        problem=problem,
        progress=progress,
    )
    points = scatter(workload, measured, proof.plan, part, progress)
    clock.append(time.perf_counter())
    summary = summarise(
        measured, proof, curve, points, str(metric_drop if target is None else target)
    )
    names = ("budget", "plan", "verify")
    summary["seconds"] = {
        n: b - a for n, a, b in zip(names, clock, clock[1:], strict=False)
    }
    return Diagnosis(measured, proof.plan, proof, summary)


def pareto(task: Problem, plan: Plan) -> list[dict[str, float]]:
    """Cost of the cheapest plan at evenly spaced targets, from everything in its cheapest format to almost exact."""
    lowest, _ = task.lowest()
    low = task.budget.predict(lowest).db
    asked = float(plan.about["target_db"] or low)
    low = max(low if math.isfinite(low) else 0.0, 0.0)
    high = max(asked + 15.0, low + 30.0)
    full = task.cost_of({})
    points = []
    for index in range(PARETO_POINTS):
        goal = low + (high - low) * index / (PARETO_POINTS - 1)
        try:
            chosen = task.cheapest(goal)
        except InfeasibleError:
            break
        predicted = task.budget.predict(chosen).db
        if math.isfinite(predicted):
            value = task.cost_of(chosen)
            points.append(
                {
                    "target_db": goal,
                    "predicted_db": predicted,
                    "cost": value,
                    "relative_cost": value / full,
                }
            )
    return points


def scatter(
    workload: Workload,
    measured: Budget,
    plan: Plan,
    part: str | None,
    progress: Progress | None = None,
) -> list[dict[str, Any]]:
    """Each of up to 48 sites, spread over the ranking, rounded alone on the first batch: predicted beside measured.

    The format is the plan's for that site, or the first one measured where the plan leaves the site alone.
    """
    formats = plan.formats(s["site"] for s in measured.sites)
    rows = [r for r in measured.table.iter_rows(named=True) if r["sqnr_db"] is not None]
    default = measured.about["formats"][0]
    rows = [r for r in rows if r["format"] == formats.get(r["site"], default)]
    step = max(1, math.ceil(len(rows) / SCATTER_SITES))
    first = slice(0, 1)
    reference = run_batches(workload, target=part, batches=first).targets
    points = []
    for index, row in enumerate(rows[::step]):
        if progress is not None:
            progress("one site at a time", index, len(rows[::step]))
        alone = {row["site"]: row["format"]}
        predicted = measured.predict(alone, batch=0).db
        error = noise(
            run_batches(workload, alone, target=part, batches=first).targets, reference
        )
        if 0 < error < math.inf and math.isfinite(predicted):
            points.append(
                {
                    "site": row["site"],
                    "format": row["format"],
                    "predicted_db": predicted,
                    "measured_db": -10 * math.log10(error),
                }
            )
    return points


def summarise(
    measured: Budget,
    proof: Verification,
    curve: list[dict[str, float]],
    points: list[dict[str, Any]],
    asked: str,
) -> dict[str, Any]:
    """Everything a report shows, as plain data (``summary.json``)."""
    about, plan = measured.about, proof.plan
    formats = plan.formats(s["site"] for s in measured.sites)
    ranking = ranked(measured, formats)
    return {
        "version": about["version"],
        "workload": about["workload"],
        "formats": about["formats"],
        "probes": about["probes"],
        "samples": about["samples"],
        "environment": about["environment"],
        "target": {
            "asked": asked,
            "sqnr_db": proof.target_db,
            "note": plan.about.get("note") or "",
        },
        "coverage": coverage(measured),
        "ranking": ranking,
        "plan": plan_summary(measured, plan),
        **proof.summary(),
        "pareto": curve,
        "scatter": points,
    }


def plan_summary(measured: Budget, plan: Plan) -> dict[str, Any]:
    """The plan in numbers: sites in each format, cost against all-fp32 and all-lowest, predicted SQNR in dB."""
    formats = plan.formats(s["site"] for s in measured.sites)
    counts = Counter(formats.get(s["site"], "fp32") for s in measured.sites)
    about = plan.about
    return {
        "sites": dict(counts.most_common()),
        "rules": len(plan.rules),
        "target_db": about["target_db"],
        "predicted_db": about["predicted_db"],
        "note": about["note"],
        "cost": {
            "model": about["cost_model"],
            "unit": about["unit"],
            "plan": about["cost"],
            "fp32": about["cost_fp32"],
            "lowest": about["cost_lowest"],
            "lowest_format": about["lowest_format"],
        },
    }


def ranked(measured: Budget, formats: Mapping[str, str]) -> list[dict[str, Any]]:
    """The ranked table as plain rows, worst first, with the format the plan chose for each site."""
    keys = (
        "site",
        "operator",
        "kind",
        "format",
        "sqnr_db",
        "stderr_db",
        "share",
        "activation_db",
        "weight_db",
        "output_db",
    )
    return [
        {
            "rank": rank,
            **{k: row[k] for k in keys},
            "chosen": formats.get(row["site"], "fp32"),
            "note": row["note"],
        }
        for rank, row in enumerate(measured.table.iter_rows(named=True), 1)
    ]


def coverage(measured: Budget) -> dict[str, Any]:
    """How many operators became sites, and each kind that did not, with the reason."""
    sites, excluded = measured.sites, measured.about["excluded"]
    refused: Counter[tuple[str, str]] = Counter()
    examples: dict[tuple[str, str], list[str]] = {}
    for site in sites:
        if not site["no_path"] and set(site["refused"]) == set(
            measured.about["formats"]
        ):
            key = (site["operator"], "; ".join(sorted(set(site["refused"].values()))))
            refused[key] += 1
            examples.setdefault(key, []).append(site["site"])
    rows = [{**e, "where": "not a site"} for e in excluded]
    rows += [
        {
            "operator": o,
            "reason": r,
            "count": n,
            "examples": examples[o, r][:3],
            "where": "a site in no format",
        }
        for (o, r), n in refused.items()
    ]
    return {
        "calls": measured.about["calls"],
        "sites": len(sites),
        "params": len({p for s in sites for p in s["params"]}),
        "excluded": sorted(rows, key=lambda e: -e["count"]),
        "no_path": [f"{s['site']}: {s['no_path']}" for s in sites if s["no_path"]],
    }
