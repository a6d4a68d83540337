"""``roundoff diff``: one value of two runs, side by side."""

from __future__ import annotations

from typing import Annotated

import typer

from roundoff.cli import kinds
from roundoff.cli import options as o


def command(
    reference: Annotated[
        str,
        typer.Argument(
            parser=kinds.run,
            help="The run to trust: its folder or URL.",
            metavar="REF",
        ),
    ],
    candidate: Annotated[
        str,
        typer.Argument(parser=kinds.run, help="The run to judge.", metavar="CAND"),
    ],
    site: Annotated[
        str,
        typer.Argument(
            help="A site of either run, or the name of a parameter or buffer."
        ),
    ],
    phase: Annotated[
        str | None,
        kinds.option(
            "--phase",
            parse=kinds.phase,
            help="Default: the first that has the site.",
            metavar="PHASE",
        ),
    ] = None,
    place: Annotated[
        int | None,
        typer.Option(
            "--place", min=0, help="Which output of the site. Default: its first."
        ),
    ] = None,
    rank: Annotated[
        int | None,
        typer.Option("--rank", min=0, help="Default: the first of both runs."),
    ] = None,
    step: Annotated[
        int | None,
        typer.Option("--step", min=0, help="Default: the first of both runs."),
    ] = None,
    modules: o.ModuleMap = None,
    rows: o.Rows = 10,
    json: o.Json = False,
) -> int:
    """Show one site of two runs: arguments, statistics, metrics, histogram of the
    error, first and worst elements.

    The exit code is 0, also where they differ; 2 for bad input.
    """
    from roundoff.compare import read_modules
    from roundoff.report import print_diff
    from roundoff.verbs.diff import diff

    difference = diff(
        site,
        reference=reference,
        candidate=candidate,
        phase=phase,
        place=place,
        rank=rank,
        step=step,
        rows=rows,
        modules=None if modules is None else read_modules(modules),
    )
    if json:
        o.print_json(difference)
    else:
        print_diff(difference, o.console())
    return 0
