"""One configuration of a bench under all seeds: losses and times of every step, metric,
memory; or why it failed.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable
from typing import Any

from torch import nn

from roundoff.errors import RoundoffError, WorkloadError
from roundoff.train.bench.configs import BenchConfig
from roundoff.train.bench.observed_step import StepFormats
from roundoff.train.bench.trainee import Memory, StepResult, Trainee
from roundoff.workload import Workload

#: First steps of each seed that are not timed: allocations, compilation, observation.
WARM = 2
#: The final loss is the mean over this share of the steps, the last ones.
TAIL = 0.1


class BenchRun:
    """One configuration under all seeds.

    Attributes:
        config: the configuration.
        error: the error that ended it; None while it runs.
        failed: the same in words.
        steps: for each seed, the result of each step.
        metrics: the metric of each seed; NaN where it could not be computed.
        memory: bytes of the second step of the first seed; None before.
        formats: formats of the first step; None where its operators cannot be seen.
        findings: mistakes of a hand-written step or a plan.
        scale: the loss scale at the end; None without.
        notes: what else to know, in words.
    """

    def __init__(self, config: BenchConfig, notes: list[str]) -> None:
        self.config = config
        self.notes = notes
        self.error: RoundoffError | None = None
        self.failed: str | None = None
        self.steps: list[list[StepResult]] = []
        self.metrics: list[float] = []
        self.memory: Memory | None = None
        self.formats: StepFormats | None = None
        self.findings: list[str] = []
        self.scale: float | None = None

    def begin(self, workload: Workload, start: nn.Module, seed: int) -> Trainee | None:
        """Prepare to train under the next ``seed``; return None once it has failed."""
        if self.failed:
            return None
        self.steps.append([])
        try:
            return Trainee(self.config, workload, start, seed)
        except RoundoffError as error:
            self._fail(error)
        except (RuntimeError, TypeError) as error:  # the model cannot be copied or cast
            self._fail(
                WorkloadError(
                    "the model cannot be prepared",
                    where=self.config.name,
                    got=_first_line(error),
                )
            )
        return None

    def step(self, trainee: Trainee, step: int, batch: int, seed: int) -> None:
        """Take one step; the first two of the first seed are observed."""
        if self.failed:
            return
        take_step = self._kind_of_step(trainee, step)
        try:
            result = take_step(batch, hash((seed, step)) % 2**31)
        except RoundoffError as error:
            self._fail(error, f"step {step} of seed {seed}: ")
        else:
            self.steps[-1].append(result)

    def _kind_of_step(
        self, trainee: Trainee, step: int
    ) -> Callable[[int, int], StepResult]:
        is_first_seed = len(self.steps) == 1
        if is_first_seed and step == 0:
            return trainee.observe
        if is_first_seed and step == 1:
            return trainee.weigh
        return trainee.step

    def finish(self, trainee: Trainee, reference: list[Any] | None) -> list[Any] | None:
        """Evaluate after the last step; return the reference outputs of the metric."""
        if self.failed:
            return reference
        if len(self.steps) == 1:
            self._keep_observations(trainee)
        if trainee.scaler is not None:
            self.scale = trainee.scaler.get_scale()
        if trainee.workload.metric is None:
            return None
        try:
            outputs = trainee.evaluate()
            self.metrics.append(trainee.metric(outputs, reference or outputs) or 0.0)
        except RoundoffError as error:
            self.metrics.append(math.nan)
            self.notes.append(f"no metric: {_with_got(error, ', ', str(error.got))}")
            return reference
        return reference or outputs

    def losses(self) -> list[list[float]]:
        """List the losses of each seed."""
        return [[step.loss for step in seed] for seed in self.steps]

    def final_losses(self) -> list[float]:
        """List the final loss of each seed."""
        return [
            statistics.fmean(losses[-tail(len(losses)) :]) for losses in self.losses()
        ]

    def _keep_observations(self, trainee: Trainee) -> None:
        self.memory = trainee.memory
        self.findings = trainee.findings()
        if trainee.observed is not None and self.config.backend is None:
            self.formats = trainee.observed.formats()

    def _fail(self, error: RoundoffError, when: str = "") -> None:
        self.error = error
        self.failed = when + _with_got(error, ": ", _first_line(error.got))


def tail(steps: int) -> int:
    """Return the number of steps at the end whose mean is the final loss."""
    return max(1, round(TAIL * steps))


def _with_got(error: RoundoffError, separator: str, got: str) -> str:
    return error.what + (separator + got if error.got else "")


def _first_line(text: object) -> str:
    return str(text).strip().partition("\n")[0]
