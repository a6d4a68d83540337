"""One recorded call again in fp64, on the inputs it had: wrong program, or rounding?

``semantic`` is the distance between the reference's call and the candidate's own, both
in fp64 and both on the candidate's inputs: what stays there is no rounding but another
program (an argument, an operator, the order of operands).

``kernel`` is the distance between what the candidate's call gave and the same call in
fp64: rounding, or a kernel that does not compute what it should. It is judged by what
rounding makes of the call in the working format: its fp32 error on these inputs, scaled
by the ratio of the unit roundoffs, and the rounding of the result (a bound of twice that
predicts the error of 113 modules of GPT-2 and ResNet-18 in bf16 without exception; four
times leaves room for another order of summation).
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from roundoff.compare.records.call_arguments import Fits, with_tensors_of
from roundoff.compare.records.recorded_calls import (
    CannotRun,
    RecentResults,
    RunRegion,
    Tensors,
    result_at,
)
from roundoff.compare.records.recorded_rows import RecordedRow
from roundoff.record import OwnError, own_error

#: Two fp64 results on the same inputs agree to this: 2**-53 through sums of up to 2**30
#: terms with cancellation of 2**10.
SAME = 2.0**-30
#: Roundings of sums in another order are independent: four standard deviations hold all
#: but one in 16,000.
MARGIN = 4.0
_UNIT_FP32 = 2.0**-24


@dataclass(frozen=True, slots=True)
class CallReplay:
    """What a call run again says; numbers are None, with a reason, where it can't run.

    Attributes:
        semantic: relative l2 distance of the two programs in fp64, see above.
        kernel: relative l2 distance of the candidate's result from fp64, see above.
        excess: the kernel's error in units of what rounding explains (l2 or largest
            element, the worse).
        reference_excess: the same for the reference's own result, where it had the same
            inputs.
        region_excess: the same for the distance from what the reference's calls
            together give.
        expected: what the reference gives on these inputs, in fp64.
        reason: why the call cannot be run.
    """

    semantic: float | None = None
    kernel: float | None = None
    excess: float | None = None
    reference_excess: float | None = None
    region_excess: float | None = None
    expected: Tensor | None = None
    reason: str | None = None

    @property
    def at_fault(self) -> bool:
        """True where this call itself makes an error that is not rounding."""
        excesses = (self.excess, self.reference_excess, self.region_excess)
        if self.another_program:
            return True
        return any(excess is not None and excess > 1.0 for excess in excesses)

    @property
    def another_program(self) -> bool:
        """True where the two calls differ even in fp64."""
        return self.semantic is not None and self.semantic > SAME

    @property
    def own(self) -> float | None:
        """The call's own error, both parts together."""
        parts = [part for part in (self.semantic, self.kernel) if part is not None]
        return math.hypot(*parts) if parts else None


@dataclass(frozen=True, slots=True)
class WorkingFormat:
    """The format by which a call is judged.

    Attributes:
        unit: unit roundoff.
        least: the smallest positive number.
        terms: how many elements are added for one of the result, where kernels are known
            to add in this format.
        products: how many products are added for one element of the result. Kernels add
            them in fp32 in whatever order: sqrt(products) roundings of it.
    """

    unit: float
    least: float
    terms: float = 1.0
    products: float = 0.0


@dataclass(frozen=True, slots=True, kw_only=True)
class ReferenceSide:
    """What the reference says of a candidate's call.

    Attributes:
        first: the first row of the counterpart's call; None where the two calls are not
            the same in both programs.
        result: the reference's result, where it had the same inputs.
        region: runs all of the reference's calls that lead to the counterpart, from
            values which the candidate has.
        fits: ``fits(reference record, candidate record)`` says if the second may stand
            for the first in a call: kernels read beyond the end of a tensor of another
            shape.
    """

    first: RecordedRow | None
    result: Tensor | None = None
    region: RunRegion | None = None
    fits: Fits = lambda _reference, _candidate: True


def replay_call(
    row: RecordedRow,
    first: RecordedRow,
    tensors: Tensors,
    working: WorkingFormat,
    reference: ReferenceSide,
    results: RecentResults | None = None,
) -> CallReplay:
    """Run the call of a row again, and its counterpart's on the same inputs.

    Args:
        row: of the candidate.
        first: the first row of its call, which holds the arguments.
        tensors: the candidate's.
        working: the format by which the result is judged.
        reference: the counterpart.
        results: keeps what was run last.
    """
    results = RecentResults() if results is None else results
    stored = row.record in tensors
    if reference.first is None and reference.region is not None and stored:
        replay = _replay_region(reference.region, tensors[row.record], working)
        if replay is not None:
            return replay
    if first.arguments is None or first.overload is None:
        return CallReplay(reason="its arguments were not recorded")
    if not stored:
        return CallReplay(reason="its result was not stored")
    call = _Call(first.overload, first.arguments, row.place, tensors, results)
    try:
        exact = call.run(torch.float64)
    except CannotRun as error:
        return CallReplay(reason=str(error))
    actual = tensors[row.record]
    allowed = _allowed_of_call(call, actual, exact, working)
    kernel = _relative(actual, exact)
    excess = _excess(actual, exact, allowed)
    reference_excess = None
    if reference.result is not None:
        reference_excess = _excess(reference.result, exact, allowed)
    replay = CallReplay(kernel=kernel, excess=excess, reference_excess=reference_excess)
    return _with_counterpart(replay, call, exact, reference)


