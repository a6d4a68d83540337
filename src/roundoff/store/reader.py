"""Run: a recording on disk, read lazily. Nothing is unpickled, and damage is an error that names the file."""

from __future__ import annotations

import difflib
import os
from collections.abc import Iterator
from functools import cached_property
from pathlib import Path
from typing import Any

import polars as pl
import torch

from roundoff.errors import RunError
from roundoff.store.checked import (
    columns_of,
    damaged,
    fill,
    matches,
    read_json,
    read_table,
    reading,
)
from roundoff.store.schema import (
    ABOUT,
    CHECKSUMS,
    OPERATORS,
    OPS,
    SCALAR_FILE,
    SCALARS,
    SCHEMA,
    is_chunk,
    parse_rank,
    parse_step,
    rank_name,
    site_name,
    step_name,
)
from roundoff.store.tensors import keys, read_tensor


def load(path: str | os.PathLike[str]) -> Run:
    """The run in the folder ``path``, also one that is still being written or whose process was killed; or in a dump of
    msprobe, see :mod:`roundoff.store.msprobe`.

    Raises ``RunError`` when it is not a run, is of a later version of roundoff, or recorded nothing.
    """
    path = Path(path)
    if not (path / ABOUT).is_file():
        from roundoff.store import msprobe  # imported late: its run is a kind of Run

        if msprobe.find_dumps(path):
            return msprobe.read_msprobe(path)
    run = Run(path, _read_about(path), _find_steps(path))
    if not run.ranks:
        raise RunError(
            "the run is empty: it ended, or was killed, before its first step was finished",
            where=str(path),
            do="let the recorded program finish at least one step",
        )
    return run


