"""Runs at URLs that fsspec knows: small files come when the run is loaded, a file of tensors when one of them is asked for.

Files are copied into a temporary folder, where they are read as any run's: every checksum is that of what arrived.
"""

from __future__ import annotations

import atexit
import json
import os
import shutil
import tempfile
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import cached_property
from pathlib import Path
from typing import Any, TypeVar

import polars as pl
import torch

from roundoff.errors import RunError
from roundoff.files import masked
from roundoff.record.disk.checked import damaged
from roundoff.record.disk.reader import Run
from roundoff.record.disk.schema import (
    ABOUT,
    CHECKSUMS,
    OPERATORS,
    SCALAR_FILE,
    parse_rank,
    parse_step,
)
from roundoff.record.dumps.msprobe import MsprobeRun

_T = TypeVar("_T")
_DUMP = ("dump.json", "stack.json", "construct.json")


class Mirror:
    """The folder of a run at a URL, and its copy here as far as it has been fetched.

    Attributes:
        url: without what is secret in it.
        folder: of the copy; ends like the URL, for a dump of msprobe has its step and rank in the names of folders.

    Raises ``RunError`` naming the URL when its protocol is unknown or needs a library that is not installed, when
    nothing is there, or when it cannot be reached.
    """

    def __init__(self, url: str) -> None:
        self.url = masked(url).rstrip("/")
        self._system, root = self._asking(lambda: _connect(url))
        root = root.rstrip("/")
        listed = self._asking(lambda: self._system.find(root, detail=True))
        if set(listed) == {root}:  # the URL of a dump.json
            root, self.url = root.rpartition("/")[0], self.url.rpartition("/")[0]
            listed = self._asking(lambda: self._system.find(root, detail=True))
        if not listed:
            raise RunError(
                "no such folder, or nothing in it",
                where=self.url,
                expected=f"a folder with {ABOUT} in it",
                do="give the URL of the run's own folder",
            )
        start = root.lstrip(
            "/"
        )  # some systems list names with the leading slash, others without
        self._there = {
            name.lstrip("/").removeprefix(start).lstrip("/"): (name, info.get("size"))
            for name, info in listed.items()
        }
        self._temporary = tempfile.mkdtemp(prefix="roundoff-")
        self._remove = weakref.finalize(
            self, shutil.rmtree, self._temporary, ignore_errors=True
        )
        self.folder = Path(self._temporary).joinpath(
            *[part for part in root.split("/") if part][-2:]
        )
        self.folder.mkdir(parents=True, exist_ok=True)
        wanted = _of_run if ABOUT in self._there else _of_dump
        small = [name for name in self._there if wanted(name.split("/"))]
        for name in small:
            (self.folder / name).parent.mkdir(parents=True, exist_ok=True)
        here = [str(self.folder / name) for name in small]
        self._asking(
            lambda: (
                self._system.get([self._there[name][0] for name in small], here)
                if small
                else None
            )
        )

    def fetch(self, path: Path) -> None:
        """Make a file of the copy present, unless it is or the URL lacks it."""
        name = self._name(path)
        if path.exists() or name not in self._there:
            return
        path.parent.mkdir(parents=True, exist_ok=True)
        partial = path.with_name(f".{path.name}.partial")
        self._asking(
            lambda: self._system.get_file(self._there[name][0], str(partial)), name
        )
        os.replace(partial, path)

    def keys(self, path: Path, expected: int) -> list[str]:
        """The keys in a file of tensors that need not have been fetched: only its header is read.

        Raises ``RunError`` when the file is missing, has not the expected number of bytes, or has no such header.
        """
        name = self._name(path)
        remote, size = self._there.get(name, ("", None))
        if not remote or size not in (expected, None):
            raise damaged(
                path,
                f"{size} bytes, not as many as were written"
                if remote
                else "no such file",
            )
        # safetensors: eight bytes that say how long the header is, and the header in JSON
        length = int.from_bytes(
            self._asking(lambda: self._system.cat_file(remote, 0, 8), name), "little"
        )
        if length > expected - 8:
            raise damaged(path, "its header is longer than the file")
        head = self._asking(lambda: self._system.cat_file(remote, 8, 8 + length), name)
        try:
            return [key for key in json.loads(head) if key != "__metadata__"]
        except (ValueError, TypeError) as error:
            raise damaged(
                path, f"{type(error).__name__}: {str(error)[:200]}"
            ) from error

    def keep(self) -> None:
        """The copy stays until the process ends: a lazy frame may read it after the run is gone."""
        if self._remove.detach():
            atexit.register(shutil.rmtree, self._temporary, ignore_errors=True)

    def shown(self, path: Path | str) -> str:
        """The text with URLs in place of the copy's paths."""
        return str(path).replace(str(self.folder), self.url)

    @contextmanager
    def naming(self) -> Iterator[None]:
        """Errors from inside name the URL, not the copy."""
        try:
            yield
        except RunError as error:
            parts = [
                None if p is None else self.shown(p)
                for p in (error.where, error.expected, error.got, error.do)
            ]
            where, expected, got, do = parts
            raise RunError(
                error.what, where=where, expected=expected, got=got, do=do
            ) from error

    def _name(self, path: Path) -> str:
        return path.relative_to(self.folder).as_posix()

    def _asking(self, work: Callable[[], _T], name: str = "") -> _T:
        """``work()``, which asks the URL, with any exception as ``RunError``."""
        where = f"{self.url}/{name}" if name else self.url
        try:
            return work()
        except ImportError as error:
            raise RunError(
                "a library for this protocol is not installed",
                where=where,
                got=str(error),
                do="install what is named, such as pip install s3fs for s3://",
            ) from error
        except FileNotFoundError:
            got, what = None, "no such folder" if not name else "no such file"
        except Exception as error:  # noqa: BLE001 - whatever the library of the protocol raises
            got, what = (
                masked(f"{type(error).__name__}: {str(error)[:500]}"),
                "this URL cannot be read",
            )
        # not "from error": its text may show the URL with its secrets
        raise RunError(
            what,
            where=where,
            got=got,
            expected="a folder, or a URL that fsspec can read",
            do="check the address, and that this machine may read there",
        ) from None


