"""Reading files that may be damaged: whatever a library makes of them, the caller gets a RunError with the file's name."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any, ParamSpec, TypeVar

import polars as pl

from roundoff.errors import RunError
from roundoff.store.tensors import checksum

_T = TypeVar("_T")
_P = ParamSpec("_P")


def reading(path: Path, work: Callable[_P, _T], *args: _P.args, **kwargs: _P.kwargs) -> _T:
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
            raise damaged(path, f"polars could not read it: {str(error)[:200]}") from error
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


def read_table(path: Path) -> pl.DataFrame:
    """The whole parquet file (as bytes: polars takes a path with * or [ for a pattern)."""
    return pl.read_parquet(path.read_bytes())


def columns_of(path: Path, wanted: dict[str, Any]) -> dict[str, Any]:
    """Name -> type of a parquet file's columns, from its footer. ``RunError`` where a wanted one has another type."""
    columns = reading(path, _footer, path)
    for name, dtype in wanted.items():
        if name in columns and columns[name] not in (dtype, pl.Null):
            raise damaged(path, f"column {name!r} has type {columns[name]}, not {dtype}")
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


def matches(path: Path, entry: dict[str, Any]) -> bool:
    """Whether a file has the bytes of its entry in ``checksums.json``. A missing file has not."""
    try:
        return checksum(path) == {"bytes": entry["bytes"], "xxh3_128": entry["xxh3_128"]}
    except OSError:
        return False
