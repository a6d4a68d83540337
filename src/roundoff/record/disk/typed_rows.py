"""Rows with fields and polars types: a dataclass is the schema of its table."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import MISSING, field, fields
from typing import TYPE_CHECKING, Any, TypeVar

import polars as pl

if TYPE_CHECKING:
    from _typeshed import DataclassInstance

    RowType = TypeVar("RowType", bound=DataclassInstance)


def column(dtype: Any, *, default: Any = MISSING) -> Any:
    """Return a dataclass field that is a column of this polars type."""
    return field(default=default, metadata={"dtype": dtype})


#: A polars type, with its parameters or without.
ColumnType = pl.DataType | type[pl.DataType]


def schema_of(row_type: type[RowType]) -> dict[str, ColumnType]:
    """Name -> polars type of the columns of a row's table.

    >>> from dataclasses import dataclass
    >>> @dataclass(frozen=True)
    ... class Loss:
    ...     step: int = column(pl.Int64)
    ...     value: float = column(pl.Float64)
    >>> schema_of(Loss)
    {'step': Int64, 'value': Float64}
    """
    return {f.name: f.metadata["dtype"] for f in fields(row_type)}


def table_of_rows(row_type: type[RowType], rows: Iterable[RowType]) -> pl.DataFrame:
    """Return the rows as a table; without rows, its columns alone."""
    rows = list(rows)
    schema = schema_of(row_type)
    return pl.DataFrame(
        {name: [getattr(row, name) for row in rows] for name in schema}, schema=schema
    )


def fault_of_table(row_type: type[RowType], table: pl.DataFrame) -> str | None:
    """Say where a table of a file is none of such rows; None where it is.

    A column is missing, of another type, or has a null where the field takes no None.
    """
    for name, dtype in schema_of(row_type).items():
        if name not in table.columns:
            return f"no column {name}"
        column = table[name]
        if column.dtype != dtype:
            return f"column {name} has type {column.dtype}, not {dtype}"
        is_optional = str(row_type.__annotations__[name]).endswith("| None")
        if not is_optional and column.null_count():
            return f"column {name} has nulls"
        if column.dtype == pl.List and column.explode().null_count() > (
            column.null_count() + int((column.list.len() == 0).sum())
        ):
            return f"column {name} has nulls in its lists"
    return None


def rows_of_table(row_type: type[RowType], table: pl.DataFrame) -> list[RowType]:
    """Return the rows of a table; columns that are no fields are left out."""
    columns = [f.name for f in fields(row_type) if f.name in table.columns]
    rows = table.select(columns).iter_rows(named=True)
    return [row_type(**row) for row in rows]
