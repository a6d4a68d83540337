"""Every NaN and Inf of one step of one rank: where it was born, what passed it on, and
what silently removed it.

Operators are read in the order in which they ran. One whose inputs are all finite and
whose output is not gave **birth**; one with an input that is not finite, and such an
output, is **propagation**; one whose outputs are all finite although an input isn't is
**death**. Values that are not finite before the step starts **arrived** with the batch
or a parameter. An -inf that a mask wrote on purpose is followed separately and marked
``allowed``, as far as -inf is all it makes: a softmax that turns a row of nothing but
-inf into NaN gave birth to that NaN.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from itertools import groupby
from typing import Any

from roundoff.formats import LARGEST
from roundoff.ops import base, operators_that, values_read, written_input
from roundoff.record import TensorRecord

#: rank, step, record: one tensor value of a run
Key = tuple[int, int, int]

#: What finite masks are made of, in these dtypes or before a cast to them.
LOWEST = frozenset(
    -LARGEST[dtype] for dtype in ("float16", "bfloat16", "float32", "float64")
)
BORN = ("birth", "arrived")


@dataclass(slots=True)
class RecordState:
    """What is known of a record that isn't plainly finite.

    Attributes:
        bad: it holds NaN or Inf; None where that was not recorded.
        allowed: ``mask``, ``pattern``, ``empty`` or "" (not allowed).
        masked: it holds a mask's large negative values.
        origin: the birth that it comes from.
    """

    bad: bool | None = False
    allowed: str = ""
    masked: bool = False
    origin: Key | None = None


@dataclass(slots=True)
class TracedEvent:
    """What happened to NaN or Inf at one record, while the run is still being read."""

    row: TensorRecord
    kind: str
    allowed: bool
    source: int | None
    source_site: str | None
    origin: Key | None
    note: str
    line: str | None
    cause: str | None = None
    advice: str | None = None
    reached: int = 0
    deaths: int = 0


@dataclass
class CarriedOrigins:
    """What one rank carries from one step into the next: the births behind its
    parameters, and behind other state of the optimizer."""

    by_name: dict[str, Key] = field(default_factory=dict)
    optimizer_state: Key | None = None


def is_bad(row: TensorRecord) -> bool | None:
    """Return True if there is a NaN or Inf; None where it was not counted."""
    if row.nan is None:
        return None
    return bool(row.nan or row.posinf or row.neginf)


class StepTrace:
    """One step of one rank, read once.

    Attributes:
        rows: by record.
        events: in the order of records.
        states: of the records that are not plainly finite.
    """

    def __init__(
        self,
        rows: Sequence[TensorRecord],
        carried: CarriedOrigins,
        is_allowed: Callable[[str], bool],
    ) -> None:
        self.rows = {row.record: row for row in rows}
        self.states: dict[int, RecordState] = {}
        self.events: list[TracedEvent] = []
        self._carried = carried
        self._is_allowed = is_allowed
        #: record -> the record whose memory it shows
        self._roots: dict[int, int] = {}
        #: root -> records that were written to its memory in place
        self._writes: dict[int, list[int]] = {}
        #: dtype and shape -> the last record of this kind that was not finite
        self._latest: dict[tuple[Any, ...], RecordState] = {}
        ordered = sorted(rows, key=lambda row: row.record)
        for call, group in groupby(ordered, key=lambda row: row.call):
            self._read_call(call, list(group))
        self._remember(ordered)

    def key(self, row: TensorRecord) -> Key:
        return row.rank, row.step, row.record

    def site(self, record: int) -> str:
        row = self.rows.get(record)
        return f"record {record}" if row is None else row.site

    def _read_call(self, call: int, rows: list[TensorRecord]) -> None:
        if call < 0:
            leaves = rows
            outputs = []
        else:
            # a tool that records no data flow has rows of inputs instead
            leaves = [row for row in rows if row.role == "input"]
            outputs = [row for row in rows if row.role != "input"]
        for row in leaves:
            self._read_leaf(row)
        if outputs:
            self._read_outputs(outputs)

    def _read_leaf(self, row: TensorRecord) -> None:
        """A value that was there before the step, or that no recorded call has made."""
        bad = is_bad(row)
        if bad is None:
            self.states[row.record] = RecordState(bad=None)
        if row.inputs:  # other memory of a recorded tensor
            self._roots[row.record] = self._root(row.inputs[0])
        if not bad:
            return
        inherited = self._inherited_state(row)
        if inherited is None:
            self._read_arrival(row)
        else:
            self.states[row.record] = inherited

    def _inherited_state(self, row: TensorRecord) -> RecordState | None:
        """Return the state of the record that a leaf shows, or most likely is."""
        for record in row.inputs or ():
            if record in self.states and self.states[record].bad:
                return self.states[record]
        if row.role == "input":
            return self._latest.get(_kind(row))
        return None

    def _read_arrival(self, row: TensorRecord) -> None:
        carried = self._carried.by_name.get(row.name or "")
        if carried is None and row.name is None and row.phase == "optimizer":
            carried = self._carried.optimizer_state
        allowed = self._arrival_allowance(row)
        origin = self.key(row) if carried is None else carried
        self.states[row.record] = RecordState(True, allowed, bool(allowed), origin)
        if carried is None:
            self._event(row, "arrived", allowed, None, origin)
        else:
            note = "came over from an earlier step"
            self._event(row, "carried", allowed, None, origin, note)

    def _arrival_allowance(self, row: TensorRecord) -> str:
        if self._is_allowed(row.site):
            return "pattern"
        # an additive mask: 0 where it lets through; what is trained is none
        is_mask = (
            row.operator != "parameter"
            and not row.nan
            and not row.posinf
            and (row.neginf or 0) + (row.zero or 0) == row.numel
        )
        return "mask" if is_mask else ""

    def _read_outputs(self, outputs: list[TensorRecord]) -> None:
        read: dict[int, None] = {}
        for row in outputs:
            inputs = values_read(
                row.operator, row.overload, row.inputs, outputs=len(outputs)
            )
            read.update(dict.fromkeys(inputs))
            bad = is_bad(row)
            if bad is None:
                self._read_unknown(row, inputs)
            elif bad:
                self._read_bad(row, inputs)
            elif row.min in LOWEST:
                self._read_finite_mask(row, inputs)
        for row in outputs:
            self._place_in_memory(row, len(outputs))
            state = self.states.get(row.record)
            if state is not None and state.bad:
                self._latest[_kind(row)] = state
        if _can_remove(outputs):
            self._read_death(outputs[0], read)

    def _read_death(self, row: TensorRecord, read: Iterable[int]) -> None:
        """All outputs of a call are finite: it removed what its inputs held."""
        removed = [i for i in read if self._is_bad_at(i, row.record)]
        if not removed:
            return
        source = self._worst(removed)
        state = self.states[source]
        if state.allowed != "empty":  # else it was written piece by piece
            self._event(row, "death", state.allowed, source, state.origin)

    def _read_unknown(self, row: TensorRecord, inputs: Sequence[int]) -> None:
        """An output without statistics: it may hold what its inputs held."""
        if self._shows_bad_memory(row):
            return
        bad_inputs = self._bad_inputs(row, inputs)
        origin = self.states[self._worst(bad_inputs)].origin if bad_inputs else None
        self.states[row.record] = RecordState(None, origin=origin)

    def _read_bad(self, row: TensorRecord, inputs: Sequence[int]) -> None:
        """An output that isn't finite."""
        if self._shows_bad_memory(row):
            return
        bad_inputs = self._bad_inputs(row, inputs)
        if bad_inputs:
            self._read_propagation(row, inputs, self._worst(bad_inputs))
            return
        is_masked = self._any_masked(inputs) or self._writes_mask(row, inputs)
        if _only_minus_infinity(row) and is_masked:
            self._birth(row, "mask", None, "-inf of a mask")
        elif base(row.operator) in operators_that("leave memory unwritten"):
            note = "memory that nothing was written to yet"
            self._birth(row, "empty", None, note)
        else:
            self._read_birth(row, inputs)

    def _read_propagation(
        self, row: TensorRecord, inputs: Sequence[int], source: int
    ) -> None:
        state = self.states[source]
        self._disallow_empty(state)
        if state.allowed == "mask" and not _only_minus_infinity(row):
            note = f"made of the -inf of a mask ({self.site(source)})"
            self._birth(row, "", source, note)
            return
        self.states[row.record] = RecordState(
            True, state.allowed, self._any_masked(inputs), state.origin
        )
        if row.view_of is None:
            self._event(row, "propagation", state.allowed, source, state.origin)

    def _read_birth(self, row: TensorRecord, inputs: Sequence[int]) -> None:
        """No input is known to be bad: a birth, unless an unknown input explains it."""
        unknown = [
            i
            for i in inputs
            if i not in self.rows or self._is_bad_at(i, row.record) is None
        ]
        sites = ", ".join(map(self.site, unknown))
        note = f"inputs without statistics: {sites}" if unknown else ""
        # what went in could not be read, but what went into that was not finite
        for record in unknown:
            state = self.states.get(record)
            if state is not None and state.origin is not None:
                self.states[row.record] = RecordState(True, origin=state.origin)
                self._event(row, "propagation", "", unknown[0], state.origin, note)
                return
        self._birth(row, "", None, note)

    def _birth(
        self, row: TensorRecord, allowed: str, source: int | None, note: str
    ) -> None:
        if self._is_allowed(row.site):
            allowed = "pattern"
        origin = self.key(row)
        self.states[row.record] = RecordState(True, allowed, allowed == "mask", origin)
        self._event(row, "birth", allowed, source, origin, note)

    def _disallow_empty(self, state: RecordState) -> None:
        """Unwritten memory is nobody's fault until an operator reads it."""
        if state.allowed != "empty":
            return
        state.allowed = ""
        for event in self.events:
            if event.origin == state.origin and event.kind == "birth":
                event.allowed = False
                event.note = "unwritten memory was read"

    def _read_finite_mask(self, row: TensorRecord, inputs: Sequence[int]) -> None:
        """A finite mask has the lowest value of the dtype instead of -inf."""
        if self._any_masked(inputs) or self._writes_mask(row, inputs):
            self.states[row.record] = RecordState(masked=True)

    def _writes_mask(self, row: TensorRecord, inputs: Iterable[int]) -> bool:
        operator = base(row.operator)
        if operator in operators_that("write constants"):
            return True
        if operator != "mul":
            return False
        # a factor within [-1, 1] cannot make a finite one overflow: the -inf is a
        # constant's
        return any(i in self.rows and _is_small_factor(self.rows[i]) for i in inputs)

    def _any_masked(self, inputs: Iterable[int]) -> bool:
        return any(i in self.states and self.states[i].masked for i in inputs)

    def _shows_bad_memory(self, row: TensorRecord) -> bool:
        """A view of memory that is not finite has its state: nothing happened."""
        if row.view_of is None:
            return False
        state = self.states.get(row.view_of)
        if state is None or not state.bad:
            return False
        self.states[row.record] = state
        return True

    def _bad_inputs(self, row: TensorRecord, inputs: Sequence[int]) -> list[int]:
        """Return the inputs that are not finite as the call read them."""
        bad = [i for i in inputs if self._is_bad_at(i, row.record)]
        if bad:
            return bad
        # memory that was written through another view after it was recorded explains,
        # but proves nothing
        written: list[int] = []
        for record in inputs:
            written += self._written_between(record, row.record)
        return [w for w in written if self._is_bad_at(w, row.record)]

    def _is_bad_at(self, record: int, reader: int) -> bool | None:
        """Return True if a record was not finite when the call that made ``reader``
        read it."""
        state = self.states.get(record)
        if state is None:
            return False
        if not state.bad:
            return state.bad
        size = self.rows[record].numel or 0
        writes = (self.rows[w] for w in self._written_between(record, reader))
        was_cleaned = any(
            (write.numel or 0) >= size and is_bad(write) is False for write in writes
        )
        return not was_cleaned

    def _written_between(self, record: int, reader: int) -> list[int]:
        """In-place writes to the memory of a record after it was recorded and before
        ``reader``."""
        writes = self._writes.get(self._root(record), ())
        return [w for w in writes if record < w < reader]

    def _root(self, record: int) -> int:
        return self._roots.get(record, record)

    def _place_in_memory(self, row: TensorRecord, outputs: int) -> None:
        if row.view_of is not None:
            self._roots[row.record] = self._root(row.view_of)
        if not row.inplace:
            return
        written = written_input(
            row.operator,
            row.overload,
            row.inputs,
            place=row.place,
            outputs=outputs,
        )
        if written is not None:
            root = self._root(written)
            self._roots[row.record] = root
            self._writes.setdefault(root, []).append(row.record)

    def _worst(self, records: Sequence[int]) -> int:
        """Return the record to follow: one that isn't allowed before one that is, then the
        earliest birth."""

        def rank(record: int) -> tuple[bool, Key]:
            state = self.states[record]
            return state.allowed != "", state.origin or (0, 0, 0)

        return min(records, key=rank)

    def _remember(self, ordered: Sequence[TensorRecord]) -> None:
        """Keep the births behind parameters and optimizer state for the next step."""
        for row in ordered:
            state = self.states.get(row.record, RecordState())
            origin = state.origin if state.bad and not state.allowed else None
            if row.name is not None:
                self._carried.by_name.pop(row.name, None)
            if origin is None:
                continue
            if row.name is not None:
                self._carried.by_name[row.name] = origin
            if row.phase == "optimizer":
                self._carried.optimizer_state = origin

    def _event(
        self,
        row: TensorRecord,
        kind: str,
        allowed: str,
        source: int | None,
        origin: Key | None,
        note: str = "",
    ) -> None:
        self.events.append(
            TracedEvent(
                row=row,
                kind=kind,
                allowed=bool(allowed),
                source=source,
                source_site=None if source is None else self.site(source),
                origin=origin,
                note=note,
                line=row.line,
            )
        )


def _kind(row: TensorRecord) -> tuple[Any, ...]:
    """Dtype and shape."""
    return row.dtype, *(row.shape or ())


def _only_minus_infinity(row: TensorRecord) -> bool:
    return not row.nan and not row.posinf


def _can_remove(outputs: Sequence[TensorRecord]) -> bool:
    """Return True for a call that may silently remove NaN or Inf: all it made is
    finite, and it neither inspects, shows nor selects values."""
    first = outputs[0]
    if any(is_bad(row) is not False for row in outputs):
        return False
    if all(row.dtype == "bool" for row in outputs):
        return False
    selects = base(first.operator) in operators_that("take out or ask")
    return first.view_of is None and not selects


def _is_small_factor(row: TensorRecord) -> bool:
    """Return True for booleans and for values within [-1, 1]."""
    if row.min is None or row.max is None:
        return False
    return row.dtype == "bool" or (row.min >= -1 and row.max <= 1)
