"""See every aten call, forward, backward and optimizer: a ``TorchDispatchMode`` that
writes rows into a ``Recorder``."""

from __future__ import annotations

import functools
import os
import sys
import threading
import weakref
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode, _get_current_dispatch_mode
from torch.utils._pytree import tree_leaves

from roundoff.errors import warn
from roundoff.ops import operators_that, tensors_in
from roundoff.record.collectives import finished, group_of
from roundoff.record.gradient_work import GradientWork
from roundoff.record.graph_capture import WARNING, in_graph_capture
from roundoff.record.module_paths import Paths
from roundoff.record.other_threads import ThreadPart, Turn, kind_of
from roundoff.record.recorder import Recorder, Source
from roundoff.record.skipped_frames import CAN_SKIP, skipped_by_compiler
from roundoff.record.source_lines import (
    COMPILED,
    defined_at,
    in_compiled,
    prepares_gradients,
    user_place,
)

_COLLECTIVE = (
    "c10d",
    "_c10d_functional",
    "c10d_functional",
    "_c10d_functional_autograd",
)
#: These write running statistics (arguments 3 and 4) without saying so in their schema.
#: Operators that write in place are named otherwise.
_MADE_ALIKE = operators_that("ignore their first operand")
_WRITES_STATISTICS = operators_that("write running statistics")

#: Takes what a call has made, their records, and the dictionary of own errors.
Compare = Callable[[Sequence[Tensor], Sequence[int], dict[int, Any]], None]


@dataclass(frozen=True)
class OperatorSchema:
    """An operator as its schema describes it.

    Attributes:
        name: as a site shows it.
        overload: ``aten.add.Tensor``.
        written: positions and names of the arguments that it writes.
        collective: it communicates.
        each: it works on lists of tensors, each for itself: ``_foreach_add_``,
            ``_fused_adamw_``, the unscaling of gradients.
        kernel: file and line of the kernel, for one that the user has written in Python.
        is_view: it hands on memory, and reads none.
        is_made_alike: of its first tensor it takes the shape and format alone.
    """

    name: str
    overload: str
    written: tuple[int | str, ...]
    collective: bool
    each: bool
    kernel: str | None = None
    is_view: bool = False
    is_made_alike: bool = False

    @staticmethod
    @functools.cache
    def of(func: Any) -> OperatorSchema:
        schema = func._schema
        namespace, _, name = schema.name.partition("::")
        written = tuple(
            argument.name if argument.kwarg_only else position
            for position, argument in enumerate(schema.arguments)
            if argument.alias_info is not None and argument.alias_info.is_write
        )
        overload = f"{namespace}.{name}.{schema.overload_name or 'default'}"
        return OperatorSchema(
            name=name if namespace == "aten" else f"{namespace}::{name}",
            overload=overload,
            written=written,
            collective=namespace in _COLLECTIVE,
            each=name.startswith(("_foreach_", "_fused_", "_amp_foreach_")),
            kernel=_kernel_line(schema.name),
            is_view=any(
                returned.alias_info is not None and not returned.alias_info.is_write
                for returned in schema.returns
            ),
            is_made_alike=namespace == "aten" and name in _MADE_ALIKE,
        )

    def at(
        self, line: str | None, callers: str | None
    ) -> tuple[str | None, str | None]:
        """Return the line of a call, with that of its kernel where the user wrote it.

        And the callers as they are.
        """
        if self.kernel is None or line is COMPILED:
            return line, callers
        return ", ".join(filter(None, (line, f"kernel {self.kernel}"))), callers


def _kernel_line(name: str) -> str | None:
    """Return where a custom operator in Python (``torch.library``) is defined."""
    module: Any = sys.modules.get("torch._library.custom_ops")
    definition = getattr(module, "OPDEFS", {}).get(name)
    return defined_at(getattr(definition, "_init_fn", None))


