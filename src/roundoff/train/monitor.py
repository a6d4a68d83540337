"""The cheap tier of watching a training: range, mean, norm and NaN/Inf counts at module outputs and their gradients.

Forward hooks see the outputs, tensor hooks the gradients that come back to them: full backward hooks would make views of
the outputs, and a model that adds to them in place fails then. On the CPU a tensor is read in one pass, at once; on other
devices three reductions stay there, unread, until somebody asks.
"""

from __future__ import annotations

import functools
import weakref
from collections import deque
from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from types import TracebackType
from typing import Any

import polars as pl
import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

from roundoff.errors import PatternError, RoundoffError, warn
from roundoff.record import compiled, module_path
from roundoff.site import matches
from roundoff.train.watch.compiled import Sink
from roundoff.train.watch.summary import Summary, fetched, summary

SCHEMA = {
    "step": pl.Int64,
    "module": pl.String,
    "kind": pl.String,
    "phase": pl.String,
    "call": pl.Int64,
    "output": pl.Int64,
    "numel": pl.Int64,
    "min": pl.Float64,
    "max": pl.Float64,
    "mean": pl.Float64,
    "norm": pl.Float64,
    "non_finite": pl.Int64,
    "finite": pl.Boolean,
}


@dataclass(frozen=True)
class Bad:
    """Where a step stopped being finite: the output of ``module`` (its class is ``kind``), or the gradient at it.

    ``call`` counts the calls of the module in the step, ``output`` the tensors it returned; ``non_finite`` of ``numel``
    elements are NaN or Inf (None where the device was not asked).

    >>> str(Bad(7, "h.1.c_fc", "Linear", "backward", 0, 0, 64, 3))
    'the gradient at the output of h.1.c_fc (Linear), 3 of 64 elements'
    """

    step: int
    module: str
    kind: str
    phase: str
    call: int
    output: int
    numel: int
    non_finite: int | None

    def __str__(self) -> str:
        name = (
            f"{self.module} ({self.kind})"
            if self.module
            else f"the model ({self.kind})"
        )
        what = (
            "the output of"
            if self.phase == "forward"
            else "the gradient at the output of"
        )
        count = (
            ""
            if self.non_finite is None
            else f", {self.non_finite:,} of {self.numel:,} elements"
        )
        return f"{what} {name}{count}"


@dataclass
class _Step:
    number: int
    #: (module, kind, phase, call, output, numel) beside what was found, in the order of execution
    rows: list[tuple[tuple[str, str, str, int, int, int], Summary | Tensor]] = field(
        default_factory=list
    )
    calls: dict[str, int] = field(default_factory=dict)
    #: the tensor measured last, for a module that only hands on what another one made
    last: weakref.ref[Tensor] | None = None
    version: int = -1
    found: Summary | Tensor | None = None
    names: list[tuple[str, str, int, int]] = field(default_factory=list)
    handles: list[Any] = field(default_factory=list)

    def end(self) -> None:
        """No hook stays on a tensor that does."""
        for handle in self.handles:
            handle.remove()

    def collect(self, sinks: dict[str, tuple[str, Sink]]) -> None:
        """What compiled code has left, outputs in the order in which modules were defined and gradients in the reverse."""
        gradients = []
        for path, (kind, sink) in sinks.items():
            output, gradient = sink.take()
            if output is not None:
                self.rows.append(((path, kind, "forward", 0, 0, sink.numel), output))
            if gradient is not None:
                gradients.append(((path, kind, "backward", 0, 0, sink.numel), gradient))
        self.rows += reversed(gradients)

    def read(self) -> list[tuple[tuple[str, str, str, int, int, int], Summary]]:
        """The rows as numbers; waits for each device once."""
        alike: dict[Any, list[Tensor]] = {}
        for _, found in self.rows:
            if isinstance(found, Tensor):
                alike.setdefault((found.device, len(found)), []).append(found)
        values = {
            id(tensor): row
            for tensors in alike.values()
            for tensor, row in zip(tensors, torch.stack(tensors).tolist(), strict=True)
        }
        self.rows = [
            (
                about,
                fetched(values[id(found)], about[-1])
                if isinstance(found, Tensor)
                else found,
            )
            for about, found in self.rows
        ]
        return self.rows  # type: ignore[return-value]


