"""Labels through operators that move values: the operator itself, run on the labels."""

from __future__ import annotations

from collections.abc import Callable, Collection
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.utils._pytree import tree_map

from roundoff.ops import facts, float_tensors, operators_that
from roundoff.quantize.channels.labels import (
    CANNOT_FOLLOW,
    Labels,
    ParameterPart,
    Passed,
    broadcast,
    channels_in,
    constant_expanded,
    varying_axes,
    varying_part,
)

_SAME = (
    operators_that("keep values") | operators_that("cast") | operators_that("drop out")
)
_CHUNKS = frozenset({"chunk", "unsafe_chunk"})
_CUTS = operators_that("cut out") - _CHUNKS
_SPLITS = operators_that("reshape")
_JOINS = operators_that("join") | {"where"}
_JOINS_ALONG = frozenset({"cat", "concat", "concatenate"})
_WRITES = (
    operators_that("write into") | operators_that("fill") | operators_that("copy in")
)
_STORES = operators_that("write into") | operators_that("store or add")
_BY_VALUE = operators_that("sort")
# labels are expanded: what is a view of values may be a copy of labels
_FREE: dict[str, Callable[..., Any]] = {
    "view": Tensor.reshape,
    "view_as": Tensor.reshape_as,
}


@dataclass(frozen=True)
class Move:
    """A call that has moved values of its arguments into its result.

    Attributes:
        func: the operator.
        name: of it.
        site: of the call.
        result, args, kwargs: of the call.
    """

    func: Callable[..., Any]
    name: str
    site: str
    result: Any
    args: Any
    kwargs: Any

    @cached_property
    def inputs(self) -> list[Tensor]:
        """The floating-point arguments."""
        return float_tensors((self.args, self.kwargs))

    @cached_property
    def outputs(self) -> list[Tensor]:
        """The floating-point results."""
        return float_tensors(self.result)

    def argument(self, name: str, place: int, default: Any) -> Any:
        """An argument by name or place."""
        positional = self.args[place] if len(self.args) > place else default
        return self.kwargs.get(name, positional)

    def again(self, func: Callable[..., Any], replaced: dict[int, Tensor]) -> Any:
        """Run ``func`` with tensors replaced by id, others on the CPU as labels are."""

        def stand_in(leaf: Any) -> Any:
            if id(leaf) in replaced:
                return replaced[id(leaf)]
            return leaf.cpu() if isinstance(leaf, Tensor) else leaf

        args, kwargs = tree_map(stand_in, (self.args, self.kwargs))
        return func(*args, **kwargs)


def follow_move(labels: Labels, move: Move) -> None:
    """Give the results of a move their labels."""
    if not move.inputs or not (move.outputs or move.name == "setitem"):
        return
    if _moves_parameter(labels, move):
        return
    if not any(_is_labelled(labels, tensor) for tensor in move.inputs):
        return
    _rule_of(move.name)(labels, move)


def _rule_of(name: str) -> Callable[[Labels, Move], None]:
    for names, rule in _RULES:
        if name in names:
            return rule
    return _run_on_labels


def _keep(labels: Labels, move: Move) -> None:
    """One element in, one element out at the same place."""
    labels.put(move.outputs[0], labels.get(move.inputs[0]))


def _sort(labels: Labels, move: Move) -> None:
    channels = labels.get(move.inputs[0])
    labels.pin(channels, f"{move.name} moves values by size")


def _is_labelled(labels: Labels, tensor: Tensor) -> bool:
    if channels_in(labels.get(tensor)).size:
        return True
    return labels.parameter(tensor) is not None


def _moves_parameter(labels: Labels, move: Move) -> bool:
    """Note the part of a parameter that is moved alone; False for other moves."""
    source = move.inputs[0]
    parameter = labels.parameter(source)
    if len(move.inputs) != 1 or parameter is None or move.name in _WRITES:
        return False
    flat = parameter.flat
    if flat is None:
        count = torch.arange(source.numel(), dtype=torch.float64)
        flat = count.view(source.shape)
    moved = [flat]
    if move.name not in _SAME:
        moved = float_tensors(move.again(move.func, {id(source): flat}))
    for tensor, places in zip(move.outputs, moved, strict=True):
        labels.put_part(tensor, ParameterPart(parameter.name, places))
    return True


