"""What a view shows that is read after another view of its memory was written.

A recording has a row for it, without a call. Its elements come from the last value before
it that covers all of them, and from what was written over that since.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor

from roundoff.compare.records.recorded_calls import CannotRun
from roundoff.compare.records.recorded_rows import RecordedRow, Rows

#: Memory of more elements is not put together.
LARGEST = 2**28


@dataclass(frozen=True, slots=True)
class Shown:
    """Where the elements of a view come from.

    Attributes:
        base: the last value before it that covers all of them.
        writes: what was written over some of them since, in order.
    """

    base: RecordedRow
    writes: tuple[RecordedRow, ...]


class SharedMemory:
    """The values of one step by the memory that they lie in."""

    def __init__(self, rows: Rows) -> None:
        self._rows = rows
        self._shown: dict[int, Shown | None] = {}

    @cached_property
    def _values(self) -> dict[int, list[RecordedRow]]:
        """The rows in each memory, in order."""
        values: dict[int, list[RecordedRow]] = {}
        for record in sorted(self._rows):
            row = self._rows[record]
            if row.memory is not None and _is_laid_out(row):
                values.setdefault(row.memory, []).append(row)
        return values

    def shown(self, view: RecordedRow) -> Shown | None:
        """Return where the elements of a view come from; None where that is not known."""
        if view.record not in self._shown:
            self._shown[view.record] = self._found(view)
        return self._shown[view.record]

    def _found(self, view: RecordedRow) -> Shown | None:
        if view.memory is None or not _is_laid_out(view):
            return None
        writes: list[RecordedRow] = []
        for row in reversed(self._values[view.memory]):
            if row.record >= view.record:
                continue
            if _covers(row, view):
                return Shown(row, tuple(reversed(writes)))
            if row.inplace and _overlap(row, view):
                writes.append(row)
        return None


def put_together(
    view: RecordedRow, shown: Shown, tensor_of: Callable[[int], Tensor]
) -> Tensor:
    """Return the elements of a view.

    Args:
        view: the row of it.
        shown: where they come from.
        tensor_of: gives the tensor of a record; what it raises passes.

    Raises ``CannotRun`` for a layout that does not fit, or too large a memory.
    """
    parts = [shown.base, *shown.writes]
    start = min(_offset(row) for row in (view, *parts))
    size = max(_end(row) for row in (view, *parts)) - start
    if size > LARGEST:
        raise CannotRun("the memory that it is a view of is too large")
    value = tensor_of(shown.base.record)
    memory = torch.empty(size, dtype=value.dtype)
    for row in parts:
        value = tensor_of(row.record)
        place = memory.as_strided(_shape(row), _strides(row), _offset(row) - start)
        if place.shape != value.shape:
            raise CannotRun("what is written has another shape")
        try:
            place.copy_(value)
        except RuntimeError as error:  # elements that share a place
            raise CannotRun("elements of what is written share a place") from error
    seen = memory.as_strided(_shape(view), _strides(view), _offset(view) - start)
    return seen.clone(memory_format=torch.contiguous_format)


def read_by(rows: Rows, row: RecordedRow) -> Sequence[int]:
    """Return what a row is made of: its inputs, else what lies in its memory before it.

    A deep copy reads the memory of a tensor, and not the tensor.
    """
    if row.memory is None or row.memory == row.record or row.view_of is not None:
        return row.inputs
    known = [rows[key] for key in row.inputs if key in rows]
    if any(value.memory == row.memory for value in known):
        return row.inputs
    before = [r for r in rows if r < row.record and rows[r].memory == row.memory]
    return [*row.inputs, *before[-1:]]


def _is_laid_out(row: RecordedRow) -> bool:
    """Return True for an offset and as many strides as sizes, none of them negative."""
    layout = row.memory_layout
    if layout is None or row.shape is None or len(layout) != len(row.shape) + 1:
        return False
    return min([*layout, *row.shape]) >= 0


def _offset(row: RecordedRow) -> int:
    return (row.memory_layout or (0,))[0]


def _strides(row: RecordedRow) -> Sequence[int]:
    return tuple((row.memory_layout or (0,))[1:])


def _shape(row: RecordedRow) -> Sequence[int]:
    return tuple(row.shape or ())


def _axes(row: RecordedRow) -> Iterator[tuple[int, int]]:
    """Yield size and stride of each axis of more than one element."""
    for size, stride in zip(_shape(row), _strides(row), strict=True):
        if size != 1:
            yield size, stride


def _end(row: RecordedRow) -> int:
    """Return one past the last element in memory."""
    if 0 in _shape(row):
        return _offset(row)
    return _offset(row) + 1 + sum((size - 1) * stride for size, stride in _axes(row))


def _is_dense(row: RecordedRow) -> bool:
    """Return True where each place between the first and the last element is one of them."""
    expected = 1
    for size, stride in sorted(_axes(row), key=lambda axis: axis[1]):
        if stride != expected:
            return False
        expected *= size
    return True


def _covers(row: RecordedRow, view: RecordedRow) -> bool:
    """Return True for a value that has all elements of a view."""
    if row.dtype != view.dtype:
        return False
    if _offset(row) == _offset(view) and sorted(_axes(row)) == sorted(_axes(view)):
        return True
    is_around = _offset(row) <= _offset(view) and _end(view) <= _end(row)
    return is_around and _is_dense(row)


def _overlap(one: RecordedRow, other: RecordedRow) -> bool:
    """Return True where two views have an element in common."""
    start = max(_offset(one), _offset(other))
    end = min(_end(one), _end(other))
    if start >= end:
        return False
    if _is_dense(one) and _is_dense(other):
        return True
    first = min(_offset(one), _offset(other))
    size = max(_end(one), _end(other)) - first
    if size > LARGEST:
        return True
    places = torch.zeros(size, dtype=torch.bool)
    places.as_strided(_shape(one), _strides(one), _offset(one) - first).fill_(True)
    seen = places.as_strided(_shape(other), _strides(other), _offset(other) - first)
    return bool(seen.any())
