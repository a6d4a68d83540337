"""fp32 stand-ins for low-precision parameters, in their optimizer's groups and state, while it steps.

The parameters themselves are not touched: a parameter whose ``data`` changes its dtype loses its gradient accumulator, and
with it what ``DistributedDataParallel`` has hooked there.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from roundoff.errors import OptimizerError

#: The formats that have a stand-in.
FORMATS = {torch.bfloat16: "bf16", torch.float16: "fp16"}
#: The key of what Kahan's summation keeps in ``optimizer.state[parameter]``: the weight less its true value.
LOST = "compensation"


class Wide:
    """One parameter, its place, and the fp32 tensor that the optimizer steps in place of it."""

    def __init__(
        self, group: int, place: int, parameter: Tensor, lost: Tensor | None
    ) -> None:
        self.group, self.place, self.parameter, self.lost = (
            group,
            place,
            parameter,
            lost,
        )
        self._old: Tensor | None = None
        self.wide = nn.Parameter(self.start())
        self._version = self.wide._version
        self.take_gradient()

    def before(self) -> Tensor:
        """The weight before the step."""
        return self.parameter.detach() if self._old is None else self._old

    def start(self) -> Tensor:
        """The same in fp32, with what the roundings before have lost."""
        return (
            self.before().float()
            if self.lost is None
            else self.before().float() - self.lost.float()
        )

    def take_gradient(self) -> None:
        gradient = self.parameter.grad
        self.wide.grad = None if gradient is None else gradient.float()

    def stand_in(self, optimizer: Any) -> None:
        optimizer.param_groups[self.group]["params"][self.place] = (
            self.wide
        )  # in place: LBFGS keeps the list

    def step_aside(self, optimizer: Any) -> None:
        optimizer.param_groups[self.group]["params"][self.place] = self.parameter

    def show(self) -> None:
        """Let the parameter have the stand-in's value, to nearest."""
        if self.wide._version != self._version:
            if self._old is None:
                self._old = self.parameter.detach().clone()
            self.parameter.copy_(self.wide)
            self._version = self.wide._version

    def back(self) -> None:
        """The parameter as before the step."""
        if self._old is not None:
            with torch.no_grad():
                self.parameter.copy_(self._old)

    def write(self, value: Tensor, *, keep_lost: bool) -> None:
        """The new value, and what it lost: with ``u`` the update, ``y = u - c``, ``s = round(w + y)``, the next ``c`` is
        ``(s - w) - y``, where ``w + y`` is the stand-in. It is 0 where that is not finite."""
        self.lost = None
        if keep_lost:
            lost = (value.float() - self.wide.detach()).to(value.dtype)
            self.lost = torch.where(lost.isfinite(), lost, 0)
        self.parameter.copy_(value)
        self._old = None


def on_the_weights(optimizer: Any, wide: list[Wide], closure: Callable[[], Any]) -> Any:
    """Run a closure, which computes with the weights in their own format, as they would be rounded to nearest now."""
    with torch.no_grad():
        for w in wide:
            w.show()
            w.step_aside(optimizer)
    try:
        with torch.enable_grad():
            return closure()
    finally:
        for w in wide:
            w.stand_in(optimizer)
            w.take_gradient()


@contextmanager
def stand_ins(optimizer: Any, *, every: bool) -> Iterator[list[Wide]]:
    """The parameters in low precision that have a gradient, or ``every`` one, replaced while this is open.

    After an exception weights are as before. Raises ``OptimizerError`` for sparse gradients and shards.
    """
    wide: list[Wide] = []
    for number, group in enumerate(optimizer.param_groups):
        for place, parameter in enumerate(group["params"]):
            if parameter.dtype in FORMATS and (every or parameter.grad is not None):
                _check(parameter, f"parameter {place} of group {number}")
                lost = (
                    optimizer.state[parameter].get(LOST)
                    if parameter in optimizer.state
                    else None
                )
                with torch.no_grad():
                    wide.append(Wide(number, place, parameter, lost))
    for w in wide:
        state = optimizer.state.pop(w.parameter, None)
        if state is not None:
            state.pop(
                LOST, None
            )  # many optimizers make their state where there is none
            if state:
                optimizer.state[w.wide] = state
        w.stand_in(optimizer)
    try:
        yield wide
    except BaseException:
        for w in wide:
            w.back()
        raise
    finally:
        for w in wide:
            w.step_aside(optimizer)
            state = optimizer.state.pop(w.wide, {})
            if w.lost is not None:
                state[LOST] = w.lost
            if state:
                optimizer.state[w.parameter] = state


def _check(parameter: Tensor, where: str) -> None:
    if parameter.grad is not None and parameter.grad.layout is not torch.strided:
        layout, do = (
            str(parameter.grad.layout),
            "nn.Embedding(sparse=False), or leave it to an optimizer of its own",
        )
        raise OptimizerError(
            "a sparse gradient", where=where, expected="a dense one", got=layout, do=do
        )
    if type(parameter.data) is not Tensor:
        raise OptimizerError(
            "a sharded parameter",
            where=where,
            expected="a plain tensor",
            got=type(parameter.data).__name__,
            do="leave it to another optimizer",
        )
