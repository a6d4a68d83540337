"""Training a model with learners in it: groups of parameters, freezing, and a short loop."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, field
from typing import Any, Literal

import torch
from torch import Tensor, nn

from roundoff.errors import NonFiniteError, QuantizationError
from roundoff.quantize.qat.batch_norm import freeze_batch_norm
from roundoff.quantize.qat.distill import distillation_loss
from roundoff.quantize.qat.learner import Learner

__all__ = ["Distillation", "Freezing", "Trained", "freeze", "learners", "parameter_groups", "train"]


def learners(model: nn.Module) -> dict[str, Learner]:
    """The learners of a model, by module path."""
    return {path: module for path, module in model.named_modules() if isinstance(module, Learner)}


def parameter_groups(
    model: nn.Module, lr: float, scale_lr: float, weight_decay: float = 0.0
) -> list[dict[str, Any]]:
    """Parameter groups for any torch optimizer: scales have a learning rate of their own, and no weight decay.

    Groups are named ``model``, ``scales``, and ``clips`` for PACT's alphas, which have the scales' learning rate and the
    model's weight decay (arXiv:1805.06085, section 3). Empty ones are left out.

    Raises:
        QuantizationError: a learner has no parameters yet; the optimizer would not know them.

    Example:
        >>> from roundoff.quantize.qat.learners import make_learner
        >>> model = nn.Sequential(make_learner("lsq", "int8_asym", role="activation"), nn.Linear(2, 2))
        >>> _ = model(torch.randn(4, 2))
        >>> groups = parameter_groups(model, lr=0.1, scale_lr=0.01, weight_decay=1e-4)
        >>> [(g["name"], len(g["params"]), g["lr"], g["weight_decay"]) for g in groups]
        [('model', 2, 0.1, 0.0001), ('scales', 1, 0.01, 0.0)]
    """
    own: dict[str, list[Tensor]] = {"scales": [], "clips": []}
    for path, learner in learners(model).items():
        if not learner.ready:
            raise QuantizationError("this learner has no parameters yet", where=learner.name or path,
                                    expected="qparams, or one batch through the model", got="neither",
                                    do="run one batch before the optimizer is made")  # fmt: skip
        own["clips" if learner.decays else "scales"] += [getattr(learner, name) for name in learner.learned]
    taken = {id(p) for group in own.values() for p in group}
    rest = [p for p in model.parameters() if id(p) not in taken]
    groups = [
        {"name": "model", "params": rest, "lr": lr, "weight_decay": weight_decay},
        {"name": "scales", "params": own["scales"], "lr": scale_lr, "weight_decay": 0.0},
        {"name": "clips", "params": own["clips"], "lr": scale_lr, "weight_decay": weight_decay},
    ]
    return [group for group in groups if group["params"]]


def freeze(model: nn.Module, frozen: bool = True) -> int:
    """Keep all learned and observed scales as they are, or let them go on; returns how many learners there are."""
    found = learners(model)
    for learner in found.values():
        learner.freeze(frozen)
    return len(found)


@dataclass
class Freezing:
    """Freezes scales and BatchNorm statistics when a step is reached. Call ``step`` after each optimizer step.

    Args:
        model: the model in training.
        scales: after how many steps learned and observed scales stay as they are; ``None``: never.
        batch_norm: after how many steps BatchNorm keeps its running statistics; ``None``: never.

    Example:
        >>> model = nn.Sequential(nn.BatchNorm1d(2))
        >>> freezing = Freezing(model, batch_norm=1)
        >>> for _ in range(3):
        ...     _ = model.train()(torch.ones(4, 2))
        ...     freezing.step()
        >>> model[0].num_batches_tracked.item()
        1
    """

    model: nn.Module
    scales: int | None = None
    batch_norm: int | None = None
    steps: int = field(default=0, init=False)

    def __post_init__(self) -> None:
        self._reached()

    def step(self) -> None:
        """One optimizer step is done."""
        self.steps += 1
        self._reached()

    def _reached(self) -> None:
        if self.steps == self.scales:
            freeze(self.model)
        if self.steps == self.batch_norm:
            freeze_batch_norm(self.model)


@dataclass(frozen=True)
class Distillation:
    """Learn from a teacher: the loss becomes ``(1 - share) * loss + share * distillation_loss``.

    The teacher runs in evaluation mode and without gradients; its training flags are left as they were.
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
            _logits(student), teacher, kind=self.kind, temperature=self.temperature, axis=self.axis
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
    after_step: Callable[[], object] | None = None,
) -> Trained:
    """Train a model in place; every module's training flag is afterwards as it was before.

    Args:
        model: in training mode while it runs.
        batches: run through once an epoch; a callable gives those of the next epoch.
        loss: ``loss(output, batch)`` -> scalar tensor.
        optimizer: made of ``parameter_groups(model, ...)``, so that it knows the learned scales.
        epochs: how often.
        forward: ``forward(model, batch)`` -> output, by default as in ``Workload``.
        teacher: a model to learn from, or a ``Distillation`` with its parameters.
        schedule: a learning-rate schedule; its ``step`` is called after each optimizer step.
        freezing: what is frozen when.
        region: around forward and loss, such as ``roundoff.autocast("bf16")``; entered again at each step.
        scaler: ``torch.amp.GradScaler`` or ``roundoff.LossScaler``.
        after_step: called after each optimizer step.

    Raises:
        QuantizationError: an epoch has no batch, as the second one of an iterator that is used up.
        NonFiniteError: a loss is NaN or Inf; the weights are those of the step before.
    """
    forward = forward or _forward
    region = nullcontext() if region is None else region
    distillation = Distillation(teacher) if isinstance(teacher, nn.Module) else teacher
    before = {path: learner.reverted for path, learner in learners(model).items()}
    losses, steps = [], 0
    with _flags(model):
        model.train()
        for epoch in range(epochs):
            total, count = 0.0, 0
            for batch in batches() if callable(batches) else batches:
                optimizer.zero_grad(set_to_none=True)
                soft = None if distillation is None else distillation.outputs(forward, batch)
                with region:
                    output = forward(model, batch)
                    value = loss(output, batch)
                if distillation is not None and soft is not None:
                    value = distillation.loss(value, output, soft)
                if not bool(value.isfinite()):
                    raise NonFiniteError(f"the loss of step {steps} is {value.item()}", where=f"epoch {epoch}",
                                         do="lower the learning rates, or look at the batch")  # fmt: skip
                if scaler is None:
                    value.backward()  # type: ignore[no-untyped-call]
                    optimizer.step()
                else:
                    scaler.scale(value).backward()
                    scaler.step(optimizer)
                    scaler.update()
                for call in (schedule and schedule.step, freezing and freezing.step, after_step):
                    if call is not None:
                        call()
                total, count, steps = total + value.item(), count + 1, steps + 1
            if not count:
                raise QuantizationError("there is nothing to train on", where=f"epoch {epoch}", expected="one batch or more",
                                        got="none", do="give a list, or a function that returns the batches")  # fmt: skip
            losses.append(total / count)
    after = {learner.name or path: learner.reverted - before.get(path, 0) for path, learner in learners(model).items()}
    return Trained(losses, steps, {name: number for name, number in after.items() if number})


def _forward(model: nn.Module, batch: Any) -> Any:
    if isinstance(batch, Mapping):
        return model(**batch)
    return model(*batch) if isinstance(batch, tuple | list) else model(batch)


def _logits(output: Any) -> Tensor:
    if not isinstance(output, Tensor):
        raise QuantizationError("distillation needs one tensor of logits", where="teacher", expected="a tensor",
                                got=type(output).__name__, do="let `forward` return the logits")  # fmt: skip
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
