"""Run: a recording on disk, read lazily. Nothing is unpickled; damage is an error
that names the file."""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator, Sequence
from functools import cached_property
from pathlib import Path
from typing import Any

import polars as pl
import torch

from roundoff.errors import RunError, examples
from roundoff.record.disk import scalars
from roundoff.record.disk.checked_reading import (
    columns_of,
    damaged,
    fill_columns,
    has_checksum,
    is_checksum,
    read_checked,
    read_json,
)
from roundoff.record.disk.description import RunDescription, check_checksum
from roundoff.record.disk.foreign_table import check_table
from roundoff.record.disk.mark import is_own
from roundoff.record.disk.schema import (
    CHECKSUMS,
    LOOP,
    OPERATORS,
    OPS,
    SCALAR_FILE,
    SCALARS,
    SET_UP,
    STEP_FILE,
    is_chunk,
    rank_name,
    site_name,
    step_name,
)
from roundoff.record.disk.stored_tensor import StoredTensor
from roundoff.record.disk.tensors import TensorFile
from roundoff.record.disk.typed_rows import rows_of_table
from roundoff.record.loop_events import LoopEvent
from roundoff.record.set_up import SetUp

_INDEX_COLUMNS = (
    "record",
    "call",
    "phase",
    "place",
    "role",
    "name",
    "blob",
    "reason",
    "shape",
    "stride",
    "offset",
)


