"""``roundoff capture``: run a script and record what its operators compute."""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from roundoff.cli import kinds
from roundoff.cli import options as o
from roundoff.cli.plain_output import output_of_script

if TYPE_CHECKING:
    from roundoff.record import CaptureSummary


def command(
    script: o.Script,
    output: Annotated[
        Path,
        typer.Option(
            "--output", "-o", help="The folder of the run; must not hold one yet."
        ),
    ],
    steps: Annotated[
        str,
        kinds.option(
            "--steps",
            parse=kinds.steps,
            help="Steps to record: 0-1, 3:5,100 or all.",
            metavar="STEPS",
        ),
    ] = "0-1",
    level: Annotated[
        str,
        kinds.option(
            "--level",
            parse=kinds.level,
            help="op (every operator call) or module.",
            metavar="LEVEL",
        ),
    ] = "op",
    keep: Annotated[
        str,
        kinds.option(
            "--keep",
            parse=kinds.keep,
            help="stats, or also tensors, sample or hash.",
            metavar="KEEP",
        ),
    ] = "stats",
    leaves: Annotated[
        float,
        kinds.option(
            "--leaves",
            parse=kinds.mebibytes,
            help="MiB a step that parameters, buffers and data may take beside stats, "
            "so that all else can be computed again; 0 keeps none.",
            metavar="MIB",
        ),
    ] = 8.0,
    shadow: Annotated[
        str | None,
        kinds.option(
            "--shadow",
            parse=kinds.choice(("fp64",)),
            help="fp64: run every operator again in fp64 beside itself.",
            metavar="FORMAT",
        ),
    ] = None,
    sites: Annotated[
        list[str] | None,
        kinds.option(
            "--site",
            "-s",
            parse=kinds.pattern,
            help="Pattern module/operator of calls to record. Repeatable.",
            metavar="PATTERN",
        ),
    ] = None,
    seed: Annotated[
        int,
        kinds.option(
            "--seed",
            parse=kinds.seed,
            help="Seed of --keep sample.",
            metavar="INTEGER",
        ),
    ] = 0,
    eager: Annotated[
        bool,
        typer.Option(
            "--eager", help="Run compiled code uncompiled, to see its operators."
        ),
    ] = False,
    stop: Annotated[
        bool, typer.Option("--stop", help="End the script after the last of the steps.")
    ] = False,
    whole: Annotated[
        bool, typer.Option("--whole", help="Record the whole script as one step.")
    ] = False,
    noise: Annotated[
        int,
        typer.Option(
            "--noise",
            min=0,
            help="Record N more times with random last bits: OUTPUT.noise1, ...",
        ),
    ] = 0,
    repeats: Annotated[
        int,
        typer.Option(
            "--repeats",
            min=0,
            help="Record N more times, unchanged: OUTPUT.repeat1, ...",
        ),
    ] = 0,
    overwrite: Annotated[
        bool, typer.Option("--overwrite", help="Replace a run in the folder.")
    ] = False,
    json: o.Json = False,
) -> int:
    """Run a training script unchanged and record every operator call of its first steps.

    With --json the object alone goes to standard output, and what the script prints to
    standard error. A recording that failed is replaced by the next one in its folder.
    """
    from roundoff.cli.repeats import Repeats
    from roundoff.record import capture_script, load, summarize_capture
    from roundoff.report import print_captured

    options: dict[str, Any] = {
        "stop": stop,
        "whole": whole,
        "steps": steps,
        "level": level,
        "keep": keep,
        "leaves": leaves,
        "shadow": shadow,
        "sites": sites or (),
        "seed": seed,
        "eager": eager,
        "overwrite": overwrite,
    }
    further = Repeats(output, noise, repeats, overwrite=overwrite, level=level)
    with o.script_aside() if json else output_of_script():
        run = capture_script(script, output, **options)
        further.record(script, run.identity, options)
    # one of several processes speaks, of its own part: the others may still be writing
    if run.rank != 0:
        return 0
    summary = summarize_capture(
        load(run.path),
        run.rank,
        str(output),
        noise=further.paths("noise"),
        repeats=further.paths("repeat"),
    )
    if json:
        o.print_json(_as_json(summary))
    else:
        print_captured(summary, o.console())
    return 0


def _as_json(summary: CaptureSummary) -> dict[str, Any]:
    """The summary with one object ``coverage`` of what was seen and measured."""
    calls = {} if summary.calls is None else asdict(summary.calls)
    tensors = {} if summary.tensors is None else asdict(summary.tensors)
    return {
        "path": summary.path,
        "steps": summary.steps,
        "ranks": summary.ranks,
        "coverage": {**calls, **tensors},
        "noise": summary.noise,
        "repeats": summary.repeats,
    }
