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
from roundoff.ops import SLOW_FP16, slow_in_fp16
from roundoff.plan import AUTOCAST, compile_backend, compiled, device_of
from roundoff.preserve import process_kept
from roundoff.train.autocast.context import autocast
from roundoff.train.bench.configs import Config, remade
from roundoff.train.bench.observe import Kept, Seen, formats_of, held, watched
from roundoff.train.scaling.scaler import LossScaler
from roundoff.workload import Workload, user_code


class Stepped(NamedTuple):
    """One training step: its loss, seconds on the wall and of the processor, and whether the scaler skipped it."""

    loss: float
    wall: float
    cpu: float
    skipped: bool


class Trainee:
    """A configuration in training under one seed. ``start`` is copied; the workload's own model is not touched."""

    def __init__(self, config: Config, workload: Workload, start: nn.Module) -> None:
        self.config, self.where, self.path = (
            config,
            str(workload.path or workload.name),
            workload.path,
        )
        twin = copy.copy(workload)
        twin.model = copy.deepcopy(start)
        with process_kept():
            for change in config.changes:
                twin = change(twin)
            self.model = twin.model
            self.device = device_of(self.model)
            if workload.optimizer is None or workload.loss is None:
                raise WorkloadError(
                    "there is nothing to train with",
                    where=self.where,
                    expected="loss and optimizer",
                )
            with self._user("optimizer(model)"):
                self.optimizer = remade(
                    workload.optimizer(self.model), config.optimizer
                )
            self.eager = twin
            self.workload = twin
            if config.backend is not None:
                self.workload = compiled(
                    twin, compile_backend(twin, config.backend or None)
                )
        self.region: autocast | None = None
        self.around = self._autocast()
        self.scaler = loss_scaler(config)
        self._own = self._gradients = 0
        self._saved: int | None = None
        self._peak: int | None = None
        self.seen: Seen | None = None
        self._kept: Kept | None = None

    def _autocast(self) -> Callable[[], AbstractContextManager[Any]]:
        if self.config.plan is not None:
            region = self.region = autocast(self.config.plan, self.model)
            return lambda: region
        if self.config.format in AUTOCAST:
            return partial(
                torch.autocast, self.device.type, AUTOCAST[self.config.format]
            )
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
        with watched(
            self.model, self.optimizer, kernels=self.config.backend is None
        ) as self.seen:
            return self.step(number, seed)

    def weigh(self, number: int, seed: int) -> Stepped:
        """A step like any other, but what it keeps is counted, in bytes: see ``memory``."""
        cuda = self.device.type == "cuda"
        own = held((list(self.model.parameters()), list(self.model.buffers())))
        if cuda:
            torch.cuda.reset_peak_memory_stats(self.device)
            before = torch.cuda.memory_allocated(self.device)
        self._kept = Kept(self.model)
        self._gradients = 0
        handle = self.optimizer.register_step_pre_hook(
            lambda *_: self._weigh_gradients()
        )
        try:
            if self.config.step is None:
                done = self.step(number, seed)
            else:  # a step by hand is forward and backward in one: what lives longest is counted too
                with self._kept.forward():
                    done = self.step(number, seed)
        finally:
            handle.remove()
            kept, self._kept = self._kept.most, None
        self._own, self._saved = own, kept
        self._peak = (
            torch.cuda.max_memory_allocated(self.device) - before if cuda else None
        )
        return done

    @property
    def memory(self) -> dict[str, int]:
        """Bytes by what they are for, and ``total``; empty before ``weigh``. The optimizer's are those at present, since a
        step that was skipped has made none."""
        if self._saved is None:
            return {}
        optimizer = held([list(s.values()) for s in self.optimizer.state.values()])
        parts = {
            "parameters": self._own,
            "gradients": self._gradients,
            "optimizer": optimizer,
            "saved": self._saved,
        }
        inside = self._gradients + self._saved if self._peak is None else self._peak
        return {**parts, "total": self._own + optimizer + inside}

    def _weigh_gradients(self) -> None:
        self._gradients = held(
            [p.grad for p in self.model.parameters() if p.grad is not None]
        )

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
        """What is wrong with a step that the user wrote, or with a plan; nothing for the others."""
        if self.region is not None and (unused := self.region.rules.unused()):
            return [
                f"{len(unused)} of the plan's patterns named no site: {', '.join(unused[:5])}"
            ]
        if self.seen is None or self.config.step is None:
            return []
        found = self.seen.findings(formats_of(self.eager.batches))
        if "fp16" in self.seen.matrix["forward"] and slow_in_fp16(self.device):
            found.append(SLOW_FP16)
        return found

    def _train(self, batch: Any) -> tuple[Tensor, bool]:
        if self.config.step is not None:
            return self.config.step(self.model, self.optimizer, batch).detach(), False
        total: Any = 0.0
        for part, share in _cut(batch, self.config.accumulate):
            with (
                nullcontext() if self._kept is None else self._kept.forward(),
                self.around(),
            ):
                output = self.workload.run(part)
                with self._user("loss(output, batch)"):
                    loss = self.workload.loss(output, part) * share  # type: ignore[misc]
            total = total + loss.detach()
            if self.scaler is None:
                loss.backward()
            else:
                self.scaler.backward(loss)
        if self._kept is not None:
            self._weigh_gradients()
        skipped = False
        if self.scaler is None:
            self.optimizer.step()
        else:
            self.scaler.step(self.optimizer)
            skipped = bool(self.scaler.skipped)
        self.optimizer.zero_grad(set_to_none=True)
        return total, skipped

    @contextmanager
    def _ready(self, seed: int) -> Iterator[None]:
        with process_kept(), torch.enable_grad(), self._compiling():
            for setting in self.config.settings:
                setting()
            torch.manual_seed(seed)
            np.random.seed(seed % 2**32)  # noqa: NPY002  (user code may draw from the global generator)
            random.seed(seed)
            yield

    def _compiling(self) -> AbstractContextManager[Any]:
        """Room for the compiled code of every seed: beyond the limit torch would go on uncompiled, and not say so."""
        if self.config.backend is None:
            return nullcontext()
        import torch._dynamo

        patched: AbstractContextManager[Any] = torch._dynamo.config.patch(
            recompile_limit=256
        )
        return patched

    def _now(self) -> tuple[float, float]:
        if self.device.type not in ("cpu", "meta"):
            torch.accelerator.synchronize(self.device)
        return time.perf_counter(), time.process_time()

    def _user(self, what: str) -> AbstractContextManager[None]:
        return user_code(f"{what} of {self.config.name}", self.where, path=self.path)