class Run:
    """One recorded execution; made by :func:`roundoff.record.disk.loading.load`.

    Attributes:
        path: its folder.
        about: what ``run.json`` says, as far as it was written.
    """

    def __init__(
        self, path: Path, about: RunDescription, steps_of: dict[int, list[int]]
    ) -> None:
        self.path = path
        self.about = about
        self._steps_of = steps_of
        self._checksums: dict[Path, dict[str, dict[str, Any]]] = {}
        #: folder of a step -> key -> file of tensors
        self._files: dict[Path, dict[str, Path]] = {}
        #: tables whose checksums are right -> their columns
        self._sound: dict[Path, tuple[tuple[str, Any], ...]] = {}
        #: (rank, step) of the latest lookup, and its rows
        self._index: tuple[tuple[int, int] | None, pl.DataFrame] = None, pl.DataFrame()

    def __repr__(self) -> str:
        steps = self.steps
        span = f"{steps[0]} to {steps[-1]}" if steps else "none"
        state = "" if self.about.complete is True else ", not complete"
        return (
            f"Run({self.location!r}, {len(steps)} steps: {span}, "
            f"{len(self.ranks)} ranks{state})"
        )

    @property
    def location(self) -> str:
        """The folder, or the URL it was loaded from without what is secret in it."""
        return str(self.path)

    @property
    def ranks(self) -> list[int]:
        """The ranks that recorded something, rising."""
        return sorted(self._steps_of)

    @property
    def steps(self) -> list[int]:
        """The steps that at least one rank finished, rising."""
        return sorted({step for steps in self._steps_of.values() for step in steps})

    @cached_property
    def ops(self) -> pl.LazyFrame:
        """The rows of all ranks and steps, columns as in OPS; null where a file lacks
        one.

        Raises ``RunError`` naming the first damaged file: all of them are checked here,
        by their checksums, since a lazy frame could only fail later and without saying
        where.
        """
        return self._scan(self._folders())

    def part(self, rank: int | None = None, step: int | None = None) -> pl.LazyFrame:
        """The rows of one rank, one step, or one step of one rank, as of ``ops``.

        Only their files are opened. No rows where the run has no such rank or step.
        Raises ``RunError`` naming the first damaged file among them.
        """
        return self._part(rank, step)

    def collected(self, query: pl.LazyFrame) -> pl.DataFrame:
        """Return the rows of a query over ``ops`` or ``part``.

        Raises ``RunError`` naming the run where a table is damaged in spite of its
        checksum.
        """
        return read_checked(self.path, query.collect)

    @cached_property
    def scalars(self) -> pl.LazyFrame:
        """``rank``, ``step``, ``name``, ``value`` of all scalars.

        Raises ``RunError`` naming a damaged file.
        """
        return self._numbers_in(SCALAR_FILE)

    @cached_property
    def step_numbers(self) -> pl.LazyFrame:
        """``rank``, ``step``, ``name``, ``value`` of all steps of the program, recorded
        or not: its losses, learning rates, counts. Empty for earlier versions.

        Raises ``RunError`` naming a damaged file.
        """
        return self._numbers_in(STEP_FILE)

    def set_up(self, rank: int) -> SetUp | None:
        """Return how a rank of the program was set up; None where it is not recorded.

        Raises ``RunError`` naming a damaged file.
        """
        path = self.path / rank_name(rank) / SET_UP
        if not path.is_file():
            return None
        content = read_checked(path, read_json, path)
        if not isinstance(content, dict):
            raise damaged(path, "no object")
        check_checksum(path, content)
        return SetUp.from_json(content, str(path))

    def _numbers_in(self, name: str) -> pl.LazyFrame:
        schema = {"rank": pl.Int32, **SCALARS}
        frames = [pl.LazyFrame(schema=schema)]
        for rank, path in self._rank_files(name):
            table = read_checked(path, scalars.read, path)
            number = pl.lit(rank, pl.Int32).alias("rank")
            frames.append(table.select(number, *SCALARS).lazy())
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
        """Return a kept tensor, mapped from its file; changing it does not change the file.

        Args:
            site: as in the tables, ``encoder.0/matmul#1``, or the name of a parameter
                or buffer.
            phase: of the site: ``forward``, ``backward``, ``optimizer``,
                ``collective``.
            place: which output of the site.
            role: ``output``; in a dump of another tool also ``input``, ``parameter``
                and ``grad``.
            rank: whose.
            step: which; when it is None, the first that has the tensor.
            record: the row's ``record`` instead of ``site``, ``phase`` and ``place``.

        Raises ``RunError`` when there is no such row (the nearest names are listed),
        when it has no tensor, and when the file is damaged.
        """
        if (site is None) == (record is None):
            raise RunError(
                "which tensor is not clear",
                where="Run.tensor",
                expected="either a site or a record",
                got="both" if site is not None else "neither",
            )
        if record is not None:
            is_wanted = pl.col("record") == record
        else:
            is_site = (
                (pl.col("site") == site)
                & (pl.col("phase") == phase)
                & (pl.col("place").fill_null(0) == place)
                & (pl.col("role").fill_null("output") == role)
            )
            is_wanted = is_site | ((pl.col("name") == site) & (pl.col("call") == -1))
        steps = [step] if step is not None else self._steps_of.get(rank, [])
        first_without: dict[str, Any] | None = None
        for number in steps:
            rows = self._rows(rank, number).filter(is_wanted)
            kept_rows = rows.filter(pl.col("blob").is_not_null()).head(1)
            for stored in _stored_tensors(kept_rows, rank, number):
                return self.kept(stored)
            if first_without is None and rows.height:
                first_without = rows.row(0, named=True)
        if first_without is not None:
            raise self._not_kept(rank, first_without)
        place_name = _place_name(phase, place, role)
        raise self._no_such_tensor(site, place_name, rank, steps, step, record)

    def kept(self, stored: StoredTensor) -> torch.Tensor:
        """Return the tensor of a row that has a ``blob``, as :meth:`tensor` gives it.

        A sample is flat.
        """
        if stored.blob is None:
            raise damaged(self.path, f"record {stored.record} names no tensor")
        elements = self.blob(stored.rank, stored.step, stored.blob)
        if stored.stride is None or self.about.keep == "sample":
            return elements
        return stored.strided(elements, self.path)

    def loop(self, rank: int, step: int) -> list[LoopEvent]:
        """Return what the loop of one rank did in a step, in order.

        Nothing for a step, or a recording, that has none. Raises ``RunError`` naming a
        damaged file.
        """
        if step not in self._steps_of.get(rank, ()):
            return []
        path = self.path / rank_name(rank) / step_name(step) / LOOP
        entry = self._checksums_of(path.parent).get(LOOP)
        if entry is None:  # of an earlier version, or another tool
            return []
        if not has_checksum(self._present(path), entry):
            raise damaged(path, "other bytes than were written, or none")
        entries = read_checked(path, read_json, path)
        if not isinstance(entries, list):
            raise damaged(path, "not a list of events")
        return [LoopEvent.of_json(each, str(path)) for each in entries]

    def is_own(self, rank: int, step: int) -> bool:
        """Return True for a step that this user has recorded and nobody has changed.

        Only there operators run again in this process.
        """
        return is_own(self.path / rank_name(rank) / step_name(step))

    def stored(self, rank: int, step: int) -> dict[int, StoredTensor]:
        """Return where the tensors of one step of one rank are, by record."""
        stored = _stored_tensors(self._rows(rank, step), rank, step)
        return {tensor.record: tensor for tensor in stored}

    def verify(self) -> list[Path] | list[str]:
        """The damaged files: missing, of another length, or with other bytes than were
        written. Empty if all is well."""
        broken: list[Path] = []
        for folder in self._folders():
            try:
                checksums = self._checksums_of(folder)
            except RunError:
                broken.append(folder / CHECKSUMS)
                continue
            for name, entry in checksums.items():
                if not has_checksum(self._present(folder / name), entry):
                    broken.append(folder / name)
        for name in (SCALAR_FILE, STEP_FILE):
            for _, path in self._rank_files(name):
                try:
                    read_checked(path, scalars.read, path)
                except RunError:
                    broken.append(path)
        for rank in self.ranks:
            try:
                self.set_up(rank)
            except RunError:
                broken.append(self.path / rank_name(rank) / SET_UP)
        return broken

    def blob(
        self,
        rank: int,
        step: int,
        key: str,
        opened: dict[Path, TensorFile] | None = None,
    ) -> torch.Tensor:
        """Return what the tables call ``blob``: elements in the order of memory.

        With ``opened`` the files stay open in it: quick for many tensors, but whoever
        changes one changes what is read from it later. Raises ``RunError`` naming a
        damaged file.
        """
        folder = self.path / rank_name(rank) / step_name(step)
        path = self._files_of(folder).get(key)
        if path is None:
            raise damaged(
                folder, f"no file of tensors has the key {key!r} that the table names"
            )
        opened = {} if opened is None else opened
        if path not in opened:
            opened[path] = read_checked(path, TensorFile, self._present(path))
        return read_checked(path, opened[path].read, key)

    def _rank_files(self, name: str) -> Iterator[tuple[int, Path]]:
        for rank in self.ranks:
            path = self.path / rank_name(rank) / name
            if path.exists():
                yield rank, path

    def _folders(
        self, only_rank: int | None = None, only_step: int | None = None
    ) -> Iterator[Path]:
        for rank in self.ranks:
            if only_rank not in (None, rank):
                continue
            for step in self._steps_of[rank]:
                if only_step in (None, step):
                    yield self.path / rank_name(rank) / step_name(step)

    def _scan(self, folders: Iterable[Path]) -> pl.LazyFrame:
        # files with the same columns make one scan, those of other versions their own
        groups: dict[tuple[tuple[str, Any], ...], list[Path]] = {}
        for folder in folders:
            path = folder / OPERATORS
            if path not in self._sound:
                if not has_checksum(path, self._checksums_of(folder)[OPERATORS]):
                    raise damaged(path, "other bytes than were written, or none")
                columns = columns_of(path, OPS)
                if not is_own(folder):
                    check_table(path)
                self._sound[path] = tuple(columns.items())
            groups.setdefault(self._sound[path], []).append(path)
        scans = [
            # a folder may be called "lr=0.1" or "run[1]": names mean nothing here
            pl.scan_parquet(paths, glob=False, hive_partitioning=False).select(
                fill_columns(dict(columns), OPS)
            )
            for columns, paths in groups.items()
        ]
        return pl.concat(scans) if scans else pl.LazyFrame(schema=OPS)

    def _rows(self, rank: int, step: int) -> pl.DataFrame:
        """Return what finds a tensor, in the order of records.

        No rows where the run has no such rank or step. The latest step is kept: callers
        go through the records of a step.
        """
        if self._index[0] != (rank, step):
            lazy = self._part(rank, step)
            query = lazy.select(*_INDEX_COLUMNS, site_name()).sort("record")
            self._index = (rank, step), read_checked(self.path, query.collect)
        return self._index[1]

    def _part(self, rank: int | None, step: int | None) -> pl.LazyFrame:
        return self._scan(self._folders(rank, step))

    def _not_kept(self, rank: int, row: dict[str, Any]) -> RunError:
        return RunError(
            "no tensor was kept for this row",
            where=f"{self.path}: rank {rank}, record {row['record']}, {row['site']}",
            got=row["reason"],
            do='record with keep="tensors"',
        )

    def _no_such_tensor(
        self,
        site: str | None,
        place: str,
        rank: int,
        steps: Sequence[int],
        step: int | None,
        record: int | None,
    ) -> RunError:
        names: set[str] = set()
        places: set[str] = set()
        for number in steps:
            rows = self._rows(rank, number)
            names |= {*rows["site"].drop_nulls(), *rows["name"].drop_nulls()}
            places |= _places_of(rows, site)
        if not names:
            expected = f"a rank of {self.ranks}, a step of {_listed(self.steps)}"
        elif places:
            expected = "; ".join(sorted(places)[:8])
        elif site is None:
            expected = "a value of the column record in Run.ops"
        else:
            choices = examples(site, sorted(names))
            expected = f"one of {len(names)} names, such as {choices}"
        in_step = "" if step is None else f", step {step}"
        return RunError(
            "the run has no such tensor",
            where=f"{self.path}: rank {rank}{in_step}",
            expected=expected,
            got=f"{site!r}, {place}" if site else f"record {record}",
        )

    def _files_of(self, folder: Path) -> dict[str, Path]:
        """Key -> file of tensors, of the step in a folder."""
        if folder not in self._files:
            files: dict[str, Path] = {}
            for name in filter(is_chunk, self._checksums_of(folder)):
                files |= dict.fromkeys(self._keys(folder / name), folder / name)
            self._files[folder] = files
        return self._files[folder]

    def _present(self, path: Path) -> Path:
        """Return the path, the file fetched if it is elsewhere."""
        return path

    def _keys(self, path: Path) -> list[str]:
        size = read_checked(path, os.path.getsize, path)
        if size != self._checksums_of(path.parent)[path.name]["bytes"]:
            raise damaged(path, f"{size} bytes, not as many as were written")
        return read_checked(path, TensorFile, path).keys

    def _checksums_of(self, folder: Path) -> dict[str, dict[str, Any]]:
        if folder not in self._checksums:
            path = folder / CHECKSUMS
            content = read_checked(path, read_json, path)
            if not _is_checksum_table(content):
                raise damaged(path, "not a table of checksums")
            self._checksums[folder] = content
        return self._checksums[folder]


