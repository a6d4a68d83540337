"""Reading files that may be damaged: whatever a library makes of them, the caller gets a RunError with the file's name."""

from __future__ import annotations

import json
import os
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any, ParamSpec, TypeVar

import polars as pl

from roundoff.errors import RunError
from roundoff.record.disk.schema import (
    ABOUT,
    SCALAR_FILE,
    SCHEMA,
    parse_rank,
    parse_step,
)
from roundoff.record.disk.tensors import checksum

_DIGEST = re.compile("[0-9a-f]{32}")
_T = TypeVar("_T")
_P = ParamSpec("_P")


def reading(
    path: Path, work: Callable[_P, _T], *args: _P.args, **kwargs: _P.kwargs
) -> _T:
    """``work(*args)``, which reads ``path``, with any exception as ``RunError``."""
    try:
        return work(*args, **kwargs)
    except RunError:
        raise
    except Exception as error:
        raise damaged(path, f"{type(error).__name__}: {str(error)[:200]}") from error
    except BaseException as error:
        if (
            type(error).__name__ == "PanicException"
        ):  # of polars, which derives it from BaseException
            raise damaged(
                path, f"polars could not read it: {str(error)[:200]}"
            ) from error
        raise


def damaged(path: Path, got: str) -> RunError:
    """The error for a damaged file; to be raised by the caller."""
    return RunError(
        "the file is missing, damaged or cannot be read",
        where=str(path),
        got=got,
        do="Run.verify() lists all damaged files; record the run again or restore it from a copy",
    )


def read_json(path: Path) -> Any:
    """What the file holds."""
    return json.loads(path.read_text(encoding="utf-8"))


def columns_of(path: Path, wanted: dict[str, Any]) -> dict[str, Any]:
    """Name -> type of a parquet file's columns, from its footer. ``RunError`` where a wanted one has another type."""
    columns = reading(path, _footer, path)
    for name, dtype in wanted.items():
        if name in columns and columns[name] not in (dtype, pl.Null):
            raise damaged(
                path, f"column {name!r} has type {columns[name]}, not {dtype}"
            )
    return columns


def _footer(path: Path) -> dict[str, Any]:
    with path.open("rb") as file:
        return dict(pl.read_parquet_schema(file))


def fill(columns: dict[str, Any], wanted: dict[str, Any]) -> list[pl.Expr]:
    """The wanted columns in their order, null where the file has none."""
    return [
        pl.col(name).cast(dtype) if name in columns else pl.lit(None, dtype).alias(name)
        for name, dtype in wanted.items()
    ]


def is_checksum(entry: Any) -> bool:
    """Whether this is an entry of ``checksums.json``: ``{"bytes": n, "xxh3_128": hex}``."""
    if not isinstance(entry, dict):
        return False
    size, digest = entry.get("bytes"), entry.get("xxh3_128")
    return (
        type(size) is int
        and size >= 0
        and isinstance(digest, str)
        and _DIGEST.fullmatch(digest) is not None
    )


def matches(path: Path, entry: dict[str, Any]) -> bool:
    """Whether a file has the bytes of its entry in ``checksums.json``. A missing file has not."""
    try:
        return checksum(path) == {
            "bytes": entry["bytes"],
            "xxh3_128": entry["xxh3_128"],
        }
    except OSError:
        return False


def read_about(path: Path) -> dict[str, Any]:
    """The object in ``run.json`` of the run in this folder, its schema checked."""
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
            got=f'"schema": {schema!r}'
            if isinstance(about, dict)
            else type(about).__name__,
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


def find_steps(path: Path) -> dict[int, list[int]]:
    """rank -> its whole steps, rising, for each rank that has steps or scalars."""
    found: dict[int, list[int]] = {}
    for name in reading(path, os.listdir, path):
        rank = parse_rank(name)
        folder = path / name
        if rank is not None and folder.is_dir():
            names = reading(folder, os.listdir, folder)
            steps = sorted(
                step for name in names if (step := parse_step(name)) is not None
            )
            if steps or SCALAR_FILE in names:
                found[rank] = steps
    return found
