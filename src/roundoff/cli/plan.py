"""``roundoff plan``: the cheapest plan that meets a target, from a budget file."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Annotated

import typer

from roundoff.cli import kinds
from roundoff.cli import options as o


def command(
    budget: Annotated[Path, typer.Argument(help="A file written by roundoff budget.")],
    target: o.Target = None,
    metric_drop: o.MetricDrop = None,
    max_cost: Annotated[
        float | None,
        kinds.option(
            "--max-cost",
            parse=kinds.number(0),
            help="Most the plan may cost (MB, Gbitops or ms).",
            metavar="NUMBER",
        ),
    ] = None,
    formats: Annotated[
        kinds.Names | None,
        kinds.option(
            "--formats",
            "-f",
            parse=kinds.formats,
            help="Only these of the measured formats.",
            metavar="FORMATS",
        ),
    ] = None,
    cost: o.Cost = "bytes",
    cost_table: o.CostTable = None,
    pin: o.Pins = None,
    allow: o.Allow = None,
    tie: o.Tie = "site",
    output: o.PlanOutput = Path("plan.toml"),
    json: o.Json = False,
) -> int:
    """Choose a format for each site: the cheapest plan whose predicted SQNR meets the
    target."""
    from roundoff.budget import Budget, choose
    from roundoff.report import plain, print_plan
    from roundoff.verbs.diagnose import plan_summary

    measured = Budget.load(budget)
    seconds_of = formats or measured.about.formats
    goal = o.goal(target, metric_drop, cost, cost_table, pin, allow, seconds_of)
    chosen = choose(
        measured, replace(goal, max_cost=max_cost, formats=formats, tie=tie)
    )
    chosen.save(output)
    summary = plan_summary(measured, chosen)
    if json:
        o.print_json({**plain(summary), "output": str(output)})
    else:
        console = o.console()
        print_plan(summary, console)
        console.print(f"Written to {output}", markup=False)
    return 0
