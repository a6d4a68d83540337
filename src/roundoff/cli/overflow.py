"""``roundoff overflow``: where NaN and Inf were born, how near values are to overflow,
which loss scale fits.
"""

from __future__ import annotations

from dataclasses import asdict
from typing import Annotated

import typer

from roundoff.cli import options as o
from roundoff.files import masked


def command(
    run: Annotated[str, typer.Argument(help="The folder of a run, or its URL.")],
    within: Annotated[
        float,
        typer.Option(
            "--within",
            min=0,
            help="List sites within this many powers of two of overflow.",
        ),
    ] = 3.0,
    formats: Annotated[
        str,
        typer.Option("--formats", "-f", help="What each of these formats would lose."),
    ] = "fp16,bf16,fp8_e4m3fn,fp8_e5m2",
    allow: Annotated[
        list[str] | None,
        typer.Option(
            "--allow",
            help="PATTERN: NaN and Inf born at these sites are meant. Repeatable.",
        ),
    ] = None,
    loss_format: Annotated[
        str,
        typer.Option(
            "--loss-format", help="Format of the gradients, for the loss scale."
        ),
    ] = "fp16",
    margin: Annotated[
        float,
        typer.Option(
            "--margin", min=0, help="Powers of two that the loss scale leaves free."
        ),
    ] = 1.0,
    rank: Annotated[int | None, typer.Option("--rank", help="Only this rank.")] = None,
    step: Annotated[int | None, typer.Option("--step", help="Only this step.")] = None,
    limit: Annotated[
        int, typer.Option("--limit", min=1, help="Rows of each table.")
    ] = 20,
    json: o.Json = False,
) -> int:
    """Say where NaN and Inf were born, what passed them on and what silently removed
    them; how near values are to overflow; what each format would lose; and which loss
    scale fits.

    The exit code is 1 when a NaN or Inf that is not allowed was born or arrived, 0 when
    none was, 2 for bad input.
    """
    import roundoff
    from roundoff.report import print_overflow

    answer = roundoff.overflow(
        run,
        within=within,
        formats=o.split(formats),
        allow=allow or (),
        loss_format=loss_format,
        margin=margin,
        rank=rank,
        step=step,
    )
    if json:
        o.print_json({"run": masked(run), **asdict(answer)})
    else:
        print_overflow(answer, o.console(False), limit=limit)
    return 0 if answer.first is None else 1
