"""Faults of a training loop that can be seen for free while it runs; each is said once."""

from __future__ import annotations

from typing import Any

import torch

from roundoff.ops import SLOW_FP16

#: Steps in a row at the lowest scale before it is said.
FLOOR_STEPS = 20

RULES = {
    "scaler-in-loop": (
        "a GradScaler was made again after {steps} steps: its scale starts again each time; make it once, before the loop"
    ),
    "scaler-not-stepped": (
        "the loss was multiplied by {scale:g}, but {optimizer} stepped by itself with gradients that large; "
        "scaler.step(optimizer) in place of optimizer.step()"
    ),
    "scaler-not-updated": "the scaler has stepped but was not updated: scaler.update() once after each step",
    "clip-before-unscale": (
        "gradients were clipped while they were still multiplied by the loss scale {scale:g}: the clip cuts far too low; "
        "scaler.unscale_(optimizer) first"
    ),
    "schedule-on-skip": (
        "the learning-rate schedule moved on after a step that was skipped; step it only where the scaler did not skip"
    ),
    "scaler-with-bf16": (
        "bfloat16 has the range of float32: its gradients need no loss scale; GradScaler(enabled=False), or none at all"
    ),
    "scale-at-floor": (
        "the loss scale has been {scale:g} or less for {steps} steps: lowering it does not help; the reason of the last "
        "skip says what overflows"
    ),
    "no-gradients": (
        "no parameter of {optimizer} has a gradient: the loss does not reach them (frozen, detached, or made before the "
        "model was moved or replaced)"
    ),
    "fp16-on-cpu": SLOW_FP16,
    "adam-eps": "{optimizer} adds eps {eps:g} to float16 numbers, where it is 0: the first step divides by zero; eps=1e-4",
}


def vanishing_eps(optimizer: torch.optim.Optimizer) -> float | None:
    """Return the ``eps`` that float16 parameters of this optimizer round to zero; None
    without one.
    """
    for group in optimizer.param_groups:
        eps: Any = group.get("eps")
        is_half = any(p.dtype is torch.float16 for p in group["params"])
        if is_half and isinstance(eps, float) and _vanishes(eps):
            return eps
    return None


def _vanishes(eps: float) -> bool:
    return eps > 0 and bool(torch.tensor(eps, dtype=torch.float16) == 0)


def has_bf16(optimizer: torch.optim.Optimizer) -> bool:
    """Return True if a parameter of this optimizer is in bfloat16."""
    return any(
        p.dtype is torch.bfloat16
        for group in optimizer.param_groups
        for p in group["params"]
    )
