"""``roundoff plan``: the cheapest plan that meets a target, from a budget file."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Annotated

import typer

from roundoff.cli import options as o


def command(
    budget: Annotated[Path, typer.Argument(help="A file written by roundoff budget.")],
    target: o.Target = None,
    metric_drop: o.MetricDrop = None,
    max_cost: Annotated[
        float | None,
        typer.Option("--max-cost", help="Most the plan may cost (MB, Gbitops or ms)."),
    ] = None,
    formats: Annotated[
        str | None,
        typer.Option("--formats", "-f", help="Only these of the measured formats."),
    ] = None,
    cost: o.Cost = "bytes",
    cost_table: o.CostTable = None,
    pin: o.Pin = None,
    allow: o.Allow = None,
    output: Annotated[
        Path, typer.Option("--output", "-o", help="The plan to write (.toml or .json).")
    ] = Path("plan.toml"),
    json: o.Json = False,
) -> int:
    """Choose a format for each site: the cheapest plan whose predicted SQNR meets the
    target."""
    from roundoff.budget import Budget, choose
    from roundoff.report import plain, print_plan
    from roundoff.verbs.diagnose import plan_summary

    measured = Budget.load(budget)
    names = None if formats is None else o.split(formats)
    seconds_of = names or measured.about.formats
    goal = o.goal(target, metric_drop, cost, cost_table, pin, allow, seconds_of)
    chosen = choose(measured, replace(goal, max_cost=max_cost, formats=names))
    chosen.save(output)
    summary = plan_summary(measured, chosen)
    if json:
        o.print_json({**plain(summary), "output": str(output)})
    else:
        console = o.console(False)
        print_plan(summary, console)
        console.print(f"Written to {output}", markup=False)
    return 0
