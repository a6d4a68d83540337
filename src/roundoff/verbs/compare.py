"""Comparison: a reference run against a candidate run, aligned, measured and judged."""

from __future__ import annotations

import io
import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any

import polars as pl

from roundoff.compare import (
    FAIL,
    MATCHED,
    TABLE,
    About,
    ComparedRow,
    ComparisonCoverage,
    ComparisonSummary,
    Culprit,
    RankResult,
    RoundingContribution,
    Settings,
    blamed_for_changing,
    chart_points,
    check_modules,
    compare_layouts,
    compare_rank,
    coverage_of,
    culprits_in,
    fault_in,
    first_of,
    floor_of,
    frame_of,
    judged,
    left_open,
    not_reproducible,
    program_notes,
    received,
    recorded_beside,
    repeat_notes,
    rounding_in,
    rows_to_show,
    same_program,
    summarise,
    verdicts_of,
    whole,
)
from roundoff.engine import run_tasks
from roundoff.errors import RunError
from roundoff.files import is_url, local_path, masked, open_output, write_text
from roundoff.foreign import parse_json, read_bytes, regular
from roundoff.notebook import table as html_table
from roundoff.record import Run, as_run
from roundoff.report import answer_comparison, plain, span, write_comparison
from roundoff.unforeseen import panics_raised

VERSION = 1
ABOUT_FILE = "comparison.json"
TABLE_FILE = "comparison.parquet"


