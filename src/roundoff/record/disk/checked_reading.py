"""Reading files that may be damaged: any failure is a RunError with the file's name."""

from __future__ import annotations

import os
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any, ParamSpec, TypeVar

import polars as pl

from roundoff.errors import RunError
from roundoff.foreign import parse_json, read_text, regular
from roundoff.record.disk.schema import SCALAR_FILE, parse_rank, parse_step
from roundoff.record.disk.tensors import checksum
from roundoff.unforeseen import is_panic, panics_raised

_DIGEST = re.compile("[0-9a-f]{32}")
_T = TypeVar("_T")
_P = ParamSpec("_P")


def read_checked(
    path: Path, read: Callable[_P, _T], *args: _P.args, **kwargs: _P.kwargs
) -> _T:
    """Return ``read(*args)``, which reads ``path``; raise ``RunError`` if it fails."""
    try:
        return read(*args, **kwargs)
    except RunError:
        raise
    except Exception as error:
        raise damaged(path, f"{type(error).__name__}: {str(error)[:200]}") from error
    except BaseException as error:
        # polars derives its panics from BaseException
        if not is_panic(error):
            raise
        got = f"polars could not read it: {str(error)[:200]}"
        raise damaged(path, got) from error


def damaged(path: Path, got: str) -> RunError:
    """Return the error for a damaged file; to be raised by the caller."""
    return RunError(
        "the file is missing, damaged or cannot be read",
        where=str(path),
        got=got,
        do="Run.verify() lists all damaged files; record the run again or restore it "
        "from a copy",
    )


def read_json(path: Path) -> Any:
    """Return the value in a JSON file."""
    return parse_json(read_text(path))


def columns_of(path: Path, expected: dict[str, Any]) -> dict[str, Any]:
    """Name -> type of a parquet file's columns, from its footer.

    Raises ``RunError`` where an expected column has another type; null fits all.
    """
    columns = read_checked(path, _footer, path)
    for name, dtype in expected.items():
        if name in columns and columns[name] not in (dtype, pl.Null):
            raise damaged(
                path, f"column {name!r} has type {columns[name]}, not {dtype}"
            )
    return columns


def _footer(path: Path) -> dict[str, Any]:
    with regular(path).open("rb") as file, panics_raised():
        return dict(pl.read_parquet_schema(file))


def fill_columns(columns: dict[str, Any], expected: dict[str, Any]) -> list[pl.Expr]:
    """Return the expected columns in their order, null where the file has none."""
    return [
        pl.col(name).cast(dtype) if name in columns else pl.lit(None, dtype).alias(name)
        for name, dtype in expected.items()
    ]


def is_checksum(entry: Any) -> bool:
    """Return True for ``{"bytes": n, "xxh3_128": hex}``, as in ``checksums.json``."""
    if not isinstance(entry, dict):
        return False
    size = entry.get("bytes")
    digest = entry.get("xxh3_128")
    if type(size) is not int or size < 0:
        return False
    return isinstance(digest, str) and _DIGEST.fullmatch(digest) is not None


def has_checksum(path: Path, entry: dict[str, Any]) -> bool:
    """Return True if a file has the bytes of its entry in ``checksums.json``.

    One of another size, which may be a hole of any size, is not read.
    """
    expected = {"bytes": entry["bytes"], "xxh3_128": entry["xxh3_128"]}
    try:
        has_size = regular(path).stat().st_size == entry["bytes"]
        return has_size and checksum(path) == expected
    except OSError:
        return False


def find_steps(path: Path) -> dict[int, list[int]]:
    """Return rank -> its whole steps, rising, for each rank that has steps or scalars."""
    steps_of: dict[int, list[int]] = {}
    for name in read_checked(path, os.listdir, path):
        rank = parse_rank(name)
        folder = path / name
        if rank is None or not folder.is_dir():
            continue
        files = read_checked(folder, os.listdir, folder)
        numbers = [parse_step(file) for file in files]
        steps = sorted(number for number in numbers if number is not None)
        if steps or SCALAR_FILE in files:
            steps_of[rank] = steps
    return steps_of
