"""The table of ``roundoff replay``: own errors, worst first, and what could not be run
again."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence
from typing import TYPE_CHECKING

from rich.console import Console

from roundoff.report.figures import count, db
from roundoff.report.terminal import heading, print_table, say

if TYPE_CHECKING:
    from roundoff.record import Replay, ReplayedOutput


def print_replay(replay: Replay, console: Console, *, top: int = 20) -> None:
    """Print own errors in dB below the result, worst first.

    ∞: none at all; -∞: only one of the two is finite.

    >>> from roundoff.record import Replay, ReplayedOutput
    >>> from dataclasses import replace
    >>> row = ReplayedOutput(
    ...     rank=0, step=3, record=5, phase="forward", site="head/addmm",
    ...     overload="aten.addmm.default", place=0, own_l2=1e-6, own_max=5e-7,
    ...     sqnr_db=120.0, reason=None,
    ... )
    >>> dropped = replace(
    ...     row, site="/dropout", sqnr_db=None, reason="draws random numbers"
    ... )
    >>> replay = Replay(device="cpu", dtype="fp64", rows=(row, dropped))
    >>> print_replay(replay, Console(width=80))
    <BLANKLINE>
    Own error against fp64 on cpu: 1 result
    step   phase     site         output    SQNR   max error
    ────────────────────────────────────────────────────────
    3      forward   head/addmm        0   120.0       5e-07
    <BLANKLINE>
    Not run again: 1 result
    count   reason                 for example
    ──────────────────────────────────────────
        1   draws random numbers   /dropout...
    """
    compared = [
        (row.quality_db, row) for row in replay.rows if row.quality_db is not None
    ]
    compared.sort(key=lambda pair: pair[0])
    against = "the recorded format" if replay.dtype == "same" else replay.dtype
    results = count(len(compared), "result")
    heading(console, f"Own error against {against} on {replay.device}: {results}")
    with_error = [row for sqnr, row in compared if sqnr < math.inf]
    _print_errors(with_error[:top], console)
    cancelled = sum(row.terms_db is not None for row in with_error[:top])
    if cancelled:
        say(
            console,
            f"{count(cancelled, 'result')} marked * cancelled to about zero: the error "
            "is held against the terms that were added up.",
            style="dim",
        )
    exact = len(compared) - len(with_error)
    if exact:
        say(console, f"{count(exact, 'result')} without any error.")
    if len(with_error) > top:
        say(console, f"{count(len(with_error) - top, 'more row')} below.", style="dim")
    _print_reasons(replay.rows, console)


def _print_errors(rows: Sequence[ReplayedOutput], console: Console) -> None:
    if not rows:
        return
    print_table(
        console,
        {
            "step": [str(row.step) for row in rows],
            "phase": [row.phase for row in rows],
            "site": [row.site for row in rows],
            "output": [str(row.place) for row in rows],
            "SQNR": [_sqnr(row) for row in rows],
            "max error": [f"{row.own_max:.3g}" for row in rows],
        },
    )


def _sqnr(row: ReplayedOutput) -> str:
    return db(row.sqnr_db) if row.terms_db is None else f"{db(row.terms_db)}*"


def _print_reasons(rows: Sequence[ReplayedOutput], console: Console) -> None:
    sites: dict[str, list[str]] = {}
    for row in rows:
        if row.reason is not None:
            sites.setdefault(row.reason, []).append(row.site)
    if not sites:
        return
    counts = Counter({reason: len(names) for reason, names in sites.items()})
    heading(console, f"Not run again: {count(counts.total(), 'result')}")
    reasons = [reason for reason, _ in counts.most_common()]
    print_table(
        console,
        {
            "count": [f"{counts[reason]:,}" for reason in reasons],
            "reason": reasons,
            "for example": [sites[reason][0] for reason in reasons],
        },
    )