class _RunningCall:
    """A call that is about to run or has just run.

    ``inputs`` are the records of its tensors, None where it is not recorded; ``compare``
    is the shadow's.
    """

    __slots__ = (
        "args",
        "arguments",
        "compare",
        "inputs",
        "kwargs",
        "on_gradients",
        "schema",
        "source",
    )

    def __init__(
        self,
        schema: OperatorSchema,
        source: Source,
        args: Sequence[Any],
        kwargs: Mapping[str, Any],
    ) -> None:
        self.schema = schema
        self.source = source
        self.args = args
        self.kwargs = kwargs
        self.inputs: list[int] | None = None
        self.arguments: str | None = None
        self.compare: Compare | None = None
        #: it works on gradients, between the backward pass and the optimizer
        self.on_gradients = False

    def tensors(self) -> list[Tensor]:
        """Return the tensors among the arguments."""
        return tensors_in(self.args, self.kwargs.values())

    def read(self) -> list[Tensor]:
        """Return the tensors whose values it reads, as far as its schema says so.

        One that is given for its shape and format, as to ``empty_like``, is none.
        """
        tensors = self.tensors()
        if self.schema.is_made_alike:
            tensors = tensors[1:]
        return _without(tensors, self.written())

    def written(self) -> list[Tensor]:
        """Return the tensors that it writes."""
        tensors = _received_in_place(self) if self.schema.collective else []
        for place in self.schema.written:
            tensors += tensors_in((self._argument(place),))
        return tensors

    def written_unseen(self) -> Sequence[Tensor]:
        """Running statistics that it writes although its schema does not say so."""
        if self.schema.name in _WRITES_STATISTICS and self.args[5]:
            return tensors_in(self.args[3:5])
        return ()

    def _argument(self, place: int | str) -> Any:
        if isinstance(place, str):
            return self.kwargs.get(place)
        return self.args[place] if place < len(self.args) else None


