"""The values of one step of one run, what each is made of, and its sketch."""

from __future__ import annotations

from collections.abc import Callable, Container, Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace

from torch import Tensor

from roundoff.compare.judging.explain import RecordedStep
from roundoff.compare.pairing.call_pairs import TRANSPARENT
from roundoff.compare.records.recorded_rows import (
    RecordedRow,
    Rows,
    first_rows,
    was_there_before,
)
from roundoff.compare.records.shared_memory import SharedMemory
from roundoff.compare.records.value_sketch import (
    Sketch,
    sketch_of_row,
    sketch_of_tensor,
)
from roundoff.ops import operators_that

_PRIMITIVE = operators_that("hand on in decompositions")
_DRAW = operators_that("draw")
#: Make values out of nothing.
_CREATE = operators_that("create")
#: The parts of a complex value, which another program may compute apart.
PARTS = ("real", "imag")
#: What reads the numbers of which a program makes a tensor.
_LITERAL = "lift_fresh"
#: Or what another library made in its own format.
_CAST = "_to_copy"
#: More numbers are data.
_FEW_NUMBERS = 4
_FORWARD = "forward"
_CUT = operators_that("cut the gradient")
#: They give memory as it is.
_UNWRITTEN = operators_that("leave memory unwritten")
#: A further result of theirs holds in part what happened to be in its memory.
_UNWRITTEN_IN_PART = operators_that("leave a further result unwritten in part")


@dataclass(frozen=True, slots=True, eq=False)
class Value:
    """One value: of a recorded row, or of a step inside its call.

    Attributes:
        key: the record, or a number above all records for what a call computes inside.
        row: the recorded row; for an inner value the row of its call.
        operator: what made it.
        inputs: the keys that it is made of.
        sketch: None where nothing is known of it.
        order: place in the order of execution.
        inner: True for a step inside a call.
        tensor: of an inner value.
    """

    key: int
    row: RecordedRow
    operator: str
    inputs: tuple[int, ...]
    sketch: Sketch | None
    order: tuple[int, int]
    inner: bool = False
    tensor: Tensor | None = None

    @property
    def is_part(self) -> bool:
        """True for the real or imaginary part of a complex value."""
        return self.inner and self.operator in PARTS

    @property
    def is_call(self) -> bool:
        """True where an operator made it."""
        return self.inner or self.row.is_call

    @property
    def computes(self) -> bool:
        """True where it is more than another value handed on, or a constant."""
        if not self.is_call or self.operator in _CREATE:
            return False
        return self.operator not in TRANSPARENT and self.operator not in _PRIMITIVE

    @property
    def numel(self) -> int | None:
        """How many elements it has; None where that was not recorded."""
        return self.row.numel if self.tensor is None else self.tensor.numel()

    @property
    def is_number(self) -> bool:
        """True for floating point, complex too: indexes and masks choose, they are not
        computed with."""
        if self.tensor is not None:
            return self.tensor.is_floating_point() or self.tensor.is_complex()
        return (self.row.dtype or "").startswith(("float", "bfloat", "complex"))

    @property
    def says_nothing(self) -> bool:
        """True for unknown values, and for constants of several elements."""
        if self.sketch is None:
            return True
        return self.sketch.constant and self.sketch.numel > 1


