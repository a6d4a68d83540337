"""A few real training steps in chosen formats: losses of the run, and gradients beside
those of the fp32 run.
"""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from roundoff.budget import sqnr_db
from roundoff.errors import WorkloadError
from roundoff.ops import watch
from roundoff.plan import Plan, noise
from roundoff.preserve import preserve
from roundoff.train.autocast.context import autocast
from roundoff.train.tune.simulated_step import (
    BatchGradients,
    SimulatedFormats,
    backward,
    gradients_of,
    loss_of,
    trainable,
)
from roundoff.workload import Workload

#: Learning rate of the plain SGD that verifies a workload without an optimizer.
RATE = 0.01


@dataclass(frozen=True)
class Trial:
    """The measurements of one configuration.

    Attributes:
        measured_db: SQNR in dB of the gradients at the start, over the batches of the
            budget.
        loss_error: largest relative error of the loss at the start.
        along: (step, SQNR in dB) of one batch at later steps of the fp32 run, at its
            weights.
        losses: losses of its own steps.
    """

    measured_db: float
    loss_error: float
    along: list[tuple[int, float]]
    losses: list[float]


@dataclass(frozen=True)
class _Mark:
    """Weights and gradients at one step of the fp32 run."""

    step: int
    state: dict[str, Tensor]
    gradients: BatchGradients


class Trials:
    """Run configurations of one workload from the same weights, random states and batches.

    The model is left as it was. ``scale`` multiplies the loss before every backward pass
    and divides the gradients after it (loss scaling).
    """

    def __init__(
        self,
        workload: Workload,
        *,
        steps: int,
        batches: int,
        seed: int,
        scale: float = 1.0,
    ) -> None:
        self.workload = workload
        self.steps = steps
        self.batches = batches
        self.seed = seed
        self.scale = scale
        self.marks: list[_Mark] = []
        self.start = gradients_of(workload, batches=batches, seed=seed)
        losses = self._train(SimulatedFormats({}), mark=True)
        self.reference = Trial(math.inf, 0.0, [], losses)

    def run(self, make: Callable[[], SimulatedFormats]) -> Trial:
        """Measure gradients at the start and at the marks, and train N steps.

        ``make`` gives a handler for each pass.
        """
        gradients = gradients_of(
            self.workload,
            make(),
            batches=self.batches,
            seed=self.seed,
            scale=self.scale,
        )
        errors = [
            _relative_error(batch.loss, reference.loss)
            for batch, reference in zip(gradients, self.start, strict=True)
        ]
        along = [(mark.step, self._sqnr_at(mark, make())) for mark in self.marks]
        losses = self._train(make())
        return Trial(sqnr(gradients, self.start), max(errors), along, losses)

    def natively(self, plan: Plan | str, policy: str | None = None) -> float | None:
        """Measure the SQNR of the gradients at the start with real casts, under
        ``roundoff.autocast``.

        None where it does not find all of the plan's sites, so that another plan ran.
        """
        model = self.workload.model
        region = autocast(plan, model, policy=policy)
        gradients = []
        with preserve(model), warnings.catch_warnings():
            # what it would warn of is asked for below
            warnings.filterwarnings("ignore", category=RuntimeWarning)
            model.train()
            for index, batch in enumerate(self.workload.batches[: self.batches]):
                torch.manual_seed(self.seed + index)
                with torch.enable_grad(), region:
                    loss = loss_of(self.workload, batch)
                gradients.append(backward(self.workload, loss, self.scale))
        return None if region.rules.unused() else sqnr(gradients, self.start)

    def _sqnr_at(self, mark: _Mark, handler: SimulatedFormats) -> float:
        with _weights(self.workload.model, mark.state):
            gradients = gradients_of(
                self._at(mark.step),
                handler,
                seed=self.seed + mark.step,
                scale=self.scale,
            )
        return sqnr(gradients, [mark.gradients])

    def _at(self, step: int) -> Workload:
        """Return the workload with the one batch of a step."""
        workload = self.workload
        return Workload(
            workload.model,
            [self._batch(step)],
            forward=workload.forward,
            loss=workload.loss,
            name=workload.name,
        )

    def _batch(self, step: int) -> object:
        batches = self.workload.batches
        return batches[step % len(batches)]

    def _train(self, handler: SimulatedFormats, *, mark: bool = False) -> list[float]:
        """Train all steps and return their losses; ``mark`` keeps two later steps."""
        workload = self.workload
        model = workload.model
        marked = {self.steps // 2, self.steps - 1} - {0} if mark else set()
        losses = []
        with _weights(model, None), preserve(model), watch(model, handler) as mode:
            model.train()
            optimizer = _optimizer(workload)
            for step in range(self.steps):
                torch.manual_seed(self.seed + step)
                before = _state(model) if step in marked else {}
                mode.begin()
                with torch.enable_grad(), mode:
                    loss = loss_of(workload, self._batch(step))
                gradients = backward(workload, loss, self.scale)
                losses.append(gradients.loss)
                if step in marked:
                    self.marks.append(_Mark(step, before, gradients))
                if gradients.are_finite:  # else skip, as a gradient scaler would
                    _step(optimizer, workload, gradients)
        return losses


def sqnr(
    candidate: Sequence[BatchGradients], reference: Sequence[BatchGradients]
) -> float:
    """Compute the SQNR in dB of all gradients over all batches.

    ``inf`` where they are equal, ``-inf`` where one is not finite.
    """
    candidates = [batch.weights for batch in candidate]
    references = [batch.weights for batch in reference]
    return sqnr_db(noise(candidates, references))


def _relative_error(value: float, reference: float) -> float:
    return abs(value - reference) / abs(reference) if reference else 0.0


def _optimizer(workload: Workload) -> torch.optim.Optimizer:
    if workload.optimizer is None:
        return torch.optim.SGD(list(trainable(workload).values()), lr=RATE)
    optimizer = workload.optimizer(workload.model)
    if not isinstance(optimizer, torch.optim.Optimizer):
        raise WorkloadError(
            "optimizer made no optimizer",
            where=f"{workload.name}, optimizer(model)",
            expected="a torch.optim.Optimizer",
            got=type(optimizer).__name__,
        )
    return optimizer


def _step(
    optimizer: torch.optim.Optimizer, workload: Workload, gradients: BatchGradients
) -> None:
    for name, weight in trainable(workload).items():
        weight.grad = gradients.weights.get(name)
    optimizer.step()


def _tensors(model: nn.Module) -> dict[str, Tensor]:
    return dict((*model.named_parameters(), *model.named_buffers()))


def _state(model: nn.Module) -> dict[str, Tensor]:
    return {name: t.detach().clone() for name, t in _tensors(model).items()}


@contextmanager
def _weights(model: nn.Module, state: dict[str, Tensor] | None) -> Iterator[None]:
    """Give parameters and buffers the values of ``state`` (or of now) inside, and restore them."""
    saved = _state(model)
    tensors = _tensors(model)

    def write(values: dict[str, Tensor]) -> None:
        with torch.no_grad():
            for name, tensor in tensors.items():
                tensor.copy_(values[name])

    try:
        if state is not None:
            write(state)
        yield
    finally:
        write(saved)
