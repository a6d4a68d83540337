"""The node of the graph that made a tensor, asked of any tensor of a program."""

from __future__ import annotations

from torch import Tensor


def node_of(tensor: Tensor) -> object | None:
    """Return what made a tensor in the graph; None where nothing did.

    Or where torch does not say: of a view that was made under ``no_grad`` before another
    view of its parameter was written.

    >>> import torch
    >>> x = torch.ones(2, requires_grad=True)
    >>> node_of(x) is None, type(node_of(x * 2)).__name__
    (True, 'MulBackward0')
    """
    try:
        return tensor.grad_fn
    except RuntimeError:
        return None
