"""Channels removed from a network: parameters, buffers and module attributes really shrink.

A channel goes from everything that its group binds. What is left computes what the
whole network computes when nothing reads the removed channels; that is run and
compared, so code that holds a channel count as a number is found out, and its groups
stay as they are, with a reason.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Container, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal

import torch
from torch import Tensor, nn

from roundoff.errors import QuantizationError, RoundoffError
from roundoff.quantize.channels.changed_copy import check_same, take_over_
from roundoff.quantize.channels.follow import follow_channels
from roundoff.quantize.channels.groups import ChannelGroup, groups_of
from roundoff.quantize.channels.rescale import grouped_view
from roundoff.quantize.sparsity.importance import Importance, score
from roundoff.quantize.sparsity.model_cost import model_cost
from roundoff.quantize.sparsity.shrink import shrink_
from roundoff.site import matches
from roundoff.workload import Workload


@dataclass(frozen=True)
class PrunedChannels:
    """One channel group, or one weight that is in none.

    Attributes:
        group: name of the first weight that makes the channels.
        before, after: number of channels.
        removed: int64, the channels that went, sorted.
        reason: why none could go, ``""`` when they could.
    """

    group: str
    before: int
    after: int
    removed: Tensor
    reason: str = ""


def prune_channels_(
    model: nn.Module,
    batches: Iterable[Any],
    *,
    ratio: float | None = None,
    macs: float | None = None,
    importance: Importance = "l2",
    scope: Literal["group", "global"] = "group",
    multiple: int = 1,
    ignored: Sequence[str] = (),
    forward: Callable[[nn.Module, Any], Any] | None = None,
) -> list[PrunedChannels]:
    """Remove the least important channels, in place.

    Args:
        model: any module. Parameters whose shape changes become new objects: make the
            optimizer afterwards.
        batches: those whose control flow is to be covered; the first one is what MACs
            are counted on.
        ratio: share of the channels to remove; of each group, ``round(n * ratio)`` of
            n; of all together with ``scope="global"``.
        macs: instead, the share of multiply-accumulates to be left; the smallest
            removal that gets there is searched.
        importance: ``l2``, ``batch_norm``, or a function of a group, see
            :mod:`roundoff.quantize.sparsity.importance`.
        scope: ``group`` removes the same share of every group, ``global`` ranks the
            channels of all groups together.
        multiple: what is left of each group is rounded up to a multiple of this (AMCT: 16).
        ignored: patterns over names of weights, such as ``stem.*``: groups that they
            make stay whole.
        forward: ``forward(model, batch)``; by default as :class:`~roundoff.Workload`
            calls a model.

    Returns:
        One row for each channel group, and for each weight that no batch reached.

    Raises:
        QuantizationError: not exactly one of ratio and macs, a value outside its range,
            a MACs target out of reach (the least reachable share is in the message), an
            importance that doesn't fit; the model is then as before.

    Example:
        >>> net = nn.Sequential(nn.Linear(3, 8), nn.ReLU(), nn.Linear(8, 2))
        >>> rows = prune_channels_(net, [torch.zeros(1, 3)], ratio=0.25)
        >>> [(row.group, row.before, row.after, row.reason) for row in rows], net[2]
        ([('0.weight', 8, 6, ''), ('2.weight', 2, 2, "it is the model's output")], Linear(in_features=6, ...))
    """
    _check_arguments(ratio, macs, scope, multiple)
    workload = Workload(model, batches, forward=forward)
    labels = follow_channels(workload)
    groups = [_kept_whole(g, ignored) for g in groups_of(labels, "remove")]
    scores = {
        i: score(model, g, importance) for i, g in enumerate(groups) if g.pinned is None
    }
    groups = _tried(workload, groups, scores)
    scores = {i: s for i, s in scores.items() if groups[i].pinned is None}
    if ratio is not None:
        share = ratio
    else:
        share = _search(workload, groups, scores, float(macs or 0.0), scope, multiple)
    chosen = choose(groups, scores, share, scope, multiple)
    if chosen:
        work = _shrunk(workload, groups, chosen)
        check_same(
            _masked(workload, groups, chosen),
            work,
            "removing channels",
            depth=len(labels.spaces) + 1,
        )
        take_over_(model, work.model)
    reached = {space.name for space in labels.spaces} | set(labels.whole)
    return [*_rows_of_groups(groups, chosen), *_rows_of_unreached(model, reached)]


def _rows_of_groups(
    groups: Sequence[ChannelGroup], chosen: Mapping[int, Tensor]
) -> Iterator[PrunedChannels]:
    for i, group in enumerate(groups):
        removed = chosen.get(i, _no_channels())
        left = group.size - len(removed)
        reason = group.pinned or ""
        yield PrunedChannels(group.name, group.size, left, removed, reason)


def _rows_of_unreached(
    model: nn.Module, reached: Container[str]
) -> Iterator[PrunedChannels]:
    reason = "no batch reached it, or its input has no channels"
    for name, parameter in model.named_parameters():
        if name not in reached and parameter.ndim > 1:
            yield PrunedChannels(name, 0, 0, _no_channels(), reason)


def _no_channels() -> Tensor:
    return torch.zeros(0, dtype=torch.int64)


def choose(
    groups: Sequence[ChannelGroup],
    scores: dict[int, Tensor],
    share: float,
    scope: str,
    multiple: int,
) -> dict[int, Tensor]:
    """Choose the channels of each group that go: those with the lowest scores,
    ``round(n * share)`` of n.

    What is left of a group is at least one channel and rounded up to a multiple. Of equal
    scores the first go.
    """
    count = {i: round(groups[i].size * share) for i in scores}
    if scope == "global" and scores:
        owner = torch.cat([torch.full((len(s),), i) for i, s in scores.items()])
        ranked = torch.cat(list(scores.values())).argsort(stable=True)
        lowest = ranked[: round(len(owner) * share)]
        count = {i: int((owner[lowest] == i).sum()) for i in scores}
    removed = {}
    for i, values in scores.items():
        size = groups[i].size
        multiples = -(-max(size - count[i], 1) // multiple)
        left = min(size, multiples * multiple)
        if left < size:
            removed[i] = values.argsort(stable=True)[: size - left].sort().values
    return removed


def _search(
    workload: Workload,
    groups: Sequence[ChannelGroup],
    scores: dict[int, Tensor],
    target: float,
    scope: str,
    multiple: int,
) -> float:
    """The smallest share of channels whose removal leaves at most ``target`` of the
    MACs, by bisection.
    """
    batch = workload.batches[0]
    whole = model_cost(workload.model, batch, forward=workload.forward).macs
    shares_left: dict[tuple[tuple[int, int], ...], float] = {(): 1.0}

    def left(share: float) -> float:
        chosen = choose(groups, scores, share, scope, multiple)
        key = tuple((i, len(channels)) for i, channels in chosen.items())
        if key not in shares_left:
            smaller = _shrunk(workload, groups, chosen).model
            cost = model_cost(smaller, batch, forward=workload.forward)
            shares_left[key] = cost.macs / whole
        return shares_left[key]

    low = 0.0
    high = 1.0
    if left(high) > target:
        pinned = sum(g.pinned is not None for g in groups)
        raise QuantizationError(
            f"removing channels cannot leave only {target:g} of the multiply-accumulates",
            where=workload.name,
            got=f"{left(high):.3g} with one channel left in each of {len(scores)} groups ({pinned} groups are pinned)",
            do="see channel_groups(model, batches) for the reasons, or raise macs",
        )
    for _ in range(12):
        middle = (low + high) / 2
        if left(middle) <= target:
            high = middle
        else:
            low = middle
    return high


def _tried(
    workload: Workload, groups: list[ChannelGroup], scores: dict[int, Tensor]
) -> list[ChannelGroup]:
    """The groups, pinned where the code breaks when one channel is missing; all are
    tried at once first.
    """
    lowest = {i: s.argsort()[:1] for i, s in scores.items() if groups[i].size > 1}
    if not lowest or _fails(workload, groups, lowest) is None:
        return groups
    for i, channel in lowest.items():
        reason = _fails(workload, groups, {i: channel})
        if reason is not None:
            pinned = f"the code depends on its size: {reason}"
            groups[i] = replace(groups[i], pinned=pinned)
    return groups


def _fails(
    workload: Workload, groups: Sequence[ChannelGroup], chosen: dict[int, Tensor]
) -> str | None:
    try:
        check_same(
            _masked(workload, groups, chosen),
            _shrunk(workload, groups, chosen),
            "it",
            depth=len(groups) * 4,
        )
    except RoundoffError as error:
        return (error.got or error.what).splitlines()[0]
    return None


def _shrunk(
    workload: Workload, groups: Sequence[ChannelGroup], chosen: dict[int, Tensor]
) -> Workload:
    work = copy.deepcopy(workload.model)
    shrink_(work, [(groups[i], removed) for i, removed in chosen.items()])
    return Workload(work, workload.batches, forward=workload.forward)


def _masked(
    workload: Workload, groups: Sequence[ChannelGroup], chosen: dict[int, Tensor]
) -> Workload:
    """The whole network with nothing reading the channels."""
    work = copy.deepcopy(workload.model)
    parameters = dict(work.named_parameters())
    with torch.no_grad():
        for i, removed in chosen.items():
            for binding in groups[i].consumers:
                view, axis = grouped_view(parameters[binding.name], binding)
                places = binding.index[removed].flatten()
                if binding.groups > 1:
                    length = view.shape[axis]
                    for place in places.tolist():
                        group = view[place // length]
                        group.select(axis - 1, place % length).zero_()
                else:
                    view.index_fill_(axis, places.to(view.device), 0.0)
    return Workload(work, workload.batches, forward=workload.forward)


def _kept_whole(group: ChannelGroup, ignored: Sequence[str]) -> ChannelGroup:
    if group.pinned:
        return group
    for pattern in ignored:
        if any(matches(pattern, binding.name) for binding in group.producers):
            return replace(group, pinned=f"ignored by {pattern}")
    return group


def _check_arguments(
    ratio: float | None, macs: float | None, scope: str, multiple: int
) -> None:
    if (ratio is None) == (macs is None):
        raise QuantizationError(
            "how much is to be removed?",
            expected="ratio= or macs=",
            got="both" if ratio is not None else "neither",
        )
    if ratio is not None and not 0.0 <= ratio < 1.0:
        raise QuantizationError(
            "not a share of channels", expected="0 <= ratio < 1", got=repr(ratio)
        )
    if macs is not None and not 0.0 < macs <= 1.0:
        raise QuantizationError(
            "not a share of multiply-accumulates",
            expected="0 < macs <= 1",
            got=repr(macs),
        )
    if scope not in ("group", "global"):
        raise QuantizationError(
            "unknown scope", expected="group or global", got=repr(scope)
        )
    if multiple < 1:
        raise QuantizationError(
            "not a multiple", expected="at least 1", got=repr(multiple)
        )
