"""Runs at URLs that fsspec knows.

Small files come when the run is loaded, a file of tensors when one of them is asked
for. They are copied into a temporary folder and read there as any run's: every checksum
is that of what arrived.
"""

from __future__ import annotations

import atexit
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
from roundoff.files import is_url, masked
from roundoff.foreign import inside, parse_json, regular
from roundoff.record.disk.checked_reading import damaged
from roundoff.record.disk.reader import Run
from roundoff.record.disk.schema import (
    ABOUT,
    CHECKSUMS,
    LOOP,
    MARK,
    OPERATORS,
    RANK_FILES,
    parse_rank,
    parse_step,
)
from roundoff.record.dumps.msprobe import MsprobeRun

_T = TypeVar("_T")
_DUMP_FILES = ("dump.json", "stack.json", "construct.json")


class Mirror:
    """The folder of a run at a URL, and its local copy as far as it has been fetched.

    Attributes:
        url: without what is secret in it.
        folder: of the copy; ends like the URL, as a dump of msprobe has its step and
            rank in the names of folders.

    Raises ``RunError`` naming the URL when its protocol is unknown or needs a library
    that is not installed, when nothing is there, or when it cannot be reached.
    """

    def __init__(self, url: str) -> None:
        self.url = masked(url).rstrip("/")
        self._system, root = self._ask(lambda: _connect(url))
        root = root.rstrip("/")
        listing = self._list(root)
        if set(listing) == {root}:  # the URL of a dump.json
            root = root.rpartition("/")[0]
            self.url = self.url.rpartition("/")[0]
            listing = self._list(root)
        if not listing:
            raise RunError(
                "no such folder, or nothing in it",
                where=self.url,
                expected=f"a folder with {ABOUT} in it",
                do="give the URL of the run's own folder",
            )
        #: path in the folder -> name in the file system, and size
        self._files = _relative_names(listing, root)
        self._temporary = tempfile.mkdtemp(prefix="roundoff-")
        self._remove = weakref.finalize(
            self, shutil.rmtree, self._temporary, ignore_errors=True
        )
        last_parts = [part for part in root.split("/") if part][-2:]
        self.folder = Path(self._temporary).joinpath(*last_parts)
        self.folder.mkdir(parents=True, exist_ok=True)
        self._fetch_small_files()

    def fetch(self, path: Path) -> None:
        """Make a file of the copy present, unless it is or the URL lacks it."""
        name = self._name(path)
        if path.exists() or name not in self._files:
            return
        path.parent.mkdir(parents=True, exist_ok=True)
        partial = path.with_name(f".{path.name}.partial")
        remote, _ = self._files[name]
        self._ask(lambda: self._system.get_file(remote, str(partial)), name)
        os.replace(partial, path)

    def keys(self, path: Path, expected: int) -> list[str]:
        """Return the keys in a file of tensors: only its header is read.

        Raises ``RunError`` when the file is missing, has not the expected number of
        bytes, or has no such header.
        """
        name = self._name(path)
        if name not in self._files:
            raise damaged(path, "no such file")
        remote, size = self._files[name]
        if size not in (expected, None):
            raise damaged(path, f"{size} bytes, not as many as were written")
        # safetensors: 8 bytes with the length of the header, and the header in JSON
        first = self._ask(lambda: self._system.cat_file(remote, 0, 8), name)
        length = int.from_bytes(first, "little")
        if length > expected - 8:
            raise damaged(path, "its header is longer than the file")
        head = self._ask(lambda: self._system.cat_file(remote, 8, 8 + length), name)
        try:
            return [key for key in parse_json(head) if key != "__metadata__"]
        except (ValueError, TypeError) as error:
            got = f"{type(error).__name__}: {str(error)[:200]}"
            raise damaged(path, got) from error

    def keep(self) -> None:
        """Keep the copy until the process ends: a lazy frame may outlive the run."""
        if self._remove.detach():
            atexit.register(shutil.rmtree, self._temporary, ignore_errors=True)

    def shown(self, path: Path | str) -> str:
        """Return the text with URLs in place of the copy's paths."""
        return str(path).replace(str(self.folder), self.url)

    @contextmanager
    def naming_url(self) -> Iterator[None]:
        """Errors from inside name the URL, not the copy."""
        try:
            yield
        except RunError as error:
            where, expected, got, do = (
                None if part is None else self.shown(part)
                for part in (error.where, error.expected, error.got, error.do)
            )
            raise RunError(
                error.what, where=where, expected=expected, got=got, do=do
            ) from error

    def _list(self, root: str) -> dict[str, Any]:
        """Name -> information, of all files below a folder; of a file, itself."""
        listing = self._ask(lambda: self._system.find(root, detail=True))
        return dict(listing)

    def _fetch_small_files(self) -> None:
        is_small = _is_run_file if ABOUT in self._files else _is_dump_file
        names = [name for name in self._files if is_small(name.split("/"))]
        if not names:
            return
        for name in names:
            (self.folder / name).parent.mkdir(parents=True, exist_ok=True)
        remote = [self._files[name][0] for name in names]
        local = [str(self.folder / name) for name in names]
        self._ask(lambda: self._system.get(remote, local))

    def _name(self, path: Path) -> str:
        return path.relative_to(self.folder).as_posix()

    def _ask(self, request: Callable[[], _T], name: str = "") -> _T:
        """Return ``request()``, which asks the URL; raise ``RunError`` if it fails."""
        where = f"{self.url}/{name}" if name else self.url
        got = None
        try:
            return request()
        except ImportError as error:
            raise RunError(
                "a library for this protocol is not installed",
                where=where,
                got=str(error),
                do="install what is named, such as pip install s3fs for s3://",
            ) from error
        except FileNotFoundError:
            problem = "no such file" if name else "no such folder"
        except Exception as error:  # noqa: BLE001 - any of the protocol's library
            got = masked(f"{type(error).__name__}: {str(error)[:500]}")
            problem = "this URL cannot be read"
        # not "from error": its text may show the URL with its secrets
        raise RunError(
            problem,
            where=where,
            got=got,
            expected="a folder, or a URL that fsspec can read",
            do="check the address, and that this machine may read there",
        ) from None


