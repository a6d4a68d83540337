"""What a pass computes and moves: every kernel call that torch dispatches, counted."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim.optimizer import (
    register_optimizer_step_post_hook,
    register_optimizer_step_pre_hook,
)
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from roundoff.advise.operation_counts import (
    KernelCall,
    Work,
    count_work,
    elementwise,
    reduction,
)
from roundoff.ops import base, facts, operators_that
from roundoff.record import Paths, user_line


@dataclass(frozen=True, slots=True, kw_only=True)
class OperatorCount:
    """The calls of one operator in one module and phase, added up.

    Attributes:
        operator: the kernel, as torch dispatches it.
        module: the path of the module that called it, "" for the model itself.
        phase: forward, backward or optimizer.
        dtype: of its first floating-point tensor; "" without one.
        shape: the results' shape in the first call, as text.
        line: the user's source line of the first call, or None.
        calls: how many.
        macs: multiply-accumulates.
        flops: operations, two for each multiply-accumulate.
        bytes_read: distinct elements of the operands, once a call.
        bytes_written: elements of the results.
        kind: of the operator, by the table of operators.
        is_counted: False where no formula is known for it.
    """

    operator: str
    module: str
    phase: str
    dtype: str
    shape: str
    line: str | None
    calls: int
    macs: float
    flops: float
    bytes_read: float
    bytes_written: float
    kind: str
    is_counted: bool

    @property
    def bytes_moved(self) -> float:
        """Bytes read and written."""
        return self.bytes_read + self.bytes_written

    @property
    def intensity(self) -> float | None:
        """FLOPs a byte moved; None where nothing is moved."""
        return self.flops / self.bytes_moved if self.bytes_moved else None


@dataclass(frozen=True, slots=True)
class UnknownOperator:
    """An operator without a formula: its FLOPs are in no total."""

    operator: str
    calls: int


@dataclass(frozen=True, slots=True)
class Counts:
    """The operators of one pass, the most FLOPs first, and those without a formula.

    1 MAC is 2 FLOP. Bytes are what must be moved if every operand were read once from
    memory and every result written once: views move nothing.
    """

    rows: tuple[OperatorCount, ...]
    unknown: tuple[UnknownOperator, ...]

    @property
    def macs(self) -> float:
        """Multiply-accumulates of all operators."""
        return sum(row.macs for row in self.rows)

    @property
    def flops(self) -> float:
        """Operations of all operators."""
        return sum(row.flops for row in self.rows)

    @property
    def bytes_moved(self) -> float:
        """Bytes read and written by all operators."""
        return sum(row.bytes_moved for row in self.rows)


def count(run: Callable[[], object], model: nn.Module) -> Counts:
    """Count what ``run()`` computes with ``model``: forward, backward and optimizer.

    Fused inference paths of whole layers are turned off meanwhile, so that what they
    do is seen; their values are the same up to rounding.

    >>> layer = nn.Linear(4, 2)
    >>> counts = count(lambda: layer(torch.zeros(3, 4)), layer)
    >>> counts.macs, counts.flops
    (24.0, 54.0)
    """
    paths = Paths(model)
    counter = _Counter(paths)
    with ExitStack() as stack:
        stack.enter_context(without_fast_paths())
        stack.enter_context(paths.follow())
        stack.enter_context(counter.phases())
        stack.enter_context(counter)
        run()
    return counter.counts()


@contextmanager
def without_fast_paths() -> Iterator[None]:
    """Keep transformer layers from their fused inference kernels."""
    backend: Any = torch.backends
    before = backend.mha.get_fastpath_enabled()
    backend.mha.set_fastpath_enabled(False)
    try:
        yield
    finally:
        backend.mha.set_fastpath_enabled(before)


@dataclass
class _Sums:
    """What is added up for one operator in one module and phase."""

    shape: str
    line: str | None
    kind: str
    is_counted: bool
    calls: int = 0
    macs: float = 0.0
    flops: float = 0.0
    bytes_read: float = 0.0
    bytes_written: float = 0.0


@dataclass(frozen=True, slots=True)
class _Place:
    """Where a call stands: phase, path of the module, the user's line."""

    phase: str
    module: str
    line: str | None


_AUTOGRAD: Any = torch.autograd
_NOWHERE = _Place("backward", "", None)


