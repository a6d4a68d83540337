"""A recorded forward pass run again with another call, or another parameter, in it.

Only what is made of the change runs; every other value is the recorded one.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from heapq import heappop, heappush
from typing import Any

import torch
from torch import Tensor

from roundoff.compare.records.recorded_calls import CannotRun, is_written_in_python
from roundoff.compare.records.recorded_rows import (
    RecordedRow,
    was_there_before,
)
from roundoff.compare.records.shared_memory import put_together
from roundoff.compare.values.other_sizes import (
    may_be_longer,
    other_sizes,
    takes_sizes,
)
from roundoff.compare.values.value_flow import Flow
from roundoff.errors import RunError
from roundoff.ops import Reason, RepeatedCall, base, operators_that, overload_of

#: Stands in an edit's arguments for what the step before it gives.
BEFORE = -1
_DRAW = operators_that("draw") | operators_that("drop out")
#: What they give is filled later on.
_UNWRITTEN = operators_that("leave memory unwritten")
#: Their kernels believe the sizes that they are given.
_TRUSTING = operators_that("normalize") | (
    operators_that("multiply") - operators_that("add up terms")
)
_FORWARD = "forward"
#: Operators that write arguments unsaid -> the same that returns what it writes.
_RETURNING = {
    "aten.native_batch_norm.default": "aten._native_batch_norm_legit_functional.default"
}


@dataclass(frozen=True, slots=True)
class EditStep:
    """One call of an edit: an overload and its arguments, tensors by record.

    ``{"record": -1}`` stands for the result of the step before, and a record in
    ``held`` of the edit for a tensor from elsewhere.

    Attributes:
        shapes: of its tensors, in their order: required of operators that trust them;
            None: those of the call that is edited.
    """

    overload: str
    arguments: Any
    shapes: tuple[tuple[int, ...], ...] | None = None


@dataclass(frozen=True, slots=True)
class Edit:
    """What runs in a call's place.

    Attributes:
        steps: calls, one after the other; the last one's results are those of the call.
        words: what is done, as in "with eps=1e-05".
        held: tensors that its arguments name by negative records below ``BEFORE``.
        places: which of the results of the last step stand at each place; None: as they
            come.
        factor: the record of a value that an input is multiplied with.
        scales: True where the result is multiplied with a number.
    """

    steps: tuple[EditStep, ...]
    words: str
    held: Mapping[int, Tensor] = field(default_factory=dict)
    places: tuple[int, ...] | None = None
    factor: int | None = None
    scales: bool = False


@dataclass(frozen=True)
class TracedCall:
    """One call of the forward pass: its first row, which has the arguments, and all rows."""

    first: RecordedRow
    rows: tuple[RecordedRow, ...]

    @cached_property
    def parsed(self) -> Any:
        """The arguments: positional ones and keywords, tensors by record. Not to be changed.

        Positional ones that were left at their defaults are among them.
        """
        positional, keywords = json.loads(self.first.arguments or "[[],{}]")
        return [_with_defaults(self.first.overload, positional), keywords]


def _with_defaults(overload: str | None, positional: list[Any]) -> list[Any]:
    """Return positional arguments and the defaults of those that were not given."""
    try:
        declared = overload_of(overload or "")._schema.arguments
    except RunError:
        return positional
    filled = list(positional)
    for argument in declared[len(positional) :]:
        default = argument.default_value
        is_plain = default is None or isinstance(default, bool | int | float | list)
        if argument.kwarg_only or not argument.has_default_value() or not is_plain:
            break
        filled.append(default)
    return filled


def _unwritten(row: RecordedRow) -> Tensor:
    """Return a tensor that nothing was written to: of NaN, or of zeros for integers.

    What is not overwritten is right nowhere.
    """
    dtype = getattr(torch, row.dtype or "", None)
    if not isinstance(dtype, torch.dtype) or row.shape is None:
        raise CannotRun("its shape was not recorded")
    fill = math.nan if dtype.is_floating_point or dtype.is_complex else 0
    return torch.full(tuple(row.shape), fill, dtype=dtype)


def trusts_sizes(operator: str) -> bool:
    """Return True where inputs of other sizes would be read beyond their ends."""
    return operator in _TRUSTING


class TracedProgram:
    """The calls of one side, in order: those of the forward pass, or others too.

    Args:
        flow: the values of the side; tensors must have been kept.
        tensors: instead of the recorded ones.
        phases: whose calls; None for all.
        keeps_strides: False for results that lie in the order of their axes, whatever
            their kernels make.

    Attributes:
        order: the calls, and the tensors that are written through a view, in order.
        calls: by number.
    """

    def __init__(
        self,
        flow: Flow,
        tensors: Mapping[int, Tensor] | None = None,
        *,
        phases: Collection[str] | None = (_FORWARD,),
        keeps_strides: bool = False,
    ) -> None:
        self.flow = flow
        self._tensors = tensors
        self._keeps_strides = keeps_strides
        rows_by_call: dict[int, list[RecordedRow]] = {}
        self.order: list[TracedCall | RecordedRow] = []
        for row in flow.step.rows.values():
            if phases is not None and row.phase not in phases:
                continue
            if not row.is_call:
                if not was_there_before(flow.step.rows, row):
                    self.order.append(row)
                continue
            rows_by_call.setdefault(row.call, []).append(row)
            if rows_by_call[row.call][0] is row:
                self.order.append(TracedCall(flow.first[row.call], (row,)))
        self.order = [
            TracedCall(entry.first, tuple(rows_by_call[entry.first.call]))
            if isinstance(entry, TracedCall)
            else entry
            for entry in self.order
        ]
        self.calls = {
            entry.first.call: entry
            for entry in self.order
            if isinstance(entry, TracedCall)
        }
        self._places = {
            entry.first.call: place
            for place, entry in enumerate(self.order)
            if isinstance(entry, TracedCall)
        }
        self._readers = self._readers_by_record()
        self._kept: dict[int, Tensor | None] = {}
        self._prepared: dict[int, _PreparedCall] = {}

    def _readers_by_record(self) -> dict[int, list[int]]:
        """Return the places in ``order`` that a change of each record reaches."""
        readers: dict[int, list[int]] = {}
        for place, entry in enumerate(self.order):
            for record in self._read_by(entry):
                readers.setdefault(record, []).append(place)
        return readers

    def tensor(self, record: int) -> Tensor | None:
        """Return what was recorded; None where nothing was kept."""
        if self._tensors is not None:
            return self._tensors.get(record)
        if record not in self._kept:
            self._kept[record] = self.flow.step.tensor(record)
        return self._kept[record]

    def again(
        self,
        edits: Mapping[int, Edit],
        leaves: Mapping[int, Tensor] | None = None,
        only: Collection[int] | None = None,
    ) -> Iterator[tuple[RecordedRow, Tensor]]:
        """Run with other calls, or leaves; yield each value that changes, in order.

        Any value may be a leaf: it keeps what it is given.
        With ``only``: no calls but those that make these records. Raises ``CannotRun``
        where something cannot run.
        """
        changed: dict[int, Tensor] = dict(leaves or {})
        sizes: dict[int, int] = {}
        waiting = _Waiting()
        waiting.add(self._places[call] for call in edits if call in self._places)
        for record in changed:
            waiting.add(self._readers.get(record, ()))
        for place in waiting:
            entry = self.order[place]
            rows = [entry] if isinstance(entry, RecordedRow) else entry.rows
            if only is not None and all(row.record not in only for row in rows):
                continue
            edit = None if isinstance(entry, RecordedRow) else edits.get(rows[0].call)
            for row, tensor in self.one(entry, changed, edit, sizes):
                if leaves is not None and row.record in leaves:
                    continue
                sizes.update(_changed_sizes(row, tensor))
                if not _are_equal(tensor, self.tensor(row.record)):
                    changed[row.record] = tensor
                    waiting.add(self._readers.get(row.record, ()))
                    yield row, tensor

    def one(
        self,
        entry: TracedCall | RecordedRow,
        changed: Mapping[int, Tensor] | None = None,
        edit: Edit | None = None,
        sizes: Mapping[int, int] | None = None,
    ) -> list[tuple[RecordedRow, Tensor]]:
        """Run one entry of ``order``; return what it makes. Raises ``CannotRun``.

        ``sizes``: what became of those of other tensors.
        """
        changed = changed or {}
        if isinstance(entry, RecordedRow):
            return [(entry, self._written_through(entry, changed))]
        if edit is None:
            results = self._as_recorded(entry, changed, sizes or {})
        else:
            results = self._edited(entry, edit, changed, sizes or {})
        made = []
        for row in entry.rows:
            place = row.place or 0
            result = results[place] if 0 <= place < len(results) else None
            if result is not None:
                made.append((row, result))
        return made

    def _value(self, record: int, changed: Mapping[int, Tensor]) -> Tensor:
        tensor = changed.get(record)
        if tensor is None:
            tensor = self.tensor(record)
        if tensor is None:
            raise CannotRun("one of its inputs was not stored")
        return tensor

    def _as_recorded(
        self,
        call: TracedCall,
        changed: Mapping[int, Tensor],
        sizes: Mapping[int, int],
    ) -> list[Tensor | None]:
        prepared = self._prepared.get(call.first.call)
        if prepared is not None:
            return prepared.run(lambda record: self._value(record, changed), sizes)
        if call.first.base_operator in _UNWRITTEN:
            return [_unwritten(row) for row in call.rows]
        only_tells_python = all(row.shape is None for row in call.rows)
        if only_tells_python:  # a number, or that an assertion holds
            return []
        overload = call.first.overload
        text = call.first.arguments
        is_number = self.flow.values[call.first.record].is_number
        if overload is None and not is_number:
            # lengths, that a kernel wrote unseen
            return [self.tensor(row.record) for row in call.rows]
        if overload is None or text is None:
            raise CannotRun("its arguments were not recorded")
        required = self._shapes_read(call)
        returning = _RETURNING.get(overload)
        if returning is not None and len(call.rows) > len(
            overload_of(overload)._schema.returns
        ):
            overload = returning
        self._prepared[call.first.call] = _PreparedCall(
            overload, text, required, keeps_strides=self._keeps_strides
        )
        return self._as_recorded(call, changed, sizes)

    def _edited(
        self,
        call: TracedCall,
        edit: Edit,
        changed: Mapping[int, Tensor],
        sizes: Mapping[int, int],
    ) -> list[Tensor | None]:
        results: list[Tensor | None] = []
        for step in edit.steps:
            previous = results[0] if results else None

            def value(record: int, previous: Tensor | None = previous) -> Tensor:
                held = previous if record == BEFORE else edit.held.get(record)
                if held is not None:
                    return held
                return self._value(record, changed)

            required = self._shapes_read(call) if step.shapes is None else step.shapes
            text = json.dumps(step.arguments)
            results = _PreparedCall(step.overload, text, required).run(value, sizes)
        if edit.places is not None and len(edit.places) == len(results):
            return [results[place] for place in edit.places]
        return results

    def _shapes_read(self, call: TracedCall) -> tuple[tuple[int, ...], ...]:
        rows = self.flow.step.rows
        records = records_in(call.parsed)
        return tuple(tuple(rows[r].shape or ()) for r in records if r in rows)

    def _read_by(self, entry: TracedCall | RecordedRow) -> set[int]:
        """Return the records whose change changes what an entry makes."""
        if isinstance(entry, TracedCall):
            return {record for row in entry.rows for record in row.inputs}
        shown = self.flow.memory.shown(entry)
        if shown is None:
            return set(entry.inputs)
        return {row.record for row in (shown.base, *shown.writes)}

    def _written_through(
        self, alias: RecordedRow, changed: Mapping[int, Tensor]
    ) -> Tensor:
        """Return a tensor after one of its views was written."""
        shown = self.flow.memory.shown(alias)
        if shown is None:
            raise CannotRun("where it was written was not recorded")
        return put_together(alias, shown, lambda key: self._value(key, changed))


def records_in(value: Any) -> list[int]:
    """Return the records that arguments name, in their order."""
    if isinstance(value, dict):
        if "record" in value:
            return [int(value["record"])]
        return [r for v in value.values() for r in records_in(v)]
    if isinstance(value, list):
        return [r for v in value for r in records_in(v)]
    return []


class _Waiting:
    """Places in the order of execution, each once; more may come while they are taken."""

    def __init__(self) -> None:
        self._heap: list[int] = []
        self._seen: set[int] = set()

    def add(self, places: Iterable[int]) -> None:
        for place in places:
            if place not in self._seen:
                self._seen.add(place)
                heappush(self._heap, place)

    def __iter__(self) -> Iterator[int]:
        while self._heap:
            yield heappop(self._heap)


def _are_equal(one: Tensor, other: Tensor | None) -> bool:
    """Return True for the same numbers in the same shape and format."""
    if other is None or one.shape != other.shape or one.dtype != other.dtype:
        return False
    return torch.equal(one, other)


class _PreparedCall:
    """One call that is looked up and checked once. Raises ``CannotRun`` when made, or run.

    Args:
        overload: ``aten.add.Tensor``.
        text: its arguments.
        shapes: of its tensors, required where a kernel would read beyond an end.
        keeps_strides: see ``TracedProgram``.
    """

    def __init__(
        self,
        overload: str,
        text: str,
        shapes: tuple[tuple[int, ...], ...],
        *,
        keeps_strides: bool = False,
    ) -> None:
        self._keeps_strides = keeps_strides
        if is_written_in_python(overload):
            raise CannotRun("its kernel is the user's, and may be what is wrong")
        name = overload.partition(".")[2].rpartition(".")[0]
        if name.strip("_") in _DRAW or name in _DRAW:
            raise CannotRun("it draws random numbers")
        self._call = RepeatedCall(overload, text)
        self._shapes = shapes
        self._operator = base(name)
        self._records: list[int] | None = None
        if trusts_sizes(self._operator) or takes_sizes(self._operator):
            self._records = records_in(json.loads(text))

    def run(
        self, value: Callable[[int], Tensor], sizes: Mapping[int, int]
    ) -> list[Tensor | None]:
        """Return what it makes of tensors, which are not changed.

        ``sizes``: what became of those of other tensors.
        """
        call = self._call
        if self._records is not None:
            shapes = tuple(tuple(value(record).shape) for record in self._records)
            if shapes != self._shapes:
                call = self._for_shapes(shapes, sizes)
        results = call.run(value)
        if isinstance(results, Reason):
            raise CannotRun(results.text)
        if self._keeps_strides:
            return results
        return [None if each is None else each.contiguous() for each in results]

    def _for_shapes(
        self, shapes: tuple[tuple[int, ...], ...], changed: Mapping[int, int]
    ) -> RepeatedCall:
        """Return the call for inputs of other shapes than were recorded."""
        if takes_sizes(self._operator):
            return self._with_sizes(shapes[0], changed)
        if self._shapes and may_be_longer(self._operator, self._shapes, shapes):
            return self._call
        raise CannotRun("an input has another shape than was recorded")

    def _with_sizes(
        self, shape: tuple[int, ...], changed: Mapping[int, int]
    ) -> RepeatedCall:
        positional, keywords = json.loads(self._call.arguments)
        is_plain = len(positional) > 1 and isinstance(positional[1], list)
        if not self._shapes or not is_plain:
            return self._call
        if not all(isinstance(size, int) for size in positional[1]):
            return self._call
        recorded = self._shapes[0]
        sizes = other_sizes(self._operator, positional[1], recorded, shape, changed)
        if sizes is None:
            return self._call
        positional[1] = sizes
        return RepeatedCall(self._call.overload, json.dumps([positional, keywords]))


def _changed_sizes(row: RecordedRow, tensor: Tensor) -> dict[int, int]:
    """Return what became of the sizes of a value, where it has as many axes as before."""
    recorded = row.shape or ()
    if len(recorded) != tensor.dim():
        return {}
    pairs = zip(recorded, tensor.shape, strict=True)
    return {before: now for before, now in pairs if before != now}
