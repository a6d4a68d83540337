"""What the graph of a loss still says after its backward pass: in which order gradients were made, and by which nodes.

The metadata of a graph outlives its saved tensors, so this costs nothing until somebody asks.
"""

from __future__ import annotations

import heapq
import re
from collections.abc import Iterator
from functools import partial
from typing import Any

import torch
from torch import Tensor

#: The key under which ``Steps`` marks the nodes that made a model's outputs.
OUTPUT = "roundoff output"
#: Nodes between a loss and a model's outputs that are looked at; a loss of more is its own model.
_NEAR = 256


class Graph:
    """The graphs that ran backward since the last step.

    ``closely`` also keeps the least and largest value of each gradient between the loss and the outputs of the model, since
    this part cannot be run again: two small tensors a node, and one read of the gradient.
    """

    def __init__(self) -> None:
        self._roots: list[Any] = []
        self._near: list[tuple[str, list[Tensor]]] = []

    def add(self, loss: Tensor, *, closely: bool) -> None:
        """Call it before the backward pass."""
        root: Any = loss.grad_fn
        if root is None:
            return  # a parameter itself is the loss
        self._roots.append(root)
        if closely:
            near = self._near  # not self: a node must not hold what holds its graph
            for node in _outside_the_model(root):
                node.register_hook(partial(_look, near, node.name()))

    def clear(self) -> None:
        self._roots, self._near = [], []

    def gradients(self) -> Iterator[tuple[Tensor, str]]:
        """Each parameter with the name of the autograd node that finished its gradient, in backward order."""
        for root in self._roots:
            yield from backward_order(root)

    def born_in_the_loss(self) -> str | None:
        """The node between the loss and the model that first made a gradient that is not finite; None: none did."""
        for name, ends in self._near:
            if not all(bool(torch.isfinite(end).all()) for end in ends):
                return name
        return None

    def loss_nodes(self) -> list[str]:
        """The nodes between the loss and the model, from the loss on."""
        return [name for name, _ in self._near]


def backward_order(root: Any) -> Iterator[tuple[Tensor, str]]:
    """Leaves in the order in which torch's engine finishes their gradients, each with the node that ran last before it.

    The engine runs what is ready and was made last in the forward pass first, and leaves before all others
    (torch/csrc/autograd/engine.cpp, ``CompareNodeTaskTime``). With several devices each has a thread of its own, so that
    the order is only that of each of them.
    """
    waiting: dict[Any, int] = {root: 0}
    stack = [root]
    while stack:
        for node, _ in stack.pop().next_functions:
            if node is None:
                continue
            if node not in waiting:
                waiting[node] = 0
                stack.append(node)
            waiting[node] += 1
    maker: dict[Any, str] = {}
    ready: list[tuple[int, int, Any]] = [(0, 0, root)]
    count = 0
    while ready:
        _, _, node = heapq.heappop(ready)
        variable = getattr(node, "variable", None)
        if isinstance(variable, Tensor) and not node.next_functions:
            yield variable, maker.get(node, node.name())
        for following, _ in node.next_functions:
            if following is None:
                continue
            maker[following] = node.name()
            waiting[following] -= 1
            if not waiting[following]:
                count += 1
                number = (
                    -(2**64)
                    if not following.next_functions
                    else -following._sequence_nr()
                )
                heapq.heappush(ready, (number, count, following))


def operator_of(node: str) -> str:
    """The operator whose derivative an autograd node is.

    >>> operator_of("MseLossBackward0"), operator_of("ToCopyBackward0"), operator_of("AddmmBackward0")
    ('mse_loss', '_to_copy', 'addmm')
    """
    name = re.sub(r"Backward\d*$", "", node)
    name = re.sub(r"(?<=[a-z0-9])(?=[A-Z])", "_", name).lower()
    return "_to_copy" if name == "to_copy" else name


def _outside_the_model(root: Any) -> list[Any]:
    """Nodes from the loss up to the outputs of the model; none where the loss does not come from it."""
    found, seen, stack, reached = [], {root}, [root], False
    while stack:
        node = stack.pop()
        if OUTPUT in node.metadata:
            reached = True
            continue
        if hasattr(node, "variable"):
            continue
        found.append(node)
        if len(found) > _NEAR:
            return []
        for following, _ in node.next_functions:
            if following is not None and following not in seen:
                seen.add(following)
                stack.append(following)
    return found if reached else []


def _look(near: list[tuple[str, list[Tensor]]], name: str, made: Any, _: Any) -> None:
    near.append((name, _ends(made)))


def _ends(gradients: Any) -> list[Tensor]:
    found: list[Tensor] = []
    for gradient in gradients:
        if (
            isinstance(gradient, Tensor)
            and gradient.is_floating_point()
            and gradient.numel()
            and not gradient.is_sparse
        ):
            found += torch.aminmax(gradient.detach())
    return found
