"""Cross-layer equalisation and high-bias absorption (Nagel et al., arXiv:1906.04721), on channel groups.

A channel that is made 1/s times as large and read with weights s times as large leaves the network's function as it is,
where everything between passes a factor on (``f(s·x) = s·f(x)`` for s > 0: ReLU, max pooling, additions of values of the
same group). Their equations 10 and 11, ``s = √(r₁/r₂)`` with r₁ the largest weight that makes the channel and r₂ the
largest that reads it, make both equal; repeated over all groups until nothing changes (section 4.1.2). Here all producers
of a group are scaled, residuals and concatenations included; a depthwise convolution reads one group and makes another.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor, nn

from roundoff.errors import QuantizationError
from roundoff.quantize.channels.fold_batch_norm import check_same, take_over_
from roundoff.quantize.channels.groups import Binding, ChannelGroup, followed, groups_of
from roundoff.workload import Workload


@dataclass(frozen=True)
class Equalised:
    """One channel group: the factors that it was divided by, or why it was left.

    Attributes:
        group: name of the weight that makes it (all of them are in ``producers``).
        scale: ``[size]``, all rounds together; None when it was left.
        before, after: largest over smallest ``r₁`` of its channels; 1 is equal. NaN when it was left.
        reason: why it was left, ``""`` when it was not.
        note: what else was changed, such as a ReLU6 that now has a bound for each channel.
    """

    group: str
    producers: tuple[str, ...]
    scale: Tensor | None
    before: float
    after: float
    reason: str = ""
    note: str = ""


class ClippedReLU(nn.Module):
    """``min(max(x, 0), bound)`` with a bound for each channel on ``axis``: a ReLU6 whose channels were rescaled."""

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


def why_not(group: ChannelGroup, *, clips: bool = False) -> str | None:
    """Why the channels of a group cannot be rescaled; None when they can, with the function kept.

    ``clips``: the caller sees to it that what a ReLU6 between them clips stays the same.
    """
    if group.purpose != "rescale":
        return 'the group was asked for to remove channels: channel_groups(..., purpose="rescale")'
    if group.pinned is not None:
        return group.pinned
    if any(b.part == "batch_norm" for b in group.passers):
        return "it passes a BatchNorm: fold it first (fold_batch_norm_)"
    for operator in group.operators:
        if operator.law == "other":
            return f"{operator.operator} ({operator.site}) does not pass a factor on"
        if operator.law == "clipped" and not clips:
            return f"{operator.operator} ({operator.site}) clips at {operator.bounds}"
    both = {(b.name, b.axis) for b in group.producers} & {
        (b.name, b.axis) for b in group.consumers
    }
    if both:
        return f"{min(both)[0]} is tied: it makes and reads the channels by one axis"
    return None


@torch.no_grad()
def rescale_(
    model: nn.Module, group: ChannelGroup, scale: Tensor, *, clips: bool = False
) -> None:
    """Divide the channels of a group by ``scale``: producers and biases by it, consumers times it.

    The function is kept up to rounding; where ``scale`` holds powers of two, bit by bit (while nothing underflows).

    Args:
        model: the model that the group is of.
        group: of ``channel_groups(..., purpose="rescale")``.
        scale: ``[size]``, finite and above 0.
        clips: see :func:`why_not`.

    Raises:
        QuantizationError: the group cannot be rescaled (see :func:`why_not`), or the scale doesn't fit; the model is as
            before.

    Example:
        >>> from roundoff.quantize.channels import channel_groups
        >>> net = nn.Sequential(nn.Linear(2, 3), nn.ReLU(), nn.Linear(3, 1))
        >>> hidden, _ = channel_groups(net, [torch.zeros(1, 2)], purpose="rescale")
        >>> before = net(torch.ones(1, 2))
        >>> rescale_(net, hidden, torch.tensor([1.0, 2.0, 0.5]))
        >>> bool((net(torch.ones(1, 2)) == before).all())
        True
    """
    reason = why_not(group, clips=clips)
    if reason is not None:
        raise QuantizationError(
            f"the channels cannot be rescaled: {reason}", where=group.name
        )
    if scale.shape != (group.size,) or not bool(
        (torch.isfinite(scale) & (scale > 0)).all()
    ):
        raise QuantizationError(
            "not a scale for this group",
            where=group.name,
            got=f"{tuple(scale.shape)} {scale.dtype}",
            expected=f"({group.size},), finite and above 0",
        )
    tensors = {**dict(model.named_parameters()), **dict(model.named_buffers())}
    for binding in group.bindings:
        if binding.part in ("producer", "bias"):
            _multiply_(tensors[binding.name], binding, 1.0 / scale.double())
        elif binding.part == "consumer":
            _multiply_(tensors[binding.name], binding, scale.double())


def _multiply_(tensor: Tensor, binding: Binding, factor: Tensor) -> None:
    """Multiply the channels' places on the binding's axis by one factor each."""
    view, axis = grouped_view(tensor, binding)
    length = tensor.shape[binding.axis] * binding.groups
    factors = torch.ones(length, dtype=torch.float64, device=tensor.device)
    for column in binding.index.T:
        factors[column.to(tensor.device)] = factor.to(tensor.device)
    shape = [1] * view.ndim
    if binding.groups > 1:
        shape[0], shape[axis] = binding.groups, tensor.shape[binding.axis]
    else:
        shape[axis] = length
    view.copy_(view.double() * factors.view(shape))


def grouped_view(tensor: Tensor, binding: Binding) -> tuple[Tensor, int]:
    """A view of a weight with the convolution's groups as an axis 0 of its own, and the axis of the binding in it."""
    if binding.groups == 1:
        return tensor, binding.axis
    return tensor.view(
        binding.groups, tensor.shape[0] // binding.groups, *tensor.shape[1:]
    ), binding.axis + 1