@dataclass(slots=True)
class Flow:
    """The values of one side by key, in the order of execution.

    Attributes:
        step: the recorded step.
        memory: which values lie in the same memory.
        values: by key.
        first: the first row of each call, which has its arguments.
        trained: names of the parameters that get a gradient.
        parts: the keys of the real and imaginary part of each complex value.
        opened: the calls whose inner values are known.
        end: what a backward pass that the step does not have begins with, if any does.
    """

    step: RecordedStep
    memory: SharedMemory
    values: dict[int, Value] = field(default_factory=dict)
    first: Mapping[int, RecordedRow] = field(default_factory=dict)
    trained: frozenset[str] = frozenset()
    parts: dict[int, tuple[int, ...]] = field(default_factory=dict)
    opened: set[int] = field(default_factory=set)
    end: int | None = None
    _readers: dict[int, list[int]] | None = None
    _rows: dict[int, list[RecordedRow]] | None = None
    _next_key: int | None = None

    @property
    def readers(self) -> Mapping[int, list[int]]:
        """The keys that read each key; that it has parts counts for none."""
        if self._readers is None:
            readers: dict[int, list[int]] = {}
            for value in self.values.values():
                for key in () if value.is_part else value.inputs:
                    readers.setdefault(key, []).append(value.key)
            self._readers = readers
        return self._readers

    @property
    def next_key(self) -> int:
        """Above all keys."""
        if self._next_key is None:
            self._next_key = max(self.values, default=-1) + 1
        return self._next_key

    def rows_of(self, call: int) -> list[RecordedRow]:
        """Return the rows of a call."""
        if self._rows is None:
            self._rows = {}
            for row in self.step.rows.values():
                self._rows.setdefault(row.call, []).append(row)
        return self._rows.get(call, [])

    def tensor(self, key: int) -> Tensor | None:
        """Return a value's tensor; None where none was kept."""
        value = self.values[key]
        return value.tensor if value.inner else self.step.tensor(key)

    def insert(self, inner: Iterable[Value], results: Mapping[int, int]) -> None:
        """Add what a call computes inside; ``results``: the last of it, by record."""
        for value in inner:
            self.values[value.key] = value
            self.opened.add(value.row.call)
            self._next_key = max(self.next_key, value.key + 1)
        for record, key in results.items():
            self.values[record] = replace(self.values[record], inputs=(key,))
        self._readers = None

    def behind(self, key: int) -> Value:
        """Return the value that a value hands on: behind views, casts and copies."""
        value = self.values[key]
        while value.operator in TRANSPARENT and len(value.inputs) == 1:
            source = self.values.get(value.inputs[0])
            if source is None:
                break
            value = source
        return value

    def parameters_read(self, key: int) -> list[Value]:
        """Return the parameters and buffers that a value reads, behind views."""
        sources = [self.behind(k) for k in self.values[key].inputs if k in self.values]
        return [s for s in sources if s.row.name and not s.is_call]

    def in_order(self) -> Iterator[Value]:
        """Yield the values in the order of execution."""
        yield from sorted(self.values.values(), key=lambda value: value.order)


def flow_of(
    step: RecordedStep,
    trained: frozenset[str] | None = None,
    end: int | None = None,
) -> Flow:
    """Return the values of a recorded step.

    ``trained``, ``end``: see ``Flow``; None where the step has the backward pass, which
    says it.
    """
    if trained is None:
        trained = _trained(step)
    step = replace(step, rows=_handed_back(step.rows))
    memory = SharedMemory(step.rows)
    flow = Flow(step, memory, first=first_rows(step.rows), trained=trained, end=end)
    by_blob: dict[object, Sketch | None] = {}
    for record, row in step.rows.items():
        sketch = _sketch(step, row, by_blob)
        inputs = tuple(i for i in _made_of(step.rows, memory, row) if i in step.rows)
        flow.values[record] = Value(
            record, row, row.base_operator, inputs, sketch, (record, 0)
        )
    _add_parts(flow)
    return flow


def _handed_back(rows: Rows) -> Rows:
    """Return the rows, where a forward pass goes on with what it asked a gradient of.

    A backward pass detaches what it has saved; a forward pass that ran it and reads that
    memory again reads the record of the detach, which is one of the forward pass then.
    """
    reads = {
        key for row in rows.values() if row.phase == _FORWARD for key in row.inputs
    }
    forward: dict[int, RecordedRow] = {}
    for key in sorted(reads):
        row = rows.get(key)
        if row is None or row.phase == _FORWARD or row.base_operator not in _CUT:
            continue
        sources = [rows[i] for i in row.inputs if i in rows]
        if len(sources) == 1 and sources[0].phase == _FORWARD:
            forward[key] = replace(row, phase=_FORWARD)
    return {**rows, **forward} if forward else rows


