"""``roundoff replay``: recorded operators once more from their stored inputs, in fp64 or on another device."""

from __future__ import annotations

from typing import Annotated

import typer

from roundoff.cli import options as o
from roundoff.files import masked


def command(
    run: Annotated[
        str,
        typer.Argument(help="A run recorded with --keep tensors: its folder or URL."),
    ],
    site: Annotated[
        str | None,
        typer.Option(
            "--site", "-s", help="Only sites that match: 'encoder.*/softmax'."
        ),
    ] = None,
    phase: Annotated[
        str | None, typer.Option("--phase", help="Only forward, backward or optimizer.")
    ] = None,
    device: Annotated[
        str, typer.Option("--device", help="Where to run: cpu, cuda, ...")
    ] = "cpu",
    dtype: Annotated[
        str,
        typer.Option(
            "--dtype", help="The format to run in, or 'same' for the recorded one."
        ),
    ] = "fp64",
    rank: Annotated[
        int, typer.Option("--rank", help="The process of a run of several.")
    ] = 0,
    step: Annotated[
        int | None, typer.Option("--step", help="One step; all when left out.")
    ] = None,
    top: o.Top = 20,
    json: o.Json = False,
) -> int:
    """Run recorded operators again on the inputs they had, and show the own error of each, worst first."""
    from roundoff.record import load
    from roundoff.report import print_replay
    from roundoff.verbs.replay import replay

    rows = replay(
        load(run),
        site=site,
        phase=phase,
        device=device,
        dtype=dtype,
        rank=rank,
        step=step,
    ).to_dicts()
    if json:
        o.print_json(
            {"run": masked(run), "device": device, "dtype": dtype, "rows": rows}
        )
    else:
        print_replay(rows, o.console(False), device=device, dtype=dtype, top=top)
    return 0
