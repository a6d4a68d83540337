"""An LSTM with projections, which ONNX's LSTM has not, in the operators of its steps."""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.nn.functional as F  # noqa: N812 (as torch's own documentation has it)
from torch import Tensor


def projected_layer(
    x: Tensor,
    hidden: Tensor,
    cell: Tensor,
    lengths: Tensor | None,
    weights: Sequence[Tensor],
    biases: Sequence[Tensor],
    _kind: str,
) -> tuple[Tensor, Tensor, Tensor]:
    """One layer of an LSTM with projections, step by step."""
    if lengths is not None:
        raise ValueError("an LSTM with projections of packed sequences")
    outputs: list[Tensor] = []
    states: list[tuple[Tensor, Tensor]] = []
    for direction in range(hidden.shape[0]):
        w_input, w_hidden, projection = weights[direction * 3 : direction * 3 + 3]
        pair = biases[direction * 2 : direction * 2 + 2]
        h = hidden[direction]
        c = cell[direction]
        products = F.linear(x, w_input, pair[0] if pair else None)
        steps: list[Tensor] = []
        order = range(x.shape[0])
        for step in reversed(order) if direction else order:
            recurrent = F.linear(h, w_hidden, pair[1] if pair else None)
            gates = (products[step] + recurrent).chunk(4, -1)
            c = gates[1].sigmoid() * c + gates[0].sigmoid() * gates[2].tanh()
            h = F.linear(gates[3].sigmoid() * c.tanh(), projection)
            steps.append(h)
        outputs.append(torch.stack(steps[::-1] if direction else steps))
        states.append((h, c))
    last, last_cell = (torch.stack(each) for each in zip(*states, strict=True))
    return torch.cat(outputs, -1), last, last_cell
