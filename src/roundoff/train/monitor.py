"""The cheap tier of watching a training: range, mean, norm and NaN/Inf counts at module outputs and their gradients.

Forward hooks see the outputs, tensor hooks the gradients that come back to them: full backward hooks would make views of
the outputs, and a model that adds to them in place fails then. On the CPU a tensor is read in one pass, at once; on other
devices three reductions stay there, unread, until somebody asks.
"""

from __future__ import annotations

import functools
import math
from collections import deque
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from types import TracebackType
from typing import Any

import polars as pl
import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

from roundoff.capture.kernel import COMPILED, LARGEST, ROW, compiled
from roundoff.capture.paths import module_path
from roundoff.capture.plain import plain
from roundoff.capture.statistics import in_memory_order, measure, pieces_of
from roundoff.errors import PatternError, RoundoffError, warn
from roundoff.site import matches

#: Fewer elements than this are read by torch's own reductions: a compiled pass costs more to call than it saves.
_SMALL = 4 * ROW
_REDUCED = (*COMPILED, torch.float64)

#: least, most, mean and norm of the finite elements (None without any), and how many are NaN or Inf (None: some)
Summary = tuple[float | None, float | None, float | None, float | None, int | None]
SCHEMA = {
    "step": pl.Int64, "module": pl.String, "kind": pl.String, "phase": pl.String, "call": pl.Int64, "output": pl.Int64,
    "numel": pl.Int64, "min": pl.Float64, "max": pl.Float64, "mean": pl.Float64, "norm": pl.Float64,
    "non_finite": pl.Int64, "finite": pl.Boolean,
}  # fmt: skip


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
        name = f"{self.module} ({self.kind})" if self.module else f"the model ({self.kind})"
        what = "the output of" if self.phase == "forward" else "the gradient at the output of"
        count = "" if self.non_finite is None else f", {self.non_finite:,} of {self.numel:,} elements"
        return f"{what} {name}{count}"