def loss_scaler(config: Config) -> LossScaler | None:
    """The loss scale of a configuration, without the model: finding the operator behind a skip would be timed too."""
    if config.scale is None:
        return None
    return LossScaler(
        rule="static" if config.static else "dynamic", init_scale=config.scale
    )


def _cut(batch: Any, parts: int) -> Iterator[tuple[Any, float]]:
    """A batch in parts along the first axis of its tensors, with the share of its samples in each."""
    if parts == 1:
        yield batch, 1.0
        return
    leaves, tree = tree_flatten(batch)
    sizes = {len(leaf) for leaf in leaves if isinstance(leaf, Tensor) and leaf.dim()}
    if len(sizes) != 1 or min(sizes) < parts:
        raise WorkloadError(
            f"a batch cannot be cut into {parts} parts",
            where=f"accumulate={parts}",
            expected=f"tensors with one first axis, of at least {parts} samples",
            got=f"first axes of {sorted(sizes)}",
        )
    (size,) = sizes
    cut = [
        torch.tensor_split(leaf, parts)
        if isinstance(leaf, Tensor) and leaf.dim()
        else [leaf] * parts
        for leaf in leaves
    ]
    for pieces in zip(*cut, strict=True):
        samples = next(
            len(piece) for piece in pieces if isinstance(piece, Tensor) and piece.dim()
        )
        yield tree_unflatten(list(pieces), tree), samples / size
