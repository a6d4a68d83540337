"""``roundoff tune``: the plan of formats for training that is more exact than built-in
autocast, verified by real steps.
"""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from roundoff.cli import options as o


def command(
    workload: Annotated[
        Path, typer.Argument(help="A Python file with model(), batches() and loss().")
    ],
    formats: o.Formats = "bf16",
    loss: Annotated[
        bool,
        typer.Option(
            "--loss/--no-loss", help="The loss counts as a target beside the gradients."
        ),
    ] = True,
    aim: Annotated[
        str,
        typer.Option(
            "--aim",
            help="equal: most exact at autocast's cost; more: with --extra on top; cheapest: as exact.",
        ),
    ] = "equal",
    extra: Annotated[
        float,
        typer.Option(
            "--extra", min=0.0, help="Share that --aim more may cost beyond autocast."
        ),
    ] = 0.2,
    device: Annotated[
        str | None,
        typer.Option(
            "--device",
            help="Whose autocast lists are the baseline; the model's by default.",
        ),
    ] = None,
    steps: Annotated[
        int, typer.Option("--steps", min=1, help="Real training steps of each run.")
    ] = 20,
    runs: Annotated[
        int,
        typer.Option(
            "--runs", min=3, help="Runs at most: fp32, built-in autocast, and plans."
        ),
    ] = 5,
    batches: Annotated[
        int, typer.Option("--batches", min=1, help="Batches that the budget measures.")
    ] = 4,
    cost: o.Cost = "bytes",
    cost_table: o.CostTable = None,
    pin: o.Pin = None,
    allow: o.Allow = None,
    probes: Annotated[
        int | None,
        typer.Option(
            "--probes", min=1, help="Sign vectors over the gradients, a batch."
        ),
    ] = None,
    seed: o.Seed = 0,
    output: Annotated[
        Path, typer.Option("--output", "-o", help="The plan to write (.toml or .json).")
    ] = Path("plan.toml"),
    top: o.Top = 20,
    json: o.Json = False,
) -> int:
    """Find which operators must stay in high precision in training, and prove it over
    real steps, in at most five runs.

    The exit code is 0 when the plan's measured gradients are better than those of
    built-in autocast, as --aim asks.
    """
    import roundoff
    from roundoff.report import print_tuning

    names = o.split(formats)
    with o.progress(json) as progress:
        tuning = roundoff.tune(
            roundoff.Workload.load(workload),
            names,
            loss=loss,
            aim=aim,  # type: ignore[arg-type]
            extra=extra,
            cost=cost,
            cost_table=o.cost_table(cost, cost_table, names),
            pin=o.pairs(pin, "pin"),
            allow=o.allowed(allow),
            device=device,
            steps=steps,
            runs=runs,
            batches=batches,
            probes=probes,
            seed=seed,
            progress=progress,
        )
    tuning.plan.save(output)
    if json:
        o.print_json({**tuning.to_dict(), "output": str(output)})
    else:
        console = o.console(False)
        print_tuning(tuning, console, top=top)
        console.print(f"Written to {output}", markup=False)
    return 0 if tuning.met else 1
