"""``roundoff show``: what a run recorded, site by site."""

from __future__ import annotations

from dataclasses import asdict
from typing import Annotated

import typer

from roundoff.cli import kinds
from roundoff.cli import options as o
from roundoff.files import masked


def command(
    run: o.Run,
    site: Annotated[
        str | None,
        typer.Argument(
            help="One site or parameter to show in full, or a glob over their names."
        ),
    ] = None,
    phase: o.Phase = None,
    sort: Annotated[
        str,
        kinds.option(
            "--sort",
            parse=kinds.sort_key,
            help="order, or largest first: nan, inf, max, mean, l2, std, zero, subnormal, size, own.",
            metavar="KEY",
        ),
    ] = "order",
    rank: Annotated[
        int | None, typer.Option("--rank", min=0, help="Default: the first.")
    ] = None,
    step: Annotated[
        int | None, typer.Option("--step", min=0, help="Default: the last.")
    ] = None,
    views: Annotated[
        bool, typer.Option("--views", help="List views of tensors too.")
    ] = False,
    rows: o.Rows = 50,
    json: o.Json = False,
) -> int:
    """Show one row for each site of a run's step; or one site: statistics, histogram,
    source line, inputs, users.
    """
    import roundoff
    from roundoff.report import print_show

    recorded = roundoff.load(run)
    shown = roundoff.show(
        recorded, site, phase=phase, rank=rank, step=step, sort=sort, views=views
    )
    if json:
        o.print_json({"run": masked(run), **asdict(shown)})
        return 0
    if recorded.about.unfinished == shown.step:
        o.console().print(
            f"Step {shown.step} was not finished: the program failed in it."
        )
    print_show(shown, o.console(), limit=rows)
    return 0
