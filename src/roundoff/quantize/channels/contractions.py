"""Channels through linear layers, convolutions, matrix products and attention.

They read the channels of one axis and make others, by a weight or by another
activation. Each rule returns False where it does not know a call.
"""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from roundoff.quantize.channels.followed_call import FollowedCall, on_axis
from roundoff.quantize.channels.labels import (
    Passed,
    Space,
    varying_axes,
    varying_part,
)


@dataclass(frozen=True)
class _Weight:
    """A weight and its bias.

    Attributes:
        inputs: the axis of the weight that reads channels.
        outputs: the axis that makes channels.
    """

    tensor: Tensor
    bias: Tensor | None
    inputs: int
    outputs: int


def linear(call: FollowedCall) -> bool:
    """A linear layer."""
    weight = _Weight(call.arguments["weight"], call.arguments.get("bias"), 1, 0)
    _contract(call, call.x, -1, weight)
    return True


def _contract(call: FollowedCall, x: Tensor, axis: int, weight: _Weight) -> None:
    """A product over ``axis`` with a weight's inputs, whose outputs take its place."""
    labels = call.labels
    channels = labels.get(x)
    outputs = labels.along(weight.tensor, weight.outputs, "producer")
    varying = varying_axes(channels)
    axis = axis % x.ndim
    if varying and axis not in varying and x.shape[axis] > 1:
        # mixes something else, channel by channel
        law = "homogeneous" if weight.bias is None else "other"
        labels.note(channels, Passed(call.site, "linear", law))
        labels.put(call.out, varying_part(channels))
        return
    if outputs is None:
        _pin_computed_weight(call, channels)
        return
    _read(call, channels, axis, weight.tensor, weight.inputs)
    _make(call, axis, outputs.flatten(), weight.bias)


def _pin_computed_weight(call: FollowedCall, channels: Tensor) -> None:
    reason = f"the weight of {call.site} is computed in the code"
    call.labels.pin(channels, reason)


def _line(channels: Tensor, axis: int) -> Tensor:
    """The labels along an axis, ``[others, channels]``."""
    line = varying_part(channels).movedim(axis, -1)
    return line.reshape(-1, line.shape[-1])


def _read(
    call: FollowedCall,
    channels: Tensor,
    axis: int,
    weight: Tensor,
    inputs: int,
    groups: int = 1,
) -> None:
    """The axis ``inputs`` of a weight reads the channels on ``axis``."""
    line = _line(channels, axis)
    first = line.amax(0)  # 0 where nothing is a channel (the model's input, padding)
    call.labels.tie(line, first)
    read = _input_labels(call, weight, inputs, groups)
    if read is None:
        _pin_computed_weight(call, channels)
        return
    call.labels.tie(first, read)
    _pin_others(call, read[first.expand(read.shape) == 0])


def _input_labels(
    call: FollowedCall, weight: Tensor, inputs: int, groups: int
) -> Tensor | None:
    """The labels of a weight's inputs; None where it is computed in the code."""
    labels = call.labels
    if groups == 1:
        read = labels.along(weight, inputs, "consumer")
        return None if read is None else read.flatten()
    origin = labels.parameter(weight)
    if origin is None or origin.flat is not None:
        return None
    size = weight.shape[inputs] * groups
    read = labels.space(Space(origin.name, "consumer", inputs, groups), size)
    _tie_groups(call, read, groups)
    return read


def _tie_groups(call: FollowedCall, channels: Tensor, groups: int) -> None:
    """The same place in every group can only leave together."""
    by_group = channels.view(groups, -1)
    call.labels.tie(by_group[:1], by_group, value=False)


def _pin_others(call: FollowedCall, read: Tensor) -> None:
    """Pin inputs of a weight that are no channels in this call.

    The weight may read channels by them in another call.
    """
    reason = f"{call.site} reads by the same weight what no weight makes"
    call.labels.pin(read, reason)


def _make(call: FollowedCall, axis: int, outputs: Tensor, bias: Tensor | None) -> None:
    """The result has new channels on ``axis``, with a bias each."""
    ndim = call.out.ndim
    call.labels.put(call.out, outputs.view(on_axis(axis, ndim)))
    call.bind(bias, axis, ndim, "bias", call.labels.get(call.out))


def convolution(call: FollowedCall) -> bool:
    """A convolution: plain, in groups, or depthwise."""
    x = call.arguments["input"]
    weight = call.arguments["weight"]
    bias = call.arguments.get("bias")
    groups = call.arguments.get("groups", 1)
    transposed = "transpose" in call.name
    spatial = int(call.name[-2])
    axis = x.ndim - spatial - 1
    channels = call.labels.get(x)
    if groups == 1:
        inputs, outputs = (0, 1) if transposed else (1, 0)
        _contract(call, x, axis, _Weight(weight, bias, inputs, outputs))
        return True
    origin = call.labels.parameter(weight)
    if origin is None or origin.flat is not None:
        _pin_computed_weight(call, channels)
        return True
    depthwise = weight.shape[1] == 1 and (not transposed or weight.shape[0] == groups)
    if depthwise:
        new_channels = _depthwise(call, channels, axis, origin.name, groups)
    elif transposed:
        new_channels = _grouped_transposed(call, channels, axis, origin.name, groups)
    else:
        new_channels = _grouped(call, channels, axis, origin.name, groups)
    _make(call, axis, new_channels, bias)
    return True


