"""The options that several verbs share, and how their text becomes arguments."""

from __future__ import annotations

import math
import os
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, redirect_stdout
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, TextIO

import typer

from roundoff.cli import kinds
from roundoff.cli.loading import be_still
from roundoff.cli.talk import talk
from roundoff.errors import PlanError

if TYPE_CHECKING:
    from rich.console import Console

    from roundoff.budget import Goal, Progress

Script = Annotated[
    list[str],
    typer.Argument(
        help="After --: a script and its arguments, or -m and a module.",
        metavar="-- SCRIPT [ARGS]...",
    ),
]
Run = Annotated[
    str,
    typer.Argument(
        parser=kinds.run, help="The folder of a run, or its URL.", metavar="RUN"
    ),
]
ModuleMap = Annotated[
    Path | None,
    kinds.option(
        "--map",
        parse=kinds.module_map,
        help='TOML file: lines "module.of.reference" = "module.of.candidate".',
        metavar="FILE",
    ),
]
Formats = Annotated[
    kinds.Names,
    kinds.option(
        "--formats",
        "-f",
        parse=kinds.formats,
        help="Number formats to measure, separated by commas.",
        metavar="FORMATS",
    ),
]
Target = Annotated[
    str | None,
    kinds.option(
        "--target",
        "-t",
        parse=kinds.target,
        help="Least SQNR of every output, such as 40dB; of each: cls=40dB,price=30dB; "
        "or most the metric may lose: 0.5%.",
        metavar="TARGET",
    ),
]
MetricDrop = Annotated[
    str | None,
    kinds.option(
        "--metric-drop",
        parse=kinds.drop,
        help="Most the metric may lose, such as 0.5% (of 1) or 0.005.",
        metavar="DROP",
    ),
]
Cost = Annotated[
    str,
    kinds.option(
        "--cost",
        parse=kinds.cost,
        help="What to save: bytes moved, storage, bitops, seconds, or operators in fp32.",
        metavar="COST",
    ),
]
CostTable = Annotated[
    Path | None,
    kinds.option(
        "--cost-table",
        parse=kinds.input_file,
        help="Seconds per operation (TOML, JSON or CSV); measured here when left out.",
        metavar="FILE",
    ),
]
Pins = Annotated[
    list[kinds.Pin] | None,
    kinds.option(
        "--pin",
        parse=kinds.pin,
        help="PATTERN=FORMAT: these sites run in this format. Repeatable.",
        metavar="PIN",
    ),
]
Allow = Annotated[
    list[kinds.Allowed] | None,
    kinds.option(
        "--allow",
        parse=kinds.allowed,
        help="PATTERN=FORMAT,FORMAT: these sites may use these formats. Repeatable.",
        metavar="ALLOWED",
    ),
]
Tie = Annotated[
    str,
    kinds.option(
        "--tie",
        parse=kinds.tie,
        help="What runs in one format: each site, all calls of an operator, or an operator "
        "type of ascend, paddle or tensorflow.",
        metavar="WHAT",
    ),
]
Part = Annotated[
    str | None,
    kinds.option(
        "--of",
        parse=kinds.pattern,
        help="Measure a part of the output by name, a site, or 'loss'. Default: every output "
        "but numbers beside larger tensors.",
        metavar="NAME",
    ),
]
Probes = Annotated[
    int | None,
    typer.Option(
        "--probes",
        min=1,
        help="Probe vectors a sample; as many as the precision needs when left out.",
    ),
]
Precision = Annotated[
    float | None,
    kinds.option(
        "--precision",
        parse=kinds.decibels,
        help="Standard error of a site's SQNR at which measuring may end. Default: 0.6dB.",
        metavar="DB",
    ),
]
Memory = Annotated[
    int | None,
    kinds.option(
        "--memory",
        parse=kinds.size,
        help="What probe gradients may take, such as 512MB. Default: 128MB.",
        metavar="SIZE",
    ),
]
Trials = Annotated[
    int | None,
    typer.Option(
        "--trials",
        min=0,
        help="Most rows to measure by running the model with that operator rounded.",
    ),
]
Seed = Annotated[
    int,
    kinds.option(
        "--seed",
        parse=kinds.seed,
        help="Seed of the probe vectors.",
        metavar="INTEGER",
    ),
]
PlanOutput = Annotated[
    Path,
    kinds.option(
        "--output",
        "-o",
        parse=kinds.plan_file,
        help="The plan to write (.toml or .json).",
        metavar="FILE",
    ),
]
Rank = Annotated[
    int | None, typer.Option("--rank", min=0, help="Only this rank: a process.")
]
Step = Annotated[int | None, typer.Option("--step", min=0, help="Only this step.")]
Phase = Annotated[
    str | None,
    kinds.option(
        "--phase",
        parse=kinds.phase,
        help="Only forward, backward, optimizer or collective.",
        metavar="PHASE",
    ),
]
Json = Annotated[
    bool, typer.Option("--json", help="Print one JSON object and nothing else.")
]
Rows = Annotated[
    int, typer.Option("--rows", "-l", min=1, help="Rows of each table to print.")
]

DEFAULT_FORMATS = kinds.Names(("bf16", "fp16", "fp8_e4m3fn", "int8"))


def pins(options: Sequence[kinds.Pin] | None) -> dict[str, str]:
    """Return the format of each pattern."""
    return {option.pattern: option.format for option in options or ()}