def largest(model: nn.Module, bindings: Iterable[Binding], size: int) -> Tensor:
    """The largest magnitude of each channel over weights that make (or read) it: ``[size]``, float64, 0 without any."""
    tensors = dict(model.named_parameters())
    found = torch.zeros(size, dtype=torch.float64)
    for binding in bindings:
        view, axis = grouped_view(tensors[binding.name].detach(), binding)
        kept = (0, axis) if binding.groups > 1 else (axis,)
        others = [a for a in range(view.ndim) if a not in kept]
        each = (
            (view.abs().amax(others) if others else view.abs()).flatten().double().cpu()
        )
        found = torch.maximum(found, each[binding.index].amax(1))
    return found


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

    A channel whose weights are all zero on one side keeps its scale. Stops when no scale differs from 1 by more than a
    thousandth (with ``powers_of_two``, when all are 1).

    Args:
        model: with BatchNorm folded (:func:`~roundoff.quantize.channels.fold_batch_norm.fold_batch_norm_`).
        batches: one is enough for ``clip="channel"``.
        forward: ``forward(model, batch)``; by default as :class:`~roundoff.Workload` calls a model.
        clip: a ReLU6 between becomes a :class:`ClippedReLU` with a bound for each channel; ``relu``: a plain ReLU where
            no value of ``batches`` reaches its bound, which is then a change of function for larger values (see ``note``).
        powers_of_two: round each scale to a power of two: then no weight is rounded and the outputs are equal bit by bit.
        rounds: at most so many times over all groups.

    Returns:
        One row for each channel group that a weight makes.

    Raises:
        QuantizationError: no batches, or the outputs are not the same; the model is then as before.
    """
    workload = Workload(model, batches, forward=forward)
    work = Workload(copy.deepcopy(model), workload.batches, forward=forward)
    notes = _loosen_(work, clip)
    groups = groups_of(followed(work).labels, "rescale")
    reasons = [why_not(group) for group in groups]
    if any(b.part == "batch_norm" for g in groups for b in g.passers) and all(
        r is not None for r in reasons
    ):
        raise QuantizationError(
            "no channel group can be equalised while BatchNorm stands between its layers",
            where=workload.name,
            do="fold it first: fold_batch_norm_(model, batches)",
        )
    todo = [
        (i, g)
        for i, (g, reason) in enumerate(zip(groups, reasons, strict=True))
        if reason is None
    ]
    total = {i: torch.ones(g.size, dtype=torch.float64) for i, g in todo}
    before = {i: _spread(largest(work.model, g.producers, g.size)) for i, g in todo}
    for _ in range(rounds):
        worst = 0.0
        for i, group in todo:
            made, read = (
                largest(work.model, side, group.size)
                for side in (group.producers, group.consumers)
            )
            scale = torch.where((made > 0) & (read > 0), (made / read).sqrt(), 1.0)
            if powers_of_two:
                scale = torch.exp2(
                    torch.floor(torch.log2(scale).abs() + 0.49)
                    * torch.sign(torch.log2(scale))
                )
            rescale_(work.model, group, scale)
            total[i] *= scale
            worst = max(worst, float(scale.log().abs().amax()))
        if worst < 1e-3:
            break
    if todo:
        reference = Workload(
            _with_clips(model, work.model), workload.batches, forward=forward
        )
        check_same(reference, work, "equalisation", depth=4 * len(groups))
        take_over_(model, work.model)
    rows = []
    for i, group in enumerate(groups):
        names = tuple(b.name for b in group.producers)
        note = "; ".join(
            notes[n]
            for n in sorted(notes)
            if any(n == p.site.rpartition("/")[0] for p in group.operators)
        )
        if i in total:
            after = _spread(largest(model, group.producers, group.size))
            rows.append(
                Equalised(group.name, names, total[i], before[i], after, note=note)
            )
        else:
            rows.append(
                Equalised(
                    group.name,
                    names,
                    None,
                    float("nan"),
                    float("nan"),
                    str(reasons[i]),
                    note,
                )
            )
    return rows


def _spread(ranges: Tensor) -> float:
    alive = ranges[ranges > 0]
    return float(alive.amax() / alive.amin()) if alive.numel() else 1.0


def _loosen_(work: Workload, clip: str) -> dict[str, str]:
    """Give each ReLU6 module whose group could be rescaled but for it a bound for each channel; module path → note."""
    if clip not in ("channel", "relu"):
        raise QuantizationError(
            "unknown way to treat a clip", expected="channel or relu", got=repr(clip)
        )
    follow = followed(work)
    notes: dict[str, str] = {}
    for group in groups_of(follow.labels, "rescale"):
        if group.pinned is not None or any(
            b.part == "batch_norm" for b in group.passers
        ):
            continue
        if any(o.law == "other" for o in group.operators):
            continue
        for operator in group.operators:
            path, _, call = operator.site.partition("/")
            if operator.law != "clipped" or operator.bounds is None or path in notes:
                continue
            module = work.model.get_submodule(path)
            low, high = operator.bounds
            place = follow.clips.get(operator.site)
            uses = sum(p.site.partition("/")[0] == path for p in follow.labels.passed)
            if (
                not isinstance(module, nn.Hardtanh)
                or low != 0.0
                or place is None
                or uses > 1
                or "#" in call
            ):
                continue
            if clip == "relu" and _largest_input(work, module) < high:
                new: nn.Module = nn.ReLU()
                notes[path] = (
                    f"{path} is a plain ReLU: no calibration value reaches {high:g}"
                )
            else:
                axis, size, ndim = place
                weight = next(work.model.parameters())
                new = ClippedReLU(
                    torch.full((size,), high, dtype=weight.dtype, device=weight.device),
                    axis,
                    ndim,
                )
                notes[path] = f"{path} has a bound for each channel"
            parent, _, name = path.rpartition(".")
            setattr(work.model.get_submodule(parent), name, new.train(module.training))
    return notes


def _largest_input(work: Workload, module: nn.Module) -> float:
    seen = [0.0]
    handle = module.register_forward_pre_hook(
        lambda _, args: seen.append(float(args[0].amax()))
    )
    try:
        with torch.no_grad():
            for batch in work.batches:
                work.run(batch)
    finally:
        handle.remove()
    return max(seen)


def _with_clips(model: nn.Module, changed: nn.Module) -> nn.Module:
    """The model with plain ReLUs where the changed one has them instead of clips, for a comparison of the rest."""
    reference = copy.deepcopy(model)
    for path, module in changed.named_modules():
        own = reference.get_submodule(path)
        if isinstance(module, nn.ReLU) and isinstance(own, nn.Hardtanh):
            parent, _, name = path.rpartition(".")
            setattr(reference.get_submodule(parent), name, nn.ReLU())
    return reference