@dataclass(frozen=True)
class Comparison:
    """The result of :func:`compare`; a saved one is the same again.

    Attributes:
        table: a row for each value of either run, in the order of execution; columns
            are the fields of ``compare.JudgedRow``.
        about: what was compared, and by which limits.
    """

    table: pl.DataFrame
    about: About

    def __repr__(self) -> str:
        about = self.about
        return (
            f"<Comparison of {about.reference} and {about.candidate}: {self._verdict}>"
        )

    def _repr_html_(self) -> str:
        rows = [
            (
                str(culprit.site or culprit.reference_site),
                str(culprit.phase),
                culprit.line or "",
                culprit.looks_like or "",
            )
            for culprit in self._named
        ]
        about = self.about
        return html_table(
            f"{about.reference} against {about.candidate}",
            [self.answer],
            ("operator", "phase", "line", "looks like"),
            rows,
        )

    @property
    def _verdict(self) -> str:
        """What was decided, in a few words."""
        counts = [f"{n:,} {name}" for name, n in self.verdicts.items() if n]
        return ", ".join(counts) or "no values"

    @cached_property
    def _named(self) -> list[Culprit]:
        return culprits_in(self.table, self.about.causes)

    def culprits(self, n: int | None = None) -> list[Culprit]:
        """The operators that made an error which rounding does not explain.

        The likeliest first; at most ``n``.
        """
        return self._named[:n]

    def rounding(self, n: int = 5) -> list[RoundingContribution]:
        """The operators whose rounding makes most of the error at the end of a step.

        Of the first step that differs; operators that make errors beyond rounding are
        left out.
        """
        return rounding_in(self.table, n)

    @property
    def divergence(self) -> Culprit | None:
        """The first culprit in the order of execution; None without any.

        Its inputs agree, its output does not.
        """
        return first_of(self._named)

    @cached_property
    def coverage(self) -> ComparisonCoverage:
        """How many rows have a counterpart and were measured, and why others were not."""
        return coverage_of(self.table)

    @property
    def verdicts(self) -> dict[str, int]:
        """How many rows pass, fail and are undecided."""
        return verdicts_of(self.table)

    @property
    def agrees(self) -> bool:
        """True where no row fails and every measured one could be judged."""
        return not self.fails and not self.open

    @property
    def fails(self) -> bool:
        """True where a row fails, or something behind the operators differs."""
        return FAIL in self.verdicts or self.about.blames

    @property
    def open(self) -> int:
        """How many measured rows can be called neither right nor wrong."""
        return left_open(self.table)

    def judge(self, *, margin: float = 1.0, **limits: float) -> Comparison:
        """The same measurements under other thresholds; nothing is computed again.

        Args:
            margin: factor of the derived tolerance.
            limits: replace it: ``cosine=0.98`` fails what is below, ``max_abs=1e-3``
                what is above.

        Raises ``RunError`` for what is no metric.
        """
        table = judged(self.table.drop("verdict", strict=False), limits, margin)
        return Comparison(table, replace(self.about, limits=limits, margin=margin))

    def summary(self, rows: int | None = None) -> ComparisonSummary:
        """The comparison without its table.

        Args:
            rows: how many culprits, and rows to look at: those that fail, then the
                largest contributions. None for all culprits and no rows.
        """
        summary = summarise(self.table, self.about, self._named, self.coverage, rows)
        if rows is None:
            return summary
        return replace(summary, rows=rows_to_show(self.table, rows))

    def to_dict(self, rows: int = 20) -> dict[str, Any]:
        """The comparison as plain data, with the culprits and rows of ``summary``."""
        return {"answer": self.answer, **plain(self.summary(rows))}

    @cached_property
    def answer(self) -> str:
        """The first paragraph of the report."""
        return " ".join(answer_comparison(self.summary()))

    def report(self, path: str | Path, *, rows: int = 2000) -> None:
        """Write one self-contained HTML page to a path or URL.

        It shows the culprits and rows of ``summary``. Raises ``OutputError`` when it
        cannot be written.
        """
        points = chart_points(self.table, self.divergence)
        write_comparison(replace(self.summary(rows), points=points), path)

    def save(self, path: str | Path) -> None:
        """Write ``comparison.parquet`` and ``comparison.json`` into a folder or URL.

        Each is written whole or not at all. Raises ``OutputError`` when they cannot be.
        """
        with open_output(_within(path, TABLE_FILE)) as temporary:
            self.table.write_parquet(temporary)
        text = json.dumps({**plain(self.about), "comparison": VERSION})
        # last: a folder with it is a whole comparison
        write_text(_within(path, ABOUT_FILE), text)

    @classmethod
    def load(cls, path: str | Path) -> Comparison:
        """Read what :meth:`save` wrote, to be judged again.

        Raises ``RunError`` where none is, or it is damaged or newer.
        """
        where = masked(str(path))
        try:
            about = parse_json(_bytes(_within(path, ABOUT_FILE)))
            place = _within(path, TABLE_FILE)
            source = io.BytesIO(_bytes(place)) if is_url(path) else regular(Path(place))
            with panics_raised():
                table = pl.read_parquet(source, glob=False)
        except FileNotFoundError as error:
            raise RunError(
                "no comparison is saved here",
                where=where,
                expected=f"{ABOUT_FILE} and {TABLE_FILE}",
                do="roundoff compare REFERENCE CANDIDATE --save DIR makes one",
            ) from error
        except Exception as error:  # noqa: BLE001 - json's, polars', a protocol's
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
        fault = fault_in(table)
        if fault is not None:
            raise RunError(
                "the saved comparison cannot be read",
                where=where,
                do="compare the two runs again",
                got=fault,
            )
        return cls(table, About.from_dict(about, where=where))


def is_saved(path: str | Path) -> bool:
    """Return True where a comparison, rather than a run, is saved."""
    place = _within(path, ABOUT_FILE)
    try:
        return _exists(place)
    except (OSError, ValueError, ImportError):
        # no such protocol, no library for it, no way there: loading says what is wrong
        return False


def _exists(place: str | Path) -> bool:
    if not is_url(place):
        return Path(place).is_file()
    from fsspec.core import url_to_fs

    files, name = url_to_fs(str(place))
    return bool(files.exists(name))


def _within(folder: str | Path, name: str) -> str | Path:
    if is_url(folder):
        return f"{str(folder).rstrip('/')}/{name}"
    return local_path(folder) / name


