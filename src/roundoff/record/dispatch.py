"""See every aten call, forward, backward and optimizer: a ``TorchDispatchMode`` that writes rows into a ``Recorder``."""

from __future__ import annotations

import functools
import os
import weakref
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode, _get_current_dispatch_mode
from torch.utils._pytree import tree_leaves

from roundoff.ops import operators_that, tensors_in
from roundoff.record.collectives import finished, group_of
from roundoff.record.module_paths import Paths
from roundoff.record.recorder import Recorder, Source
from roundoff.record.source_lines import COMPILED, in_compiled, user_line

_COLLECTIVE = (
    "c10d",
    "_c10d_functional",
    "c10d_functional",
    "_c10d_functional_autograd",
)
#: These write running statistics (arguments 3 and 4) without saying so in their schema.
_WRITES_STATISTICS = operators_that("write running statistics")
try:
    _frames: Any = torch._C._dynamo.eval_frame
    _SKIP = _frames._FrameExecStrategy(
        _frames._FrameAction.SKIP, _frames._FrameAction.SKIP
    )
except AttributeError:  # torch before 2.7
    _SKIP = None


@dataclass(frozen=True)
class Operator:
    """What the schema says of an operator."""

    name: str
    overload: str
    written: tuple[int | str, ...]
    collective: bool
    #: works on lists of tensors, each for itself: ``_foreach_add_``, ``_fused_adamw_``
    each: bool

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
        each = name.startswith(("_foreach_", "_fused_"))
        return Operator(shown, full, written, namespace in _COLLECTIVE, each)


