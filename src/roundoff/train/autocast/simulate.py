"""Formats that the device does not have, in training: rounded values forward,
straight-through gradients backward.

The forward pass is the format's execution rule (``ops.execute``). Backward, the gradient
that arrives at the operator's output is rounded once, as the operand of the two products
that it enters; that of an operand is rounded as the operator writes it. Rounding itself
has the derivative 1 (straight-through estimator: Bengio, Leonard and Courville,
arXiv:1308.3432, section 4).
"""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_map

from roundoff.formats import Execution, Format
from roundoff.ops import (
    Call,
    Operand,
    execute,
    gradient_format,
    round_gradient,
    round_operand,
    round_output,
)


def simulated(call: Call, fmt: Format) -> Any:
    """Run a call in ``fmt``, with gradients; an in-place operator writes its result.

    A format that has no execution rule leaves the call as it is.
    """
    rule = fmt.execution
    if rule is None:
        return call.run()
    receive = partial(_output, fmt=fmt, rule=rule)
    if call.kind == "embedding" and not rule.output:
        # execute rounds the rows that were looked up, where that gives the same, not
        # the table
        return tree_map(receive, execute(call, fmt, partial(straight, fmt=fmt)))
    leaves = list(call.leaves)
    for operand in call.operands:
        if _is_rounded(operand, rule):
            exact = leaves[operand.leaf]
            rounded = round_operand(exact, operand, fmt)
            leaves[operand.leaf] = straight(exact, rounded, fmt, written=True)
    result = tree_map(receive, call.again(leaves))
    return call.leaves[0].copy_(result) if call.operator.inplace else result


def _is_rounded(operand: Operand, rule: Execution) -> bool:
    if operand.role == "activation":
        return rule.activation is not None
    return rule.weight is not None and (operand.role != "bias" or rule.bias)


def _output(value: Any, fmt: Format, rule: Execution) -> Any:
    """Round an output where the format does, and the gradient that arrives there."""
    if not isinstance(value, Tensor) or not value.is_floating_point():
        return value
    rounded = round_output(value, fmt) if rule.output else value
    if not value.requires_grad or (not rule.output and gradient_format(fmt) is None):
        return rounded
    return straight(value, rounded, fmt)


def straight(
    exact: Tensor, rounded: Tensor, fmt: Format | None = None, *, written: bool = False
) -> Tensor:
    """Return ``rounded``, in memory of its own, whose gradient goes to ``exact``.

    The gradient is unchanged, or rounded as an operator in ``fmt`` receives it or, with
    ``written``, writes it (see ``ops.round_gradient``).

    >>> x = torch.tensor([1.3], requires_grad=True)
    >>> (3 * straight(x, torch.tensor([1.25]))).backward()
    >>> x.grad
    tensor([3.])
    """
    result: Tensor = _Straight.apply(exact, [rounded], fmt, written)  # type: ignore[no-untyped-call]
    return result


class _Straight(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        exact: Tensor,
        rounded: list[Tensor],
        fmt: Format | None,
        written: bool,
    ) -> Tensor:
        ctx.fmt = fmt
        ctx.written = written
        (values,) = rounded  # in a list, so that autograd does not take it for an input
        shares = values.untyped_storage()._cdata == exact.untyped_storage()._cdata
        # a view made here could not be written in place afterwards
        return values.clone() if shares else values

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> tuple[Any, ...]:
        (gradient,) = gradients
        if ctx.fmt is not None:
            gradient = round_gradient(gradient, ctx.fmt, written=ctx.written)
        return gradient, None, None, None
