"""The rows of a step as a table that can be written."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import chain
from typing import Any

import numpy as np
import polars as pl

from roundoff.record.disk.schema import OPS

Lists = Mapping[str, Sequence[Sequence[int] | None]]


def table_of(
    rows: Mapping[str, Sequence[Any]] | pl.DataFrame, rank: int, step: int
) -> pl.DataFrame:
    """Return the rows with those columns of OPS that hold something: readers add the others.

    Raises for a column that OPS lacks or a value of a wrong type.
    """
    _check_names(rows.columns if isinstance(rows, pl.DataFrame) else list(rows))
    if isinstance(rows, pl.DataFrame):
        table = rows.cast({name: OPS[name] for name in rows.columns})
    else:
        table = pl.DataFrame(_columns(rows))
    full = {c.name: c for c in table.get_columns() if c.null_count() < table.height}
    full["rank"] = _constant("rank", rank, table.height)
    full["step"] = _constant("step", step, table.height)
    return pl.DataFrame([full[name] for name in OPS if name in full])


def _check_names(names: Sequence[str]) -> None:
    unknown = [name for name in names if name not in OPS]
    if unknown:
        raise ValueError(f"ops.parquet has no column {', '.join(unknown)}")


def _constant(name: str, value: int, height: int) -> pl.Series:
    return pl.Series(name, np.full(height, value, np.int64)).cast(OPS[name])


def _columns(rows: Mapping[str, Sequence[Any]]) -> list[pl.Series]:
    lists = {
        name: values for name, values in rows.items() if isinstance(OPS[name], pl.List)
    }
    numbers = [
        _column(name, values, OPS[name])
        for name, values in rows.items()
        if name not in lists
    ]
    return [*_list_columns(lists), *numbers]


def _column(name: str, values: Sequence[Any], dtype: Any) -> pl.Series:
    if dtype == pl.Float64:
        # polars takes the type from the first value, and refuses 0.5 after 1
        values = [None if value is None else float(value) for value in values]
    return pl.Series(name, values, dtype=dtype)


def _list_columns(columns: Lists) -> list[pl.Series]:
    """Return columns of lists of integers, made from one flat column.

    The way of polars itself takes as long for each list as for a column.
    """
    if not any(columns.values()):
        return [
            pl.Series(name, values, dtype=OPS[name]) for name, values in columns.items()
        ]
    cells = list(chain.from_iterable(columns.values()))
    filled = [cell for cell in cells if cell]
    flat = pl.DataFrame(
        {
            "value": pl.Series(list(chain.from_iterable(filled)), dtype=pl.Int64),
            "row": np.repeat(np.arange(len(filled)), [len(cell) for cell in filled]),
        }
    )
    lists = flat.group_by("row", maintain_order=True).agg("value")["value"]
    empty_and_null = pl.Series("value", [[], None], dtype=pl.List(pl.Int64))
    stacked = pl.concat([lists, empty_and_null]).gather(_places(cells, len(filled)))
    height = len(stacked) // len(columns)
    return [
        stacked.slice(i * height, height).alias(name) for i, name in enumerate(columns)
    ]


def _places(cells: Sequence[Sequence[int] | None], filled: int) -> list[int]:
    """Return where each cell stands among the filled ones, the empty list and the null."""
    empty = filled
    null = filled + 1
    places = []
    following = iter(range(filled))
    for cell in cells:
        if cell is None:
            places.append(null)
        else:
            places.append(next(following) if cell else empty)
    return places
