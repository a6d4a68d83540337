"""Faults of a training loop that can be seen for free while it runs; each is said once."""

from __future__ import annotations

from typing import Any

import torch

from roundoff.ops import SLOW_FP16

#: Steps in a row at the lowest scale before it is said.
FLOOR_STEPS = 20
#: Steps over which skips are counted, and the share of them that is too many.
RECENT_STEPS = 40
OFTEN = 0.25

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
    "softmax-of-softmax": (
        "cross entropy applies softmax to what softmax or sigmoid has returned already; give it the logits"
    ),
    "log-softmax-twice": "log_softmax is applied to what log_softmax has returned already; give it the logits",
    "nll-of-probabilities": "NLLLoss is given probabilities; give it the output of log_softmax",
    "bce-of-sigmoid": (
        "BCELoss is given the output of sigmoid, which rounds to 0 and 1; give the logits to BCEWithLogitsLoss"
    ),
    "bce-with-logits-of-probabilities": (
        "BCEWithLogitsLoss applies sigmoid to probabilities; give it the logits"
    ),
    "log-of-softmax": "the logarithm of softmax is -Inf where a probability rounds to 0; log_softmax in place of both",
    "log-of-sigmoid": "the logarithm of sigmoid is -Inf where it rounds to 0; logsigmoid in place of both",
    "autocast-without-effect": (
        "autocast for {device} is on, and nothing is computed in {dtype}: the tensors are on {place}; autocast({place!r})"
    ),
    "unowned-parameters": (
        "{names} get gradients, and no optimizer has them: they stay as they are; give them to one, or requires_grad_(False)"
    ),
    "unchanged-parameters": (
        "{names} of {optimizer} did not change in {steps} steps: no gradient reaches them, or their updates are too small"
    ),
    "lost-updates": (
        "{share:.0%} of the weights in {dtype} did not change in a step of {optimizer} at lr {lr:g} though they have a "
        "gradient: the update is below half a unit in the last place; keep the weights in float32"
    ),
    "steps-skipped": (
        "the last {steps} steps were all skipped: nothing is learned; the reason of the last skip says what overflows"
    ),
    "often-skipped": (
        "{skips} of the last {steps} steps were skipped: the gradients are not finite again and again; the reason of the "
        "last skip says where"
    ),
    "half-statistics": (
        "the running statistics of {name} are in {dtype}, where small changes are lost; keep BatchNorm in float32"
    ),
    "adam-eps": "{optimizer} adds eps {eps:g} to float16 numbers, where it is 0: the first step divides by zero; eps=1e-4",
}

#: The rule of ``roundoff lint`` that says the same of a script that does not run.
LINT_CODES = {
    "scaler-in-loop": "RO101",
    "scaler-not-stepped": "RO102",
    "scaler-not-updated": "RO103",
    "clip-before-unscale": "RO104",
    "schedule-on-skip": "RO107",
    "scaler-with-bf16": "RO109",
    "fp16-on-cpu": "RO204",
    "adam-eps": "RO302",
    "softmax-of-softmax": "RO501",
    "log-softmax-twice": "RO502",
    "nll-of-probabilities": "RO503",
    "bce-of-sigmoid": "RO505",
    "bce-with-logits-of-probabilities": "RO506",
    "log-of-softmax": "RO404",
    "log-of-sigmoid": "RO405",
    "autocast-without-effect": "RO203",
    "lost-updates": "RO301",
    "half-statistics": "RO305",
}

#: Codes of what only a run can see; ``roundoff lint`` has no rules with them.
RUN_CODES = {
    "scale-at-floor": "RO118",
    "steps-skipped": "RO119",
    "often-skipped": "RO120",
    "unowned-parameters": "RO613",
    "unchanged-parameters": "RO614",
    "no-gradients": "RO615",
}

CODES = LINT_CODES | RUN_CODES


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
