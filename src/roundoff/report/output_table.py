"""The table of a model's named outputs on a terminal."""

from __future__ import annotations

from collections.abc import Sequence

from rich.console import Console

from roundoff.budget import OutputRow
from roundoff.report.output_columns import HEADING, output_columns, together
from roundoff.report.terminal import heading, print_table, say


def print_outputs(
    rows: Sequence[OutputRow], console: Console, file: Sequence[OutputRow] = ()
) -> None:
    """Print a row for each output; nothing where there is only one.

    ``file`` has the same outputs of an exported file.

    >>> rows = [
    ...     OutputRow(output="cls", sqnr_db=20.1, target_db=40.0, met=False),
    ...     OutputRow(output="price", sqnr_db=54.0, target_db=40.0, met=True),
    ... ]
    >>> print_outputs(rows, Console(width=80))
    <BLANKLINE>
    Outputs: SQNR (dB)
    name    measured   target   verdict
    ───────────────────────────────────
    cls         20.1     40.0   missed
    price       54.0     40.0   met
    """
    if len(rows) > 1:
        heading(console, HEADING)
        styles = ["red" if row.met is False else "" for row in rows]
        columns = output_columns(rows, file)
        print_table(console, columns, styles=styles)
    for sentence in together(rows):
        say(console, sentence, style="dim")
