"""One recorded call again in fp64, on the inputs it really had: what is wrong in the program, and what in the arithmetic.

``semantic`` is the distance between the reference's call and the candidate's own, both in fp64 and both on the candidate's
inputs: what stays there is no rounding but another program (an argument, an operator, the order of operands).
``kernel`` is the distance between what the candidate's call gave and the same call in fp64: rounding, or a kernel that
does not compute what it should. It is judged by what rounding makes of the call in the working format: its fp32 error on
these inputs, scaled by the ratio of the unit roundoffs, and the rounding of the result (a bound of twice that
predicts the error of 113 modules of GPT-2 and ResNet-18 in bf16 without exception; four times leaves room for another
order of summation).
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from roundoff.compare.rerun import Region, Runs, Tensors, Unable, at
from roundoff.errors import RunError
from roundoff.ops import overload_of
from roundoff.record import OwnError, own_error

Row = Mapping[str, Any]

#: Two fp64 results on the same inputs agree to this: 2**-53 through sums of up to 2**30 terms with cancellation of 2**10.
SAME = 2.0**-30
MARGIN = 4.0
_RECORDS = re.compile(r'\{"record":(\d+)\}')
#: What does not change the numbers of a call.
_PLACES = frozenset(("dtype", "device", "layout", "memory_format", "slice"))
#: What additive masks are filled with, in whatever format.
_LARGEST = [
    torch.finfo(d).max
    for d in (torch.float64, torch.float32, torch.bfloat16, torch.float16)
]
_LOWEST = [-value for value in _LARGEST]


@dataclass(frozen=True)
class Replayed:
    """Relative l2 distances, and errors in units of what rounding explains; None, with a reason, where it can't be run.

    ``semantic`` and ``kernel`` are said above; ``excess`` is the kernel's error in those units (l2 or largest element, the
    worse), ``reference_excess`` that of the reference's own result, where it had the same inputs, and ``region_excess``
    the distance from what the reference's calls together give. ``expected`` is what the reference gives on these inputs,
    in fp64.
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
        """Whether this call itself makes an error that is not rounding."""
        return (
            (self.semantic or 0.0) > SAME
            or (self.excess or 0.0) > 1.0
            or (self.reference_excess or 0.0) > 1.0
            or (self.region_excess or 0.0) > 1.0
        )

    @property
    def own(self) -> float | None:
        """The call's own error, both parts together."""
        parts = [p for p in (self.semantic, self.kernel) if p is not None]
        return math.hypot(*parts) if parts else None


def replayed(
    row: Row,
    *,
    first: Row,
    first_twin: Row,
    tensors: Tensors,
    unit: float,
    least: float,
    aligned: bool = True,
    reference: Tensor | None = None,
    region: Region | None = None,
    fits: Callable[[int, int], bool] = lambda _a, _b: True,
    terms: float = 1.0,
    runs: Runs | None = None,
) -> Replayed:
    """Run the call of ``row`` again, and that of its counterpart on the same inputs where they are aligned.

    Args:
        row: of the candidate.
        first: the first row of its call, which holds the arguments.
        first_twin: that of the counterpart's call.
        tensors: the candidate's.
        unit: unit roundoff of the working format.
        least: the smallest positive number of the format.
        aligned: whether the two calls are the same in both programs.
        reference: the reference's result, where it had the same inputs.
        region: runs all of the reference's calls that lead to the counterpart, from values which the candidate has, for
            a row that has no call of its own in the reference.
        fits: ``fits(reference record, candidate record)`` is whether the second may stand for the first in a call:
            kernels read beyond the end of a tensor of another shape.
        terms: how many elements are added for one of the result, where kernels are known to add in the working format.
        runs: keeps what was run last.
    """
    runs = Runs() if runs is None else runs
    if not aligned and region is not None and row["record"] in tensors:
        judged = _of_region(region, tensors[row["record"]], unit, least)
        if judged is not None:
            return judged
    if first["arguments"] is None or first["overload"] is None:
        return Replayed(reason="its arguments were not recorded")
    if row["record"] not in tensors:
        return Replayed(reason="its result was not stored")
    try:
        mine = runs.of(first["overload"], first["arguments"], tensors, torch.float64)
        again = at(mine, row["place"])
    except Unable as error:
        return Replayed(reason=str(error))
    actual = tensors[row["record"]]
    kernel, excess, allowed = _kernel(
        first, row, actual, again, tensors, unit, least, terms, runs
    )
    beside = None if reference is None else _excess(reference, again, *allowed)
    if not aligned or first_twin["arguments"] is None or first_twin["overload"] is None:
        return Replayed(None, kernel, excess, beside, None, again)
    try:
        text = _with_inputs(first_twin["arguments"], first["arguments"], fits)
        theirs = (
            again
            if text == first["arguments"]
            and first_twin["overload"] == first["overload"]
            else at(
                runs.of(first_twin["overload"], text, tensors, torch.float64),
                row["place"],
            )
        )
    except Unable:
        return Replayed(None, kernel, excess, beside, None, again)
    if theirs.shape != again.shape:
        return Replayed(math.inf, kernel, excess, beside)
    return Replayed(_relative(again, theirs), kernel, excess, beside, None, theirs)


