"""See every aten call, forward, backward and optimizer: a ``TorchDispatchMode`` that writes rows into a ``Recorder``."""

from __future__ import annotations

import functools
import os
import weakref
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from roundoff.capture.paths import Paths
from roundoff.capture.recorder import Recorder, Source, user_line

_COLLECTIVE = ("c10d", "_c10d_functional", "c10d_functional", "_c10d_functional_autograd")
#: These write running statistics (arguments 3 and 4) without saying so in their schema.
_BATCH_NORM = ("native_batch_norm", "cudnn_batch_norm", "miopen_batch_norm")


@dataclass(frozen=True)
class Operator:
    """What the schema says of an operator."""

    name: str
    overload: str
    written: tuple[int | str, ...]
    collective: bool

    @staticmethod
    @functools.cache
    def of(func: Any) -> Operator:
        schema = func._schema
        namespace, _, name = schema.name.partition("::")
        full = f"{namespace}.{name}.{schema.overload_name or 'default'}"
        written = tuple(
            a.name if a.kwarg_only else i
            for i, a in enumerate(schema.arguments)
            if a.alias_info is not None and a.alias_info.is_write
        )
        shown = name if namespace == "aten" else f"{namespace}::{name}"
        return Operator(shown, full, written, namespace in _COLLECTIVE)


class OpMode(TorchDispatchMode):
    """Hands each call to ``recorder`` once it has run. ``beside`` (the shadow) runs first and sees the arguments."""

    def __init__(
        self, recorder: Recorder, paths: Paths, *, failed: Callable[[Exception], None],
        beside: Callable[[Any, Any, Any], Any] | None = None, arguments: Callable[..., str | None] | None = None,
        wanted: Callable[[str], bool] | None = None,
    ) -> None:  # fmt: skip
        super().__init__()
        self.recorder, self.paths = recorder, paths
        self.failed, self.beside, self.arguments, self.wanted = failed, beside, arguments, wanted
        self.active = True
        self.seen: Counter[str] = Counter()
        self.phase = "forward"
        self._sequence = 0
        self._made_by: dict[int, Source] = {}
        _modes.add(self)

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        """Leaves out a wrapper around every call that keeps the compiler from tracing into this class."""
        return False

    def begin(self, recorder: Recorder) -> None:
        """A new step."""
        self.recorder = recorder
        self._made_by.clear()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if not self.active or func.namespace == "profiler":
            return func(*args, **kwargs)
        beside = inputs = source = operator = None
        try:
            operator = Operator.of(func)
            source = self._source(operator)
            if self.wanted is None or self.wanted(f"{source.module}/{operator.name}"):
                record_of = self.recorder.record_of
                inputs = [record_of(t, source) for t in tensors_in(args, kwargs.values())]
                text = None if self.arguments is None else self.arguments(args, kwargs, self.recorder.known)
                if self.beside is not None:
                    beside = self.beside(func, args, kwargs)
        except Exception as error:  # nothing of ours may stop the program that is recorded
            self.failed(error)
            return func(*args, **kwargs)
        result = func(*args, **kwargs)
        if inputs is None or not self.active:
            return result
        try:
            self._record(func, operator, source, inputs, text, args, kwargs, result, beside)
        except Exception as error:
            self.failed(error)
        return result

    def _record(
        self, func: Any, operator: Any, source: Any, inputs: list[int], text: str | None, args: Any, kwargs: Any,
        result: Any, beside: Any,
    ) -> None:  # fmt: skip
        self.seen[operator.overload] += 1
        written: list[Tensor] = []
        for place in operator.written:
            value = kwargs.get(place) if isinstance(place, str) else args[place] if place < len(args) else None
            written += tensors_in((value,))
        outputs = tensors_in((result,))
        if written:
            outputs = [t for t in outputs if not any(t is w for w in written)]
        if operator.name in _BATCH_NORM:
            for tensor in tensors_in(args[3:5]):
                self.recorder.changed(tensor)
        group = _group(args, kwargs) if operator.collective else None
        records = self.recorder.call(
            source, operator.name, operator.overload, inputs, outputs, written=written, arguments=text, group=group
        )
        if beside is not None:
            beside([*written, *outputs], records, self.recorder.own)

    def _source(self, operator: Operator) -> Source:
        if torch._C._current_graph_task_id() != -1:
            return self._backward(operator)
        phase = "collective" if operator.collective else self.phase
        source = Source(phase, self.paths.current(), user_line(3))
        sequence = torch.autograd._get_sequence_nr()  # type: ignore[attr-defined]
        if sequence != self._sequence:  # the call below made a node of the graph: its backward belongs to it
            self._made_by[sequence - 1] = source
            self._sequence = sequence
        return source

    def _backward(self, operator: Operator) -> Source:
        phase = "collective" if operator.collective else "backward"
        path = self.paths.current()
        if path:  # a checkpoint computes its forward again
            return Source(phase, path, user_line(4))
        node: Any = torch._C._current_autograd_node()
        if node is None:
            return Source(phase, "", None)
        made = self._made_by.get(node._sequence_nr())
        if made is not None:
            return Source(phase, made.module, made.line)
        name = self.recorder.names.get(id(getattr(node, "variable", None)), "")
        return Source(phase, name.rpartition(".")[0], None)


_modes: weakref.WeakSet[OpMode] = weakref.WeakSet()


def _forked() -> None:
    """A data loader's worker, forked in a step, records nothing: nobody would read it, and OpenMP may hang there."""
    for mode in _modes:
        mode.active = False


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_forked)


def tensors_in(*groups: Any) -> list[Tensor]:
    """The tensors among arguments and in lists of them, which is as deep as a schema nests them."""
    found: list[Tensor] = []
    for group in groups:
        for value in group:
            if isinstance(value, Tensor):
                found.append(value)
            elif isinstance(value, (list, tuple)):
                found += [v for v in value if isinstance(v, Tensor)]
    return found


def _group(args: Any, kwargs: Any) -> str | None:
    """The ranks of a collective, ``"0,1"``; None where its group cannot be asked."""
    import torch.distributed as dist

    for value in tree_leaves((args, kwargs)):
        try:
            if isinstance(value, str):
                value = torch.distributed.distributed_c10d._resolve_process_group(value)  # type: ignore[attr-defined]
            elif isinstance(value, torch.ScriptObject):
                value = dist.ProcessGroup.unbox(value)
            if isinstance(value, dist.ProcessGroup):
                return ",".join(map(str, dist.get_process_group_ranks(value)))
        except (RuntimeError, ValueError, TypeError, AttributeError):
            continue
    return None