def _bytes(place: str | Path) -> bytes:
    if not is_url(place):
        return read_bytes(Path(place))
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

    Ranks and steps that only one run has are a row each.

    Args:
        reference: the run to trust: its folder, its URL, or what ``load`` gave.
        candidate: the run to judge.
        modules: module of the reference -> its name in the candidate, where they
            differ; prefixes of names.
        engine: where the ranks are compared, as of ``engine.run_tasks``.
        tensors: use the tensors that both runs kept; without, compare as if
            ``keep="stats"`` had been recorded.
        rank: only this one; all when None.
        step: only this one; all when None.
        progress: called with (ranks done, ranks) after each.
        limits: as of :meth:`Comparison.judge`.

    Raises ``RunError`` when a run cannot be read, when the two have no rank and step in
    common, and when ``modules`` names a module that its run does not have.
    """
    ours = as_run(reference)
    theirs = as_run(candidate)
    steps = common("step", ours.steps, theirs.steps, step)
    shared = rank is None and _is_work_shared(ours, theirs, steps[0])
    ranks = _ranks_of_reference(ours, theirs, rank, shared=shared)
    parts_of_work: Sequence[Any] = [theirs.ranks] if shared else ranks
    _check_levels(ours, theirs)
    if modules:
        check_modules(ours, theirs, ranks[0], steps[0], modules)
    near_ours = recorded_beside(ours)
    near_theirs = recorded_beside(theirs)
    unchanged = same_program(ours, theirs)
    repeats_of_ours = near_ours.repeat or ([theirs] if unchanged else [])
    unstable = [
        *not_reproducible("reference", ours, repeats_of_ours),
        *not_reproducible("candidate", theirs, near_theirs.repeat),
    ]
    settings = Settings(
        modules=dict(modules or {}),
        tensors=tensors,
        floor=floor_of(ours, near_ours),
        candidate_floor=floor_of(theirs, near_theirs),
        unstable=unstable,
    )
    sides: tuple[Any, Any] = (ours, theirs)
    if engine != "local":
        sides = (_place(reference), _place(candidate))
    tasks = [(*sides, which, steps, settings) for which in parts_of_work]
    parts = run_tasks(
        compare_layouts if shared else compare_rank,
        tasks,
        engine=engine,
        progress=progress,
    )
    extras = _extras(ours, theirs, rank, step, shared=shared)
    table = _joined([part.table for part in parts], extras)
    _check_common_operators(table, theirs)
    differs = bool(table.select((pl.col("error") > 0).any()).item())
    more_runs = {"reference": len(near_ours), "candidate": len(near_theirs)}
    about = replace(
        _about(ours, theirs, parts),
        notes=[extra.note for extra in extras],
        unstable=unstable,
        programs=tuple(program_notes(ours, theirs)) if differs else (),
        repeats=repeat_notes(unstable, more_runs, unchanged=unchanged and differs),
    )
    return Comparison(blamed_for_changing(table, unstable), about).judge(**limits)


def _is_work_shared(reference: Run, candidate: Run, step: int) -> bool:
    """Return True where several ranks share the work of the reference's only one.

    Not where a rank makes the same calls on values of the same shapes: it does all of
    the work itself. A damaged step says nothing, and is told of later.
    """
    if not len(reference.ranks) == 1 < len(candidate.ranks):
        return False
    [rank] = reference.ranks
    if rank not in candidate.ranks:
        return True
    columns = ("phase", "module", "operator", "place", "shape")
    try:
        ours, theirs = (
            run.part(rank, step).sort("record").select(columns).collect()
            for run in (reference, candidate)
        )
    except RunError:
        return True
    return not ours.equals(theirs)


def _ranks_of_reference(
    ours: Run, theirs: Run, asked: int | None, *, shared: bool
) -> list[int]:
    """The ranks of the reference to compare; its only one where others share its work."""
    if shared:
        return list(ours.ranks)
    return common("rank", ours.ranks, theirs.ranks, asked)


def _about(reference: Run, candidate: Run, parts: Sequence[RankResult]) -> About:
    """What the two runs say of themselves, and what was seen rank by rank."""
    sides = {"reference": reference, "candidate": candidate}
    return About(
        reference=reference.location,
        candidate=candidate.location,
        kept={side: run.about.keep or "tensors" for side, run in sides.items()},
        environment={side: run.about.environment or () for side, run in sides.items()},
        damage=[line for part in parts for line in part.damage],
        causes=[cause.culprit() for part in parts for cause in part.causes],
    )


def _joined(frames: Sequence[pl.DataFrame], extras: Sequence[_Extra]) -> pl.DataFrame:
    """The table of all ranks, and a row for what only one run has."""
    lonely = [row for extra in extras for row in extra.rows]
    return received(whole([*frames, frame_of(lonely)]))


@dataclass(frozen=True)
class _Extra:
    """Ranks or steps that only one run has: a note, and a row for each."""

    note: str
    rows: Sequence[ComparedRow]


def _extras(
    ours: Run, theirs: Run, rank: int | None, step: int | None, *, shared: bool
) -> list[_Extra]:
    """What only one run has, unless one rank or step was asked for.

    ``shared``: the ranks of the candidate share the work of the reference's only one.
    """
    extras = []
    for noun, asked, in_ours, in_theirs in (
        ("rank", rank, ours.ranks, theirs.ranks),
        ("step", step, ours.steps, theirs.steps),
    ):
        if asked is not None or (shared and noun == "rank"):
            continue
        only_ours = [n for n in in_ours if n not in in_theirs]
        only_theirs = [n for n in in_theirs if n not in in_ours]
        if only_ours:
            extras.append(_extra("reference", noun, only_ours))
        if only_theirs:
            extras.append(_extra("candidate", noun, only_theirs))
    return extras


def _extra(side: str, noun: str, numbers: Sequence[int]) -> _Extra:
    rows = []
    for number in numbers:
        at: dict[str, Any] = {noun: number}
        reason = f"the other run has no {noun} {number}"
        rows.append(ComparedRow(status=f"only in {side}", reason=reason, **at))
    return _Extra(f"Only the {side} has {span(noun, numbers)}", rows)


def _check_levels(reference: Run, candidate: Run) -> None:
    ours = reference.about.level
    theirs = candidate.about.level
    if ours is None or theirs is None or ours == theirs:
        return
    raise RunError(
        "the two runs were not recorded at the same level",
        got=f"{ours} and {theirs}",
        do="record both with the same --level: op sees every operator",
    )


def _check_common_operators(table: pl.DataFrame, candidate: Run) -> None:
    calls = table["status"].filter(table["call"] >= 0)
    if not len(calls) or calls.is_in([MATCHED]).any():
        return
    raise RunError(
        "the two runs have no operator in common",
        where=candidate.location,
        got=f"{len(calls):,} calls that only one of them has",
        expected="two runs of one model",
        do="where modules have other names, say so with --map",
    )


def _place(run: str | Path | Run) -> str:
    return str(run.path if isinstance(run, Run) else run)


def common(
    noun: str, ours: Sequence[int], theirs: Sequence[int], asked: int | None
) -> list[int]:
    """The ranks or steps that both runs have; only the one that was asked for.

    Raises ``RunError`` without any. ``noun`` is ``rank`` or ``step``.
    """
    both = [n for n in ours if n in theirs and asked in (None, n)]
    if both:
        return both
    lacking = f" no {noun} in common" if asked is None else f" not both {noun} {asked}"
    raise RunError(
        f"the two runs have{lacking}",
        where=None if asked is None else f"--{noun}",
        got=f"{span(noun, ours)} in the reference, {span(noun, theirs)} in the candidate",
        do=f"record the same {noun}s of both",
    )
