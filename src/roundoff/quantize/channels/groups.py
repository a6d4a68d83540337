"""Channel groups: channels that have to be removed or rescaled together."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple

import numpy as np
import torch
from scipy.sparse import coo_array
from scipy.sparse.csgraph import connected_components
from torch import Tensor, nn

from roundoff.errors import QuantizationError
from roundoff.quantize.channels.follow import follow_channels
from roundoff.quantize.channels.labels import Ids, Labels, Passed, Space
from roundoff.workload import Workload

Purpose = Literal["remove", "rescale"]


@dataclass(frozen=True)
class Binding:
    """Where the channels of a group stand on one axis of one parameter or buffer.

    Attributes:
        name: of the parameter or buffer.
        axis: of it.
        index: int64, ``[size, k]``: row i holds the k places of channel i on the axis
            (k > 1 after a flatten, for the parts of a grouped convolution, or where
            several channels can only leave together).
        groups: of the convolution; with more than one, place p on the axis of length n
            stands for n * groups channels and the index counts them: group p // n,
            place p % n on the axis.
        part: ``producer``, ``consumer``, ``bias`` (a value in the channel's unit),
            ``slope`` (a value without unit) or ``batch_norm`` (weight, bias or
            statistics).
    """

    name: str
    axis: int
    index: Tensor
    groups: int
    part: str


@dataclass(frozen=True)
class ChannelGroup:
    """``size`` channels that stand on the same axes of the same parameters.

    Attributes:
        size: number of channels that can be removed or rescaled each on its own.
        producers: weights whose output they are (weights of normalisations and scale
            vectors too).
        consumers: weights that read them.
        passers: biases, BatchNorm and PReLU slopes, with one value for each of them.
        operators: that they pass on their way, sorted by site.
        pinned: why they cannot be removed (or rescaled, as the group was asked for);
            None when they can.
        purpose: that the group was asked for.
    """

    size: int
    producers: tuple[Binding, ...]
    consumers: tuple[Binding, ...]
    passers: tuple[Binding, ...]
    operators: tuple[Passed, ...]
    pinned: str | None
    purpose: Purpose

    @property
    def name(self) -> str:
        """The first weight that makes the channels."""
        return self.producers[0].name

    @property
    def bindings(self) -> tuple[Binding, ...]:
        """Producers, consumers and passers."""
        return (*self.producers, *self.consumers, *self.passers)


def channel_groups(
    model: nn.Module,
    batches: Iterable[Any],
    *,
    purpose: Purpose = "remove",
    forward: Callable[[nn.Module, Any], Any] | None = None,
) -> list[ChannelGroup]:
    """The channels of a model by their ties, followed through one run on each batch.

    Two purposes, since two different things tie channels. To *remove* one, everything
    that indexes it must lose it: both sides of a product, the input and output of a
    depthwise convolution or a normalisation's weight, the same place in every part of a
    grouped convolution or a chunk. To *rescale* one (producers by 1/s, consumers by s),
    only values that are added matter; a depthwise convolution or a normalisation's
    weight reads one group and makes another.

    A channel is pinned, with a reason, where it reaches the model's output, or an
    operator that runs over channels or is not known, or where the code cuts the channel
    axis at a place that it may hold as a number. Channels are free as far as the run
    has shown: code that holds a channel count as a number is found by running the
    changed model (:func:`~roundoff.quantize.prune_channels_` does).

    Args:
        model: any module; it runs in evaluation mode and is left as it was.
        batches: one is enough unless the control flow depends on the data; a batch of
            one sample is.
        purpose: ``remove`` or ``rescale``.
        forward: ``forward(model, batch)``; by default as :class:`~roundoff.Workload`
            calls a model.

    Returns:
        Groups in the order of the model's parameters. Parameters that no batch reached,
        and channels that no weight makes (the model's input), are in none.

    Raises:
        QuantizationError: no batches.
        WorkloadError: the model raised.

    Example:
        >>> layers = nn.Conv2d(1, 4, 3), nn.ReLU(), nn.Flatten(), nn.Linear(16, 3)
        >>> net = nn.Sequential(*layers)
        >>> hidden, output = channel_groups(net, [torch.zeros(1, 1, 4, 4)])
        >>> reader = hidden.consumers[0]
        >>> hidden.size, reader.name, reader.axis, reader.index.shape
        (4, '3.weight', 1, torch.Size([4, 4]))
        >>> output.pinned
        "it is the model's output"
    """
    labels = follow_channels(Workload(model, batches, forward=forward))
    return groups_of(labels, purpose)


def groups_of(labels: Labels, purpose: Purpose) -> list[ChannelGroup]:
    """The groups that labels add up to."""
    if purpose not in ("remove", "rescale"):
        raise QuantizationError(
            "unknown purpose", expected="remove or rescale", got=repr(purpose)
        )
    component = components(labels, purpose)
    pinned = _pinned(labels, purpose, component)
    passed = _passed(labels, component)
    places = _places(labels, component)
    alike: dict[_Kind, list[int]] = defaultdict(list)
    for channel, spaces in places.items():
        if any(space.part == "producer" for space in spaces):
            shape = tuple(sorted((space, len(at)) for space, at in spaces.items()))
            operators = frozenset(passed[channel])
            alike[_Kind(shape, operators, pinned.get(channel))].append(channel)
    order = {name: i for i, name in enumerate(labels.sizes)}
    groups = [
        _group([places[channel] for channel in channels], kind, purpose, order)
        for kind, channels in alike.items()
    ]
    return sorted(groups, key=lambda group: order[group.name])


class _Kind(NamedTuple):
    """The places, operators and pin that the channels of one group share.

    Attributes:
        shape: the axes that each of them stands on, with the number of places.
        operators: that each of them passes.
        reason: why they are pinned, None when they are not.
    """

    shape: tuple[tuple[Space, int], ...]
    operators: frozenset[Passed]
    reason: str | None


def _passed(labels: Labels, component: Ids) -> dict[int, set[Passed]]:
    """The operators that each channel passes."""
    passed: dict[int, set[Passed]] = defaultdict(set)
    for operator, ids in labels.passed.items():
        for channel in np.unique(component[np.concatenate(ids)]):
            passed[int(channel)].add(operator)
    return passed


def _places(labels: Labels, component: Ids) -> dict[int, dict[Space, list[int]]]:
    """Where each channel stands on the axes of parameters."""
    places: dict[int, dict[Space, list[int]]] = defaultdict(dict)
    for space, (start, size) in labels.spaces.items():
        for place in range(size):
            channel = int(component[start + place])
            places[channel].setdefault(space, []).append(place)
    return places


def _group(
    channels: list[dict[Space, list[int]]],
    kind: _Kind,
    purpose: Purpose,
    order: dict[str, int],
) -> ChannelGroup:
    """The group of some channels, by the places of each."""
    spaces = sorted(channels[0], key=lambda space: (order[space.name], space))
    bindings = []
    for space in spaces:
        index = torch.tensor([places[space] for places in channels])
        bindings.append(
            Binding(space.name, space.axis, index, space.groups, space.part)
        )
    consumers = _of_parts(bindings, "consumer")
    reason = kind.reason
    if reason is None and not consumers:
        reason = "no weight that reads it was seen"
    return ChannelGroup(
        len(channels),
        _of_parts(bindings, "producer"),
        consumers,
        _of_parts(bindings, "bias", "slope", "batch_norm"),
        tuple(sorted(kind.operators, key=lambda passed: passed.site)),
        reason,
        purpose,
    )


def _of_parts(bindings: list[Binding], *parts: str) -> tuple[Binding, ...]:
    return tuple(binding for binding in bindings if binding.part in parts)


def components(labels: Labels, purpose: Purpose) -> Ids:
    """The channel that each label belongs to: ``[labels.total]``."""
    pairs = list(labels.same)
    if purpose == "remove":
        pairs += labels.together
        pairs += _axes_read_in_parts(labels)
    edges = np.concatenate([*pairs, np.zeros((0, 2), np.int64)])
    ones = np.ones(len(edges), np.int8)
    graph = coo_array(
        (ones, (edges[:, 0], edges[:, 1])), shape=(labels.total, labels.total)
    )
    channels: Ids = connected_components(graph, directed=False)[1].astype(np.int64)
    return channels


def _axes_read_in_parts(labels: Labels) -> list[Ids]:
    """Pairs of labels of one index where an axis is read in two parts."""
    axes: dict[tuple[str, int], list[Space]] = defaultdict(list)
    for space in labels.spaces:
        axes[space.name, space.axis].append(space)
    pairs = []
    for spaces in axes.values():
        first, size = labels.spaces[spaces[0]]
        length = size // spaces[0].groups
        for space in spaces[1:]:
            second, count = labels.spaces[space]
            places = np.arange(max(size, count))
            own_places = places % (size if size >= count else length)
            pairs.append(np.stack((first + own_places, second + places % count), 1))
    return pairs


def _pinned(labels: Labels, purpose: Purpose, component: Ids) -> dict[int, str]:
    """Why channels are pinned: the first reason for each."""
    pinned: dict[int, str] = {}
    for pin in labels.pins:
        if pin.purpose in ("", purpose):
            for channel in np.unique(component[pin.ids]):
                pinned.setdefault(int(channel), pin.reason)
    for space, (start, size) in labels.spaces.items():
        if space.name in labels.whole:
            reason = f"{space.name} is {labels.whole[space.name]}"
            for channel in np.unique(component[start : start + size]):
                pinned.setdefault(int(channel), reason)
    if purpose == "rescale":
        _pin_read_in_several_ways(labels, component, pinned)
    return pinned


def _pin_read_in_several_ways(
    labels: Labels, component: Ids, pinned: dict[int, str]
) -> None:
    """Pin what stands on a parameter that calls read along other axes.

    A tied head reads the table that makes the embedding: what divides one would
    multiply the other. Each call needs its own factor on an axis; one alone has it.
    """
    for space, (start, size) in labels.spaces.items():
        if len(labels.uses.get(space.name, ())) < 2:
            continue
        reason = (
            f"{space.name} is read in several ways: by one axis here, by another there"
        )
        for channel in np.unique(component[start : start + size]):
            pinned.setdefault(int(channel), reason)