@dataclass
class _Step:
    number: int
    #: (module, kind, phase, call, output, numel) beside what was found, in the order of execution
    rows: list[tuple[tuple[str, str, str, int, int, int], Summary | Tensor]] = field(default_factory=list)
    calls: dict[str, int] = field(default_factory=dict)
    #: the tensor measured last, for a module that only hands on what another one made
    last: Tensor | None = None
    version: int = -1
    found: Summary | Tensor | None = None
    names: list[tuple[str, str, int, int]] = field(default_factory=list)
    handles: list[Any] = field(default_factory=list)

    def end(self) -> None:
        """Keeps no tensor of the program alive, and no hook on one that stays."""
        self.last = self.found = None
        for handle in self.handles:
            handle.remove()

    def read(self) -> list[tuple[tuple[str, str, str, int, int, int], Summary]]:
        """The rows as numbers; waits for the device once."""
        waiting = [found for _, found in self.rows if isinstance(found, Tensor)]
        by_device: dict[torch.device, list[Tensor]] = {}
        for found in waiting:
            by_device.setdefault(found.device, []).append(found)
        values = {
            id(tensor): row
            for tensors in by_device.values()
            for tensor, row in zip(tensors, torch.stack(tensors).tolist(), strict=True)
        }
        self.rows = [
            (about, _fetched(values[id(found)], about[-1]) if isinstance(found, Tensor) else found)
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
        ...     for x in (torch.ones(1, 2), torch.full((1, 2), math.inf)):
        ...         model(x).sum().backward()
        ...         monitor.step()
        >>> monitor.table["step"].unique().sort().to_list(), monitor.first_bad.module, monitor.first_bad.phase
        ([0, 1], '0', 'forward')
    """

    def __init__(
        self, model: nn.Module | None = None, *, every: int = 1, keep: int = 16, modules: str | Sequence[str] = (),
        gradients: bool = True,
    ) -> None:  # fmt: skip
        for name, value in (("every", every), ("keep", keep)):
            if type(value) is not int or value < 1:
                raise RoundoffError("no number of steps", where=f"Monitor({name}={value!r})", expected="1 or more")
        self.model, self.every, self.gradients = model, every, gradients
        self.patterns = (modules,) if isinstance(modules, str) else tuple(modules)
        self.number = 0
        #: why nothing is looked at any more: a fault of the monitor itself, which never stops the program
        self.stopped: str | None = None
        self._steps: deque[_Step] = deque(maxlen=keep)
        self._step: _Step | None = None
        self._compiled: list[tuple[nn.Module, int]] = []
        self._open = False
        self._stack = ExitStack()

    def __enter__(self) -> Monitor:
        with self._stack as stack:
            compiled("sums", torch.float32)  # built now if it never was, not in the first step
            self._begin()
            if self.model is not None:
                self.add(self.model)
            self._stack, self._open = stack.pop_all(), True
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        if self._step is not None:
            self._step.end()
        self._step, self._open = None, False
        self._stack.close()

    def add(self, model: nn.Module, prefix: str = "") -> None:
        """Watch another model too; its modules are named below ``prefix``."""
        inner = getattr(model, "_orig_mod", model)
        named = [(module_path(path, prefix, model), module) for path, module in inner.named_modules()]
        chosen = [(path, module) for path, module in named if self._wanted(path, type(module).__name__)]
        if self.patterns and not chosen:
            raise PatternError("no module to watch", where="Monitor(modules=...)", expected=", ".join(self.patterns),
                               got=f"the {len(named)} modules of {type(inner).__name__}",
                               do="take paths from model.named_modules(), or class:LayerNorm")  # fmt: skip
        for path, module in chosen:
            hook = functools.partial(self._listen, path, type(module).__name__)
            self._stack.callback(module.register_forward_hook(hook).remove)

    def step(self) -> None:
        """The end of a step."""
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
            for step in self._steps
            for about, found in step.read()
        ]
        return pl.DataFrame(rows, schema=SCHEMA, orient="row")

    @property
    def first_bad(self) -> Bad | None:
        """The first output with NaN or Inf in the latest step that was observed; without one the first such gradient, in
        the order of the backward pass; None where all is finite."""
        step = next((s for s in reversed(self._steps) if s.rows), None)
        if step is None:
            return None
        bad = [(about, found) for about, found in step.read() if found[4] != 0]
        bad.sort(key=lambda row: row[0][2] != "forward")  # stable: the order of execution stays
        return Bad(step.number, *bad[0][0], bad[0][1][4]) if bad else None

    def _wanted(self, path: str, kind: str) -> bool:
        return not self.patterns or any(
            kind == p.removeprefix("class:") if p.startswith("class:") else matches(p, path) for p in self.patterns
        )

    def _begin(self) -> None:
        if self._step is not None:
            self._step.end()
        if self.number % self.every or self.stopped:
            self._step = None
        else:
            self._step = _Step(self.number)
            self._steps.append(self._step)

    def _listen(self, path: str, kind: str, _: nn.Module, __: Any, output: Any) -> None:
        step = self._step
        if step is None or torch.compiler.is_compiling():
            return
        try:
            again = torch._C._current_graph_task_id() != -1  # activation checkpointing runs the forward once more
            call = 0
            if not again:
                call = step.calls.get(path, 0)
                step.calls[path] = call + 1
            elif path in step.calls:
                call = step.calls[path] - 1
            for place, tensor in enumerate((output,) if isinstance(output, Tensor) else tree_leaves(output)):
                if isinstance(tensor, Tensor) and tensor.is_floating_point():
                    self._look(step, (path, kind, call, place), tensor, again)
        except Exception as error:  # noqa: BLE001 (nothing of ours may stop the program)
            self._failed(error)

    def _look(self, step: _Step, name: tuple[str, str, int, int], tensor: Tensor, again: bool) -> None:
        same = tensor is step.last and tensor._version == step.version
        if not same:
            step.last, step.version, step.names = tensor, tensor._version, []
            step.found = None if again else summary(tensor)
        if step.found is not None:
            path, kind, call, place = name
            step.rows.append(((path, kind, "forward", call, place, tensor.numel()), step.found))
        step.names.append(name)
        if not same and self.gradients and tensor.requires_grad:
            handle = tensor.register_hook(functools.partial(self._gradient, step, step.names))  # type: ignore[no-untyped-call]
            if tensor.is_leaf:  # a parameter that a module returns would keep the hook
                step.handles.append(handle)

    def _gradient(self, step: _Step, names: list[tuple[str, str, int, int]], gradient: Tensor) -> None:
        if not self._open or self.stopped:
            return
        try:
            found = summary(gradient)
            if found is not None:
                numel = gradient.numel()
                for path, kind, call, place in names:
                    step.rows.append(((path, kind, "backward", call, place, numel), found))
        except Exception as error:  # noqa: BLE001 (nothing of ours may stop the program)
            self._failed(error)

    def _failed(self, error: Exception) -> None:
        if self.stopped is None:
            self.stopped = f"{type(error).__name__}: {error}"
            self._step = None
            warn(f"roundoff: the monitor stopped in step {self.number} ({self.stopped}); the program goes on")


def summary(tensor: Tensor) -> Summary | Tensor | None:
    """What a row says of a tensor: on the CPU numbers, elsewhere ``[least, most, sum, norm]`` that nobody has waited for,
    None where there are no values to read (meta tensors)."""
    with torch._C.DisableTorchFunction():  # modes of the program don't see us
        value, _ = plain(tensor.detach())
        if value is None:
            return None
        if not value.numel():
            return None, None, None, None, 0
        if value.device.type == "cpu":
            return _read(value)
        return torch.stack(_reduced(value if value.dtype in _REDUCED else value.to(torch.float32)))


def _read(value: Tensor) -> Summary:
    """Of a CPU tensor with elements."""
    count, dtype = value.numel(), value.dtype
    run = compiled("sums", dtype) if dtype in COMPILED else None
    whole = in_memory_order(value) if run and count % ROW == 0 and 2 * ROW <= count <= LARGEST else None
    low = high = total = squares = math.nan
    if run is not None and whole is not None:
        low, high, total, squares, _ = run([whole.view(-1, ROW)])[0].tolist()
    elif dtype in _REDUCED and (count < _SMALL or run is None):
        low, high, total, norm = (number.item() for number in _reduced(value))
        squares = norm * norm
    # squares of NaN and Inf are not finite, nor are those of large numbers; those of small ones lose their digits
    if 2.0**-100 <= squares < math.inf or low == high == squares == 0:
        return low, high, total / count, math.sqrt(squares), 0
    low, high, mean, norm, _, nan, above, below, *_ = measure(pieces_of(value))
    return low, high, mean, norm, nan + above + below


def _reduced(value: Tensor) -> list[Tensor]:
    """``[least, most, sum, norm]``; NaN shows in the first two, and so does Inf. ``vector_norm`` of order 2 is as fast as
    a sum; the infinity norm would take ten times as long."""
    wide = torch.float64 if value.dtype == torch.float64 else torch.float32
    low, high = torch.aminmax(value)
    return [low.to(wide), high.to(wide), value.sum(dtype=wide), torch.linalg.vector_norm(value, dtype=wide)]


def _fetched(values: Sequence[float], numel: int) -> Summary:
    low, high, total, norm = values
    if not (math.isfinite(low) and math.isfinite(high)):
        return None, None, None, None, None
    return low, high, total / numel, norm, 0
