"""Rescale the channels of a group: what makes them by 1/s, what reads them by s.

A channel that is made 1/s times as large and read with weights s times as large leaves
the network's function as it is, where everything between passes a factor on
(``f(s·x) = s·f(x)`` for s > 0: ReLU, max pooling, additions of values of the same
group).
"""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import Tensor, nn

from roundoff.errors import QuantizationError
from roundoff.quantize.channels.groups import Binding, ChannelGroup


def why_not_rescalable(group: ChannelGroup, *, clips: bool = False) -> str | None:
    """The reason why a group cannot be rescaled; None when it can.

    ``clips``: the caller sees to it that the values which a ReLU6 between them clips
    stay the same.
    """
    if group.purpose != "rescale":
        return 'the group was asked for to remove channels: channel_groups(..., purpose="rescale")'
    if group.pinned is not None:
        return group.pinned
    if any(b.part == "batch_norm" for b in group.passers):
        return "it passes a BatchNorm: fold it first (fold_batch_norm_)"
    for operator in group.operators:
        if operator.law == "other":
            return f"{operator.operator} ({operator.site}) does not pass a factor on"
        if operator.law == "clipped" and not clips:
            return f"{operator.operator} ({operator.site}) clips at {operator.bounds}"
    return _why_tied(group)


def _why_tied(group: ChannelGroup) -> str | None:
    making_axes = {(b.name, b.axis) for b in group.producers}
    reading_axes = {(b.name, b.axis) for b in group.consumers}
    both = making_axes & reading_axes
    if not both:
        return None
    return f"{min(both)[0]} is tied: it makes and reads the channels by one axis"


@torch.no_grad()
def rescale_(
    model: nn.Module, group: ChannelGroup, scale: Tensor, *, clips: bool = False
) -> None:
    """Divide the channels of a group by ``scale``, in place.

    Producers and biases are divided by it, consumers multiplied. The function is kept
    up to rounding; where ``scale`` holds powers of two, bit by bit (while nothing
    underflows).

    Args:
        model: the model that the group is of.
        group: of ``channel_groups(..., purpose="rescale")``.
        scale: ``[size]``, finite and above 0.
        clips: see :func:`why_not_rescalable`.

    Raises:
        QuantizationError: the group cannot be rescaled (see
            :func:`why_not_rescalable`), or the scale doesn't fit; the model is as
            before.

    Example:
        >>> from roundoff.quantize import channel_groups
        >>> net = nn.Sequential(nn.Linear(2, 3), nn.ReLU(), nn.Linear(3, 1))
        >>> hidden, _ = channel_groups(net, [torch.zeros(1, 2)], purpose="rescale")
        >>> before = net(torch.ones(1, 2))
        >>> rescale_(net, hidden, torch.tensor([1.0, 2.0, 0.5]))
        >>> bool((net(torch.ones(1, 2)) == before).all())
        True
    """
    reason = why_not_rescalable(group, clips=clips)
    if reason is not None:
        raise QuantizationError(
            f"the channels cannot be rescaled: {reason}", where=group.name
        )
    positive = torch.isfinite(scale) & (scale > 0)
    if scale.shape != (group.size,) or not bool(positive.all()):
        raise QuantizationError(
            "not a scale for this group",
            where=group.name,
            got=f"{tuple(scale.shape)} {scale.dtype}",
            expected=f"({group.size},), finite and above 0",
        )
    tensors = {**dict(model.named_parameters()), **dict(model.named_buffers())}
    for binding in group.bindings:
        if binding.part in ("producer", "bias"):
            _multiply_(tensors[binding.name], binding, 1.0 / scale.double())
        elif binding.part == "consumer":
            _multiply_(tensors[binding.name], binding, scale.double())


def _multiply_(tensor: Tensor, binding: Binding, factor: Tensor) -> None:
    """Multiply the channels' places on the binding's axis by one factor each."""
    view, axis = grouped_view(tensor, binding)
    length = tensor.shape[binding.axis] * binding.groups
    factors = torch.ones(length, dtype=torch.float64, device=tensor.device)
    for column in binding.index.T:
        factors[column.to(tensor.device)] = factor.to(tensor.device)
    shape = [1] * view.ndim
    shape[axis] = tensor.shape[binding.axis]
    if binding.groups > 1:
        shape[0] = binding.groups
    view.copy_(view.double() * factors.view(shape))


def grouped_view(tensor: Tensor, binding: Binding) -> tuple[Tensor, int]:
    """A view of a weight, and the axis of the binding in it.

    The groups of a grouped convolution are an axis 0 of their own.
    """
    if binding.groups == 1:
        return tensor, binding.axis
    rows = tensor.shape[0] // binding.groups
    view = tensor.view(binding.groups, rows, *tensor.shape[1:])
    return view, binding.axis + 1


def largest_weights(model: nn.Module, bindings: Iterable[Binding], size: int) -> Tensor:
    """The largest magnitude of each channel over weights that make (or read) it.

    Returns:
        ``[size]``, float64, 0 without any weight.
    """
    tensors = dict(model.named_parameters())
    largest = torch.zeros(size, dtype=torch.float64)
    for binding in bindings:
        view, axis = grouped_view(tensors[binding.name].detach(), binding)
        kept = (0, axis) if binding.groups > 1 else (axis,)
        others = [a for a in range(view.ndim) if a not in kept]
        magnitude = view.abs().amax(others) if others else view.abs()
        of_place = magnitude.flatten().double().cpu()
        largest = torch.maximum(largest, of_place[binding.index].amax(1))
    return largest
