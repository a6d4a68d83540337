"""The rows of a step as a table with all columns of OPS."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import chain
from typing import Any

import numpy as np
import polars as pl

from roundoff.record.disk.schema import OPS


def table_of(
    rows: Mapping[str, Sequence[Any]] | pl.DataFrame, rank: int, step: int
) -> pl.DataFrame:
    """The rows with those columns of OPS that hold something: readers fill in the others.

    Raises for a column that OPS lacks or a value of a wrong type.
    """
    unknown = (
        [name for name in rows if name not in OPS] if isinstance(rows, Mapping) else []
    )
    if isinstance(rows, pl.DataFrame):
        unknown = [name for name in rows.columns if name not in OPS]
        table = rows.cast({name: OPS[name] for name in rows.columns if name in OPS})
    elif not unknown:
        table = pl.DataFrame(_columns(rows))
    if unknown:
        raise ValueError(f"ops.parquet has no column {', '.join(unknown)}")
    full = {c.name: c for c in table.get_columns() if c.null_count() < table.height}
    for name, value in (("rank", rank), ("step", step)):
        full[name] = pl.Series(name, np.full(table.height, value, np.int64)).cast(
            OPS[name]
        )
    return pl.DataFrame([full[name] for name in OPS if name in full])


def _columns(rows: Mapping[str, Sequence[Any]]) -> list[pl.Series]:
    lists = {
        name: values for name, values in rows.items() if isinstance(OPS[name], pl.List)
    }
    return [
        *_lists(lists),
        *(
            _column(name, values, OPS[name])
            for name, values in rows.items()
            if name not in lists
        ),
    ]


def _column(name: str, values: Sequence[Any], dtype: Any) -> pl.Series:
    if (
        dtype == pl.Float64
    ):  # polars takes the type of a column from its first value, and then refuses 0.5 after 1
        values = [None if value is None else float(value) for value in values]
    return pl.Series(name, values, dtype=dtype)


def _lists(columns: Mapping[str, Sequence[Sequence[int] | None]]) -> list[pl.Series]:
    """Columns of lists of integers, from one flat column: polars' own way takes as long for each list as for a column."""
    if not any(columns.values()):
        return [
            pl.Series(name, values, dtype=OPS[name]) for name, values in columns.items()
        ]
    filled = [value for values in columns.values() for value in values if value]
    flat = pl.DataFrame(
        {
            "value": pl.Series(list(chain.from_iterable(filled)), dtype=pl.Int64),
            "row": np.repeat(np.arange(len(filled)), [len(value) for value in filled]),
        }
    )
    lists = flat.group_by("row", maintain_order=True).agg("value")["value"]
    every = pl.concat([lists, pl.Series("value", [[], None], dtype=pl.List(pl.Int64))])
    place = iter(range(len(filled)))
    empty, null = len(filled), len(filled) + 1
    found = every.gather(
        [
            null if v is None else next(place) if v else empty
            for c in columns.values()
            for v in c
        ]
    )
    height = len(found) // len(columns)
    return [
        found.slice(i * height, height).alias(name) for i, name in enumerate(columns)
    ]
