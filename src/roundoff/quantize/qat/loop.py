"""train: a short training loop, with distillation."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor, nn

from roundoff.errors import NonFiniteError, QuantizationError
from roundoff.quantize.model import QuantizedModel
from roundoff.quantize.qat.distill import distillation_loss
from roundoff.quantize.qat.prepare import clip_binary_
from roundoff.quantize.qat.training import Freezing, learners

__all__ = ["Distillation", "Trained", "train"]


@dataclass(frozen=True)
class Distillation:
    """Learn from a teacher: the loss becomes ``(1 - share) * loss + share * distillation_loss``.

    The teacher runs in evaluation mode and without gradients; its training flags are
    left as they were.
    """

    teacher: nn.Module
    share: float = 0.5
    kind: Literal["kl", "mse"] = "kl"
    temperature: float = 4.0
    axis: int = -1

    def outputs(self, forward: Callable[[nn.Module, Any], Any], batch: Any) -> Tensor:
        """The teacher's outputs for a batch.

        Raises:
            QuantizationError: the outputs are no tensor.
        """
        with _flags(self.teacher), torch.no_grad():
            self.teacher.eval()
            return _logits(forward(self.teacher, batch))

    def loss(self, hard: Tensor, student: Any, teacher: Tensor) -> Tensor:
        """The loss to train with, from the loss on the labels and both outputs."""
        soft = distillation_loss(
            _logits(student),
            teacher,
            kind=self.kind,
            temperature=self.temperature,
            axis=self.axis,
        )
        return (1 - self.share) * hard + self.share * soft


@dataclass(frozen=True)
class Trained:
    """What a training did."""

    #: mean loss of each epoch
    losses: list[float]
    #: optimizer steps
    steps: int
    #: learner -> how many invalid values of its parameters were put back
    reverted: dict[str, int]


def train(
    model: nn.Module,
    batches: Iterable[Any] | Callable[[], Iterable[Any]],
    loss: Callable[[Any, Any], Tensor],
    optimizer: torch.optim.Optimizer,
    epochs: int = 1,
    *,
    forward: Callable[[nn.Module, Any], Any] | None = None,
    teacher: nn.Module | Distillation | None = None,
    schedule: Any = None,
    freezing: Freezing | None = None,
    region: AbstractContextManager[Any] | None = None,
    scaler: Any = None,
) -> Trained:
    """Train a model in place; every module's training flag is afterwards as it was before.

    Args:
        model: in training mode while it runs.
        batches: run through once an epoch; a callable gives those of the next epoch.
        loss: ``loss(output, batch)`` -> scalar tensor.
        optimizer: made of ``parameter_groups(model, ...)``, so that it knows the
            learned scales.
        epochs: how often.
        forward: ``forward(model, batch)`` -> output, by default as in ``Workload``.
        teacher: a model to learn from, or a ``Distillation`` with its parameters.
        schedule: a learning-rate schedule; its ``step`` is called after each optimizer
            step.
        freezing: what is frozen when.
        region: around forward and loss, such as ``roundoff.autocast("bf16")``; entered
            again at each step.
        scaler: ``torch.amp.GradScaler`` or ``roundoff.LossScaler``.

    Raises:
        QuantizationError: the optimizer does not know a learner's parameters, and they
            are not frozen; or an epoch has no batch, as the second one of an iterator
            that is used up.
        NonFiniteError: a loss is NaN or Inf; the weights are those of the step before.
    """
    distillation = Distillation(teacher) if isinstance(teacher, nn.Module) else teacher
    trainer = _Trainer(
        model,
        loss,
        optimizer,
        forward or _forward,
        distillation,
        schedule,
        freezing,
        nullcontext() if region is None else region,
        scaler,
    )
    _check_optimizer(model, optimizer)
    before = {path: learner.reverted for path, learner in learners(model).items()}
    with _flags(model):
        model.train()
        losses = [
            trainer.epoch(number, batches() if callable(batches) else batches)
            for number in range(epochs)
        ]
    reverted = {}
    for path, learner in learners(model).items():
        count = learner.reverted - before.get(path, 0)
        if count:
            reverted[learner.name or path] = count
    return Trained(losses, trainer.steps, reverted)


@dataclass
class _Trainer:
    """What one step needs, and how many steps there were."""

    model: nn.Module
    loss: Callable[[Any, Any], Tensor]
    optimizer: torch.optim.Optimizer
    forward: Callable[[nn.Module, Any], Any]
    distillation: Distillation | None
    schedule: Any
    freezing: Freezing | None
    region: AbstractContextManager[Any]
    scaler: Any
    steps: int = 0

    def epoch(self, number: int, batches: Iterable[Any]) -> float:
        """Train on all batches; the mean loss."""
        total = 0.0
        count = 0
        for batch in batches:
            total += self.step(number, batch)
            count += 1
        if not count:
            raise QuantizationError(
                "there is nothing to train on",
                where=f"epoch {number}",
                got="no batch",
                expected="one or more",
                do="give a list, or a function that returns the batches",
            )
        return total / count

    def step(self, epoch: int, batch: Any) -> float:
        """One step; its loss."""
        self.optimizer.zero_grad(set_to_none=True)
        value = self._loss(batch)
        if not bool(value.isfinite()):
            raise NonFiniteError(
                f"the loss of step {self.steps} is {value.item()}",
                where=f"epoch {epoch}",
                do="lower the learning rates, or look at the batch",
            )
        self._update(value)
        if isinstance(self.model, QuantizedModel):
            clip_binary_(self.model)
        if self.schedule is not None:
            self.schedule.step()
        if self.freezing is not None:
            self.freezing.step()
        self.steps += 1
        return value.item()

    def _loss(self, batch: Any) -> Tensor:
        soft = None
        if self.distillation is not None:
            soft = self.distillation.outputs(self.forward, batch)
        with self.region:
            output = self.forward(self.model, batch)
            value = self.loss(output, batch)
        if self.distillation is not None and soft is not None:
            value = self.distillation.loss(value, output, soft)
        return value

    def _update(self, value: Tensor) -> None:
        if self.scaler is None:
            value.backward()  # type: ignore[no-untyped-call]
            self.optimizer.step()
        else:
            self.scaler.scale(value).backward()
            self.scaler.step(self.optimizer)
            self.scaler.update()


def _check_optimizer(model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    """Raise QuantizationError where a learner's parameters would not be trained, and
    nobody froze them.
    """
    trained = {id(p) for group in optimizer.param_groups for p in group["params"]}
    for path, learner in learners(model).items():
        parameters = [getattr(learner, name) for name in learner.learned]
        if not all(_is_trained_or_frozen(p, trained) for p in parameters):
            raise QuantizationError(
                "the optimizer does not know this learner's parameters",
                where=learner.name or path,
                expected=" and ".join(learner.learned),
                got="none, or not all of them",
                do="run one batch, then make the optimizer of parameter_groups(model, ...)",
            )


def _forward(model: nn.Module, batch: Any) -> Any:
    if isinstance(batch, Mapping):
        return model(**batch)
    return model(*batch) if isinstance(batch, tuple | list) else model(batch)


def _logits(output: Any) -> Tensor:
    if not isinstance(output, Tensor):
        raise QuantizationError(
            "distillation needs one tensor of logits",
            where="teacher",
            expected="a tensor",
            got=type(output).__name__,
            do="let `forward` return the logits",
        )
    return output


@contextmanager
def _flags(model: nn.Module) -> Iterator[None]:
    """Every module's training flag is as before afterwards."""
    flags = [(module, module.training) for module in model.modules()]
    try:
        yield
    finally:
        for module, training in flags:
            module.training = training


def _is_trained_or_frozen(parameter: Tensor | None, trained: set[int]) -> bool:
    if parameter is None:
        return False
    return not parameter.requires_grad or id(parameter) in trained
