"""Prune a copy of a model, count what that saves, and check that the zeros last."""

from __future__ import annotations

import copy
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field

from torch import Tensor

from roundoff.export.delivery.records import BeforeAfter, PrunedRow, PruningCost
from roundoff.export.delivery.request import Prune
from roundoff.quantize import (
    QuantizedModel,
    check_n_m,
    latency_ratio,
    magnitude_scores,
    model_cost,
    n_m_masks,
    prune_channels_,
    sparsify_,
    unstructured_masks,
)
from roundoff.workload import Workload


@dataclass(frozen=True, slots=True)
class Pruned:
    """What pruning left.

    Attributes:
        workload: the workload with the pruned model.
        rows: what was done, by parameter or group of channels.
        masks: by parameter, True where a weight stays; empty where channels went.
    """

    workload: Workload
    rows: tuple[PrunedRow, ...] = ()
    masks: Mapping[str, Tensor] = field(default_factory=dict)


def prune(workload: Workload, how: Prune) -> Pruned:
    """Prune a copy of the workload's model."""
    model = copy.deepcopy(workload.model)
    copied = workload.with_model(model)
    if how.kind == "channel":
        groups = prune_channels_(
            model, workload.batches, ratio=how.share, forward=workload.forward
        )
        rows = [PrunedRow(g.group, g.before, g.after, g.reason) for g in groups]
        return Pruned(copied, tuple(rows))
    if how.kind == "n_m":
        masks = n_m_masks(model, how.n, how.m)
    else:
        masks = unstructured_masks(magnitude_scores(model), how.share)
    rows = [
        PrunedRow(layer.name, layer.elements, layer.elements - layer.zeros, "")
        for layer in sparsify_(model, masks)
    ]
    return Pruned(copied, tuple(rows), masks)


def nothing_pruned(rows: Sequence[PrunedRow]) -> str | None:
    """Return why nothing could be pruned; None where something was."""
    if any(row.before != row.after for row in rows):
        return None
    reasons = sorted({row.reason for row in rows if row.reason})
    why = "; ".join(reasons[:3]) or "no weight that it is for"
    return f"nothing could be pruned: {why}"


def pruning_cost(whole: Workload, pruned: Workload) -> PruningCost:
    """Measure both models on the first batch."""
    batch = whole.batches[0]
    before = model_cost(whole.model, batch, forward=whole.forward)
    after = model_cost(pruned.model, batch, forward=whole.forward)
    return PruningCost(
        BeforeAfter(before.macs, after.macs),
        BeforeAfter(before.bytes, after.bytes),
        latency_ratio(whole.model, pruned.model, batch, forward=whole.forward),
    )


def lost_zeros(
    model: QuantizedModel, masks: Mapping[str, Tensor], how: Prune | None
) -> Iterator[str]:
    """Yield a line for each weight whose sparsity did not last."""
    parameters = dict(model.model.named_parameters())
    for name, mask in masks.items():
        parameter = parameters.get(name)
        if parameter is None or parameter.shape != mask.shape:
            continue
        weight = parameter.detach()
        moved = int((weight[~mask] != 0).sum())
        if moved:
            pruned = int((~mask).sum())
            yield f"{name}: {moved} of {pruned} pruned weights are no longer 0"
        elif how is not None and _breaks_pattern(weight, how):
            yield f"{name}: not {how.text} along its input channels"


def _breaks_pattern(weight: Tensor, how: Prune) -> bool:
    if how.kind != "n_m" or weight.ndim < 2:
        return False
    return bool(check_n_m(weight, how.n, how.m))
