"""The errors of operators that are linear in every operand, without running them again.

With y = W x and the gradients g_x at this use of x and g_y at y, an error of x costs
``g_x . dx`` and an error of W costs ``g_y . (dW x)``: the first needs no product at
all, the second one for all formats together. The product of two errors, dW dx, is left
out, as everything of second order is. Among few elements that shows, so small calls are
run again instead. The output is rounded from the result of rounded operands: where that
is in the format already (a product with a selection), nothing is lost twice.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch
from torch import Tensor

from roundoff.budget.terms import TermKey
from roundoff.formats import Format
from roundoff.ops import (
    LINEAR_KINDS,
    Call,
    Operand,
    RoundedOperands,
    adds_bias_last,
    bias_shift,
    float_tensors,
    round_output,
    rounds_operand,
)

#: Elements of results that are computed for all formats together.
_SMALL = 2**18


#: Elements of the activations of a call from which on its errors are taken apart.
_LARGE = 2**12


def is_linear(call: Call) -> bool:
    """Return True if a call is large, and linear in each of its operands."""
    if call.kind not in LINEAR_KINDS or call.operator.inplace:
        return False
    elements: int = sum(call.leaves[o.leaf].numel() for o in activations(call))
    return elements >= _LARGE


def activations(call: Call) -> list[Operand]:
    """Return the operands whose errors are seen by their own gradients."""
    return [operand for operand in call.operands if operand.role == "activation"]


def operand_errors(
    call: Call,
    operand: Operand,
    x: Tensor,
    formats: Sequence[Format],
    rounded: RoundedOperands,
) -> Iterator[tuple[TermKey, Tensor]]:
    """Yield what each format that rounds an activation changes of it, ``x``."""
    for fmt in formats:
        if rounds_operand(fmt, operand):
            yield _key(call, fmt, operand), rounded(x, operand, fmt) - x


def result_errors(
    call: Call,
    exact: Tensor,
    formats: Sequence[Format],
    rounded: RoundedOperands,
) -> Iterator[tuple[TermKey, Tensor]]:
    """Yield what rounded weights, biases and outputs change of the result ``exact``."""
    for operand in call.operands:
        if operand.role == "activation":
            continue
        rounding = [fmt for fmt in formats if rounds_operand(fmt, operand)]
        keys = [_key(call, fmt, operand) for fmt in rounding]
        weight = call.leaves[operand.leaf]
        errors = [rounded(weight, operand, fmt) - weight for fmt in rounding]
        yield from zip(keys, _results(call, operand, exact, errors), strict=True)
    for fmt in formats:
        if fmt.execution is not None and fmt.execution.output:
            key = TermKey(str(call.site), fmt.name, "output", -1, ())
            result = _of_rounded_operands(call, fmt, rounded)
            yield key, round_output(result, fmt) - result


def _of_rounded_operands(call: Call, fmt: Format, rounded: RoundedOperands) -> Tensor:
    leaves = list(call.leaves)
    for operand in call.operands:
        if rounds_operand(fmt, operand):
            leaves[operand.leaf] = rounded(leaves[operand.leaf], operand, fmt)
    return float_tensors(call.run(leaves))[0]


def _key(call: Call, fmt: Format, operand: Operand) -> TermKey:
    part = "activation" if operand.role == "activation" else "weight"
    sources = tuple(sorted(operand.sources))
    return TermKey(str(call.site), fmt.name, part, operand.leaf, sources)


def _results(
    call: Call, operand: Operand, exact: Tensor, errors: list[Tensor]
) -> Iterator[Tensor]:
    """Yield the call's results with each error in the place of an operand."""
    leaves = list(call.leaves)
    if not errors:
        return
    if not adds_bias_last(call):
        for error in errors:
            leaves[operand.leaf] = call.leaves[operand.leaf] + error
            yield float_tensors(call.run(leaves))[0] - exact
        return
    if operand.role == "bias":
        for error in errors:
            yield bias_shift(call, error).expand(exact.shape)
        return
    for other in call.operands:
        if other.role == "bias":
            leaves[other.leaf] = None
    if len(errors) * exact.numel() <= _SMALL and _meets_all_channels(call, operand):
        leaves[operand.leaf] = torch.cat(errors)
        yield from call.run(leaves).chunk(len(errors), call.operands[0].reduce)
        return
    for error in errors:
        leaves[operand.leaf] = error
        yield call.run(leaves)


def _meets_all_channels(call: Call, weight: Operand) -> bool:
    """Return True unless the operator works in groups of channels."""
    data = call.operands[0]
    channels = call.leaves[data.leaf].shape[data.reduce]
    return bool(call.leaves[weight.leaf].shape[weight.reduce] == channels)
