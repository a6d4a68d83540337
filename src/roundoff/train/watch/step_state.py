"""One training step while it runs: its losses, and its gradients as the optimizer gets them."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from roundoff.ops import plain
from roundoff.train.watch.script_blame import ScriptCause


class StepState:
    """The step that runs.

    Attributes:
        losses: each loss that ran backward, and if it is still multiplied by ``factor``.
        scaler: torch's scaler; None where none scaled a loss.
        factor: what ``scaler`` multiplied the loss by.
        norm: L2 norm of the unscaled gradients, over their finite elements; None without.
        bad: number of elements of the gradients that are NaN or Inf.
        elements: number of all.
        skipped: a scaler skipped the step.
        needs_update: torch's scaler has stepped, and has to be updated.
        cause: what the script itself did to make a NaN; None as long as none is known.
    """

    def __init__(self) -> None:
        self.losses: list[tuple[Tensor, bool]] = []
        self.scaler: Any = None
        self.factor = 1.0
        self.norm: float | None = None
        self.bad = 0
        self.elements = 0
        self.skipped = False
        self.needs_update = False
        self.cause: ScriptCause | None = None

    def loss(self) -> float | None:
        """Return the mean of the losses, without the scale."""
        values = [
            float(loss) / (self.factor if is_scaled else 1.0)
            for loss, is_scaled in self.losses
        ]
        return sum(values) / len(values) if values else None

    @property
    def is_last_loss_lost(self) -> bool:
        """True where the last loss that ran backward is NaN or Inf."""
        return bool(self.losses) and not math.isfinite(float(self.losses[-1][0]))

    def measure(self, optimizer: Optimizer, scale: float) -> bool:
        """Add the gradients of one more optimizer, which are multiplied by ``scale``.

        Return False where it has none.
        """
        gradients = [
            p.grad
            for group in optimizer.param_groups
            for p in group["params"]
            if p.grad is not None
        ]
        if not gradients:
            return False
        bad, elements, norm = _measure(gradients)
        self.bad += bad
        self.elements += elements
        if bad < elements:
            unscaled = norm / scale if scale else math.nan
            self.norm = math.hypot(self.norm or 0.0, unscaled)
        return True

    def forget_gradients(self) -> None:
        """Start again: a closure has made new gradients."""
        self.norm = None
        self.bad = 0
        self.elements = 0

    @property
    def bad_share(self) -> float:
        """The share of elements of the gradients that are NaN or Inf."""
        return self.bad / self.elements if self.elements else 0.0


def _real_values(gradient: Tensor) -> Tensor:
    """Return the values that a gradient stores, complex ones as pairs of numbers; none of
    what has no values here.
    """
    value, _ = plain(gradient.detach())
    if value is None:
        return torch.zeros(0)
    return torch.view_as_real(value.resolve_conj()) if value.is_complex() else value


def _measure(gradients: Sequence[Tensor]) -> tuple[int, int, float]:
    """Return how many elements are NaN or Inf, how many there are, and the L2 norm of
    the others.
    """
    values = [_real_values(gradient) for gradient in gradients]
    elements = sum(value.numel() for value in values)
    norms: list[Tensor] = []
    for wide in (torch.float32, torch.float64):
        alike = [
            v for v in values if (v.dtype == torch.float64) == (wide == torch.float64)
        ]
        if alike:
            norms += torch._foreach_norm(alike, 2, dtype=wide)
    on_one_device = torch.stack([norm.to(norms[0].device) for norm in norms])
    total = float(torch.linalg.vector_norm(on_one_device))
    if math.isfinite(total):
        return 0, elements, total
    bad = 0
    squares = 0.0
    for value in values:
        is_finite = value.isfinite()
        bad += value.numel() - int(is_finite.sum())
        squares += float(torch.where(is_finite, value, 0).double().square().sum())
    return bad, elements, math.sqrt(squares)
