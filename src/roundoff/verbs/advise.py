"""``roundoff.advise``: where the time of a workload goes, what would be faster, and what
each of these costs in precision."""

from __future__ import annotations

import copy
import os
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

import torch
from torch import nn

from roundoff.advise import (
    COMPARED,
    RULES,
    AdviceRow,
    AdviceSummary,
    Combination,
    Loading,
    LoadingSummary,
    Runner,
    Setup,
    Trials,
    Tuning,
    advise_on_code,
    advise_on_loading,
    can_load_again,
    changed,
    combine,
    dtype_shares,
    gather_facts,
    measure_loading,
    observe,
    try_guidelines,
    try_larger_batches,
    try_rules,
)
from roundoff.budget import Progress
from roundoff.errors import WorkloadError
from roundoff.preserve import preserve
from roundoff.workload import Workload, as_workload

#: Why torch.compile is not tried unless it is asked for.
COMPILE_TAKES = "it takes seconds to minutes: --compile tries it"
#: Steps that are timed for the headline.
TIMED = 5


@dataclass(frozen=True)
class Advice:
    """The result of ``advise``.

    Attributes:
        summary: counts, times, roofline, and every advice with its trial.
    """

    summary: AdviceSummary = field(repr=False)

    @property
    def rows(self) -> tuple[AdviceRow, ...]:
        """Every advice that applies here, tried or with the reason why not."""
        return self.summary.rows

    @property
    def winners(self) -> tuple[AdviceRow, ...]:
        """The advice that is kept in the combination."""
        kept = self.summary.combination.changes
        return tuple(row for row in self.rows if row.change in kept)

    @property
    def tuning(self) -> Tuning:
        """The winners as changes that can be made, and written to a file."""
        return Tuning(self.summary.combination.changes)

    def apply(self, model: nn.Module) -> nn.Module:
        """Return a copy of a model with the winners that are made to models."""
        return self.tuning.apply(model)

    def write(self, path: str | os.PathLike[str]) -> None:
        """Write the winners as TOML; ``roundoff.advise.read_tuning`` reads it.

        Raises ``OutputError`` when it cannot be written.
        """
        self.tuning.write(path, self.rows)

    def report(self, path: str | os.PathLike[str]) -> None:
        """Write one self-contained HTML page."""
        from roundoff.report import write_advice

        write_advice(self.summary, path)

    def __str__(self) -> str:
        from roundoff.report import advice_as_text

        return advice_as_text(self.summary)


def advise(
    workload: Workload | str | Path,
    train: bool = False,
    *,
    least_db: float = 40.0,
    try_compile: bool = False,
    seconds: float = 2.0,
    trace: str | Path | None = None,
    progress: Progress | None = None,
) -> Advice:
    """Count and time a workload, try what may be faster, and measure what each change
    gains and costs.

    The model, its weights and the process are as before when it returns; changes are
    tried on copies.

    Args:
        workload: with ``train``, its loss, optimizer and step are used where it has
            them.
        train: whole training steps, not forward passes.
        least_db: SQNR of outputs (with ``train`` of loss and gradients) that a change
            must keep to be a winner.
        try_compile: try torch.compile too, which takes up to minutes.
        seconds: for the turns of each trial.
        trace: file or URL for a Chrome trace of the profile, which Perfetto opens.
        progress: called with (stage, done, total).

    Returns:
        Speeds are ratios of processor time (on a GPU of the wall clock), unchanged over
        changed, in interleaved pairs. SQNR is in dB against the unchanged model, inf
        where equal.

    Raises:
        WorkloadError: the workload cannot be run or copied, or has no loss to train by.
        OutputError: the trace cannot be written.

    >>> data = [torch.randn(8, 4) for _ in range(2)]
    >>> answer = advise(Workload(nn.Linear(4, 1), data), seconds=0.01)
    >>> answer.summary.counts.macs
    32.0
    """
    workload = as_workload(workload)
    report = _reporter(progress)
    with preserve(workload.model):
        torch.set_grad_enabled(True)
        setup = _setup(workload, train)
        report("count", 0, 1)
        facts = gather_facts(setup, trace)
        report("count", 1, 1)
        trials = Trials(
            setup=setup,
            observed=observe(setup.copied(), COMPARED),
            device=facts.device,
            seconds=seconds,
            least_db=least_db,
        )
        untried = {} if try_compile else {"compile": COMPILE_TAKES}
        rows = try_rules(
            facts,
            trials,
            progress=lambda done, total: report("try", done, total),
            untried=untried,
        )
        rows, combination = combine(
            rows,
            trials,
            progress=lambda done, total: report("combine", done, total),
        )
        rows += try_guidelines(facts, seconds=seconds)
        rows += advise_on_code(facts, seconds=seconds)
        rows += try_larger_batches(facts, trials)
        loading = _loading(trials, combination)
        if loading is not None:
            rows += advise_on_loading(
                workload, loading, seconds=seconds, cores=facts.cores
            )
        step_seconds = _step_seconds(setup, facts.device)
    applied = {row.name for row in rows}
    summary = AdviceSummary(
        workload=workload.name,
        train=train,
        device=str(facts.device),
        batches=len(workload.batches),
        step_seconds=step_seconds,
        counts=facts.counts,
        profile=facts.profile,
        roofline=facts.roofline,
        dtypes=dtype_shares(facts.counts),
        rows=tuple(sorted(rows, key=_by_gain)),
        combination=combination,
        loading=None if loading is None else _loading_summary(loading),
        least_db=least_db,
        absent=tuple(rule.name for rule in RULES if rule.name not in applied),
        notes=(),
    )
    return Advice(summary)


def _reporter(progress: Progress | None) -> Callable[[str, int, int], None]:
    def report(stage: str, done: int, total: int) -> None:
        if progress is not None:
            progress(stage, done, total)

    return report


def _setup(workload: Workload, train: bool) -> Setup:
    """Return the workload with a copy of its model, in the mode that it is run in."""
    try:
        model = copy.deepcopy(workload.model)
    except (RuntimeError, TypeError) as error:
        raise WorkloadError(
            "the model cannot be copied, so nothing can be tried on it",
            where=str(workload.path or workload.name),
            got=str(error).splitlines()[0],
        ) from error
    model.train(train)
    return Setup(workload.with_model(model), train)


def _loading(trials: Trials, combination: Combination) -> Loading | None:
    """Return what loading the batches costs beside a step with the changes that are
    kept; None where the batches are a list in memory."""
    workload = trials.setup.workload
    if not can_load_again(workload):
        return None
    runner = Runner(changed(trials.setup, combination.changes))
    runner.step()
    return measure_loading(workload, runner.run)


def _loading_summary(loading: Loading) -> LoadingSummary:
    return LoadingSummary(
        wait_share=loading.wait_share,
        load_seconds=loading.load_seconds,
        files=len(loading.files),
        resize_share=loading.resize_share,
        decode_share=loading.decode_share,
    )


def _step_seconds(setup: Setup, device: torch.device) -> float:
    """Return the seconds of the fastest of a few steps."""
    runner = Runner(setup.copied())
    clock = time.process_time if device.type == "cpu" else time.perf_counter
    runner.step()
    samples = []
    for _ in range(TIMED):
        start = clock()
        runner.step()
        samples.append(clock() - start)
    return min(samples)


def _by_gain(row: AdviceRow) -> tuple[bool, float]:
    return not row.verdict.startswith("pays"), -(row.step_speed or 0.0)
