"""Judge a changed model against the original, on data that nothing was chosen by."""

from __future__ import annotations

import copy
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

from roundoff.budget import sqnr_db
from roundoff.plan import detached, noise
from roundoff.preserve import preserve
from roundoff.workload import Workload, named_tensors


@dataclass(frozen=True, slots=True)
class ModelQuality:
    """How a model does in the place of the original.

    Attributes:
        db: SQNR of the output in dB.
        metric: the workload's metric; None without one.
        agreement: share of equal top choices; None for outputs without rows.
    """

    db: float
    metric: float | None
    agreement: float | None


class Judge:
    """Keep the original's outputs on the held-out batches, or on all where there are none."""

    def __init__(self, workload: Workload) -> None:
        self.workload = copy.copy(workload)
        self.workload.batches = workload.held_out or workload.batches
        self.outputs = self.run(workload.model)
        self.exact = [named_tensors(output) for output in self.outputs]
        self.metric = self.workload.evaluate(self.outputs, self.outputs)

    def run(self, model: nn.Module) -> list[Any]:
        """Return the output for each batch, in evaluation mode; the model is left as it was."""
        workload = self.workload.with_model(model)
        with preserve(model), torch.no_grad():
            model.eval()
            return [detached(workload.run(batch)) for batch in workload.batches]

    def judge(self, model: nn.Module) -> ModelQuality:
        """Judge another model in the place of the workload's."""
        outputs = self.run(model)
        tensors = [named_tensors(output) for output in outputs]
        return ModelQuality(
            sqnr_db(noise(tensors, self.exact)),
            self.workload.evaluate(outputs, self.outputs),
            agreement(tensors, self.exact),
        )

    @property
    def samples(self) -> int:
        """Number of samples that are judged."""
        return count_samples(self.workload.batches)


def agreement(
    outputs: Sequence[Mapping[str, Tensor]], exact: Sequence[Mapping[str, Tensor]]
) -> float | None:
    """Return the share of rows whose largest element stands at the same place.

    Rows lie along the last axis of the first output. None where that has fewer than two
    axes, or rows of one element.

    >>> agreement([{"output": torch.tensor([[1.0, 2], [3, 1]])}], [{"output": torch.tensor([[1.0, 3], [1, 2]])}])
    0.5
    """
    same = 0
    rows = 0
    for tensors, wanted in zip(outputs, exact, strict=True):
        name = next(iter(wanted), None)
        if name is None or wanted[name].ndim < 2 or wanted[name].shape[-1] < 2:
            return None
        if name not in tensors or tensors[name].shape != wanted[name].shape:
            continue  # the data decide how many rows there are
        hits = tensors[name].argmax(-1) == wanted[name].argmax(-1)
        same += int(hits.sum())
        rows += hits.numel()
    return same / rows if rows else None


def calibration(
    workload: Workload, samples: int, batches: int | None = None
) -> Workload:
    """Return the workload with its first batches.

    They hold at least ``samples`` samples where there are so many; with ``batches`` they
    are that number of batches instead.
    """
    copied = copy.copy(workload)
    if batches is not None:
        copied.batches = workload.batches[:batches]
        return copied
    copied.batches = []
    taken = 0
    for batch in workload.batches:
        if taken >= samples:
            break
        copied.batches.append(batch)
        taken += batch_size(batch)
    return copied


def count_samples(batches: Sequence[Any]) -> int:
    """Return the number of samples in some batches."""
    return sum(batch_size(batch) for batch in batches)


def batch_size(batch: Any) -> int:
    """Return the length of the first axis of the first tensor in a batch; 1 without one."""
    for leaf in tree_leaves(batch):
        if isinstance(leaf, Tensor) and leaf.ndim:
            return len(leaf)
    return 1