class MirroredRun(Run):
    """A run at a URL; ``path`` is the copy here, which lives as long as the run and its lazy frames.

    ``verify`` fetches every file.
    """

    def __init__(self, mirror: Mirror, *args: Any) -> None:
        super().__init__(*args)
        self._mirror = mirror

    @property
    def location(self) -> str:
        """The URL."""
        return self._mirror.url

    @cached_property
    def ops(self) -> pl.LazyFrame:
        """As of :class:`Run`."""
        self._mirror.keep()
        with self._mirror.naming():
            return super().ops

    def part(self, rank: int | None = None, step: int | None = None) -> pl.LazyFrame:
        """As of :class:`Run`."""
        self._mirror.keep()
        with self._mirror.naming():
            return super().part(rank, step)

    @cached_property
    def scalars(self) -> pl.LazyFrame:
        """As of :class:`Run`."""
        with self._mirror.naming():
            return super().scalars

    def tensor(self, site: str | None = None, **options: Any) -> torch.Tensor:
        """As of :class:`Run`."""
        with self._mirror.naming():
            return super().tensor(site, **options)

    def verify(self) -> list[str]:
        """The URLs of damaged files."""
        with self._mirror.naming():
            return [self._mirror.shown(path) for path in super().verify()]

    def _present(self, path: Path) -> Path:
        self._mirror.fetch(path)
        return path

    def _keys(self, path: Path) -> list[str]:
        return self._mirror.keys(path, self._sums(path.parent)[path.name]["bytes"])


class MirroredDump(MirroredRun, MsprobeRun):
    """A dump of msprobe at a URL."""


def _connect(url: str) -> tuple[Any, str]:
    import fsspec

    system, root = fsspec.core.url_to_fs(url)
    return system, str(root)


def _of_run(parts: list[str]) -> bool:
    """Whether this is a small file of a run, from the parts of its path in the run's folder."""
    if parts == [ABOUT]:
        return True
    if len(parts) == 2 and parts[1] == SCALAR_FILE:
        return parse_rank(parts[0]) is not None
    return (
        len(parts) == 3
        and parts[2] in (OPERATORS, CHECKSUMS)
        and parse_rank(parts[0]) is not None
        and parse_step(parts[1]) is not None
    )


def _of_dump(parts: list[str]) -> bool:
    """Whether this is a small file of a dump of msprobe: at, in, or one or two levels below the URL."""
    return len(parts) <= 3 and parts[-1] in _DUMP
