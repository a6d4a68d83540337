"""What operators do with the values of their inputs: read, move, overwrite or ignore them.

A name is that of the operator without the mark of its in-place form (``base``).
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

Row = Mapping[str, Any]

#: These only move values or write a constant, so that an -inf after finite inputs was asked for.
MASKS = frozenset(
    "masked_fill where full full_like new_full fill triu tril masked_scatter scatter index_put index_fill scalar_tensor "
    "lift_fresh lift_fresh_copy constant_pad_nd _unsafe_masked_index_put index_copy slice_scatter select_scatter".split()
)
#: These never read the values of their first input.
OVERWRITE = frozenset(
    "zeros_like ones_like empty_like full_like rand_like randn_like randint_like new_zeros new_empty new_full new_ones "
    "new_empty_strided zero fill copy normal uniform bernoulli exponential random resize set log_normal geometric "
    "cauchy zero_tensor _foreach_zero _foreach_copy".split()
)
#: These take elements out, or ask about them: what is left out was not removed from anything.
SELECT = frozenset(
    "index index_select gather slice select narrow take embedding masked_select split chunk unbind topk sort isfinite "
    "isnan isinf isneginf isposinf _is_all_true _local_scalar_dense is_nonzero equal _unsafe_masked_index".split()
)
#: Memory that nothing was written to yet.
EMPTY = frozenset(
    "empty empty_like empty_strided new_empty new_empty_strided resize empty_permuted".split()
)
#: Inputs of which only the shape is read.
SHAPE_ONLY = {
    "nll_loss_backward": 1,
    "nll_loss2d_backward": 1,
    "max_pool2d_with_indices_backward": 1,
    "expand_as": 1,
    "view_as": 1,
    "type_as": 1,
    "_adaptive_avg_pool2d_backward": 1,
    "avg_pool2d_backward": 1,
    "reflection_pad2d_backward": 1,
}


def base(operator: str) -> str:
    """The operator without the mark of its in-place form."""
    return operator.rstrip("_") or operator


def values_read(row: Row, outputs: int) -> list[int]:
    """The inputs whose values an output depends on: not the memory it overwrites."""
    inputs = list(row["inputs"] or ())
    operator = base(row["operator"])
    if (row["overload"] or "").endswith("out"):
        inputs = inputs[: len(inputs) - outputs]
    if operator in SHAPE_ONLY:
        place = SHAPE_ONLY[operator]
        inputs = inputs[:place] + inputs[place + 1 :]
    return inputs[1:] if operator in OVERWRITE else inputs


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
