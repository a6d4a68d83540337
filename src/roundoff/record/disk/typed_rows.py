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


def rows_of_table(row_type: type[RowType], table: pl.DataFrame) -> list[RowType]:
    """Return the rows of a table; columns that are no fields are left out."""
    columns = [f.name for f in fields(row_type) if f.name in table.columns]
    rows = table.select(columns).iter_rows(named=True)
    return [row_type(**row) for row in rows]
