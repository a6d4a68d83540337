"""Is the plan better than what people use? Noise at equal cost, and cost at equal noise, all measured by simulated runs.

Both sides may use the same formats. Against AMP: torch.autocast's fixed operator lists in bf16, in fp16, and the better
of the two against a plan that mixes both. Against greedy by weight SQNR: sites with weights are lowered in the order of
the SQNR of their weights in the format, best first, until a cost is reached (a third and two thirds of the way down).
The plan's own noise at equal cost is measured without verify; at equal noise the plan is verified against the baseline's
measured noise. Bar: at least 3 dB better at equal cost, or at least 15 % cheaper at equal noise.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence

import torch
from common import FORMATS, measured_noise, options, progress, table, workloads
from one_site import find_sites

import roundoff as ro
from roundoff.budget import Budget, Goal, Problem
from roundoff.errors import PlanError
from roundoff.formats import parse_format
from roundoff.ops import round_operand, watch
from roundoff.plan import noise, run_batches
from roundoff.train import SimulatedAutocast
from roundoff.workload import Workload, target_tensors

BAR_DB, BAR_COST = 3.0, 15.0
HALVES = ("bf16", "fp16")
#: What greedy and the plan may use.
OFFERED = (("int8",), ("fp8_e4m3fn",), ("int8", "fp8_e4m3fn"), FORMATS)
Targets = list[dict[str, torch.Tensor]]


def main() -> None:
    args = options(__doc__)
    header = (
        "workload",
        "cost",
        "baseline",
        "plan's formats",
        "cost of fp32",
        "baseline dB",
        "plan dB at equal cost",
        "gain, dB",
        "cheaper at equal noise",
        "bar",
    )
    amp_rows, greedy_rows = [], []
    for name, workload in workloads(args, ("minilm", "digits", "gpt2", "resnet18")):
        budget = ro.budget(workload, FORMATS)
        reference = run_batches(workload).targets
        amp = {fmt: _autocast(workload, reference, fmt, budget) for fmt in HALVES}
        better = min(HALVES, key=lambda fmt: amp[fmt][1])
        pairs = [(fmt, (fmt,)) for fmt in HALVES] + [(better, HALVES)]
        for model in ("bytes",) if args.quick else ("bytes", "bitops"):
            for fmt, allowed in pairs:
                row = _compare(workload, budget, reference, model, allowed, *amp[fmt])
                amp_rows.append((name, model, f"AMP {fmt}", *row))
            for offered in OFFERED[:1] if args.quick else OFFERED:
                problem = Problem(budget, Goal(cost=model))
                order = _greedy(workload, problem, offered)
                for part in (1 / 3,) if args.quick else (1 / 3, 2 / 3):
                    formats = _until(problem, order, part)
                    level = measured_noise(workload, formats, reference)
                    row = _compare(
                        workload, budget, reference, model, offered, formats, level
                    )
                    greedy_rows.append((name, model, f"greedy {_short(offered)}", *row))
            progress(f"{name} {model}")
    table("Against AMP's fixed operator lists", header, amp_rows)
    table("Against greedy by weight SQNR", header, greedy_rows)


def _short(formats: Sequence[str]) -> str:
    return "default four" if len(formats) == len(FORMATS) else ", ".join(formats)


def _compare(
    workload: Workload,
    budget: Budget,
    reference: Targets,
    model: str,
    allowed: Sequence[str],
    baseline: Mapping[str, str],
    level: float,
) -> tuple[object, ...]:
    goal = Goal(cost=model, formats=allowed)
    problem = Problem(budget, goal)
    cost, full = problem.cost_of(baseline), problem.cost_of({})
    plan = budget.plan(max_cost=cost * (1 + 1e-9), cost=model, formats=allowed)
    base_db, db = (
        _db(level),
        _db(measured_noise(workload, plan.formats(problem.info), reference)),
    )
    try:
        equal = budget.plan(base_db, cost=model, formats=allowed)
        found = ro.verify(
            workload,
            equal,
            budget=budget,
            native=False,
            goal=goal,
        )
        saved = (
            100 * (1 - problem.cost_of(found.plan.formats(problem.info)) / cost)
            if found.met
            else None
        )
    except PlanError:
        saved = None
    good = db - base_db >= BAR_DB or (saved is not None and saved >= BAR_COST)
    return (
        _short(allowed),
        f"{100 * cost / full:.0f} %",
        f"{base_db:.1f}",
        f"{db:.1f}",
        f"{db - base_db:+.1f}",
        "target missed" if saved is None else f"{saved:+.0f} %",
        "met" if good else "**missed**",
    )


def _autocast(
    workload: Workload, reference: Targets, fmt: str, budget: Budget
) -> tuple[dict[str, str], float]:
    """What autocast lowers to ``fmt``, and the noise of doing so.

    Sites that no gradient reaches cost no noise and stay in fp32 in every plan: they
    are left out of both sides.
    """
    handler, targets = SimulatedAutocast(parse_format(fmt), "cuda"), []
    with torch.no_grad(), watch(workload.model, handler) as mode:
        for batch in workload.batches:
            mode.begin()
            with mode:
                targets.append(target_tensors(workload.run(batch), None))
    lowered = {
        s.site: handler.chosen[s.site]
        for s in budget.sites
        if s.site in handler.chosen and s.site in handler.sites and not s.no_path
    }
    return lowered, noise(targets, reference)


def _greedy(
    workload: Workload, problem: Problem, offered: Sequence[str]
) -> list[tuple[str, str]]:
    """Moves (group of tied sites, format), best weight SQNR first."""
    targets, moves = find_sites(workload), []
    for name, group in problem.groups.items():
        for fmt in offered:
            signal = error = 0.0
            for site in group:
                for operand in (
                    targets[site].template.operands if site in targets else ()
                ):
                    for source in operand.sources if operand.role == "weight" else ():
                        w = workload.model.get_parameter(source).detach()
                        signal += float(w.double().square().sum())
                        error += float(
                            (round_operand(w, operand, parse_format(fmt)) - w)
                            .double()
                            .square()
                            .sum()
                        )
            if signal and not any(fmt in problem.info[s].refused for s in group):
                moves.append((-_db(error / signal), name, fmt))
    return [(name, fmt) for _, name, fmt in sorted(moves)]


def _until(
    problem: Problem, order: Sequence[tuple[str, str]], part: float
) -> dict[str, str]:
    """The first moves that bring the cost ``part`` of the way down to what all moves reach."""

    def walk(stop: Callable[[float], bool]) -> dict[str, str]:
        formats: dict[str, str] = {}
        cost = problem.cost_of(formats)
        for name, fmt in order:
            moved = formats | dict.fromkeys(problem.groups[name], fmt)
            if problem.cost_of(moved) < cost:
                formats, cost = moved, problem.cost_of(moved)
            if stop(cost):
                break
        return formats

    full, lowest = problem.cost_of({}), problem.cost_of(walk(lambda _: False))
    return walk(lambda cost: cost <= full - part * (full - lowest))


def _db(relative: float) -> float:
    return -10 * math.log10(relative) if relative > 0 else math.inf


if __name__ == "__main__":
    main()
