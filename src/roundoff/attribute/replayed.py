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
from typing import Any, Protocol

import torch
from torch import Tensor

from roundoff.capture.again import apart, made, run_again
from roundoff.capture.arguments import overload_of, restore
from roundoff.capture.own import OwnError, own_error
from roundoff.capture.refusal import Reason
from roundoff.errors import RunError

Row = Mapping[str, Any]

#: Two fp64 results on the same inputs agree to this: 2**-53 through sums of up to 2**30 terms with cancellation of 2**10.
SAME = 2.0**-30
MARGIN = 4.0
#: Calls of the reference that are run one after the other to say what the candidate's operators should have given together.
DEEPEST = 12
_RECORDS = re.compile(r'\{"record":(\d+)\}')
#: What does not change the numbers of a call.
_PLACES = frozenset(("dtype", "device", "layout", "memory_format", "slice"))
#: Refused by ``run_again`` since they round nothing; they are run as they are.
_EXACT = ("a view rounds nothing", "a cast that rounds nothing", "already runs in", "makes ")


_LARGEST = [torch.finfo(d).max for d in (torch.float64, torch.float32, torch.bfloat16, torch.float16)]
_LOWEST = [-value for value in _LARGEST]

Region = Callable[[torch.dtype], Tensor]


class Tensors(Protocol):
    """The tensors of a step by record."""

    def __getitem__(self, record: int, /) -> Tensor: ...
    def __contains__(self, record: int, /) -> bool: ...


@dataclass(frozen=True)
class Replayed:
    """Relative l2 distances; ``excess`` is the kernel's error in units of what rounding explains (l2 or largest element);
    ``reference_excess`` is that of the reference's own result, where it had the same inputs; ``expected`` is what the reference's call gives on these inputs, in fp64. None, with a reason, where it can't be run."""

    semantic: float | None = None
    kernel: float | None = None
    excess: float | None = None
    reference_excess: float | None = None
    region_excess: float | None = None
    expected: Tensor | None = None
    arguments: tuple[str, ...] = ()
    reason: str | None = None

    @property
    def at_fault(self) -> bool:
        """Whether this call itself makes an error that is not rounding."""
        return (self.semantic or 0.0) > SAME or (self.excess or 0.0) > 1.0 or (self.reference_excess or 0.0) > 1.0 or (
            self.region_excess or 0.0
        ) > 1.0

    @property
    def own(self) -> float | None:
        """The call's own error, both parts together."""
        parts = [p for p in (self.semantic, self.kernel) if p is not None]
        return math.hypot(*parts) if parts else None


def replayed(
    twin: Row, row: Row, *, first: Row, first_twin: Row, tensors: Tensors, unit: float, least: float, aligned: bool = True,
    reference: Tensor | None = None, region: Region | None = None,
    fits: Callable[[int, int], bool] = lambda _a, _b: True,
) -> Replayed:  # fmt: skip
    """Run the call of ``row`` again, and that of its counterpart ``twin`` on the same inputs where they are aligned.

    ``first`` and ``first_twin`` are the first rows of the two calls, which hold the arguments; ``unit`` is the unit
    roundoff of the working format and ``least`` its smallest positive number; ``reference`` is the reference's result, where
    it had the same inputs; ``region`` runs all of the reference's calls that lead to ``twin`` from values which the candidate
    has, for a row that has no call of its own in the reference; ``fits(reference record, candidate record)`` is whether the
    second may stand for the first in a call: kernels read beyond the end of a tensor of another shape.
    """
    if not aligned and region is not None and row["record"] in tensors:
        judged = _of_region(row, region, tensors[row["record"]], unit, least)
        if judged is not None:
            return judged
    if first["arguments"] is None or first["overload"] is None:
        return Replayed(reason="its arguments were not recorded")
    if row["record"] not in tensors:
        return Replayed(reason="its result was not stored")
    try:
        mine = _run(first["overload"], first["arguments"], tensors, torch.float64)
        again = _at(mine, row["place"])
    except _Unable as error:
        return Replayed(reason=str(error))
    actual = tensors[row["record"]]
    kernel, excess, allowed = _kernel(first, row, actual, again, tensors, unit, least)
    beside = None if reference is None else _excess(reference, again, *allowed)
    if not aligned or first_twin["arguments"] is None or first_twin["overload"] is None:
        return Replayed(None, kernel, excess, beside, None, again)
    try:
        text = _with_inputs(first_twin["arguments"], first["arguments"], fits)
        theirs = again if text == first["arguments"] and first_twin["overload"] == first["overload"] else _at(
            _run(first_twin["overload"], text, tensors, torch.float64), row["place"])  # fmt: skip
    except _Unable:
        return Replayed(None, kernel, excess, beside, None, again)
    if theirs.shape != again.shape:
        return Replayed(math.inf, kernel, excess, beside, None, None, differences(first_twin, first))
    semantic = _relative(again, theirs)
    return Replayed(semantic, kernel, excess, beside, None, theirs, differences(first_twin, first) if semantic > SAME else ())


def _of_region(row: Row, region: Region, actual: Tensor, unit: float, least: float) -> Replayed | None:
    try:
        exact, plain = region(torch.float64), region(torch.float32)
    except _Unable:
        return None
    if exact.shape != actual.shape:
        return None
    [rounded] = own_error([plain], [exact])
    if rounded is None:
        return None
    allowed = _allowed(rounded if math.isfinite(rounded.l2) else None, exact, unit, least)
    return Replayed(None, _relative(actual, exact), None, None, _excess(actual, exact, *allowed), exact)


