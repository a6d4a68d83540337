"""The table of ``roundoff replay``: own errors, worst first, and what could not be run again."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

from rich.console import Console

from roundoff.report.figures import count, db
from roundoff.report.terminal import heading as _heading
from roundoff.report.terminal import print_table as _print_table
from roundoff.report.terminal import say as _say

Row = Mapping[str, Any]


def print_replay(
    rows: Sequence[Row],
    console: Console,
    *,
    device: str = "cpu",
    dtype: str = "fp64",
    top: int = 20,
) -> None:
    """Own errors in dB below the result (∞: none at all; -∞: only one of the two is finite), worst first.

    >>> row = {"step": 3, "phase": "forward", "site": "head/addmm", "place": 0, "own_l2": 1e-6, "own_max": 5e-7,
    ...        "sqnr_db": 120.0, "reason": None}
    >>> print_replay([row, {**row, "site": "/dropout", "sqnr_db": None, "reason": "draws random numbers"}],
    ...              Console(width=80))
    <BLANKLINE>
    Own error against fp64 on cpu: 1 result
    step     phase   site...        output    SQNR   max error
    ──────────────────────────────────────────────────────────
       3   forward   head/addmm          0   120.0       5e-07
    <BLANKLINE>
    Not run again: 1 result
    count   reason                 for example...
    ───────────────────────────────────────────
        1   draws random numbers   /dropout...
    """
    found = sorted(
        (r for r in rows if r["reason"] is None), key=lambda row: row["sqnr_db"]
    )
    against = "the recorded format" if dtype == "same" else dtype
    _heading(
        console,
        f"Own error against {against} on {device}: {count(len(found), 'result')}",
    )
    shown = [row for row in found if row["sqnr_db"] < math.inf][:top]
    if shown:
        _print_table(
            console,
            {
                "step": [str(row["step"]) for row in shown],
                "phase": [row["phase"] for row in shown],
                "site": [row["site"] for row in shown],
                "output": [str(row["place"]) for row in shown],
                "SQNR": [db(row["sqnr_db"]) for row in shown],
                "max error": [f"{row['own_max']:.3g}" for row in shown],
            },
            prose={"site"},
        )
    same = sum(row["sqnr_db"] == math.inf for row in found)
    if same:
        _say(console, f"{count(same, 'result')} without any error.")
    if len(found) - same > len(shown):
        _say(
            console,
            f"{count(len(found) - same - len(shown), 'more row')} below.",
            style="dim",
        )
    _print_reasons([row for row in rows if row["reason"] is not None], console)


def _print_reasons(rows: Sequence[Row], console: Console) -> None:
    if not rows:
        return
    _heading(console, f"Not run again: {count(len(rows), 'result')}")
    example = {row["reason"]: row["site"] for row in reversed(rows)}
    counts = Counter(row["reason"] for row in rows).most_common()
    _print_table(
        console,
        {
            "count": [f"{number:,}" for _, number in counts],
            "reason": [reason for reason, _ in counts],
            "for example": [example[reason] for reason, _ in counts],
        },
        prose={"reason", "for example"},
    )
