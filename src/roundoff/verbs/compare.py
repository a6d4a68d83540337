"""Comparison: a reference run against a candidate run, aligned, measured, explained and judged."""

from __future__ import annotations

import io
import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from pathlib import Path
from typing import Any

import polars as pl

from roundoff.compare import (
    FAIL,
    INHERITED,
    MATCHED,
    OWN,
    TABLE,
    UNDECIDED,
    Settings,
    beside,
    check_modules,
    compare_rank,
    culprits,
    floor_of,
    frame_of,
    judged,
    mark,
    not_reproducible,
    received,
    same_program,
    sentences,
    whole,
)
from roundoff.engine import run_tasks
from roundoff.errors import RunError
from roundoff.files import is_url, local_path, masked, open_output, write_text
from roundoff.record import Run, load
from roundoff.report import comparison_answer, span


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

    def rounding(self, n: int = 5) -> list[dict[str, Any]]:
        """The operators whose rounding makes most of the error at the end of the first step that differs, with the
        ``contribution`` (share) of each; those that make errors beyond rounding are not among them."""
        made = (
            pl.col("cause").is_null()
            & (pl.col("contribution") > 0)
            & ~pl.col("view")
            & (pl.col("call") >= 0)
        )
        rows = self.table.lazy().filter(made)
        first = rows.filter(pl.col("step") == pl.col("step").min())
        by = first.group_by("phase", "site", "reference_site", maintain_order=True).agg(
            pl.col("contribution").sum() / pl.col("rank").n_unique(),
            pl.col("line", "step", "rank", "dtype", "record").first(),
            pl.col("own", "error").max(),
        )
        return (
            by.top_k(n, by="contribution")
            .sort("contribution", descending=True)
            .collect()
            .to_dicts()
        )

    @property
    def divergence(self) -> dict[str, Any] | None:
        """The first culprit in the order of execution: its inputs agree, its output does not. None where there is none."""
        return min(self._named, key=lambda c: (c["step"], c["record"]), default=None)

    @cached_property
    def coverage(self) -> dict[str, Any]:
        """How many rows have a counterpart, by ``status``, how many were measured, and why others were not."""
        counted = dict(self.table.group_by("status").len().iter_rows())
        unknown = self.table.select("reason", "error").filter(pl.col("error").is_null())
        reasons = unknown.group_by(pl.col("reason").fill_null("unknown")).len("count")
        reasons = reasons.sort("count", "reason", descending=[True, False])
        return {
            "rows": self.table.height,
            "status": counted,
            "measured": self.table.height - unknown.height,
            "equal": int(self.table["equal"].sum() or 0),
            "reasons": reasons.to_dicts(),
        }

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
        return replace(
            self, table=table, about={**self.about, "limits": limits, "margin": margin}
        )

    def to_dict(self, limit: int = 20) -> dict[str, Any]:
        """The comparison as plain data, with the first ``limit`` rows to look at: those that fail, then the largest
        contributions."""
        order = pl.col("verdict").replace_strict(
            {FAIL: 0, UNDECIDED: 2}, default=1, return_dtype=pl.Int8
        )
        keys = (
            self.table.lazy()
            .select(  # of millions of rows with many columns only these are sorted
                order.alias("order"),
                "step",
                pl.col("contribution").fill_null(0),
                "rank",
                "record",
                "error",
            )
            .with_row_index("at")
            .filter(pl.col("error").is_not_null())
        )
        falling = [False, False, True, False, False]
        first = (
            keys.sort(
                "order", "step", "contribution", "rank", "record", descending=falling
            )
            .head(limit)
            .collect()
        )
        return {
            "answer": self.answer,
            **self._summary(limit),
            "rows": self.table[first["at"]].to_dicts(),
        }

    def _summary(self, limit: int | None) -> dict[str, Any]:
        """All but the rows: what the sentences are made from."""
        labels = self.table.lazy().select(*LABEL, "record", "verdict", "cause")
        failing = labels.filter(pl.col("verdict") == FAIL)
        apart = labels.filter(pl.col("error").is_finite() & (pl.col("error") > 0))
        inherited = (
            failing.filter(pl.col("cause") == INHERITED)
            .select(pl.len())
            .collect()
            .item()
        )
        return {
            **self.about,
            "agrees": self.agrees,
            "verdicts": self.verdicts,
            "divergence": self.divergence,
            "culprits": self.culprits(limit),
            "rounding": self.rounding(limit or 5),
            "coverage": self.coverage,
            "inherited": inherited,
            "largest": next(
                iter(apart.top_k(1, by="error").select(LABEL).collect().to_dicts()),
                None,
            ),
            "first": next(
                iter(
                    failing.bottom_k(1, by=["step", "record"])
                    .select(LABEL)
                    .collect()
                    .to_dicts()
                ),
                None,
            ),
            "tensors": bool(self.table["max_abs"].is_not_null().any()),
            "rows_total": self.table.height,
            "steps": self.table["step"].drop_nulls().unique().sort().to_list(),
            "ranks": self.table["rank"].drop_nulls().unique().sort().to_list(),
        }

    @cached_property
    def answer(self) -> str:
        """The first paragraph of the report."""
        return " ".join(comparison_answer.answer(self._summary(None)))

    def report(self, path: str | Path, *, limit: int = 2000) -> None:
        """Write one self-contained HTML page, with the first ``limit`` rows of ``to_dict``, to a path or URL.

        Raises ``OutputError`` when it cannot be written.
        """
        from roundoff.report import write_comparison

        write_comparison({**self.to_dict(limit), "points": self._points()}, path)

    def _points(self, most: int = 900) -> list[dict[str, Any]]:
        """The rows in the order of execution for a chart, of the rank where the runs part; where there are more than
        ``most``, of each stretch the row that failed worst."""
        rank = (self.divergence or {}).get(
            "rank", self.table["rank"].drop_nulls().min()
        )
        rows = self.table.select(
            "record", "view", "tolerance", "cause", "verdict", *LABEL
        )
        rows = rows.filter(
            (pl.col("rank") == rank)
            & pl.col("error").is_not_null()
            & pl.col("view").not_()
        )
        rows = rows.sort("step", "record").with_row_index("at")
        rows = rows.with_columns(stretch=pl.col("at") * most // max(rows.height, most))
        worst = (
            (pl.col("cause") == OWN).fill_null(False),
            pl.col("verdict") == FAIL,
            pl.col("error"),
        )
        rows = rows.sort(*worst, descending=True).unique(
            "stretch", keep="first", maintain_order=True
        )
        return (
            rows.sort("at")
            .select("at", "tolerance", "cause", "verdict", *LABEL)
            .to_dicts()
        )

    def save(self, path: str | Path) -> None:
        """Write ``comparison.parquet`` and ``comparison.json`` into a folder or under a URL, each whole or not at all.

        Raises ``OutputError`` when they cannot be written.
        """
        with open_output(_within(path, TABLE_FILE)) as temporary:
            self.table.write_parquet(temporary)
        text = json.dumps({**self.about, "comparison": VERSION})
        write_text(
            _within(path, ABOUT_FILE), text
        )  # last: a folder with it is a whole comparison

    @classmethod
    def load(cls, path: str | Path) -> Comparison:
        """What :meth:`save` wrote, to be judged again. Raises ``RunError`` where none is, or it is damaged or newer."""
        where = masked(str(path))
        try:
            about = json.loads(_bytes(_within(path, ABOUT_FILE)))
            place = _within(path, TABLE_FILE)
            table = pl.read_parquet(
                io.BytesIO(_bytes(place)) if is_url(path) else place
            )
        except FileNotFoundError as error:
            raise RunError(
                "no comparison is saved here",
                where=where,
                expected=f"{ABOUT_FILE} and {TABLE_FILE}",
                do="roundoff compare REFERENCE CANDIDATE --save DIR makes one",
            ) from error
        except Exception as error:  # noqa: BLE001 - json, polars and the library of a protocol raise many kinds
            raise RunError(
                "the saved comparison cannot be read",
                where=where,
                do="compare the two runs again",
                got=masked(f"{type(error).__name__}: {error}".partition("\n")[0]),
            ) from None
        version = about.pop("comparison", None) if isinstance(about, dict) else None
        if version != VERSION or {*TABLE, "verdict"} != {*table.columns}:
            raise RunError(
                "the saved comparison is of another version of roundoff",
                where=where,
                expected=f"version {VERSION}",
                got=f"version {version}",
                do="compare the two runs again",
            )
        return cls(table, about)


VERSION = 1
ABOUT_FILE, TABLE_FILE = "comparison.json", "comparison.parquet"
#: What a row is called by.
LABEL = (
    "site",
    "reference_site",
    "name",
    "call",
    "phase",
    "line",
    "rank",
    "step",
    "error",
)


def is_saved(path: str | Path) -> bool:
    """Whether a comparison, rather than a run, is here."""
    try:
        return bool(_bytes(_within(path, ABOUT_FILE)))
    except Exception:  # noqa: BLE001 - whatever is wrong is said when the run is loaded
        return False


def _within(folder: str | Path, name: str) -> str | Path:
    return (
        f"{str(folder).rstrip('/')}/{name}"
        if is_url(folder)
        else local_path(folder) / name
    )


def _bytes(place: str | Path) -> bytes:
    if not is_url(place):
        return Path(place).read_bytes()
    import fsspec

    with fsspec.open(str(place), "rb") as file:
        return bytes(file.read())


def compare(
    *,
    reference: str | Path | Run,
    candidate: str | Path | Run,
    modules: Mapping[str, str] | None = None,
    engine: str = "local",
    tensors: bool = True,
    rank: int | None = None,
    step: int | None = None,
    progress: Callable[[int, int], None] | None = None,
    **limits: float,
) -> Comparison:
    """Compare two recorded runs and name the operator at fault.

    Args:
        reference: the run to trust: its folder, its URL, or what ``load`` gave.
        candidate: the run to judge.
        modules: module of the reference -> its name in the candidate, where they differ; prefixes of names.
        engine: where the ranks are compared, as of ``engine.run_tasks``.
        tensors: use the tensors that both runs kept; without, statistics alone, which is faster.
        rank: only this one; all when None.
        step: only this one; all when None.
        progress: called with (ranks done, ranks) after each.
        limits: as of :meth:`Comparison.judge`.

    Ranks and steps that only one run has are a row each. Raises ``RunError`` when a run cannot be read, when the two have
    no rank and step in common, and when ``modules`` names a module that its run does not have.
    """
    ours, theirs = (
        run if isinstance(run, Run) else load(str(run))
        for run in (reference, candidate)
    )
    near = {"reference": beside(ours), "candidate": beside(theirs)}
    floors = [
        floor_of(run, near[side]["noise"], near[side]["repeat"])
        for side, run in (("reference", ours), ("candidate", theirs))
    ]
    settings = Settings(dict(modules or {}), tensors, floors[0], floors[1])
    ranks = common("rank", ours.ranks, theirs.ranks, rank)
    steps = common("step", ours.steps, theirs.steps, step)
    levels = [run.about.level for run in (ours, theirs)]
    if levels[0] != levels[1] and None not in levels:
        raise RunError(
            "the two runs were not recorded at the same level",
            got=f"{levels[0]} and {levels[1]}",
            do="record both with the same --level: op sees every operator",
        )
    if modules:
        check_modules(ours, theirs, ranks[0], steps[0], modules)
    given: Sequence[Any] = (ours, theirs)
    if engine != "local":
        given = tuple(
            str(run.path if isinstance(run, Run) else run)
            for run in (reference, candidate)
        )
    found = run_tasks(
        compare_rank,
        [(*given, rank, steps, settings) for rank in ranks],
        engine=engine,
        progress=progress,
    )
    lonely, notes = [], []
    for noun, mine, other, asked in (
        ("rank", ours.ranks, theirs.ranks, rank),
        ("step", ours.steps, theirs.steps, step),
    ):
        for side, here, there in (
            ("reference", mine, other),
            ("candidate", other, mine),
        ):
            extra = [n for n in here if n not in there and asked is None]
            lonely += [
                {
                    noun: n,
                    "status": f"only in {side}",
                    "reason": f"the other run has no {noun} {n}",
                }
                for n in extra
            ]
            notes += [f"Only the {side} has {span(noun, extra)}"] if extra else []
    table = received(whole([*(frame for frame, _ in found), frame_of(lonely)]))
    calls = table["status"].filter(table["call"] >= 0)
    if len(calls) and not calls.is_in([MATCHED]).any():
        raise RunError(
            "the two runs have no operator in common",
            where=theirs.location,
            got=f"{len(calls):,} calls that only one of them has",
            expected="two runs of one model",
            do="where modules have other names, say so with --map",
        )
    same = same_program(ours, theirs)
    random = not_reproducible(
        "reference", ours, near["reference"]["repeat"] or ([theirs] if same else [])
    )
    random += not_reproducible("candidate", theirs, near["candidate"]["repeat"])
    table = mark(table, random)
    differs = bool(table.select((pl.col("error") > 0).any()).item())
    more = {side: sum(map(len, runs.values())) for side, runs in near.items()}
    runs = {"reference": ours, "candidate": theirs}
    about = {
        **{side: run.location for side, run in runs.items()},
        "damage": [line for _, lines in found for line in lines],
        "notes": notes,
        "unstable": random,
        "repeats": sentences(random, more, same and differs),
        "kept": {side: run.about.keep or "tensors" for side, run in runs.items()},
        "environment": {
            side: run.about.environment or [] for side, run in runs.items()
        },
    }
    return Comparison(table, about).judge(**limits)


def common(
    noun: str, ours: Sequence[int], theirs: Sequence[int], asked: int | None
) -> list[int]:
    """What both runs have; of it only what was asked for."""
    both = [n for n in ours if n in theirs and asked in (None, n)]
    if not both:
        got = f"{span(noun, ours)} in the reference, {span(noun, theirs)} in the candidate"
        what = "the two runs have" + (
            f" no {noun} in common" if asked is None else f" not both {noun} {asked}"
        )
        raise RunError(
            what,
            where=f"--{noun}" if asked is not None else None,
            got=got,
            do=f"record the same {noun}s of both",
        )
    return both


def without_tensors(reference: Run, candidate: Run) -> str | None:
    """Why tensors cannot be compared, None where both runs kept them."""
    lacking = [
        side
        for side, run in (("reference", reference), ("candidate", candidate))
        if run.about.keep not in ("tensors", None)
    ]
    if not lacking:
        return None
    who = "neither run kept" if len(lacking) == 2 else f"the {lacking[0]} did not keep"
    return f"{who} tensors, so there are statistics alone: record with --keep tensors"
