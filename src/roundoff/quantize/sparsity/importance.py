"""How much each channel of a group matters: one number of at least 0 for each, from the
weights or from gradients.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any, Literal

import torch
from torch import Tensor, nn

from roundoff.errors import QuantizationError
from roundoff.quantize.channels.groups import Binding, ChannelGroup
from roundoff.quantize.channels.rescale import grouped_view
from roundoff.quantize.sparsity.masks import taylor_scores

Importance = Literal["l2", "batch_norm"] | Callable[[ChannelGroup], Tensor]


def score(model: nn.Module, group: ChannelGroup, importance: Importance) -> Tensor:
    """The importance of each channel of a group: ``[size]``, float64.

    * ``l2``: the L2 norm of what makes the channel, scaled over the channels of each
      weight to 0..1, and added over the weights (AMCT's balanced L2-norm filter
      pruning; a weight whose norms are all equal adds 0).
    * ``batch_norm``: ``|γ|`` of the BatchNorms that it passes, added (Liu et al.,
      arXiv:1708.06519, section 3).
    * a function of the group: anything else, such as :func:`taylor_importance` or a
      sensitivity from a budget.

    Raises:
        QuantizationError: unknown, no BatchNorm to ask, another shape, NaN or Inf.
    """
    if callable(importance):
        values = importance(group).detach().double().cpu()
        if values.shape != (group.size,) or not bool(torch.isfinite(values).all()):
            raise QuantizationError(
                "not an importance for this group",
                where=group.name,
                got=f"{tuple(values.shape)}",
                expected=f"({group.size},), finite",
            )
        return values
    if importance == "l2":
        return _l2(model, group)
    if importance == "batch_norm":
        return _batch_norm(model, group)
    raise QuantizationError(
        "unknown importance",
        expected="l2, batch_norm or a function",
        got=repr(importance),
    )


def _batch_norm(model: nn.Module, group: ChannelGroup) -> Tensor:
    parameters = dict(model.named_parameters())
    norms = [binding for binding in group.passers if binding.part == "batch_norm"]
    gammas = [binding for binding in norms if binding.name.endswith("weight")]
    if not gammas:
        raise QuantizationError(
            "no BatchNorm scales this group's channels",
            where=group.name,
            do='importance="l2", or leave the group out with ignored=',
        )
    each = [_per_channel(parameters[b.name].detach().abs(), b) for b in gammas]
    return torch.stack(each).sum(0)


def _l2(model: nn.Module, group: ChannelGroup) -> Tensor:
    parameters = dict(model.named_parameters())
    total = torch.zeros(group.size, dtype=torch.float64)
    for binding in group.producers:
        norm = _per_channel(parameters[binding.name].detach().square(), binding).sqrt()
        low = norm.amin()
        high = norm.amax()
        total += (norm - low) / (high - low) if high > low else 0.0
    return total


def _per_channel(values: Tensor, binding: Binding) -> Tensor:
    """The sum of ``values`` over all places of each channel, float64."""
    view, axis = grouped_view(values.double().cpu(), binding)
    kept = (0, axis) if binding.groups > 1 else (axis,)
    others = [a for a in range(view.ndim) if a not in kept]
    flat = (view.sum(others) if others else view).flatten()
    return flat[binding.index].sum(1)


def taylor_importance(
    model: nn.Module,
    batches: Iterable[Any],
    loss: Callable[[Any, Any], Tensor],
    *,
    forward: Callable[[nn.Module, Any], Any] | None = None,
) -> Callable[[ChannelGroup], Tensor]:
    """An importance: ``|w·∂L/∂w|`` added over all weights that make or read a channel
    (Molchanov et al., arXiv:1611.06440, equation 7, on weights);
    ``loss(output, batch)``.
    """
    scores = taylor_scores(model, batches, loss, forward=forward)

    def of(group: ChannelGroup) -> Tensor:
        scored = [b for b in (*group.producers, *group.consumers) if b.name in scores]
        if not scored:
            raise QuantizationError(
                "no linear layer or convolution makes or reads this group's channels",
                where=group.name,
            )
        return torch.stack([_per_channel(scores[b.name], b) for b in scored]).sum(0)

    return of
