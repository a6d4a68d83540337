"""How much work a call is: elements of its operands and output, and multiply-accumulates."""

from __future__ import annotations

import math
from collections.abc import Callable

from torch import Tensor

from roundoff.ops.calls import Call, Operand


def sizes(call: Call, outputs: list[Tensor]) -> dict[str, float]:
    """Count elements read (activations, weights), elements written, and multiply-accumulates.

    An embedding reads the rows it looks up, not its table. Multiply-accumulates count the
    contraction alone: ``output elements x contracted length``, the convention of
    ``torch.utils.flop_counter`` (which counts two operations each); zero for operators that
    contract nothing.
    """
    activation = 0
    weight = 0
    for operand in call.operands:
        elements = _tensor(call, operand).numel()
        if operand.role == "activation":
            activation += elements
        else:
            weight += elements
    output = sum(t.numel() for t in outputs)
    if call.kind == "embedding":
        weight = min(weight, output)
    return {
        "activation_elements": float(activation),
        "weight_elements": float(weight),
        "output_elements": float(output),
        "macs": float(_macs(call, outputs[0])),
    }


def _tensor(call: Call, operand: Operand) -> Tensor:
    tensor: Tensor = call.leaves[operand.leaf]
    return tensor


def _macs(call: Call, output: Tensor) -> float:
    factors = [o for o in call.operands if o.role != "bias"]
    if call.operator.name == "einsum":
        return _macs_of_einsum(call, factors, output)
    count = _MACS.get(call.kind)
    if count is None or len(factors) < 2:
        return 0
    return count(call, factors, output)


def _macs_of_product(call: Call, factors: list[Operand], output: Tensor) -> float:
    first = _tensor(call, factors[0])
    if call.operator.name == "bilinear":  # a product of three
        second = _tensor(call, factors[1])
        return output.numel() * first.shape[-1] * second.shape[-1]
    if call.operator.name == "addbmm":  # summed over the batch too
        return output.numel() * first.shape[-1] * first.shape[0]
    return output.numel() * first.shape[factors[0].reduce]


def _macs_of_convolution(call: Call, factors: list[Operand], output: Tensor) -> float:
    """Every output position meets each weight once; of a transposed one, every input position."""
    weight = _tensor(call, factors[1])
    is_transposed = "transpose" in call.operator.name
    meeting = _tensor(call, factors[0]) if is_transposed else output
    return meeting.numel() / weight.shape[0] * weight.numel()


def _macs_of_attention(call: Call, factors: list[Operand], output: Tensor) -> float:
    query, key = (_tensor(call, operand) for operand in factors[:2])
    scores = math.prod(query.shape[:-1]) * key.shape[-2]
    return scores * (query.shape[-1] + output.shape[-1])


def _macs_of_recurrence(call: Call, factors: list[Operand], _: Tensor) -> float:
    steps = math.prod(_tensor(call, factors[0]).shape[:-1])
    weights = [_tensor(call, o).numel() for o in factors if o.role == "weight"]
    return sum(weights) * steps


def _macs_of_einsum(call: Call, factors: list[Operand], output: Tensor) -> float:
    inputs, _, result = call.leaves[0].replace(" ", "").partition("->")
    if "." in inputs or not result:
        first = factors[0]
        return output.numel() * _tensor(call, first).shape[first.reduce]
    if len(factors) < 2:
        return 0
    extent: dict[str, int] = {}
    for labels, operand in zip(inputs.split(","), factors, strict=False):
        extent |= dict(zip(labels, _tensor(call, operand).shape, strict=False))
    return math.prod(extent.values())


_MACS: dict[str, Callable[[Call, list[Operand], Tensor], float]] = {
    "linear": _macs_of_product,
    "matmul": _macs_of_product,
    "conv": _macs_of_convolution,
    "attention": _macs_of_attention,
    "rnn": _macs_of_recurrence,
}