def _stored_tensors(rows: pl.DataFrame, rank: int, step: int) -> list[StoredTensor]:
    """Return where the tensors of these rows of one step of one rank are."""
    place = rows.with_columns(rank=pl.lit(rank), step=pl.lit(step))
    return rows_of_table(StoredTensor, place)


def _is_checksum_table(content: Any) -> bool:
    if not isinstance(content, dict) or OPERATORS not in content:
        return False
    named = all(name in (OPERATORS, LOOP) or is_chunk(name) for name in content)
    return named and all(map(is_checksum, content.values()))


def _places_of(rows: pl.DataFrame, site: str | None) -> set[str]:
    """Return the phases, places and roles in which a step has a site."""
    of_site = rows.filter(pl.col("site") == pl.lit(site, pl.Utf8)).select(
        "phase", pl.col("place").fill_null(0), pl.col("role").fill_null("output")
    )
    return {_place_name(*row) for row in of_site.drop_nulls().unique().iter_rows()}


def _place_name(phase: str, place: int, role: str) -> str:
    name = f"phase {phase}, place {place}"
    return name if role == "output" else f"{name}, role {role}"


def _listed(steps: list[int]) -> str:
    if len(steps) <= 8:
        return str(steps)
    return f"{steps[0]} to {steps[-1]} ({len(steps)})"
