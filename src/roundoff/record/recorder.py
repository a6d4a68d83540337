"""The rows of one step: every tensor value once, with the call that made it and where
its inputs come from.

Rows are kept as tuples until the step is over, when ``Recorder.table`` turns them into
the columns of ``TensorRecord``.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache
from operator import attrgetter
from typing import Any, NamedTuple

import torch
from torch import Tensor

from roundoff.ops import (
    Refusal,
    base,
    operators_that,
    overload_of,
    plain,
    recorded_operator,
    unwrapped,
)
from roundoff.record.graph_node import node_of
from roundoff.record.statistics import STATISTICS, Statistics, in_memory_order

#: How the elements of memory are read: their format, whether conjugated, whether negated.
Reading = tuple[torch.dtype, bool, bool]
#: Offset, shape and strides in elements, and the reading.
Geometry = tuple[int, tuple[int, ...], tuple[int, ...], Reading]
#: What stores a tensor's content: gives the columns ``hash`` or ``blob``.
Keep = Callable[[int, Tensor], dict[str, Any]]

_DTYPES = {
    dtype: str(dtype).removeprefix("torch.")
    for dtype in vars(torch).values()
    if isinstance(dtype, torch.dtype)
}
_NO_TENSOR = "no tensor among its results"
#: Longer values from before the step are not hashed.
LARGEST_HASHED = 2**22
#: The operator of a row whose values something wrote that is not seen.
UNSEEN = "unseen_write"
#: The reason of a view of memory with elements that no call has written.
PARTLY_WRITTEN = "memory that nothing was written to yet, in part"
#: These make memory without values.
_UNWRITTEN = operators_that("leave memory unwritten")
#: Their results are kept, as running them again gives others, or none.
_ONCE = (
    operators_that("draw")
    | operators_that("drop out")
    | operators_that("have no unique result")
    | operators_that("read opaque bytes")
    # one of its results is bytes for its backward pass
    | {"mkldnn_rnn_layer"}
)
#: Namespaces of operators whose calls can be run again anywhere.
_OF_TORCH = ("aten", "prims")


class Source:
    """Where a call stands: phase, module path, user source line and the lines that
    called it (see ``source_lines``); ``recomputed``: a checkpoint computes its forward
    again."""

    __slots__ = ("callers", "line", "module", "phase", "recomputed")

    def __init__(
        self,
        phase: str,
        module: str,
        line: str | None,
        callers: str | None = None,
        *,
        recomputed: bool = False,
    ) -> None:
        self.phase = phase
        self.module = module
        self.line = line
        self.callers = callers
        self.recomputed = recomputed


@dataclass(slots=True)
class _CallHead:
    """What the rows of one call have in common; ``number`` is -1 for what was there
    before the step. ``is_given``: running the recorded calls again does not give it."""

    number: int
    phase: str
    module: str
    operator: str
    index: int
    recomputed: bool
    overload: str | None
    line: str | None
    callers: str | None
    group: str | None
    reason: str | None
    is_given: bool


#: column -> the attribute of ``_CallHead``
_CALL_COLUMNS = {
    "call": "number",
    "phase": "phase",
    "module": "module",
    "operator": "operator",
    "index": "index",
    "recomputed": "recomputed",
    "overload": "overload",
    "line": "line",
    "callers": "callers",
    "group": "group",
}


class _ValueRow(NamedTuple):
    """One tensor value; the fields but ``head`` are columns of ``TensorRecord``."""

    head: _CallHead
    place: int
    name: str | None
    inputs: list[int]
    arguments: str | None
    view_of: int | None
    inplace: bool
    dtype: torch.dtype | None
    shape: tuple[int, ...] | None
    stride: tuple[int, ...] | None
    offset: int | None
    memory: int | None
    memory_layout: list[int] | None
    device: torch.device | None
    layout: torch.layout | None
    numel: int | None
    reason: str | None


class _Blank:
    """Memory that was made without values, and which of its elements a call has written.

    Attributes:
        record: of the call that made it.
        count: how many elements it has.
    """

    __slots__ = ("_written", "count", "record")

    def __init__(self, record: int, count: int) -> None:
        self.record = record
        self.count = count
        #: by element of the storage; None before anything was written
        self._written: Tensor | None = None

    @property
    def is_untouched(self) -> bool:
        """True before any call has written to it."""
        return self._written is None

    def write(self, value: Tensor) -> bool:
        """Note that a view of it was written; return True where all of it is now."""
        if value.numel() >= self.count:
            return True
        size = value.untyped_storage().nbytes() // value.element_size()
        if self._written is None:
            self._written = torch.zeros(size, dtype=torch.bool)
        view = value.shape, value.stride(), value.storage_offset()
        if self._written.numel() == size:
            self._written.as_strided(*view).fill_(True)
        return int(self._written.sum()) >= self.count

    def covers(self, value: Tensor) -> bool:
        """Return True where all elements of a view of it were written."""
        if self._written is None:
            return False
        view = value.shape, value.stride(), value.storage_offset()
        return bool(self._written.as_strided(*view).all())


class _Memory:
    """What is known of one storage.

    ``first``: the first record of it. ``records``: the record of each view of it. ``latest``: the record that views are
    now views of, with the elements ``start`` to ``end`` of the storage that it covers.
    ``base``: the geometry of the latest; ``elements``: record by elements of a view;
    ``blank``: what of it has no values yet, None where all has.
    """

    __slots__ = (
        "alive",
        "base",
        "blank",
        "elements",
        "end",
        "first",
        "latest",
        "records",
        "start",
        "version",
    )

    def __init__(self, storage: torch.UntypedStorage, first: int) -> None:
        self.first = first
        # keeps the address from going to another storage
        self.alive = storage._weak_ref()
        self.records: dict[Any, int] = {}
        self.base: Geometry | None = None
        self.blank: _Blank | None = None
        self.elements: dict[Any, int] | None = None
        self.latest = -1
        self.version = 0
        self.start = 0
        self.end = 0

    def __del__(self) -> None:
        _free(self.alive)  # type: ignore[no-untyped-call]

    def add(
        self, record: int, value: Tensor, geometry: Geometry, version: int | None
    ) -> tuple[int | None, tuple[int, ...]]:
        """Enter a value; give the record that it is a view of, and the strides with
        which its kept elements are read.

        ``version`` is None where the memory still holds what was recorded, else that of
        the memory now that it was written.
        """
        start, _, stride, _ = geometry
        end = _end(value)
        if version is not None:
            self.records.clear()
            self.version = version
        elif self.latest >= 0 and self.start <= start and end <= self.end:
            self.records[geometry] = record
            return self.latest, stride
        self.records[geometry] = record
        self.latest = record
        self.start = start
        self.end = end
        # what has gaps is kept without them, so no view of it could be found in it
        if not value.is_contiguous() and in_memory_order(value) is None:
            self.end = start
            stride = value.contiguous().stride()
        return None, stride

    def holds_otherwise(self, geometry: Geometry) -> bool:
        """Return True where a view reads other numbers in this memory: of another format,
        such as pairs as complex numbers, or with another sign.

        What is kept of the memory does not give these.
        """
        return self.base is not None and self.base[3] != geometry[3]


class Recorder:
    """Rows of the step that runs now.

    Args:
        keep: stores the content of each new value.
        keeps_all: False to keep alone what running the recorded calls again does not
            give: what was there before the step, and random numbers.
        name_of: gives the names of parameters and buffers.
        versions: look at torch's version counters for what was written unseen.
        hash_of: hashes what was there before the step; where nothing is kept, equal
            statistics do not tell values from the same ones in another order.

    Attributes:
        rows: one for each value, in the order of records.
        own_errors: record -> l2 and max of the own error, or the reason for none.
    """

    def __init__(
        self,
        keep: Keep | None = None,
        *,
        keeps_all: bool = True,
        name_of: Callable[[Tensor], str | None] = lambda _: None,
        versions: bool = False,
        hash_of: Callable[[Tensor], str] | None = None,
    ) -> None:
        self.keep = keep
        self.keeps_all = keeps_all
        self.hash_of = hash_of
        self._leaf_hashes: dict[int, str] = {}
        self.versions = versions
        self.name_of = name_of
        self.rows: list[_ValueRow] = []
        self.own_errors: dict[int, tuple[float | None, float | None, str | None]] = {}
        self.calls = 0
        self.statistics = Statistics()
        self._kept: dict[int, dict[str, Any]] = {}
        #: record -> one with the same elements in another order
        self._twins: dict[int, int] = {}
        self._later_names: dict[int, str] = {}
        #: id -> record of a tensor without readable memory, and the tensor itself
        self._unread: dict[int, tuple[int, Tensor]] = {}
        self._memory: dict[int, _Memory] = {}
        self._counts: Counter[tuple[str, str, str]] = Counter()

    @property
    def has_calls(self) -> bool:
        """Return True if a row is of a call."""
        return any(row.head.number >= 0 for row in self.rows)

    @property
    def has_backward(self) -> bool:
        """Return True if a row is of the backward pass."""
        return any(row.head.phase == "backward" for row in self.rows)

    def record_of(self, tensor: Tensor, source: Source) -> int:
        """Return the record of this value; a value that no recorded call has made gets
        a row, as it stands.
        """
        record = self.recorded(tensor)
        return self._add_leaf(tensor, source) if record is None else record

    def recorded(self, tensor: Tensor) -> int | None:
        """Return the record of this value, None where there is none yet."""
        value, _ = plain(tensor)
        if value is None:
            return self._unread.get(id(tensor), (None, None))[0]
        memory = self._memory.get(value.untyped_storage()._cdata)
        if memory is None or (self.versions and memory.version != _version(value)):
            return None
        return memory.records.get(_geometry(value))

    def changed(self, tensor: Tensor) -> None:
        """``tensor`` was written without a row: forget what is known of its memory."""
        value, _ = plain(tensor)
        if value is not None:
            self._memory.pop(value.untyped_storage()._cdata, None)

    def before_reading(self, tensors: Sequence[Tensor]) -> None:
        """A call is about to read these: what no recorded call has written, others have.

        A kernel that writes through numpy or a pointer is not seen. Its result gets a
        row, at the line where its memory was made.
        """
        for tensor in tensors:
            value, _ = plain(tensor)
            if value is None or not value.numel():
                continue
            memory = self._memory.get(value.untyped_storage()._cdata)
            if memory is None or memory.blank is None:
                continue
            if memory.blank.is_untouched:
                blank = memory.blank.record
                memory.blank = None
                self._add_unseen(blank, tensor)

    def _add_unseen(self, blank: int, tensor: Tensor) -> None:
        """Add a row for memory that something unseen has written.

        It is taken to have read what was looked at since its memory was made, and what
        was computed last before.
        """
        head = self.rows[blank].head
        before = [r for r in range(blank) if self.rows[r].head.number >= 0]
        since = [
            r
            for r in range(blank + 1, len(self.rows))
            if self.rows[r].view_of is not None
            and self.rows[r].head.phase == head.phase
        ]
        source = Source(head.phase, head.module, head.line, head.callers)
        self.call(source, UNSEEN, None, [*before[-1:], *since], [], written=[tensor])

    def named_gradient(self, name: str, gradient: Tensor) -> None:
        """``gradient`` is that of parameter ``name``; where no recorded call has made
        it, it gets a row."""
        record = self.recorded(gradient)
        if record is None:
            source = Source("backward", name.rpartition(".")[0], None)
            # written in place, through a view
            latest = self._latest(gradient)
            written = [] if latest is None else [latest]
            (record,) = self.call(source, "gradient", None, written, (gradient,))
        self._later_names[record] = f"{name}.grad"

    def name(self, tensor: Tensor, name: str) -> None:
        """Give a value of this step its name, which was not known when it was made."""
        record = self.recorded(tensor)
        if record is not None and self.rows[record].name is None:
            self._later_names[record] = name
            self._hash(record, tensor)

    def call(
        self,
        source: Source,
        operator: str,
        overload: str | None,
        inputs: Sequence[int],
        outputs: Sequence[Tensor],
        *,
        written: Sequence[Tensor] = (),
        changed: Sequence[Tensor] = (),
        arguments: str | None = None,
        group: str | None = None,
        reason: str | None = None,
        place: int = 0,
        inputs_of_place: Sequence[list[int]] | None = None,
    ) -> list[int]:
        """Add one row for each tensor that a call has written, made, or ``changed``
        without saying so; give their records.

        ``inputs_of_place``: the inputs of each place, where they differ. The arguments
        stand in the first row.
        """
        number = self.calls
        self.calls += 1
        head = _CallHead(
            number,
            source.phase,
            source.module,
            operator,
            self._count(source.phase, source.module, operator),
            source.recomputed,
            overload,
            source.line,
            source.callers,
            group,
            reason,
            cannot_run_again(operator, overload, arguments),
        )
        listed = list(inputs)
        if not written and not outputs and not changed:
            self._add_call_without_tensors(head, listed, arguments)
            return []
        records = []
        new_positions = range(len(written), len(written) + len(outputs))
        for position, tensor in enumerate((*written, *outputs, *changed)):
            read = listed
            if inputs_of_place:
                read = inputs_of_place[position % len(inputs_of_place)]
            record = self._add(
                tensor,
                head,
                place + position,
                read,
                arguments=arguments,
                inplace=position not in new_positions,
            )
            records.append(record)
            arguments = None
        if base(operator) in _UNWRITTEN:
            for record, tensor in zip(records, (*written, *outputs), strict=False):
                self._made_blank(record, tensor)
        return records

    def forget_kept(self) -> None:
        """Name no kept contents: they were given up."""
        self._kept = {}

    def _made_blank(self, record: int, tensor: Tensor) -> None:
        """Note that new memory has no values yet."""
        value, _ = plain(tensor)
        if value is not None and value.numel() and value.device.type == "cpu":
            memory = self._memory[value.untyped_storage()._cdata]
            memory.blank = _Blank(record, value.numel())

    def table(self) -> dict[str, list[Any]]:
        """Return all columns of the step, statistics included."""
        return {
            "record": list(range(len(self.rows))),
            **self._call_columns(),
            **self._value_columns(),
            **self._statistics_columns(),
            **self._kept_columns(),
            **self._own_error_columns(),
        }

    def _is_partly_blank(self, value: Tensor) -> bool:
        """Return True for a view of memory that no call has written all of."""
        memory = self._memory.get(value.untyped_storage()._cdata)
        blank = None if memory is None else memory.blank
        return blank is not None and not blank.covers(value)

    def _count(self, phase: str, module: str, operator: str) -> int:
        """Return how often this was called before."""
        key = (phase, module, operator)
        index = self._counts[key]
        self._counts[key] = index + 1
        return index

    def _latest(self, tensor: Tensor) -> int | None:
        """Return the last record that was written to a tensor's memory."""
        value, _ = plain(tensor)
        if value is None:
            return None
        memory = self._memory.get(value.untyped_storage()._cdata)
        return None if memory is None or memory.latest < 0 else memory.latest

    def _add_leaf(self, tensor: Tensor, source: Source) -> int:
        """A row for a value that was there before the step."""
        name = self.name_of(tensor)
        operator = _leaf_operator(tensor, name)
        inputs: list[int] = []
        latest = self._latest(tensor)
        if latest is not None:  # another view of memory that a call has written
            operator = "alias"
            inputs = [latest]
        index = self._count("", "", operator)
        head = _CallHead(
            -1,
            source.phase,
            "",
            operator,
            index,
            False,
            None,
            source.line,
            source.callers,
            None,
            None,
            latest is None or self._is_given(latest),
        )
        record = self._add(tensor, head, 0, inputs, arguments=None, inplace=False)
        self._hash(record, tensor)
        return record

    def _is_given(self, record: int) -> bool:
        """Return True for a value that running the calls again does not give.

        Nor does it give another view of the memory of such a value.
        """
        row = self.rows[record]
        while not row.head.is_given and is_view(row.head.overload) and row.inputs:
            row = self.rows[row.inputs[0]]
        return row.head.is_given

    def _hash(self, record: int, tensor: Tensor) -> None:
        """Hash a value from before the step, unless that is long or elsewhere."""
        value, _ = plain(tensor)
        if self.hash_of is None or value is None or value is not unwrapped(tensor):
            return
        if value.device.type != "cpu" or value.numel() > LARGEST_HASHED:
            return
        try:
            self._leaf_hashes[record] = self.hash_of(value.detach())
        except (NotImplementedError, RuntimeError, TypeError):
            return  # what torch.func has wrapped has no memory that can be read

    def _add(
        self,
        tensor: Tensor,
        head: _CallHead,
        place: int,
        inputs: list[int],
        *,
        arguments: str | None,
        inplace: bool,
    ) -> int:
        tensor = unwrapped(tensor)
        value, why = plain(tensor)
        record = len(self.rows)
        reason = head.reason
        view_of: int | None = None
        stride: tuple[int, ...] | None = None
        offset: int | None = None
        memory: int | None = None
        memory_layout: list[int] | None = None
        if value is None:
            reason = reason or why
            # held, so that no other tensor gets its id
            self._unread[id(tensor)] = (record, tensor)
        else:
            view_of, stride, offset = self._place(record, value, head, inplace)
            memory, memory_layout = self._lies_in(value)
            if reason is None and self._is_partly_blank(value):
                reason = PARTLY_WRITTEN
            # values inside it: stored ones, a shard
            if value is not tensor and (
                tensor.is_nested or value.shape != tensor.shape
            ):
                stride = None
        self.rows.append(
            _ValueRow(
                head,
                place,
                self.name_of(tensor),
                inputs,
                arguments,
                view_of,
                inplace,
                tensor.dtype,
                None if tensor.is_nested else tuple(tensor.shape),
                stride,
                offset,
                memory,
                memory_layout,
                tensor.device,
                tensor.layout,
                tensor.numel(),
                reason,
            )
        )
        return record

    def _add_call_without_tensors(
        self, head: _CallHead, inputs: list[int], arguments: str | None
    ) -> None:
        reason = head.reason or _NO_TENSOR
        tensor = (None, False, None, None, None, None, None, None, None, None, None)
        self.rows.append(_ValueRow(head, 0, None, inputs, arguments, *tensor, reason))

    def _place(
        self, record: int, value: Tensor, head: _CallHead, inplace: bool
    ) -> tuple[int | None, tuple[int, ...], int]:
        """Enter a value into its memory and measure it: ``view_of``, strides, offset."""
        storage = value.untyped_storage()
        memory = self._memory.get(storage._cdata)
        if memory is None:
            memory = self._memory[storage._cdata] = _Memory(storage, record)
        geometry = _geometry(value)
        version = _version(value) if self.versions else 0
        is_written = inplace or (self.versions and memory.version != version)
        keep = self.keep if self.keeps_all or head.is_given else None
        if not is_written and memory.holds_otherwise(geometry):
            memory.records[geometry] = record
            content = value.resolve_conj().resolve_neg().contiguous()
            self._measure(record, content, keep)
            return None, content.stride(), 0
        view_of, stride = memory.add(
            record, value, geometry, version if is_written else None
        )
        if inplace and memory.blank is not None and memory.blank.write(value):
            memory.blank = None
        self._read(record, value, geometry, view_of, memory, keep)
        return view_of, stride, geometry[0] - memory.start

    def _lies_in(self, value: Tensor) -> tuple[int | None, list[int] | None]:
        """Return the first record of a value's memory, and its offset and strides there.

        None for what reads other numbers there than the memory holds.
        """
        memory = self._memory.get(value.untyped_storage()._cdata)
        if memory is None or value.is_conj() or value.is_neg():
            return None, None
        return memory.first, [int(value.storage_offset()), *value.stride()]

    def _read(
        self,
        record: int,
        value: Tensor,
        geometry: Geometry,
        view_of: int | None,
        memory: _Memory,
        keep: Keep | None,
    ) -> None:
        """Measure a value and keep it, unless a record with its elements has been."""
        if view_of is None:
            memory.base = geometry
            memory.elements = None
            self._measure(record, value, keep)
            return
        kept = self._kept.get(view_of)
        if kept:
            self._kept[record] = kept
        if memory.elements is None:
            base = memory.base
            memory.elements = {} if base is None else {_elements(*base): view_of}
        elements = _elements(*geometry)
        twin = memory.elements.get(elements) if elements else None
        if twin is not None:
            # the same elements in another order: the same statistics
            self._twins[record] = twin
            return
        memory.elements[elements] = record
        self.statistics.add(record, value)
        if keep is not None and not kept:
            self._kept[record] = keep(record, value)

    def _measure(self, record: int, value: Tensor, keep: Keep | None) -> None:
        self.statistics.add(record, value)
        if keep is not None:
            self._kept[record] = keep(record, value)

    def _call_columns(self) -> dict[str, list[Any]]:
        heads = [row.head for row in self.rows]
        return {
            column: list(map(attrgetter(attribute), heads))
            for column, attribute in _CALL_COLUMNS.items()
        }

    def _value_columns(self) -> dict[str, list[Any]]:
        _, *values = zip(*self.rows, strict=True)
        columns: dict[str, list[Any]] = {
            name: list(column)
            for name, column in zip(_ValueRow._fields[1:], values, strict=True)
        }
        columns |= {
            "dtype": list(map(_dtype_name, columns["dtype"])),
            "shape": list(map(_listed, columns["shape"])),
            "stride": list(map(_listed, columns["stride"])),
            "device": list(map(_text, columns["device"])),
            "layout": list(map(_text, columns["layout"])),
        }
        for record, name in self._later_names.items():
            columns["name"][record] = name
        return columns

    def _statistics_columns(self) -> dict[str, list[Any]]:
        rows, histograms = self.statistics.finish()
        measured = [self._measured_record(r) for r in range(len(self.rows))]
        columns: dict[str, list[Any]] = {}
        no_statistics = (None,) * len(STATISTICS)
        statistics = [rows.get(record, no_statistics) for record in measured]
        for place, name in enumerate(STATISTICS):
            columns[name] = [row[place] for row in statistics]
        shapes = [histograms.get(record, (None, None, None)) for record in measured]
        for place, name in enumerate(("exponent", "exponents", "sampled")):
            columns[name] = [shape[place] for shape in shapes]
        return columns

    def _kept_columns(self) -> dict[str, list[Any]]:
        kept = [self._kept.get(record, {}) for record in range(len(self.rows))]
        columns = {name: [k.get(name) for k in kept] for name in ("hash", "blob")}
        for record, digest in self._leaf_hashes.items():
            columns["hash"][record] = digest
        return columns

    def _own_error_columns(self) -> dict[str, list[Any]]:
        none = (None, None, None)
        errors = [self.own_errors.get(r, none) for r in range(len(self.rows))]
        names = ("own_l2", "own_max", "own_reason")
        return {name: [e[i] for e in errors] for i, name in enumerate(names)}

    def _measured_record(self, record: int) -> int:
        """Return the record that was measured for this one."""
        while record in self._twins:
            record = self._twins[record]
        return record


