"""The table of a step that somebody else has recorded, checked whole before it is used.

Its checksum says that it is what was written, and not who wrote it.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path

import polars as pl

from roundoff.foreign import regular
from roundoff.record.disk.checked_reading import damaged, read_checked
from roundoff.record.disk.schema import OPS, parse_rank, parse_step
from roundoff.unforeseen import panics_raised

#: What each row of a recording has; other columns may be null.
_ALWAYS = ("record", "call", "phase", "module", "operator", "index", "place")
#: torch's limit.
_MOST_AXES = 64
#: A writer has all of these for a tensor, or none.
_TOGETHER = (
    ("min", "max", "mean", "l2", "std"),
    ("nan", "posinf", "neginf", "zero", "subnormal"),
)
_LISTS = ("shape", "stride", "memory_layout", "inputs", "exponents")


def check_table(path: Path) -> None:
    """Raise ``RunError`` where a table cannot be read whole, or has a row that no writer makes."""
    table = read_checked(path, _read, path)
    place = (parse_rank(path.parent.parent.name), parse_step(path.parent.name))
    fault = read_checked(path, _fault, table, place)
    if fault is not None:
        raise damaged(path, fault)


def _read(path: Path) -> pl.DataFrame:
    with regular(path).open("rb") as file, panics_raised():
        return pl.read_parquet(file)


def _fault(table: pl.DataFrame, place: tuple[int | None, int | None]) -> str | None:
    """Say what is wrong with a table first, or None."""
    return next(filter(None, _faults(table, place)), None)


def _faults(
    table: pl.DataFrame, place: tuple[int | None, int | None]
) -> Iterator[str | None]:
    """Check one thing after the other; each may trust what was checked before it."""
    yield _fault_in_place(table, place)
    yield _fault_in_keys(table)
    for name in _LISTS:
        yield _fault_in_lists(table, name)
    for names in _TOGETHER:
        yield _fault_in_group(table, names)
    yield _fault_in_sizes(table)


def _fault_in_place(
    table: pl.DataFrame, place: tuple[int | None, int | None]
) -> str | None:
    for name, number in zip(("rank", "step"), place, strict=True):
        if name not in table.columns:
            return f"column {name!r} is not that of the folder"
        if not (table[name] == number).all(ignore_nulls=False):
            return f"column {name!r} is not that of the folder"
    return None


def _fault_in_keys(table: pl.DataFrame) -> str | None:
    for name in _ALWAYS:
        if name not in table.columns or table[name].null_count():
            return f"column {name!r} is missing, or has nulls"
    if table["record"].n_unique() < table.height:
        return "two rows of one record"
    return None


def _fault_in_group(table: pl.DataFrame, names: Sequence[str]) -> str | None:
    """Say where a tensor has some of these columns and not all."""
    present = [name for name in names if name in table.columns]
    if not present:
        return None
    masks = [table[name].is_null() for name in present]
    is_uneven = any((mask != masks[0]).any() for mask in masks)
    if is_uneven or len(present) < len(names):
        return f"one of {', '.join(names)} without the others"
    return None


def _fault_in_lists(table: pl.DataFrame, name: str) -> str | None:
    if name not in table.columns or table[name].dtype != OPS[name]:
        return None
    lists = table[name].drop_nulls()
    lengths = lists.list.len()
    filled = lists.filter(lengths > 0).explode()
    if filled.null_count():
        return f"a null within column {name!r}"
    if name in ("shape", "stride") and (lengths > _MOST_AXES).any():
        return f"more than {_MOST_AXES} numbers in column {name!r}"
    if name == "shape" and (filled < 0).any():
        return "a size below 0"
    return None


def _fault_in_sizes(table: pl.DataFrame) -> str | None:
    """Say where the number of elements is not that of the shape; it may be more than 64 bits have."""
    columns = [name for name in ("shape", "numel") if name in table.columns]
    for row in table.select(columns).iter_rows(named=True):
        shape = row.get("shape")
        count = row.get("numel")
        elements = 1
        for size in shape or ():
            elements *= size
        if elements >= 2**63:
            return "a shape of more elements than 64 bits count"
        if count is not None and count < 0:
            return "a number of elements below 0"
    return None
