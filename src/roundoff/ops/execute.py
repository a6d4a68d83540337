"""Run one operator call in a number format: the single place that says what "executed in bf16" means.

A format's execution rule (``Format.execution``) names the parts that are rounded: activation operands, weights
(with biases where the format rounds them), and the output. A bf16 matmul rounds operands and output and
accumulates in fp32; an int8 matmul quantizes operands and weights with scales, accumulates exactly and leaves
an fp32 output. Rounding is simulated in the reference's own dtype, so any format runs on any device.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_map

from roundoff.formats import (
    BlockFormat,
    Format,
    Granularity,
    PerAxis,
    PerGroup,
    PerTensor,
    PerToken,
    round_tensor,
)
from roundoff.ops.calls import Call, Operand
from roundoff.ops.table import MATRIX_KINDS


def runs(call: Call, fmt: Format) -> str | None:
    """None when this operator can be executed in ``fmt``, else the reason why not."""
    weight = any(operand.role == "weight" for operand in call.operands)
    return runs_kind(call.kind, weight, fmt)


def runs_kind(kind: str, weight: bool, fmt: Format) -> str | None:
    """``runs`` for any call of a kind, with or without a weight."""
    rule = fmt.execution
    if rule is None:
        return f"{fmt.name} holds scales, not values"
    if rule.operators == "matrix":
        if kind not in MATRIX_KINDS:
            return f"no {fmt.name} arithmetic for {kind} operators"
        if rule.activation is None and not weight:
            return f"{fmt.name} is for weights, and this operator has none"
        if kind == "embedding" and not weight:
            return "the looked-up table is not a parameter"
    return None


#: Operators that add their bias at the end, to the last axis (linear) or axis 1: its error needs no second run.
_ADDS_BIAS = frozenset({"linear", "conv1d", "conv2d", "conv3d"})


@dataclass(frozen=True)
class Step:
    """One more part of a call rounded: which part, which operand (-1 for the output), and the result so far."""

    part: str
    operand: Operand | None
    result: Any


def steps(call: Call, fmt: Format, reference: Any) -> Iterator[Step]:
    """The call executed in ``fmt`` one part at a time: activation operands one by one, then weights, then output.

    Each step keeps the roundings of the steps before it, so the differences between consecutive results add up
    to the whole error exactly: nothing is counted twice (the output part of a ReLU whose operand is already
    rounded is zero). ``reference`` is the result with nothing rounded; parts that do not apply are left out.
    """
    rule = fmt.execution
    if rule is None:
        return
    leaves = list(call.leaves)
    result = reference
    looked_up = _looks_up(call, fmt)
    if rule.activation is not None and not looked_up:
        for operand in call.operands:
            if operand.role == "activation":
                leaves[operand.leaf] = round_operand(leaves[operand.leaf], operand, fmt)
                result = call.again(leaves)
                yield Step("activation", operand, result)
    if rule.weight is not None:
        weights = [
            o
            for o in call.operands
            if o.role == "weight" or (o.role == "bias" and rule.bias)
        ]
        if looked_up:
            for operand in call.operands:
                result = tree_map(
                    lambda rows: round_rows(rows, fmt) if _rounds(rows) else rows,
                    result,
                )
                yield Step(
                    "weight" if operand.role == "weight" else "activation",
                    operand,
                    result,
                )
        else:
            for operand in weights:
                exact = leaves[operand.leaf]
                leaves[operand.leaf] = round_operand(exact, operand, fmt)
                # under autocast the bias is rounded on the way
                if (
                    operand.role == "bias"
                    and call.operator.name in _ADDS_BIAS
                    and not call.autocast
                ):
                    shift = leaves[operand.leaf] - exact
                    after = (
                        0 if call.kind == "linear" else int(call.operator.name[4])
                    )  # axes after the channels
                    result = result + shift.view(-1, *[1] * after)
                else:
                    result = call.again(leaves)
                yield Step("weight", operand, result)
    if rule.output and not looked_up:
        yield Step("output", None, round_output(result, fmt))


def execute(
    call: Call,
    fmt: Format,
    through: Callable[[Tensor, Tensor], Tensor] = lambda _, rounded: rounded,
) -> Any:
    """The call's result when executed in ``fmt`` (an in-place operator writes, as it would).

    ``through(exact, rounded)`` gives the tensor that is used for a rounded one: training passes gradients through it.
    """
    rule = fmt.execution
    if rule is None:
        return call.run()
    if _looks_up(call, fmt):
        return tree_map(
            lambda rows: (
                through(rows, round_rows(rows, fmt)) if _rounds(rows) else rows
            ),
            call.run(),
        )
    leaves = list(call.leaves)
    for operand in call.operands:
        how = rule.activation if operand.role == "activation" else rule.weight
        if how is not None and (operand.role != "bias" or rule.bias):
            rounded = round_operand(leaves[operand.leaf], operand, fmt)
            if call.operator.inplace and operand.leaf == 0:
                with torch.no_grad():
                    leaves[0].copy_(rounded)
            else:
                leaves[operand.leaf] = through(leaves[operand.leaf], rounded)
    result = call.run(leaves)
    if not rule.output:
        return result
    if call.operator.inplace:
        with torch.no_grad():
            return result.copy_(round_output(result, fmt))
    return tree_map(
        lambda t: through(t, round_tensor(t.detach(), fmt)) if _rounds(t) else t, result
    )


def _looks_up(call: Call, fmt: Format) -> bool:
    """Whether rounding the rows that were looked up gives the same values as rounding the table: each row has its own
    scale, or none."""
    rule = fmt.execution
    return (
        rule is not None
        and call.operator.name == "embedding"
        and rule.weight not in (None, "tensor")
    )


def round_operand(x: Tensor, operand: Operand, fmt: Format) -> Tensor:
    """``x`` rounded the way ``fmt`` rounds this operand: a plain cast, or scaled per tensor, channel or block."""
    rule = fmt.execution
    how = (
        None
        if rule is None
        else rule.activation
        if operand.role == "activation"
        else rule.weight
    )
    if how is None or x.numel() == 0:
        return x
    if operand.role == "activation":
        fmt = fmt.of_activations
    x = x.detach()
    if how == "exact":
        return round_tensor(x, fmt)
    channel = operand.channel if operand.channel >= 0 else operand.channel + x.ndim
    granularity: Granularity = PerTensor()
    if how == "channel" and x.ndim > 1:
        granularity = PerAxis(channel)
    elif how == "token" and x.ndim > 1:
        granularity = PerToken()
    elif how in ("block", "group"):
        return _round_blocks(
            x, fmt, operand.reduce if -x.ndim <= operand.reduce < x.ndim else -1
        )
    return round_tensor(x, fmt, granularity=granularity)


def round_rows(rows: Tensor, fmt: Format) -> Tensor:
    """Rows of a table, each rounded with its own scale."""
    rule = fmt.execution
    if rule is None or rows.numel() == 0:
        return rows
    if rule.weight == "exact":
        return round_tensor(rows.detach(), fmt)
    if rule.weight in ("block", "group"):
        return _round_blocks(rows.detach(), fmt, -1)
    return round_tensor(rows.detach(), fmt, granularity=PerToken())


def round_output(value: Any, fmt: Format) -> Any:
    """Every floating-point tensor of a result cast to ``fmt``."""
    return tree_map(lambda t: round_tensor(t.detach(), fmt) if _rounds(t) else t, value)


#: Exponents of fp8_e5m2, from the smallest normal one to the largest: the range that gradients need.
_GRADIENT_EXPONENTS = 30


def gradient_format(fmt: Format) -> Format | None:
    """Return the format of gradients beside a format of values; None where they stay as they are.

    That is the format's ``gradient_format`` (fp8_e4m3 names e5m2, which has the range that
    gradients need: Micikevicius et al., FP8 Formats for Deep Learning, arXiv:2209.05433, section
    3), or the format itself where its exponents reach as far. Integers, formats with block scales
    and formats of weights alone are for values.
    """
    if fmt.gradient_format is not None:
        return fmt.gradient_format
    rule = fmt.execution
    if rule is None or rule.activation not in ("exact", "tensor"):
        return None
    exponents = fmt.emax - fmt.emin + 1
    return fmt if exponents >= _GRADIENT_EXPONENTS else None


def round_gradient(gradient: Tensor, fmt: Format, *, written: bool) -> Tensor:
    """A gradient as an operator executed in ``fmt`` receives it (of its output), or writes it (``written``: of an operand).

    It is received in ``gradient_format``, scaled per tensor where that is scaled, and written in it only where the format
    rounds outputs (bf16, not tf32 or fp8). Formats without one for gradients leave them alone: straight through.
    """
    rule, wanted = fmt.execution, gradient_format(fmt)
    if (
        rule is None
        or wanted is None
        or gradient.numel() == 0
        or (written and not rule.output)
    ):
        return gradient
    if rule.activation == "tensor":
        return round_tensor(gradient.detach(), wanted, granularity=PerTensor())
    return round_tensor(gradient.detach(), wanted)


def _round_blocks(x: Tensor, fmt: Format, axis: int) -> Tensor:
    """Blocks along ``axis``; a last block that is not full is completed with zeros, which change no maximum."""
    size = fmt.block_size if isinstance(fmt, BlockFormat) else fmt.group_size
    missing = -x.shape[axis] % size
    if not missing:
        return round_tensor(x, fmt, granularity=PerGroup(size, axis))
    shape = list(x.shape)
    shape[axis] = missing
    padded = torch.cat([x, x.new_zeros(shape)], dim=axis)
    return round_tensor(padded, fmt, granularity=PerGroup(size, axis)).narrow(
        axis, 0, x.shape[axis]
    )


def _rounds(value: Any) -> bool:
    return isinstance(value, Tensor) and value.is_floating_point() and value.numel() > 0
