"""What a recorded call computes inside, by torch's own decomposition of its operator."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from roundoff.compare.judging.divergence import EXACT
from roundoff.compare.records.recorded_rows import RecordedRow
from roundoff.compare.records.value_sketch import sketch_of_tensor
from roundoff.compare.values.value_flow import Flow, Value
from roundoff.errors import RunError
from roundoff.ops import Refusal, base, checked_arguments, may_be_opened, overload_of

#: What checks, kernels and torch's decompositions raise of a call.
FAILURES = (
    Refusal,
    RunError,
    RuntimeError,
    TypeError,
    ValueError,
    LookupError,
    ArithmeticError,
    AssertionError,
)
#: A call that computes more steps inside is left whole.
MOST = 2000


class _Watch(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Notes every tensor that is made, what made it, and of which others."""

    def __init__(self, known: dict[int, int], first_key: int) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.keys = known
        self.next_key = first_key
        self.kept: list[Tensor] = []
        self.steps: list[tuple[int, str, tuple[int, ...], Tensor]] = []

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        # else torch imports its compiler with the first call, which takes seconds;
        # nothing here is compiled
        return False

    def __torch_dispatch__(
        self,
        func: Any,
        types: Sequence[type],
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        result = func(*args, **kwargs or {})
        leaves = tree_leaves((args, kwargs))
        read = tuple(
            self.keys[id(leaf)]
            for leaf in leaves
            if isinstance(leaf, Tensor) and id(leaf) in self.keys
        )
        for leaf in tree_leaves(result):
            if isinstance(leaf, Tensor) and len(self.steps) < MOST:
                self._note(leaf, str(func._schema.name), read)
        return result

    def _note(self, made: Tensor, name: str, read: tuple[int, ...]) -> None:
        self.kept.append(made)  # so that no other tensor gets its id
        operator = name.rpartition("::")[2]
        self.keys[id(made)] = self.next_key
        self.steps.append((self.next_key, base(operator), read, made.detach().clone()))
        self.next_key += 1


def open_calls(flow: Flow, keys: Sequence[int]) -> bool:
    """Add what the calls of these values compute inside; return True where any was added.

    Calls whose tensors were not kept, and those that have no decomposition, stay whole.
    """
    opened = False
    done: set[int] = set()
    for key in keys:
        value = flow.values[key]
        if value.inner or not value.row.is_call or value.row.call in done:
            continue
        done.add(value.row.call)
        opened |= _open(flow, value.row)
    return opened


def _open(flow: Flow, row: RecordedRow) -> bool:
    first = flow.first.get(row.call)
    if first is None or first.overload is None or first.arguments is None:
        return False
    if flow.step.tensors is None or row.base_operator in EXACT:
        return False
    if row.call in flow.opened:
        return False
    try:
        func = overload_of(first.overload)
        if not may_be_opened(func):
            return False
        decomposed = _decomposition(func)
        if decomposed is None:
            return False
        keys: dict[int, int] = {}
        held: list[Tensor] = []

        def value(record: int) -> Tensor:
            tensor = flow.tensor(record) if record in flow.values else None
            if tensor is None:
                raise RunError("one of its inputs was not stored")
            copied = tensor.detach().clone()
            held.append(copied)
            keys[id(copied)] = record
            return copied

        args, kwargs = checked_arguments(func, first.arguments, value)
        watch = _Watch(keys, flow.next_key)
        with torch.no_grad(), watch:
            result = decomposed(*args, **kwargs)
    except FAILURES:
        # it stays whole: the region is larger, and nothing is lost
        return False
    return _enter(flow, row, watch, result)


def run_decomposed(
    row: RecordedRow, tensor_of: Callable[[int], Tensor]
) -> list[Tensor | None] | None:
    """Return what a call makes, computed by its decomposition; None where it cannot be.

    ``row`` is the call's first one. For kernels that know one format alone.
    """
    if row.overload is None or row.arguments is None:
        return None
    try:
        func = overload_of(row.overload)
        decomposed = _decomposition(func) if may_be_opened(func) else None
        if decomposed is None:
            return None
        args, kwargs = checked_arguments(func, row.arguments, tensor_of)
        with torch.no_grad():
            result = decomposed(*args, **kwargs)
    except FAILURES:
        return None
    results = result if isinstance(result, tuple | list) else [result]
    return [each if isinstance(each, Tensor) else None for each in results]


def _enter(flow: Flow, row: RecordedRow, watch: _Watch, result: Any) -> bool:
    rows = flow.rows_of(row.call)
    inner = [
        Value(
            key,
            rows[0],
            operator,
            read,
            sketch_of_tensor(tensor),
            (rows[0].record - 1, place + 1),
            inner=True,
            tensor=tensor,
        )
        for place, (key, operator, read, tensor) in enumerate(watch.steps)
    ]
    results: dict[int, int] = {}
    returned = result if isinstance(result, tuple | list) else [result]
    for each in rows:
        place = each.place or 0
        if place < len(returned) and isinstance(returned[place], Tensor):
            key = watch.keys.get(id(returned[place]))
            if key is not None and key not in flow.values:
                results[each.record] = key
    if not results or not _is_larger(inner, row):
        return False
    flow.insert(inner, results)
    return True


def _is_larger(inner: Sequence[Value], row: RecordedRow) -> bool:
    """Return True where several steps that compute lead from the call's inputs to its end."""
    steps = [value for value in inner if value.computes]
    read = {key for value in inner for key in value.inputs}
    return len(steps) > 1 and bool(read & set(row.inputs))


def _decomposition(func: Any) -> Callable[..., Any] | None:
    """Return a function of the same arguments made of simpler operators; None without one."""
    from torch._decomp import decomposition_table

    packet = func.overloadpacket
    if packet is torch.ops.aten.mkldnn_rnn_layer:
        return _lstm_layer
    if packet is torch.ops.aten.addmm:
        return _addmm
    table: Any = decomposition_table
    return table.get(func)  # type: ignore[no-any-return]


def _addmm(
    bias: Tensor, one: Tensor, other: Tensor, *, beta: float = 1, alpha: float = 1
) -> Tensor:
    product = torch.mm(one, other)
    if alpha != 1:
        product = product * alpha
    return product + (bias if beta == 1 else bias * beta)


def _lstm_layer(
    x: Tensor,
    weight: Tensor,
    recurrent: Tensor,
    bias: Tensor,
    recurrent_bias: Tensor,
    hidden: Tensor,
    cell: Tensor,
    reverse: bool,
    batch_sizes: Sequence[int],
    mode: int,
    *_others: Any,
) -> tuple[Tensor, Tensor, Tensor]:
    """An LSTM layer over time, gates i, f, g, o (as torch.nn.LSTM documents them).

    One direction of it: of a network of two directions each has a call of its own.
    """
    if mode != 2 or batch_sizes:
        raise ValueError("not a single LSTM layer")
    steps = list(x.unbind(0))
    outputs: list[Tensor] = []
    if reverse:
        steps.reverse()
    for step in steps:
        gates = torch.mm(step, weight.t()) + bias
        gates = gates + (torch.mm(hidden, recurrent.t()) + recurrent_bias)
        i, f, g, o = gates.chunk(4, 1)
        cell = torch.sigmoid(f) * cell + torch.sigmoid(i) * torch.tanh(g)
        hidden = torch.sigmoid(o) * torch.tanh(cell)
        outputs.append(hidden)
    if reverse:
        outputs.reverse()
    return torch.stack(outputs), hidden, cell
