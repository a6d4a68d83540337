"""What one configuration gave: losses and times of every step, metric, memory; or why it failed."""

from __future__ import annotations

import math
import statistics
from typing import Any

from torch import nn

from roundoff.errors import RoundoffError, WorkloadError
from roundoff.train.bench.configs import Config
from roundoff.train.bench.trainee import Stepped, Trainee
from roundoff.workload import Workload

#: First steps of each seed that are not timed: allocations, compilation, and what is looked at.
WARM = 2
#: The final loss is the mean over this share of the steps, the last ones.
TAIL = 0.1


class Result:
    """One configuration under all seeds."""

    def __init__(self, config: Config, notes: list[str]) -> None:
        self.config, self.notes = config, notes
        self.error: RoundoffError | None = None
        self.failed: str | None = None
        self.stepped: list[list[Stepped]] = []
        self.metrics: list[float] = []
        self.memory: dict[str, int] = {}
        self.seen: dict[str, Any] | None = None
        self.findings: list[str] = []
        self.scale: float | None = None

    def begin(self, workload: Workload, start: nn.Module) -> Trainee | None:
        """Ready to train under the next seed; None once it has failed."""
        if self.failed:
            return None
        self.stepped.append([])
        try:
            return Trainee(self.config, workload, start)
        except RoundoffError as error:
            self._fail(error)
        except (
            RuntimeError,
            TypeError,
        ) as error:  # a model that cannot be copied or cast
            self._fail(
                WorkloadError(
                    "the model cannot be prepared",
                    where=self.config.name,
                    got=_first_line(error),
                )
            )
        return None

    def step(self, trainee: Trainee, step: int, number: int, seed: int) -> None:
        """One step; the first two of the first seed are looked at."""
        if self.failed:
            return
        first = len(self.stepped) == 1
        how = (
            trainee.watch
            if first and step == 0
            else trainee.weigh
            if first and step == 1
            else trainee.step
        )
        try:
            self.stepped[-1].append(how(number, hash((seed, step)) % 2**31))
        except RoundoffError as error:
            self._fail(error, f"step {step} of seed {seed}: ")

    def finish(self, trainee: Trainee, reference: list[Any] | None) -> list[Any] | None:
        """Evaluate after the last step; gives the outputs that the metric has for its reference."""
        if self.failed:
            return reference
        if len(self.stepped) == 1:
            self.memory, self.findings = trainee.memory, trainee.findings()
            self.seen = (
                trainee.seen.plain()
                if trainee.seen and self.config.backend is None
                else None
            )
        if trainee.scaler is not None:
            self.scale = trainee.scaler.get_scale()
        if trainee.workload.metric is None:
            return None
        try:
            outputs = trainee.evaluate()
            self.metrics.append(trainee.metric(outputs, reference or outputs) or 0.0)
        except RoundoffError as error:
            self.metrics.append(math.nan)
            self.notes.append(
                f"no metric: {error.what}" + (f", {error.got}" if error.got else "")
            )
            return reference
        return reference or outputs

    def losses(self) -> list[list[float]]:
        """A list for each seed."""
        return [[one.loss for one in seed] for seed in self.stepped]

    def final(self) -> list[float]:
        """The final loss of each seed."""
        return [
            statistics.fmean(losses[-tail(len(losses)) :]) for losses in self.losses()
        ]

    def _fail(self, error: RoundoffError, when: str = "") -> None:
        self.error, self.failed = (
            error,
            when + error.what + (f": {_first_line(error.got)}" if error.got else ""),
        )


def tail(steps: int) -> int:
    """Steps at the end whose mean is the final loss."""
    return max(1, round(TAIL * steps))


def _first_line(text: object) -> str:
    return str(text).strip().partition("\n")[0]