def _pad(labels: Labels, move: Move) -> None:
    x = move.args[0]
    channels = labels.get(x)
    pads = move.argument("pad", 1, ())
    if move.argument("value", 3, None):
        labels.note(channels, Passed(move.site, "pad", "other"))
    axes = {x.ndim - 1 - i // 2 for i, width in enumerate(pads) if width}
    if axes.isdisjoint(varying_axes(channels)):
        labels.put(move.outputs[0], varying_part(channels))
        return
    mode = move.argument("mode", 2, "constant")
    padded = torch.nn.functional.pad(channels, list(pads), mode=mode)
    labels.put(move.outputs[0], padded)
    labels.pin(channels, "padded along the channel axis to a fixed size", "remove")


def _fill(labels: Labels, move: Move) -> None:
    """Some elements become one value: 0 for tril and triu."""
    value = 0.0
    if "fill" in move.name:
        value = move.argument("value", 2, 0.0)
    channels = labels.get(move.inputs[0])
    computed = not isinstance(value, (int, float))
    if computed or (value and np.isfinite(value)):
        labels.note(channels, Passed(move.site, move.name, "other"))
    if move.name == "fill":
        labels.pin(channels, "overwritten in place")
    labels.put(move.outputs[0], channels)


_RULES: tuple[tuple[Collection[str], Callable[[Labels, Move], None]], ...] = (
    (_SAME, _keep),
    (("pad", "constant_pad_nd"), _pad),
    (operators_that("fill"), _fill),
    (_BY_VALUE, _sort),
)


def _run_on_labels(labels: Labels, move: Move) -> None:
    """Run the operator on labels, and tie the channels that it moves together."""
    if _adds(move):
        for tensor in move.inputs:
            labels.pin(labels.get(tensor), f"{move.name} ({move.site}) adds values")
        labels.forget(move.outputs)
        return
    _note_constants(labels, move)
    move = replace(move, args=_without_numbers(move))
    replaced = _labels_of_inputs(labels, move)
    before = [replaced[id(tensor)] for tensor in move.inputs]
    try:
        moved = move.again(_FREE.get(move.name, move.func), replaced)
    except CANNOT_FOLLOW:
        # not for labels: nothing is known
        for channels in before:
            labels.pin(channels, f"{move.name} ({move.site}) cannot be followed")
        return
    if move.name == "setitem":
        _write(labels, move.args[0], replaced[id(move.args[0])])
        return
    after = [constant_expanded(channels) for channels in float_tensors(moved)]
    if move.outputs[0] is move.inputs[0]:
        _write(labels, move.outputs[0], after[0])
        return
    for tensor, channels in zip(move.outputs, after, strict=True):
        labels.put(tensor, channels)
    _tie_parts(labels, move, before[0], after)


def _adds(move: Move) -> bool:
    """Return True for a store that adds to what is there: labels are no numbers."""
    name = facts(move.name).stores_unless
    value = None if name is None else move.argument(name, 3, None)
    return value is True or isinstance(value, str)


def _note_constants(labels: Labels, move: Move) -> None:
    """Values of no channel beside those of channels: these don't pass a factor on.

    Zeros do, and parts that are joined along the channel axis don't meet.
    """
    if move.name not in _JOINS | _STORES:
        return
    followed = [labels.get(tensor) for tensor in move.inputs]
    if move.name in _JOINS_ALONG and move.outputs:
        axis = move.argument("dim", 1, 0)
        if isinstance(axis, int) and any(
            axis % max(channels.ndim, 1) in varying_axes(channels)
            for channels in followed
        ):
            return
    if _holds_constants(labels, move):
        for channels in followed:
            labels.note(channels, Passed(move.site, move.name, "other"))


def _holds_constants(labels: Labels, move: Move) -> bool:
    """Return True for a number or tensor without channels that is not 0."""
    unlabelled = [t for t in move.inputs if not _is_labelled(labels, t)]
    if any(bool(tensor.any()) for tensor in unlabelled):
        return True
    if move.name not in _STORES:
        return False
    values = (*move.args[1:], *move.kwargs.values())
    return any(isinstance(v, (int, float)) and v for v in values)


def _without_numbers(move: Move) -> tuple[Any, ...]:
    """The arguments, with 0 ("no channel") for a number that is written."""
    first = {"setitem": 2, "where": 1}.get(move.name, len(move.args))
    return tuple(
        0.0 if place >= first and isinstance(value, (int, float)) else value
        for place, value in enumerate(move.args)
    )


def _labels_of_inputs(labels: Labels, move: Move) -> dict[int, Tensor]:
    """The labels of the arguments by id, to run the operator on."""
    replaced = {id(tensor): labels.get(tensor) for tensor in move.inputs}
    if move.name in ("setitem", "copy"):
        replaced = {key: channels.clone() for key, channels in replaced.items()}
    if move.name in _JOINS:
        _label_parameters(labels, replaced, move.inputs)
        _tie_joined(labels, move, [replaced[id(tensor)] for tensor in move.inputs])
    return replaced


def _tie_parts(labels: Labels, move: Move, source: Tensor, parts: list[Tensor]) -> None:
    """Tie or pin channels that a move cuts into parts of the channel axis."""
    if move.name in _CUTS:
        if any(not _equal(source, part) for part in parts):
            reason = f"cut at a fixed place by {move.name} ({move.site})"
            labels.pin(source, reason, "remove")
    elif move.name in _CHUNKS:
        _tie_chunks(labels, source, parts)
    elif move.name == "channel_shuffle":
        _tie_shuffled(labels, move, source)
    elif move.name in _SPLITS:
        _pin_split(labels, move, source, parts[0])


def _tie_chunks(labels: Labels, source: Tensor, parts: list[Tensor]) -> None:
    """Chunks of one size keep one size."""
    first = parts[0]
    if first.shape == parts[-1].shape and not _equal(source, first):
        for part in parts[1:]:
            labels.tie(first, part, value=False)


def _tie_shuffled(labels: Labels, move: Move, source: Tensor) -> None:
    """The groups of a channel shuffle keep one size."""
    groups = move.args[1] if len(move.args) > 1 else move.kwargs["groups"]
    channels = varying_part(source).movedim(1, 0)
    by_group = channels.reshape(groups, -1, *channels.shape[1:])
    labels.tie(by_group[:1], by_group, value=False)


def _pin_split(labels: Labels, move: Move, source: Tensor, result: Tensor) -> None:
    """A reshape may hold the number of channels in a part."""
    if len(varying_axes(result)) > len(varying_axes(source)):
        reason = f"the channel axis is split into parts by {move.name} ({move.site})"
        labels.pin(source, reason, "remove")


def _write(labels: Labels, tensor: Tensor, after: Tensor) -> None:
    """A tensor was written in place: give it new labels."""
    before = labels.get(tensor)
    labels.tie(before, after)  # views made earlier still show the labels of before
    if tensor._base is not None:
        labels.pin(after, "written in place through a view")
    if id(tensor) in labels.named:
        labels.pin(after, f"kept in {labels.named[id(tensor)]}")
    labels.put(tensor, after)


def _label_parameters(
    labels: Labels, replaced: dict[int, Tensor], inputs: list[Tensor]
) -> None:
    """Parameters beside other tensors (a class token) hold values of their channels."""
    for tensor in inputs:
        if labels.parameter(tensor) is None:
            continue
        for other in inputs:
            channels = replaced[id(other)]
            axes = varying_axes(channels)
            if len(axes) != 1 or axes[0] >= tensor.ndim:
                continue
            values = labels.along(tensor, axes[0], "bias")
            line = varying_part(channels)
            if values is not None and values.shape == line.shape:
                labels.tie(values, line)
                replaced[id(tensor)] = line.expand(tensor.shape)


def _tie_joined(labels: Labels, move: Move, parts: list[Tensor]) -> None:
    """Parts that are joined along one axis keep one size along the others."""
    reason = f"joined by {move.name} with a tensor of fixed size"
    along = move.name in _JOINS_ALONG
    axis = move.args[1] if len(move.args) > 1 and isinstance(move.args[1], int) else 0
    axis = move.kwargs.get("dim", axis)
    for part in parts[1:]:
        if along:
            if not _meet_beside(parts[0], part, axis):
                continue
            first = parts[0].narrow(axis, 0, 1)
            other = part.narrow(axis, 0, 1)
        else:
            first, other = broadcast(parts[0], part)
        labels.tie(first, other, value=move.name == "where")
        labels.pin_fixed(first, other, reason)


def _meet_beside(first: Tensor, part: Tensor, axis: int) -> bool:
    """True if labels vary along an axis other than the one that parts are joined on."""
    if first.ndim != part.ndim:
        return False
    varying = set(varying_axes(first)) | set(varying_axes(part))
    return bool(varying - {axis % first.ndim})


def _equal(first: Tensor, second: Tensor) -> bool:
    """True if labels are the same up to axes where they are constant."""
    a = varying_part(first).squeeze()
    b = varying_part(second).squeeze()
    return a.shape == b.shape and torch.equal(a, b)
