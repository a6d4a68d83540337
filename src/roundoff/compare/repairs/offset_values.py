"""Values that differ from the reference's by one number everywhere.

A summand that is left out, as the one that opens a gate, or one too many.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Collection, Iterator
from itertools import islice

import torch
from torch import Tensor

from roundoff.compare.records.call_arguments import numbers_given
from roundoff.compare.repairs.goals import FEWEST
from roundoff.compare.values.value_flow import Flow
from roundoff.compare.values.value_regions import Sides
from roundoff.ops import operators_that

#: Values of the reference that one is compared with, the first ones of its size.
MOST_VALUES = 64
#: An offset is as clear as this, relative to what it is added to: others are rounding, or
#: an epsilon.
CLEAR = 2.0**-10
_SUMS = operators_that("add or subtract")


class OffsetValues:
    """The values of the candidate that are one of the reference's but for a number.

    Args:
        sides: both programs.
        expected: keys of the reference's values that lead to what differs.
    """

    def __init__(self, sides: Sides, expected: Collection[int]) -> None:
        self._sides = sides
        self._expected = expected
        self._lost: dict[int, list[Tensor]] | None = None

    def offset(self, record: int) -> float | None:
        """Return by how much a value is more; None where it is one of the reference's, or
        none but for a number."""
        sides = self._sides
        value = sides.candidate.values.get(record)
        if value is None or value.key in sides.twins or value.inner:
            return None
        if value.operator in _SUMS and numbers_given(value.row):
            return None  # another number there says more
        present = _sorted(sides.candidate, record)
        if present is None:
            return None
        for wanted in self._of_size(present.numel()):
            offset = offset_between(wanted, present, sides.limit)
            if offset is not None:
                return offset
        return None

    def _of_size(self, numel: int) -> Iterator[Tensor]:
        if self._lost is None:
            self._lost = defaultdict(list)
            for key in sorted(self._expected - self._sides.agreeing.keys()):
                tensor = _sorted(self._sides.reference, key)
                if tensor is not None:
                    self._lost[tensor.numel()].append(tensor)
        yield from islice(self._lost.get(numel, ()), MOST_VALUES)


def _sorted(flow: Flow, key: int) -> Tensor | None:
    """Return the numbers of a value, the least first; None of few, and of no numbers."""
    tensor = flow.tensor(key)
    if tensor is None or not tensor.is_floating_point() or tensor.numel() < FEWEST:
        return None
    return tensor.detach().to(torch.float64).reshape(-1).sort().values


def offset_between(wanted: Tensor, present: Tensor, limit: float) -> float | None:
    """Return the number by which sorted values are more than others; None if there is none.

    >>> offset_between(torch.arange(20.0), torch.arange(20.0) - 1, 1e-5)
    -1.0
    >>> offset_between(torch.arange(20.0), 2 * torch.arange(20.0), 1e-5)

    NaN and Inf are no number apart from anything, and constants no values to tell.
    """
    apart = present - wanted
    if not bool(apart.isfinite().all()):
        return None
    offset = float(apart.median())
    size = float(wanted.square().mean().sqrt())
    spread = float(wanted.std())
    rest = float((apart - offset).square().mean().sqrt())
    is_near = rest <= limit * min(size, spread)
    return offset if is_near and abs(offset) > CLEAR * size else None
