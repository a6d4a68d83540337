"""What the graph of a loss says of its last layers, and of casts to 16 bits."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from torch import Tensor

#: A graph is walked so far; what is longer is longer than any network people write.
MOST_NODES = 50_000
#: How many nodes that hand values on may stand between two layers.
_MOST_VIEWS = 16
#: Nodes that hand values on as they are.
_VIEWS = (
    "View",
    "UnsafeView",
    "Reshape",
    "ReshapeAlias",
    "Transpose",
    "Permute",
    "Squeeze",
    "Unsqueeze",
    "Clone",
    "ToCopy",
    "T",
    "Slice",
    "Select",
    "Expand",
    "Alias",
)
_SHARES = ("Softmax", "Sigmoid")
#: rule -> the layer, and what must not stand in front of it
_PAIRS = {
    "softmax-of-softmax": ("LogSoftmax", _SHARES),
    "log-softmax-twice": ("LogSoftmax", ("LogSoftmax",)),
    "nll-of-probabilities": ("NllLoss", _SHARES),
    "bce-of-sigmoid": ("BinaryCrossEntropy", ("Sigmoid",)),
    "bce-with-logits-of-probabilities": ("BinaryCrossEntropyWithLogits", _SHARES),
    "log-of-softmax": ("Log", ("Softmax",)),
    "log-of-sigmoid": ("Log", ("Sigmoid",)),
}


def graph_faults(loss: Tensor) -> list[str]:
    """Return the rules that the layers at a loss break, by its graph.

    Nothing where code was compiled: its graph is one node.

    >>> import torch
    >>> logits = torch.zeros(2, 3, requires_grad=True)
    >>> target = torch.tensor([0, 1])
    >>> graph_faults(torch.nn.functional.cross_entropy(logits.softmax(-1), target))
    ['softmax-of-softmax']
    >>> graph_faults(torch.nn.functional.cross_entropy(logits, target))
    []
    """
    broken = {}
    for node in _nodes(loss):
        kind = _kind(node)
        for rule, (layer, before) in _PAIRS.items():
            if kind == layer and _kind(_maker(node)) in before:
                broken[rule] = True
    return list(broken)


def has_casts(loss: Tensor) -> bool:
    """Return True where a value was cast on the way to a loss, as autocast does with each
    weight, or where compiled code hides that.
    """
    return any(
        _kind(node) == "ToCopy" or "Compiled" in node.name() for node in _nodes(loss)
    )


def _nodes(loss: Tensor) -> Iterator[Any]:
    """Yield the nodes of a graph, each once."""
    waiting = [loss.grad_fn]
    visited: set[Any] = set()
    while waiting and len(visited) < MOST_NODES:
        node: Any = waiting.pop()
        if node is None or node in visited:
            continue
        visited.add(node)
        yield node
        waiting.extend(before for before, _ in node.next_functions)


def _kind(node: Any) -> str:
    """Return the operator of a node: ``Softmax`` of ``SoftmaxBackward0``."""
    return "" if node is None else str(node.name()).partition("Backward")[0]


def _maker(node: Any) -> Any:
    """Return the node that made the values that a node reads first."""
    for _ in range(_MOST_VIEWS):
        before = node.next_functions
        node = before[0][0] if before else None
        if node is None or _kind(node).rstrip("0123456789") not in _VIEWS:
            return node
    return None
