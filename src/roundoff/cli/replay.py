"""``roundoff replay``: recorded operators once more from their stored inputs, in fp64
or on another device.
"""

from __future__ import annotations

from dataclasses import asdict
from typing import Annotated

import typer

from roundoff.cli import kinds
from roundoff.cli import options as o
from roundoff.files import masked


def command(
    run: Annotated[
        str,
        typer.Argument(
            parser=kinds.run,
            help="A run recorded with --keep tensors: its folder or URL.",
            metavar="RUN",
        ),
    ],
    site: Annotated[
        str | None,
        kinds.option(
            "--site",
            "-s",
            parse=kinds.pattern,
            help="Only sites that match: 'encoder.*/softmax'.",
            metavar="PATTERN",
        ),
    ] = None,
    phase: o.Phase = None,
    device: Annotated[
        str,
        kinds.option(
            "--device",
            parse=kinds.device,
            help="Where to run: cpu, cuda, ...",
            metavar="DEVICE",
        ),
    ] = "cpu",
    dtype: Annotated[
        str,
        kinds.option(
            "--dtype",
            parse=kinds.dtype,
            help="The format to run in, or 'same' for the recorded one.",
            metavar="FORMAT",
        ),
    ] = "fp64",
    rank: Annotated[
        int, typer.Option("--rank", min=0, help="The process of a run of several.")
    ] = 0,
    step: Annotated[
        int | None, typer.Option("--step", min=0, help="One step; all when left out.")
    ] = None,
    rows: o.Rows = 20,
    json: o.Json = False,
) -> int:
    """Run recorded operators again on the inputs they had, and show the own error of
    each, worst first.
    """
    import roundoff
    from roundoff.report import print_replay

    replay = roundoff.replay(
        run,
        site=site,
        phase=phase,
        device=device,
        dtype=dtype,
        rank=rank,
        step=step,
    )
    if json:
        o.print_json({"run": masked(run), **asdict(replay)})
    else:
        print_replay(replay, o.console(), top=rows)
    return 0
