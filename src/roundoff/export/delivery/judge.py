"""Judge a changed model against the original, on data that nothing was chosen by."""

from __future__ import annotations

import copy
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

from roundoff.budget import OutputRow, SqnrTarget, output_rows, reached_db, rows_aside
from roundoff.plan import detached, output_noises
from roundoff.preserve import preserve, same_draws
from roundoff.workload import Workload, named_tensors, target_tensors


@dataclass(frozen=True, slots=True)
class ModelQuality:
    """How a model does in the place of the original.

    Attributes:
        db: SQNR in dB of the output closest to its target, or furthest below it; without
            a target of the one with most noise.
        metric: the workload's metric; None without one.
        agreement: share of equal top choices; None for outputs without rows.
        outputs: each named output.
    """

    db: float
    metric: float | None
    agreement: float | None
    outputs: tuple[OutputRow, ...] = ()


class Judge:
    """Keep the original's outputs on the held-out batches, or on all where there are none.

    Each named output is judged by its own ``target``. Raises ``PlanError`` where that names
    no output, ``WorkloadError`` where the workload is judged by a part that there is not.
    """

    def __init__(self, workload: Workload, target: SqnrTarget | None = None) -> None:
        self.target = target
        self.workload = copy.copy(workload)
        self.workload.batches = workload.held_out or workload.batches
        self.outputs = self.run(workload.model)
        self.exact = [_judged_tensors(workload, output) for output in self.outputs]
        if target is not None:
            target.check([row.output for row in self.rows(self.exact)])
        self.metric = self.workload.evaluate(self.outputs, self.outputs)

    def run(self, model: nn.Module) -> list[Any]:
        """Return the output for each batch, in evaluation mode; the model is left as it was."""
        workload = self.workload.with_model(model)
        with preserve(model), same_draws(), torch.no_grad():
            model.eval()
            return [detached(workload.run(batch)) for batch in workload.batches]

    def judge(self, model: nn.Module) -> ModelQuality:
        """Judge another model in the place of the workload's."""
        outputs = self.run(model)
        tensors = [named_tensors(output) for output in outputs]
        rows = self.rows(tensors)
        return ModelQuality(
            reached_db(rows),
            self.workload.evaluate(outputs, self.outputs),
            agreement(tensors, self.exact),
            rows + rows_aside(self.workload.judged.left_out(self.outputs[0])),
        )

    def rows(self, tensors: Sequence[Mapping[str, Tensor]]) -> tuple[OutputRow, ...]:
        """Return each named output against the original's."""
        noises = output_noises(tensors, self.exact, self.workload.judged.apart)
        return output_rows(noises, self.target)

    @property
    def samples(self) -> int:
        """Number of samples that are judged."""
        return count_samples(self.workload.batches)


def _judged_tensors(workload: Workload, output: Any) -> dict[str, Tensor]:
    """Return the tensors that a workload is judged by; none where it has no number at all."""
    judged = workload.judged
    if judged.part is None:
        return judged.tensors(output)
    return target_tensors(output, judged.part)


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
