"""How much work a call is: elements of its operands and output, and multiply-accumulates."""

from __future__ import annotations

import math

from torch import Tensor

from roundoff.ops.calls import Call


def sizes(call: Call, outputs: list[Tensor]) -> dict[str, float]:
    """Elements read (activations, weights), elements written, and multiply-accumulates of one call.

    An embedding reads the rows it looks up, not its table. Multiply-accumulates count the contraction alone:
    ``output elements x contracted length``, the convention of ``torch.utils.flop_counter`` (which counts two
    operations each); zero for operators that contract nothing.
    """
    activation = sum(
        _leaf(call, o.leaf).numel() for o in call.operands if o.role == "activation"
    )
    weight = sum(
        _leaf(call, o.leaf).numel() for o in call.operands if o.role != "activation"
    )
    output = sum(t.numel() for t in outputs)
    if call.kind == "embedding":
        weight = min(weight, output)
    return {
        "activation_elements": float(activation),
        "weight_elements": float(weight),
        "output_elements": float(output),
        "macs": float(_macs(call, outputs[0])),
    }


def _leaf(call: Call, index: int) -> Tensor:
    leaf: Tensor = call.leaves[index]
    return leaf


def _macs(call: Call, output: Tensor) -> float:
    operands = [o for o in call.operands if o.role != "bias"]
    if call.operator.name == "einsum":
        inputs, _, result = call.leaves[0].replace(" ", "").partition("->")
        if "." in inputs or not result:
            return (
                output.numel() * _leaf(call, operands[0].leaf).shape[operands[0].reduce]
            )
        extent: dict[str, int] = {}
        for labels, operand in zip(inputs.split(","), operands, strict=False):
            extent |= dict(zip(labels, _leaf(call, operand.leaf).shape, strict=False))
        return math.prod(extent.values()) if len(operands) > 1 else 0
    if len(operands) < 2:
        return 0
    first, second = (_leaf(call, o.leaf) for o in operands[:2])
    if call.operator.name == "bilinear":  # a product of three
        return output.numel() * first.shape[-1] * second.shape[-1]
    if call.operator.name == "addbmm":  # summed over the batch too
        return output.numel() * first.shape[-1] * first.shape[0]
    if call.kind in ("linear", "matmul"):
        return output.numel() * first.shape[operands[0].reduce]
    if call.kind == "conv":
        # every input position of a transposed convolution, every output position of another, meets each weight once
        positions = (
            first if "transpose" in call.operator.name else output
        ).numel() / second.shape[0]
        return positions * second.numel()
    if call.kind == "attention":
        scores = math.prod(first.shape[:-1]) * second.shape[-2]
        return scores * (first.shape[-1] + output.shape[-1])
    if call.kind == "rnn":
        weights = sum(
            _leaf(call, o.leaf).numel() for o in operands if o.role == "weight"
        )
        return weights * math.prod(first.shape[:-1])
    return 0
