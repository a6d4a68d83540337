"""``roundoff verify``: run a plan and put prediction and measurement side by side."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from roundoff.cli import kinds
from roundoff.cli import options as o


def command(
    workload: Annotated[
        Path, typer.Argument(help="A Python file with model() and batches().")
    ],
    plan: Annotated[
        Path, typer.Argument(help="A plan written by roundoff plan or diagnose.")
    ],
    budget: Annotated[
        Path | None,
        kinds.option(
            "--budget",
            "-b",
            parse=kinds.input_file,
            help="The budget of the plan: mends the plan where it misses.",
            metavar="FILE",
        ),
    ] = None,
    target: o.Target = None,
    metric_drop: o.MetricDrop = None,
    of: o.Part = None,
    native: Annotated[
        bool,
        typer.Option(help="Also run with real casts where this device has the format."),
    ] = True,
    output: Annotated[
        Path | None,
        kinds.option(
            "--output",
            "-o",
            parse=kinds.plan_file,
            help="Where to write the mended plan.",
            metavar="FILE",
        ),
    ] = None,
    json: o.Json = False,
) -> int:
    """Run a plan by simulated rounding, measure SQNR of each output and metric, and say
    whether the target is met."""
    import roundoff
    from roundoff.files import check_folder
    from roundoff.report import print_verify

    written = roundoff.Plan.load(plan)
    if output is not None:
        check_folder(output.parent)
    measured = None if budget is None else roundoff.Budget.load(budget)
    with o.progress(json) as progress:
        proof = roundoff.verify(
            roundoff.Workload.load(workload),
            written,
            budget=measured,
            target=target,
            metric_drop=metric_drop,
            of=of,
            native=native,
            progress=progress,
        )
    if output is not None:
        proof.plan.save(output)
    if json:
        o.print_json(proof.summary())
    else:
        print_verify(proof.summary(), o.console())
    return 0 if proof.met else 1