class OpMode(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Hands each call to ``recorder`` once it has run. ``beside`` (the shadow) runs first and sees the arguments."""

    def __init__(
        self,
        recorder: Recorder,
        paths: Paths,
        *,
        failed: Callable[[Exception], None],
        beside: Callable[[Any, Any, Any], Any] | None = None,
        arguments: Callable[..., str | None] | None = None,
        wanted: Callable[[str], bool] | None = None,
        noise: Callable[[Any, Any, Any], Callable[[Any], None] | None] | None = None,
    ) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.recorder, self.paths = recorder, paths
        self.failed, self.beside, self.arguments, self.wanted = (
            failed,
            beside,
            arguments,
            wanted,
        )
        self.noise = noise
        self.active = True
        self.between = False  # in a step that is not recorded, but whose results ``noise`` perturbs
        self.seen: Counter[str] = Counter()
        self.phase = "forward"
        self._sequence = 0
        self._made_by: dict[int, Source] = {}
        _modes.add(self)

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        """Whether torch is to wrap every call, so that its compiler does not trace into it; below is what costs less."""
        return _SKIP is None

    @classmethod
    def ignore_compile_internals(cls) -> bool:
        """Compiled regions stay compiled while this is on."""
        return True

    def begin(self, recorder: Recorder) -> None:
        """A new step."""
        self.recorder = recorder
        self._made_by.clear()

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        kwargs = kwargs or {}
        if not self.active or func.namespace == "profiler" or torch._C._is_tracing():
            if (
                self.between
                and func.namespace != "profiler"
                and not torch._C._is_tracing()
            ):
                return self._perturbed(func, args, kwargs)
            return func(*args, **kwargs)  # sizes are part of what torch.jit traces
        beside = inputs = source = operator = None
        try:
            operator = Operator.of(func)
            source = self._source(operator)
            # Of what was compiled, the boundary is recorded.
            if source.line is not COMPILED and (
                self.wanted is None or self.wanted(f"{source.module}/{operator.name}")
            ):
                record_of = self.recorder.record_of
                inputs = [
                    record_of(t, source) for t in tensors_in(args, kwargs.values())
                ]
                text = (
                    None
                    if self.arguments is None
                    else self.arguments(args, kwargs, self.recorder.known)
                )
                if self.beside is not None:
                    beside = self.beside(func, args, kwargs)
        except Exception as error:  # noqa: BLE001 (nothing of ours may stop the program that is recorded)
            self.failed(error)
            return func(*args, **kwargs)
        result = (
            func(*args, **kwargs)
            if self.noise is None
            else self._perturbed(func, args, kwargs)
        )
        if inputs is None or not self.active:
            if operator.written:
                for tensor in tensors_in(args, kwargs.values()):
                    self.recorder.changed(tensor)
            return result
        try:
            self._record(operator, source, inputs, text, args, kwargs, result, beside)
        except Exception as error:  # noqa: BLE001
            self.failed(error)
        return result

    def _perturbed(self, func: Any, args: Any, kwargs: Any) -> Any:
        """What the call gives, with noise in its last bits."""
        perturb = None
        try:
            perturb = None if self.noise is None else self.noise(func, args, kwargs)
        except Exception as error:  # noqa: BLE001
            self.failed(error)
        result = func(*args, **kwargs)
        try:
            if perturb is not None:
                perturb(result)
        except Exception as error:  # noqa: BLE001
            self.failed(error)
        return result

    def _record(
        self,
        operator: Any,
        source: Any,
        inputs: list[int],
        text: str | None,
        args: Any,
        kwargs: Any,
        result: Any,
        beside: Any,
    ) -> None:
        self.seen[operator.overload] += 1
        written: list[Tensor] = []
        if operator.collective:
            if not finished(operator.name, result):
                for tensor in tensors_in((args, result)):
                    self.recorder.changed(tensor)
                self.recorder.call(
                    source,
                    operator.name,
                    operator.overload,
                    inputs,
                    [],
                    group=group_of(args, kwargs),
                    reason="it had not finished when it was recorded",
                )
                return
            if (
                operator.name.startswith("c10d::")
                and operator.name.endswith("_")
                and args
            ):
                written = tensors_in((args[0],))  # which its schema does not say
        for place in operator.written:
            value = (
                kwargs.get(place)
                if isinstance(place, str)
                else args[place]
                if place < len(args)
                else None
            )
            written += tensors_in((value,))
        outputs = tensors_in((result,))
        if written and outputs:
            same = {id(t) for t in written}
            outputs = [t for t in outputs if id(t) not in same]
        changed = (
            tensors_in(args[3:5])
            if operator.name in _WRITES_STATISTICS and args[5]
            else ()
        )
        group = group_of(args, kwargs) if operator.collective else None
        records = self.recorder.call(
            source,
            operator.name,
            operator.overload,
            inputs,
            outputs,
            written=written,
            changed=changed,
            arguments=text,
            group=group,
            each=_by_place(inputs, (*args, *kwargs.values()))
            if operator.each
            else None,
        )
        if beside is not None:
            beside(
                [*written, *outputs],
                records[: len(written) + len(outputs)],
                self.recorder.own,
            )

    @contextmanager
    def paused(self) -> Iterator[None]:
        """What runs inside is not recorded."""
        before = self.active, self.between
        self.active = self.between = False
        try:
            yield
        finally:
            self.active, self.between = before

    def compiled(self, module: Any, path: str, inputs: Any, output: Any) -> None:
        """The hook of every module's forward: one that ``torch.compile`` has compiled is a call of its own."""
        if not self.active or not hasattr(module, "_orig_mod"):
            return
        if self.wanted is not None and not self.wanted(f"{path}/compiled"):
            return
        try:
            source = Source("forward", path, user_line(2))
            with torch.no_grad(), self.paused():
                self._boundary(source, module, inputs, output)
        except Exception as error:  # noqa: BLE001
            self.failed(error)

    def triton(self, name: str, tensors: Sequence[Tensor]) -> None:
        """A kernel has been launched on these; which of them it wrote is not known, so all have rows."""
        if (
            not self.active or _get_current_dispatch_mode() is not self
        ):  # inside an operator, which has a row
            return
        try:
            phase = (
                "backward" if torch._C._current_graph_task_id() != -1 else self.phase
            )
            source = Source(phase, self.paths.current(), user_line(3))
            if self.wanted is None or self.wanted(f"{source.module}/triton::{name}"):
                with torch.no_grad(), self.paused():
                    records = [self.recorder.record_of(t, source) for t in tensors]
                    self.recorder.call(
                        source,
                        f"triton::{name}",
                        None,
                        records,
                        [],
                        written=tensors,
                        reason="a Triton kernel: which arguments it writes is not known",
                    )
        except Exception as error:  # noqa: BLE001
            self.failed(error)

    def _boundary(self, source: Source, module: Any, inputs: Any, output: Any) -> None:
        records = [
            self.recorder.record_of(t, source)
            for t in tensors_in((tree_leaves(inputs),))
        ]
        outputs = tensors_in((tree_leaves(output),))
        for tensor in (
            *outputs,
            *tensors_in((tree_leaves(inputs),)),
            *module.buffers(),
        ):
            self.recorder.changed(tensor)
        reason = "compiled: its operators are not seen, --eager runs them uncompiled"
        self.recorder.call(source, "compiled", None, records, outputs, reason=reason)

    def _source(self, operator: Operator) -> Source:
        if torch._C._current_graph_task_id() != -1:
            return self._backward(operator)
        phase = "collective" if operator.collective else self.phase
        source = Source(phase, self.paths.current(), user_line(3))
        sequence = torch.autograd._get_sequence_nr()  # type: ignore[attr-defined]
        if (
            sequence != self._sequence
        ):  # the call below made a node of the graph: its backward belongs to it
            self._made_by[sequence - 1] = source
            self._sequence = sequence
        return source

    def _backward(self, operator: Operator) -> Source:
        phase = "collective" if operator.collective else "backward"
        path = self.paths.current()
        if path:  # a checkpoint computes its forward again
            return Source(phase, path, user_line(4), again=True)
        node: Any = torch._C._current_autograd_node()
        if node is None:
            return Source(phase, "", None)
        if node.name().startswith("CompiledFunction") and in_compiled():
            return Source(phase, "", COMPILED)
        made = self._made_by.get(node._sequence_nr())
        if made is not None:
            return Source(phase, made.module, made.line)
        variable = getattr(node, "variable", None)
        name = None if variable is None else self.paths.name_of(variable)
        return Source(phase, (name or "").rpartition(".")[0], None)


if _SKIP is not None:  # the compiler leaves this function, and what it calls, alone
    _frames.set_code_exec_strategy(OpMode.__torch_dispatch__.__code__, _SKIP)


_modes: weakref.WeakSet[OpMode] = weakref.WeakSet()


def _forked() -> None:
    """A data loader's worker, forked in a step, records nothing: nobody would read it, and OpenMP may hang there."""
    for mode in _modes:
        mode.active = mode.between = False


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_forked)


def _by_place(inputs: list[int], values: Sequence[Any]) -> list[list[int]]:
    """The inputs of each place of a call on lists: the tensors at this place, and those that stand alone."""
    lists, alone, position = [], [], 0
    for value in values:
        count = len(tensors_in((value,)))
        part = inputs[position : position + count]
        position += count
        if isinstance(value, Tensor):
            alone += part
        elif part:
            lists.append(part)
    return [
        [part[i] for part in lists if i < len(part)] + alone
        for i in range(max(map(len, lists), default=0))
    ]
