"""Formats that the device has not, in training: rounded values forward, straight-through gradients backward.

The forward pass is the format's execution rule (``capture.execute``). Backward, the gradient that arrives at the operator's
output is rounded once, as the operand of the two products that it enters, and rounding itself has the derivative 1
(straight-through estimator: Bengio, Leonard and Courville, arXiv:1308.3432, section 4).
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_map

from roundoff.capture.calls import Call
from roundoff.capture.execute import execute, gradient_format, round_gradient
from roundoff.formats import Format


def simulated(call: Call, fmt: Format) -> Any:
    """The call's result when executed in ``fmt``, with gradients."""
    result = execute(call, fmt, through)
    if gradient_format(fmt) is None:
        return result
    return tree_map(lambda t: receive_gradient(t, fmt) if isinstance(t, Tensor) and t.requires_grad else t, result)


def through(exact: Tensor, rounded: Tensor) -> Tensor:
    """``rounded``, whose gradient goes to ``exact`` unchanged.

    >>> x = torch.tensor([1.3], requires_grad=True)
    >>> (3 * through(x, torch.tensor([1.25]))).backward()
    >>> x.grad
    tensor([3.])
    """
    return _Through.apply(exact, rounded)  # type: ignore[no-any-return, no-untyped-call]


def receive_gradient(value: Tensor, fmt: Format) -> Tensor:
    """``value``, whose gradient is rounded on the way back as an operator executed in ``fmt`` receives it."""
    return _RoundGradient.apply(value, fmt)  # type: ignore[no-any-return, no-untyped-call]


class _Through(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, exact: Tensor, rounded: Tensor) -> Tensor:
        return rounded.view_as(rounded)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        return gradient, None


class _RoundGradient(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, value: Tensor, fmt: Format) -> Tensor:
        ctx.fmt = fmt
        return value.view_as(value)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        return round_gradient(gradient, ctx.fmt, written=False), None