class Monitor:
    """Watches the outputs of a model's modules, and the gradients at them, of the last ``keep`` observed steps.

    ``every=N`` observes steps 0, N, 2N, ...; ``modules`` are globs over module paths (``"encoder.*"``) or classes
    (``"class:LayerNorm"``), all modules when left out. ``gradients=False`` looks at outputs alone. A module that returns
    the very tensor of another one is a row without a second measurement.

    The numbers of the program do not change, and its hooks are gone when the block is left, also by an exception. On the
    CPU a step costs about 1.05 of a plain one. Enter it before ``torch.compile`` compiles the model: a hook that is added
    later never runs, which is said in a warning. Raises ``PatternError`` where a pattern names no module.

    Example:
        >>> model = nn.Sequential(nn.Linear(2, 3), nn.ReLU())
        >>> with Monitor(model, keep=2) as monitor:
        ...     for x in (torch.ones(1, 2), torch.full((1, 2), float("inf"))):
        ...         model(x).sum().backward()
        ...         monitor.step()
        >>> monitor.table["step"].unique().sort().to_list(), monitor.first_bad.module, monitor.first_bad.phase
        ([0, 1], '0', 'forward')
    """

    def __init__(
        self,
        model: nn.Module | None = None,
        *,
        every: int = 1,
        keep: int = 16,
        modules: str | Sequence[str] = (),
        gradients: bool = True,
    ) -> None:
        for name, value in (("every", every), ("keep", keep)):
            if type(value) is not int or value < 1:
                raise RoundoffError(
                    "no number of steps",
                    where=f"Monitor({name}={value!r})",
                    expected="1 or more",
                )
        self.model, self.every, self.gradients = model, every, gradients
        self.patterns = (modules,) if isinstance(modules, str) else tuple(modules)
        self.number = 0
        #: why nothing is looked at any more: a fault of the monitor itself, which never stops the program
        self.stopped: str | None = None
        #: True: what runs is not the program's own
        self.paused = False
        self._steps: deque[_Step] = deque(maxlen=keep)
        self._step: _Step | None = None
        self._sinks: dict[str, tuple[str, Sink]] = {}
        self._ran = False  # a compiled model, in this step
        self._open = False
        self._stack = ExitStack()

    def __enter__(self) -> Monitor:
        with self._stack as stack:
            compiled(
                "sums", torch.float32
            )  # built now if it never was, not in the first step
            self._begin()
            if self.model is not None:
                self.add(self.model)
            self._stack, self._open = stack.pop_all(), True
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._end()
        self._step, self._open = None, False
        self._stack.close()

    def add(self, model: nn.Module, prefix: str = "") -> None:
        """Watch another model too; its modules are named below ``prefix``."""
        inner = getattr(model, "_orig_mod", model)
        named = [
            (module_path(path, prefix, model), module)
            for path, module in _parts_first(inner)
        ]
        chosen = [
            (path, module)
            for path, module in named
            if self._wanted(path, type(module).__name__)
        ]
        if self.patterns and not chosen:
            raise PatternError(
                "no module to watch",
                where="Monitor(modules=...)",
                expected=", ".join(self.patterns),
                got=f"the {len(named)} modules of {type(inner).__name__}",
                do="take paths from model.named_modules(), or class:LayerNorm",
            )
        for path, module in chosen:
            kind, sink = self._sinks[path] = (
                type(module).__name__,
                Sink(module, self.gradients),
            )
            hook = functools.partial(self._listen, path, kind, sink)
            self._stack.callback(module.register_forward_hook(hook).remove)
        if inner is not model:
            self._stack.callback(model.register_forward_hook(self._compiled_ran).remove)

    def step(self) -> None:
        """The end of a step."""
        self._end()
        self.number += 1
        self._begin()

    @property
    def table(self) -> pl.DataFrame:
        """One row for each output and each gradient, in the order of execution, of the steps that are kept.

        Columns: ``step``, ``module`` (path), ``kind`` (class), ``phase`` (forward: the output, backward: the gradient at
        it), ``call``, ``output``, ``numel``, ``min``, ``max``, ``mean`` and ``norm`` (root of the sum of squares), all four
        over the finite elements, ``non_finite`` (how many are NaN or Inf) and ``finite``. On other devices than the CPU a
        tensor with NaN or Inf has null in all but ``finite``, since a look at it would have made the host wait, and a norm
        beyond fp32 is Inf. An empty tensor has null too, and is finite.
        """
        rows = [
            (step.number, *about, *found, found[4] == 0)
            for step in self._seen()
            for about, found in step.read()
        ]
        return pl.DataFrame(rows, schema=SCHEMA, orient="row")

    @property
    def first_bad(self) -> Bad | None:
        """The first output with NaN or Inf in the latest step that was observed; without one the first such gradient, in
        the order of the backward pass; None where all is finite."""
        step = next((s for s in reversed(self._seen()) if s.rows), None)
        if step is None:
            return None
        bad = [(about, found) for about, found in step.read() if found[4] != 0]
        bad.sort(
            key=lambda row: row[0][2] != "forward"
        )  # stable: the order of execution stays
        return Bad(step.number, *bad[0][0], bad[0][1][4]) if bad else None

    def _seen(self) -> list[_Step]:
        if self._step is None:
            return list(self._steps)
        self._step.collect(self._sinks)
        return [*self._steps, self._step]

    def _wanted(self, path: str, kind: str) -> bool:
        return not self.patterns or any(
            kind == p.removeprefix("class:")
            if p.startswith("class:")
            else matches(p, path)
            for p in self.patterns
        )

    def _end(self) -> None:
        step, ran, self._ran = self._step, self._ran, False
        unobserved = _Step(self.number)
        (unobserved if step is None else step).collect(self._sinks)
        if step is None:
            return
        step.end()
        if step.rows:
            self._steps.append(step)
        elif ran and not self.stopped:
            self.stopped = "the model was compiled before"
            warn(
                "roundoff: the monitor sees nothing of this model: torch.compile had compiled it before, and hooks that "
                "are added later never run; enter the monitor before the first call"
            )

    def _compiled_ran(self, *_: Any) -> None:
        self._ran = True

    def _begin(self) -> None:
        if self.number % self.every or self.stopped:
            self._step = None
        else:
            self._step = _Step(self.number)

    def _listen(
        self, path: str, kind: str, sink: Sink, _: nn.Module, __: Any, output: Any
    ) -> Any:
        if torch.compiler.is_compiling():
            return sink.look(output)
        step = self._step
        if step is None or self.paused:
            return None
        try:
            again = (
                torch._C._current_graph_task_id() != -1
            )  # activation checkpointing runs the forward once more
            call = 0
            if not again:
                call = step.calls.get(path, 0)
                step.calls[path] = call + 1
            elif path in step.calls:
                call = step.calls[path] - 1
            for place, tensor in enumerate(
                (output,) if isinstance(output, Tensor) else tree_leaves(output)
            ):
                if isinstance(tensor, Tensor) and tensor.is_floating_point():
                    self._look(step, (path, kind, call, place), tensor, again)
        except Exception as error:  # noqa: BLE001 (nothing of ours may stop the program)
            self._failed(error)
        return None

    def _look(
        self, step: _Step, name: tuple[str, str, int, int], tensor: Tensor, again: bool
    ) -> None:
        same = (
            step.last is not None
            and step.last() is tensor
            and _version(tensor) == step.version
        )
        if not same:
            step.last, step.version, step.names = (
                weakref.ref(tensor),
                _version(tensor),
                [],
            )
            step.found = None if again else summary(tensor)
        if step.found is not None:
            path, kind, call, place = name
            step.rows.append(
                ((path, kind, "forward", call, place, tensor.numel()), step.found)
            )
        step.names.append(name)
        if not same and self.gradients and tensor.requires_grad:
            watch: Any = tensor.register_hook
            handle = watch(functools.partial(self._gradient, step, step.names))
            if tensor.is_leaf:  # a parameter that a module returns would keep the hook
                step.handles.append(handle)

    def _gradient(
        self, step: _Step, names: list[tuple[str, str, int, int]], gradient: Tensor
    ) -> None:
        if not self._open or self.stopped:
            return
        try:
            found = summary(gradient)
            if found is not None:
                numel = gradient.numel()
                for path, kind, call, place in names:
                    step.rows.append(
                        ((path, kind, "backward", call, place, numel), found)
                    )
        except Exception as error:  # noqa: BLE001 (nothing of ours may stop the program)
            self._failed(error)

    def _failed(self, error: Exception) -> None:
        if self.stopped is None:
            self.stopped = f"{type(error).__name__}: {error}"
            self._step = None
            warn(
                f"roundoff: the monitor stopped in step {self.number} ({self.stopped}); the program goes on"
            )


def _parts_first(
    module: nn.Module, path: str = "", seen: set[int] | None = None
) -> Iterator[tuple[str, nn.Module]]:
    """Modules before what they are part of, as their outputs come; each once."""
    seen = set() if seen is None else seen
    seen.add(id(module))
    for name, part in module.named_children():
        if id(part) not in seen:
            yield from _parts_first(part, f"{path}.{name}" if path else name, seen)
    yield path, module


def _version(tensor: Tensor) -> int:
    """How often a tensor was written in place; inference tensors don't count it."""
    return -1 if tensor.is_inference() else tensor._version