def cannot_run_again(
    operator: str, overload: str | None, arguments: str | None
) -> bool:
    """Return True for a call that says too little to run again, or would give another result.

    That is a kernel of the user's or of a compiled region, one whose arguments cannot be
    written, and one that draws random numbers.
    """
    if overload is None or arguments is None:
        return True
    if base(operator) in _UNWRITTEN:
        return False
    return base(operator) in _ONCE or not _may_be_named(overload)


@cache
def is_view(overload: str | None) -> bool:
    """Return True for an operator that shows the memory of what it reads."""
    if overload is None or not _may_be_named(overload):
        return False
    return bool(overload_of(overload).is_view)


@cache
def _may_be_named(overload: str) -> bool:
    """Return True for an operator of torch that a recording may name."""
    if overload.partition(".")[0] not in _OF_TORCH:
        return False
    try:
        recorded_operator(overload)
    except Refusal:
        return False
    return True


def _leaf_operator(tensor: Tensor, name: str | None) -> str:
    if name is not None:
        is_parameter = isinstance(tensor, torch.nn.Parameter)
        return "parameter" if is_parameter else "buffer"
    if type(node_of(tensor)).__name__.startswith("CompiledFunction"):
        return "compiled"  # the boundary of a compiled region
    return "input"


def _dtype_name(dtype: torch.dtype | None) -> str | None:
    return None if dtype is None else _DTYPES.get(dtype, str(dtype))


