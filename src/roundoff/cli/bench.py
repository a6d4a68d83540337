"""``roundoff bench``: train a workload in several configurations side by side."""

from __future__ import annotations

import warnings
from pathlib import Path
from typing import Annotated

import typer

from roundoff.cli import kinds
from roundoff.cli import options as o

#: Warnings that stand among the notes and findings of the report.
REPORTED = ("fp16 on (this|a) CPU", ".*patterns named no site")

DEFAULT_CONFIGS = kinds.Names(("fp32", "bf16"))


def command(
    workload: Annotated[
        Path,
        typer.Argument(
            help="A Python file with model(), batches(), loss() and optimizer()."
        ),
    ],
    configs: Annotated[
        kinds.Names,
        kinds.option(
            "--configs",
            parse=kinds.configs,
            help="What to compare, separated by commas; the first is the reference. Parts "
            "joined by +: fp32, bf16, fp16, tf32, fp64 or a plan file; compile, channels_last, checkpoint, fused, "
            "weights=bf16, updates=stochastic, accumulate=N, scale=static:1024, threads=N, cuda.",
            metavar="CONFIGS",
        ),
    ] = DEFAULT_CONFIGS,
    steps: Annotated[
        int, typer.Option("--steps", min=3, help="Optimizer steps for each seed.")
    ] = 200,
    seeds: Annotated[
        int,
        typer.Option("--seeds", min=1, help="Seeds to train each configuration with."),
    ] = 3,
    output: Annotated[
        Path,
        typer.Option("--output", "-o", help="Folder for report.html and summary.json."),
    ] = Path("out/bench"),
    json: o.Json = False,
) -> int:
    """Train in several configurations side by side: compare speed, memory, loss, metric
    and skipped steps, and judge each difference against the noise between seeds.

    Writes report.html and summary.json into the output folder. The exit code is 1 when
    a configuration fails, or ends worse than the first by more than the seeds explain.
    """
    import roundoff
    from roundoff.files import check_folder
    from roundoff.report import print_bench, write_json

    folder = check_folder(output)
    with o.progress(json) as progress, warnings.catch_warnings():
        for pattern in REPORTED:
            warnings.filterwarnings("ignore", pattern, RuntimeWarning)
        result = roundoff.bench(
            roundoff.Workload.load(workload),
            configs,
            steps=steps,
            seeds=seeds,
            progress=progress,
        )
    result.report(folder / "report.html")
    write_json(result.summary, folder / "summary.json")
    if json:
        print((folder / "summary.json").read_text())
    else:
        console = o.console()
        print_bench(result.summary, console)
        console.print(f"Written to {folder}: report.html, summary.json", markup=False)
    return 0 if result.agrees else 1
