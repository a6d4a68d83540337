"""Where the time of a step goes, by torch.profiler: operator by operator, in its module."""

from __future__ import annotations

import os
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.nn.modules.module import (
    register_module_forward_hook,
    register_module_forward_pre_hook,
)
from torch.profiler import ProfilerActivity, profile

from roundoff.advise.operator_count import Counts
from roundoff.files import open_output
from roundoff.ops import base

#: Before the paths of modules among the names of ranges.
MODULE = "module: "
STEP = "roundoff: step"
#: How the time of a step that is in no kernel is called.
PYTHON = "(Python)"
#: The start of a range that autograd opens for each node, and torch for an optimizer.
_NODE = "autograd::engine::evaluate_function"
_OPTIMIZER = "Optimizer.step"
STEPS = 3


@dataclass(frozen=True, slots=True)
class OperatorTime:
    """The time of one operator in one module and phase.

    Attributes:
        operator: the kernel; ``(Python)`` for what is in none.
        module: the path of the module, "" for the model itself.
        phase: forward, backward or optimizer.
        seconds: a step, without what it calls.
        calls: a step.
    """

    operator: str
    module: str
    phase: str
    seconds: float
    calls: float


@dataclass(frozen=True)
class Profile:
    """The operators of a step by their time, the slowest first.

    Attributes:
        rows: one for each operator, module and phase.
        seconds: of one step, by the profiler.
    """

    rows: tuple[OperatorTime, ...]
    seconds: float

    def share(self, row: OperatorTime) -> float:
        """Return the part of the step that a row takes, 0 to 1."""
        return row.seconds / self.seconds if self.seconds else 0.0


@dataclass
class _Seen:
    """Sums while events are gone through."""

    seconds: dict[tuple[str, str, str], float] = field(
        default_factory=lambda: defaultdict(float)
    )
    calls: dict[tuple[str, str, str], int] = field(
        default_factory=lambda: defaultdict(int)
    )


def profile_step(
    step: Callable[[], object],
    model: nn.Module,
    counts: Counts,
    *,
    trace: str | Path | None = None,
) -> Profile:
    """Profile a few steps; with ``trace`` write them as a Chrome trace, which Perfetto
    opens, whole or not at all.

    Raises ``OutputError`` when the trace cannot be written.
    """
    # its messages are for those who debug it
    os.environ.setdefault("KINETO_LOG_LEVEL", "99")
    activities = [ProfilerActivity.CPU]
    if torch.cuda.is_available():
        activities.append(ProfilerActivity.CUDA)
    step()
    with (
        _module_ranges(model),
        profile(activities=activities, record_shapes=trace is not None) as profiler,
    ):
        step()  # the profiler's own first calls are no part of the steps
        for _ in range(STEPS):
            with torch.profiler.record_function(STEP):
                step()
    events: list[Any] = list(profiler.events() or [])
    if trace is not None:
        with open_output(trace) as temporary:
            profiler.export_chrome_trace(str(temporary))
    return _summary(events, counts)


def _summary(events: Sequence[Any], counts: Counts) -> Profile:
    counted = {row.operator for row in counts.rows}
    forward_modules = _modules_by_sequence(events)
    seen = _Seen()
    starts = [event.time_range.start for event in events if event.name == STEP]
    begin = min(starts, default=0)
    for event in events:
        is_cpu = event.device_type.name == "CPU"
        if not is_cpu or event.time_range.start < begin:
            continue
        key = _key(event, counted, forward_modules)
        if key is None:
            continue
        seen.seconds[key] += event.self_cpu_time_total * 1e-6 / STEPS
        seen.calls[key] += _is_counted_itself(event, counted)
    rows = [
        OperatorTime(*key, seconds, seen.calls[key] / STEPS)
        for key, seconds in seen.seconds.items()
    ]
    rows.sort(key=lambda row: -row.seconds)
    return Profile(tuple(rows), sum(row.seconds for row in rows))


def _key(
    event: Any, counted: set[str], forward_modules: dict[int, str]
) -> tuple[str, str, str] | None:
    """Return operator, module and phase of an event; None outside of the steps."""
    chain = list(_ancestors(event))
    phase = _phase(chain)
    if phase == "forward" and not any(e.name == STEP for e in chain):
        return None
    return _operator(chain, counted), _module(chain, phase, forward_modules), phase


def _operator(chain: Sequence[Any], counted: set[str]) -> str:
    """Return the outermost kernel that the counter has seen too, or else the event's own
    name; ``(Python)`` for ranges."""
    names = [_kernel_name(event) for event in chain]
    outermost = [name for name in names if name in counted]
    if outermost:
        return outermost[-1]
    return names[0] or PYTHON


def _kernel_name(event: Any) -> str:
    if not event.name.startswith("aten::"):
        return ""
    return base(event.name.removeprefix("aten::"))


def _is_counted_itself(event: Any, counted: set[str]) -> bool:
    name = _kernel_name(event)
    if name not in counted:
        return False
    return not any(_kernel_name(e) in counted for e in list(_ancestors(event))[1:])


def _phase(chain: Sequence[Any]) -> str:
    if any(event.name.startswith(_OPTIMIZER) for event in chain):
        return "optimizer"
    if any(event.name.startswith(_NODE) for event in chain):
        return "backward"
    return "forward"


def _module(chain: Sequence[Any], phase: str, forward_modules: dict[int, str]) -> str:
    if phase == "optimizer":
        return ""
    if phase == "backward":
        nodes = [event for event in chain if event.name.startswith(_NODE)]
        return forward_modules.get(nodes[-1].sequence_nr, "")
    return _innermost_module(chain)


def _innermost_module(chain: Sequence[Any]) -> str:
    for event in chain:
        if event.name.startswith(MODULE):
            return str(event.name).removeprefix(MODULE)
    return ""


def _modules_by_sequence(events: Sequence[Any]) -> dict[int, str]:
    """Return the module of each forward call that has a node in autograd's graph."""
    modules: dict[int, str] = {}
    for event in events:
        number = event.sequence_nr
        if number is None or number < 0 or event.name.startswith(_NODE):
            continue
        chain = list(_ancestors(event))
        if _phase(chain) == "forward":
            modules.setdefault(number, _innermost_module(chain))
    return modules


def _ancestors(event: Any) -> Iterator[Any]:
    while event is not None:
        yield event
        event = event.cpu_parent


@contextmanager
def _module_ranges(model: nn.Module) -> Iterator[None]:
    """Open a range of the profiler around the forward pass of each module."""
    names = {module: name for name, module in model.named_modules()}
    opened: list[Any] = []

    def enter(module: nn.Module, _: Any) -> None:
        name = names.get(module, type(module).__name__)
        record: Any = torch.profiler.record_function(MODULE + name)
        record.__enter__()
        opened.append(record)

    def leave(*_: Any) -> None:
        opened.pop().__exit__(None, None, None)

    handles = [
        register_module_forward_pre_hook(enter),
        register_module_forward_hook(leave, always_call=True),
    ]
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()