def _depthwise(
    call: FollowedCall, channels: Tensor, axis: int, name: str, groups: int
) -> Tensor:
    """A product for each channel alone: the labels of the outputs."""
    labels = call.labels
    rows = labels.sizes[name][0]
    read = labels.space(Space(name, "consumer", 0), rows)
    new_channels = labels.space(Space(name, "producer", 0), rows)
    line = _line(channels, axis)
    first = line.amax(0)
    labels.tie(line, first)
    if line.shape[-1] > 1:
        labels.tie(first.repeat_interleave(rows // groups), read)
        labels.tie(read, new_channels, value=False)
    else:
        reason = f"{call.site} reads a tensor of fixed size"
        labels.pin(new_channels, reason, "remove")
        _pin_others(call, read)
    return new_channels


def _grouped(
    call: FollowedCall, channels: Tensor, axis: int, name: str, groups: int
) -> Tensor:
    """A convolution in groups: the labels of the outputs."""
    labels = call.labels
    _read(call, channels, axis, call.arguments["weight"], 1, groups)
    rows = labels.sizes[name][0]
    new_channels = labels.space(Space(name, "producer", 0), rows)
    _tie_groups(call, new_channels, groups)
    return new_channels


def _grouped_transposed(
    call: FollowedCall, channels: Tensor, axis: int, name: str, groups: int
) -> Tensor:
    """A transposed convolution in groups: the labels of the outputs."""
    labels = call.labels
    rows, outputs = labels.sizes[name][:2]
    _read(call, channels, axis, call.arguments["weight"], 0)
    read = labels.space(Space(name, "consumer", 0), rows)
    _tie_groups(call, read, groups)
    space = Space(name, "producer", 1, groups)
    new_channels = labels.space(space, groups * outputs)
    _tie_groups(call, new_channels, groups)
    return new_channels


def matrix_product(call: FollowedCall) -> bool:
    """A product of an activation with a parameter or another activation."""
    labels = call.labels
    bias = None
    a, b = call.args[:2]
    if call.name == "addmm":
        bias = call.args[0]
        a, b = call.args[1:3]
    if labels.parameter(b) is not None and b.ndim == 2:
        _contract(call, a, -1, _Weight(b, bias, 0, 1))
        return True
    vectors = min(a.ndim, b.ndim) < 2
    if bias is not None or vectors or labels.parameter(a) is not None:
        return False
    _product_of_activations(call, a, b)
    return True


def _product_of_activations(call: FollowedCall, a: Tensor, b: Tensor) -> None:
    """A product that no weight takes part in."""
    labels = call.labels
    left = labels.get(a)
    right = labels.get(b)
    _sum_over_products(call, left, right)
    kept = [left.narrow(-1, 0, 1), right.narrow(-2, 0, 1)]
    with_channels = [part for part in kept if varying_axes(part)]
    if len(with_channels) == 2:
        reason = f"{call.name} ({call.site}) of two tensors with channels"
        labels.pin(left, reason)
        labels.pin(right, reason)
    elif with_channels:
        call.note(with_channels[0], "homogeneous")
        labels.put(call.out, varying_part(with_channels[0]))


def attention(call: FollowedCall) -> bool:
    """``softmax(q·k)·v``: the channels of v pass, those of q and k go together."""
    labels = call.labels
    query, key, value = (
        labels.get(call.arguments[name]) for name in ("query", "key", "value")
    )
    _sum_over_products(call, query, key.transpose(-1, -2))
    over_tokens = -2 % value.ndim in varying_axes(value)
    if over_tokens or query.shape[:-2] != value.shape[:-2]:
        labels.pin(value, f"{call.site} mixes its channels")
        return True
    call.note(value, "homogeneous")
    labels.put(call.out, varying_part(value))
    return True


def _sum_over_products(call: FollowedCall, left: Tensor, right: Tensor) -> None:
    """Two activations are multiplied and summed: over the last axis of the left one.

    That is the second last of the right one. The channels there go together, and none
    may be rescaled.
    """
    labels = call.labels
    on_left = -1 % left.ndim in varying_axes(left)
    on_right = -2 % right.ndim in varying_axes(right)
    if not on_left and not on_right:
        return
    reason = f"multiplied with other channels in {call.site}"
    labels.pin(left, reason, "rescale")
    labels.pin(right, reason, "rescale")
    first = left.narrow(-2, 0, 1)
    second = right.narrow(-1, 0, 1).transpose(-1, -2)
    if first.shape != second.shape:
        labels.pin(left, reason)
        labels.pin(right, reason)
        return
    labels.tie(first, second, value=False)
    labels.pin_fixed(first, second, f"{call.site} reads a tensor of fixed size")
