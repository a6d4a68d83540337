"""One configuration in training: its own copy of the model, its optimizer, its loss
scale, and its clocks.
"""

from __future__ import annotations

import copy
import random
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
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
from roundoff.train.bench.configs import BenchConfig, rebuilt
from roundoff.train.bench.observed_step import (
    ObservedStep,
    SavedBytes,
    formats_of,
    observed,
    storage_bytes,
)
from roundoff.train.low_precision import round_updates_
from roundoff.train.scaling.scaler import LossScaler
from roundoff.workload import Workload, user_code

#: Versions of compiled code that torch keeps: room for those of every seed. Beyond the
#: limit torch would go on uncompiled, and not say so.
RECOMPILE_LIMIT = 256


class StepResult(NamedTuple):
    """One training step: loss, seconds on the wall and of the processor, and if it was skipped."""

    loss: float
    wall: float
    cpu: float
    skipped: bool


@dataclass(frozen=True, slots=True)
class Memory:
    """Bytes of one configuration by what they are for.

    Attributes:
        parameters: parameters and buffers.
        gradients: gradients of the parameters.
        optimizer: state of the optimizer.
        saved: what autograd saves for the backward pass.
        total: all of them; on CUDA the measured peak in place of gradients and saved.
    """

    parameters: int
    gradients: int
    optimizer: int
    saved: int
    total: int


class Trainee:
    """A configuration in training under one seed.

    ``start`` is copied; the workload's own model is not touched.
    """

    def __init__(
        self, config: BenchConfig, workload: Workload, start: nn.Module, seed: int
    ) -> None:
        self.config = config
        self.where = str(workload.path or workload.name)
        self.path = workload.path
        self.eager = copy.copy(workload)
        self.eager.model = copy.deepcopy(start)
        with process_kept():
            for change in config.changes:
                self.eager = change(self.eager)
            self.model = self.eager.model
            self.device = device_of(self.model)
            self.optimizer = self._optimizer(workload, seed)
            self.workload = self.eager
            if config.backend is not None:
                backend = compile_backend(self.eager, config.backend or None)
                self.workload = compiled(self.eager, backend)
        self.region: autocast | None = None
        self.around = self._autocast()
        self.scaler = loss_scaler(config)
        self.observed: ObservedStep | None = None
        self._saving: SavedBytes | None = None
        self._parameter_bytes = 0
        self._gradient_bytes = 0
        self._saved_bytes: int | None = None
        self._peak_bytes: int | None = None

    def _optimizer(self, workload: Workload, seed: int) -> torch.optim.Optimizer:
        if workload.optimizer is None or workload.loss is None:
            raise WorkloadError(
                "there is nothing to train with",
                where=self.where,
                expected="loss and optimizer",
            )
        with self._user("optimizer(model)"):
            optimizer = rebuilt(workload.optimizer(self.model), self.config.optimizer)
        if self.config.updates is not None:
            round_updates_(optimizer, self.config.updates, seed=seed)
        return optimizer

    def _autocast(self) -> Callable[[], AbstractContextManager[Any]]:
        if self.config.plan is not None:
            region = self.region = autocast(self.config.plan, self.model)
            return lambda: region
        if self.config.format in AUTOCAST:
            dtype = AUTOCAST[self.config.format]
            return partial(torch.autocast, self.device.type, dtype)
        return nullcontext

    def step(self, number: int, seed: int) -> StepResult:
        """Train on batch ``number``; every random number of the step comes from ``seed``.

        The process stays as it was.
        """
        batch = self.workload.batches[number]
        with self._ready(seed), self._user("a training step"):
            wall, cpu = self._now()
            loss, skipped = self._train(batch)
            wall_end, cpu_end = self._now()
            return StepResult(float(loss), wall_end - wall, cpu_end - cpu, skipped)

    def observe(self, number: int, seed: int) -> StepResult:
        """Take a step and observe it, see ``observed``; its times mean nothing."""
        kernels = self.config.backend is None
        with observed(self.model, self.optimizer, kernels=kernels) as self.observed:
            return self.step(number, seed)

    def weigh(self, number: int, seed: int) -> StepResult:
        """Take a step and count the bytes that it keeps, see ``memory``."""
        on_cuda = self.device.type == "cuda"
        tensors = [*self.model.parameters(), *self.model.buffers()]
        self._parameter_bytes = storage_bytes(tensors)
        if on_cuda:
            torch.cuda.reset_peak_memory_stats(self.device)
            before = torch.cuda.memory_allocated(self.device)
        self._gradient_bytes = 0
        saving = self._saving = SavedBytes(self.model)
        hook = self.optimizer.register_step_pre_hook(lambda *_: self._weigh_gradients())
        try:
            if self.config.step is None:
                result = self.step(number, seed)
            else:  # a step by hand is forward and backward in one: what lives longest is counted too
                with saving.forward():
                    result = self.step(number, seed)
        finally:
            hook.remove()
            self._saving = None
        self._saved_bytes = saving.most
        if on_cuda:
            peak = torch.cuda.max_memory_allocated(self.device)
            self._peak_bytes = peak - before
        return result

    @property
    def memory(self) -> Memory | None:
        """Bytes by what they are for; None before ``weigh``.

        The optimizer's are those at present, since a skipped step has made none.
        """
        if self._saved_bytes is None:
            return None
        states = [list(state.values()) for state in self.optimizer.state.values()]
        optimizer = storage_bytes(states)
        in_step = self._gradient_bytes + self._saved_bytes
        if self._peak_bytes is not None:
            in_step = self._peak_bytes
        return Memory(
            parameters=self._parameter_bytes,
            gradients=self._gradient_bytes,
            optimizer=optimizer,
            saved=self._saved_bytes,
            total=self._parameter_bytes + optimizer + in_step,
        )

    def _weigh_gradients(self) -> None:
        gradients = [p.grad for p in self.model.parameters() if p.grad is not None]
        self._gradient_bytes = storage_bytes(gradients)

    def evaluate(self) -> list[Any]:
        """Run every held-out batch, or every batch where none is held out.

        In eval mode, under the same autocast; a compiled model runs uncompiled.
        """
        evaluated = self._evaluated()
        modes = {module: module.training for module in self.model.modules()}
        self.model.eval()
        try:
            with self._ready(0), torch.no_grad():
                outputs = []
                for batch in evaluated.batches:
                    with self.around():
                        outputs.append(evaluated.run(batch))
                return outputs
        finally:
            for module, training in modes.items():
                module.training = training

    def metric(self, outputs: list[Any], reference: list[Any]) -> float | None:
        """Compute the metric of the outputs of ``evaluate``.

        Raises ``WorkloadError`` where it is no finite number.
        """
        with process_kept(), torch.no_grad():
            return self._evaluated().evaluate(outputs, reference)

    def _evaluated(self) -> Workload:
        workload = copy.copy(self.eager)
        workload.batches = self.eager.held_out or self.eager.batches
        return workload

    def findings(self) -> list[str]:
        """List what is wrong with a step that the user wrote, or with a plan."""
        unused = [] if self.region is None else self.region.rules.unused()
        if unused:
            return [
                f"{len(unused)} of the plan's patterns named no site: {', '.join(unused[:5])}"
            ]
        if self.observed is None or self.config.step is None:
            return []
        findings = self.observed.findings(formats_of(self.eager.batches))
        if "fp16" in self.observed.matrix["forward"] and slow_in_fp16(self.device):
            findings.append(SLOW_FP16)
        return findings

    def _train(self, batch: Any) -> tuple[Tensor, bool]:
        """Take one optimizer step; return the loss, and True where the step was skipped."""
        if self.config.step is not None:
            return self.config.step(self.model, self.optimizer, batch).detach(), False
        total: Any = 0.0
        for part, share in split_batch(batch, self.config.accumulate):
            total = total + self._backward(part, share)
        if self._saving is not None:
            self._weigh_gradients()
        skipped = False
        if self.scaler is None:
            self.optimizer.step()
        else:
            self.scaler.step(self.optimizer)
            skipped = bool(self.scaler.skipped)
        self.optimizer.zero_grad(set_to_none=True)
        return total, skipped

    def _backward(self, part: Any, share: float) -> Tensor:
        saving = nullcontext() if self._saving is None else self._saving.forward()
        with saving, self.around():
            output = self.workload.run(part)
            with self._user("loss(output, batch)"):
                loss = self.workload.loss(output, part) * share  # type: ignore[misc]
        detached: Tensor = loss.detach()
        if self.scaler is None:
            loss.backward()
        else:
            self.scaler.backward(loss)
        return detached

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
        if self.config.backend is None:
            return nullcontext()
        import torch._dynamo

        patched: AbstractContextManager[Any] = torch._dynamo.config.patch(
            recompile_limit=RECOMPILE_LIMIT
        )
        return patched

    def _now(self) -> tuple[float, float]:
        if self.device.type not in ("cpu", "meta"):
            torch.accelerator.synchronize(self.device)
        return time.perf_counter(), time.process_time()

    def _user(self, action: str) -> AbstractContextManager[None]:
        return user_code(f"{action} of {self.config.name}", self.where, path=self.path)


