"""One recorded call again, as it was: on the same inputs, in the same formats.

A kernel that gives the same bits again has made no error that is its own fault, whatever
its inputs were. Where the bits differ, both results are held against the call in fp64:
the recorded one may be as far from it as this machine's kernel is, and as far as one
rounding of its format. That is a narrow band: in bf16, whose rounding is up to 0.4 %, an
operator that is 1 % wrong stands out, also where only some elements are.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from roundoff.compare.records.recorded_calls import (
    CannotRun,
    RecentResults,
    Tensors,
    result_at,
)
from roundoff.compare.records.recorded_rows import RecordedRow
from roundoff.compare.records.replay import CallReplay
from roundoff.compare.rounding.rounding_bound import (
    DIFFERENCES,
    MARGIN,
    condition,
    smallest,
    terms,
    unit,
)
from roundoff.record import OwnError, own_error

#: Root mean square of one rounding, in unit roundoffs, of values spread evenly in the
#: logarithm: u * sqrt(mean of (1/m)**2 / 3) with a fraction m from 1 to 2 has 0.43; the
#: worst, all fractions just above 1, has 1 / sqrt(3).
ONE_ROUNDING = 3**-0.5
#: Another honest kernel's error may be this many times that of the kernel here, in a
#: format whose own rounding is most of it.
WORSE = 2.0
#: The same in fp32 and fp64, where what sums leave that cancel may be most of it.
WORSE_IN_SUMS = 4.0
#: One element may be off by this many roundings of its format.
ROUNDINGS = 1.5
#: Terms that cancel may leave this much more of the rounding of a sum, at most.
LARGEST_CONDITION = 2.0**20
_UNIT_FP32 = 2.0**-24


def run_as_it_was(
    row: RecordedRow,
    first: RecordedRow,
    tensors: Tensors,
    results: RecentResults,
    inputs: Sequence[RecordedRow] = (),
) -> CallReplay:
    """Return the own error of a recorded result, judged by the kernel of this machine.

    Args:
        row: the result.
        inputs: what its call read.
        first: the first row of its call, which holds the arguments.
        tensors: those of the run.
        results: keeps what was run last.

    Returns:
        ``kernel`` is 0 with an ``excess`` of 0 where the same bits come again; a reason
        where the call cannot be run.
    """
    if first.arguments is None or first.overload is None:
        return CallReplay(reason="its arguments were not recorded")
    if row.record not in tensors:
        return CallReplay(reason="its result was not stored")
    call = (first.overload, first.arguments, tensors)
    actual = tensors[row.record]
    try:
        again = result_at(results.of(*call, None), row.place)
    except CannotRun as error:
        return CallReplay(reason=str(error))
    if again.shape != actual.shape or again.dtype is not actual.dtype:
        return CallReplay(reason="this machine's kernel gives another kind of tensor")
    if _same_values(actual, again):
        return CallReplay(kernel=0.0, excess=0.0)
    try:
        exact = result_at(results.of(*call, torch.float64), row.place)
    except CannotRun:
        exact = again
    if exact.shape != actual.shape or not exact.is_floating_point():
        return CallReplay(reason="its result is no floating-point tensor")
    return _judged(actual, again, exact, _rounding_of_sums(row, inputs))


def _same_values(one: Tensor, other: Tensor) -> bool:
    if torch.equal(one, other):
        return True
    if not one.is_floating_point() or not bool(one.isnan().any()):
        return False
    both_nan = one.isnan() & other.isnan()
    return bool(((one == other) | both_nan).all())


def _rounding_of_sums(row: RecordedRow, inputs: Sequence[RecordedRow]) -> float:
    """Return the relative error of sums within, which kernels add in fp32 in any order.

    What an operator of three or more tensors multiplies before it adds has another size
    than its operands, so that these tell nothing of what cancels.
    """
    root = math.sqrt(terms(row, inputs))
    multiplies_first = row.base_operator in DIFFERENCES and len(inputs) > 2
    cancelling = 1.0 if multiplies_first else condition(row, inputs)
    return MARGIN * _UNIT_FP32 * root * min(cancelling, LARGEST_CONDITION)


def _judged(actual: Tensor, again: Tensor, exact: Tensor, of_sums: float) -> CallReplay:
    """Hold a result against the call in fp64, by what the kernel here makes of it."""
    measured, of_kernel = own_error([actual, again], [exact, exact])
    if measured is None or of_kernel is None:
        return CallReplay(reason="its result cannot be compared")
    relative = measured.l2 / measured.reference if measured.reference else math.inf
    if math.isinf(of_kernel.l2):
        return CallReplay(reason="not finite in this format")
    if math.isinf(measured.l2):
        return CallReplay(kernel=math.inf, excess=math.inf, expected=exact)
    band = _Band.of(actual.dtype, of_sums * measured.reference)
    excess = max(
        measured.l2 / band.of_norm(of_kernel, exact.numel()),
        band.worst_element(actual, again, exact),
    )
    return CallReplay(kernel=relative, excess=excess, expected=exact)


@dataclass(frozen=True, slots=True)
class _Band:
    """The error that an honest kernel may make.

    Attributes:
        unit: unit roundoff of the format.
        least: its smallest number.
        worse: how many times the error of the kernel here is granted.
        sums: the l2 norm of what sums in another order may change.
    """

    unit: float
    least: float
    worse: float
    sums: float

    @classmethod
    def of(cls, dtype: torch.dtype, sums: float) -> _Band:
        name = str(dtype).removeprefix("torch.")
        worse = WORSE if unit(name) > _UNIT_FP32 else WORSE_IN_SUMS
        return cls(unit(name), smallest(name), worse, sums)

    def of_norm(self, of_kernel: OwnError, count: int) -> float:
        """Return the l2 norm of the error that is allowed."""
        rounded = ONE_ROUNDING * self.unit * of_kernel.reference
        largest = max(of_kernel.l2, rounded)
        return self.worse * largest + self.least * math.sqrt(count) + self.sums

    def worst_element(self, actual: Tensor, again: Tensor, exact: Tensor) -> float:
        """Return the largest error of one element, in units of what is allowed there.

        Sums that cancel leave errors of the size of their terms: as large a floor as
        the kernel here needs is granted to every element.
        """
        wide = exact.to(torch.float64)
        infinite = ~(wide.isfinite() & again.isfinite() & actual.isfinite())
        size = wide.abs().masked_fill(infinite, 0.0)
        error = (actual.to(torch.float64) - wide).abs().masked_fill(infinite, 0.0)
        of_kernel = (again.to(torch.float64) - wide).abs().masked_fill(infinite, 0.0)
        one_rounding = self.unit * size + self.least
        beyond = max(0.0, float((of_kernel - one_rounding).max()))
        floor = self.worse * beyond + self.sums / math.sqrt(wide.numel())
        return float((error / (ROUNDINGS * one_rounding + floor)).max())