class Run:
    """One recorded execution; made by :func:`load`.

    Attributes:
        path: its folder.
        about: what ``run.json`` says: ``version``, ``complete``, ``ranks``, ``level``, ``keep``, ``environment``,
            ``coverage``... as far as it was written.
    """

    def __init__(self, path: Path, about: dict[str, Any], found: dict[int, list[int]]) -> None:
        self.path = path
        self.about = about
        self._found = found
        self._checksums: dict[Path, dict[str, dict[str, Any]]] = {}
        self._files: dict[Path, dict[str, Path]] = {}

    def __repr__(self) -> str:
        steps = self.steps
        span = f"{steps[0]} to {steps[-1]}" if steps else "none"
        state = "" if self.about.get("complete") is True else ", not complete"
        return (
            f"Run({str(self.path)!r}, {len(steps)} steps: {span}, {len(self.ranks)} ranks{state})"
        )

    @property
    def ranks(self) -> list[int]:
        """The ranks that recorded something, rising."""
        return sorted(self._found)

    @property
    def steps(self) -> list[int]:
        """The steps that at least one rank finished, rising."""
        return sorted({step for steps in self._found.values() for step in steps})

    @cached_property
    def ops(self) -> pl.LazyFrame:
        """The rows of all ranks and steps, columns as in OPS; null where a file lacks one.

        Raises ``RunError`` naming the first damaged file. All tables of operators are checked here, by their checksums,
        since a lazy frame could only fail later and without saying where.
        """
        # Files with the same columns make one scan; those of another version of roundoff their own.
        groups: dict[tuple[tuple[str, Any], ...], list[Path]] = {}
        for folder in self._folders():
            path = folder / OPERATORS
            self._check(path)
            groups.setdefault(tuple(columns_of(path, OPS).items()), []).append(path)
        scans = [
            # A folder may be called "lr=0.1" or "run[1]": names mean nothing here.
            pl.scan_parquet(paths, glob=False, hive_partitioning=False).select(
                fill(dict(columns), OPS)
            )
            for columns, paths in groups.items()
        ]
        return pl.concat(scans) if scans else pl.LazyFrame(schema=OPS)

    @cached_property
    def scalars(self) -> pl.LazyFrame:
        """``rank``, ``step``, ``name``, ``value`` of all scalars. Raises ``RunError`` naming a damaged file."""
        schema = {"rank": pl.Int32, **SCALARS}
        frames = [pl.LazyFrame(schema=schema)]
        for rank in self.ranks:
            path = self.path / rank_name(rank) / SCALAR_FILE
            if path.exists():
                columns = columns_of(path, SCALARS)
                table = reading(path, read_table, path)
                table = table.select(pl.lit(rank, pl.Int32).alias("rank"), *fill(columns, SCALARS))
                frames.append(table.lazy())
        return pl.concat(frames)

    def tensor(
        self,
        site: str | None = None,
        *,
        phase: str = "forward",
        place: int = 0,
        role: str = "output",
        rank: int = 0,
        step: int | None = None,
        record: int | None = None,
    ) -> torch.Tensor:
        """A kept tensor, mapped from its file into memory; changing it does not change the file.

        Args:
            site: as in the tables, ``encoder.0/matmul#1``, or the name of a parameter or buffer.
            phase: of the site: ``forward``, ``backward``, ``optimizer``, ``collective``.
            place: which output of the site.
            role: ``output``; in a dump of another tool also ``input``, ``parameter`` and ``grad``.
            rank: whose.
            step: which; the first that has the site, when it is None.
            record: the row's ``record`` instead of ``site``, ``phase`` and ``place``.

        Raises ``RunError`` when there is no such row (the nearest names are listed), when it has no tensor, and when
        the file is damaged.
        """
        if (site is None) == (record is None):
            raise RunError(
                "which tensor is not clear",
                where="Run.tensor",
                expected="either a site or a record",
                got="both" if site is not None else "neither",
            )
        of_rank = self._rows(rank, step)
        if record is not None:
            rows = of_rank.filter(pl.col("record") == record)
        else:
            rows = of_rank.filter(
                (
                    (pl.col("site") == site)
                    & (pl.col("phase") == phase)
                    & (pl.col("place").fill_null(0) == place)
                    & (pl.col("role").fill_null("output") == role)
                )
                | ((pl.col("name") == site) & (pl.col("call") == -1))
            )
        if rows.is_empty():
            wanted = (
                f"record {record}"
                if site is None
                else f"{site!r} in phase {phase!r}, place {place}"
            )
            raise self._no_such(of_rank, wanted, site, rank, step)
        row = rows.sort("step", "record", nulls_last=True).row(0, named=True)
        if row["blob"] is None or row["step"] is None:
            raise RunError(
                "no tensor was kept for this row",
                where=f"{self.path}: step {row['step']}, record {row['record']}, {row['site']}",
                got=row["reason"],
                do='record with keep="tensors"',
            )
        return self._blob(rank, row["step"], row["blob"])

    def verify(self) -> list[Path]:
        """The damaged files: missing, of another length, or with other bytes than were written. Empty if all is well."""
        found: list[Path] = []
        for folder in self._folders():
            try:
                sums = self._sums(folder)
            except RunError:
                found.append(folder / CHECKSUMS)
                continue
            found += [folder / name for name in sums if not matches(folder / name, sums[name])]
        for rank in self.ranks:
            path = self.path / rank_name(rank) / SCALAR_FILE
            if path.exists():
                try:
                    columns_of(path, SCALARS)
                except RunError:
                    found.append(path)
        return found

    def _folders(self) -> Iterator[Path]:
        for rank in self.ranks:
            for step in self._found[rank]:
                yield self.path / rank_name(rank) / step_name(step)

    def _rows(self, rank: int, step: int | None) -> pl.DataFrame:
        needed = ("step", "record", "call", "phase", "place", "role", "name", "blob", "reason")
        steps = [step] if step is not None else self._found.get(rank, [])
        chosen = pl.col("rank") == rank
        if step is not None:
            chosen &= pl.col("step").is_in(steps)
        query = self.ops.filter(chosen).select(*needed, site_name())
        return reading(self.path, query.collect)

    def _no_such(
        self, rows: pl.DataFrame, wanted: str, site: str | None, rank: int, step: int | None
    ) -> RunError:
        names = sorted({*rows["site"].drop_nulls(), *rows["name"].drop_nulls()})
        near = difflib.get_close_matches(site or "", names, n=3, cutoff=0.3)
        phases = sorted(
            rows.filter((pl.col("site") == site) | (pl.col("name") == site))["phase"]
            .drop_nulls()
            .unique()
        )
        where = f"{self.path}: rank {rank}" + ("" if step is None else f", step {step}")
        if rows.is_empty():
            expected = f"ranks {self.ranks}, steps {_short(self.steps)}"
        elif phases:
            expected = f"the site has rows in: {', '.join(phases)}; look at place too"
        else:
            expected = f"one of {len(names)} names" + (
                ", such as " + ", ".join(near) if near else ""
            )
        return RunError("the run has no such tensor", where=where, expected=expected, got=wanted)

    def _blob(self, rank: int, step: int, key: str) -> torch.Tensor:
        folder = self.path / rank_name(rank) / step_name(step)
        if folder not in self._files:
            files: dict[str, Path] = {}
            for name in self._sums(folder):
                if is_chunk(name):
                    path = folder / name
                    self._check_size(path)
                    files |= dict.fromkeys(reading(path, keys, path), path)
            self._files[folder] = files
        path_of = self._files[folder].get(key)
        if path_of is None:
            raise damaged(folder, f"no file of tensors has the key {key!r} that the table names")
        return reading(path_of, read_tensor, path_of, key)

    def _sums(self, folder: Path) -> dict[str, dict[str, Any]]:
        if folder not in self._checksums:
            path = folder / CHECKSUMS
            sums = reading(path, read_json, path)
            if (
                not isinstance(sums, dict)
                or OPERATORS not in sums
                or not all(name == OPERATORS or is_chunk(name) for name in sums)
                or not all(
                    isinstance(entry, dict) and {"bytes", "xxh3_128"} <= set(entry)
                    for entry in sums.values()
                )
            ):
                raise damaged(path, "not a table of checksums")
            self._checksums[folder] = sums
        return self._checksums[folder]

    def _check(self, path: Path) -> None:
        if not matches(path, self._sums(path.parent)[path.name]):
            raise damaged(path, "other bytes than were written" if path.exists() else "no file")

    def _check_size(self, path: Path) -> None:
        size = reading(path, os.path.getsize, path)
        if size != self._sums(path.parent)[path.name]["bytes"]:
            raise damaged(path, f"{size} bytes, not as many as were written")


