"""Probe gradients, all at once: a backward pass under ``torch.vmap``.

A tensor hook sees its gradient as one logical tensor while ``vmap`` carries K of them.
``hand_over`` gives the callback all K, as one plain tensor of shape ``(K, *shape)``,
outside the ``vmap`` level, so that what the callback computes (the rounding errors of
the site) is computed once, not K times.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

Callback = Callable[[Tensor], None]


class _HandOver(torch.autograd.Function):
    @staticmethod
    def forward(gradient: Tensor, callback: Callback) -> Tensor:
        callback(gradient.unsqueeze(0))
        return gradient.new_zeros(())

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
        return None

    @staticmethod
    def vmap(
        info: Any, in_dims: tuple[int | None, ...], gradient: Tensor, callback: Callback
    ) -> tuple[Tensor, None]:
        axis = in_dims[0]
        if axis is None:  # the same gradient for every probe
            callback(gradient.expand(info.batch_size, *gradient.shape))
        else:
            callback(gradient.movedim(axis, 0))
        return gradient.new_zeros(()), None


def hand_over(gradient: Tensor, callback: Callback) -> None:
    """Call ``callback`` with the K gradients behind ``gradient``: ``(K, *shape)``.

    K = 1 outside vmap.
    """
    _HandOver.apply(gradient, callback)  # type: ignore[no-untyped-call]


def on_output(tensor: Tensor, hook: Callback, *, written: bool) -> None:
    """Call ``hook`` with the gradient of an operator's output.

    ``written`` says that the operator wrote in place. A write through a view makes
    autograd send the gradient to the tensor that is viewed; the hook gets its part.
    """
    base = tensor._base if written else None
    if base is None:
        tensor.register_hook(hook)  # type: ignore[no-untyped-call]
        return
    # where each element of the view lies in the flattened gradient of what is viewed
    places = torch.empty_strided(
        base.shape, base.stride(), dtype=torch.int64, device=base.device
    )
    places.copy_(torch.arange(base.numel(), device=base.device).view(base.shape))
    offset = tensor.storage_offset() - base.storage_offset()
    index = places.as_strided(tensor.shape, tensor.stride(), offset)
    base.register_hook(lambda gradient: hook(gradient.flatten()[index]))  # type: ignore[no-untyped-call]


def backward(
    outputs: list[Tensor],
    anchor: Tensor,
    probes: list[Tensor],
    *,
    batched: bool,
    keep_graph: bool = False,
) -> None:
    """Run the vector-Jacobian products of K probes back to ``anchor``.

    Hooks on the way see the gradients. ``probes[i]`` has shape
    ``(K, *outputs[i].shape)``. Batched, hooks fire once with all K gradients; else K
    passes run one after the other. The graph is freed on the way of the last, unless
    ``keep_graph`` keeps it for more.
    """
    if batched:

        def backward_pass(*vectors: Tensor) -> Tensor:
            gradients: tuple[Tensor | None, ...] = torch.autograd.grad(
                outputs, anchor, vectors, retain_graph=keep_graph, allow_unused=True
            )
            return anchor.detach() if gradients[0] is None else gradients[0]

        with warnings.catch_warnings():
            # some backward formulas (fused attention on the CPU) have no batched form:
            # torch loops over the probes
            warnings.filterwarnings("ignore", message="There is a performance drop")
            torch.vmap(backward_pass)(*probes)
        return
    count = probes[0].shape[0]
    for k in range(count):
        torch.autograd.grad(
            outputs,
            anchor,
            [p[k] for p in probes],
            retain_graph=keep_graph or k + 1 < count,
            allow_unused=True,
        )
