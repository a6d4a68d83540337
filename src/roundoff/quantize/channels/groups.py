"""Channel groups: what has to change together when channels of a network are removed or rescaled."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
import torch
from scipy.sparse import coo_array
from scipy.sparse.csgraph import connected_components
from torch import Tensor, nn

from roundoff.errors import QuantizationError
from roundoff.ops import float_tensors, watch
from roundoff.preserve import preserve
from roundoff.quantize.channels.follow import Follow, MovesMode
from roundoff.quantize.channels.labels import Ids, Labels, Passed, Space
from roundoff.workload import Workload

Purpose = Literal["remove", "rescale"]


@dataclass(frozen=True)
class Binding:
    """Where the channels of a group stand on one axis of one parameter or buffer.

    Attributes:
        name: of the parameter or buffer.
        axis: of it.
        index: int64, ``[size, k]``: row i holds the k places of channel i on the axis (k > 1 after a flatten, for the
            parts of a grouped convolution, or where several channels can only leave together).
        groups: of the convolution; with more than one, place p on the axis of length n stands for n * groups channels
            and the index counts them: group p // n, place p % n on the axis.
        part: ``producer``, ``consumer``, ``bias`` (a value in the channel's unit), ``slope`` (a value without unit) or
            ``batch_norm`` (weight, bias or statistics).
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
        producers: weights whose output they are (weights of normalisations and scale vectors too).
        consumers: weights that read them.
        passers: what has one value for each of them: biases, BatchNorm, PReLU slopes.
        operators: what they pass on their way, sorted by site.
        pinned: why they cannot be removed (or rescaled, as the group was asked for); None when they can.
        purpose: what the group was asked for.
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
    """The channels of a model, by what they are tied to: followed through one run on each batch.

    Two purposes, since two different things tie channels. To *remove* one, everything that indexes it must lose it:
    both sides of a product, the input and output of a depthwise convolution or a normalisation's weight, the same place in
    every part of a grouped convolution or a chunk. To *rescale* one (producers by 1/s, consumers by s), only values that
    are added matter; a depthwise convolution or a normalisation's weight reads one group and makes another.

    A channel is pinned, with a reason, where it reaches the model's output, or an operator that runs over channels or is
    not known, or where the code cuts the channel axis at a place that it may hold as a number. What is not pinned is what
    the run has shown: code that holds a channel count as a number is found by running the changed model
    (:func:`~roundoff.quantize.sparsity.prune_channels` does).

    Args:
        model: any module; it runs in evaluation mode and is left as it was.
        batches: one is enough unless the control flow depends on the data; a batch of one sample is.
        purpose: ``remove`` or ``rescale``.
        forward: ``forward(model, batch)``; by default as :class:`~roundoff.Workload` calls a model.

    Returns:
        Groups in the order of the model's parameters. Parameters that no batch reached, and channels that no weight
        makes (the model's input), are in none.

    Raises:
        QuantizationError: no batches.
        WorkloadError: the model raised.

    Example:
        >>> net = nn.Sequential(nn.Conv2d(1, 4, 3), nn.BatchNorm2d(4), nn.ReLU(), nn.Flatten(), nn.Linear(16, 3))
        >>> hidden, output = channel_groups(net, [torch.zeros(1, 1, 4, 4)])
        >>> hidden.size, [(b.name, b.axis, tuple(b.index.shape)) for b in (*hidden.producers, *hidden.consumers)]
        (4, [('0.weight', 0, (4, 1)), ('4.weight', 1, (4, 4))])
        >>> output.pinned
        "it is the model's output"
    """
    follow = followed(Workload(model, batches, forward=forward))
    return groups_of(follow.labels, purpose)


def followed(workload: Workload, batches: Sequence[Any] | None = None) -> Follow:
    """Run a workload's model on its batches, or on others, and follow its channels."""
    model = workload.model
    follow = Follow(model)
    with preserve(model):
        model.eval()
        with torch.no_grad(), watch(model, follow, MovesMode) as mode:
            for batch in workload.batches if batches is None else batches:
                mode.begin()
                with mode:
                    output = workload.run(batch)
                for tensor in float_tensors(output):
                    follow.labels.pin(
                        follow.labels.get(tensor), "it is the model's output"
                    )
                    found = follow.labels.parameter(tensor)
                    if found is not None:
                        follow.labels.whole[found[0]] = "it is the model's output"
    return follow


def groups_of(labels: Labels, purpose: Purpose) -> list[ChannelGroup]:
    """The groups that labels add up to."""
    if purpose not in ("remove", "rescale"):
        raise QuantizationError(
            "unknown purpose", expected="remove or rescale", got=repr(purpose)
        )
    component = components(labels, purpose)
    pinned = _pinned(labels, purpose, component)
    passed: dict[int, set[Passed]] = defaultdict(set)
    for operator, lists in labels.passed.items():
        for one in np.unique(component[np.concatenate(lists)]):
            passed[int(one)].add(operator)
    places: dict[int, dict[Space, list[int]]] = defaultdict(dict)
    for space, (start, size) in labels.spaces.items():
        for place in range(size):
            places[int(component[start + place])].setdefault(space, []).append(place)
    alike: dict[Any, list[int]] = defaultdict(list)
    for one, spaces in places.items():
        if any(space.part == "producer" for space in spaces):
            shape = tuple(sorted((space, len(at)) for space, at in spaces.items()))
            alike[shape, frozenset(passed[one]), pinned.get(one)].append(one)
    order = {name: i for i, name in enumerate(labels.sizes)}
    found = [
        _group(
            members,
            places,
            tuple(sorted(operators, key=lambda p: p.site)),
            reason,
            purpose,
            order,
        )
        for (_, operators, reason), members in alike.items()
    ]
    return sorted(found, key=lambda group: order[group.name])


def _group(
    members: list[int],
    places: dict[int, dict[Space, list[int]]],
    operators: tuple[Passed, ...],
    reason: str | None,
    purpose: Purpose,
    order: dict[str, int],
) -> ChannelGroup:
    spaces = sorted(places[members[0]], key=lambda space: (order[space.name], space))
    bindings = [
        Binding(
            s.name,
            s.axis,
            torch.tensor([places[one][s] for one in members]),
            s.groups,
            s.part,
        )
        for s in spaces
    ]
    producers = tuple(b for b in bindings if b.part == "producer")
    consumers = tuple(b for b in bindings if b.part == "consumer")
    passers = tuple(b for b in bindings if b.part not in ("producer", "consumer"))
    if reason is None and not consumers:
        reason = "no weight that reads it was seen"
    return ChannelGroup(
        len(members), producers, consumers, passers, operators, reason, purpose
    )


def components(labels: Labels, purpose: Purpose) -> Ids:
    """The channel that each label belongs to: ``[labels.total]``."""
    pairs = list(labels.same)
    if purpose == "remove":
        pairs += labels.together
        axes: dict[tuple[str, int], list[Space]] = defaultdict(list)
        for space in labels.spaces:
            axes[space.name, space.axis].append(space)
        for (
            spaces
        ) in axes.values():  # one axis read in two parts: an index is lost in both
            first = spaces[0]
            a, size = labels.spaces[first]
            length = size // first.groups
            for other in spaces[1:]:
                b, count = labels.spaces[other]
                n = np.arange(max(size, count))
                pairs.append(
                    np.stack(
                        (
                            a + n % size if size >= count else a + n % length,
                            b + n % count,
                        ),
                        1,
                    )
                )
    edges = np.concatenate([*pairs, np.zeros((0, 2), np.int64)])
    ones = np.ones(len(edges), np.int8)
    graph = coo_array(
        (ones, (edges[:, 0], edges[:, 1])), shape=(labels.total, labels.total)
    )
    found: Ids = connected_components(graph, directed=False)[1].astype(np.int64)
    return found


def _pinned(labels: Labels, purpose: Purpose, component: Ids) -> dict[int, str]:
    pinned: dict[int, str] = {}
    for ids, reason, only in labels.pins:
        if only in ("", purpose):
            for one in np.unique(component[ids]):
                pinned.setdefault(int(one), reason)
    for space, (start, size) in labels.spaces.items():
        if space.name in labels.whole:
            for one in np.unique(component[start : start + size]):
                pinned.setdefault(
                    int(one), f"{space.name} is {labels.whole[space.name]}"
                )
    return pinned
