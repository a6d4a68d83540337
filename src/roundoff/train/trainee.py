"""One configuration in training: its own copy of the model, its optimizer, its loss scale, and its clocks."""

from __future__ import annotations

import copy
import random
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import partial
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_flatten, tree_unflatten

from roundoff.errors import WorkloadError
from roundoff.plan.variants import AUTOCAST, compile_backend, compiled, device_of
from roundoff.preserve import process_kept
from roundoff.train.configs import Config, remade
from roundoff.train.seen import Kept, Seen, formats_of, held, watched
from roundoff.user_code import user_code
from roundoff.workload import Workload


class Stepped(NamedTuple):
    """One training step: its loss, seconds on the wall and of the processor, and whether the scaler skipped it."""

    loss: float
    wall: float
    cpu: float
    skipped: bool


class Trainee:
    """A configuration in training under one seed. ``start`` is copied; the workload's own model is not touched."""

    def __init__(self, config: Config, workload: Workload, start: nn.Module) -> None:
        self.config, self.where, self.path = config, str(workload.path or workload.name), workload.path
        twin = copy.copy(workload)
        twin.model = copy.deepcopy(start)
        with process_kept():
            for change in config.changes:
                twin = change(twin)
            self.model = twin.model
            self.device = device_of(self.model)
            if workload.optimizer is None or workload.loss is None:
                raise WorkloadError("there is nothing to train with", where=self.where, expected="loss and optimizer")
            with self._user("optimizer(model)"):
                self.optimizer = remade(workload.optimizer(self.model), config.optimizer)
            self.eager = twin
            self.workload = twin
            if config.backend is not None:
                self.workload = compiled(twin, compile_backend(twin, config.backend or None))
        self.around = self._autocast()
        self.scaler = None if config.scale is None else Scaled(config, self.device)
        self.memory: dict[str, int] = {}
        self.seen: Seen | None = None
        self._kept: Kept | None = None

    def _autocast(self) -> Callable[[], AbstractContextManager[Any]]:
        if self.config.plan is not None:
            from roundoff.train.autocast import autocast

            return partial(autocast, self.config.plan, self.model)
        if self.config.format in AUTOCAST:
            return partial(torch.autocast, self.device.type, AUTOCAST[self.config.format])
        return nullcontext

    def step(self, number: int, seed: int) -> Stepped:
        """Train on batch ``number``; every random number of the step comes from ``seed``. The process stays as it was."""
        batch = self.workload.batches[number]
        with self._ready(seed), self._user("a training step"):
            wall, cpu = self._now()
            loss, skipped = self._train(batch)
            end, cpu_end = self._now()
            return Stepped(float(loss), end - wall, cpu_end - cpu, skipped)

    def watch(self, number: int, seed: int) -> Stepped:
        """A step like any other, but what it does is looked at, so its times are none: see ``seen``."""
        with watched(self.model, self.optimizer, kernels=self.config.backend is None) as self.seen:
            return self.step(number, seed)

    def weigh(self, number: int, seed: int) -> Stepped:
        """A step like any other, but what it keeps is counted, in bytes: see ``memory``."""
        cuda = self.device.type == "cuda"
        own = held((list(self.model.parameters()), list(self.model.buffers())))
        if cuda:
            torch.cuda.reset_peak_memory_stats(self.device)
            state = held([list(s.values()) for s in self.optimizer.state.values()])
            before = torch.cuda.memory_allocated(self.device)
        self._kept = Kept(self.model)
        gradients = 0

        def counted(*_: Any) -> None:
            nonlocal gradients
            gradients = held([p.grad for p in self.model.parameters() if p.grad is not None])

        handle = self.optimizer.register_step_pre_hook(counted)
        try:
            if self.config.step is None:
                done = self.step(number, seed)
            else:  # a step by hand is forward and backward in one: what lives longest is counted too
                with self._kept.forward():
                    done = self.step(number, seed)
        finally:
            handle.remove()
            kept, self._kept = self._kept.most, None
        optimizer = held([list(s.values()) for s in self.optimizer.state.values()])
        self.memory = {"parameters": own, "gradients": gradients, "optimizer": optimizer, "saved": kept}
        self.memory["total"] = sum(self.memory.values())
        if cuda:
            self.memory["total"] = torch.cuda.max_memory_allocated(self.device) - before + own + state
        return done

    def evaluate(self) -> list[Any]:
        """Outputs of every held-out batch, or of every batch where none is held out: in eval mode, under the same autocast.

        A compiled model is evaluated uncompiled.
        """
        twin = copy.copy(self.eager)
        twin.batches = self.eager.held_out or self.eager.batches
        modes = {module: module.training for module in self.model.modules()}
        self.model.eval()
        try:
            with self._ready(0), torch.no_grad():
                outputs = []
                for batch in twin.batches:
                    with self.around():
                        outputs.append(twin.run(batch))
                return outputs
        finally:
            for module, training in modes.items():
                module.training = training

    def metric(self, outputs: list[Any], reference: list[Any]) -> float | None:
        """The metric of what ``evaluate`` gave. Raises ``WorkloadError`` where it is no finite number."""
        twin = copy.copy(self.eager)
        twin.batches = self.eager.held_out or self.eager.batches
        with process_kept(), torch.no_grad():
            return twin.evaluate(outputs, reference)

    def findings(self) -> list[str]:
        """What is wrong with a step that the user wrote; nothing for the others."""
        if self.seen is None or self.config.step is None:
            return []
        return self.seen.findings(formats_of(self.eager.batches))

    def _train(self, batch: Any) -> tuple[Tensor, bool]:
        if self.config.step is not None:
            return self.config.step(self.model, self.optimizer, batch).detach(), False
        total: Any = 0.0
        for part, share in _cut(batch, self.config.accumulate):
            with nullcontext() if self._kept is None else self._kept.forward(), self.around():
                output = self.workload.run(part)
                with self._user("loss(output, batch)"):
                    loss = self.workload.loss(output, part) * share  # type: ignore[misc]
            total = total + loss.detach()
            if self.scaler is None:
                loss.backward()
            else:
                self.scaler.backward(loss)
        skipped = False
        if self.scaler is None:
            self.optimizer.step()
        else:
            skipped = self.scaler.step(self.optimizer)
        self.optimizer.zero_grad(set_to_none=True)
        return total, skipped

    @contextmanager
    def _ready(self, seed: int) -> Iterator[None]:
        with process_kept(), torch.enable_grad():
            for setting in self.config.settings:
                setting()
            torch.manual_seed(seed)
            np.random.seed(seed % 2**32)  # noqa: NPY002  (user code may draw from the global generator)
            random.seed(seed)
            yield

    def _now(self) -> tuple[float, float]:
        if self.device.type not in ("cpu", "meta"):
            torch.accelerator.synchronize(self.device)
        return time.perf_counter(), time.process_time()

    def _user(self, what: str) -> AbstractContextManager[None]:
        return user_code(f"{what} of {self.config.name}", self.where, path=self.path)


