"""Which inputs of a recorded call its results depend on, and which one it wrote.

Inputs and results are named by the numbers of their records.
"""

from __future__ import annotations

from collections.abc import Sequence

from roundoff.ops.table import base, facts, operators_that


def values_read(
    operator: str,
    overload: str | None,
    inputs: Sequence[int] | None,
    *,
    outputs: int = 1,
) -> list[int]:
    """Return the inputs whose values a result depends on: not the memory that it overwrites.

    Args:
        operator: its name, maybe with the underscore of an in-place form.
        overload: the name of its overload.
        inputs: the records that it was given, in order.
        outputs: how many tensors it made.

    >>> values_read("copy_", "default", [4, 7]), values_read("add_", "Tensor", [4, 7])
    ([7], [4, 7])
    """
    read = list(inputs or ())
    name = base(operator)
    if _writes_out(overload):
        read = read[: len(read) - outputs]
    shape_only = facts(name).shape_only
    if shape_only is not None:
        read = read[:shape_only] + read[shape_only + 1 :]
    if name in operators_that("ignore their first operand"):
        read = read[1:]
    return read


def written_input(
    operator: str,
    overload: str | None,
    inputs: Sequence[int] | None,
    *,
    place: int,
    outputs: int = 1,
) -> int | None:
    """Return the record whose memory an in-place call wrote; None without inputs.

    ``place`` is that of the result among the call's results; the rest as for
    ``values_read``.
    """
    records = list(inputs or ())
    if not records:
        return None
    if _writes_out(overload):
        index = len(records) - outputs + place
    elif operator.startswith("_fused_"):
        # all lists one after another, of which each result has the inputs of its place
        index = place * (len(records) - 1) // outputs
    elif operator.startswith("_foreach_"):
        index = 0
    else:
        index = place
    return int(records[index]) if 0 <= index < len(records) else int(records[0])


def _writes_out(overload: str | None) -> bool:
    return (overload or "").endswith("out")