class _Call(NamedTuple):
    """A call of the candidate, and the result that is looked at."""

    overload: str
    arguments: str
    place: int | None
    tensors: Tensors
    results: RecentResults

    def run(self, dtype: torch.dtype) -> Tensor:
        """Return the result in a format. Raises ``CannotRun``."""
        results = self.results.of(self.overload, self.arguments, self.tensors, dtype)
        return result_at(results, self.place)

    def counterpart(self, first: RecordedRow, fits: Fits) -> _Call | None:
        """Return the reference's call on the tensors of this one; None where it cannot be."""
        if first.arguments is None or first.overload is None:
            return None
        arguments = with_tensors_of(first.arguments, self.arguments, fits)
        if arguments is None:
            return None
        return self._replace(overload=first.overload, arguments=arguments)


def _with_counterpart(
    replay: CallReplay, call: _Call, exact: Tensor, reference: ReferenceSide
) -> CallReplay:
    """Add the distance of the two programs, where both calls can be run."""
    unknown = CallReplay(
        kernel=replay.kernel,
        excess=replay.excess,
        reference_excess=replay.reference_excess,
        expected=exact,
    )
    if reference.first is None:
        return unknown
    twin = call.counterpart(reference.first, reference.fits)
    if twin is None:
        return unknown
    same_call = twin.overload == call.overload and twin.arguments == call.arguments
    try:
        expected = exact if same_call else twin.run(torch.float64)
    except CannotRun:
        return unknown
    same_shape = expected.shape == exact.shape
    return CallReplay(
        semantic=_relative(exact, expected) if same_shape else math.inf,
        kernel=replay.kernel,
        excess=replay.excess,
        reference_excess=replay.reference_excess,
        expected=expected if same_shape else None,
    )


def _replay_region(
    region: RunRegion, actual: Tensor, working: WorkingFormat
) -> CallReplay | None:
    """Judge a result by the reference's calls that lead to it; None where they can't."""
    try:
        exact = region(torch.float64)
        in_fp32 = region(torch.float32)
    except CannotRun:
        return None
    if exact.shape != actual.shape:
        return None
    [rounded] = own_error([in_fp32], [exact])
    if rounded is None:
        return None
    allowed = _allowed(rounded, exact, working.unit, working.least)
    return CallReplay(
        kernel=_relative(actual, exact),
        region_excess=_excess(actual, exact, allowed),
        expected=exact,
    )


class _Allowed(NamedTuple):
    """The error that rounding explains."""

    l2: float
    largest: float


def _allowed_of_call(
    call: _Call, actual: Tensor, exact: Tensor, working: WorkingFormat
) -> _Allowed:
    rounded = None
    if working.unit and actual.is_floating_point():
        try:
            [rounded] = own_error([call.run(torch.float32)], [exact])
        except CannotRun:
            rounded = None
    added = max(1.0, math.sqrt(working.terms) / 2)
    allowed = _allowed(rounded, exact, working.unit * added, working.least)
    in_another_order = MARGIN * _UNIT_FP32 * math.sqrt(working.products)
    return _Allowed(
        l2=allowed.l2 + in_another_order * _norm(exact),
        largest=allowed.largest + in_another_order * _largest(exact),
    )


def _allowed(
    rounded: OwnError | None, exact: Tensor, unit: float, least: float
) -> _Allowed:
    """Return the error that rounding explains; ``rounded`` is fp32's on the same inputs."""
    scaled_l2 = 0.0
    scaled_largest = 0.0
    if rounded is not None and math.isfinite(rounded.l2):
        scale = MARGIN * unit / _UNIT_FP32
        scaled_l2 = scale * rounded.l2
        scaled_largest = scale * rounded.max
    root = math.sqrt(max(1, exact.numel()))
    rounding = 2 * unit * _largest(exact)
    return _Allowed(
        l2=scaled_l2 + 2 * unit * _norm(exact) + least * root,
        largest=max(scaled_largest, scaled_l2 / root) + rounding + least,
    )


def _norm(exact: Tensor) -> float:
    """Return the l2 norm of the finite elements."""
    return float(torch.linalg.vector_norm(_finite_sizes(exact)))


def _largest(exact: Tensor) -> float:
    """Return the largest magnitude of the finite elements; 0 without any."""
    return float(_finite_sizes(exact).max()) if exact.numel() else 0.0


def _finite_sizes(exact: Tensor) -> Tensor:
    if not (exact.is_complex() or exact.is_floating_point()):
        exact = exact.to(torch.float64)
    size = exact.abs()
    return size.masked_fill(~size.isfinite(), 0)


def _relative(actual: Tensor, exact: Tensor) -> float:
    [error] = own_error([actual], [exact])
    if error is None:
        return math.inf
    if error.reference:
        return error.l2 / error.reference
    return math.inf if error.l2 else 0.0


def _excess(actual: Tensor, exact: Tensor, allowed: _Allowed) -> float:
    """Return the error in units of what is allowed.

    Infinite where NaN or Inf disagree, also where the format is too small.
    """
    [error] = own_error([actual], [exact])
    if error is None:
        return math.inf
    if error.l2 == 0:
        return 0.0
    if math.isinf(error.l2) or not allowed.l2 or not allowed.largest:
        return math.inf
    return max(error.l2 / allowed.l2, error.max / allowed.largest)