class Expected:
    """What values of the reference would be, had its calls run on the candidate's values.

    ``rows`` are the reference's, ``holders`` the candidate's records of those that an aligned call has made.
    """

    def __init__(
        self, rows: Mapping[int, Row], first: Mapping[int, Row], holders: Mapping[int, int], tensors: Tensors,
        fits: Callable[[int, int], bool],
    ) -> None:  # fmt: skip
        self._rows, self._first, self._holders, self._tensors = rows, first, holders, tensors
        self._fits = fits

    def region(self, record: int, without: int) -> Region:
        """Runs up to ``record`` in a format; ``without`` is the candidate record that is judged, so not believed."""

        def run(dtype: torch.dtype) -> Tensor:
            holder = self._holders.get(record)
            if holder is not None and holder != without:
                return _stored(self._tensors, holder).to(dtype)
            return self._run(record, dtype, without, DEEPEST)

        return run

    def _run(self, record: int, dtype: torch.dtype, without: int, depth: int) -> Tensor:
        row = self._rows[record]
        first = self._first.get(row["call"])
        if not depth or first is None or first["arguments"] is None or first["overload"] is None:
            raise _Unable("what it is made of was not recorded")

        def value(of: int) -> Tensor:
            holder = self._holders.get(of)
            if holder is not None and holder != without and holder in self._tensors:
                if not self._fits(of, holder):
                    raise _Unable("one of its inputs has another shape")
                return self._tensors[holder].clone()
            if of not in self._rows:
                raise _Unable("one of its inputs was not recorded")
            return self._run(of, dtype, without, depth - 1)

        return _at(_call(first["overload"], first["arguments"], value, dtype), row["place"])


def differences(one: Row, other: Row) -> tuple[str, ...]:
    """The arguments, tensors and formats apart, that differ between two calls: ``eps: 1e-05, here 0.001``."""
    if one["arguments"] is None or other["arguments"] is None or one["arguments"] == other["arguments"]:
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
    return {name: value for name, value in ((n, _plain(v)) for n, v in given.items()) if value is not _Skip}


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
    if isinstance(value, (torch.dtype, torch.device, torch.layout, torch.memory_format)):
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
        raise _Unable("the two calls take different numbers of tensors")
    if not all(fits(int(a), int(b)) for a, b in zip(ours, records, strict=True)):
        raise _Unable("the two calls take tensors of different shapes")
    places = iter(records)
    return _RECORDS.sub(lambda _: f'{{"record":{next(places)}}}', text)


def _run(overload: str, arguments: str, tensors: Tensors, dtype: torch.dtype) -> list[Tensor | None]:
    return _call(overload, arguments, lambda record: _stored(tensors, record), dtype)


def _call(
    overload: str, arguments: str, value: Callable[[int], Tensor], dtype: torch.dtype
) -> list[Tensor | None]:
    try:
        func = overload_of(overload)
        args, kwargs = restore(arguments, value)
    except RunError as error:
        raise _Unable(error.what) from error
    found = run_again(func, args, kwargs, dtype=dtype)
    if not isinstance(found, Reason):
        return found
    if not found.text.startswith(_EXACT):
        raise _Unable(found.text)
    with apart(func):
        try:
            result = func(*args, **kwargs)
        except (RuntimeError, TypeError, ValueError, IndexError) as error:
            raise _Unable(f"{type(error).__name__}: {str(error).splitlines()[0]}"[:200]) from error
    return list(made(func, args, kwargs, result))


def _stored(tensors: Tensors, record: int) -> Tensor:
    if record not in tensors:
        raise _Unable("one of its inputs was not stored")
    return tensors[record].clone()


def _at(results: list[Tensor | None], place: int) -> Tensor:
    found = results[place] if place < len(results) else None
    if found is None:
        raise _Unable("this result has no counterpart in fp64")
    return found


def _kernel(
    first: Row, row: Row, actual: Tensor, again: Tensor, tensors: Tensors, unit: float, least: float
) -> tuple[float | None, float | None, tuple[float, float]]:
    """The relative error of the actual result, the same in units of what rounding explains, and that: l2 and largest."""
    rounded = None
    if unit and actual.is_floating_point():
        try:
            plain = _at(_run(first["overload"], first["arguments"], tensors, torch.float32), row["place"])
            [rounded] = own_error([plain], [again])
        except _Unable:
            pass
        if rounded is not None and not math.isfinite(rounded.l2):
            rounded = None
    allowed = _allowed(rounded, again, unit, least)
    return _relative(actual, again), _excess(actual, again, *allowed), allowed


def _allowed(rounded: OwnError | None, exact: Tensor, unit: float, least: float) -> tuple[float, float]:
    """What rounding explains, l2 and largest: ``rounded`` is the error of fp32 on the same inputs."""
    scale = MARGIN * unit / 2.0**-24
    honest, most = (0.0, 0.0) if rounded is None else (scale * rounded.l2, scale * rounded.max)
    size = exact.abs() if exact.is_complex() or exact.is_floating_point() else exact.to(torch.float64).abs()
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


class _Unable(Exception):  # noqa: N818 - becomes a reason
    """Why a call cannot be run again."""
