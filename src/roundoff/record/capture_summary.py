"""What a finished recording holds, in figures."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import polars as pl

from roundoff.record.disk.description import CallCoverage
from roundoff.record.disk.reader import Run
from roundoff.record.disk.sites import TensorCoverage, complete, coverage

_COLUMNS = (
    "phase",
    "site",
    "dtype",
    "view_of",
    "nan",
    "posinf",
    "neginf",
    "reason",
)


@dataclass(frozen=True, slots=True, kw_only=True)
class CaptureSummary:
    """How much a recording holds.

    Attributes:
        path: the folder as the user named it.
        steps: that were recorded.
        ranks: of the program.
        calls: what was seen of the program; None where the run does not say.
        tensors: what was measured, by one rank; None where it was not counted.
        noise: folders of the runs with noise.
        repeats: folders of the unchanged runs.
    """

    path: str
    steps: Sequence[int]
    ranks: Sequence[int]
    calls: CallCoverage | None = None
    tensors: TensorCoverage | None = None
    noise: Sequence[str] = ()
    repeats: Sequence[str] = ()


def summarize_capture(
    run: Run, rank: int, path: str, noise: Sequence[str], repeats: Sequence[str]
) -> CaptureSummary:
    """Count what ``rank`` has recorded; other ranks may still be writing theirs."""
    rows = complete(run.ops).filter(pl.col("rank") == rank).select(_COLUMNS).collect()
    return CaptureSummary(
        path=path,
        steps=run.steps,
        ranks=list(range(run.about.ranks or 1)),
        calls=run.about.coverage,
        tensors=coverage(rows),
        noise=noise,
        repeats=repeats,
    )
