"""The scale that gradients have when the optimizer reads them, wherever it came in.

One program divides its loss, another one its gradients once they are made. From the
gradient that the optimizer reads the calls are followed back to the backward pass, and
every number on the way is multiplied. What a clip multiplies by was made of the gradients,
and would hide any scale: it counts as one, and so does every number after the program asked
about values that were made of gradients.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping
from statistics import median

from roundoff.compare.records.recorded_rows import RecordedRow, Rows, last_named
from roundoff.compare.rounding.rounding_bound import DIVISIONS, PRODUCTS
from roundoff.ops import operators_that

_GRADIENT = ".grad"
#: A gradient is followed through at most so many calls.
MOST_DEEP = 64
_BACKWARD = "backward"
#: The program may go on by what these say.
_ASK = operators_that("ask about values")


def scale_left(rows: Rows, scales: Mapping[int, float]) -> float | None:
    """Return the scale that most gradients have when the optimizer reads them.

    None where none can be followed back to the backward pass.

    Args:
        rows: the rows of a step, by record.
        scales: the scales of the gradients in the backward pass that are not one.
    """
    made = _made_of_gradients(rows)
    asked = [record for record in made if rows[record].base_operator in _ASK]
    first_asked = min(asked, default=math.inf)
    ends = [row for name, row in last_named(rows).items() if name.endswith(_GRADIENT)]
    found = [_followed(row, rows, scales, made, first_asked) for row in ends]
    known = [scale for scale in found if scale is not None]
    return median(known) if known else None


def _made_of_gradients(rows: Rows) -> set[int]:
    """Return the records outside of the backward pass that read what it gave."""
    made: set[int] = set()
    for record in sorted(rows):
        row = rows[record]
        if row.phase != _BACKWARD and any(
            i in made or (i in rows and rows[i].phase == _BACKWARD) for i in row.inputs
        ):
            made.add(record)
    return made


def _followed(
    row: RecordedRow,
    rows: Rows,
    scales: Mapping[int, float],
    made: Collection[int],
    first_asked: float,
) -> float | None:
    """Return the scale of a gradient by the numbers on its way from the backward pass."""
    factor = 1.0
    for _ in range(MOST_DEEP):
        if row.phase == _BACKWARD:
            return factor * scales.get(row.record, 1.0)
        read = [rows[i] for i in row.inputs if i in rows]
        gradients = [r for r in read if r.record in made or r.phase == _BACKWARD]
        if not gradients:
            return None
        same_size = [r for r in gradients if r.numel == row.numel]
        source = next(iter(same_size or gradients))
        is_product = row.base_operator in PRODUCTS | DIVISIONS
        is_clip = len(gradients) > 1 or row.record > first_asked
        if is_product and not is_clip and source.l2 and row.l2:
            factor *= row.l2 / source.l2
        row = source
    return None
