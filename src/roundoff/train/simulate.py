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
from roundoff.capture.execute import execute
from roundoff.formats import FORMATS, Format, PerTensor, round_tensor


def gradient_format(fmt: Format) -> Format | None:
    """The format of gradients beside a format of values; None where they stay as they are.

    fp8_e4m3 goes with e5m2, which has the range that gradients need (Micikevicius et al., FP8 Formats for Deep Learning,
    arXiv:2209.05433, section 3); integers and formats with block scales are for values alone.
    """
    beside = {"fp8_e4m3fn": "fp8_e5m2", "fp8_e4m3fnuz": "fp8_e5m2fnuz"}
    if fmt.name in beside:
        return FORMATS[beside[fmt.name]]
    own = fmt.name in ("fp64", "fp32", "tf32", "bf16", "fp16", "fp8_e5m2", "fp8_e5m2fnuz", "hif8")
    return fmt if own else None


def simulated(call: Call, fmt: Format) -> Any:
    """The call's result when executed in ``fmt``, with gradients."""
    result = execute(call, fmt, through)
    back = gradient_format(fmt)
    if back is None:
        return result
    return tree_map(lambda t: round_gradient(t, back) if isinstance(t, Tensor) and t.requires_grad else t, result)


def through(exact: Tensor, rounded: Tensor) -> Tensor:
    """``rounded``, whose gradient goes to ``exact`` unchanged.

    >>> x = torch.tensor([1.3], requires_grad=True)
    >>> (3 * through(x, torch.tensor([1.25]))).backward()
    >>> x.grad
    tensor([3.])
    """
    return _Through.apply(exact, rounded)  # type: ignore[no-any-return, no-untyped-call]


def round_gradient(value: Tensor, fmt: Format) -> Tensor:
    """``value``, whose gradient is rounded to ``fmt`` on the way back (scaled per tensor where the format is scaled)."""
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
        rule = ctx.fmt.execution
        if rule is not None and rule.activation == "tensor" and gradient.numel():
            return round_tensor(gradient, ctx.fmt, granularity=PerTensor()), None
        return round_tensor(gradient, ctx.fmt), None
