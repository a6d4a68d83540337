"""``roundoff tune``: the plan of formats for training that is more exact than built-in
autocast, verified by real steps.
"""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from roundoff.cli import kinds
from roundoff.cli import options as o

DEFAULT_FORMATS = kinds.Names(("bf16",))


def command(
    workload: Annotated[
        Path, typer.Argument(help="A Python file with model(), batches() and loss().")
    ],
    formats: o.Formats = DEFAULT_FORMATS,
    loss: Annotated[
        bool,
        typer.Option(
            "--loss/--no-loss", help="The loss counts as a target beside the gradients."
        ),
    ] = True,
    aim: Annotated[
        str,
        kinds.option(
            "--aim",
            parse=kinds.choice(("equal", "more", "cheapest")),
            help="equal: most exact at autocast's cost; more: with --extra on top; cheapest: as exact.",
            metavar="AIM",
        ),
    ] = "equal",
    extra: Annotated[
        float,
        kinds.option(
            "--extra",
            parse=kinds.number(0),
            help="Share that --aim more may cost beyond autocast.",
            metavar="NUMBER",
        ),
    ] = 0.2,
    device: Annotated[
        str | None,
        kinds.option(
            "--device",
            parse=kinds.device_type,
            help="Whose autocast lists are the baseline; the model's by default.",
            metavar="DEVICE",
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
    pin: o.Pins = None,
    allow: o.Allow = None,
    tie: o.Tie = "site",
    probes: Annotated[
        int | None,
        typer.Option(
            "--probes", min=1, help="Sign vectors over the gradients, a batch."
        ),
    ] = None,
    seed: o.Seed = 0,
    output: o.PlanOutput = Path("plan.toml"),
    rows: o.Rows = 20,
    json: o.Json = False,
) -> int:
    """Find which operators must stay in high precision in training, and prove it over
    real steps, in at most five runs.

    The exit code is 0 when the plan's measured gradients are better than those of
    built-in autocast, as --aim asks.
    """
    import roundoff
    from roundoff.files import check_folder
    from roundoff.report import print_tuning

    check_folder(output.parent)
    with o.progress(json) as progress:
        tuning = roundoff.tune(
            roundoff.Workload.load(workload),
            formats,
            loss=loss,
            aim=aim,  # type: ignore[arg-type]
            extra=extra,
            cost=cost,
            cost_table=o.cost_table(cost, cost_table, formats),
            pin=o.pins(pin),
            allow=o.allowed(allow),
            tie=tie,
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
        console = o.console()
        print_tuning(tuning, console, top=rows)
        console.print(f"Written to {output}", markup=False)
    return 0 if tuning.met else 1
