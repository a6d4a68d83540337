"""Labels through operators that move values: the operator itself, run on the labels."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.utils._pytree import tree_map

from roundoff.ops import float_tensors, operators_that
from roundoff.quantize.channels.labels import (
    Labels,
    Passed,
    Space,
    broadcast,
    channels_in,
    constant_expanded,
    varying_axes,
    varying_part,
)

# one element in, one element out at the same place
_SAME = (
    operators_that("keep values") | operators_that("cast") | operators_that("drop out")
)
_CUTS = operators_that("cut out") - {"chunk", "unsafe_chunk"}
_SPLITS = operators_that("reshape")
_JOINS = operators_that("join") | {"where"}
_WRITES = (
    operators_that("write into") | operators_that("fill") | operators_that("copy in")
)
# labels are expanded: what is a view of values may be a copy of labels
_FREE: dict[str, Callable[..., Any]] = {
    "view": Tensor.reshape,
    "view_as": Tensor.reshape_as,
}
_BY_VALUE = operators_that("sort")


class Moves:
    """Follows values that are moved, for ``Follow``."""

    def __init__(self, labels: Labels) -> None:
        self.labels = labels

    def move(
        self,
        func: Callable[..., Any],
        name: str,
        site: str,
        result: Any,
        args: Any,
        kwargs: Any,
    ) -> None:
        """``func`` has moved values: labels of its results."""
        labels = self.labels
        outputs = float_tensors(result)
        inputs = float_tensors((args, kwargs))
        if not inputs or not (outputs or name == "setitem"):
            return
        if self._parameter(func, name, outputs, inputs, args, kwargs):
            return
        if not any(
            channels_in(labels.get(t)).size or labels.parameter(t) for t in inputs
        ):
            return
        if name in _SAME:
            labels.put(outputs[0], labels.get(inputs[0]))
        elif name == "pad" or name == "constant_pad_nd":
            self._pad(site, outputs[0], args, kwargs)
        elif name in operators_that("fill"):
            value = (
                kwargs.get("value", args[2] if len(args) > 2 else 0.0)
                if "fill" in name
                else 0.0
            )
            own = labels.get(inputs[0])
            if not isinstance(value, (int, float)) or (value and np.isfinite(value)):
                labels.note(own, Passed(site, name, "other"))
            if name == "fill":
                labels.pin(own, "overwritten in place")
            labels.put(outputs[0], own)
        elif name in _BY_VALUE:
            own = labels.get(inputs[0])
            labels.pin(own, f"{name} moves values by size")
        else:
            self._run(func, name, site, outputs, inputs, args, kwargs)

    def _parameter(
        self,
        func: Callable[..., Any],
        name: str,
        outputs: list[Tensor],
        inputs: list[Tensor],
        args: Any,
        kwargs: Any,
    ) -> bool:
        """A parameter that is moved alone stays known as a part of it."""
        found = self.labels.parameter(inputs[0])
        if len(inputs) != 1 or found is None or name in _WRITES:
            return False
        flat = found[1]
        if flat is None:
            flat = torch.arange(inputs[0].numel(), dtype=torch.float64).view(
                inputs[0].shape
            )
        moved = (
            [flat]
            if name in _SAME
            else float_tensors(
                func(
                    *_replaced(args, {id(inputs[0]): flat}),
                    **_replaced(kwargs, {id(inputs[0]): flat}),
                )
            )
        )
        for tensor, where in zip(outputs, moved, strict=True):
            self.labels.moved(tensor, found[0], where)
        return True

    def _pad(self, site: str, result: Tensor, args: Any, kwargs: Any) -> None:
        own = self.labels.get(args[0])
        pads = kwargs.get("pad", args[1] if len(args) > 1 else ())
        axes = {args[0].ndim - 1 - i // 2 for i, width in enumerate(pads) if width}
        value = kwargs.get("value", args[3] if len(args) > 3 else None)
        if value:
            self.labels.note(own, Passed(site, "pad", "other"))
        if axes.isdisjoint(varying_axes(own)):
            self.labels.put(result, varying_part(own))
            return
        mode = kwargs.get("mode", args[2] if len(args) > 2 else "constant")
        self.labels.put(result, torch.nn.functional.pad(own, list(pads), mode=mode))
        self.labels.pin(own, "padded along the channel axis to a fixed size", "remove")

    def _run(
        self,
        func: Callable[..., Any],
        name: str,
        site: str,
        outputs: list[Tensor],
        inputs: list[Tensor],
        args: Any,
        kwargs: Any,
    ) -> None:
        labels = self.labels
        own = {
            id(t): labels.get(t).clone()
            if name in ("setitem", "copy")
            else labels.get(t)
            for t in inputs
        }
        if name in _JOINS:
            self._parameters_among(own, inputs)
            self._join(name, [own[id(t)] for t in inputs], args, kwargs)
        before = [own[id(t)] for t in inputs]
        try:
            moved = _FREE.get(name, func)(
                *_replaced(args, own), **_replaced(kwargs, own)
            )
        except (
            RuntimeError,
            TypeError,
            NotImplementedError,
            IndexError,
            ValueError,
        ):  # not for labels: nothing is known
            for one in before:
                labels.pin(one, f"{name} ({site}) cannot be followed")
            return
        if name == "setitem":
            self._written(args[0], own[id(args[0])])
            return
        after = [constant_expanded(t) for t in float_tensors(moved)]
        if outputs[0] is inputs[0]:
            self._written(outputs[0], after[0])
            return
        for tensor, ids in zip(outputs, after, strict=True):
            labels.put(tensor, ids)
        source = before[0]
        if name in _CUTS and any(not _equal(source, ids) for ids in after):
            labels.pin(source, f"cut at a fixed place by {name} ({site})", "remove")
        elif name in ("chunk", "unsafe_chunk") and after[0].shape == after[-1].shape:
            for ids in after[1:] if not _equal(source, after[0]) else ():
                labels.tie(after[0], ids, value=False)
        elif name == "channel_shuffle":
            groups = args[1] if len(args) > 1 else kwargs["groups"]
            parts = varying_part(source).movedim(1, 0)
            parts = parts.reshape(groups, -1, *parts.shape[1:])
            labels.tie(parts[:1], parts, value=False)
        elif name in _SPLITS and len(varying_axes(after[0])) > len(
            varying_axes(source)
        ):
            labels.pin(
                source,
                f"the channel axis is split into parts by {name} ({site})",
                "remove",
            )

    def _written(self, tensor: Tensor, after: Tensor) -> None:
        labels, before = self.labels, self.labels.get(tensor)
        labels.tie(before, after)  # views made earlier still show the labels of before
        if tensor._base is not None:
            labels.pin(after, "written in place through a view")
        if id(tensor) in labels.named:
            labels.pin(after, f"kept in {labels.named[id(tensor)]}")
        labels.put(tensor, after)

    def _parameters_among(self, own: dict[int, Tensor], inputs: list[Tensor]) -> None:
        """Parameters beside other tensors (a class token) hold values of the channels of the others."""
        for tensor in inputs:
            for other in inputs:
                axes = varying_axes(own[id(other)])
                if (
                    self.labels.parameter(tensor)
                    and len(axes) == 1
                    and axes[0] < tensor.ndim
                ):
                    found = along(self.labels, tensor, axes[0], "bias")
                    channels = varying_part(own[id(other)])
                    if found is not None and found.shape == channels.shape:
                        self.labels.tie(found, channels)
                        own[id(tensor)] = channels.expand(tensor.shape)

    def _join(self, name: str, parts: list[Tensor], args: Any, kwargs: Any) -> None:
        """Parts that are joined along one axis keep one size along the others."""
        reason = f"joined by {name} with a tensor of fixed size"
        joined_along = name in ("cat", "concat", "concatenate")
        axis = kwargs.get(
            "dim", args[1] if len(args) > 1 and isinstance(args[1], int) else 0
        )
        first = parts[0]
        for part in parts[1:]:
            one, other = (first, part) if joined_along else broadcast(first, part)
            if joined_along:
                if first.ndim != part.ndim or not (
                    set(varying_axes(one)) | set(varying_axes(other))
                ) - {axis % first.ndim}:
                    continue
                one, other = one.narrow(axis, 0, 1), other.narrow(axis, 0, 1)
            self.labels.tie(one, other, value=name == "where")
            fixed(self.labels, one, other, reason)


def along(labels: Labels, tensor: Tensor, axis: int, part: str) -> Tensor | None:
    """The labels of a parameter along one axis of ``tensor``, which is the parameter or a moved part of it; shape 1 except
    ``axis``. None when that axis is not an axis of the parameter."""
    found = labels.parameter(tensor)
    if found is None or tensor.ndim == 0:
        return None
    name, flat = found
    shape = [1] * tensor.ndim
    shape[axis] = -1
    if flat is None:
        return labels.space(
            Space(name, part, axis % tensor.ndim), tensor.shape[axis]
        ).view(shape)
    whole = labels.sizes[name]
    places = np.unravel_index(flat.long().numpy(), whole)
    if tensor.shape[axis] < 2:
        return None
    candidates = []
    for own, place in enumerate(places):
        ids = constant_expanded(torch.as_tensor(place).double())
        if varying_axes(ids) == [axis % tensor.ndim]:
            candidates.append((own, varying_part(ids).flatten().long()))
    if len(candidates) != 1:
        return None
    own, index = candidates[0]
    return labels.space(Space(name, part, own), whole[own])[index].view(shape)


def fixed(labels: Labels, first: Tensor, second: Tensor, reason: str) -> None:
    """Channels that meet, along their axis, a tensor that has a size but no channels there cannot be removed."""
    first, second = (
        broadcast(first, second) if first.ndim != second.ndim else (first, second)
    )
    for one, other in ((first, second), (second, first)):
        for axis in varying_axes(one):
            if other.shape[axis] > 1:
                a, b = broadcast(varying_part(one), varying_part(other))
                labels.pin(a[(b == 0)], reason, "remove")


def _equal(first: Tensor, second: Tensor) -> bool:
    a, b = varying_part(first).squeeze(), varying_part(second).squeeze()
    return a.shape == b.shape and torch.equal(a, b)


def _replaced(nest: Any, by: dict[int, Tensor]) -> Any:
    def one(leaf: Any) -> Any:
        return (
            by[id(leaf)]
            if id(leaf) in by
            else leaf.cpu()
            if isinstance(leaf, Tensor)
            else leaf
        )  # labels are on the CPU

    return tree_map(one, nest)
