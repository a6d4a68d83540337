"""One site rounded alone, with as little interception as possible: the inner loop of the trial-per-site way."""

from __future__ import annotations

import dataclasses
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_flatten

from roundoff.formats import Format
from roundoff.ops import (
    Call,
    CallMode,
    execute,
    function_body,
    round_operand,
    round_output,
    watch,
)
from roundoff.plan import Plain
from roundoff.workload import Workload


@dataclass(frozen=True)
class Target:
    """Where a site is: the ``ordinal``-th torch function called while ``module`` runs, and its operands."""

    module: str
    ordinal: int
    template: Call


class _Recorder(Plain):
    """Counts, for every module, the calls that a mode active during its forward will see."""

    def __init__(self) -> None:
        super().__init__()
        self.targets: dict[str, Target] = {}
        self.seen: Counter[str] = Counter()

    def run(self, call: Call) -> Any:
        module = call.site.module
        template = dataclasses.replace(call, leaves=[])
        self.targets[str(call.site)] = Target(module, self.seen[module], template)
        return call.run()


class _Counting(TorchFunctionMode):
    """Put above a ``CallMode``: counts each call for all the modules it is made in."""

    def __init__(self, mode: CallMode, recorder: _Recorder) -> None:
        super().__init__()
        self.mode, self.recorder = mode, recorder

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        self.recorder.seen.update({"", *self.mode.position.path})
        inner = function_body(func)
        if inner is not None:
            with self:
                return inner(*args, **(kwargs or {}))
        return func(*args, **(kwargs or {}))


def find_sites(workload: Workload) -> dict[str, Target]:
    """Every site of the first batch."""
    recorder = _Recorder()
    with torch.no_grad(), watch(workload.model, recorder) as mode:
        mode.begin()
        with mode, _Counting(mode, recorder):
            workload.run(workload.batches[0])
    return recorder.targets


class OneSite(TorchFunctionMode):
    """Counts calls while its module runs and rounds the one."""

    def __init__(self, target: Target, fmt: Format) -> None:
        super().__init__()
        self.target, self.fmt = target, fmt
        # before the first batch begins no call is the one: turning gradients off is a call too
        self.count = target.ordinal
        self.rounded: dict[int, torch.Tensor] = {}

    def begin(self) -> None:
        """A new batch."""
        self.count = 0

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        kwargs = kwargs or {}
        self.count += 1
        if self.count == self.target.ordinal:
            return self._round(args, kwargs)
        if self.count < self.target.ordinal:
            inner = function_body(func)
            if inner is not None:
                with self:
                    return inner(*args, **kwargs)
        return func(*args, **kwargs)

    def _round(self, args: Any, kwargs: Any) -> Any:
        call, rule = self.target.template, self.fmt.execution
        leaves = tree_flatten((args, {k: v for k, v in kwargs.items() if k != "out"}))[
            0
        ]
        call = dataclasses.replace(call, leaves=leaves)
        if rule is None or call.operator.inplace or call.kind == "embedding":
            return execute(call, self.fmt)
        for operand in call.operands:
            if operand.role == "activation" and rule.activation is not None:
                leaves[operand.leaf] = round_operand(
                    leaves[operand.leaf], operand, self.fmt
                )
            elif operand.role == "weight" or (operand.role == "bias" and rule.bias):
                if rule.weight is not None and operand.leaf not in self.rounded:
                    self.rounded[operand.leaf] = round_operand(
                        leaves[operand.leaf], operand, self.fmt
                    )
                leaves[operand.leaf] = self.rounded.get(
                    operand.leaf, leaves[operand.leaf]
                )
        result = call.run(leaves)
        return round_output(result, self.fmt) if rule.output else result


@contextmanager
def rounding_alone(model: nn.Module, target: Target, fmt: Format) -> Iterator[OneSite]:
    """Round the target while this is open; nothing is intercepted outside the module that owns it."""
    mode = OneSite(target, fmt)
    if not target.module:
        with mode:
            yield mode
        return
    owner = model.get_submodule(target.module)

    def enter(*_: Any) -> None:
        mode.__enter__()

    def leave(*_: Any) -> None:
        mode.__exit__(None, None, None)

    handles = [
        owner.register_forward_pre_hook(enter),
        owner.register_forward_hook(leave),
    ]
    try:
        yield mode
    finally:
        for handle in handles:
            handle.remove()
