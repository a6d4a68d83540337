"""A few real training steps in chosen formats: losses of the run, and gradients beside those of the fp32 run."""

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
from roundoff.train.tune.rounded_step import (
    Gradients,
    Straight,
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
    """One configuration run: ``measured_db`` is the SQNR of the gradients at the start, over the batches of the budget;
    ``along`` that of one batch at later steps of the fp32 run, at its weights; ``losses`` those of its own steps."""

    measured_db: float
    loss_error: float
    along: list[tuple[int, float]]
    losses: list[float]


@dataclass(frozen=True)
class _Mark:
    step: int
    state: dict[str, Tensor]
    gradients: Gradients


class Trials:
    """Runs configurations of one workload from the same weights, random states and batches. The model is left as it was.

    ``scale`` multiplies the loss before every backward pass and divides the gradients after it (loss scaling).
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
        self.workload, self.steps, self.batches, self.seed, self.scale = (
            workload,
            steps,
            batches,
            seed,
            scale,
        )
        self.marks: list[_Mark] = []
        self.start = gradients_of(workload, batches=batches, seed=seed)
        self.reference = Trial(math.inf, 0.0, [], self._train(Straight({}), mark=True))

    def run(self, make: Callable[[], Straight]) -> Trial:
        """Gradients at the start and at the marks, and N steps of its own. ``make`` gives a handler for each pass."""
        found = gradients_of(
            self.workload,
            make(),
            batches=self.batches,
            seed=self.seed,
            scale=self.scale,
        )
        errors = [
            abs(a.loss - b.loss) / abs(b.loss) if b.loss else 0.0
            for a, b in zip(found, self.start, strict=True)
        ]
        along = []
        for mark in self.marks:
            with _weights(self.workload.model, mark.state):
                (there,) = gradients_of(
                    self._at(mark.step),
                    make(),
                    seed=self.seed + mark.step,
                    scale=self.scale,
                )
            along.append((mark.step, sqnr([there], [mark.gradients])))
        return Trial(sqnr(found, self.start), max(errors), along, self._train(make()))

    def natively(self, what: Plan | str, policy: str | None = None) -> float | None:
        """SQNR of the gradients at the start with real casts, under ``roundoff.autocast``; None where it does not find all
        of the plan's sites, so that another plan ran."""
        model, found = self.workload.model, []
        region = autocast(what, model, policy=policy)
        with preserve(model), warnings.catch_warnings():
            warnings.filterwarnings(
                "ignore", category=RuntimeWarning
            )  # what it would warn of is asked for below
            model.train()
            for index, batch in enumerate(self.workload.batches[: self.batches]):
                torch.manual_seed(self.seed + index)
                with torch.enable_grad(), region:
                    loss = loss_of(self.workload, batch)
                found.append(backward(self.workload, loss, self.scale))
        return None if region.rules.unused() else sqnr(found, self.start)

    def _at(self, step: int) -> Workload:
        own = self.workload
        batch = own.batches[step % len(own.batches)]
        return Workload(
            own.model, [batch], forward=own.forward, loss=own.loss, name=own.name
        )

    def _train(self, handler: Straight, *, mark: bool = False) -> list[float]:
        workload, model, losses = self.workload, self.workload.model, []
        wanted = {self.steps // 2, self.steps - 1} - {0} if mark else set()
        weights = trainable(workload)
        with _weights(model, None), preserve(model), watch(model, handler) as mode:
            model.train()
            optimizer = _optimizer(workload)
            for step in range(self.steps):
                torch.manual_seed(self.seed + step)
                before = _state(model) if step in wanted else {}
                mode.begin()
                with torch.enable_grad(), mode:
                    loss = loss_of(
                        workload, workload.batches[step % len(workload.batches)]
                    )
                found = backward(workload, loss, self.scale)
                losses.append(found.loss)
                if step in wanted:
                    self.marks.append(_Mark(step, before, found))
                if not all(bool(g.isfinite().all()) for g in found.weights.values()):
                    continue  # as a gradient scaler would: this step is skipped
                for name, weight in weights.items():
                    weight.grad = found.weights.get(name)
                optimizer.step()
        return losses


def sqnr(candidate: Sequence[Gradients], reference: Sequence[Gradients]) -> float:
    """SQNR in dB of all gradients over all batches; ``inf`` where they are equal, ``-inf`` where one is not finite."""
    return sqnr_db(
        noise([got.weights for got in candidate], [want.weights for want in reference])
    )


def _optimizer(workload: Workload) -> torch.optim.Optimizer:
    if workload.optimizer is None:
        return torch.optim.SGD(list(trainable(workload).values()), lr=RATE)
    made = workload.optimizer(workload.model)
    if not isinstance(made, torch.optim.Optimizer):
        raise WorkloadError(
            "optimizer made no optimizer",
            where=f"{workload.name}, optimizer(model)",
            expected="a torch.optim.Optimizer",
            got=type(made).__name__,
        )
    return made


def _state(model: nn.Module) -> dict[str, Tensor]:
    return {
        n: t.detach().clone()
        for n, t in (*model.named_parameters(), *model.named_buffers())
    }


@contextmanager
def _weights(model: nn.Module, state: dict[str, Tensor] | None) -> Iterator[None]:
    """With the values of ``state`` (or of now) inside; parameters and buffers have their own again afterwards."""
    own = _state(model)
    tensors = dict((*model.named_parameters(), *model.named_buffers()))

    def write(values: dict[str, Tensor]) -> None:
        with torch.no_grad():
            for name, tensor in tensors.items():
                tensor.copy_(values[name])

    try:
        if state is not None:
            write(state)
        yield
    finally:
        write(own)
