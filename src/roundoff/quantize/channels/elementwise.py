"""Channels through operators that work element by element.

The channels stay, and those of two tensors that meet at one place are tied. Each rule
returns False where it does not know a call.
"""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from roundoff.ops import float_tensors, operators_that
from roundoff.quantize.channels.followed_call import FollowedCall
from roundoff.quantize.channels.labels import (
    constant_expanded,
    varying_axes,
    varying_part,
)

#: Bounds of clips whose call does not give them.
_DEFAULT_BOUNDS: dict[str, tuple[float, float]] = {
    "relu6": (0.0, 6.0),
    "hardtanh": (-1.0, 1.0),
}


def one_operand(call: FollowedCall) -> bool:
    """An operator of one tensor: activation functions, clamps, signs and roots."""
    x = call.x
    if not isinstance(x, Tensor) or call.out.shape != x.shape:
        return False
    bounds = _bounds(call)
    if bounds is None:
        _tie_others(call, x)
    else:
        varying = varying_axes(call.labels.get(x))
        if len(varying) == 1:
            axis = varying[0]
            call.labels.clips[call.site] = axis, x.shape[axis], x.ndim
    call.keep_labels(x, _law(call, bounds), bounds)
    return True


def _bounds(call: FollowedCall) -> tuple[float, float] | None:
    """The bounds of a clip; None for other operators and for bounds in tensors."""
    if call.name not in operators_that("clamp"):
        return None
    low, high = _DEFAULT_BOUNDS.get(call.name, (None, None))
    low = call.arguments.get("min", call.arguments.get("min_val", low))
    high = call.arguments.get("max", call.arguments.get("max_val", high))
    if isinstance(low, Tensor) or isinstance(high, Tensor):
        return None
    return (
        -math.inf if low is None else float(low),
        math.inf if high is None else float(high),
    )


def _law(call: FollowedCall, bounds: tuple[float, float] | None) -> str:
    """The law by which a factor of a channel passes."""
    if bounds is not None:
        half_line = bounds in ((0.0, math.inf), (-math.inf, 0.0))
        return "homogeneous" if half_line else "clipped"
    if call.name == "threshold" and tuple(call.args[1:3]) != (0, 0):
        return "other"
    scales = call.name in operators_that("scale with their operand")
    return "homogeneous" if scales else "other"


def _tie_others(call: FollowedCall, x: Tensor) -> None:
    """Tie the channels of x to those of other tensors that the call reads."""
    labels = call.labels
    for other in float_tensors((call.args[1:], call.arguments)):
        if other is x or other.numel() <= 1:
            continue
        if call.name == "prelu":
            call.bind(other, 1, x.ndim, "slope", labels.get(x))
        elif labels.parameter(other) is None:
            labels.tie(labels.get(x), labels.get(other), value=True)


def two_operands(call: FollowedCall) -> bool:
    """A sum, difference, product, quotient or extreme of two operands.

    That is a residual, a gate, or a number for all.
    """
    if len(call.args) < 2:
        return False
    a, b = call.args[:2]
    _pair(replace(call, name=call.name.removeprefix("r")), a, b)
    alpha = call.kwargs.get("alpha", 1)
    return isinstance(alpha, (int, float)) or bool(alpha == 1)


def _pair(call: FollowedCall, a: Any, b: Any) -> None:
    if not _has_axes(a) or not _has_axes(b):
        _with_number(call, a, b)
        return
    labels = call.labels
    for x, other, reverse in ((a, b, False), (b, a, True)):
        mixes_in = labels.parameter(other) is not None and labels.parameter(x) is None
        if mixes_in and _with_parameter(call, x, other, reverse):
            return
    _of_two_activations(call, a, b)


def _of_two_activations(call: FollowedCall, a: Tensor, b: Tensor) -> None:
    labels = call.labels
    out = call.out
    wide_a = _with_axes(labels.get(a), out.ndim)
    wide_b = _with_axes(labels.get(b), out.ndim)
    labels.pin_fixed(wide_a, wide_b, _fixed_size(call))
    first = labels.get(a).expand(out.shape)
    second = labels.get(b).expand(out.shape)
    additive = _keeps_common_factor(call)
    labels.tie(first, second, value=additive)
    if additive:
        _note_sum(call, first, second)
        kept = first
        other = second
    else:
        gates = labels.lost_factor(first) and not labels.lost_factor(second)
        swaps = call.name == "mul" and (gates or a.numel() < b.numel())
        kept, other = (second, first) if swaps else (first, second)
        call.note(kept, "homogeneous")
        call.note(other, "other")
    line = varying_part(kept)
    mixed = torch.where(line != 0, line, varying_part(other))
    labels.put(out, constant_expanded(mixed.expand(out.shape)))


