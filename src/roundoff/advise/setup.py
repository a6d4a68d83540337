"""How a workload is run: its model, optimizer and what stands around a step; a change
replaces parts of it."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, ExitStack, contextmanager
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim.optimizer import register_optimizer_step_pre_hook

from roundoff.errors import WorkloadError
from roundoff.workload import Workload, named_tensors, user_code

#: The learning rate of workloads that define no optimizer.
DEFAULT_RATE = 0.01


@dataclass(frozen=True)
class Setup:
    """One way to run a workload.

    Attributes:
        workload: with the model that this setup runs, a copy of the user's.
        train: run whole training steps; otherwise forward passes.
        optimizer_flags: what the groups of the optimizer are set to.
        around: opened around every step.
    """

    workload: Workload
    train: bool
    optimizer_flags: Mapping[str, bool | None] = field(default_factory=dict)
    around: tuple[Callable[[], AbstractContextManager[object]], ...] = ()

    @property
    def model(self) -> nn.Module:
        """The model that is run."""
        return self.workload.model

    def copied(self) -> Setup:
        """Return the same with a model of its own."""
        model = copy.deepcopy(self.model)
        return replace(self, workload=self.workload.with_model(model))


class Runner:
    """Runs steps of a setup, batch after batch."""

    def __init__(self, setup: Setup) -> None:
        self.setup = setup
        self._next = 0
        self._optimizer: torch.optim.Optimizer | None = None
        if setup.train:
            setup.model.train()
            self._optimizer = make_optimizer(setup)
        else:
            setup.model.eval()

    def step(self) -> Any:
        """Run the next batch; return the output, or the loss of a training step."""
        batches = self.setup.workload.batches
        batch = batches[self._next % len(batches)]
        self._next += 1
        return self.run(batch)

    def run(self, batch: Any) -> Any:
        """Run one batch."""
        with ExitStack() as stack:
            for opened in self.setup.around:
                stack.enter_context(opened())
            if self._optimizer is None:
                return self.setup.workload.run(batch)
            workload = self.setup.workload
            with user_code("the training step", _where(workload), path=workload.path):
                return _training_step(workload, self._optimizer, batch)


def _training_step(
    workload: Workload, optimizer: torch.optim.Optimizer, batch: Any
) -> Tensor:
    if workload.step is not None:
        loss = workload.step(workload.model, optimizer, batch)
        return loss if isinstance(loss, Tensor) else torch.tensor(float(loss or 0.0))
    optimizer.zero_grad()
    loss = loss_of(workload, workload.run(batch), batch)
    loss.backward()  # type: ignore[no-untyped-call]
    optimizer.step()
    return loss


def _where(workload: Workload) -> str:
    return str(workload.path or workload.name)


def loss_of(workload: Workload, output: Any, batch: Any) -> Tensor:
    """Return the workload's loss, or the part of the output that is called so."""
    if workload.loss is not None:
        return workload.loss(output, batch)
    loss = named_tensors(output).get("loss")
    if loss is None:
        raise WorkloadError(
            "loss missing",
            where=_where(workload),
            expected="a workload that says how it is trained",
            do="define loss(output, batch)",
        )
    return loss


def make_optimizer(setup: Setup) -> torch.optim.Optimizer:
    """Return a new optimizer with the flags of the setup; plain SGD where the workload
    defines none."""
    workload = setup.workload
    optimizer: torch.optim.Optimizer
    with user_code("the optimizer", _where(workload), path=workload.path):
        if workload.optimizer is None:
            optimizer = torch.optim.SGD(workload.model.parameters(), DEFAULT_RATE)
        else:
            optimizer = workload.optimizer(workload.model)
    set_flags(optimizer, setup.optimizer_flags)
    return optimizer


def set_flags(
    optimizer: torch.optim.Optimizer, flags: Mapping[str, bool | None]
) -> None:
    """Set options of an optimizer, such as ``fused``, in all its groups."""
    for group in optimizer.param_groups:
        group.update({name: flags[name] for name in flags if name in group})


#: Tensors of one batch, by name.
Observed = dict[str, Tensor]


@dataclass(frozen=True)
class Observation:
    """What a setup computes on some batches: outputs, or losses and gradients."""

    outputs: list[Observed]
    losses: list[Observed]


def observe(setup: Setup, batches: int) -> Observation:
    """Run a setup on the first batches, without dropout, and keep what it computes:
    outputs, and with training the loss and all gradients of the first steps.

    The model is trained by it and loses its dropout.
    """
    runner = Runner(setup)
    _without_dropout(setup.model)
    chosen = setup.workload.batches[:batches]
    if not setup.train:
        outputs = [_kept(named_tensors(runner.run(batch))) for batch in chosen]
        return Observation(outputs, [])
    gradients: list[Observed] = []
    losses = []
    with _gradients_into(gradients, setup.model):
        for batch in chosen:
            torch.manual_seed(0)
            loss = runner.run(batch)
            losses.append({"loss": loss.detach().clone()})
    return Observation(gradients, losses)


def _kept(tensors: Mapping[str, Tensor]) -> Observed:
    return {name: tensor.detach().float().clone() for name, tensor in tensors.items()}


def _without_dropout(model: nn.Module) -> None:
    for module in model.modules():
        if isinstance(module, nn.modules.dropout._DropoutNd):
            module.p = 0.0


@contextmanager
def _gradients_into(gradients: list[Observed], model: nn.Module) -> Iterator[None]:
    """Keep the gradients of each optimizer step, by the names of the parameters."""

    def keep(*_: Any) -> None:
        named = model.named_parameters()
        gradients.append(
            _kept({name: p.grad for name, p in named if p.grad is not None})
        )

    handle = register_optimizer_step_pre_hook(keep)
    try:
        yield
    finally:
        handle.remove()
