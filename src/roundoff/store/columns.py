"""The rows of a step as a table with all columns of OPS."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import chain
from typing import Any

import polars as pl

from roundoff.store.schema import OPS


def table_of(rows: Mapping[str, Sequence[Any]] | pl.DataFrame, rank: int, step: int) -> pl.DataFrame:
    """The rows with all columns of OPS in its order. Raises for a column that OPS lacks or a value of a wrong type."""
    unknown = [name for name in rows if name not in OPS] if isinstance(rows, Mapping) else []
    if isinstance(rows, pl.DataFrame):
        unknown = [name for name in rows.columns if name not in OPS]
        table = rows.cast({name: OPS[name] for name in rows.columns if name in OPS})
    elif not unknown:
        table = pl.DataFrame([_column(name, values) for name, values in rows.items()])
    if unknown:
        raise ValueError(f"ops.parquet has no column {', '.join(unknown)}")
    missing = {name: dtype for name, dtype in OPS.items() if name not in table.columns}
    own = {"rank": rank, "step": step}
    if not table.columns:  # a literal would make a row of it
        return pl.DataFrame(schema=OPS)
    return table.with_columns(
        *(pl.lit(None, dtype).alias(name) for name, dtype in missing.items() if name not in own),
        *(pl.lit(value, OPS[name]).alias(name) for name, value in own.items()),
    ).select(list(OPS))


def _column(name: str, values: Sequence[Any]) -> pl.Series:
    dtype = OPS[name]
    if isinstance(dtype, pl.List):
        return _lists(name, values, dtype)
    if dtype == pl.Float64:  # polars takes the type of a column from its first value, and then refuses 0.5 after 1
        values = [None if value is None else float(value) for value in values]
    return pl.Series(name, values, dtype=dtype)


def _lists(name: str, values: Sequence[Sequence[int] | None], dtype: pl.List) -> pl.Series:
    """A column of lists from one flat one: polars' own way takes as long for each list as for a whole column."""
    full = [i for i, value in enumerate(values) if value]
    flat = pl.DataFrame(
        [
            pl.Series("value", list(chain.from_iterable(values[i] or () for i in full)), dtype=dtype.inner),
            pl.Series("row", [i for i in full for _ in values[i] or ()], dtype=pl.UInt32),
        ]
    )
    lists = flat.group_by("row", maintain_order=True).agg("value")["value"]
    every = pl.concat([lists, pl.Series("value", [[], None], dtype=dtype)])
    place = {row: i for i, row in enumerate(full)}
    empty, null = len(full), len(full) + 1
    return every.gather([null if v is None else place.get(i, empty) for i, v in enumerate(values)]).alias(name)
