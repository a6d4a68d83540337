"""High-bias absorption: large biases move past a ReLU into the next layer.

Nagel et al., arXiv:1906.04721, section 4.1.3. After equalisation a channel can have a
large bias and so a wide range of activations. Where a channel's input to the ReLU is
above c for almost all data, ``relu(x) = relu(x - c) + c``: c leaves the first bias
(their equation 13) and comes back as ``W·c`` in the next one (equation 15). They take
``c = max(0, β - 3γ)`` (equation 14) from the BatchNorm's β and γ, the mean and
deviation of the input; here both are measured on the batches. A value under c, about
one in 740 for a normal distribution, is changed: so this is an approximation, and how
many it changed is in the row.
"""

from __future__ import annotations

import copy
from collections import Counter
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from roundoff.preserve import preserve
from roundoff.quantize.channels.changed_copy import take_over_
from roundoff.quantize.channels.fold_batch_norm import CONVOLUTIONS, pads_with_zeros
from roundoff.quantize.channels.groups import Binding, ChannelGroup, channel_groups
from roundoff.workload import Workload


@dataclass(frozen=True)
class Absorbed:
    """One channel group.

    Attributes:
        group: name of the weight that makes it.
        shift: c of each channel, ``[size]``; None when the group was left.
        changed: share of the ReLU's inputs on the batches that are under c, in channels
            with c > 0.
        reason: why it was left, ``""`` when it was not.
    """

    group: str
    shift: Tensor | None
    changed: float
    reason: str = ""


def absorb_bias_(
    model: nn.Module,
    batches: Iterable[Any],
    *,
    forward: Callable[[nn.Module, Any], Any] | None = None,
    deviations: float = 3.0,
) -> list[Absorbed]:
    """Move high biases past ReLUs, in place.

    A group needs one layer that makes it, with a bias, a ReLU alone behind it, and
    linear layers or convolutions without padding that read it (zeros that are padded
    behind the ReLU have no c to give back).

    Args:
        model: with BatchNorm folded.
        batches: the inputs of the ReLUs are measured on them.
        forward: ``forward(model, batch)``; by default as :class:`~roundoff.Workload`
            calls a model.
        deviations: c is the mean minus so many standard deviations, and 0 at least.

    Returns:
        One row for each channel group.

    Raises:
        WorkloadError: no batches, or the model raised; the model is then as before.
    """
    workload = Workload(model, batches, forward=forward)
    work = Workload(copy.deepcopy(model), workload.batches, forward=forward)
    groups = channel_groups(model, workload.batches, purpose="rescale", forward=forward)
    rows = [_absorb_(work, group, deviations) for group in groups]
    take_over_(model, work.model)
    return rows


def _absorb_(work: Workload, group: ChannelGroup, deviations: float) -> Absorbed:
    reason = _why_not(work.model, group)
    if reason:
        return Absorbed(group.name, None, 0.0, reason)
    channels = group.producers[0].index.flatten()
    inputs = _outputs(work, _layer(work.model, group.name))[:, channels]
    shift = inputs.mean(0) - deviations * inputs.std(0, correction=0)
    shift.clamp_(min=0.0)
    lifted = inputs[:, shift > 0]
    changed = 0.0
    if lifted.numel():
        changed = float((lifted < shift[shift > 0]).double().mean())
    _move_(work.model, group, shift)
    return Absorbed(group.name, shift, changed)


def _layer(model: nn.Module, parameter: str) -> nn.Module:
    """The module that a parameter is of."""
    return model.get_submodule(parameter.rpartition(".")[0])


def _why_not(model: nn.Module, group: ChannelGroup) -> str:
    """The reason why a group is left, ``""`` where there is none."""
    if group.pinned is not None:
        return group.pinned
    return _why_not_made(model, group) or _why_not_read(model, group)


def _why_not_made(model: nn.Module, group: ChannelGroup) -> str:
    """Why the layer before the ReLU cannot give up a shift."""
    if any(b.part == "batch_norm" for b in group.passers):
        return "it passes a BatchNorm: fold it first (fold_batch_norm_)"
    if len(group.producers) != 1 or group.producers[0].index.shape[1] != 1:
        return f"{len(group.producers)} weights make it"
    if [o.operator for o in group.operators] != ["relu"]:
        passed = ", ".join(f"{o.operator} ({o.site})" for o in group.operators)
        return f"it passes {passed or 'no ReLU'}"
    if not _has_bias(_layer(model, group.name)) or len(group.passers) != 1:
        return "the layer that makes it has no bias of its own"
    return ""


def _why_not_read(model: nn.Module, group: ChannelGroup) -> str:
    """Why a layer behind the ReLU cannot take the shift."""
    modules = model.named_modules(remove_duplicate=False)
    uses = Counter(id(module) for _, module in modules)
    for binding in group.consumers:
        reader = _layer(model, binding.name)
        if not _has_bias(reader) or uses[id(reader)] > 1:
            return f"{binding.name} has no bias to take it"
        if pads_with_zeros(reader):
            return f"{binding.name} reads zeros that are padded behind the ReLU"
    return ""


def _has_bias(layer: nn.Module) -> bool:
    """True for a linear layer or convolution with a bias."""
    return isinstance(layer, (nn.Linear, *CONVOLUTIONS)) and layer.bias is not None


def _outputs(workload: Workload, layer: nn.Module) -> Tensor:
    """All outputs of a layer on the batches, ``[n, channels]``, float64."""
    outputs: list[Tensor] = []
    axis = -1 if isinstance(layer, nn.Linear) else 1

    def keep(_module: nn.Module, _args: Any, output: Tensor) -> None:
        rows = output.detach().double().movedim(axis, -1)
        outputs.append(rows.flatten(0, -2))

    handle = layer.register_forward_hook(keep)
    try:
        with preserve(workload.model), torch.no_grad():
            workload.model.eval()
            for batch in workload.batches:
                workload.run(batch)
    finally:
        handle.remove()
    return torch.cat(outputs)


@torch.no_grad()
def _move_(model: nn.Module, group: ChannelGroup, shift: Tensor) -> None:
    """Take the shift from the bias before the ReLU, and give ``W·c`` to those behind."""
    parameters = dict(model.named_parameters())
    passer = group.passers[0]
    bias = parameters[passer.name]
    bias[passer.index.flatten()] -= shift.to(bias)
    for binding in group.consumers:
        layer: Any = _layer(model, binding.name)
        weight = parameters[binding.name].double()
        layer.bias += _through(weight, binding, shift).to(layer.bias)


def _through(weight: Tensor, binding: Binding, shift: Tensor) -> Tensor:
    """``W·c`` of a layer that reads the channels, ``[out]``."""
    depthwise = binding.axis == 0  # row i reads channel i
    groups = 1 if depthwise else binding.groups
    inputs = torch.zeros(weight.shape[binding.axis] * groups, dtype=torch.float64)
    for column in binding.index.T:
        inputs[column] = shift.cpu()
    inputs = inputs.to(weight.device)
    if depthwise:
        return weight.flatten(1).sum(1) * inputs
    split = weight.view(groups, weight.shape[0] // groups, weight.shape[1], -1)
    return (split * inputs.view(groups, 1, -1, 1)).sum((2, 3)).flatten()
