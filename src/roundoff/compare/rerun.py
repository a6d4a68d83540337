"""Recorded calls run again, from tensors by record: one call, or all calls of the reference that lead to a value."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, Protocol

import torch
from torch import Tensor

from roundoff.errors import RunError
from roundoff.ops import (
    Reason,
    outside_of_modes,
    overload_of,
    restore,
    run_again,
    tensors_made,
)

Row = Mapping[str, Any]

#: Refused by ``run_again`` since they round nothing; they are run as they are.
_EXACT = (
    "a view rounds nothing",
    "a cast that rounds nothing",
    "already runs in",
    "makes ",
)
#: Calls of the reference that are run one after the other to say what the candidate's operators should have given together.
DEEPEST = 12
#: Calls whose results are kept: a call and its counterpart, each in two formats.
KEPT = 4

Region = Callable[[torch.dtype], Tensor]


class Tensors(Protocol):
    """The tensors of a step by record."""

    def __getitem__(self, record: int, /) -> Tensor: ...
    def __contains__(self, record: int, /) -> bool: ...


class Unable(Exception):  # noqa: N818 - becomes a reason
    """Why a call cannot be run again."""


class Runs:
    """Calls that were run again: one on lists has a row for each of hundreds of tensors, and is run once."""

    def __init__(self) -> None:
        self._done: dict[tuple[str, str, torch.dtype], list[Tensor | None]] = {}

    def of(
        self, overload: str, arguments: str, tensors: Tensors, dtype: torch.dtype
    ) -> list[Tensor | None]:
        """What the call gives in a format. Of the last few calls it is kept."""
        key = overload, arguments, dtype
        found = self._done.get(key)
        if found is None:
            found = call(
                overload, arguments, lambda record: stored(tensors, record), dtype
            )
            while len(self._done) >= KEPT:
                self._done.pop(next(iter(self._done)))
            self._done[key] = found
        return found


def call(
    overload: str, arguments: str, value: Callable[[int], Tensor], dtype: torch.dtype
) -> list[Tensor | None]:
    try:
        func = overload_of(overload)
        args, kwargs = restore(arguments, value)
    except RunError as error:
        raise Unable(error.what) from error
    found = run_again(func, args, kwargs, dtype=dtype)
    if not isinstance(found, Reason):
        return found
    if not found.text.startswith(_EXACT):
        raise Unable(found.text)
    with outside_of_modes(func):
        try:
            result = func(*args, **kwargs)
        except (RuntimeError, TypeError, ValueError, IndexError) as error:
            raise Unable(
                f"{type(error).__name__}: {str(error).splitlines()[0]}"[:200]
            ) from error
    return list(tensors_made(func, args, kwargs, result))


def stored(tensors: Tensors, record: int) -> Tensor:
    if record not in tensors:
        raise Unable("one of its inputs was not stored")
    return tensors[record].clone()


def at(results: list[Tensor | None], place: int) -> Tensor:
    found = results[place] if place < len(results) else None
    if found is None:
        raise Unable("this result has no counterpart in fp64")
    return found


class Expected:
    """What values of the reference would be, had its calls run on the candidate's values.

    ``rows`` are the reference's, ``holders`` the candidate's records of those that an aligned call has made.
    """

    def __init__(
        self,
        rows: Mapping[int, Row],
        first: Mapping[int, Row],
        holders: Mapping[int, int],
        tensors: Tensors,
        fits: Callable[[int, int], bool],
    ) -> None:
        self._rows, self._first, self._holders, self._tensors = (
            rows,
            first,
            holders,
            tensors,
        )
        self._fits = fits

    def region(self, record: int, without: int) -> Region:
        """Runs up to ``record`` in a format; ``without`` is the candidate record that is judged, so not believed."""

        def run(dtype: torch.dtype) -> Tensor:
            holder = self._holders.get(record)
            if holder is not None and holder != without:
                return stored(self._tensors, holder).to(dtype)
            return self._run(record, dtype, without, DEEPEST)

        return run

    def _run(self, record: int, dtype: torch.dtype, without: int, depth: int) -> Tensor:
        row = self._rows[record]
        first = self._first.get(row["call"])
        if (
            not depth
            or first is None
            or first["arguments"] is None
            or first["overload"] is None
        ):
            raise Unable("what it is made of was not recorded")

        def value(of: int) -> Tensor:
            holder = self._holders.get(of)
            if holder is not None and holder != without and holder in self._tensors:
                if not self._fits(of, holder):
                    raise Unable("one of its inputs has another shape")
                return self._tensors[holder].clone()
            if of not in self._rows:
                raise Unable("one of its inputs was not recorded")
            return self._run(of, dtype, without, depth - 1)

        return at(
            call(first["overload"], first["arguments"], value, dtype), row["place"]
        )
