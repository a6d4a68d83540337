"""A recorded forward pass run again with another call, or another parameter, in it.

Only what is made of the change runs; every other value is the recorded one.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from torch import Tensor

from roundoff.compare.recorded_calls import CannotRun, is_written_in_python
from roundoff.compare.recorded_rows import RecordedRow
from roundoff.compare.value_flow import Flow
from roundoff.ops import Reason, base, operators_that, run_unchanged

#: Stands in an edit's arguments for what the step before it gives.
BEFORE = -1
_DRAW = operators_that("draw") | operators_that("drop out")
#: Their kernels believe the sizes that they are given.
_TRUSTING = operators_that("normalize") | (
    operators_that("multiply") - operators_that("add up terms")
)
_FORWARD = "forward"


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
    """

    steps: tuple[EditStep, ...]
    words: str
    held: Mapping[int, Tensor] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class TracedCall:
    """One call of the forward pass: its first row, which has the arguments, and all rows."""

    first: RecordedRow
    rows: tuple[RecordedRow, ...]

    @property
    def parsed(self) -> Any:
        """The arguments: positional ones and keywords, tensors by record."""
        return json.loads(self.first.arguments or "[[],{}]")


def trusts_sizes(operator: str) -> bool:
    """Return True where inputs of other sizes would be read beyond their ends."""
    return operator in _TRUSTING


class TracedProgram:
    """The forward calls of one side, in order.

    Args:
        flow: the values of the side; tensors must have been kept.
        tensors: instead of the recorded ones.

    Attributes:
        order: the calls, and the tensors that are written through a view, in order.
        calls: by number.
    """

    def __init__(self, flow: Flow, tensors: Mapping[int, Tensor] | None = None) -> None:
        self.flow = flow
        self._tensors = tensors
        rows_by_call: dict[int, list[RecordedRow]] = {}
        self.order: list[TracedCall | RecordedRow] = []
        for row in flow.step.rows.values():
            if row.phase != _FORWARD:
                continue
            if not row.is_call:
                if row.inputs:
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

    def tensor(self, record: int) -> Tensor | None:
        """Return what was recorded; None where nothing was kept."""
        if self._tensors is not None:
            return self._tensors.get(record)
        return self.flow.step.tensor(record)

    def again(
        self, edits: Mapping[int, Edit], leaves: Mapping[int, Tensor] | None = None
    ) -> Iterator[tuple[RecordedRow, Tensor]]:
        """Run with other calls, or leaves; yield each value that changes, in order.

        Raises ``CannotRun`` where something cannot run.
        """
        changed: dict[int, Tensor] = dict(leaves or {})
        for entry in self.order:
            rows = [entry] if isinstance(entry, RecordedRow) else entry.rows
            edit = None if isinstance(entry, RecordedRow) else edits.get(rows[0].call)
            is_made_of_it = any(i in changed for row in rows for i in row.inputs)
            if edit is None and not is_made_of_it:
                continue
            for row, tensor in list(self.one(entry, changed, edit)):
                changed[row.record] = tensor
                yield row, tensor

    def one(
        self,
        entry: TracedCall | RecordedRow,
        changed: Mapping[int, Tensor] | None = None,
        edit: Edit | None = None,
    ) -> Iterator[tuple[RecordedRow, Tensor]]:
        """Run one entry of ``order``; yield what it makes. Raises ``CannotRun``."""
        changed = changed or {}
        if isinstance(entry, RecordedRow):
            yield entry, self._written_through(entry, changed)
            return
        results = self._run(entry, edit, changed)
        for row in entry.rows:
            place = row.place or 0
            result = results[place] if 0 <= place < len(results) else None
            if result is not None:
                yield row, result

    def _value(self, record: int, changed: Mapping[int, Tensor]) -> Tensor:
        tensor = changed.get(record)
        if tensor is None:
            tensor = self.tensor(record)
        if tensor is None:
            raise CannotRun("one of its inputs was not stored")
        return tensor

    def _run(
        self, call: TracedCall, edit: Edit | None, changed: Mapping[int, Tensor]
    ) -> list[Tensor | None]:
        wanted = self._shapes_read(call)
        if edit is None:
            overload = call.first.overload
            text = call.first.arguments
            if overload is None or text is None:
                raise CannotRun("its arguments were not recorded")

            def value(record: int) -> Tensor:
                return self._value(record, changed)

            _check_shapes(overload, text, value, wanted)
            return run_one(overload, text, value)
        results: list[Tensor | None] = []
        for step in edit.steps:
            previous = results[0] if results else None

            def edited(record: int, previous: Tensor | None = previous) -> Tensor:
                held = previous if record == BEFORE else edit.held.get(record)
                if held is not None:
                    return held
                return self._value(record, changed)

            text = json.dumps(step.arguments)
            required = wanted if step.shapes is None else step.shapes
            _check_shapes(step.overload, text, edited, required)
            results = run_one(step.overload, text, edited)
        return results

    def _shapes_read(self, call: TracedCall) -> tuple[tuple[int, ...], ...]:
        rows = self.flow.step.rows
        records = records_in(call.parsed)
        return tuple(tuple(rows[r].shape or ()) for r in records if r in rows)

    def _written_through(
        self, alias: RecordedRow, changed: Mapping[int, Tensor]
    ) -> Tensor:
        """Return a tensor after one of its views was written."""
        rows = self.flow.step.rows
        written = rows[alias.inputs[0]]
        source = self._whole_before(written, alias)
        values = self._value(written.record, changed)
        whole = self._value(source.record, changed).contiguous().clone()
        if written.numel == alias.numel and values.numel() == whole.numel():
            return values.reshape(whole.shape)
        place = rows[written.inputs[0]] if written.is_call else written
        if place.stride is None or place.shape is None:
            raise CannotRun("where it was written was not recorded")
        offset = (place.offset or 0) - (alias.offset or 0)
        try:
            view = whole.as_strided(list(place.shape), list(place.stride), offset)
        except RuntimeError as error:  # beyond the end
            raise CannotRun("it was written where the whole is not") from error
        if view.shape != values.shape:
            raise CannotRun("what is written has another shape")
        view.copy_(values)
        return whole

    def _whole_before(self, written: RecordedRow, alias: RecordedRow) -> RecordedRow:
        """Return the tensor that was written through a view, as it was before."""
        rows = self.flow.step.rows
        source = rows.get(written.inputs[0]) if written.inputs else None
        while source is not None and source.numel != alias.numel:
            source = rows.get(source.inputs[0]) if source.inputs else None
        if source is None:
            raise CannotRun("what it is a view of was not recorded")
        return source


