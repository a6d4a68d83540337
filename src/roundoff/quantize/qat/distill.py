"""Distillation: the quantized model also learns from the outputs of the model it was made from."""

from __future__ import annotations

from typing import Literal

import torch
from torch import Tensor
from torch.nn import functional

from roundoff.errors import QuantizationError

__all__ = ["distillation_loss"]


def distillation_loss(
    student: Tensor,
    teacher: Tensor,
    *,
    kind: Literal["kl", "mse"] = "kl",
    temperature: float = 4.0,
    axis: int = -1,
) -> Tensor:
    """How far the student's logits are from the teacher's (Hinton, Vinyals and Dean,
    arXiv:1503.02531).

    ``kl``: ``T**2 KL(softmax(teacher / T) || softmax(student / T))`` in nats, with the
    classes along ``axis``, averaged over all other axes (eq. 1; the factor keeps the
    gradient's size whatever T is, section 2). ``mse``: the mean squared difference of
    the logits, of any outputs (the limit of large T for centred logits, section 2.1, up
    to a factor).

    Computed in fp32; the gradient goes to the student alone. NaN and Inf are passed on.

    Raises:
        QuantizationError: the shapes differ or are empty, T is not above 0, or another
            kind.

    Example:
        >>> logits = torch.tensor([[2.0, 0.0]])
        >>> distillation_loss(logits, logits).item()
        0.0
        >>> round(distillation_loss(torch.zeros(1, 2), logits, temperature=1.0).item(), 4)
        0.3278
    """
    if student.shape != teacher.shape or not student.numel():
        raise QuantizationError(
            "student and teacher have no outputs to compare",
            where="distillation_loss",
            expected=f"the teacher's shape {tuple(teacher.shape)}, not empty",
            got=f"{tuple(student.shape)}",
        )
    if kind not in ("kl", "mse") or not temperature > 0:
        raise QuantizationError(
            "this distillation is unknown",
            where="distillation_loss",
            expected="kind kl or mse, and a temperature above 0",
            got=f"kind {kind}, temperature {temperature}",
        )
    with torch.autocast(student.device.type, enabled=False):
        student = student.float()
        teacher = teacher.detach().float()
        if kind == "mse":
            return functional.mse_loss(student, teacher)
        log_student = functional.log_softmax(student / temperature, axis)
        log_teacher = functional.log_softmax(teacher / temperature, axis)
        divergence = functional.kl_div(
            log_student, log_teacher, log_target=True, reduction="none"
        ).sum(axis)
        return divergence.mean() * temperature**2
