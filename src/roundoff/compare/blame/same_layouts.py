"""Do two values hold the same numbers in the same places, but for how axes are cut?"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from roundoff.compare.records.parameter_content import (
    axis_orders,
)
from roundoff.compare.records.value_sketch import (
    in_reals,
)


def same_layout(ours: Tensor, theirs: Tensor) -> bool:
    """Return True where two tensors are one up to the order and the joining of axes.

    >>> x = torch.randn(2, 3, 4)
    >>> same_layout(x, x.permute(0, 2, 1)), same_layout(x, x.permute(2, 0, 1).flatten(1))
    (True, True)
    >>> same_layout(x, x.reshape(2, 4, 3))
    False
    """
    for fine, coarse in ((ours, theirs), (theirs, ours)):
        for order in axis_orders(fine):
            other = fine.permute(order)
            if _joins_to(other.shape, coarse.shape) and is_close(other, coarse):
                return True
    return False


def is_close(one: Tensor, other: Tensor) -> bool:
    """Return True for tensors of the same elements in the same order, but for rounding."""
    a = in_reals(one).reshape(-1).to(torch.float64)
    b = in_reals(other).reshape(-1).to(torch.float64)
    return a.shape == b.shape and float((a - b).norm()) <= 1e-4 * float(a.norm())


def _joins_to(fine: Sequence[int], coarse: Sequence[int]) -> bool:
    """Return True where joining neighbouring axes makes one shape of the other."""
    waiting = [size for size in fine if size != 1]
    for size in coarse:
        if size == 1:
            continue
        joined = 1
        while joined < size and waiting:
            joined *= waiting.pop(0)
        if joined != size:
            return False
    return not waiting
