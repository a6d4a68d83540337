"""What is run: a model, its data, its optimizer and one step of its training, the same each time from one seed."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from dataclasses import dataclass, field
from types import MethodType
from typing import Any

import torch
from torch import Tensor, nn

from . import cnn, decoder, encoder, lstm

FAMILIES: dict[str, Any] = {
    "cnn": cnn,
    "encoder": encoder,
    "decoder": decoder,
    "lstm": lstm,
}
_MODELS = {
    "cnn": cnn.Cnn,
    "encoder": encoder.Encoder,
    "decoder": decoder.Decoder,
    "lstm": lstm.Lstm,
}


def train(program: Program, number: int) -> None:
    """One step as in most scripts."""
    program.optimizer.zero_grad()
    program.loss(program.model, *program.batches[number]).backward()
    program.optimizer.step()


def evaluate(program: Program, number: int) -> None:
    """One step of an evaluation."""
    with torch.no_grad():
        program.loss(program.model, *program.batches[number])


@dataclass
class Program:
    """A training of a few steps, open to being changed before it runs.

    Attributes:
        model: with parameters and statistics as after some training.
        batches: one for each step.
        loss: of the model on a batch.
        optimizer: of all parameters.
        step: what runs as step ``number``.
        beneath: is entered before the recording, so that what it does is part of the operators.
    """

    model: Any
    batches: list[tuple[Tensor, ...]]
    loss: Callable[..., Tensor]
    optimizer: torch.optim.Optimizer
    step: Callable[[Program, int], None] = train
    beneath: contextlib.AbstractContextManager[Any] = field(
        default_factory=contextlib.nullcontext
    )


def program(family: str) -> Program:
    """The clean program of a family. Sets the seed of what it draws at random while it runs."""
    torch.manual_seed(0)
    of = FAMILIES[family]
    model = _MODELS[family]()
    live_in(model)
    batches = [of.batch(seed) for seed in (1, 2)]
    warm_up(model, batches[1], of.loss)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, weight_decay=0.1)
    return Program(model, batches, of.loss, optimizer)


def live_in(model: nn.Module) -> None:
    """Parameters spread as training leaves them: gains differ from 1, biases from 0, a few channels are large."""
    with torch.no_grad():
        for name, value in model.named_parameters():
            if "norm" in name and name.endswith("weight"):
                value.copy_(1 + 0.3 * torch.randn_like(value)).abs_()
                value[1] *= 3
            elif value.ndim == 1:
                value.add_(0.1 * torch.randn_like(value))
            else:
                value.mul_(1.5)


def warm_up(
    model: nn.Module, batch: tuple[Tensor, ...], loss: Callable[..., Tensor]
) -> None:
    """Running statistics as after some steps."""
    with torch.no_grad():
        for _ in range(3):
            loss(model, *batch)
    torch.manual_seed(1)


def replace(module: nn.Module, **methods: Callable[..., Any]) -> None:
    """Other code in this one module: each method is taken from ``methods``."""
    for name, function in methods.items():
        getattr(module, name)  # a misspelt method would change nothing
        setattr(module, name, MethodType(function, module))
