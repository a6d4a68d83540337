"""High-bias absorption (Nagel et al., arXiv:1906.04721, section 4.1.3): large biases move past a ReLU into the next layer.

After equalisation a channel can have a large bias and so a wide range of activations. Where a channel's input to the ReLU is
above c for almost all data, ``relu(x) = relu(x - c) + c``: c leaves the first bias (their equation 13) and comes back as
``W·c`` in the next one (equation 15). They take ``c = max(0, β - 3γ)`` (equation 14) from the BatchNorm's β and γ, the mean
and deviation of the input; here both are measured on the batches. A value under c, about one in 740 for a normal
distribution, is changed: so this is an approximation, and how many it changed is in the row.
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
from roundoff.quantize.channels.fold_batch_norm import CONVOLUTIONS, take_over_
from roundoff.quantize.channels.groups import ChannelGroup, channel_groups
from roundoff.workload import Workload


@dataclass(frozen=True)
class Absorbed:
    """One channel group.

    Attributes:
        group: name of the weight that makes it.
        shift: c of each channel, ``[size]``; None when the group was left.
        changed: share of the inputs of the ReLU on the batches that are under c, in channels with c > 0.
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

    A group needs one layer that makes it, with a bias, a ReLU alone behind it, and linear layers or convolutions without
    padding that read it (zeros that are padded behind the ReLU have no c to give back).

    Args:
        model: with BatchNorm folded.
        batches: the inputs of the ReLUs are measured on them.
        forward: ``forward(model, batch)``; by default as :class:`~roundoff.Workload` calls a model.
        deviations: c is the mean minus so many standard deviations, and 0 at least.

    Returns:
        One row for each channel group.

    Raises:
        WorkloadError: no batches, or the model raised; the model is then as before.
    """
    workload = Workload(model, batches, forward=forward)
    work = copy.deepcopy(model)
    rows = []
    for group in channel_groups(
        model, workload.batches, purpose="rescale", forward=forward
    ):
        reason = _why_not(work, group)
        if reason:
            rows.append(Absorbed(group.name, None, 0.0, reason))
            continue
        layer: Any = work.get_submodule(group.name.rpartition(".")[0])
        channels = group.producers[0].index.flatten()
        inputs = _outputs(work, layer, workload)[:, channels]
        shift = (inputs.mean(0) - deviations * inputs.std(0, correction=0)).clamp_(
            min=0.0
        )
        lifted = inputs[:, shift > 0]
        changed = (
            float((lifted < shift[shift > 0]).double().mean())
            if lifted.numel()
            else 0.0
        )
        _move(work, group, shift)
        rows.append(Absorbed(group.name, shift, changed))
    take_over_(model, work)
    return rows


def _why_not(model: nn.Module, group: ChannelGroup) -> str:
    if group.pinned is not None:
        return group.pinned
    if any(b.part == "batch_norm" for b in group.passers):
        return "it passes a BatchNorm: fold it first (fold_batch_norm_)"
    if len(group.producers) != 1 or group.producers[0].index.shape[1] != 1:
        return f"{len(group.producers)} weights make it"
    if [o.operator for o in group.operators] != ["relu"]:
        return "it passes " + (
            ", ".join(f"{o.operator} ({o.site})" for o in group.operators) or "no ReLU"
        )
    makes = model.get_submodule(group.name.rpartition(".")[0])
    if (
        not isinstance(makes, (nn.Linear, *CONVOLUTIONS))
        or makes.bias is None
        or len(group.passers) != 1
    ):
        return "the layer that makes it has no bias of its own"
    uses = Counter(id(m) for _, m in model.named_modules(remove_duplicate=False))
    for binding in group.consumers:
        reads = model.get_submodule(binding.name.rpartition(".")[0])
        if (
            not isinstance(reads, (nn.Linear, *CONVOLUTIONS))
            or reads.bias is None
            or uses[id(reads)] > 1
        ):
            return f"{binding.name} has no bias to take it"
        if not isinstance(reads, nn.Linear) and (
            reads.padding == "same" or any(p != 0 for p in reads.padding)
        ):
            return f"{binding.name} reads zeros that are padded behind the ReLU"
    return ""


def _outputs(model: nn.Module, layer: nn.Module, workload: Workload) -> Tensor:
    """All outputs of a layer on the batches, ``[n, channels]``, float64."""
    found: list[Tensor] = []
    axis = -1 if isinstance(layer, nn.Linear) else 1
    handle = layer.register_forward_hook(
        lambda *a: found.append(a[2].detach().double().movedim(axis, -1).flatten(0, -2))
    )
    own = Workload(model, workload.batches, forward=workload.forward)
    try:
        with preserve(model), torch.no_grad():
            model.eval()
            for batch in own.batches:
                own.run(batch)
    finally:
        handle.remove()
    return torch.cat(found)


@torch.no_grad()
def _move(model: nn.Module, group: ChannelGroup, shift: Tensor) -> None:
    parameters = dict(model.named_parameters())
    bias = parameters[group.passers[0].name]
    place = group.passers[0].index.flatten()
    bias[place] -= shift.to(bias)
    for binding in group.consumers:
        layer: Any = model.get_submodule(binding.name.rpartition(".")[0])
        weight = parameters[binding.name].double()
        each = torch.zeros(
            weight.shape[binding.axis] * binding.groups, dtype=torch.float64
        )
        if binding.axis == 0:  # depthwise: row i reads channel i
            each = torch.zeros(weight.shape[0], dtype=torch.float64)
        for column in binding.index.T:
            each[column] = shift.cpu()
        each = each.to(weight.device)
        if binding.axis == 0:
            back = weight.flatten(1).sum(1) * each
        else:
            split = weight.view(
                binding.groups, weight.shape[0] // binding.groups, weight.shape[1], -1
            )
            back = (split * each.view(binding.groups, 1, -1, 1)).sum((2, 3)).flatten()
        layer.bias += back.to(layer.bias)
