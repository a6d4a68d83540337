"""Run: a recording on disk, read lazily. Nothing is unpickled, and damage is an error that names the file."""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator, Mapping
from functools import cached_property
from pathlib import Path
from typing import Any

import polars as pl
import torch

from roundoff.errors import RunError, examples
from roundoff.record.disk import scalars
from roundoff.record.disk.checked import (
    columns_of,
    damaged,
    fill,
    is_checksum,
    matches,
    read_json,
    reading,
)
from roundoff.record.disk.schema import (
    CHECKSUMS,
    OPERATORS,
    OPS,
    SCALAR_FILE,
    SCALARS,
    is_chunk,
    rank_name,
    site_name,
    step_name,
)
from roundoff.record.disk.tensors import TensorFile

_NEEDED = (
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
        about: what ``run.json`` says: ``version``, ``complete``, ``ranks``, ``level``, ``keep``, ``environment``,
            ``coverage``... as far as it was written.
    """

    def __init__(
        self, path: Path, about: dict[str, Any], found: dict[int, list[int]]
    ) -> None:
        self.path = path
        self.about = about
        self._found = found
        self._checksums: dict[Path, dict[str, dict[str, Any]]] = {}
        self._files: dict[Path, dict[str, Path]] = {}
        self._sound: dict[
            Path, tuple[tuple[str, Any], ...]
        ] = {}  # checked tables -> their columns
        self._index: tuple[tuple[int, int] | None, pl.DataFrame] = None, pl.DataFrame()

    def __repr__(self) -> str:
        steps = self.steps
        span = f"{steps[0]} to {steps[-1]}" if steps else "none"
        state = "" if self.about.get("complete") is True else ", not complete"
        return f"Run({self.location!r}, {len(steps)} steps: {span}, {len(self.ranks)} ranks{state})"

    @property
    def location(self) -> str:
        """Where it is, for people: its folder, or the URL it was loaded from without what is secret in it."""
        return str(self.path)

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

        Raises ``RunError`` naming the first damaged file: all of them are checked here, by their checksums, since a
        lazy frame could only fail later and without saying where.
        """
        return self._scan(self._folders())

    def part(self, rank: int | None = None, step: int | None = None) -> pl.LazyFrame:
        """The rows of one rank, one step, or one step of one rank, as of ``ops``; only their files are opened.

        No rows where the run has no such rank or step. Raises ``RunError`` naming the first damaged file among them.
        """
        return self._part(rank, step)

    @cached_property
    def scalars(self) -> pl.LazyFrame:
        """``rank``, ``step``, ``name``, ``value`` of all scalars. Raises ``RunError`` naming a damaged file."""
        schema = {"rank": pl.Int32, **SCALARS}
        frames = [pl.LazyFrame(schema=schema)]
        for rank in self.ranks:
            path = self.path / rank_name(rank) / SCALAR_FILE
            if path.exists():
                table = reading(path, scalars.read, path)
                frames.append(
                    table.select(pl.lit(rank, pl.Int32).alias("rank"), *SCALARS).lazy()
                )
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
            step: which; when it is None, the first that has the tensor.
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
        wanted = (
            pl.col("record") == record
            if record is not None
            else (
                (pl.col("site") == site)
                & (pl.col("phase") == phase)
                & (pl.col("place").fill_null(0) == place)
                & (pl.col("role").fill_null("output") == role)
            )
            | ((pl.col("name") == site) & (pl.col("call") == -1))
        )
        without: dict[str, Any] | None = None
        for each in [step] if step is not None else self._found.get(rank, []):
            for row in self._rows(rank, each).filter(wanted).iter_rows(named=True):
                if row["blob"] is not None:
                    return self.kept({**row, "rank": rank, "step": each})
                without = without or row
        if without is None:
            raise self._no_such(site, phase, place, role, rank, step, record)
        raise RunError(
            "no tensor was kept for this row",
            where=f"{self.path}: rank {rank}, record {without['record']}, {without['site']}",
            got=without["reason"],
            do='record with keep="tensors"',
        )

    def kept(self, row: Mapping[str, Any]) -> torch.Tensor:
        """The tensor of a row of ``ops`` that has a ``blob``, as :meth:`tensor` gives it; a sample is flat."""
        rank, step = row["rank"], row["step"]
        kept = self.blob(rank, step, row["blob"])
        if row["stride"] is None or self.about.get("keep") == "sample":
            return kept
        return self.strided(kept, rank, step, row)

    def verify(self) -> list[Path] | list[str]:
        """The damaged files: missing, of another length, or with other bytes than were written. Empty if all is well."""
        found: list[Path] = []
        for folder in self._folders():
            try:
                sums = self._sums(folder)
            except RunError:
                found.append(folder / CHECKSUMS)
                continue
            found += [
                folder / name
                for name in sums
                if not matches(self._present(folder / name), sums[name])
            ]
        for rank in self.ranks:
            path = self.path / rank_name(rank) / SCALAR_FILE
            if path.exists():
                try:
                    reading(path, scalars.read, path)
                except RunError:
                    found.append(path)
        return found

    def _folders(
        self, only_rank: int | None = None, only_step: int | None = None
    ) -> Iterator[Path]:
        for rank in (
            self.ranks if only_rank is None else {only_rank} & self._found.keys()
        ):
            for step in self._found[rank]:
                if only_step in (None, step):
                    yield self.path / rank_name(rank) / step_name(step)

    def _scan(self, folders: Iterable[Path]) -> pl.LazyFrame:
        # Files with the same columns make one scan; those of another version of roundoff their own.
        groups: dict[tuple[tuple[str, Any], ...], list[Path]] = {}
        for folder in folders:
            path = folder / OPERATORS
            if path not in self._sound:
                if not matches(path, self._sums(folder)[OPERATORS]):
                    raise damaged(path, "other bytes than were written, or none")
                self._sound[path] = tuple(columns_of(path, OPS).items())
            groups.setdefault(self._sound[path], []).append(path)
        scans = [
            # A folder may be called "lr=0.1" or "run[1]": names mean nothing here.
            pl.scan_parquet(paths, glob=False, hive_partitioning=False).select(
                fill(dict(columns), OPS)
            )
            for columns, paths in groups.items()
        ]
        return pl.concat(scans) if scans else pl.LazyFrame(schema=OPS)

    def _rows(self, rank: int, step: int) -> pl.DataFrame:
        """What finds a tensor, in the order of records; no rows where the run has no such rank or step."""
        if self._index[0] != (
            rank,
            step,
        ):  # one is kept: callers go through the records of a step
            query = self._part(rank, step).select(*_NEEDED, site_name()).sort("record")
            self._index = (rank, step), reading(self.path, query.collect)
        return self._index[1]

    def _part(self, rank: int | None, step: int | None) -> pl.LazyFrame:
        return self._scan(self._folders(rank, step))

    def _no_such(
        self,
        site: str | None,
        phase: str,
        place: int,
        role: str,
        rank: int,
        step: int | None,
        record: int | None,
    ) -> RunError:
        steps = [step] if step is not None else self._found.get(rank, [])
        names: set[str] = set()
        places: set[str] = set()
        for each in steps:
            rows = self._rows(rank, each)
            names |= {*rows["site"].drop_nulls(), *rows["name"].drop_nulls()}
            same = rows.filter(pl.col("site") == pl.lit(site, pl.Utf8)).select(
                "phase",
                pl.col("place").fill_null(0),
                pl.col("role").fill_null("output"),
            )
            places |= {_place(*each) for each in same.drop_nulls().unique().iter_rows()}
        if not names:
            expected = f"a rank of {self.ranks}, a step of {_short(self.steps)}"
        elif places:
            expected = "; ".join(sorted(places)[:8])
        elif site is None:
            expected = "a value of the column record in Run.ops"
        else:
            choices = examples(site, sorted(names))
            expected = f"one of {len(names)} names, such as {choices}"
        return RunError(
            "the run has no such tensor",
            where=f"{self.path}: rank {rank}"
            + ("" if step is None else f", step {step}"),
            expected=expected,
            got=f"{site!r}, {_place(phase, place, role)}"
            if site
            else f"record {record}",
        )

    def blob(
        self,
        rank: int,
        step: int,
        key: str,
        opened: dict[Path, TensorFile] | None = None,
    ) -> torch.Tensor:
        """What the tables call ``blob``: elements in the order of memory. Raises ``RunError`` naming a damaged file.

        With ``opened`` the files stay open in it: quick for many tensors, but whoever changes one changes what is read
        from it later.
        """
        folder = self.path / rank_name(rank) / step_name(step)
        opened = {} if opened is None else opened
        if folder not in self._files:
            files: dict[str, Path] = {}
            for name in self._sums(folder):
                if is_chunk(name):
                    files |= dict.fromkeys(self._keys(folder / name), folder / name)
            self._files[folder] = files
        path_of = self._files[folder].get(key)
        if path_of is None:
            raise damaged(
                folder, f"no file of tensors has the key {key!r} that the table names"
            )
        if path_of not in opened:
            opened[path_of] = reading(path_of, TensorFile, self._present(path_of))
        return reading(path_of, opened[path_of].read, key)

    def _present(self, path: Path) -> Path:
        """The path, the file fetched if it is elsewhere."""
        return path

    def _keys(self, path: Path) -> list[str]:
        size = reading(path, os.path.getsize, path)
        if size != self._sums(path.parent)[path.name]["bytes"]:
            raise damaged(path, f"{size} bytes, not as many as were written")
        return reading(path, TensorFile, path).keys

    def strided(
        self, kept: torch.Tensor, rank: int, step: int, row: Mapping[str, Any]
    ) -> torch.Tensor:
        """The tensor from its elements in the order of memory; a view of a larger one reads only its own."""
        shape, stride, offset = row["shape"], row["stride"], row["offset"] or 0
        known = shape is not None and None not in shape and None not in stride
        if known and len(shape) == len(stride) and min([offset, *shape, *stride]) >= 0:
            reach = offset + sum(
                (n - 1) * s for n, s in zip(shape, stride, strict=True)
            )
            if 0 in shape:
                return kept.new_empty(shape)
            if reach < kept.numel():
                return kept.view(-1).as_strided(shape, stride, offset)
        raise RunError(
            "a row does not fit the tensor it names",
            where=f"{self.path}: rank {rank}, step {step}, record {row['record']}",
            expected=f"a view of {kept.numel()} elements",
            got=f"shape {shape}, stride {stride}, offset {offset}",
        )

    def _sums(self, folder: Path) -> dict[str, dict[str, Any]]:
        if folder not in self._checksums:
            path = folder / CHECKSUMS
            sums = reading(path, read_json, path)
            if (
                not isinstance(sums, dict)
                or OPERATORS not in sums
                or not all(name == OPERATORS or is_chunk(name) for name in sums)
                or not all(map(is_checksum, sums.values()))
            ):
                raise damaged(path, "not a table of checksums")
            self._checksums[folder] = sums
        return self._checksums[folder]


def _place(phase: str, place: int, role: str) -> str:
    return f"phase {phase}, place {place}" + (
        f", role {role}" if role != "output" else ""
    )


def _short(steps: list[int]) -> str:
    return (
        str(steps) if len(steps) <= 8 else f"{steps[0]} to {steps[-1]} ({len(steps)})"
    )
