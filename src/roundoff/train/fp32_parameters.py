"""fp32 stand-ins for low-precision parameters, in their optimizer's groups and state,
while it steps.

The parameters themselves are not touched: a parameter whose ``data`` changes its dtype
loses its gradient accumulator, and with it what ``DistributedDataParallel`` has hooked
there.
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
#: The key of what Kahan's summation keeps in ``optimizer.state[parameter]``: the weight
#: less its true value.
COMPENSATION = "compensation"


class StandIn:
    """The fp32 tensor that an optimizer steps in place of a parameter.

    Attributes:
        group: number of the parameter group.
        place: place in that group.
        parameter: the parameter.
        lost: what Kahan's summation kept of the step before; None without.
        wide: the fp32 tensor.
    """

    def __init__(
        self, group: int, place: int, parameter: Tensor, lost: Tensor | None
    ) -> None:
        self.group = group
        self.place = place
        self.parameter = parameter
        self.lost = lost
        self._old: Tensor | None = None
        self.wide = nn.Parameter(self.start())
        self._version = self.wide._version
        self.take_gradient()

    def before(self) -> Tensor:
        """Return the weight before the step."""
        return self.parameter.detach() if self._old is None else self._old

    def start(self) -> Tensor:
        """Return the weight before the step in fp32, with what the roundings before have lost."""
        weight = self.before().float()
        return weight if self.lost is None else weight - self.lost.float()

    def take_gradient(self) -> None:
        """Copy the parameter's gradient, in fp32."""
        gradient = self.parameter.grad
        self.wide.grad = None if gradient is None else gradient.float()

    def stand_in(self, optimizer: Any) -> None:
        """Put the fp32 tensor into the optimizer's group, in place: LBFGS keeps the list."""
        optimizer.param_groups[self.group]["params"][self.place] = self.wide

    def step_aside(self, optimizer: Any) -> None:
        """Put the parameter back into the optimizer's group."""
        optimizer.param_groups[self.group]["params"][self.place] = self.parameter

    def take_state(self, optimizer: Any) -> None:
        """Move the optimizer's state from the parameter to the fp32 tensor."""
        state = optimizer.state.pop(self.parameter, None)
        if state is None:
            return
        state.pop(COMPENSATION, None)
        if state:  # many optimizers make their state where there is none
            optimizer.state[self.wide] = state

    def return_state(self, optimizer: Any) -> None:
        """Move the optimizer's state back to the parameter, with what the rounding has lost."""
        state = optimizer.state.pop(self.wide, {})
        if self.lost is not None:
            state[COMPENSATION] = self.lost
        if state:
            optimizer.state[self.parameter] = state

    def show(self) -> None:
        """Give the parameter the value of the fp32 tensor, to nearest."""
        if self.wide._version != self._version:
            if self._old is None:
                self._old = self.parameter.detach().clone()
            self.parameter.copy_(self.wide)
            self._version = self.wide._version

    def undo(self) -> None:
        """Give the parameter its value before the step."""
        if self._old is not None:
            with torch.no_grad():
                self.parameter.copy_(self._old)

    def write(self, value: Tensor, *, keep_lost: bool) -> None:
        """Write the new value, and keep what its rounding lost.

        With ``u`` the update, ``y = u - c``, ``s = round(w + y)``, the next ``c`` is
        ``(s - w) - y``, where ``w + y`` is the stand-in. It is 0 where that is not finite.
        """
        self.lost = None
        if keep_lost:
            lost = (value.float() - self.wide.detach()).to(value.dtype)
            self.lost = torch.where(lost.isfinite(), lost, 0)
        self.parameter.copy_(value)
        self._old = None


def run_on_weights(
    optimizer: Any, stand_ins: list[StandIn], closure: Callable[[], Any]
) -> Any:
    """Run a closure, which computes with the weights in their own format, as they would
    be rounded to nearest now.
    """
    with torch.no_grad():
        for each in stand_ins:
            each.show()
            each.step_aside(optimizer)
    try:
        with torch.enable_grad():
            return closure()
    finally:
        for each in stand_ins:
            each.stand_in(optimizer)
            each.take_gradient()


@contextmanager
def fp32_parameters(optimizer: Any, *, every: bool) -> Iterator[list[StandIn]]:
    """Replace the parameters in low precision that have a gradient, or ``every`` one, inside.

    After an exception weights are as before. Raises ``OptimizerError`` for sparse gradients
    and shards.
    """
    stand_ins = _stand_ins(optimizer, every)
    for each in stand_ins:
        each.take_state(optimizer)
        each.stand_in(optimizer)
    try:
        yield stand_ins
    except BaseException:
        for each in stand_ins:
            each.undo()
        raise
    finally:
        for each in stand_ins:
            each.step_aside(optimizer)
            each.return_state(optimizer)


def _stand_ins(optimizer: Any, every: bool) -> list[StandIn]:
    stand_ins: list[StandIn] = []
    for number, group in enumerate(optimizer.param_groups):
        for place, parameter in enumerate(group["params"]):
            is_stepped = every or parameter.grad is not None
            if parameter.dtype not in FORMATS or not is_stepped:
                continue
            _check(parameter, f"parameter {place} of group {number}")
            lost = None
            if parameter in optimizer.state:
                lost = optimizer.state[parameter].get(COMPENSATION)
            with torch.no_grad():
                stand_ins.append(StandIn(number, place, parameter, lost))
    return stand_ins


def _check(parameter: Tensor, where: str) -> None:
    if parameter.grad is not None and parameter.grad.layout is not torch.strided:
        raise OptimizerError(
            "a sparse gradient",
            where=where,
            expected="a dense one",
            got=str(parameter.grad.layout),
            do="nn.Embedding(sparse=False), or leave it to an optimizer of its own",
        )
    if type(parameter.data) is not Tensor:
        raise OptimizerError(
            "a sharded parameter",
            where=where,
            expected="a plain tensor",
            got=type(parameter.data).__name__,
            do="leave it to another optimizer",
        )
