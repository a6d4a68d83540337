"""``roundoff watch``: a training script with its loss scale, skipped steps and their
reasons, while it runs.
"""

from __future__ import annotations

import json as encoding
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Annotated

import typer

from roundoff.cli import options as o
from roundoff.cli.plain_output import output_of_script
from roundoff.cli.talk import talk

if TYPE_CHECKING:
    from roundoff.train import WatchEvent


def command(
    script: o.Script,
    every: Annotated[
        int, typer.Option("--every", min=1, help="Look at modules in each N-th step.")
    ] = 1,
    explain: Annotated[
        int,
        typer.Option(
            "--explain",
            min=0,
            help="Run the first N bad steps once more, to find the operator.",
        ),
    ] = 3,
    lines: Annotated[
        int,
        typer.Option(
            "--lines", min=1, help="Not on a terminal: a line for each N-th step."
        ),
    ] = 10,
    stop_on_nan: Annotated[
        bool,
        typer.Option(
            "--stop-on-nan", help="End the script before a NaN reaches the weights."
        ),
    ] = False,
    json: Annotated[
        bool,
        typer.Option(
            "--json", help="One JSON object a line for each event on standard output."
        ),
    ] = False,
) -> int:
    """Run a training script unchanged, and report its loss, loss scale and gradients,
    and why steps are skipped.

    The script's own output stays on standard output, ours goes to standard error (with
    --json the other way round). The exit code is 1 where skips or NaN ended the
    training or the loss scale collapsed, 0 otherwise, 2 for a script that failed.
    """
    import roundoff

    with _json_lines() if json else _text(lines) as say:
        summary = roundoff.watch(
            script, say, every=every, explain=explain, stop_on_nan=stop_on_nan
        )
    return 0 if summary.trouble is None else 1


@contextmanager
def _json_lines() -> Iterator[Callable[[WatchEvent], None]]:
    """Write events to standard output, what the script prints to standard error."""
    from roundoff.report import strict

    with o.script_aside() as output:

        def say(event: WatchEvent) -> None:
            line = encoding.dumps(strict(event.to_dict()), allow_nan=False)
            print(line, file=output, flush=True)

        yield say


@contextmanager
def _text(lines: int) -> Iterator[Callable[[WatchEvent], None]]:
    from roundoff.report import HarmlessConsole, print_events

    console = HarmlessConsole(stderr=True, highlight=False, quiet=talk().quiet)
    with output_of_script(), print_events(console, lines) as say:
        yield say