def _text(value: torch.device | torch.layout | None) -> str | None:
    return None if value is None else str(value).removeprefix("torch.")


def _listed(sizes: tuple[int, ...] | None) -> list[int] | None:
    return None if sizes is None else list(sizes)


def _end(value: Tensor) -> int:
    """Return one past the last element of the storage that this is a view of."""
    start = int(value.storage_offset())
    if value.is_contiguous():
        return start + value.numel()
    if not value.numel():
        return start
    last = sum((n - 1) * s for n, s in zip(value.shape, value.stride(), strict=True))
    return start + 1 + last


def _elements(
    offset: int, shape: Sequence[int], strides: Sequence[int], reading: Reading
) -> tuple[Any, ...] | None:
    """Return which elements of the storage these are, in whatever order; None where one
    appears twice."""
    axes = sorted((s, n) for s, n in zip(strides, shape, strict=True) if n != 1)
    merged: list[tuple[int, int]] = []
    for stride, size in axes:
        if not stride:
            return None
        if merged and merged[-1][0] * merged[-1][1] == stride:
            merged[-1] = (merged[-1][0], merged[-1][1] * size)
        else:
            merged.append((stride, size))
    return reading, offset, *merged


def _version(value: Tensor) -> int:
    return 0 if value.is_inference() else value._version


def _geometry(value: Tensor) -> Geometry:
    # a view may hand on the conjugate, or the negative, of what the memory holds
    reading = value.dtype, value.is_conj(), value.is_neg()
    return value.storage_offset(), tuple(value.shape), value.stride(), reading  # type: ignore[return-value]


_free = torch.UntypedStorage._free_weak_ref
