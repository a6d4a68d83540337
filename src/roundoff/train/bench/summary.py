"""The result of a bench: ratios, differences and verdicts of each configuration against
the first.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves

from roundoff.train.bench.bench_run import WARM, BenchRun, tail
from roundoff.train.bench.judge import DIFFERENT, UNDECIDED, judge
from roundoff.train.bench.observed_step import StepFormats
from roundoff.train.bench.trainee import Memory, StepResult
from roundoff.workload import Workload

DRAWN_WEIGHTS = "drawn anew by model() under each seed"
SHARED_WEIGHTS = "the same for every seed, which changes the order of the batches and what is drawn in training"
PEAK_MEMORY = "the peak of torch.cuda.max_memory_allocated in a step, without the other configurations"
COUNTED_MEMORY = (
    "counted: parameters, buffers, gradients, optimizer state, and what autograd keeps for the backward pass. What "
    "operators need while they run is not in it"
)


@dataclass(frozen=True, slots=True)
class Ratios:
    """Ratios of times, reference over candidate, one for each round.

    Attributes:
        median: the median; NaN without any finite ratio, like the quartiles.
        low: the lower quartile.
        high: the upper quartile.
        rounds: number of finite ratios.
    """

    median: float
    low: float
    high: float
    rounds: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Outcome:
    """A final loss or metric over the seeds, and its verdict against the reference.

    Attributes:
        mean: mean over the seeds.
        spread: standard deviation over the seeds; None of one seed, and where a value
            is not finite.
        seeds: the value of each seed.
        verdict, reason, difference, low, high, noise, could_see: see
            ``DifferenceVerdict``; all None for the reference itself, or where the
            reference failed.
    """

    mean: float
    spread: float | None
    seeds: list[float]
    verdict: str | None = None
    reason: str | None = None
    difference: float | None = None
    low: float | None = None
    high: float | None = None
    noise: float | None = None
    could_see: float | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class BenchRow:
    """One configuration of a bench.

    Attributes:
        config: its name.
        format: see ``BenchConfig.format``.
        failed: why it could not be trained to the end; None where it could.
        notes: what else to know, in words.
        findings: mistakes of a hand-written step or a plan.
        seen: formats of the first step.
        memory: bytes; None where it was not counted.
        scale: the loss scale at the end.
        scaled: it has a loss scale.
        skips: number of skipped steps over all seeds.
        nonfinite: where the first loss that is not finite is; None without.
        speed: ratios of wall time, reference over this one; None where one of them
            failed.
        cpu: ratios of processor time.
        seconds: median seconds of a step.
        loss: the final loss.
        metric: the metric; None where the workload has none.
        worse: it ended worse than the reference by more than the seeds explain.
        verdict: that of loss and metric together; None for the reference.
    """

    config: str
    format: str
    failed: str | None = None
    notes: list[str]
    findings: list[str]
    seen: StepFormats | None = None
    memory: Memory | None = None
    scale: float | None = None
    scaled: bool = False
    skips: int = 0
    nonfinite: str | None = None
    speed: Ratios | None = None
    cpu: Ratios | None = None
    seconds: float | None = None
    loss: Outcome | None = None
    metric: Outcome | None = None
    worse: bool = False
    verdict: str | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class BenchSummary:
    """The result of a bench.

    Attributes:
        workload: its name.
        reference: name of the first configuration.
        steps: optimizer steps for each seed.
        seeds: the seeds.
        weights: where the weights of each seed come from, in words.
        device: where it ran.
        threads: torch's threads on the CPU.
        batches: number of batches of the workload.
        held_out: number of batches for the metric; 0 where they are those of training.
        metric: name of the metric; None without.
        warm: first steps of each seed that are not timed.
        tail: last steps whose mean loss is the final loss.
        memory_is: how memory was measured, in words.
        notes: what else to know, in words.
        rows: one for each configuration, in the order given.
        curves: for each configuration, the losses of each seed.
    """

    workload: str
    reference: str
    steps: int
    seeds: list[int]
    weights: str
    device: str
    threads: int
    batches: int
    held_out: int
    metric: str | None
    warm: int
    tail: int
    memory_is: str
    notes: list[str]
    rows: list[BenchRow]
    curves: dict[str, list[list[float]]]

    @property
    def agrees(self) -> bool:
        """True if every configuration ran, and none ended worse than the first."""
        return not any(row.failed or row.worse for row in self.rows)


def summarize(
    workload: Workload,
    runs: Sequence[BenchRun],
    seeds: list[int],
    steps: int,
    *,
    drawn_weights: bool,
    device: torch.device,
) -> BenchSummary:
    """Compare every run with the first.

    ``drawn_weights``: each seed began with weights of its own.
    """
    return BenchSummary(
        workload=workload.name,
        reference=runs[0].config.name,
        steps=steps,
        seeds=seeds,
        weights=DRAWN_WEIGHTS if drawn_weights else SHARED_WEIGHTS,
        device=str(device),
        threads=torch.get_num_threads(),
        batches=len(workload.batches),
        held_out=len(workload.held_out),
        metric=workload.metric_name,
        warm=WARM,
        tail=tail(steps),
        memory_is=PEAK_MEMORY if device.type == "cuda" else COUNTED_MEMORY,
        notes=_notes(workload),
        rows=[_row(run, runs[0]) for run in runs],
        curves={run.config.name: run.losses() for run in runs},
    )


def _notes(workload: Workload) -> list[str]:
    spoilt = [
        str(index)
        for index, batch in enumerate(workload.batches)
        if not _is_finite(batch)
    ]
    if not spoilt:
        return []
    return [f"batch {', '.join(spoilt[:5])} of the workload holds NaN or Inf"]


def _is_finite(batch: Any) -> bool:
    return all(
        bool(torch.isfinite(leaf).all())
        for leaf in tree_leaves(batch)
        if isinstance(leaf, Tensor) and leaf.is_floating_point()
    )


def _row(run: BenchRun, first: BenchRun) -> BenchRow:
    measured = {} if run.failed else _measured(run, first)
    return BenchRow(
        config=run.config.name,
        format=run.config.format,
        failed=run.failed,
        notes=list(dict.fromkeys(run.notes)),
        findings=run.findings,
        seen=run.formats,
        memory=run.memory,
        scale=run.scale,
        scaled=run.config.scale is not None,
        skips=sum(step.skipped for seed in run.steps for step in seed),
        nonfinite=_first_nonfinite(run.losses()),
        **measured,
    )


def _measured(run: BenchRun, first: BenchRun) -> dict[str, Any]:
    """Compute the fields of a row that only a run without a failure has."""
    is_compared = run is not first and not first.failed
    reference = first if is_compared else None
    loss = _outcome(
        run.final_losses(), None if reference is None else reference.final_losses()
    )
    metric = None
    if run.metrics:
        metric = _outcome(run.metrics, None if reference is None else reference.metrics)
    timed = [step.wall for seed in run.steps for step in seed[WARM:]]
    fields = {
        "seconds": statistics.median(timed),
        "loss": loss,
        "metric": metric,
        "worse": _is_worse(loss, 1) or _is_worse(metric, -1),
    }
    if is_compared:
        fields["verdict"] = _verdict(loss, metric)
    if is_compared or run is first:
        fields |= _speeds(_rounds(first, run))
    return fields


def _verdict(loss: Outcome, metric: Outcome | None) -> str | None:
    verdicts = [loss.verdict] if metric is None else [loss.verdict, metric.verdict]
    for verdict in (DIFFERENT, UNDECIDED):
        if verdict in verdicts:
            return verdict
    return verdicts[0]


def _speeds(rounds: list[tuple[StepResult, StepResult]]) -> dict[str, Ratios]:
    nan = math.nan
    return {
        "speed": ratios([first.wall / (run.wall or nan) for first, run in rounds]),
        "cpu": ratios([first.cpu / (run.cpu or nan) for first, run in rounds]),
    }


def _rounds(first: BenchRun, run: BenchRun) -> list[tuple[StepResult, StepResult]]:
    """Pair the timed steps of one round."""
    rounds: list[tuple[StepResult, StepResult]] = []
    for first_steps, steps in zip(first.steps, run.steps, strict=True):
        rounds += zip(first_steps[WARM:], steps[WARM:], strict=True)
    return rounds


def ratios(values: Sequence[float]) -> Ratios:
    """Summarize ratios by their quartiles; leave out those that are not finite."""
    finite = [value for value in values if math.isfinite(value)] or [math.nan]
    quartiles = statistics.quantiles(finite, n=4) if len(finite) > 1 else finite * 3
    low, median, high = quartiles
    return Ratios(median, low, high, len(finite))


def _outcome(values: list[float], reference: list[float] | None) -> Outcome:
    has_spread = len(values) > 1 and all(map(math.isfinite, values))
    judged = asdict(judge(reference, values)) if reference else {}
    return Outcome(
        mean=statistics.fmean(values),
        spread=statistics.stdev(values) if has_spread else None,
        seeds=values,
        **judged,
    )


def _is_worse(outcome: Outcome | None, sign: int) -> bool:
    """Return True if the difference in the direction of ``sign`` is more than noise."""
    if outcome is None or outcome.verdict != DIFFERENT:
        return False
    return outcome.difference is None or outcome.difference * sign > 0


def _first_nonfinite(losses_of_seeds: list[list[float]]) -> str | None:
    for number, losses in enumerate(losses_of_seeds):
        bad = [step for step, loss in enumerate(losses) if not math.isfinite(loss)]
        if bad:
            more = f" and {len(bad) - 1} more" if len(bad) > 1 else ""
            return f"loss {losses[bad[0]]} at step {bad[0]}{more} (run {number})"
    return None
