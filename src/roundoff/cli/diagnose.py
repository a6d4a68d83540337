"""``roundoff diagnose``: budget, plan, verify and report in one command."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from roundoff.cli import options as o


def command(
    workload: Annotated[Path, typer.Argument(help="A Python file with model() and batches().")],
    formats: o.Formats = o.DEFAULT_FORMATS,
    target: o.Target = None,
    metric_drop: o.MetricDrop = None,
    cost: o.Cost = "bytes",
    cost_table: o.CostTable = None,
    pin: o.Pin = None,
    allow: o.Allow = None,
    of: o.Part = None,
    probes: o.Probes = None,
    seed: o.Seed = 0,
    output: Annotated[
        Path,
        typer.Option("--output", "-o", help="Folder for the report, budget, plan and summary."),
    ] = Path("out"),
    top: o.Top = 20,
    json: o.Json = False,
) -> int:
    """Say which operators' rounding costs the output most, write the cheapest plan that meets the target, and prove it.

    Writes report.html, budget.parquet, plan.toml and summary.json into the output folder.
    """
    import roundoff
    from roundoff.files import check_folder
    from roundoff.report import print_summary, write_html, write_json

    folder = check_folder(output)
    names = o.split(formats)
    table = o.cost_table(cost, cost_table, names)
    with o.progress(json) as progress:
        found = roundoff.diagnose(
            roundoff.Workload.load(workload), names, target=target, metric_drop=metric_drop, cost=cost,
            cost_table=table, pin=o.pairs(pin, "pin"), allow=o.allowed(allow), part=of, probes=probes, seed=seed,
            progress=progress,
        )  # fmt: skip
    found.budget.save(folder / "budget.parquet")
    found.plan.save(folder / "plan.toml")
    write_html(found.summary, folder / "report.html")
    write_json(found.summary, folder / "summary.json")
    if json:
        print((folder / "summary.json").read_text())
    else:
        console = o.console(False)
        print_summary(found.summary, console, top=top)
        names_written = "report.html, budget.parquet, plan.toml, summary.json"
        console.print(f"Written to {folder}: {names_written}", markup=False)
    return 0 if found.verification.met else 1
