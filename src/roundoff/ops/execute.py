"""Run one operator call in a number format: what "executed in bf16" means.

A format's execution rule (``Format.execution``) names the parts that are rounded:
activation operands, weights (with biases where the format rounds them), and the output.
A bf16 matmul rounds operands and output and accumulates in fp32; an int8 matmul
quantizes operands and weights with scales, accumulates exactly and leaves an fp32
output. Rounding is simulated in the reference's own dtype, so any format runs on any
device.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_map

from roundoff.formats import (
    BlockFormat,
    Execution,
    Format,
    Granularity,
    PerAxis,
    PerGroup,
    PerTensor,
    PerToken,
    round_tensor,
)
from roundoff.ops.calls import Call, Operand
from roundoff.ops.table import MATRIX_KINDS, operators_that


def runs(call: Call, fmt: Format) -> str | None:
    """Return None when this operator can be executed in ``fmt``, else the reason why not."""
    weight = any(operand.role == "weight" for operand in call.operands)
    return runs_kind(call.kind, weight, fmt)


def runs_kind(kind: str, weight: bool, fmt: Format) -> str | None:
    """Return the same as ``runs`` for any call of a kind, with or without a weight."""
    rule = fmt.execution
    if rule is None:
        return f"{fmt.name} holds scales, not values"
    if rule.operators != "matrix":
        return None
    if kind not in MATRIX_KINDS:
        return f"no {fmt.name} arithmetic for {kind} operators"
    if rule.activation is None and not weight:
        return f"{fmt.name} is for weights, and this operator has none"
    if kind == "embedding" and not weight:
        return "the looked-up table is not a parameter"
    return None


@dataclass(frozen=True)
class RoundingStep:
    """One more part of a call rounded.

    Attributes:
        part: ``activation``, ``weight`` or ``output``.
        operand: the operand that was rounded; None for the output.
        result: the result so far.
    """

    part: str
    operand: Operand | None
    result: Any


#: Rounds an operand the way a format does: ``round_operand``, or ``RoundedOperands``.
Rounder = Callable[[Tensor, Operand, Format], Tensor]


def rounding_steps(
    call: Call, fmt: Format, reference: Any, rounder: Rounder | None = None
) -> Iterator[RoundingStep]:
    """Execute a call in ``fmt`` one part at a time: activations one by one, weights, the output.

    The weights of a recurrent layer are rounded together.

    Each step keeps the roundings of the steps before it, so the differences between
    consecutive results add up to the whole error exactly: nothing is counted twice (the
    output part of a ReLU whose operand is already rounded is zero). ``reference`` is
    the result with nothing rounded; parts that do not apply are left out. ``rounder``
    rounds the operands, ``round_operand`` by default.
    """
    rule = fmt.execution
    if rule is None:
        return
    if _looks_up(call, fmt):
        yield from _rounded_rows(call, fmt, reference)
        return
    execution = _Execution(call, fmt, rounder or round_operand, reference)
    for operand in call.operands:
        if operand.role == "activation" and rule.activation is not None:
            yield execution.with_activation(operand)
    weights = [
        operand
        for operand in call.operands
        if operand.role != "activation" and _rounds_operand(rule, operand)
    ]
    if call.kind == "rnn" and weights:
        yield execution.with_weights(weights)
    else:
        for operand in weights:
            yield execution.with_weight(operand)
    if rule.output:
        yield execution.with_output()


class _Execution:
    """A call of which more and more parts are rounded."""

    def __init__(
        self, call: Call, fmt: Format, rounder: Rounder, reference: Any
    ) -> None:
        self.call = call
        self.fmt = fmt
        self.rounder = rounder
        self.leaves = list(call.leaves)
        self.result = reference

    def with_activation(self, operand: Operand) -> RoundingStep:
        """Round an activation."""
        exact = self._round(operand)
        # the first states of a recurrent layer are zero
        is_unchanged = self.call.kind == "rnn" and torch.equal(
            self.leaves[operand.leaf], exact
        )
        if not is_unchanged:
            self.result = self.call.again(self.leaves)
        return RoundingStep("activation", operand, self.result)

    def with_weight(self, operand: Operand) -> RoundingStep:
        """Round a weight or a bias."""
        exact = self._round(operand)
        if operand.role == "bias" and adds_bias_last(self.call):
            shift = self.leaves[operand.leaf] - exact
            self.result = self.result + bias_shift(self.call, shift)
        else:
            self.result = self.call.again(self.leaves)
        return RoundingStep("weight", operand, self.result)

    def with_weights(self, operands: list[Operand]) -> RoundingStep:
        """Round the weights of a recurrent layer: each by itself would run all of it."""
        for operand in operands:
            self._round(operand)
        self.result = self.call.again(self.leaves)
        sources = frozenset().union(*(operand.sources for operand in operands))
        joined = replace(operands[0], sources=sources)
        return RoundingStep("weight", joined, self.result)

    def with_output(self) -> RoundingStep:
        """Round the result."""
        rule = self.fmt.execution
        is_chosen = self.call.operator.name in _CHOOSES
        is_in_format = rule is not None and rule.activation == "exact" and is_chosen
        if not is_in_format:
            self.result = round_output(self.result, self.fmt)
        return RoundingStep("output", None, self.result)

    def _round(self, operand: Operand) -> Tensor:
        """Round an operand, and return it as it was."""
        exact: Tensor = self.leaves[operand.leaf]
        self.leaves[operand.leaf] = self.rounder(exact, operand, self.fmt)
        return exact


def _rounded_rows(call: Call, fmt: Format, reference: Any) -> Iterator[RoundingStep]:
    result = reference
    for operand in call.operands:
        result = _map_rounded(lambda rows: round_rows(rows, fmt), result)
        part = "weight" if operand.role == "weight" else "activation"
        yield RoundingStep(part, operand, result)


def adds_bias_last(call: Call) -> bool:
    """Return True for a product of input and weight that a bias is added to at the end.

    The bias may be None, and its error needs no second run. Under autocast it is
    rounded on the way.
    """
    is_added = call.operator.name == "linear" or call.operator.name in _CONVOLUTIONS
    return is_added and not call.autocast


#: Their results are values of their operands, in the format that those are in.
_CHOOSES = operators_that("choose values")
_CONVOLUTIONS = frozenset(f"conv{dimensions}d" for dimensions in (1, 2, 3))


def bias_shift(call: Call, shift: Tensor) -> Tensor:
    """Return the error of a bias, shaped to be added to the result."""
    after_channels = 0 if call.kind == "linear" else int(call.operator.name[4])
    return shift.view(-1, *[1] * after_channels)


def execute(
    call: Call,
    fmt: Format,
    through: Callable[[Tensor, Tensor], Tensor] = lambda _, rounded: rounded,
) -> Any:
    """Return the call's result when executed in ``fmt`` (an in-place operator writes, as it would).

    ``through(exact, rounded)`` gives the tensor that is used for a rounded one:
    training passes gradients through it.
    """
    rule = fmt.execution
    if rule is None:
        return call.run()
    if _looks_up(call, fmt):
        return _map_rounded(
            lambda rows: through(rows, round_rows(rows, fmt)), call.run()
        )
    result = call.run(_rounded_leaves(call, fmt, through))
    if not rule.output:
        return result
    if call.operator.inplace:
        with torch.no_grad():
            return result.copy_(round_output(result, fmt))
    return _map_rounded(lambda t: through(t, round_tensor(t.detach(), fmt)), result)


def _rounded_leaves(
    call: Call, fmt: Format, through: Callable[[Tensor, Tensor], Tensor]
) -> list[Any]:
    """The call's leaves with its operands rounded; what an in-place operator writes is
    rounded there.
    """
    rule = fmt.execution
    leaves = list(call.leaves)
    for operand in call.operands:
        if rule is None or not _rounds_operand(rule, operand):
            continue
        rounded = round_operand(leaves[operand.leaf], operand, fmt)
        if call.operator.inplace and operand.leaf == 0:
            with torch.no_grad():
                leaves[0].copy_(rounded)
        else:
            leaves[operand.leaf] = through(leaves[operand.leaf], rounded)
    return leaves


def rounds_operand(fmt: Format, operand: Operand) -> bool:
    """Return True if executing a call in ``fmt`` rounds this operand."""
    return fmt.execution is not None and _rounds_operand(fmt.execution, operand)


def _rounds_operand(rule: Execution, operand: Operand) -> bool:
    if operand.role == "bias" and not rule.bias:
        return False
    return _way(rule, operand) is not None


def _way(rule: Execution, operand: Operand) -> str | None:
    """How an operand is rounded: exact, or with a scale for each tensor, channel, token
    or block.
    """
    return rule.activation if operand.role == "activation" else rule.weight


def _looks_up(call: Call, fmt: Format) -> bool:
    """Return True where rounding the rows that were looked up is rounding the table.

    Each row then has its own scale, or none.
    """
    if fmt.execution is None or call.operator.name != "embedding":
        return False
    return fmt.execution.weight not in (None, "tensor")


def round_operand(x: Tensor, operand: Operand, fmt: Format) -> Tensor:
    """Round ``x`` the way ``fmt`` rounds this operand.

    That is a plain cast, or with a scale for each tensor, channel, token or block. An
    empty tensor and an operand that the format leaves alone are returned as they are.
    """
    way = None if fmt.execution is None else _way(fmt.execution, operand)
    if way is None or x.numel() == 0:
        return x
    if operand.role == "activation":
        fmt = fmt.of_activations
    x = x.detach()
    if way == "exact":
        return round_tensor(x, fmt)
    if way in ("block", "group"):
        has_axis = -x.ndim <= operand.reduce < x.ndim
        return _round_blocks(x, fmt, operand.reduce if has_axis else -1)
    granularity: Granularity = PerTensor()
    if way == "channel" and x.ndim > 1:
        granularity = PerAxis(operand.channel % x.ndim)
    elif way == "token" and x.ndim > 1:
        granularity = PerToken()
    return round_tensor(x, fmt, granularity=granularity)


def round_rows(rows: Tensor, fmt: Format) -> Tensor:
    """Round rows of a table, each with its own scale."""
    rule = fmt.execution
    if rule is None or rows.numel() == 0:
        return rows
    if rule.weight == "exact":
        return round_tensor(rows.detach(), fmt)
    if rule.weight in ("block", "group"):
        return _round_blocks(rows.detach(), fmt, -1)
    return round_tensor(rows.detach(), fmt, granularity=PerToken())


def round_output(value: Any, fmt: Format) -> Any:
    """Cast every floating-point tensor of a result to ``fmt``."""
    return _map_rounded(lambda t: round_tensor(t.detach(), fmt), value)


#: Exponents of fp8_e5m2, from the smallest normal one to the largest: the range that
#: gradients need.
_GRADIENT_EXPONENTS = 30


def gradient_format(fmt: Format) -> Format | None:
    """Return the format of gradients beside a format of values; None where they stay as they are.

    That is the format's ``gradient_format`` (fp8_e4m3 names e5m2, which has the range
    that gradients need: Micikevicius et al., FP8 Formats for Deep Learning,
    arXiv:2209.05433, section 3), or the format itself where its exponents reach as far.
    Integers, formats with block scales and formats of weights alone are for values.
    """
    if fmt.gradient_format is not None:
        return fmt.gradient_format
    rule = fmt.execution
    if rule is None or rule.activation not in ("exact", "tensor"):
        return None
    exponents = fmt.emax - fmt.emin + 1
    return fmt if exponents >= _GRADIENT_EXPONENTS else None


def round_gradient(gradient: Tensor, fmt: Format, *, written: bool) -> Tensor:
    """Round a gradient as an operator in ``fmt`` receives it (of its output), or writes it.

    It is received in ``gradient_format``, scaled per tensor where that is scaled.
    ``written`` is the gradient of an operand: it is rounded only where the format
    rounds outputs (bf16, not tf32 or fp8). Formats without one for gradients leave them
    alone: straight through.
    """
    rule = fmt.execution
    target = gradient_format(fmt)
    if rule is None or target is None or gradient.numel() == 0:
        return gradient
    if written and not rule.output:
        return gradient
    if rule.activation == "tensor":
        return round_tensor(gradient.detach(), target, granularity=PerTensor())
    return round_tensor(gradient.detach(), target)


def _round_blocks(x: Tensor, fmt: Format, axis: int) -> Tensor:
    """Round blocks along ``axis``; a last block that is not full gets zeros, which
    change no maximum.
    """
    size = fmt.block_size if isinstance(fmt, BlockFormat) else fmt.group_size
    missing = -x.shape[axis] % size
    granularity = PerGroup(size, axis)
    if not missing:
        return round_tensor(x, fmt, granularity=granularity)
    shape = list(x.shape)
    shape[axis] = missing
    padded = torch.cat([x, x.new_zeros(shape)], dim=axis)
    rounded = round_tensor(padded, fmt, granularity=granularity)
    return rounded.narrow(axis, 0, x.shape[axis])


def _map_rounded(function: Callable[[Tensor], Tensor], value: Any) -> Any:
    """``value`` with ``function`` of each floating-point tensor that has elements."""
    if isinstance(value, Tensor):
        return function(value) if _rounds(value) else value
    return tree_map(lambda t: function(t) if _rounds(t) else t, value)


def _rounds(value: Any) -> bool:
    return isinstance(value, Tensor) and value.is_floating_point() and value.numel() > 0
