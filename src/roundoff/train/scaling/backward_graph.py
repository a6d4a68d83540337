"""What the graph of a loss still says after its backward pass: in which order gradients
were made, and by which nodes.

The metadata of a graph outlives its saved tensors, so this costs nothing until somebody
asks.
"""

from __future__ import annotations

import heapq
import re
from collections.abc import Iterator
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor

#: The key under which ``StepCalls`` marks the nodes that made a model's outputs.
OUTPUT = "roundoff output"
#: Nodes between a loss and a model's outputs that are observed; a loss of more is its
#: own model.
_NEAR = 256
#: Number of a leaf in the engine's queue: before all other nodes.
_LEAF = -(2**64)


class NearNode(NamedTuple):
    """A node between the loss and the model.

    Attributes:
        sequence: its number among the nodes that were made.
        ends: least and largest value of each gradient that it made.
    """

    name: str
    sequence: int
    ends: list[Tensor]

    @property
    def is_finite(self) -> bool:
        """True where its gradients are."""
        return all(bool(torch.isfinite(end).all()) for end in self.ends)


class BackwardGraph:
    """The graphs that ran backward since the last step.

    ``closely`` also keeps the least and largest value of each gradient between the loss
    and the outputs of the model, since this part cannot be run again: two small tensors a
    node, and one read of the gradient.
    """

    def __init__(self) -> None:
        self._roots: list[Any] = []
        self._near: list[NearNode] = []

    def add(self, loss: Tensor, *, closely: bool) -> None:
        """Add the graph of a loss, before its backward pass."""
        root: Any = loss.grad_fn
        if root is None:
            return  # a parameter itself is the loss
        self._roots.append(root)
        if closely:
            near = self._near  # not self: a node must not hold what holds its graph
            for node in _outside_the_model(root):
                node.register_hook(partial(_keep_range_of_all, near, *_named(node)))

    def clear(self) -> None:
        """Forget all graphs."""
        self._roots = []
        self._near = []

    def gradients(self) -> Iterator[tuple[Tensor, str]]:
        """Yield each parameter with the name of the autograd node that finished its
        gradient, in backward order.
        """
        for root in self._roots:
            yield from backward_order(root)

    def born_in_the_loss(self) -> NearNode | None:
        """Return the node between the loss and the model that first made a gradient
        that is not finite; None: none did.
        """
        return next((node for node in self._near if not node.is_finite), None)

    def loss_nodes(self) -> list[str]:
        """Name the nodes between the loss and the model, from the loss on."""
        return [node.name for node in self._near]


def backward_order(root: Any) -> Iterator[tuple[Tensor, str]]:
    """Yield leaves in the order in which torch's engine finishes their gradients, with
    the node that ran last before each.

    The engine runs what is ready and was made last in the forward pass first, and leaves
    before all others (torch/csrc/autograd/engine.cpp, ``CompareNodeTaskTime``). With
    several devices each has a thread of its own, so that the order is only that of each
    of them.
    """
    waiting = _uses(root)
    maker: dict[Any, str] = {}
    ready: list[tuple[int, int, Any]] = [(0, 0, root)]
    pushed = 0
    while ready:
        _, _, node = heapq.heappop(ready)
        variable = getattr(node, "variable", None)
        if isinstance(variable, Tensor) and not node.next_functions:
            yield variable, maker.get(node, node.name())
        for following in _following(node):
            maker[following] = node.name()
            waiting[following] -= 1
            if not waiting[following]:
                pushed += 1
                heapq.heappush(ready, (_priority(following), pushed, following))


def _uses(root: Any) -> dict[Any, int]:
    """Count for each node of a graph how many gradients it waits for."""
    uses: dict[Any, int] = {root: 0}
    stack = [root]
    while stack:
        for node in _following(stack.pop()):
            if node not in uses:
                uses[node] = 0
                stack.append(node)
            uses[node] += 1
    return uses


def _following(node: Any) -> list[Any]:
    return [following for following, _ in node.next_functions if following is not None]


def _priority(node: Any) -> int:
    return -node._sequence_nr() if node.next_functions else _LEAF


def operator_of(node: str) -> str:
    """Name the operator whose derivative an autograd node is.

    >>> operator_of("MseLossBackward0"), operator_of("ToCopyBackward0"), operator_of("AddmmBackward0")
    ('mse_loss', '_to_copy', 'addmm')
    """
    name = re.sub(r"Backward\d*$", "", node)
    name = re.sub(r"(?<=[a-z0-9])(?=[A-Z])", "_", name).lower()
    return "_to_copy" if name == "to_copy" else name


def _outside_the_model(root: Any) -> list[Any]:
    """Return the nodes from the loss up to the outputs of the model, or to the
    parameters that the script uses itself; none where there are too many.
    """
    nodes = []
    visited = {root}
    stack = [root]
    while stack:
        node = stack.pop()
        if OUTPUT in node.metadata or hasattr(node, "variable"):
            continue
        nodes.append(node)
        if len(nodes) > _NEAR:
            return []
        unvisited = [n for n in _following(node) if n not in visited]
        visited.update(unvisited)
        stack += dict.fromkeys(unvisited)
    return nodes


def _named(node: Any) -> tuple[str, int]:
    return str(node.name()), int(node._sequence_nr())


def _keep_range_of_all(
    near: list[NearNode], name: str, sequence: int, gradients: Any, _: Any
) -> None:
    """Keep the least and the largest value of each gradient that a node made.

    What has another kind of values has no range.
    """
    try:
        ends = _ends(gradients)
    except (RuntimeError, TypeError):
        ends = []
    near.append(NearNode(name, sequence, ends))


def _ends(gradients: Any) -> list[Tensor]:
    ends: list[Tensor] = []
    for gradient in gradients:
        if _has_range(gradient):
            ends += torch.aminmax(gradient.detach())
    return ends


def _has_range(gradient: Any) -> bool:
    if not isinstance(gradient, Tensor) or gradient.is_sparse or gradient.is_nested:
        return False
    return gradient.is_floating_point() and bool(gradient.numel())
