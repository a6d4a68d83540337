"""How far the roundings of all operators behind a value may have moved it."""

from __future__ import annotations

import math
from collections.abc import Mapping

from roundoff.compare.records.recorded_rows import RecordedRow, Rows, last_named
from roundoff.compare.rounding.rounding_bound import (
    MARGIN,
    REGION_LIMIT,
    terms,
    unit,
)
from roundoff.ops import operators_that

_EXACT = operators_that("add no error")


def accumulated_rounding(rows: Rows, before: Mapping[str, float]) -> dict[int, float]:
    """Return the relative rounding of each value by record, along the longest way to it.

    One operator rounds its result, ``u``, and what it adds up: about ``sqrt(n) u`` for
    ``n`` terms, in fp32 or wider. Portions add in another order, so that each of them
    rounds otherwise; the roundings of operators one after the other are taken as
    independent, and add by their squares. Of several inputs the one that was rounded
    most counts.

    Args:
        rows: of one step, in the order of execution.
        before: of values from before the step, by name.
    """
    rounding: dict[int, float] = {}
    for record, row in rows.items():
        come_in = max((rounding.get(source, 0.0) for source in row.inputs), default=0.0)
        if not row.is_call and row.name:
            come_in = max(come_in, before.get(row.name, 0.0))
        rounding[record] = math.hypot(come_in, _of_operator(row, rows))
    return rounding


def _of_operator(row: RecordedRow, rows: Rows) -> float:
    """Return the rounding that one operator adds, relative to its result."""
    u = unit(row.dtype)
    if not row.is_call or row.base_operator in _EXACT:
        return 0.0
    added = terms(row, [rows[source] for source in row.inputs if source in rows])
    return u + min(u, unit("float32")) * math.sqrt(added)


def explained(rounding: float, dtype: str | None) -> float:
    """Return the distance that such a rounding explains.

    At least that of one operator, as between values from before a step.
    """
    return min(MARGIN * max(rounding, unit(dtype)), REGION_LIMIT)


def left_behind(rows: Rows, rounding: Mapping[int, float]) -> dict[str, float]:
    """Return the rounding of what a step leaves, by name."""
    return {name: rounding[row.record] for name, row in last_named(rows).items()}