def records_in(value: Any) -> list[int]:
    """Return the records that arguments name, in their order."""
    if isinstance(value, dict):
        if "record" in value:
            return [int(value["record"])]
        return [r for v in value.values() for r in records_in(v)]
    if isinstance(value, list):
        return [r for v in value for r in records_in(v)]
    return []


def _check_shapes(
    overload: str,
    text: str,
    value: Callable[[int], Tensor],
    wanted: Sequence[tuple[int, ...]],
) -> None:
    """Refuse other shapes where a kernel would read beyond an end."""
    operator = base(overload.partition(".")[2].rpartition(".")[0])
    if not trusts_sizes(operator):
        return
    shapes = [tuple(value(record).shape) for record in records_in(json.loads(text))]
    if shapes != list(wanted):
        raise CannotRun("an input has another shape than was recorded")


def run_one(overload: str, text: str, value: Any) -> list[Tensor | None]:
    """Run one call on tensors that may not be changed. Raises ``CannotRun``."""
    if is_written_in_python(overload):
        raise CannotRun("its kernel is the user's, and may be what is wrong")
    name = overload.partition(".")[2].rpartition(".")[0]
    if name.strip("_") in _DRAW or name in _DRAW:
        raise CannotRun("it draws random numbers")
    results = run_unchanged(overload, text, value)
    if isinstance(results, Reason):
        raise CannotRun(results.text)
    return [None if each is None else each.contiguous() for each in results]
