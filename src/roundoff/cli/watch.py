"""``roundoff watch``: a training script with its loss scale, skipped steps and their reasons, while it runs."""

from __future__ import annotations

import contextlib
import json as encoding
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Annotated, Any

import typer

if TYPE_CHECKING:
    from rich.console import Console

    from roundoff.train import Event


def command(
    script: Annotated[
        list[str],
        typer.Argument(
            help="After --: a script and its arguments, or -m and a module.",
            metavar="-- SCRIPT [ARGS]...",
        ),
    ],
    every: Annotated[
        int, typer.Option("--every", min=1, help="Look at modules in each N-th step.")
    ] = 1,
    explain: Annotated[
        int,
        typer.Option(
            "--explain",
            min=0,
            help="Run so many of the bad steps once more, to find the operator.",
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
    """Run a training script unchanged, and say what its loss, loss scale and gradients do, and why steps are skipped.

    The script's own output stays on standard output, ours goes to standard error (with --json the other way round). The exit
    code is 1 where skips or NaN ended the training or the loss scale collapsed, 0 otherwise, 2 for a script that failed.
    """
    from rich.console import Console

    from roundoff.verbs.watch import watch_script

    with (
        _json() if json else _text(Console(stderr=True, highlight=False), lines) as say
    ):
        end = watch_script(
            script, say, every=every, explain=explain, stop_on_nan=stop_on_nan
        )
    return 0 if end.trouble is None else 1


@contextmanager
def _json() -> Iterator[Callable[[Event], None]]:
    from roundoff.report import strict

    out = sys.stdout

    def say(event: Event) -> None:
        print(
            encoding.dumps(strict(event.to_dict()), allow_nan=False),
            file=out,
            flush=True,
        )

    with contextlib.redirect_stdout(sys.stderr):
        yield say


@contextmanager
def _text(console: Console, lines: int) -> Iterator[Callable[[Event], None]]:
    """One line that is refreshed on a terminal, else lines; what is not a plain step always stays."""
    from rich.live import Live
    from rich.text import Text

    from roundoff.report import watch_text as text

    live: Live | None = None
    said: list[str] = []

    def lines_of(row: dict[str, Any]) -> list[str]:
        if row["event"] == "warning":
            return [text.advice_line(row)]
        if row["event"] == "end":
            return [text.end_line(row)]
        found, before = text.trouble_lines(row), list(said)
        said[:] = found[1:]
        if said != before:
            return found
        return found[:1] if row["skipped"] else []  # the same again

    def write(row: dict[str, Any]) -> None:
        if row["event"] != "step":
            style = {"not finite": "red", "warning": "yellow"}.get(row["event"], "bold")
            for line in lines_of(row):
                console.print(line, markup=False, soft_wrap=True, style=style)
        elif live is not None:
            live.update(Text(text.step_line(row), no_wrap=True, overflow="ellipsis"))
        elif row["step"] % lines == 0 or row["skipped"]:
            console.print(text.step_line(row), markup=False, soft_wrap=True)

    with contextlib.ExitStack() as stack:
        if console.is_terminal:
            terminal = sys.stdout.isatty()
            live = stack.enter_context(
                Live(console=console, transient=True, redirect_stdout=terminal)
            )
        yield lambda event: write(event.to_dict())
