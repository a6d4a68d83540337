"""Labels: the channel of each element of each tensor, as integers that move with values.

Every index of every axis of a parameter has an integer of its own (from 1). A tensor
that an operator made is followed by a tensor of the same shape whose elements are such
integers; 0 is "no channel": inputs, constants, sums over channels. Elements that belong
together are a pair of integers; connected components of all pairs are the channels. An
operator that only moves values is run on the labels themselves, so cat, reshape, roll
or pixel_shuffle need no rule of their own.

Labels are float64 (every operator that moves floats moves them; integers are exact
below 2**53) and are kept expanded: an axis along which they don't change has stride 0,
so a feature map costs as little as its channels.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn
from torch.utils.weak import WeakIdKeyDictionary

Ids = NDArray[np.int64]
#: What a rule raises on a call of a form that it was not written for. Its channels stay
#: as they are: the model itself ran.
CANNOT_FOLLOW = (
    ArithmeticError,
    AttributeError,
    LookupError,
    RuntimeError,
    TypeError,
    ValueError,
)


class Space(NamedTuple):
    """One axis of one parameter in one part.

    Attributes:
        name: of the parameter or buffer.
        part: ``consumer`` (read along the axis), ``producer`` (made along it), or a
            value for each channel: ``bias`` (shares the unit of the channel), ``slope``
            (has no unit), ``batch_norm``.
        axis: of the parameter.
        groups: of the convolution; with more than one the axis stands for ``groups``
            times its length of channels.
    """

    name: str
    part: str
    axis: int
    groups: int = 1


@dataclass(frozen=True)
class Passed:
    """An operator that a channel passes, and its law for a factor.

    The law says what it makes of a channel that is smaller by a factor s > 0.

    Attributes:
        site: of the call.
        operator: its name.
        law: ``homogeneous`` (the result is smaller by s too), ``clipped`` (so it is
            when the bounds shrink as well) or ``other``.
        bounds: of a clip.
    """

    site: str
    operator: str
    law: str
    bounds: tuple[float, float] | None = None


@dataclass(frozen=True)
class ParameterPart:
    """The parameter or buffer that a tensor is, or that it is a moved part of.

    Attributes:
        name: of the parameter.
        flat: the flat index in it of each element of the tensor; None for the whole.
    """

    name: str
    flat: Tensor | None = None


@dataclass(frozen=True)
class Pin:
    """Labels of channels that have to stay as they are.

    Attributes:
        ids: the labels, each once.
        reason: why.
        purpose: ``remove`` where they cannot be removed, ``rescale`` where they cannot
            be rescaled, ``""`` for both.
    """

    ids: Ids
    reason: str
    purpose: str


class Labels:
    """The labels of all tensors of a run, and the ties between them.

    Attributes:
        named: name of each parameter and buffer by its id.
        sizes: their shapes by name.
        spaces: first label and size of each labelled axis.
        total: one more than the largest label.
        same: pairs of labels that are one channel, by value.
        together: pairs of labels of channels that can only leave together.
        whole: parameters that are read otherwise than along one axis, and where.
        touched: parameters that the current call reads along an axis, and these axes.
        uses: the axes that the calls read each parameter along, one set for each way.
        pins: channels that have to stay.
        passed: the operators that channels pass.
        clips: site of a clip → its channel axis, the axis's length, the number of axes.
    """

    def __init__(self, model: nn.Module) -> None:
        tensors = [*model.named_parameters(), *model.named_buffers()]
        self.named = {id(tensor): name for name, tensor in tensors}
        self.sizes = {name: tensor.shape for name, tensor in tensors}
        self.spaces: dict[Space, tuple[int, int]] = {}
        self.total = 1
        self.same: list[Ids] = []
        self.together: list[Ids] = []
        self.whole: dict[str, str] = {}
        self.touched: dict[str, set[Space]] = {}
        self.uses: dict[str, set[frozenset[Space]]] = {}
        self.pins: list[Pin] = []
        self.passed: dict[Passed, list[Ids]] = {}
        self.clips: dict[str, tuple[int, int, int]] = {}
        self._of: Any = WeakIdKeyDictionary()
        self._parts: Any = WeakIdKeyDictionary()

    def space(self, space: Space, size: int) -> Tensor:
        """The labels of an axis, ``[size]``."""
        self.touched.setdefault(space.name, set()).add(space)
        if space not in self.spaces:
            self.spaces[space] = (self.total, size)
            self.total += size
        start, size = self.spaces[space]
        return torch.arange(start, start + size, dtype=torch.float64)

    def end_call(self) -> None:
        """Note along which axes the call that has been followed reads parameters."""
        for name, spaces in self.touched.items():
            self.uses.setdefault(name, set()).add(frozenset(spaces))
        self.touched.clear()

    def get(self, tensor: Tensor) -> Tensor:
        """The labels of a tensor, zeros when it has none."""
        labels: Tensor | None = self._of.get(tensor)
        if labels is None or labels.shape != tensor.shape:
            return torch.zeros((), dtype=torch.float64).expand(tensor.shape)
        return labels

    def put(self, tensor: Tensor, labels: Tensor) -> None:
        """Follow ``tensor`` with ``labels`` (expanded to its shape)."""
        if id(tensor) not in self.named:
            self._of[tensor] = constant_expanded(labels.expand(tensor.shape))

    def forget(self, tensors: Iterable[Tensor]) -> None:
        """Take the labels of tensors away: nothing is known of their channels."""
        for tensor in tensors:
            self._of.pop(tensor, None)

    def parameter(self, tensor: Tensor) -> ParameterPart | None:
        """The parameter that ``tensor`` is or is a part of; None for others."""
        name = self.named.get(id(tensor))
        if name is not None:
            return ParameterPart(name)
        part: ParameterPart | None = self._parts.get(tensor)
        return part

    def put_part(self, tensor: Tensor, part: ParameterPart) -> None:
        """``tensor`` is a moved part of a parameter."""
        self._parts[tensor] = part

    def along(self, tensor: Tensor, axis: int, part: str) -> Tensor | None:
        """The labels of a parameter along one axis of ``tensor``.

        ``tensor`` is the parameter or a moved part of it.

        Returns:
            Labels of shape 1 except ``axis``; None when that axis is not an axis of the
            parameter.
        """
        origin = self.parameter(tensor)
        if origin is None or tensor.ndim == 0:
            return None
        shape = [1] * tensor.ndim
        shape[axis] = -1
        axis = axis % tensor.ndim
        size = tensor.shape[axis]
        if origin.flat is None:
            return self.space(Space(origin.name, part, axis), size).view(shape)
        if size < 2:
            return None
        whole = self.sizes[origin.name]
        candidates = []
        places = np.unravel_index(origin.flat.long().numpy(), whole)
        for parameter_axis, place in enumerate(places):
            index = constant_expanded(torch.as_tensor(place).double())
            if varying_axes(index) == [axis]:
                candidates.append((parameter_axis, varying_part(index)))
        if len(candidates) != 1:
            return None
        parameter_axis, index = candidates[0]
        labels = self.space(
            Space(origin.name, part, parameter_axis), whole[parameter_axis]
        )
        return labels[index.flatten().long()].view(shape)

    def tie(self, first: Tensor, second: Tensor, *, value: bool = True) -> None:
        """Elements that meet are one channel (``value``), or can only leave together."""
        first, second = broadcast(varying_part(first), varying_part(second))
        differ = (first != second) & (first != 0) & (second != 0)
        if differ.any():
            pairs = torch.stack((first[differ], second[differ]), 1).long().numpy()
            (self.same if value else self.together).append(np.unique(pairs, axis=0))

    def pin(self, labels: Tensor, reason: str, purpose: str = "") -> None:
        """These channels have to stay, see :class:`Pin`."""
        ids = channels_in(labels)
        if ids.size:
            self.pins.append(Pin(ids, reason, purpose))

    def pin_fixed(self, first: Tensor, second: Tensor, reason: str) -> None:
        """Pin channels that meet a tensor of fixed size along their axis.

        They cannot be removed: the tensor has a size there but no channels.
        """
        if first.ndim != second.ndim:
            first, second = broadcast(first, second)
        for channels, other in ((first, second), (second, first)):
            for axis in varying_axes(channels):
                if other.shape[axis] > 1:
                    a, b = broadcast(varying_part(channels), varying_part(other))
                    self.pin(a[(b == 0)], reason, "remove")

    def note(self, labels: Tensor, passed: Passed) -> None:
        """These channels pass an operator."""
        ids = channels_in(labels)
        if ids.size:
            self.passed.setdefault(passed, []).append(ids)

    def lost_factor(self, labels: Tensor) -> bool:
        """True if one of these has passed an operator that doesn't keep a factor."""
        ids = channels_in(labels)
        for passed, earlier in self.passed.items():
            if passed.law == "other" and any(np.isin(ids, e).any() for e in earlier):
                return True
        return False


def constant_expanded(labels: Tensor) -> Tensor:
    """The same labels, with stride 0 along every axis where they are constant.

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
    """The labels with every axis where they are constant cut to size 1."""
    if not labels.ndim:
        return labels
    cut: Any = tuple(
        slice(0, 1) if stride == 0 else slice(None) for stride in labels.stride()
    )
    return labels[cut]


def varying_axes(labels: Tensor) -> list[int]:
    """The axes along which labels change."""
    return [axis for axis, size in enumerate(varying_part(labels).shape) if size > 1]


def channels_in(labels: Tensor) -> Ids:
    """The channels that occur in labels, each once."""
    ids: Ids = np.unique(varying_part(labels).long().numpy())
    return ids[ids > 0]
