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

from roundoff.formats import Format
from roundoff.ops import Call, execute, gradient_format, round_gradient


def simulated(call: Call, fmt: Format) -> Any:
    """The call's result when executed in ``fmt``, with gradients."""
    result = execute(call, fmt, straight)
    if gradient_format(fmt) is None:
        return result
    return tree_map(
        lambda t: (
            straight(t, t, fmt) if isinstance(t, Tensor) and t.requires_grad else t
        ),
        result,
    )


def straight(
    exact: Tensor, rounded: Tensor, fmt: Format | None = None, *, written: bool = False
) -> Tensor:
    """``rounded``, in memory of its own, whose gradient goes to ``exact``: unchanged, or rounded as an operator in ``fmt``
    receives it or, ``written``, writes it (see ``capture.execute.round_gradient``).

    >>> x = torch.tensor([1.3], requires_grad=True)
    >>> (3 * straight(x, torch.tensor([1.25]))).backward()
    >>> x.grad
    tensor([3.])
    """
    found: Tensor = _Straight.apply(exact, [rounded], fmt, written)  # type: ignore[no-untyped-call]
    return found


class _Straight(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        exact: Tensor,
        rounded: list[Tensor],
        fmt: Format | None,
        written: bool,
    ) -> Tensor:
        ctx.how = fmt, written
        # a view made here could not be written in place afterwards
        same = rounded[0].untyped_storage()._cdata == exact.untyped_storage()._cdata
        return rounded[0].clone() if same else rounded[0]

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> tuple[Any, ...]:
        fmt, written = ctx.how
        (gradient,) = gradients
        return (
            gradient if fmt is None else round_gradient(gradient, fmt, written=written),
            None,
            None,
            None,
        )
