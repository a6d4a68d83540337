"""The rows of one step: every tensor value once, with the call that made it and where its inputs come from."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from roundoff.ops import plain, unwrapped
from roundoff.record.statistics import COLUMNS, Statistics, in_memory_order

Geometry = tuple[int, tuple[int, ...], tuple[int, ...], torch.dtype]
#: What stores a tensor's content, or None: the key it has in the step.
Keep = Callable[[int, Tensor], dict[str, Any]]

FIELDS = (
    "record",
    "call",
    "phase",
    "module",
    "operator",
    "index",
    "recomputed",
    "place",
    "overload",
    "name",
    "line",
    "inputs",
    "arguments",
    "view_of",
    "inplace",
    "dtype",
    "shape",
    "stride",
    "offset",
    "device",
    "layout",
    "numel",
    "group",
    "reason",
)
_DTYPES = {
    d: str(d).removeprefix("torch.")
    for d in vars(torch).values()
    if isinstance(d, torch.dtype)
}


class Source:
    """Where a call stands: phase, module path and user source line; ``again``: a checkpoint computes its forward again."""

    __slots__ = ("again", "line", "module", "phase")

    def __init__(
        self, phase: str, module: str, line: str | None, again: bool = False
    ) -> None:
        self.phase, self.module, self.line, self.again = phase, module, line, again


class _Memory:
    """What is known of one storage: the record of each view of it, and the record that views are now views of, with the
    elements ``start`` to ``end`` of the storage that it covers."""

    __slots__ = (
        "alive",
        "base",
        "elements",
        "end",
        "latest",
        "records",
        "start",
        "version",
    )

    def __init__(self, storage: torch.UntypedStorage) -> None:
        self.alive = (
            storage._weak_ref()
        )  # keeps the address from being given to another storage
        self.records: dict[Any, int] = {}
        self.base: Geometry | None = None  # of the latest
        self.elements: dict[Any, int] | None = None
        self.latest = -1
        self.version = 0
        self.start = self.end = 0

    def __del__(self) -> None:
        free(self.alive)  # type: ignore[no-untyped-call]


class Recorder:
    """Rows of the step that runs now. ``name_of`` gives the names of parameters and buffers."""

    def __init__(
        self,
        keep: Keep | None = None,
        *,
        name_of: Callable[[Tensor], str | None] = lambda _: None,
        versions: bool = False,
    ) -> None:
        self.keep = keep
        self.versions = versions
        self.name_of = name_of
        self.rows: list[tuple[Any, ...]] = []
        self.kept: dict[int, dict[str, Any]] = {}
        self.own: dict[int, tuple[float | None, float | None, str | None]] = {}
        self.same: dict[int, int] = {}
        self.gradients: dict[int, str] = {}
        self._unread: dict[int, tuple[int, Tensor]] = {}
        self.calls = 0
        self.statistics = Statistics()
        self._memory: dict[int, _Memory] = {}
        self._counts: Counter[tuple[str, str, str]] = Counter()

    def record_of(self, tensor: Tensor, source: Source) -> int:
        """The record of this value; a value that no recorded call has made gets a row of its own, as it stands."""
        record = self.known(tensor)
        return self._before(tensor, source) if record is None else record

    def known(self, tensor: Tensor) -> int | None:
        """The record of this value, None where there is none yet."""
        value, _ = plain(tensor)
        if value is None:
            return self._unread.get(id(tensor), (None, None))[0]
        found = self._memory.get(value.untyped_storage()._cdata)
        if found is None or (self.versions and found.version != _version(value)):
            return None
        return found.records.get(_geometry(value))

    def changed(self, tensor: Tensor) -> None:
        """``tensor`` was written without a row for it: what is known of its memory no longer holds."""
        value, _ = plain(tensor)
        if value is not None:
            self._memory.pop(value.untyped_storage()._cdata, None)

    def named_gradient(self, name: str, gradient: Tensor) -> None:
        """``gradient`` is that of parameter ``name``; where no recorded call has made it, it gets a row of its own."""
        record = self.known(gradient)
        if record is None:
            source = Source("backward", name.rpartition(".")[0], None)
            value, _ = plain(gradient)
            memory = (
                None
                if value is None
                else self._memory.get(value.untyped_storage()._cdata)
            )
            written = (
                [memory.latest] if memory is not None and memory.latest >= 0 else []
            )  # in place, through a view
            (record,) = self.call(source, "gradient", None, written, (gradient,))
        self.gradients[record] = f"{name}.grad"

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
        each: Sequence[list[int]] | None = None,
    ) -> list[int]:
        """One row for each tensor that a call has written, made, or ``changed`` without saying so; gives their records.
        ``each``: the inputs of each place, where they differ. The arguments stand in the first row."""
        number = self.calls
        self.calls += 1
        key = (source.phase, source.module, operator)
        index = self._counts[key]
        self._counts[key] += 1
        listed = list(inputs)
        head = (number, source.phase, source.module, operator, index, source.again)
        records = []
        made = range(len(written), len(written) + len(outputs))
        for number, tensor in enumerate((*written, *outputs, *changed)):
            inplace = number not in made
            here = each[number % len(each)] if each else listed
            records.append(
                self._row(
                    tensor,
                    head,
                    place + number,
                    overload,
                    source.line,
                    here,
                    arguments,
                    inplace,
                    group,
                    reason,
                )
            )
            arguments = None
        if not records:
            record = len(self.rows)
            self.rows.append(
                (
                    record,
                    *head,
                    0,
                    overload,
                    None,
                    source.line,
                    listed,
                    arguments,
                    None,
                    False,
                    None,
                    None,
                    None,
                    None,
                    None,
                    None,
                    None,
                    group,
                    reason or "no tensor among its results",
                )
            )
        return records

    def _before(self, tensor: Tensor, source: Source) -> int:
        name = self.name_of(tensor)
        operator = (
            "input"
            if name is None
            else "parameter"
            if isinstance(tensor, torch.nn.Parameter)
            else "buffer"
        )
        if name is None and type(tensor.grad_fn).__name__.startswith(
            "CompiledFunction"
        ):
            operator = "compiled"  # the boundary of a compiled region
        value, _ = plain(tensor)
        memory = (
            None if value is None else self._memory.get(value.untyped_storage()._cdata)
        )
        inputs: list[int] = []
        if memory is not None and memory.latest >= 0 and name is None:
            operator, inputs = (
                "alias",
                [memory.latest],
            )  # another view of memory that a call has written
        key = ("", "", operator)
        head = (-1, source.phase, "", operator, self._counts[key], False)
        self._counts[key] += 1
        return self._row(
            tensor, head, 0, None, source.line, inputs, None, False, None, None
        )

    def _row(
        self,
        tensor: Tensor,
        head: tuple[Any, ...],
        place: int,
        overload: str | None,
        line: str | None,
        inputs: list[int],
        arguments: str | None,
        inplace: bool,
        group: str | None,
        reason: str | None,
    ) -> int:
        tensor = unwrapped(tensor)
        value, why = plain(tensor)
        record = len(self.rows)
        view_of = stride = offset = None
        if value is None:
            reason = reason or why
            self._unread[id(tensor)] = (
                record,
                tensor,
            )  # held, so that no other tensor gets its id
        else:
            storage = value.untyped_storage()
            memory = self._memory.get(storage._cdata)
            if memory is None:
                memory = self._memory[storage._cdata] = _Memory(storage)
            geometry = _geometry(value)
            start, _, stride, _ = geometry
            end = _end(value)
            if inplace or (self.versions and memory.version != _version(value)):
                memory.records.clear()
                memory.version = _version(value) if self.versions else 0
            elif memory.start <= start and end <= memory.end:
                view_of = memory.latest
            memory.records[geometry] = record
            if view_of is None:
                memory.latest, memory.start, memory.end = record, start, end
                # what has gaps is kept without them, so no view of it could be found in it
                if not value.is_contiguous() and in_memory_order(value) is None:
                    memory.end, stride = start, value.contiguous().stride()
            offset = start - memory.start
            if value is not tensor and (
                tensor.is_nested or value.shape != tensor.shape
            ):
                stride = None  # values inside it: stored ones, a shard
            self._read(record, value, view_of, memory)
        self.rows.append(
            (
                record,
                *head,
                place,
                overload,
                self.name_of(tensor),
                line,
                inputs,
                arguments,
                view_of,
                inplace,
                tensor.dtype,
                None if tensor.is_nested else tuple(tensor.shape),
                stride,
                offset,
                tensor.device,
                tensor.layout,
                tensor.numel(),
                group,
                reason,
            )
        )
        return record

    def _read(
        self, record: int, value: Tensor, view_of: int | None, memory: _Memory
    ) -> None:
        if view_of is not None:
            if memory.elements is None:
                memory.elements = (
                    {} if memory.base is None else {_elements(*memory.base): view_of}
                )
            elements = _elements(*_geometry(value))
            twin = memory.elements.get(elements) if elements else None
            if (
                twin is not None
            ):  # the same elements in another order: the same statistics
                self.same[record] = twin
                if self.keep is not None and (kept := self.kept.get(view_of)):
                    self.kept[record] = kept
                return
            memory.elements[elements] = record
        else:
            memory.base, memory.elements = _geometry(value), None
        self.statistics.add(record, value)
        if self.keep is not None:
            if view_of is not None and (kept := self.kept.get(view_of)):
                self.kept[record] = kept
            else:
                self.kept[record] = self.keep(record, value)

    def table(self) -> dict[str, list[Any]]:
        """All columns of the step, statistics included."""
        found, histograms = self.statistics.finish()
        columns: dict[str, list[Any]] = {
            name: list(values)
            for name, values in zip(FIELDS, zip(*self.rows, strict=True), strict=True)
        }
        columns["dtype"] = [d and _DTYPES.get(d, str(d)) for d in columns["dtype"]]
        columns["shape"] = [s and list(s) if s != () else [] for s in columns["shape"]]
        columns["stride"] = [None if s is None else list(s) for s in columns["stride"]]
        columns["device"] = [d and str(d) for d in columns["device"]]
        columns["layout"] = [
            v and str(v).removeprefix("torch.") for v in columns["layout"]
        ]
        columns["name"] = [
            self.gradients.get(r, n) for r, n in enumerate(columns["name"])
        ]
        order = [self._root(r) for r in range(len(self.rows))]
        for i, name in enumerate(COLUMNS):
            columns[name] = [
                row[i] if (row := found.get(r)) is not None else None for r in order
            ]
        shapes = [histograms.get(r, (None, None, None)) for r in order]
        for i, name in enumerate(("exponent", "exponents", "sampled")):
            columns[name] = [h[i] for h in shapes]
        for name in ("hash", "blob"):
            columns[name] = [
                self.kept.get(r, {}).get(name) for r in range(len(self.rows))
            ]
        own = [self.own.get(r, (None, None, None)) for r in range(len(self.rows))]
        for i, name in enumerate(("own_l2", "own_max", "own_reason")):
            columns[name] = [o[i] for o in own]
        return columns

    def _root(self, record: int) -> int:
        while record in self.same:
            record = self.same[record]
        return record


def _end(value: Tensor) -> int:
    """One past the last element of the storage that this is a view of."""
    if value.is_contiguous():
        return int(value.storage_offset()) + value.numel()
    last = sum((n - 1) * s for n, s in zip(value.shape, value.stride(), strict=True))
    return int(value.storage_offset()) + (1 + last if value.numel() else 0)


def _elements(
    offset: int, shape: Sequence[int], strides: Sequence[int], dtype: torch.dtype
) -> tuple[Any, ...] | None:
    """Which elements of the storage these are, in whatever order; None where one appears twice."""
    merged: list[tuple[int, int]] = []
    for stride, size in sorted(
        (s, n) for s, n in zip(strides, shape, strict=True) if n != 1
    ):
        if not stride:
            return None
        if merged and merged[-1][0] * merged[-1][1] == stride:
            merged[-1] = (merged[-1][0], merged[-1][1] * size)
        else:
            merged.append((stride, size))
    return dtype, offset, *merged


def _version(value: Tensor) -> int:
    return 0 if value.is_inference() else value._version


def _geometry(value: Tensor) -> Geometry:
    return value.storage_offset(), tuple(value.shape), value.stride(), value.dtype  # type: ignore[return-value]


free = torch.UntypedStorage._free_weak_ref