def allowed(options: Sequence[kinds.Allowed] | None) -> dict[str, list[str]]:
    """Return the formats of each pattern."""
    return {option.pattern: list(option.formats) for option in options or ()}


def goal(
    target: str | None,
    metric_drop: str | None,
    cost: str,
    table: Path | None,
    pin: Sequence[kinds.Pin] | None,
    allow: Sequence[kinds.Allowed] | None,
    formats: Sequence[str],
) -> Goal:
    """Return what a plan is chosen for, from the options of that name.

    ``formats`` are those whose seconds are measured where no table says them.
    """
    from roundoff.budget import Goal

    aims = Goal(
        target=target,
        metric_drop=metric_drop,
        cost=cost,
        pin=pins(pin),
        allow=allowed(allow),
    )
    return replace(aims, cost_table=cost_table(cost, table, formats))


def cost_table(cost: str, path: Path | None, formats: Sequence[str]) -> Any:
    """Return the table of the seconds model; None for the other models.

    It is the user's file, or measured on this machine.
    """
    from roundoff.plan import measure_seconds, read_seconds

    if cost != "seconds":
        if path is not None:
            raise PlanError(
                "a cost table is only used with --cost seconds",
                where="--cost-table",
                got=f"--cost {cost}",
            )
        return None
    return read_seconds(path) if path else measure_seconds(formats)


def print_json(data: Any) -> None:
    """Print one JSON object; numbers that are not finite become null."""
    from roundoff.report import json_text

    print(json_text(data))


#: Columns of what is no terminal: nothing wraps, no column is left out.
UNBOUNDED = 100_000


def console() -> Console:
    """Return where tables go: standard output, or nowhere with ``--quiet``.

    To a file or a pipe lines are as long as they get.
    """
    from roundoff.report import HarmlessConsole

    shown = HarmlessConsole(quiet=talk().quiet, highlight=False)
    if not shown.is_terminal:
        shown.width = UNBOUNDED
    return shown


#: Seconds between two lines of ``--verbose`` about one stage.
LINE_SECONDS = 2.0


@contextmanager
def progress(json: bool) -> Iterator[Progress | None]:
    """Yield what reports progress on standard error: a bar for each stage.

    With ``json`` there is none, and what the user's own code prints goes to standard
    error, so that standard output is the JSON object alone.
    """
    if json:
        with script_aside(), _shown_progress(quiet=True) as shown:
            yield shown
    else:
        with _shown_progress(quiet=False) as shown:
            yield shown


@contextmanager
def _shown_progress(*, quiet: bool) -> Iterator[Progress | None]:
    """Yield what reports progress.

    A spinner and a clock move while a stage says nothing. With ``--verbose`` lines take
    the place of bars. None when quiet, and where nobody watches.
    """
    be_still()
    if talk().verbose:
        yield _line_by_line()
        return
    if quiet or talk().quiet or not sys.stderr.isatty():
        yield None
        return
    from rich.console import Console
    from rich.progress import (
        BarColumn,
        MofNCompleteColumn,
        Progress,
        SpinnerColumn,
        TextColumn,
        TimeElapsedColumn,
    )

    columns = (
        SpinnerColumn(),
        TextColumn("{task.description:>20}"),
        BarColumn(),
        MofNCompleteColumn(),
        TimeElapsedColumn(),
    )
    with Progress(*columns, console=Console(stderr=True), transient=True) as shown:
        tasks = {START: shown.add_task(START, total=None)}

        def advance(name: str, done: int, total: int) -> None:
            if START in tasks:
                shown.remove_task(tasks.pop(START))
            if name not in tasks:
                tasks[name] = shown.add_task(name, total=total)
            shown.update(tasks[name], completed=done, total=total)

        yield advance


#: File descriptors, which what a script starts inherits.
STANDARD_OUTPUT = 1
STANDARD_ERROR = 2

#: The task that is shown until a stage reports.
START = "starting"


def _line_by_line() -> Progress:
    """Return what prints a line for each stage, and one every two seconds within it."""
    last = {"": -math.inf}

    def advance(name: str, done: int, total: int) -> None:
        now = time.monotonic()
        if now - last.get(name, -math.inf) < LINE_SECONDS and done < total:
            return
        last[name] = now
        print(f"roundoff: {name}: {done} of {total}", file=sys.stderr, flush=True)

    return advance


@contextmanager
def script_aside() -> Iterator[TextIO]:
    """Send what a script prints, and its children, to standard error.

    Yields the standard output, for what roundoff itself prints meanwhile.
    """
    be_still()
    output = sys.stdout
    output.flush()
    try:
        kept = os.dup(STANDARD_OUTPUT)
    except OSError:  # the process has none
        with redirect_stdout(sys.stderr):
            yield output
        return
    with os.fdopen(kept, "w", encoding="utf-8") as stream:
        os.dup2(STANDARD_ERROR, STANDARD_OUTPUT)
        try:
            with redirect_stdout(sys.stderr):
                yield stream if _writes_to(output, STANDARD_OUTPUT) else output
        finally:
            stream.flush()
            os.dup2(kept, STANDARD_OUTPUT)


def _writes_to(stream: TextIO, number: int) -> bool:
    """Return True for what writes to a file descriptor: not to something in memory."""
    try:
        return stream.fileno() == number
    except (OSError, ValueError):
        return False


def said(path: str | Path | None) -> str:
    """Return a path as a message shows it."""
    return str(path) if path is not None else "-"
