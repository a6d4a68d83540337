"""What is known of a step while it runs: its losses, and its gradients as the optimizer gets them."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer


class Present:
    """The step that runs. ``factor`` is what ``scaler`` (torch's, None where none did) multiplied the loss by."""

    def __init__(self) -> None:
        #: each with whether it is still multiplied by the factor
        self.losses: list[tuple[Tensor, bool]] = []
        self.scaler: Any = None
        self.factor = 1.0
        self.norm: float | None = None
        self.bad = self.elements = 0
        self.skipped = False
        self.updates = False  # torch's scaler has stepped, and has to be updated

    def loss(self) -> float | None:
        """The mean of the losses, without the scale."""
        values = [
            float(loss) / (self.factor if scaled else 1.0)
            for loss, scaled in self.losses
        ]
        return sum(values) / len(values) if values else None

    def measure(self, optimizer: Optimizer, scale: float) -> bool:
        """Takes the gradients of one more optimizer, which are multiplied by ``scale``; False where it has none."""
        gradients = [
            p.grad
            for group in optimizer.param_groups
            for p in group["params"]
            if p.grad is not None
        ]
        if not gradients:
            return False
        bad, total, norm = _of(gradients)
        self.bad, self.elements = self.bad + bad, self.elements + total
        if bad < total:
            self.norm = math.hypot(
                self.norm or 0.0, norm / scale if scale else math.nan
            )
        return True

    def forget_gradients(self) -> None:
        """A closure has made new ones."""
        self.norm, self.bad, self.elements = None, 0, 0

    @property
    def share(self) -> float:
        """Of the elements of the gradients, how many are NaN or Inf."""
        return self.bad / self.elements if self.elements else 0.0


def _of(gradients: Sequence[Tensor]) -> tuple[int, int, float]:
    """How many elements are NaN or Inf, how many there are, and the L2 norm of the others."""
    values = [g.detach()._values() if g.is_sparse else g.detach() for g in gradients]
    norms = torch._foreach_norm(values, 2, dtype=torch.float32)
    norm = float(
        torch.linalg.vector_norm(torch.stack([n.to(norms[0].device) for n in norms]))
    )
    total = sum(value.numel() for value in values)
    if math.isfinite(norm):
        return 0, total, norm
    bad, squares = 0, 0.0
    for value in values:
        finite = value.isfinite()
        bad += value.numel() - int(finite.sum())
        squares += float(torch.where(finite, value, 0).double().square().sum())
    return bad, total, math.sqrt(squares)