class _Counter(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Adds up work and traffic of every kernel call while it is open."""

    def __init__(self, paths: Paths) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._paths = paths
        self._sums: dict[tuple[str, str, str, str], _Sums] = {}
        self._unknown: Counter[str] = Counter()
        self._step_depth = 0
        self._forward_places: dict[int, _Place] = {}

    def __torch_dispatch__(
        self,
        func: Any,
        types: Sequence[type],
        args: tuple[Any, ...] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        kwargs = kwargs or {}
        place = self._place()
        result = func(*args, **kwargs)
        if func.namespace != "profiler":
            self._add(func, args, kwargs, result, place)
        return result

    @contextmanager
    def phases(self) -> Iterator[None]:
        """Know the steps of optimizers while this is open."""
        before = register_optimizer_step_pre_hook(self._begin)
        after = register_optimizer_step_post_hook(self._end)
        try:
            yield
        finally:
            before.remove()
            after.remove()

    def counts(self) -> Counts:
        """Return the sums as rows, the most FLOPs first."""
        rows = [
            _row(key, sums) for key, sums in self._sums.items() if _does_anything(sums)
        ]
        rows.sort(key=lambda row: (-row.flops, -row.bytes_moved))
        unknown = [UnknownOperator(*item) for item in self._unknown.most_common()]
        return Counts(tuple(rows), tuple(unknown))

    def _begin(self, *_: Any) -> None:
        self._step_depth += 1

    def _end(self, *_: Any) -> None:
        self._step_depth -= 1

    def _place(self) -> _Place:
        """Return phase and module of the call that begins.

        A backward kernel belongs to the module whose forward call made its node of the
        graph: both have the number that autograd has counted.
        """
        if self._step_depth:
            return _Place("optimizer", "", None)
        node: Any = torch._C._current_autograd_node()
        if node is not None:
            return self._forward_places.get(node._sequence_nr(), _NOWHERE)
        place = _Place("forward", self._paths.current(), user_line(3))
        number = _AUTOGRAD._get_sequence_nr() - 1
        self._forward_places.setdefault(number, replace(place, phase="backward"))
        return place

    def _add(
        self,
        func: Any,
        args: tuple[Any, ...],
        kwargs: Mapping[str, Any],
        result: Any,
        place: _Place,
    ) -> None:
        call = _kernel_call(func, args, kwargs, result)
        name = func.overloadpacket.__name__
        operator = base(name)
        is_view = _is_view(func, call)
        work = Work() if is_view else _work_of(operator, func, call)
        if work is None:
            self._unknown[operator] += 1
        key = (operator, place.module, place.phase, _dtype_of(call))
        sums = self._sums.get(key)
        if sums is None:
            kind = _kind_of(operator)
            sums = _Sums(_shape_of(call), place.line, kind, work is not None)
            self._sums[key] = sums
        sums.calls += 1
        if work is not None:
            sums.macs += work.macs
            sums.flops += work.flops
        if not is_view:
            sums.bytes_read += _bytes_read(operator, call)
            sums.bytes_written += _bytes_written(operator, call)


def _row(key: tuple[str, str, str, str], sums: _Sums) -> OperatorCount:
    operator, module, phase, dtype = key
    return OperatorCount(
        operator=operator,
        module=module,
        phase=phase,
        dtype=dtype,
        shape=sums.shape,
        line=sums.line,
        calls=sums.calls,
        macs=float(sums.macs),
        flops=float(sums.flops),
        bytes_read=float(sums.bytes_read),
        bytes_written=float(sums.bytes_written),
        kind=sums.kind,
        is_counted=sums.is_counted,
    )


def _does_anything(sums: _Sums) -> bool:
    return bool(sums.flops or sums.bytes_read or sums.bytes_written)


def _kernel_call(
    func: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any], result: Any
) -> KernelCall:
    schema = func._schema.arguments
    arguments = {argument.name: argument.default_value for argument in schema}
    names = [argument.name for argument in schema]
    arguments |= dict(zip(names, args, strict=False))
    arguments |= dict(kwargs)
    results = [leaf for leaf in tree_leaves(result) if isinstance(leaf, Tensor)]
    return KernelCall(arguments, results)


def _kind_of(operator: str) -> str:
    """Return the kind of a kernel, as the table of operators names it."""
    work = facts(operator).work
    if work is None:
        return facts(operator).kind
    return _KINDS_OF_WORK.get(work, facts(operator).kind)


#: The kind of what a formula counts, where the kernel's name has none of its own.
_KINDS_OF_WORK = {
    "product": "matmul",
    "added product": "matmul",
    "outer product": "matmul",
    "product of three": "matmul",
    "linear": "linear",
    "convolution": "conv",
    "convolution's gradient": "conv",
    "attention": "attention",
    "attention's gradient": "attention",
    "recurrent layer": "rnn",
    "recurrent layer's gradient": "rnn",
    "stacked recurrent layers": "rnn",
    "stacked recurrent layers' gradient": "rnn",
    "recurrent cell": "rnn",
    "recurrent cell's gradient": "rnn",
    "norm of rows": "normalization",
    "root mean square norm": "normalization",
    "batch norm": "normalization",
    "norm by running statistics": "normalization",
    "norm's gradient": "normalization",
    "softmax": "softmax",
    "softmax's gradient": "softmax",
    "pooled windows": "reduction",
}


def _work_of(operator: str, func: Any, call: KernelCall) -> Work | None:
    """Return the operations of a call; None where no formula is known."""
    formula = facts(operator).work
    if formula is not None:
        return count_work(formula, call)
    if operator in _without_arithmetic():
        return Work()
    if torch.Tag.reduction in func.tags:
        return reduction(call)
    if torch.Tag.pointwise in func.tags or func._schema.name.startswith(FOREACH):
        return elementwise(call)
    return None


#: Kernels on lists of tensors work element by element.
FOREACH = "aten::_foreach_"


def _without_arithmetic() -> frozenset[str]:
    return (
        operators_that("move values")
        | operators_that("create")
        | operators_that("draw")
        | operators_that("look up")
        | operators_that("ask about values")
        | operators_that("act on the program")
        | operators_that("leave memory unwritten")
    )


def _is_view(func: Any, call: KernelCall) -> bool:
    """Return True where all results lie in an operand's memory and nothing is written."""
    if func._schema.is_mutable or not call.results:
        return False
    memory = {_memory(tensor) for tensor in call.operands}
    return all(_memory(result) in memory for result in call.results)


def _memory(tensor: Tensor) -> int:
    if tensor.layout is not torch.strided:
        return id(tensor)
    return tensor.untyped_storage().data_ptr() or id(tensor)


def _bytes_read(operator: str, call: KernelCall) -> float:
    """Return the bytes of the operands that are read, each tensor once."""
    operator_facts = facts(operator)
    skipped = _unread(operator)
    total = 0.0
    seen: set[tuple[Any, ...]] = set()
    for place, value in enumerate(call.arguments.values()):
        if place == skipped:
            continue
        for tensor in [leaf for leaf in tree_leaves(value) if isinstance(leaf, Tensor)]:
            key = (_memory(tensor), tensor.storage_offset(), tensor.shape)
            if key in seen:
                continue
            seen.add(key)
            is_partial = place == 0 and operator_facts.reads is not None
            size = distinct_elements(tensor)
            if is_partial:
                size = min(size, _elements_looked_up(operator_facts.reads or "", call))
            total += size * tensor.element_size()
    return total


def _elements_looked_up(reads: str, call: KernelCall) -> int:
    if reads == "one element of each row":
        return call.tensor("target").numel()
    return call.elements


def _unread(operator: str) -> int | None:
    """Return the place of an operand that is not read: it is overwritten, or only its
    shape counts."""
    if operator in operators_that("ignore their first operand"):
        return 0
    return facts(operator).shape_only


def _bytes_written(operator: str, call: KernelCall) -> float:
    if operator in operators_that("leave memory unwritten"):
        return 0.0
    if call.results:
        written = call.results
        if operator in operators_that("return a workspace"):
            written = [tensor for tensor in written if tensor.is_floating_point()]
        return sum(tensor.numel() * tensor.element_size() for tensor in written)
    first = next(iter(call.arguments.values()), None)
    lists = [leaf for leaf in tree_leaves(first) if isinstance(leaf, Tensor)]
    return sum(tensor.numel() * tensor.element_size() for tensor in lists)


def distinct_elements(tensor: Tensor) -> int:
    """Return how many elements a tensor has in memory: an expanded axis has one."""
    if tensor.layout is not torch.strided:
        return tensor.numel()
    elements = 1
    for size, stride in zip(tensor.shape, tensor.stride(), strict=True):
        elements *= size if stride else min(size, 1)
    return elements


def _dtype_of(call: KernelCall) -> str:
    tensors = [*call.operands, *call.results]
    for tensor in tensors:
        if tensor.is_floating_point() or tensor.is_complex():
            return str(tensor.dtype).removeprefix("torch.")
    return ""


def _shape_of(call: KernelCall) -> str:
    if not call.results:
        return ""
    return "×".join(map(str, call.results[0].shape))