class Scaled:
    """The loss scale of a configuration: the one place that knows which scaler is behind it."""

    def __init__(self, config: Config, device: torch.device) -> None:
        self._static = config.scale if config.static else None
        self._scaler = torch.amp.GradScaler(device.type, init_scale=config.scale or 1.0)

    def backward(self, loss: Tensor) -> None:
        """The backward pass of the scaled loss."""
        self._scaler.scale(loss).backward()  # type: ignore[no-untyped-call]

    def step(self, optimizer: torch.optim.Optimizer) -> bool:
        """The optimizer's step on unscaled gradients; whether it was skipped."""
        self._scaler.unscale_(optimizer)
        found = sum(float(flag) for flag in self._scaler._found_inf_per_device(optimizer).values())
        self._scaler.step(optimizer)
        self._scaler.update(self._static)
        return found > 0

    @property
    def value(self) -> float:
        """The scale of the next step."""
        return float(self._scaler.get_scale())


def _cut(batch: Any, parts: int) -> Iterator[tuple[Any, float]]:
    """A batch in parts along the first axis of its tensors, with the share of its samples in each."""
    if parts == 1:
        yield batch, 1.0
        return
    leaves, tree = tree_flatten(batch)
    sizes = {len(leaf) for leaf in leaves if isinstance(leaf, Tensor) and leaf.dim()}
    if len(sizes) != 1 or min(sizes) < parts:
        raise WorkloadError(
            f"a batch cannot be cut into {parts} parts", where=f"accumulate={parts}",
            expected=f"tensors with one first axis, of at least {parts} samples", got=f"first axes of {sorted(sizes)}",
        )  # fmt: skip
    (size,) = sizes
    cut = [torch.tensor_split(leaf, parts) if isinstance(leaf, Tensor) and leaf.dim() else [leaf] * parts for leaf in leaves]
    for pieces in zip(*cut, strict=True):
        samples = next(len(piece) for piece in pieces if isinstance(piece, Tensor) and piece.dim())
        yield tree_unflatten(list(pieces), tree), samples / size
