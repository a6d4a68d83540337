"""The options that several verbs share, and how their text becomes arguments."""

from __future__ import annotations

import re
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Annotated, Any

import typer

from roundoff.errors import PatternError, PlanError

if TYPE_CHECKING:
    from pathlib import Path

    from rich.console import Console

    from roundoff.budget import Goal, Progress

Script = Annotated[
    list[str],
    typer.Argument(
        help="After --: a script and its arguments, or -m and a module.",
        metavar="-- SCRIPT [ARGS]...",
    ),
]
ModuleMap = Annotated[
    str | None,
    typer.Option(
        "--map",
        help='TOML file: lines "module.of.reference" = "module.of.candidate".',
    ),
]
Formats = Annotated[
    str,
    typer.Option(
        "--formats", "-f", help="Number formats to measure, separated by commas."
    ),
]
Target = Annotated[
    str | None,
    typer.Option(
        "--target",
        "-t",
        help="Least SQNR of every output, such as 40dB, or of each: cls=40dB,price=30dB.",
    ),
]
MetricDrop = Annotated[
    str | None,
    typer.Option(
        "--metric-drop", help="Most the metric may lose, such as 0.5% (of 1) or 0.005."
    ),
]
Cost = Annotated[
    str,
    typer.Option(
        "--cost",
        help="What to save: bytes moved, storage, bitops, seconds, or operators in fp32.",
    ),
]
CostTable = Annotated[
    str | None,
    typer.Option(
        "--cost-table",
        help="Seconds per operation (TOML); measured here when left out.",
    ),
]
Pin = Annotated[
    list[str] | None,
    typer.Option(
        "--pin", help="PATTERN=FORMAT: these sites run in this format. Repeatable."
    ),
]
Allow = Annotated[
    list[str] | None,
    typer.Option(
        "--allow",
        help="PATTERN=FORMAT,FORMAT: these sites may use these formats. Repeatable.",
    ),
]
Part = Annotated[
    str | None,
    typer.Option(
        "--of",
        help="Measure a part of the output by name, a site, or 'loss'. Default: every output "
        "but numbers beside larger tensors.",
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
    str | None,
    typer.Option(
        "--precision",
        help="Standard error of a site's SQNR at which measuring may end. Default: 0.6dB.",
    ),
]
Memory = Annotated[
    str | None,
    typer.Option(
        "--memory", help="What probe gradients may take, such as 512MB. Default: 128MB."
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
Seed = Annotated[int, typer.Option("--seed", help="Seed of the probe vectors.")]
Json = Annotated[
    bool, typer.Option("--json", help="Print one JSON object and nothing else.")
]
Top = Annotated[
    int, typer.Option("--top", min=1, help="Rows of the ranked table to print.")
]

DEFAULT_FORMATS = "bf16,fp16,fp8_e4m3fn,int8"


_BYTES = re.compile(r"(\d+(?:\.\d+)?)\s*([KMGT]?)i?B?", re.IGNORECASE)


def size_in_bytes(text: str | None) -> int | None:
    """Return ``512MB``, ``2GiB`` or ``100000`` as a number of bytes (1 MB is 2**20).

    Raises ``PlanError`` for anything else.

    >>> size_in_bytes("1.5 KB")
    1536
    """
    if text is None:
        return None
    match = _BYTES.fullmatch(text.strip())
    if match is None:
        raise PlanError(
            "not a size",
            where="--memory",
            expected="a number with KB, MB or GB, such as 512MB",
            got=repr(text),
        )
    power = "KMGT".find(match[2].upper()) + 1 if match[2] else 0
    return int(float(match[1]) * 1024**power)


def split(formats: str) -> list[str]:
    """Return names separated by commas."""
    return [name.strip() for name in formats.split(",") if name.strip()]


def pairs(options: list[str] | None, name: str) -> dict[str, str]:
    """Return ``PATTERN=FORMAT`` options as a dictionary.

    Raises ``PatternError`` where a part is missing.
    """
    formats = {}
    for option in options or []:
        pattern, _, value = option.rpartition("=")
        if not pattern or not value:
            raise PatternError(
                "a pattern and a format are needed",
                where=f"--{name}",
                expected="PATTERN=FORMAT, such as '*/softmax=fp32'",
                got=repr(option),
            )
        formats[pattern] = value
    return formats


def allowed(options: list[str] | None) -> dict[str, list[str]]:
    """Return ``PATTERN=FORMAT,FORMAT`` options as a dictionary of lists."""
    return {pattern: split(value) for pattern, value in pairs(options, "allow").items()}


def goal(
    target: str | None,
    metric_drop: str | None,
    cost: str,
    table: str | None,
    pin: list[str] | None,
    allow: list[str] | None,
    formats: Sequence[str],
) -> Goal:
    """Return what a plan is chosen for, from the options of that name.

    ``formats`` are those whose seconds are measured where no table says them.
    """
    from roundoff.budget import Goal

    return Goal(
        target=target,
        metric_drop=metric_drop,
        cost=cost,
        cost_table=cost_table(cost, table, formats),
        pin=pairs(pin, "pin"),
        allow=allowed(allow),
    )


def cost_table(cost: str, path: str | None, formats: Sequence[str]) -> Any:
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


def console(quiet: bool) -> Console:
    """Return where tables go: standard output, or nowhere when JSON was asked for."""
    from roundoff.report import HarmlessConsole

    return HarmlessConsole(quiet=quiet, highlight=False)


@contextmanager
def progress(quiet: bool) -> Iterator[Progress | None]:
    """Yield a progress line on standard error, one task for each stage.

    None when quiet, and where nobody watches.
    """
    if quiet or not sys.stderr.isatty():
        yield None
        return
    from rich.console import Console
    from rich.progress import (
        BarColumn,
        MofNCompleteColumn,
        Progress,
        TextColumn,
        TimeElapsedColumn,
    )

    columns = (
        TextColumn("{task.description:>20}"),
        BarColumn(),
        MofNCompleteColumn(),
        TimeElapsedColumn(),
    )
    with Progress(*columns, console=Console(stderr=True), transient=True) as shown:
        tasks: dict[str, Any] = {}

        def advance(name: str, done: int, total: int) -> None:
            if name not in tasks:
                tasks[name] = shown.add_task(name, total=total)
            shown.update(tasks[name], completed=done, total=total)

        yield advance


def said(path: str | Path | None) -> str:
    """Return a path as a message shows it."""
    return str(path) if path is not None else "-"
