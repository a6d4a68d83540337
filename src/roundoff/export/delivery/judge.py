"""Judge: a changed model against the one it was made of, on data that nothing was chosen by."""

from __future__ import annotations

import copy
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from roundoff.budget import sqnr_db
from roundoff.plan import detached, noise
from roundoff.preserve import preserve
from roundoff.workload import Workload, named_tensors


@dataclass(frozen=True)
class Judged:
    """SQNR of the output in dB, the metric (None without one), and the share of equal top choices (None without rows)."""

    db: float
    metric: float | None
    agreement: float | None


class Judge:
    """Keeps the outputs of the unquantized model on the held-out batches, or on all batches where there are none."""

    def __init__(self, workload: Workload) -> None:
        self.workload = copy.copy(workload)
        self.workload.batches = workload.held_out or workload.batches
        self.outputs = self.run(workload.model)
        self.exact = [named_tensors(output) for output in self.outputs]
        self.metric = self.workload.evaluate(self.outputs, self.outputs)

    def run(self, model: nn.Module) -> list[Any]:
        """The output for each batch, in evaluation mode; the model is left as it was."""
        own = self.workload.with_model(model)
        with preserve(model), torch.no_grad():
            model.eval()
            return [detached(own.run(batch)) for batch in own.batches]

    def judge(self, model: nn.Module) -> Judged:
        """How another model does in the place of the workload's own."""
        return self.outputs_of(self.run(model))

    def outputs_of(self, outputs: Sequence[Any]) -> Judged:
        """The same from its outputs."""
        found = [named_tensors(output) for output in outputs]
        return Judged(
            sqnr_db(noise(found, self.exact)),
            self.workload.evaluate(outputs, self.outputs),
            agreement(found, self.exact),
        )

    @property
    def samples(self) -> int:
        """How many samples are judged."""
        return sum(size(batch) for batch in self.workload.batches)


def agreement(
    found: list[dict[str, Tensor]], exact: list[dict[str, Tensor]]
) -> float | None:
    """The share of rows (along the last axis) of the first output whose largest element stands at the same place.

    None where the output has fewer than two axes, or rows of one element.

    >>> agreement([{"output": torch.tensor([[1.0, 2], [3, 1]])}], [{"output": torch.tensor([[1.0, 3], [1, 2]])}])
    0.5
    """
    same = rows = 0
    for got, want in zip(found, exact, strict=True):
        name = next(iter(want), None)
        if name is None or want[name].ndim < 2 or want[name].shape[-1] < 2:
            return None
        hits = got[name].argmax(-1) == want[name].argmax(-1)
        same, rows = same + int(hits.sum()), rows + hits.numel()
    return same / rows if rows else None


def size(batch: Any) -> int:
    """The number of samples in a batch: the first axis of its first tensor."""
    from torch.utils._pytree import tree_flatten

    return next(
        (
            len(leaf)
            for leaf in tree_flatten(batch)[0]
            if isinstance(leaf, Tensor) and leaf.ndim
        ),
        1,
    )
