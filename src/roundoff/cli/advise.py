"""``roundoff advise``: where the time goes, and what each speed-up costs in precision."""

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
    train: Annotated[
        bool, typer.Option("--train", help="Whole training steps, not forward passes.")
    ] = False,
    least: Annotated[
        float,
        kinds.option(
            "--least",
            parse=kinds.decibels,
            help="SQNR that a change must keep to be a winner, such as 40dB.",
            metavar="DB",
        ),
    ] = 40.0,
    try_compile: Annotated[
        bool, typer.Option("--compile", help="Try torch.compile too: up to minutes.")
    ] = False,
    seconds: Annotated[
        float,
        kinds.option(
            "--seconds",
            parse=kinds.number(0),
            help="Seconds for the turns of each trial.",
            metavar="NUMBER",
        ),
    ] = 2.0,
    html: Annotated[
        Path | None, typer.Option("--html", help="Write one HTML page.", metavar="FILE")
    ] = None,
    apply: Annotated[
        Path | None,
        kinds.option(
            "--apply",
            parse=kinds.toml_file,
            help="Write the winners (TOML).",
            metavar="FILE",
        ),
    ] = None,
    trace: Annotated[
        Path | None,
        typer.Option(
            "--trace",
            help="Write a Chrome trace (JSON), which Perfetto opens.",
            metavar="FILE",
        ),
    ] = None,
    rows: o.Rows = 12,
    json: o.Json = False,
) -> int:
    """Say where the time of a workload goes: FLOPs, MACs and bytes of each operator,
    its time, and what this machine could reach; try what may be faster, and show speed
    and precision side by side.

    The exit code is 0 when the workload could be measured, 2 for bad input.
    """
    import roundoff
    from roundoff.report import print_advice

    with o.progress(json) as progress:
        answer = roundoff.advise(
            roundoff.Workload.load(workload),
            train,
            least_db=least,
            try_compile=try_compile,
            seconds=seconds,
            trace=trace,
            progress=progress,
        )
    if html is not None:
        answer.report(html)
    if apply is not None:
        answer.write(apply)
    if json:
        o.print_json(answer.summary)
    else:
        print_advice(answer.summary, o.console(), rows=rows)
    return 0