def _note_sum(call: FollowedCall, first: Tensor, second: Tensor) -> None:
    """A sum is smaller by a factor when both operands are.

    Values that are no channels' stay as large.
    """
    no_channel = (varying_part(first) == 0) != (varying_part(second) == 0)
    law = "other" if no_channel.any() else "homogeneous"
    call.note(first, law)
    call.note(second, law)


def _has_axes(x: Any) -> bool:
    return isinstance(x, Tensor) and x.ndim > 0


def _keeps_common_factor(call: FollowedCall) -> bool:
    return call.name in operators_that("keep a common factor")


def _with_number(call: FollowedCall, a: Any, b: Any) -> None:
    """A tensor and a number for all its elements."""
    first = _has_axes(a)
    x = a if first else b
    number = b if first else a
    if not _has_axes(x):  # two numbers, which have no channels
        return
    if isinstance(number, (int, float)) and number == 0:
        call.keep_labels(x, "homogeneous")
    else:
        _keep_scaled(call, x, divided=x is a)


def _keep_scaled(call: FollowedCall, x: Tensor, *, divided: bool) -> None:
    """One number for all channels; ``divided``: x is not the divisor."""
    scaled = call.name == "mul" or (call.name == "div" and divided)
    call.keep_labels(x, "homogeneous" if scaled else "other")


def _with_parameter(
    call: FollowedCall, x: Tensor, parameter: Tensor, reverse: bool
) -> bool:
    """x + parameter or x * parameter with a value for each channel."""
    channels = call.labels.get(x)
    ndim = call.out.ndim
    axes = varying_axes(channels) or [x.ndim - 1]
    if len(axes) != 1 or x.shape != call.out.shape:
        return False
    axis = axes[0] - ndim  # from the back: the parameter may have fewer axes
    if -axis > parameter.ndim or parameter.shape[axis] == 1:
        _keep_scaled(call, x, divided=not reverse)
        return True
    if _keeps_common_factor(call):
        return _add_parameter(call, x, parameter, axis)
    if call.name == "mul":
        return _multiply_parameter(call, channels, parameter, axis)
    return False


def _add_parameter(call: FollowedCall, x: Tensor, parameter: Tensor, axis: int) -> bool:
    """x + parameter: a bias."""
    labels = call.labels
    channels = labels.get(x)
    bias = labels.along(parameter, axis, "bias")
    if bias is None:
        return False
    if varying_axes(channels):
        labels.tie(channels, bias)
        call.keep_labels(x, "homogeneous")
        return True
    labels.pin_fixed(bias.expand(parameter.shape), channels, _fixed_size(call))
    call.note(bias, "other")
    labels.put(call.out, bias)
    return True


def _multiply_parameter(
    call: FollowedCall, channels: Tensor, parameter: Tensor, axis: int
) -> bool:
    """x * parameter: it reads the channels, and makes others that go with them."""
    labels = call.labels
    read = labels.along(parameter, axis, "consumer")
    new_channels = labels.along(parameter, axis, "producer")
    if read is None or new_channels is None:
        return False
    labels.tie(channels, read)
    labels.tie(read, new_channels, value=False)
    if not varying_axes(channels):
        labels.pin(new_channels, _fixed_size(call), "remove")
    labels.put(call.out, new_channels)
    return True


def _fixed_size(call: FollowedCall) -> str:
    return f"meets a tensor of fixed size in {call.name} ({call.site})"


def _with_axes(labels: Tensor, ndim: int) -> Tensor:
    """Labels with axes of size 1 in front."""
    missing = ndim - labels.ndim
    return labels.view((1,) * missing + tuple(labels.shape)) if missing > 0 else labels


def glu(call: FollowedCall) -> bool:
    """One half of the channels times the sigmoid of the other half."""
    axis = call.arguments.get("dim", -1)
    value, gate = call.labels.get(call.x).chunk(2, axis)
    call.labels.tie(value, gate, value=False)
    call.note(gate, "other")
    call.note(value, "homogeneous")
    call.labels.put(call.out, constant_expanded(value))
    return True
