"""Cross-layer equalisation (Nagel et al., arXiv:1906.04721), on channel groups.

Their equations 10 and 11, ``s = √(r₁/r₂)`` with r₁ the largest weight that makes the
channel and r₂ the largest that reads it, make both equal; repeated over all groups
until nothing changes (section 4.1.2). Here all producers of a group are scaled,
residuals and concatenations included; a depthwise convolution reads one group and makes
another.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor, nn

from roundoff.errors import QuantizationError
from roundoff.quantize.channels.changed_copy import check_same, replace_, take_over_
from roundoff.quantize.channels.follow import follow_channels
from roundoff.quantize.channels.groups import ChannelGroup, groups_of
from roundoff.quantize.channels.labels import Labels, Passed
from roundoff.quantize.channels.rescale import (
    largest_weights,
    rescale_,
    why_not_rescalable,
)
from roundoff.workload import Workload


@dataclass(frozen=True)
class Equalised:
    """One channel group: the factors that it was divided by, or why it was left.

    Attributes:
        group: name of the weight that makes it.
        producers: all weights that make it.
        scale: ``[size]``, all rounds together; None when it was left.
        before, after: largest over smallest ``r₁`` of its channels; 1 is equal. NaN
            when it was left.
        reason: why it was left, ``""`` when it was not.
        note: what else was changed, such as a ReLU6 that now has a bound for each
            channel.
    """

    group: str
    producers: tuple[str, ...]
    scale: Tensor | None
    before: float
    after: float
    reason: str = ""
    note: str = ""


class ClippedReLU(nn.Module):
    """``min(max(x, 0), bound)`` with a bound for each channel on ``axis``.

    It is a ReLU6 whose channels were rescaled.
    """

    def __init__(self, bound: Tensor, axis: int = 1, ndim: int = 4) -> None:
        super().__init__()
        self.bound: Tensor
        shape = [1] * ndim
        shape[axis] = -1
        self.register_buffer("bound", bound.reshape(shape))

    def forward(self, x: Tensor) -> Tensor:
        """The clipped values; NaN stays NaN."""
        return torch.minimum(torch.relu(x), self.bound)

    def extra_repr(self) -> str:
        """Range of the bounds."""
        return f"bound={self.bound.amin():.3g}..{self.bound.amax():.3g}"


def equalise_(
    model: nn.Module,
    batches: Iterable[Any],
    *,
    forward: Callable[[nn.Module, Any], Any] | None = None,
    clip: Literal["channel", "relu"] = "channel",
    powers_of_two: bool = False,
    rounds: int = 100,
) -> list[Equalised]:
    """Equalise the weight ranges of all channel groups, in place.

    A channel whose weights are all zero on one side keeps its scale. Stops when no
    scale differs from 1 by more than a thousandth (with ``powers_of_two``, when all are
    1).

    Args:
        model: with BatchNorm folded (:func:`~roundoff.quantize.fold_batch_norm_`).
        batches: one is enough for ``clip="channel"``.
        forward: ``forward(model, batch)``; by default as :class:`~roundoff.Workload`
            calls a model.
        clip: a ReLU6 between becomes a :class:`ClippedReLU` with a bound for each
            channel; ``relu``: a plain ReLU where no value of ``batches`` reaches its
            bound, which is then a change of function for larger values (see ``note``).
        powers_of_two: round each scale to a power of two: then no weight is rounded and
            the outputs are equal bit by bit.
        rounds: at most so many times over all groups.

    Returns:
        One row for each channel group that a weight makes.

    Raises:
        QuantizationError: no batches, or the outputs are not the same; the model is
            then as before.
    """
    workload = Workload(model, batches, forward=forward)
    work = Workload(copy.deepcopy(model), workload.batches, forward=forward)
    notes = _loosen_(work, clip)
    groups = groups_of(follow_channels(work), "rescale")
    reasons = [why_not_rescalable(group) for group in groups]
    if all(reasons):
        _check_folded(groups, workload.name)
    free = {i: group for i, group in enumerate(groups) if reasons[i] is None}
    before = {i: _imbalance(work.model, group) for i, group in free.items()}
    scales = _equalise_groups_(work.model, free, powers_of_two, rounds)
    if free:
        reference = Workload(
            _with_clips(model, work.model), workload.batches, forward=forward
        )
        check_same(reference, work, "equalisation", depth=4 * len(groups))
        take_over_(model, work.model)
    return [
        Equalised(
            group.name,
            tuple(binding.name for binding in group.producers),
            scales.get(i),
            before.get(i, math.nan),
            _imbalance(model, group) if i in free else math.nan,
            reasons[i] or "",
            _note(group, notes),
        )
        for i, group in enumerate(groups)
    ]


def _check_folded(groups: Sequence[ChannelGroup], where: str) -> None:
    """Raise where BatchNorm keeps groups from being equalised."""
    if any(_passes_batch_norm(group) for group in groups):
        raise QuantizationError(
            "no channel group can be equalised while BatchNorm stands between its layers",
            where=where,
            do="fold it first: fold_batch_norm_(model, batches)",
        )


def _equalise_groups_(
    model: nn.Module,
    groups: Mapping[int, ChannelGroup],
    powers_of_two: bool,
    rounds: int,
) -> dict[int, Tensor]:
    """Rescale all groups in turn until nothing changes; return all scales."""
    total = {i: torch.ones(g.size, dtype=torch.float64) for i, g in groups.items()}
    for _ in range(rounds):
        largest_change = 0.0
        for i, group in groups.items():
            scale = _equalising_scale(model, group, powers_of_two)
            rescale_(model, group, scale)
            total[i] *= scale
            largest_change = max(largest_change, float(scale.log().abs().amax()))
        if largest_change < 1e-3:
            break
    return total


def _equalising_scale(
    model: nn.Module, group: ChannelGroup, powers_of_two: bool
) -> Tensor:
    """Equation 11, ``√(r₁/r₂)``, and 1 where a side is zero: ``[size]``."""
    making = largest_weights(model, group.producers, group.size)
    reading = largest_weights(model, group.consumers, group.size)
    scale = torch.where((making > 0) & (reading > 0), (making / reading).sqrt(), 1.0)
    if not powers_of_two:
        return scale
    exponent = torch.log2(scale)
    whole = torch.floor(exponent.abs() + 0.49)
    return torch.exp2(whole * torch.sign(exponent))


def _imbalance(model: nn.Module, group: ChannelGroup) -> float:
    """The largest over the smallest ``r₁`` of a group's channels, zeros left out."""
    ranges = largest_weights(model, group.producers, group.size)
    alive = ranges[ranges > 0]
    return float(alive.amax() / alive.amin()) if alive.numel() else 1.0


