"""Labels: which channel each element of each tensor belongs to, as integers that move with the values.

Every index of every axis of a parameter has an integer of its own (from 1). A tensor that an operator made is followed by
a tensor of the same shape whose elements are such integers; 0 is "no channel": inputs, constants, sums over channels. What
belongs together is a pair of integers; connected components of all pairs are the channels. An operator that only moves
values is run on the labels themselves, so cat, reshape, roll or pixel_shuffle need no rule of their own.

Labels are float64 (every operator that moves floats moves them; integers are exact below 2**53) and are kept expanded: an
axis along which they don't change has stride 0, so a feature map costs as little as its channels.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn
from torch.utils.weak import WeakIdKeyDictionary

Ids = NDArray[np.int64]


class Space(NamedTuple):
    """One axis of one parameter in one part: read along it (``consumer``), made along it (``producer``), or a value for
    each channel: ``bias`` (shares the unit of the channel), ``slope`` (has no unit), ``batch_norm``. With ``groups`` > 1
    the axis is that of a grouped convolution and stands for ``groups`` times its length of channels."""

    name: str
    part: str
    axis: int
    groups: int = 1


@dataclass(frozen=True)
class Passed:
    """An operator that a channel passes on its way, and what it does to a channel that is smaller by a factor s > 0.

    ``law`` is ``homogeneous`` (the result is smaller by s too), ``clipped`` (so it is when the bounds shrink as well) or
    ``other``.
    """

    site: str
    operator: str
    law: str
    bounds: tuple[float, float] | None = None


class Labels:
    """The labels of all tensors of a run, and all that is known about them."""

    def __init__(self, model: nn.Module) -> None:
        self.named = {
            id(t): n for n, t in [*model.named_parameters(), *model.named_buffers()]
        }
        self.sizes = {
            n: t.shape for n, t in [*model.named_parameters(), *model.named_buffers()]
        }
        self.spaces: dict[Space, tuple[int, int]] = {}
        self.total = 1
        self.same: list[Ids] = []  # pairs: one channel, by value
        self.together: list[
            Ids
        ] = []  # pairs: several channels that can only leave together
        self.whole: dict[
            str, str
        ] = {}  # parameters that are read otherwise than along one axis, and where
        self.touched: set[str] = set()  # parameters of which an axis was asked for
        self.pins: list[tuple[Ids, str, str]] = []
        self.passed: dict[Passed, list[Ids]] = {}
        self._of: Any = WeakIdKeyDictionary()
        self._moved: Any = WeakIdKeyDictionary()

    def space(self, space: Space, size: int) -> Tensor:
        """The labels of an axis, ``[size]``."""
        self.touched.add(space.name)
        if space not in self.spaces:
            self.spaces[space] = (self.total, size)
            self.total += size
        start, size = self.spaces[space]
        return torch.arange(start, start + size, dtype=torch.float64)

    def get(self, tensor: Tensor) -> Tensor:
        """The labels of a tensor, zeros when it has none."""
        found: Tensor | None = self._of.get(tensor)
        if found is None or found.shape != tensor.shape:
            return torch.zeros((), dtype=torch.float64).expand(tensor.shape)
        return found

    def put(self, tensor: Tensor, labels: Tensor) -> None:
        """Follow ``tensor`` with ``labels`` (expanded to its shape)."""
        if id(tensor) not in self.named:
            self._of[tensor] = constant_expanded(labels.expand(tensor.shape))

    def parameter(self, tensor: Tensor) -> tuple[str, Tensor | None] | None:
        """The parameter or buffer that ``tensor`` is or is a moved part of, with the flat index of each element in it (None
        for the whole)."""
        name = self.named.get(id(tensor))
        return (name, None) if name is not None else self._moved.get(tensor)

    def moved(self, tensor: Tensor, name: str, flat: Tensor) -> None:
        """``tensor`` holds elements ``flat`` of the parameter ``name``."""
        self._moved[tensor] = (name, flat)

    def tie(self, first: Tensor, second: Tensor, *, value: bool = True) -> None:
        """Elements that meet belong to one channel (``value``), or can only be removed together."""
        first, second = broadcast(varying_part(first), varying_part(second))
        differ = (first != second) & (first != 0) & (second != 0)
        if differ.any():
            pairs = torch.stack((first[differ], second[differ]), 1).long().numpy()
            (self.same if value else self.together).append(np.unique(pairs, axis=0))

    def pin(self, labels: Tensor, reason: str, purpose: str = "") -> None:
        """These channels cannot be removed (``purpose`` "remove"), rescaled ("rescale"), or either ("")."""
        ids = channels_in(labels)
        if ids.size:
            self.pins.append((ids, reason, purpose))

    def note(self, labels: Tensor, passed: Passed) -> None:
        """These channels pass an operator."""
        ids = channels_in(labels)
        if ids.size:
            self.passed.setdefault(passed, []).append(ids)

    def bent(self, labels: Tensor) -> bool:
        """Whether one of these has passed an operator that doesn't keep a factor."""
        ids = channels_in(labels)
        return any(
            np.isin(ids, seen).any()
            for passed, lists in self.passed.items()
            if passed.law == "other"
            for seen in lists
        )


def constant_expanded(labels: Tensor) -> Tensor:
    """The same labels, with stride 0 along every axis along which they are constant.

    >>> constant_expanded(torch.tensor([[1.0, 1.0], [2.0, 2.0]])).stride()
    (2, 0)
    """
    kept = labels
    if labels.numel():
        for axis, size in enumerate(labels.shape):
            if size > 1:
                first = kept.narrow(axis, 0, 1)
                if labels.stride(axis) == 0 or bool((kept == first).all()):
                    kept = first
    return kept.expand(labels.shape)


def broadcast(first: Tensor, second: Tensor) -> tuple[Tensor, Tensor]:
    """Both in their common shape."""
    shape = np.broadcast_shapes(first.shape, second.shape)
    return first.expand(shape), second.expand(shape)


def varying_part(labels: Tensor) -> Tensor:
    """The labels with every axis along which they are constant cut to size 1."""
    cut: Any = tuple(
        slice(0, 1) if stride == 0 else slice(None) for stride in labels.stride()
    )
    return labels[cut] if labels.ndim else labels


def varying_axes(labels: Tensor) -> list[int]:
    """The axes along which labels change."""
    return [axis for axis, size in enumerate(varying_part(labels).shape) if size > 1]


def channels_in(labels: Tensor) -> Ids:
    """The channels that occur in labels, each once."""
    ids: Ids = np.unique(varying_part(labels).long().numpy())
    return ids[ids > 0]
