"""Recorded calls run again: one call, or all of the reference's that lead to a value."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Mapping
from functools import lru_cache
from typing import Any, Protocol

import torch
from torch import Tensor
from torch._ops import OpOverload

from roundoff.compare.records.call_arguments import Fits
from roundoff.compare.records.recorded_rows import RecordedRow, Rows
from roundoff.errors import RunError
from roundoff.foreign import parse_json
from roundoff.ops import Reason, overload_of, run_recorded

#: How many calls of the reference run one after the other to say what the candidate's
#: operators should have given together.
DEEPEST = 12
#: Calls whose results are kept: a call in its own format, in fp64 and in fp32, and its
#: counterpart.
KEPT = 6

#: What the reference's calls together give, in a format.
RunRegion = Callable[[torch.dtype], Tensor]
#: A format to run a call in; None for those of its tensors.
Format = torch.dtype | None
_CallKey = tuple[str, str, Format]


class Tensors(Protocol):
    """The tensors of a step by record."""

    def __getitem__(self, record: int, /) -> Tensor: ...
    def __contains__(self, record: int, /) -> bool: ...


class CannotRun(Exception):  # noqa: N818 - becomes a reason
    """Why a call cannot be run again."""


class RecentResults:
    """The results of the last few calls that were run again.

    A call on lists has a row for each of hundreds of tensors, and is run once.
    """

    def __init__(self) -> None:
        self._results: dict[_CallKey, list[Tensor | None]] = {}

    def of(
        self, overload: str, arguments: str, tensors: Tensors, dtype: Format
    ) -> list[Tensor | None]:
        """Return the results of a call in a format. Raises ``CannotRun``."""
        key = overload, arguments, dtype
        results = self._results.get(key)
        if results is None:
            results = run_call(
                overload, arguments, lambda record: copy_of(tensors, record), dtype
            )
            while len(self._results) >= KEPT:
                self._results.pop(next(iter(self._results)))
            self._results[key] = results
        return results


def run_call(
    overload: str, arguments: str, value: Callable[[int], Tensor], dtype: Format
) -> list[Tensor | None]:
    """Run a recorded call in a format; an operator that rounds nothing as it is.

    Raises ``CannotRun``. ``value`` gives the tensor of a record.
    """
    if is_written_in_python(overload):
        raise CannotRun("its kernel is the user's, and may be what is wrong")
    overload, arguments = _returning(overload, arguments)
    results = run_recorded(overload, arguments, value, dtype=dtype, exact_as_is=True)
    if isinstance(results, Reason):
        raise CannotRun(results.text)
    return results


def _returning(overload: str, arguments: str) -> tuple[str, str]:
    """Return a call that writes into tensors it is given as one that returns them.

    ``maximum(x, y, out=z)`` becomes ``maximum(x, y)``. Other calls, and those without
    such a form, stay as they are.
    """
    form = _returning_form(overload)
    if form is None:
        return overload, arguments
    match parse_json(arguments):
        case [list(positional), dict(by_name)]:
            written = _written(overload_of(overload))
            left = {n: v for n, v in by_name.items() if n not in written}
            return form, json.dumps([positional, left])
        case _:
            return overload, arguments


@lru_cache
def _returning_form(overload: str) -> str | None:
    """Return the overload of the same operator and arguments that writes into none."""
    try:
        func = overload_of(overload)
    except RunError:
        return None
    written = _written(func)
    if not written:
        return None
    read = [(a.name, str(a.type)) for a in func._schema.arguments if not a.is_out]
    packet = func.overloadpacket
    for name in packet.overloads():
        other = getattr(packet, name)._schema.arguments
        if [(a.name, str(a.type)) for a in other] == read:
            return f"{overload.rpartition('.')[0]}.{name}"
    return None


def _written(func: OpOverload) -> frozenset[str]:
    """Return the names of the arguments that an operator writes its results into."""
    return frozenset(a.name for a in func._schema.arguments if a.is_out)


def is_written_in_python(overload: str) -> bool:
    """Return True for an operator whose kernel somebody has registered from Python.

    What it computes is part of the program that is compared.
    """
    namespace, _, rest = overload.partition(".")
    if namespace in ("aten", "prims"):
        return False
    module: Any = sys.modules.get("torch.library")
    prefix = f"{namespace}/{rest.partition('.')[0]}/"
    return any(key.startswith(prefix) for key in getattr(module, "_impls", ()))


def copy_of(tensors: Tensors, record: int) -> Tensor:
    """Return a copy of a kept tensor. Raises ``CannotRun`` where it was not kept."""
    if record not in tensors:
        raise CannotRun("one of its inputs was not stored")
    return tensors[record].clone()


def result_at(results: list[Tensor | None], place: int | None) -> Tensor:
    """Return one result of a call. Raises ``CannotRun`` where it has none at this place."""
    index = place or 0
    result = results[index] if index < len(results) else None
    if result is None:
        raise CannotRun("this result has no counterpart in fp64")
    return result


class ReferenceCalls:
    """The reference's calls, run on the candidate's values.

    Args:
        rows: the reference's by record.
        first: the first row of each of its calls.
        holders: the candidate's record for each of the reference's that an aligned
            call has made.
        tensors: the candidate's.
        fits: ``fits(reference record, candidate record)`` says if the second may stand
            for the first in a call.
    """

    def __init__(
        self,
        rows: Rows,
        first: Mapping[int, RecordedRow],
        holders: Mapping[int, int],
        tensors: Tensors,
        fits: Fits,
    ) -> None:
        self._rows = rows
        self._first = first
        self._holders = holders
        self._tensors = tensors
        self._fits = fits

    def leading_to(self, record: int, judged: int) -> RunRegion:
        """Return a function that runs the calls up to ``record`` in a format.

        ``judged`` is the candidate's record in question, which is not believed. The
        function raises ``CannotRun``.
        """

        def run(dtype: torch.dtype) -> Tensor:
            holder = self._holders.get(record)
            if holder is not None and holder != judged:
                held = copy_of(self._tensors, holder)
                return held if held.is_complex() else held.to(dtype)
            return self._run(record, dtype, judged, DEEPEST, {})

        return run

    def _run(
        self,
        record: int,
        dtype: torch.dtype,
        judged: int,
        depth: int,
        made: dict[int, list[Tensor | None]],
    ) -> Tensor:
        """Run the calls up to a record. A call in ``made`` is not run again: of what is read
        twice all would be, and of that again.
        """
        row = self._rows[record]
        if row.call in made:
            return result_at(made[row.call], row.place).clone()
        first = self._first.get(row.call)
        if not depth or first is None:
            raise CannotRun("what it is made of was not recorded")
        if first.arguments is None or first.overload is None:
            raise CannotRun("what it is made of was not recorded")

        def value(of: int) -> Tensor:
            kept = self._kept(of, judged)
            if kept is not None:
                return kept
            if of not in self._rows:
                raise CannotRun("one of its inputs was not recorded")
            return self._run(of, dtype, judged, depth - 1, made)

        made[row.call] = run_call(first.overload, first.arguments, value, dtype)
        return result_at(made[row.call], row.place).clone()

    def _kept(self, record: int, judged: int) -> Tensor | None:
        """Return the candidate's tensor for a reference record, where it may be believed."""
        holder = self._holders.get(record)
        if holder is None or holder == judged or holder not in self._tensors:
            return None
        if not self._fits(record, holder):
            raise CannotRun("one of its inputs has another shape")
        return self._tensors[holder].clone()
