"""Data of a program that has no loader and no module: tensors that no operator made."""

from __future__ import annotations

from collections.abc import Iterator

import polars as pl

from roundoff.record import Batch, Run, TensorContent

#: The source of such tensors.
PROGRAM = "the program"
#: Tensors that are looked at.
MOST_TENSORS = 32


def outside_tensors(run: Run, rank: int) -> Iterator[Batch]:
    """Yield a batch of the first recorded step: tensors that came from outside, in the
    order of their first use, by their statistics; none without operators.

    In later steps parameters that no module holds are such tensors too.
    """
    for number, step in enumerate(run.steps[:1]):
        rows = run.part(rank, step).filter(
            (pl.col("operator") == "input") & (pl.col("phase") == "forward")
        )
        columns = rows.sort("record").select(
            "dtype", "shape", "mean", "std", "min", "max", "hash"
        )
        table = run.collected(columns.head(MOST_TENSORS))
        tensors = tuple(
            TensorContent(
                name=str(place),
                dtype=row["dtype"] or "",
                shape=tuple(row["shape"] or ()),
                hash=row["hash"],
                mean=row["mean"],
                std=row["std"],
                min=row["min"],
                max=row["max"],
            )
            for place, row in enumerate(table.iter_rows(named=True))
        )
        if tensors:
            yield Batch(source=PROGRAM, number=number, tensors=tensors, step=step)
