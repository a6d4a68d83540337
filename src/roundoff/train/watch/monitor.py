"""The cheap tier of watching a training: range, mean, norm and NaN/Inf counts at module
outputs and their gradients.

Forward hooks see the outputs, tensor hooks the gradients that come back to them: full
backward hooks would make views of the outputs, and a model that adds to them in place
fails then. On the CPU a tensor is read in one pass, at once; on other devices three
reductions stay there, unread, until somebody asks.
"""

from __future__ import annotations

import functools
import weakref
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from types import TracebackType
from typing import Any, NamedTuple

import polars as pl
import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

from roundoff.errors import PatternError, RoundoffError, warn
from roundoff.record import compiled, module_path, unseen
from roundoff.site import matches
from roundoff.train.our_hooks import OurHook
from roundoff.train.scaling.step_gradients import write_count
from roundoff.train.watch.compiled_summary import SummarySink
from roundoff.train.watch.tensor_summary import (
    TensorSummary,
    from_reduced,
    summarize_tensor,
)

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
class FirstBad:
    """Where a step stopped being finite: the output of ``module`` (its class is
    ``kind``), or the gradient at it.

    ``call`` counts the calls of the module in the step, ``output`` the tensors it
    returned; ``non_finite`` of ``numel`` elements are NaN or Inf (None where the device
    was not asked).

    >>> str(FirstBad(7, "h.1.c_fc", "Linear", "backward", 0, 0, 64, 3))
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
        module = self.module or "the model"
        tensor = "the output of"
        if self.phase != "forward":
            tensor = "the gradient at the output of"
        text = f"{tensor} {module} ({self.kind})"
        if self.non_finite is None:
            return text
        return f"{text}, {self.non_finite:,} of {self.numel:,} elements"


class _ModuleOutput(NamedTuple):
    """One output of one call of a module."""

    module: str
    kind: str
    call: int
    output: int


class _Row(NamedTuple):
    """An output (phase forward) or the gradient at it (backward), and what was read of it."""

    place: _ModuleOutput
    phase: str
    numel: int
    summary: TensorSummary | Tensor


@dataclass
class _ObservedStep:
    """The rows of one step, in the order of execution.

    Attributes:
        number: of the step.
        rows: the rows.
        calls: module -> its calls so far.
        last: the tensor measured last: a module may return what another one made.
        version: how often ``last`` had been written in place.
        summary: of ``last``; None where there is nothing to read.
        places: where ``last`` was returned.
        handles: of hooks on tensors that stay.
    """

    number: int
    rows: list[_Row] = field(default_factory=list)
    calls: dict[str, int] = field(default_factory=dict)
    last: weakref.ref[Tensor] | None = None
    version: int = -1
    summary: TensorSummary | Tensor | None = None
    places: list[_ModuleOutput] = field(default_factory=list)
    handles: list[Any] = field(default_factory=list)

    def end(self) -> None:
        """Remove the hooks on tensors that stay."""
        for handle in self.handles:
            handle.remove()

    def is_last(self, tensor: Tensor) -> bool:
        """Return True if ``tensor`` is the one measured last, and was not written since."""
        is_same = self.last is not None and self.last() is tensor
        return is_same and write_count(tensor) == self.version

    def collect(self, sinks: Mapping[str, tuple[str, SummarySink]]) -> None:
        """Take what compiled code has left: outputs in the order in which modules were
        defined, gradients in the reverse.
        """
        gradients = []
        for path, (kind, sink) in sinks.items():
            output, gradient = sink.take()
            place = _ModuleOutput(path, kind, 0, 0)
            if output is not None:
                self.rows.append(_Row(place, "forward", sink.numel, output))
            if gradient is not None:
                gradients.append(_Row(place, "backward", sink.numel, gradient))
        self.rows += reversed(gradients)

    def read(self) -> list[tuple[_Row, TensorSummary]]:
        """Return the rows with their numbers; waits for each device once."""
        values = _fetch([r.summary for r in self.rows if isinstance(r.summary, Tensor)])
        for index, row in enumerate(self.rows):
            if isinstance(row.summary, Tensor):
                summary = from_reduced(values[id(row.summary)], row.numel)
                self.rows[index] = row._replace(summary=summary)
        return [(row, row.summary) for row in self.rows]  # type: ignore[misc]


def _fetch(tensors: list[Tensor]) -> dict[int, list[float]]:
    """Copy tensors to the host, those of one device and length together; by the
    identity of each.
    """
    alike: dict[Any, list[Tensor]] = {}
    for tensor in tensors:
        alike.setdefault((tensor.device, len(tensor)), []).append(tensor)
    values: dict[int, list[float]] = {}
    for group in alike.values():
        rows = torch.stack(group).tolist()
        values |= zip(map(id, group), rows, strict=True)
    return values


class Monitor:
    """Watches the outputs of a model's modules, and the gradients at them, of the last
    ``keep`` observed steps.

    ``every=N`` observes steps 0, N, 2N, ...; ``modules`` are globs over module paths
    (``"encoder.*"``) or classes (``"class:LayerNorm"``), all modules when left out.
    ``gradients=False`` looks at outputs alone. A module that returns the very tensor of
    another one is a row without a second measurement.

    The numbers of the program do not change, and its hooks are gone when the block is
    left, also by an exception. On the CPU a step costs about 1.05 of a plain one. Enter
    it before ``torch.compile`` compiles the model: a hook that is added later never
    runs, which is said in a warning. Raises ``PatternError`` where a pattern names no
    module.

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
        _check_count("every", every)
        _check_count("keep", keep)
        self.model = model
        self.every = every
        self.gradients = gradients
        self.patterns = (modules,) if isinstance(modules, str) else tuple(modules)
        self.number = 0
        #: why nothing is observed any more: a fault of the monitor itself, which never
        #: stops the program
        self.stopped: str | None = None
        #: True: what runs is not the program's own
        self.paused = False
        self._steps: deque[_ObservedStep] = deque(maxlen=keep)
        self._step: _ObservedStep | None = None
        self._sinks: dict[str, tuple[str, SummarySink]] = {}
        self._compiled_ran = False  # a compiled model, in this step
        self._open = False
        self._stack = ExitStack()

    def __enter__(self) -> Monitor:
        with self._stack as stack:
            compiled("sums", torch.float32)  # built now, not in the first step
            self._begin()
            if self.model is not None:
                self.add(self.model)
            self._stack = stack.pop_all()
        self._open = True
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._end()
        self._step = None
        self._open = False
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
            if self._is_chosen(path, type(module).__name__)
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
            kind = type(module).__name__
            sink = SummarySink(module, self.gradients)
            self._sinks[path] = (kind, sink)
            hook = OurHook(functools.partial(self._after_forward, path, kind, sink))
            self._stack.callback(module.register_forward_hook(hook).remove)
        if inner is not model:
            handle = model.register_forward_hook(OurHook(self._after_compiled))
            self._stack.callback(handle.remove)

    def step(self) -> None:
        """End a step and begin the next."""
        self._end()
        self.number += 1
        self._begin()

    @property
    def table(self) -> pl.DataFrame:
        """One row for each output and each gradient, in the order of execution, of the
        steps that are kept.

        Columns: ``step``, ``module`` (path), ``kind`` (class), ``phase`` (forward: the
        output, backward: the gradient at it), ``call``, ``output``, ``numel``, ``min``,
        ``max``, ``mean`` and ``norm`` (root of the sum of squares), all four over the
        finite elements, ``non_finite`` (how many are NaN or Inf) and ``finite``. On other
        devices than the CPU a tensor with NaN or Inf has null in all but ``finite``, since
        reading it would have made the host wait, and a norm beyond fp32 is Inf. An empty
        tensor has null too, and is finite.
        """
        rows = []
        for step in self._observed():
            for row, summary in step.read():
                module, kind, call, output = row.place
                place = (module, kind, row.phase, call, output, row.numel)
                is_finite = summary.non_finite == 0
                rows.append((step.number, *place, *summary, is_finite))
        return pl.DataFrame(rows, schema=SCHEMA, orient="row")

    @property
    def first_bad(self) -> FirstBad | None:
        """The first output with NaN or Inf in the latest step that was observed.

        Without one the first such gradient, in the order of the backward pass; None where
        all is finite.
        """
        step = next((s for s in reversed(self._observed()) if s.rows), None)
        if step is None:
            return None
        bad = [(row, s) for row, s in step.read() if s.non_finite != 0]
        if not bad:
            return None
        outputs = [pair for pair in bad if pair[0].phase == "forward"]
        row, summary = (outputs or bad)[0]
        module, kind, call, output = row.place
        return FirstBad(
            step.number,
            module,
            kind,
            row.phase,
            call,
            output,
            row.numel,
            summary.non_finite,
        )

    def _observed(self) -> list[_ObservedStep]:
        if self._step is None:
            return list(self._steps)
        self._step.collect(self._sinks)
        return [*self._steps, self._step]

    def _is_chosen(self, path: str, kind: str) -> bool:
        if not self.patterns:
            return True
        return any(_names(pattern, path, kind) for pattern in self.patterns)

    def _begin(self) -> None:
        is_observed = self.number % self.every == 0 and not self.stopped
        self._step = _ObservedStep(self.number) if is_observed else None

    def _end(self) -> None:
        compiled_ran = self._compiled_ran
        self._compiled_ran = False
        step = self._step
        if step is None:
            _ObservedStep(self.number).collect(self._sinks)  # empties the sinks
            return
        step.collect(self._sinks)
        step.end()
        if step.rows:
            self._steps.append(step)
        elif compiled_ran and not self.stopped:
            self.stopped = "the model was compiled before"
            warn(
                "roundoff: the monitor sees nothing of this model: torch.compile had compiled it before, and hooks that "
                "are added later never run; enter the monitor before the first call"
            )

    def _after_compiled(self, *_: Any) -> None:
        self._compiled_ran = True

    def _after_forward(
        self,
        path: str,
        kind: str,
        sink: SummarySink,
        _: nn.Module,
        __: Any,
        output: Any,
    ) -> Any:
        if torch.compiler.is_compiling():
            return sink.observe(output)
        step = self._step
        if step is None or self.paused:
            return None
        try:
            with unseen():
                self._observe(step, path, kind, output)
        except Exception as error:  # noqa: BLE001 (nothing of ours may stop the program)
            self._fail(error)
        return None

    def _observe(self, step: _ObservedStep, path: str, kind: str, output: Any) -> None:
        # activation checkpointing runs the forward pass once more, in the backward pass
        is_rerun = torch._C._current_graph_task_id() != -1
        if not is_rerun:
            step.calls[path] = step.calls.get(path, 0) + 1
        call = max(step.calls.get(path, 0) - 1, 0)
        tensors = (output,) if isinstance(output, Tensor) else tree_leaves(output)
        for index, tensor in enumerate(tensors):
            if isinstance(tensor, Tensor) and tensor.is_floating_point():
                place = _ModuleOutput(path, kind, call, index)
                self._observe_tensor(step, place, tensor, is_rerun)

    def _observe_tensor(
        self, step: _ObservedStep, place: _ModuleOutput, tensor: Tensor, is_rerun: bool
    ) -> None:
        is_handed_on = step.is_last(tensor)
        if not is_handed_on:
            step.last = weakref.ref(tensor)
            step.version = write_count(tensor)
            step.places = []
            step.summary = None if is_rerun else summarize_tensor(tensor)
        if step.summary is not None:
            row = _Row(place, "forward", tensor.numel(), step.summary)
            step.rows.append(row)
        step.places.append(place)
        if self.gradients and tensor.requires_grad and not is_handed_on:
            register: Any = tensor.register_hook
            handle = register(functools.partial(self._gradient, step, step.places))
            if tensor.is_leaf:  # a parameter that a module returns would keep the hook
                step.handles.append(handle)

    def _gradient(
        self, step: _ObservedStep, places: list[_ModuleOutput], gradient: Tensor
    ) -> None:
        if not self._open or self.stopped:
            return
        try:
            summary = summarize_tensor(gradient)
            if summary is not None:
                numel = gradient.numel()
                for place in places:
                    step.rows.append(_Row(place, "backward", numel, summary))
        except Exception as error:  # noqa: BLE001 (nothing of ours may stop the program)
            self._fail(error)

    def _fail(self, error: Exception) -> None:
        if self.stopped is None:
            self.stopped = f"{type(error).__name__}: {error}"
            self._step = None
            warn(
                f"roundoff: the monitor stopped in step {self.number} ({self.stopped}); the program goes on"
            )


def _check_count(name: str, value: int) -> None:
    if type(value) is not int or value < 1:
        raise RoundoffError(
            "no number of steps",
            where=f"Monitor({name}={value!r})",
            expected="1 or more",
        )


def _names(pattern: str, path: str, kind: str) -> bool:
    """Return True if a pattern names the module at ``path``, or its class."""
    if pattern.startswith("class:"):
        return kind == pattern.removeprefix("class:")
    return matches(pattern, path)


def _parts_first(
    module: nn.Module, path: str = "", visited: set[int] | None = None
) -> Iterator[tuple[str, nn.Module]]:
    """Yield modules before what they are part of, as their outputs come; each once."""
    visited = set() if visited is None else visited
    visited.add(id(module))
    for name, part in module.named_children():
        if id(part) not in visited:
            yield from _parts_first(part, f"{path}.{name}" if path else name, visited)
    yield path, module
