"""What really ran in low precision, not what was asked for."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

import polars as pl

from roundoff.check.findings import Difference
from roundoff.check.pair import Pair, shorten
from roundoff.check.rules import PRECISION, Rule
from roundoff.check.side import Side
from roundoff.ops import operators_that

#: Formats of less than 24 bits.
_LOW = ("bfloat16", "float16")
_RULE = Rule(
    group=PRECISION,
    name="operators in low precision",
    why="each of these rounds to 8 or 11 bits in one run and to 24 in the other",
    fix="turn autocast on in both, for the device that the tensors are on",
    follows=("dtype of the parameters", "default dtype"),
)
Dtypes = Mapping[str, frozenset[str]]


def differing_precision(pair: Pair) -> Iterator[Difference]:
    """Yield the operators that ran in other dtypes, as one difference."""
    ours, theirs = (dtypes_of(side) for side in pair.sides)
    common = [name for name in ours if name in theirs]
    differing = [name for name in common if ours[name] != theirs[name]]
    if not differing:
        return
    values = [in_words(dtypes, common) for dtypes in (ours, theirs)]
    if values[0] == values[1]:
        return
    yield pair.difference(
        _RULE, values, subject="the operators that ran in low precision"
    )


def dtypes_of(side: Side) -> Dtypes:
    """Return the dtypes of each operator's results in the first recorded step."""
    steps = side.run.steps
    if not steps:
        return {}
    moves = [*operators_that("move values"), *operators_that("create")]
    rows = side.run.part(side.rank, steps[0]).filter(
        (pl.col("phase") == "forward")
        & (pl.col("call") >= 0)
        & pl.col("dtype").str.contains("float")
        & ~pl.col("operator").str.strip_chars_end("_").is_in(moves)
    )
    table = side.run.collected(rows.select("operator", "dtype").unique())
    dtypes: dict[str, set[str]] = {}
    for operator, dtype in table.sort("operator", "dtype").rows():
        dtypes.setdefault(operator, set()).add(dtype)
    return {operator: frozenset(names) for operator, names in dtypes.items()}


def in_words(dtypes: Dtypes, names: list[str]) -> str:
    """Return which operators ran in which low format."""
    words = []
    formats = sorted({d for name in names for d in dtypes[name] if is_low(d)})
    for dtype in formats:
        low = [name for name in names if dtype in dtypes[name]]
        shown = ", ".join(low[:4]) + (" …" if len(low) > 4 else "")
        words.append(f"{len(low)} of {len(names)} in {dtype} ({shown})")
    return shorten("; ".join(words)) or "none"


def is_low(dtype: str) -> bool:
    """Return True for a floating format of less than 24 bits."""
    return dtype in _LOW or dtype.startswith("float8")
