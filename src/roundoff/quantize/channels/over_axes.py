"""Channels through pools, reductions, softmax and normalisations.

And embeddings, which make channels. Each rule returns False where it does not know a
call.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from torch import Tensor

from roundoff.ops import facts, operators_that
from roundoff.quantize.channels.followed_call import FollowedCall, on_axis
from roundoff.quantize.channels.labels import varying_axes, varying_part


def embedding(call: FollowedCall) -> bool:
    """Rows of a table: its columns are the channels."""
    columns = call.labels.along(call.arguments["weight"], 1, "producer")
    if columns is not None:
        call.labels.put(call.out, columns.view(-1))
    return True


def pool(call: FollowedCall) -> bool:
    """Pooling and upsampling over the spatial axes."""
    x = call.x
    if not isinstance(x, Tensor):
        return False
    channels = call.labels.get(x)
    resized = {i for i in range(x.ndim) if x.shape[i] != call.out.shape[i]}
    spatial = resized | set(range(2, x.ndim))
    if spatial & set(varying_axes(channels)):
        reason = f"{call.name} ({call.site}) mixes its channels"
        call.labels.pin(channels, reason)
        return True
    call.note(channels, "homogeneous")
    call.labels.put(call.out, varying_part(channels))
    return True


def softmax(call: FollowedCall) -> bool:
    """Softmax and its logarithm."""
    channels = call.labels.get(call.x)
    axis = call.arguments.get("dim", -1) % max(call.x.ndim, 1)
    if axis in varying_axes(channels):
        _pin_runs_over(call, channels)
    call.keep_labels(call.x, "other")
    return True


def _pin_runs_over(call: FollowedCall, channels: Tensor, purpose: str = "") -> None:
    reason = f"{call.name} ({call.site}) runs over its channels"
    call.labels.pin(channels, reason, purpose)


def reduction(call: FollowedCall) -> bool:
    """Sums, means, norms and extremes over some axes or all."""
    x = call.x
    if not isinstance(x, Tensor):
        return False
    labels = call.labels
    channels = labels.get(x)
    over = _reduced_axes(call, x)
    if not _are_reduced(x, call.outputs, over):
        return False
    varying = set(varying_axes(channels))
    runs_over_all = bool(varying) and varying <= set(over)
    sums = call.name in ("sum", "mean")
    if runs_over_all or (varying & set(over) and not sums):
        _pin_runs_over(call, channels)
        return True
    kept = channels
    for axis in over:
        if axis in varying:  # an addition of tensors that were stacked
            labels.tie(kept, kept.narrow(axis, 0, 1))
        kept = kept.narrow(axis, 0, min(1, kept.shape[axis]))
    for out in call.outputs:
        _put_reduced(call, out, kept, over)
    scales = call.name in operators_that("scale with their operand")
    call.note(channels, "homogeneous" if scales else "other")
    return True


def _put_reduced(
    call: FollowedCall, out: Tensor, kept: Tensor, over: list[int]
) -> None:
    """Follow a result, whose reduced axes may be gone, with labels that have them."""
    if over and out.ndim != kept.ndim:
        kept = kept.squeeze(tuple(over))
    if kept.ndim == out.ndim:
        call.labels.put(out, kept)


def _are_reduced(x: Tensor, outputs: list[Tensor], over: list[int]) -> bool:
    """Return True for results of the shape of x without these axes, or with 1 there."""
    kept = tuple(1 if axis in over else n for axis, n in enumerate(x.shape))
    dropped = tuple(n for axis, n in enumerate(x.shape) if axis not in over)
    return all(tuple(out.shape) in (kept, dropped) for out in outputs)


def _reduced_axes(call: FollowedCall, x: Tensor) -> list[int]:
    """The axes that a reduction runs over, ascending."""
    names = facts(call.name).arguments
    place = names.index("dim") if "dim" in names else 1
    dim: Any = call.args[place] if len(call.args) > place else None
    dim = call.kwargs.get("dim", call.kwargs.get("axis", dim))
    axes: Iterable[int]
    if dim is None or isinstance(dim, (Tensor, float)):
        axes = range(x.ndim)
    else:
        axes = [dim] if isinstance(dim, int) else dim
    return sorted({axis % x.ndim for axis in axes}) if x.ndim else []


def batch_norm(call: FollowedCall) -> bool:
    """BatchNorm: four values for each channel."""
    labels = call.labels
    x = call.x
    call.keep_labels(x, "other")
    mean = call.arguments.get("running_mean")
    if mean is not None and mean.numel() > 1 and not varying_axes(labels.get(x)):
        # of the model's input, say
        channels = labels.along(mean, 0, "batch_norm")
        if channels is not None:
            labels.put(call.out, channels.view(-1, *[1] * (x.ndim - 2)))
    for name in ("weight", "bias", "running_mean", "running_var"):
        tensor = call.arguments.get(name)
        call.bind(tensor, 1, x.ndim, "batch_norm", labels.get(call.out))
    return True


def normalization(call: FollowedCall) -> bool:
    """LayerNorm, RMSNorm, GroupNorm, InstanceNorm: the weight makes new channels."""
    labels = call.labels
    x = call.x
    channels = labels.get(x)
    axis = x.ndim - 1 if call.name in ("layer_norm", "rms_norm") else 1
    varying = varying_axes(channels)
    over = _normalizes_over(call, x, varying)
    if varying and varying != [axis]:
        if over or call.name == "instance_norm":
            labels.pin(channels, f"{call.name} ({call.site}) mixes its channels")
        call.keep_labels(x, "other")
        return True
    if over:
        _pin_runs_over(call, channels, "remove")
    call.note(channels, "other")
    new_channels = _scaled_by_weight(call)
    if new_channels is None or call.out.shape[axis] == 1:
        labels.put(call.out, channels)
        return True
    new_channels = new_channels.view(on_axis(axis, x.ndim))
    reason = f"{call.name} ({call.site}) reads a tensor of fixed size"
    labels.pin_fixed(new_channels.expand(call.out.shape), channels, reason)
    labels.tie(channels, new_channels, value=False)
    call.bind(call.arguments.get("bias"), axis, x.ndim, "bias", new_channels)
    labels.put(call.out, new_channels)
    return True


def _scaled_by_weight(call: FollowedCall) -> Tensor | None:
    """The channels that a normalisation's weight makes; None without one."""
    weight = call.arguments.get("weight")
    if weight is None or weight.ndim != 1:
        return None
    return call.labels.along(weight, 0, "producer")


def _normalizes_over(call: FollowedCall, x: Tensor, varying: list[int]) -> bool:
    """True if the normalisation runs over channels."""
    if call.name in ("group_norm", "instance_norm"):
        return call.name == "group_norm"
    first = x.ndim - len(call.arguments["normalized_shape"])
    return any(axis >= first for axis in varying)