def _of_region(
    region: Region, actual: Tensor, unit: float, least: float
) -> Replayed | None:
    try:
        exact, plain = region(torch.float64), region(torch.float32)
    except Unable:
        return None
    if exact.shape != actual.shape:
        return None
    [rounded] = own_error([plain], [exact])
    if rounded is None:
        return None
    allowed = _allowed(
        rounded if math.isfinite(rounded.l2) else None, exact, unit, least
    )
    return Replayed(
        None,
        _relative(actual, exact),
        None,
        None,
        _excess(actual, exact, *allowed),
        exact,
    )


def differences(one: Row, other: Row) -> tuple[str, ...]:
    """The arguments, tensors and formats apart, that differ between two calls: ``eps: 1e-05, here 0.001``."""
    if (
        one["arguments"] is None
        or other["arguments"] is None
        or one["arguments"] == other["arguments"]
    ):
        return ()
    try:
        first, second = _constants(one), _constants(other)
    except (ValueError, RunError):
        return ()
    return tuple(
        f"{name}: {_shown(first.get(name))}, here {_shown(second.get(name))}"
        for name in dict.fromkeys([*first, *second])
        if not _same(first.get(name), second.get(name))
    )


def _constants(row: Row) -> dict[str, Any]:
    positional, by_name = json.loads(row["arguments"])
    schema = overload_of(row["overload"])._schema.arguments
    names = [a.name for a in schema]
    given = {a.name: a.default_value for a in schema if a.has_default_value()}
    given |= dict(zip(names, positional, strict=False)) | by_name
    return {
        name: value
        for name, value in ((n, _plain(v)) for n, v in given.items())
        if value is not _Skip
    }


def _same(one: Any, other: Any) -> bool:
    """Equal, or each the lowest or largest number of a format: what masks are filled with."""
    if one == other:
        return True
    return any(one in ends and other in ends for ends in (_LOWEST, _LARGEST))


class _Skip:
    """Stands for what is no constant."""


def _plain(value: Any) -> Any:
    if isinstance(value, dict):
        [kind] = value
        return _Skip if kind == "record" or kind in _PLACES else value[kind]
    if isinstance(
        value, (torch.dtype, torch.device, torch.layout, torch.memory_format)
    ):
        return _Skip
    if isinstance(value, (list, tuple)):
        plain = [_plain(v) for v in value]
        return _Skip if any(v is _Skip for v in plain) else plain
    return value


def _shown(value: Any) -> str:
    text = str(value)
    return text if len(text) < 60 else text[:57] + "..."


def _with_inputs(text: str, other: str, fits: Callable[[int, int], bool]) -> str:
    """The arguments ``text`` with the tensors of ``other``, in their order."""
    ours, records = _RECORDS.findall(text), _RECORDS.findall(other)
    if len(ours) != len(records):
        raise Unable("the two calls take different numbers of tensors")
    if not all(fits(int(a), int(b)) for a, b in zip(ours, records, strict=True)):
        raise Unable("the two calls take tensors of different shapes")
    places = iter(records)
    return _RECORDS.sub(lambda _: f'{{"record":{next(places)}}}', text)


def _kernel(
    first: Row,
    row: Row,
    actual: Tensor,
    again: Tensor,
    tensors: Tensors,
    unit: float,
    least: float,
    terms: float,
    runs: Runs,
) -> tuple[float | None, float | None, tuple[float, float]]:
    """The relative error of the actual result, the same in units of what rounding explains, and that: l2 and largest."""
    rounded = None
    if unit and actual.is_floating_point():
        try:
            plain = at(
                runs.of(first["overload"], first["arguments"], tensors, torch.float32),
                row["place"],
            )
            [rounded] = own_error([plain], [again])
        except Unable:
            pass
        if rounded is not None and not math.isfinite(rounded.l2):
            rounded = None
    allowed = _allowed(rounded, again, unit * max(1.0, math.sqrt(terms) / 2), least)
    return _relative(actual, again), _excess(actual, again, *allowed), allowed


def _allowed(
    rounded: OwnError | None, exact: Tensor, unit: float, least: float
) -> tuple[float, float]:
    """What rounding explains, l2 and largest: ``rounded`` is the error of fp32 on the same inputs."""
    scale = MARGIN * unit / 2.0**-24
    honest, most = (
        (0.0, 0.0) if rounded is None else (scale * rounded.l2, scale * rounded.max)
    )
    size = (
        exact.abs()
        if exact.is_complex() or exact.is_floating_point()
        else exact.to(torch.float64).abs()
    )
    size = size.masked_fill(~size.isfinite(), 0)
    amax = float(size.max()) if size.numel() else 0.0
    root = math.sqrt(max(1, exact.numel()))
    allowed = honest + 2 * unit * float(torch.linalg.vector_norm(size)) + least * root
    return allowed, max(most, honest / root) + 2 * unit * amax + least


def _relative(actual: Tensor, again: Tensor) -> float:
    [error] = own_error([actual], [again])
    if error is None:
        return math.inf
    return error.l2 / error.reference if error.reference else error.l2 and math.inf


def _excess(actual: Tensor, again: Tensor, allowed: float, largest: float) -> float:
    """The error in units of what is allowed; infinite where NaN or Inf disagree, also where the format is too small."""
    [error] = own_error([actual], [again])
    if error is None:
        return math.inf
    if error.l2 == 0:
        return 0.0
    if math.isinf(error.l2) or not allowed or not largest:
        return math.inf
    return max(error.l2 / allowed, error.max / largest)