class OpMode(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Hands each call to ``recorder`` once it has run.

    Args:
        recorder: of the step that runs now.
        paths: which module runs.
        failed: told of a fault of the recording.
        shadow: runs a call before it runs itself, and sees the arguments.
        describe: writes the arguments of a call as text.
        is_wanted: says which ``module/operator`` to record; all when None.
        noise: gives what perturbs the result of a call.
    """

    def __init__(
        self,
        recorder: Recorder,
        paths: Paths,
        *,
        failed: Callable[[Exception], None],
        shadow: Callable[[Any, Any, Any], Compare] | None = None,
        describe: Callable[..., str | None] | None = None,
        is_wanted: Callable[[str], bool] | None = None,
        noise: Callable[[Any, Any, Any], Callable[[Any], None] | None] | None = None,
    ) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.recorder = recorder
        self.paths = paths
        self.failed = failed
        self.shadow = shadow
        self.describe = describe
        self.is_wanted = is_wanted
        self.noise = noise
        self.active = True
        # in a step that is not recorded, but whose results ``noise`` perturbs
        self.between = False
        #: overload -> number of its recorded calls
        self.call_counts: Counter[str] = Counter()
        # also while a step that was recorded is written
        self.in_chosen_step = True
        #: kind of another thread -> number of its calls that were not recorded
        self.calls_elsewhere: Counter[str] = Counter()
        self.phase = "forward"
        self.turn = Turn()
        self._lock = threading.RLock()
        self._has_warned = False
        #: thread -> number of the last node of the graph that it made
        self._sequences: dict[int, int] = {}
        #: number of a node of the graph -> thread -> where the call stands that made it
        self._forward_sources: dict[int, dict[int, tuple[Source, str]]] = {}
        self._gradient_work = GradientWork(paths)
        _modes.add(self)

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        """Return True if torch has to wrap every call, so that its compiler does not
        trace into it; skipped frames cost less."""
        return not CAN_SKIP

    @classmethod
    def ignore_compile_internals(cls) -> bool:
        """Compiled regions stay compiled while this is on."""
        return True

    def begin(self, recorder: Recorder) -> None:
        """Start a new step."""
        self.recorder = recorder
        self._forward_sources.clear()
        self._gradient_work.begin()

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        self.turn.holder = self.turn.home
        return self.run(func, args, kwargs or {})

    def run(self, func: Any, args: Any, kwargs: Any) -> Any:
        """Run a call, and record it where a step is."""
        if not self.active or func.namespace == "profiler" or torch._C._is_tracing():
            return self._run_unrecorded(func, args, kwargs)
        if in_graph_capture():
            self._warn_of_capture()
            return func(*args, **kwargs)
        try:
            with self._lock:
                call = self._before(func, args, kwargs)
        except Exception as error:  # noqa: BLE001 (nothing of ours may stop the program)
            self.failed(error)
            return func(*args, **kwargs)
        if self.noise is None:
            result = func(*args, **kwargs)
        else:
            result = self._run_perturbed(func, args, kwargs)
        try:
            with self._lock:
                self._after(call, result)
        except Exception as error:  # noqa: BLE001
            self.failed(error)
        return result

    def _after(self, call: _RunningCall, result: Any) -> None:
        """Look at what a call has made."""
        if call.inputs is not None and self.active:
            self._record(call, result)
        elif call.schema.written:
            for tensor in call.tensors():
                self.recorder.changed(tensor)

    def ran_elsewhere(self, thread: str, func: Any, args: Any, kwargs: Any) -> None:
        """A thread that is not recorded has run a call."""
        try:
            with self._lock:
                self.calls_elsewhere[thread] += 1
                if OperatorSchema.of(func).written:
                    for tensor in tensors_in(args, kwargs.values()):
                        self.recorder.changed(tensor)
        except Exception as error:  # noqa: BLE001
            self.failed(error)

    def _warn_of_capture(self) -> None:
        if not self._has_warned:
            self._has_warned = True
            warn(WARNING)

    def _run_unrecorded(self, func: Any, args: Any, kwargs: Any) -> Any:
        # sizes are part of what torch.jit traces
        is_ordinary = func.namespace != "profiler" and not torch._C._is_tracing()
        if self.between and is_ordinary:
            return self._run_perturbed(func, args, kwargs)
        return func(*args, **kwargs)

    def _run_perturbed(self, func: Any, args: Any, kwargs: Any) -> Any:
        """Run a call with noise in the last bits of its result."""
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

    def _before(self, func: Any, args: Any, kwargs: Any) -> _RunningCall:
        """Look at a call's arguments before it may overwrite them."""
        schema = OperatorSchema.of(func)
        call = _RunningCall(schema, self._source(schema), args, kwargs)
        source = call.source
        # of what was compiled, the boundary is recorded
        if source.line is COMPILED or not self._wants(source.module, schema.name):
            return call
        if not schema.is_view:
            self.recorder.before_reading(call.read())
        record_of = self.recorder.record_of
        tensors = call.tensors()
        call.inputs = [record_of(tensor, source) for tensor in tensors]
        self._place_gradient_work(call, tensors)
        if self.describe is not None:
            call.arguments = self.describe(args, kwargs, self.recorder.recorded)
        if self.shadow is not None:
            call.compare = self.shadow(func, args, kwargs)
        return call

    def _place_gradient_work(
        self, call: _RunningCall, tensors: Sequence[Tensor]
    ) -> None:
        """Place what the script does with gradients behind the backward pass."""
        source = call.source
        if source.phase != "forward" or source.module or call.inputs is None:
            return
        if self._gradient_work.reads(tensors, call.inputs):
            call.source = Source("optimizer", "", source.line, source.callers)
            call.on_gradients = True

    def _wants(self, module: str, operator: str) -> bool:
        return self.is_wanted is None or self.is_wanted(f"{module}/{operator}")

    def _record(self, call: _RunningCall, result: Any) -> None:
        schema = call.schema
        self.call_counts[schema.overload] += 1
        if schema.collective and not finished(schema.name, result):
            self._record_unfinished(call, result)
            return
        written = call.written()
        outputs = _without(tensors_in((result,)), written)
        inputs = call.inputs or []
        records = self.recorder.call(
            call.source,
            schema.name,
            schema.overload,
            inputs,
            outputs,
            written=written,
            changed=call.written_unseen(),
            arguments=call.arguments,
            group=group_of(call.args, call.kwargs) if schema.collective else None,
            inputs_of_place=_inputs_of_place(call, inputs) if schema.each else None,
        )
        if call.on_gradients:
            self._gradient_work.made(records)
        if call.compare is not None:
            tensors = [*written, *outputs]
            call.compare(tensors, records[: len(tensors)], self.recorder.own_errors)

    def _record_unfinished(self, call: _RunningCall, result: Any) -> None:
        """A collective whose values are not there yet."""
        for tensor in tensors_in((call.args, result)):
            self.recorder.changed(tensor)
        self.recorder.call(
            call.source,
            call.schema.name,
            call.schema.overload,
            call.inputs or [],
            [],
            group=group_of(call.args, call.kwargs),
            reason="it had not finished when it was recorded",
        )

    @contextmanager
    def paused(self) -> Iterator[None]:
        """What runs inside is not recorded."""
        before = (self.active, self.between)
        self.active = False
        self.between = False
        try:
            yield
        finally:
            self.active, self.between = before

    def compiled(self, module: Any, path: str, inputs: Any, output: Any) -> None:
        """The hook of every module's forward: one that ``torch.compile`` has compiled
        is a call."""
        if not self.active or not hasattr(module, "_orig_mod"):
            return
        if not self._wants(path, "compiled"):
            return
        try:
            source = Source("forward", path, *user_place(2))
            with torch.no_grad(), self.paused():
                self._record_boundary(source, module, inputs, output)
        except Exception as error:  # noqa: BLE001
            self.failed(error)

    def triton(self, name: str, tensors: Sequence[Tensor]) -> None:
        """A kernel has been launched on these; which of them it wrote is not known, so
        all have rows."""
        # inside an operator, which has a row, another mode is current
        if not self.active or _get_current_dispatch_mode() is not self:
            return
        try:
            self._record_kernel(name, tensors)
        except Exception as error:  # noqa: BLE001
            self.failed(error)

    def _record_kernel(self, name: str, tensors: Sequence[Tensor]) -> None:
        in_backward = torch._C._current_graph_task_id() != -1
        phase = "backward" if in_backward else self.phase
        source = Source(phase, self.paths.current(), *user_place(4))
        if not self._wants(source.module, f"triton::{name}"):
            return
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

    def _record_boundary(
        self, source: Source, module: Any, inputs: Any, output: Any
    ) -> None:
        read = tensors_in((tree_leaves(inputs),))
        outputs = tensors_in((tree_leaves(output),))
        records = [self.recorder.record_of(tensor, source) for tensor in read]
        for tensor in (*outputs, *read, *module.buffers()):
            self.recorder.changed(tensor)
        reason = "compiled: its operators are not seen, --eager runs them uncompiled"
        self.recorder.call(source, "compiled", None, records, outputs, reason=reason)

    def _source(self, schema: OperatorSchema) -> Source:
        if torch._C._current_graph_task_id() != -1:
            self._gradient_work.run_backward()
            return self._backward_source(schema)
        path = self.paths.current()
        phase = "collective" if schema.collective else self._phase_of_call(path)
        source = Source(phase, path, *schema.at(*user_place(4)))
        sequence = torch.autograd._get_sequence_nr()  # type: ignore[attr-defined]
        thread = threading.get_ident()
        if sequence != self._sequences.get(thread, 0):
            # the call below made a node of the graph: its backward belongs to it
            nodes = self._forward_sources.setdefault(sequence - 1, {})
            nodes[thread] = (source, schema.name)
            self._sequences[thread] = sequence
        return source

    def _forward_source(self, node: Any) -> Source | None:
        """Return where the call stands that made a node.

        Each thread counts its nodes for itself: of several with one number, the one
        whose operator the node is named after.
        """
        entries = list(self._forward_sources.get(node._sequence_nr(), {}).values())
        if len(entries) > 1:
            kind = node.name().lower()
            entries = [e for e in entries if kind.startswith(_letters(e[1]))]
        return entries[0][0] if len(entries) == 1 else None

    def _phase_of_call(self, path: str) -> str:
        """Return the phase of a call outside of the backward pass."""
        if self.phase == "forward" and not path and prepares_gradients(4):
            return "optimizer"
        return self.phase

    def _backward_source(self, schema: OperatorSchema) -> Source:
        phase = "collective" if schema.collective else "backward"
        path = self.paths.current()
        if path:  # a checkpoint computes its forward again
            return Source(phase, path, *schema.at(*user_place(5)), recomputed=True)
        node: Any = torch._C._current_autograd_node()
        if node is None:
            return Source(phase, "", None)
        if node.name() in _CHECKPOINTS and torch.is_grad_enabled():
            # its function, outside of any module
            return Source(phase, "", *schema.at(*user_place(5)), recomputed=True)
        if node.name().startswith("CompiledFunction") and in_compiled():
            return Source(phase, "", COMPILED)
        forward = self._forward_source(node)
        place = user_place(5, in_engine=True)  # the user's own backward, or a hook
        if forward is not None:
            if place[0] is None:
                place = forward.line, forward.callers
            return Source(phase, forward.module, *schema.at(*place))
        variable = getattr(node, "variable", None)
        name = None if variable is None else self.paths.name_of(variable)
        return Source(phase, (name or "").rpartition(".")[0], *schema.at(*place))


class ThreadMode(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Sees the calls of another thread for a recording.

    Made in that thread; ``name`` is the thread's.
    """

    def __init__(self, recording: OpMode, name: str) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.recording = recording
        self.name = kind_of(name)
        self.part = ThreadPart(recording.turn)

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        return not CAN_SKIP

    @classmethod
    def ignore_compile_internals(cls) -> bool:
        """Compiled regions stay compiled while this is on."""
        return True

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        kwargs = kwargs or {}
        recording = self.recording
        if self._is_recorded():
            return recording.run(func, args, kwargs)
        result = func(*args, **kwargs)
        # what a recorded thread runs while nothing is recorded is ours, or between steps
        is_missed = recording.in_chosen_step and not self.part.is_alone
        if is_missed and func.namespace != "profiler":
            recording.ran_elsewhere(self.name, func, args, kwargs)
        return result

    def _is_recorded(self) -> bool:
        recording = self.recording
        if not (recording.active or recording.between):
            return False
        try:
            return self.part.is_recorded()
        except Exception as error:  # noqa: BLE001
            recording.failed(error)
            return False


for _mode in (OpMode, ThreadMode):
    skipped_by_compiler(_mode.__torch_dispatch__)


#: Nodes that compute their forward pass again, with gradients on as only there.
_CHECKPOINTS = frozenset(("CheckpointFunctionBackward",))

_modes: weakref.WeakSet[OpMode] = weakref.WeakSet()


def _stop_in_child() -> None:
    """A data loader's worker, forked in a step, records nothing: nobody would read it,
    and OpenMP may hang there."""
    for mode in _modes:
        mode.active = False
        mode.between = False


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_stop_in_child)


def _letters(operator: str) -> str:
    """Return an operator's name as that of its node begins: ``addmm`` of
    ``AddmmBackward0``."""
    return operator.rpartition("::")[2].replace("_", "").lower()


def _without(tensors: list[Tensor], excluded: list[Tensor]) -> list[Tensor]:
    """Return the tensors that are none of the excluded objects."""
    if not tensors or not excluded:
        return tensors
    excluded_ids = {id(tensor) for tensor in excluded}
    return [tensor for tensor in tensors if id(tensor) not in excluded_ids]


def _received_in_place(call: _RunningCall) -> list[Tensor]:
    """Return what a collective of c10d writes although its schema does not say so."""
    name = call.schema.name
    if name.startswith("c10d::") and name.endswith("_") and call.args:
        return tensors_in((call.args[0],))
    return []


def _inputs_of_place(call: _RunningCall, inputs: list[int]) -> list[list[int]]:
    """Return the inputs of each place of a call on lists: the tensors at this place,
    and those that stand alone.
    """
    lists: list[list[int]] = []
    alone: list[int] = []
    position = 0
    for value in (*call.args, *call.kwargs.values()):
        count = len(tensors_in((value,)))
        records = inputs[position : position + count]
        position += count
        if isinstance(value, Tensor):
            alone += records
        elif records:
            lists.append(records)
    places = max(map(len, lists), default=0)
    return [
        [records[place] for records in lists if place < len(records)] + alone
        for place in range(places)
    ]