class MirroredRun(Run):
    """A run at a URL; ``path`` is the local copy, which lives as long as the run and
    its lazy frames.

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
        with self._mirror.naming_url():
            return super().ops

    def part(self, rank: int | None = None, step: int | None = None) -> pl.LazyFrame:
        """As of :class:`Run`."""
        self._mirror.keep()
        with self._mirror.naming_url():
            return super().part(rank, step)

    @cached_property
    def scalars(self) -> pl.LazyFrame:
        """As of :class:`Run`."""
        with self._mirror.naming_url():
            return super().scalars

    def tensor(self, site: str | None = None, **options: Any) -> torch.Tensor:
        """Return what :class:`Run` returns."""
        with self._mirror.naming_url():
            return super().tensor(site, **options)

    def verify(self) -> list[str]:
        """The URLs of damaged files."""
        with self._mirror.naming_url():
            return [self._mirror.shown(path) for path in super().verify()]

    def _present(self, path: Path) -> Path:
        self._mirror.fetch(path)
        return path

    def _keys(self, path: Path) -> list[str]:
        size = self._checksums_of(path.parent)[path.name]["bytes"]
        return self._mirror.keys(path, size)


class MirroredDump(MirroredRun, MsprobeRun):
    """A dump of msprobe at a URL."""


def _connect(url: str) -> tuple[Any, str]:
    import fsspec

    _check_archive(url)
    system, root = fsspec.core.url_to_fs(url)
    return system, str(root)


def _check_archive(url: str) -> None:
    """Raise ``OSError`` where the file of an archive, ``zip://::FILE``, is no file."""
    _, chained, archive = url.rpartition("::")
    if chained and not is_url(archive) and Path(archive).exists():
        regular(Path(archive))


def _relative_names(
    listing: dict[str, Any], root: str
) -> dict[str, tuple[str, int | None]]:
    """Return the name in the folder of each file, its full name and its size.

    A name that leads out of the folder, as archives may have, is left out.
    """
    # some systems list names with the leading slash, others without
    prefix = root.lstrip("/")
    names = {}
    for name, info in listing.items():
        relative = name.lstrip("/").removeprefix(prefix).removeprefix("/")
        if inside(Path(), relative) is not None:
            names[relative] = (name, info.get("size"))
    return names


def _is_run_file(parts: list[str]) -> bool:
    """Return True for a small file of a run, by the parts of its path in the run."""
    if parts == [ABOUT]:
        return True
    if parse_rank(parts[0]) is None:
        return False
    if len(parts) == 2:
        return parts[1] in RANK_FILES
    is_table = len(parts) == 3 and parts[2] in (OPERATORS, CHECKSUMS, LOOP, MARK)
    return is_table and parse_step(parts[1]) is not None


def _is_dump_file(parts: list[str]) -> bool:
    """Return True for a small file of a dump of msprobe: at, in, or one or two levels
    below the URL."""
    return len(parts) <= 3 and parts[-1] in _DUMP_FILES
