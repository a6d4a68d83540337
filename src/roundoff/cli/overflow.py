"""``roundoff overflow``: where NaN and Inf were born, how near values are to overflow,
which loss scale fits.
"""

from __future__ import annotations

from dataclasses import asdict
from typing import Annotated

from roundoff.cli import kinds
from roundoff.cli import options as o
from roundoff.files import masked

DEFAULT_FORMATS = kinds.Names(("fp16", "bf16", "fp8_e4m3fn", "fp8_e5m2"))


def command(
    run: o.Run,
    within: Annotated[
        float,
        kinds.option(
            "--within",
            parse=kinds.number(0),
            help="List sites within this many powers of two of overflow.",
            metavar="NUMBER",
        ),
    ] = 3.0,
    formats: Annotated[
        kinds.Names,
        kinds.option(
            "--formats",
            "-f",
            parse=kinds.all_unscaled,
            help="What each of these formats would lose.",
            metavar="FORMATS",
        ),
    ] = DEFAULT_FORMATS,
    allow: Annotated[
        list[str] | None,
        kinds.option(
            "--allow",
            parse=kinds.pattern,
            help="PATTERN: NaN and Inf born at these sites are meant. Repeatable.",
            metavar="PATTERN",
        ),
    ] = None,
    loss_format: Annotated[
        str,
        kinds.option(
            "--loss-format",
            parse=kinds.unscaled,
            help="Format of the gradients, for the loss scale.",
            metavar="FORMAT",
        ),
    ] = "fp16",
    margin: Annotated[
        float,
        kinds.option(
            "--margin",
            parse=kinds.number(0),
            help="Powers of two that the loss scale leaves free.",
            metavar="NUMBER",
        ),
    ] = 1.0,
    rank: o.Rank = None,
    step: o.Step = None,
    rows: o.Rows = 20,
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
        formats=formats,
        allow=allow or (),
        loss_format=loss_format,
        margin=margin,
        rank=rank,
        step=step,
    )
    if json:
        o.print_json({"run": masked(run), **asdict(answer)})
    else:
        print_overflow(answer, o.console(), limit=rows)
    return 0 if answer.first is None else 1
