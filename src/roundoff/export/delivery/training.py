"""Train a model again: after pruning, or with its quantization."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn

from roundoff.export.delivery.request import Ask
from roundoff.preserve import preserve
from roundoff.quantize import (
    Distillation,
    QuantizedModel,
    convert,
    finish_,
    parameter_groups,
    prepare_qat,
    sparsify_,
    train,
)
from roundoff.workload import Workload, named_tensors

#: Scales learn at this share of the weights' rate.
SCALE_RATE = 0.1


def train_again(model: nn.Module, workload: Workload, ask: Ask) -> None:
    """Train a model in place on the workload's batches, with AdamW and a cosine schedule."""
    optimizer = torch.optim.AdamW(parameter_groups(model, ask.lr, ask.lr * SCALE_RATE))
    steps = ask.epochs * len(workload.batches)
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, steps)

    def forward(trained: nn.Module, batch: Any) -> Any:
        return workload.with_model(trained).run(batch)

    with preserve(workload.model), torch.random.fork_rng():
        torch.manual_seed(0)
        train(
            model,
            workload.batches,
            workload.loss or _no_loss,
            optimizer,
            ask.epochs,
            forward=forward,
            teacher=_teacher(workload) if ask.distill else None,
            schedule=schedule,
        )


def train_quantized(
    model: QuantizedModel, masks: Mapping[str, Tensor], workload: Workload, ask: Ask
) -> list[str]:
    """Train weights and scales of a quantized model; weights outside ``masks`` stay 0.

    Returns a line for each quantizer that is not trained.
    """
    left_out = prepare_qat(model)
    if masks:
        sparsify_(model.model, masks)
    train_again(model, workload, ask)
    if masks:
        finish_(model.model)
    convert(model)
    return [f"{name} is not trained: {why}" for name, why in left_out.items()]


def _teacher(workload: Workload) -> Distillation:
    share = 1.0 if workload.loss is None else 0.5
    return Distillation(workload.model, share=share)


def _no_loss(output: Any, _batch: Any) -> Tensor:
    """Return 0 with a gradient: the teacher alone is learnt from."""
    return next(iter(named_tensors(output).values())).sum() * 0.0
