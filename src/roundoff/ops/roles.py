"""What operators do with the values of their inputs: read, move, overwrite or ignore them.

A name is that of the operator without the mark of its in-place form (``base``).
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from roundoff.ops.table import base, facts, operators_that

Row = Mapping[str, Any]


def values_read(row: Row, outputs: int) -> list[int]:
    """The inputs whose values an output depends on: not the memory it overwrites."""
    inputs = list(row["inputs"] or ())
    operator = base(row["operator"])
    if (row["overload"] or "").endswith("out"):
        inputs = inputs[: len(inputs) - outputs]
    place = facts(operator).shape_only
    if place is not None:
        inputs = inputs[:place] + inputs[place + 1 :]
    return (
        inputs[1:]
        if operator in operators_that("ignore their first operand")
        else inputs
    )


def written_input(row: Row, outputs: int) -> int | None:
    """The record whose memory an in-place operator wrote."""
    inputs = list(row["inputs"] or ())
    if not inputs:
        return None
    operator = row["operator"]
    if (row["overload"] or "").endswith("out"):
        index = len(inputs) - outputs + row["place"]
    elif operator.startswith(
        ("_foreach_", "_fused_")
    ):  # a row has the inputs of its own place in the lists
        index = (
            row["place"] * (len(inputs) - 1) // outputs
            if operator.startswith("_fused_")
            else 0
        )
    else:
        index = row["place"]
    return int(inputs[index]) if 0 <= index < len(inputs) else int(inputs[0])
