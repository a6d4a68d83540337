"""Comparison: a reference run against a candidate run, aligned, measured, explained and judged."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from pathlib import Path
from typing import Any

import polars as pl

from roundoff.attribute.divergence import OWN
from roundoff.compare.culprits import culprits
from roundoff.compare.shard import Settings, compare_rank
from roundoff.compare.table import FAIL, UNDECIDED, frame_of, judged, whole
from roundoff.engine import run_tasks
from roundoff.errors import RunError
from roundoff.store import Run, load


@dataclass(frozen=True)
class Comparison:
    """What :func:`compare` gives; a saved one is the same again.

    Attributes:
        table: a row for each value of either run, in the order of execution; columns as in ``compare.table.TABLE``, and
            ``verdict``.
        about: what was compared: ``reference``, ``candidate``, ``damage``, ``notes``, ``limits``.
    """

    table: pl.DataFrame
    about: dict[str, Any] = field(default_factory=dict)

    @cached_property
    def _named(self) -> list[dict[str, Any]]:
        return culprits(self.table.filter(pl.col("cause") == OWN).to_dicts())

    def culprits(self, n: int | None = None) -> list[dict[str, Any]]:
        """The operators that made an error which rounding does not explain, the likeliest first; at most ``n``.

        Each has ``site`` and ``reference_site``, ``phase``, ``line``, ``rank``, ``step``, ``error``, ``own`` (relative),
        ``contribution`` (share of the error at the end of the step), ``looks_like``, ``evidence`` and ``try``.
        """
        return self._named[:n]

    @property
    def divergence(self) -> dict[str, Any] | None:
        """The first culprit in the order of execution: its inputs agree, its output does not. None where there is none."""
        return min(self._named, key=lambda c: (c["step"], c["record"]), default=None)

    @cached_property
    def coverage(self) -> dict[str, Any]:
        """How many rows have a counterpart, by ``status``, how many were measured, and why others were not."""
        counted = dict(self.table.group_by("status").len().iter_rows())
        unknown = self.table.filter(pl.col("error").is_null())
        reasons = unknown.group_by(pl.col("reason").fill_null("unknown")).len("count").sort("count", "reason", descending=[True, False])
        return {
            "rows": self.table.height, "status": counted, "measured": self.table.height - unknown.height,
            "equal": int(self.table["equal"].sum() or 0), "reasons": reasons.to_dicts(),
        }  # fmt: skip

    @property
    def verdicts(self) -> dict[str, int]:
        """How many rows pass, fail and are undecided."""
        return dict(self.table.group_by("verdict").len().sort("verdict").iter_rows())

    @property
    def agrees(self) -> bool:
        """Whether no row fails."""
        return FAIL not in self.verdicts

    def judge(self, *, margin: float = 1.0, **limits: float) -> Comparison:
        """The same measurements under other thresholds; nothing is computed again.

        ``margin`` scales the derived tolerance. ``limits`` replace it: ``cosine=0.98`` fails what is below, ``max_abs=1e-3``
        what is above. Raises ``RunError`` for what is no metric.
        """
        table = judged(self.table.drop("verdict", strict=False), limits, margin)
        return replace(self, table=table, about={**self.about, "limits": limits, "margin": margin})

    def to_dict(self, limit: int = 20) -> dict[str, Any]:
        """The comparison as plain data, with the first ``limit`` rows to look at: those that fail, then the largest
        contributions."""
        order = pl.col("verdict").replace_strict({FAIL: 0, UNDECIDED: 2}, default=1, return_dtype=pl.Int8)
        rows = self.table.filter(pl.col("error").is_not_null()).sort(
            order, "step", pl.col("contribution").fill_null(0), "rank", "record",
            descending=[False, False, True, False, False],
        )  # fmt: skip
        return {
            **self.about, "answer": self.answer, "divergence": self.divergence, "culprits": self.culprits(limit),
            "coverage": self.coverage, "verdicts": self.verdicts, "agrees": self.agrees,
            "rows": rows.head(limit).to_dicts(),
        }  # fmt: skip

    @property
    def answer(self) -> str:
        """The first paragraph of the report."""
        return ""

    def save(self, path: str | Path) -> None:
        """Write ``comparison.parquet`` and ``comparison.json`` into a folder."""
        folder = Path(path)
        folder.mkdir(parents=True, exist_ok=True)
        self.table.write_parquet(folder / "comparison.parquet")
        (folder / "comparison.json").write_text(json.dumps(self.about))


def compare(
    *, reference: str | Path | Run, candidate: str | Path | Run, modules: Mapping[str, str] | None = None,
    engine: str = "local", tensors: bool = True, progress: Callable[[int, int], None] | None = None,
    floor: Mapping[tuple[int, int], Mapping[int, float]] | None = None, **limits: float,
) -> Comparison:  # fmt: skip
    """Compare two recorded runs and name the operator at fault.

    ``floor``: what honest runs differ by, relative, as ``{(rank, step): {record of the reference: floor}}``.
    """
    ours, theirs = (run if isinstance(run, Run) else load(str(run)) for run in (reference, candidate))
    settings = Settings(dict(modules or {}), tensors, floor or {})
    ranks = [r for r in ours.ranks if r in theirs.ranks]
    steps = [s for s in ours.steps if s in theirs.steps]
    if not ranks or not steps:
        raise RunError("the two runs have no step in common", where=str(theirs.path))
    given: Sequence[Any] = (ours, theirs) if engine == "local" else (str(reference), str(candidate))
    found = run_tasks(compare_rank, [(*given, rank, steps, settings) for rank in ranks], engine=engine, progress=progress)
    lonely = [
        {"rank": r, "status": f"only in {side}", "reason": f"the other run has no rank {r}"}
        for side, run in (("reference", ours), ("candidate", theirs)) for r in run.ranks if r not in ranks
    ] + [
        {"step": s, "status": f"only in {side}", "reason": f"the other run has no step {s}"}
        for side, run in (("reference", ours), ("candidate", theirs)) for s in run.steps if s not in steps
    ]
    table = whole([*(frame for frame, _ in found), frame_of(lonely)])
    about = {"reference": str(reference), "candidate": str(candidate), "damage": [line for _, lines in found for line in lines]}
    return Comparison(table, about).judge(**limits)
