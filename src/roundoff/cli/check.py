"""``roundoff check``: are these two runs comparable?"""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated

import typer

from roundoff.cli import kinds
from roundoff.cli import options as o

if TYPE_CHECKING:
    from roundoff.check import Check

_EXIT_CODES = {"comparable": 0, "differ": 1, "undecided": 4}


def command(
    reference: Annotated[
        str,
        typer.Argument(
            parser=kinds.run, help="The run to trust, its folder or URL.", metavar="REF"
        ),
    ],
    candidate: Annotated[
        str, typer.Argument(parser=kinds.run, help="The other run.", metavar="CAND")
    ],
    repeats: Annotated[
        list[str] | None,
        typer.Option(
            "--repeats",
            parser=kinds.run,
            help="A recording of the reference's program, unchanged. Repeatable.",
            metavar="RUN",
        ),
    ] = None,
    rows: o.Rows = 20,
    json: o.Json = False,
) -> int:
    """Say how two programs were set up otherwise: seeds, data, weights, settings, losses.

    The exit code is 0 when nothing that changes numbers differs, 1 when something does,
    2 for bad input, 4 when nothing differs and not everything was recorded.
    """
    import roundoff
    from roundoff.report import print_check

    answer = roundoff.check(reference, candidate, repeats=repeats or ())
    if json:
        o.print_json(_as_json(answer))
    else:
        print_check(answer, o.console(), limit=rows)
    return _EXIT_CODES[answer.verdict]


def _as_json(answer: Check) -> dict[str, object]:
    from roundoff.report import check_sentences, plain

    return {
        "answer": " ".join(check_sentences(answer)),
        "verdict": answer.verdict,
        **plain(answer),
    }