def loss_scaler(config: BenchConfig) -> LossScaler | None:
    """Make the loss scaler of a configuration; None without a scale.

    It gets no model: searching the operator behind a skip would be timed too.
    """
    if config.scale is None:
        return None
    rule = "static" if config.static else "dynamic"
    return LossScaler(rule=rule, init_scale=config.scale)


def split_batch(batch: Any, parts: int) -> Iterator[tuple[Any, float]]:
    """Cut a batch along the first axis of its tensors; yield each part and its share of samples.

    Raises ``WorkloadError`` where the first axes differ, or have fewer samples than
    ``parts``.
    """
    if parts == 1:
        yield batch, 1.0
        return
    leaves, tree = tree_flatten(batch)
    samples = _samples(leaves, parts)
    pieces = [_split(leaf, parts) for leaf in leaves]
    for part in zip(*pieces, strict=True):
        sizes = [len(piece) for piece in part if _has_samples(piece)]
        yield tree_unflatten(list(part), tree), sizes[0] / samples


def _samples(leaves: Sequence[Any], parts: int) -> int:
    sizes = {len(leaf) for leaf in leaves if _has_samples(leaf)}
    if len(sizes) != 1 or min(sizes) < parts:
        raise WorkloadError(
            f"a batch cannot be cut into {parts} parts",
            where=f"accumulate={parts}",
            expected=f"tensors with one first axis, of at least {parts} samples",
            got=f"first axes of {sorted(sizes)}",
        )
    return sizes.pop()


def _split(leaf: Any, parts: int) -> Sequence[Any]:
    if _has_samples(leaf):
        return torch.tensor_split(leaf, parts)
    return [leaf] * parts


def _has_samples(value: Any) -> bool:
    return isinstance(value, Tensor) and bool(value.dim())