def _note(group: ChannelGroup, notes: Mapping[str, str]) -> str:
    """The notes of the modules whose operators a group passes."""
    paths = {operator.site.rpartition("/")[0] for operator in group.operators}
    return "; ".join(notes[path] for path in sorted(notes) if path in paths)


def _loosen_(work: Workload, clip: str) -> dict[str, str]:
    """Replace each ReLU6 that alone keeps its group from being rescaled.

    Returns a note by module path.
    """
    if clip not in ("channel", "relu"):
        raise QuantizationError(
            "unknown way to treat a clip", expected="channel or relu", got=repr(clip)
        )
    labels = follow_channels(work)
    notes: dict[str, str] = {}
    for group in groups_of(labels, "rescale"):
        if not _only_clips(group):
            continue
        for operator in group.operators:
            path = operator.site.partition("/")[0]
            clip_of = _clip_of(work.model, labels, operator)
            if path not in notes and clip_of is not None:
                notes[path] = _replace_clip_(work, path, clip_of, clip)
    return notes


def _replace_clip_(work: Workload, path: str, clip: _Clip, treatment: str) -> str:
    """Replace a ReLU6 module by a plain ReLU or one with a bound for each channel."""
    module = work.model.get_submodule(path)
    if treatment == "relu" and _largest_input(work, module) < clip.bound:
        loose: nn.Module = nn.ReLU()
        note = f"{path} is a plain ReLU: no calibration value reaches {clip.bound:g}"
    else:
        weight = next(work.model.parameters())
        bound = torch.full(
            (clip.channels,), clip.bound, dtype=weight.dtype, device=weight.device
        )
        loose = ClippedReLU(bound, clip.axis, clip.ndim)
        note = f"{path} has a bound for each channel"
    replace_(work.model, path, loose.train(module.training))
    return note


def _only_clips(group: ChannelGroup) -> bool:
    """True if nothing but clips can keep a group from being rescaled."""
    if group.pinned is not None or _passes_batch_norm(group):
        return False
    return all(operator.law != "other" for operator in group.operators)


def _passes_batch_norm(group: ChannelGroup) -> bool:
    return any(binding.part == "batch_norm" for binding in group.passers)


@dataclass(frozen=True)
class _Clip:
    """The bound of a ReLU6 module, and the channel axis among ``ndim`` axes."""

    bound: float
    axis: int
    channels: int
    ndim: int


def _clip_of(model: nn.Module, labels: Labels, operator: Passed) -> _Clip | None:
    """The clip of a module that is called once; None for other operators."""
    path, _, call = operator.site.partition("/")
    if operator.law != "clipped" or operator.bounds is None:
        return None
    low, high = operator.bounds
    calls = sum(passed.site.partition("/")[0] == path for passed in labels.passed)
    if low != 0.0 or calls > 1 or "#" in call or operator.site not in labels.clips:
        return None
    if not isinstance(model.get_submodule(path), nn.Hardtanh):
        return None
    axis, channels, ndim = labels.clips[operator.site]
    return _Clip(high, axis, channels, ndim)


def _largest_input(work: Workload, module: nn.Module) -> float:
    """The largest input of a module on the batches, 0 at least."""
    largest = [0.0]
    handle = module.register_forward_pre_hook(
        lambda _, args: largest.append(float(args[0].amax()))
    )
    try:
        with torch.no_grad():
            for batch in work.batches:
                work.run(batch)
    finally:
        handle.remove()
    return max(largest)


def _with_clips(model: nn.Module, changed: nn.Module) -> nn.Module:
    """The model with plain ReLUs where the changed one has them instead of clips.

    For a comparison of everything else.
    """
    reference = copy.deepcopy(model)
    for path, module in changed.named_modules():
        clip = isinstance(reference.get_submodule(path), nn.Hardtanh)
        if clip and isinstance(module, nn.ReLU):
            replace_(reference, path, nn.ReLU())
    return reference