def _add_parts(flow: Flow) -> None:
    """Add the real and imaginary parts of complex values, where tensors were kept."""
    complex_values = [
        value
        for value in flow.values.values()
        if (value.row.dtype or "").startswith("complex") and value.sketch is not None
    ]
    following = max(flow.values, default=0) + 1
    for value in complex_values:
        tensor = flow.tensor(value.key)
        if tensor is None or not tensor.is_complex():
            continue
        keys = []
        for place, part in enumerate((tensor.real, tensor.imag)):
            flow.values[following] = Value(
                following,
                value.row,
                PARTS[place],
                (value.key,),
                sketch_of_tensor(part),
                (value.key, place + 1),
                inner=True,
                tensor=part,
            )
            keys.append(following)
            following += 1
        flow.parts[value.key] = tuple(keys)


def constants_of(flow: Flow, agreeing: Container[int] | None = None) -> set[int]:
    """Return the values made of no parameter and no data.

    Buffers are constants, and what a program writes down as a tensor of a few numbers. What
    it draws is none: data, or what parameters begin with. With ``agreeing``, what the other
    program has too: also tensors that are written down and not among these, as a table that
    another library makes. Both are fed the same data.
    """

    def is_constant(leaf: Value) -> bool:
        if leaf.is_call:
            return leaf.operator not in _DRAW
        if leaf.row.name:
            return leaf.row.name not in flow.trained
        readers = {flow.values[key].operator for key in flow.readers.get(leaf.key, ())}
        if readers == {_LITERAL} and (leaf.row.numel or 0) <= _FEW_NUMBERS:
            return True
        is_unknown = agreeing is not None and leaf.key not in agreeing
        return is_unknown and bool(readers) and readers <= {_LITERAL, _CAST}

    return _made_of_leaves(flow, is_constant, all)


def values_of_parameters(flow: Flow) -> set[int]:
    """Return the parameters, and the values that are made of any."""

    def is_parameter(leaf: Value) -> bool:
        is_named = bool(leaf.row.name) and not leaf.is_call
        return is_named and leaf.operator != "buffer"

    return _made_of_leaves(flow, is_parameter, any)


def _made_of_leaves(
    flow: Flow,
    test: Callable[[Value], bool],
    how_many: Callable[[Iterable[bool]], bool],
) -> set[int]:
    """Return the leaves that pass a test, and what is made of such ones: all, or any."""
    passing: set[int] = set()
    for value in flow.in_order():
        if value.inputs:
            passes = how_many(key in passing for key in value.inputs)
        else:
            passes = test(value)
        if passes:
            passing.add(value.key)
    return passing


def _made_of(rows: Rows, memory: SharedMemory, row: RecordedRow) -> list[int]:
    """Return the records that a row is made of.

    A tensor of which a view was written is also made of what it was before. What was
    there before the step is made of nothing.
    """
    if was_there_before(rows, row):
        return []
    shown = None if row.is_call else memory.shown(row)
    if shown is None:
        return row.values_read()
    return [each.record for each in (*reversed(shown.writes), shown.base)]


def _trained(step: RecordedStep) -> frozenset[str]:
    names = (row.name or "" for row in step.rows.values())
    return frozenset(n.removesuffix(".grad") for n in names if n.endswith(".grad"))


def _sketch(
    step: RecordedStep, row: RecordedRow, by_blob: dict[object, Sketch | None]
) -> Sketch | None:
    """Return the sketch of a row; views of all of a tensor share it.

    None of memory that nothing was written to, or only in part: it holds what happens
    to be there.
    """
    if row.base_operator in _UNWRITTEN:
        return None
    if row.place and row.base_operator in _UNWRITTEN_IN_PART:
        return None
    key = (row.blob, row.numel, row.l2, row.mean, row.min, row.max)
    if row.blob is not None and key in by_blob:
        return by_blob[key]
    tensor = step.tensor(row.record)
    sketch = sketch_of_row(row) if tensor is None else sketch_of_tensor(tensor)
    by_blob[key] = sketch
    return sketch