def _read_about(path: Path) -> dict[str, Any]:
    file = path / ABOUT
    if not file.is_file():
        raise RunError(
            "no run here" if path.is_dir() else "no such folder",
            where=str(path),
            expected=f"a folder with {ABOUT} in it",
            do="give the folder that was named when the run was recorded",
        )
    about = reading(file, read_json, file)
    schema = about.get("schema") if isinstance(about, dict) else None
    if type(schema) is not int or schema < 1:
        raise RunError(
            "not the description of a roundoff run",
            where=str(file),
            expected='an object with "schema": 1',
            got=f'"schema": {schema!r}' if isinstance(about, dict) else type(about).__name__,
        )
    if schema > SCHEMA:
        raise RunError(
            "this run was recorded by a later version of roundoff",
            where=str(file),
            expected=f"schema {SCHEMA} or lower",
            got=f"schema {schema}, written by roundoff {str(about.get('version'))[:80]}",
            do="upgrade roundoff",
        )
    return dict(about)


def _find_steps(path: Path) -> dict[int, list[int]]:
    """rank -> its whole steps, rising, for each rank that has steps or scalars."""
    found: dict[int, list[int]] = {}
    for name in reading(path, os.listdir, path):
        rank = parse_rank(name)
        folder = path / name
        if rank is not None and folder.is_dir():
            names = reading(folder, os.listdir, folder)
            steps = sorted(step for name in names if (step := parse_step(name)) is not None)
            if steps or SCALAR_FILE in names:
                found[rank] = steps
    return found


def _short(steps: list[int]) -> str:
    return str(steps) if len(steps) <= 8 else f"{steps[0]} to {steps[-1]} ({len(steps)})"
