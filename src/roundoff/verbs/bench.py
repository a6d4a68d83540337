"""``roundoff.bench``: training configurations side by side, and whether what parts them
is more than noise.
"""

from __future__ import annotations

import copy
import random
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from roundoff.budget import Progress
from roundoff.errors import WorkloadError, warn
from roundoff.ops import SLOW_FP16, slow_in_fp16
from roundoff.plan import device_of
from roundoff.preserve import preserve, process_kept
from roundoff.train import (
    WARM,
    BenchConfig,
    BenchRow,
    BenchRun,
    BenchSummary,
    TrainingStep,
    parse_configs,
    summarize,
)
from roundoff.workload import Workload, as_workload


@dataclass(frozen=True)
class Bench:
    """The result of ``bench``.

    Attributes:
        summary: ``rows`` (one for each configuration, in the order given), ``curves``
            (name -> a list of losses for each seed), ``notes`` and how it was run.
    """

    summary: BenchSummary = field(repr=False)

    @property
    def rows(self) -> list[BenchRow]:
        """One row for each configuration."""
        return self.summary.rows

    @property
    def agrees(self) -> bool:
        """True if every configuration ran, and none ended worse than the first by more
        than the seeds explain.
        """
        return self.summary.agrees

    def report(self, path: str | Path) -> None:
        """Write one self-contained HTML page."""
        from roundoff.report import write_bench

        write_bench(self.summary, path)

    def __str__(self) -> str:
        from roundoff.report import as_text

        return as_text(self.summary)


def bench(
    workload: Workload | str | Path,
    configs: Sequence[str | TrainingStep],
    *,
    steps: int = 200,
    seeds: int | Iterable[int] = 3,
    progress: Progress | None = None,
) -> Bench:
    """Train a workload in several configurations side by side, in this process, and say
    what each gains and costs.

    Every configuration has its own copy of the model, its own optimizer and loss scale.
    For each seed all start from the same weights, see the same batches in the same order,
    and draw the same random numbers; they take turns step by step, in an order that
    changes, so that a busy machine meets all of them. Nothing of the workload or the
    process is changed.

    Args:
        workload: needs ``loss`` and ``optimizer``. Its batches are gone through again and
            again, in an order drawn from the seed. A model that is in eval mode is trained
            in training mode.
        configs: names, parts joined by ``+``: ``fp32``, ``bf16``, ``fp16`` (autocast;
            fp16 with a dynamic loss scale), ``tf32``, ``fp64`` or a plan file, with
            ``compile``, ``compile=BACKEND``, ``channels_last``, ``checkpoint``,
            ``fused``, ``foreach``, ``weights=bf16``, ``updates=stochastic``,
            ``updates=kahan``, ``accumulate=N``, ``scale=dynamic``,
            ``scale=static:1024``, ``scale=off``, ``threads=N``, a device. Or a function
            ``step(model, optimizer, batch)`` that returns the loss: a training step of
            your own. The first is what the others are compared with.
        steps: optimizer steps for each seed, at least 3; the first two are not timed.
        seeds: how many (0, 1, ...) or which. If the workload has ``model()`` it is called
            again under each seed.
        progress: called with (stage, done, total).

    Returns:
        Speeds are ratios of seconds a step within one round; memory is in bytes; losses
        are means over the last tenth of the steps. Verdicts: see
        ``roundoff.train.bench.judge``. A configuration that fails is a row with its
        reason, and the others go on; NaN and Inf in data or loss are said.

    Raises:
        WorkloadError: no loss or optimizer, an unknown configuration, too few steps, or
            every configuration failed.

    >>> _ = torch.manual_seed(0)
    >>> data = [(torch.randn(8, 4), torch.randn(8, 1)) for _ in range(4)]
    >>> small = Workload(lambda: nn.Linear(4, 1), data, forward=lambda model, batch: model(batch[0]),
    ...                  loss=lambda output, batch: (output - batch[1]).square().mean(),
    ...                  optimizer=lambda model: torch.optim.SGD(model.parameters(), 0.1))
    >>> result = bench(small, ["fp32", "fp64"], steps=20, seeds=5)
    >>> [(row.config, row.loss.verdict) for row in result.rows]
    [('fp32', None), ('fp64', 'no difference seen')]
    """
    chosen = list(range(seeds)) if isinstance(seeds, int) else list(map(int, seeds))
    workload = as_workload(workload)
    parsed = parse_configs(configs)
    _check(workload, steps, chosen)
    device = device_of(workload.model)
    runs = [BenchRun(config, _notes(config, workload, device)) for config in parsed]
    starts: list[nn.Module] = []
    turns = random.Random(0)
    with preserve(workload.model):
        for index, seed in enumerate(chosen):
            start = _start(workload, seed)
            starts = [*starts[:1], start]
            rounds = _rounds(runs, workload, start, seed=seed, steps=steps, turns=turns)
            for done in rounds:
                if progress is not None:
                    progress("train", index * steps + done, steps * len(chosen))
    if all(run.failed for run in runs):
        raise runs[0].error or WorkloadError(
            "every configuration failed", got=runs[0].failed
        )
    drawn = len(starts) > 1 and not _have_same_weights(*starts)
    summary = summarize(
        workload, runs, chosen, steps, drawn_weights=drawn, device=device
    )
    return Bench(summary)


def _rounds(
    runs: Sequence[BenchRun],
    workload: Workload,
    start: nn.Module,
    *,
    seed: int,
    steps: int,
    turns: random.Random,
) -> Iterator[int]:
    """Train under one seed: one step of every run a round; yield the number of rounds done."""
    trainees = []
    for run in runs:
        trainee = run.begin(workload, start, seed)
        if trainee is not None:
            trainees.append((run, trainee))
    shuffled = list(trainees)
    for step, batch in enumerate(_batch_order(len(workload.batches), steps, seed)):
        turns.shuffle(
            shuffled
        )  # no run always follows the same one, whose data fill the caches
        for run, trainee in shuffled:
            run.step(trainee, step, batch, seed)
        yield step + 1
    reference: list[Any] | None = None
    for run, trainee in trainees:
        reference = run.finish(trainee, reference)


def _check(workload: Workload, steps: int, seeds: list[int]) -> None:
    calls = {
        "loss": "define loss(output, batch)",
        "optimizer": "define optimizer(model)",
    }
    missing = [part for part in calls if getattr(workload, part) is None]
    if missing:
        raise WorkloadError(
            f"{' and '.join(missing)} missing",
            where=str(workload.path or workload.name),
            expected="a workload that says how it is trained",
            do=" and ".join(calls[part] for part in missing),
        )
    are_seeds = bool(seeds) and len(set(seeds)) == len(seeds) and min(seeds) >= 0
    if steps <= WARM or not are_seeds:
        raise WorkloadError(
            "a number that cannot be",
            where="bench",
            expected=f"more than {WARM} steps, and seeds from 0 on, each once",
            got=f"steps={steps}, seeds={seeds}",
        )


def _start(workload: Workload, seed: int) -> nn.Module:
    """Return the model that all configurations of a seed start from, in training mode."""
    with process_kept():
        torch.manual_seed(seed)
        model = workload.fresh_model() or workload.model
    if model.training:
        return model
    if model is workload.model:
        model = copy.deepcopy(model)
    return model.train()


def _have_same_weights(first: nn.Module, second: nn.Module) -> bool:
    pairs = zip(first.state_dict().values(), second.state_dict().values(), strict=True)
    return all(torch.equal(a, b) for a, b in pairs if isinstance(a, Tensor))


def _batch_order(batches: int, steps: int, seed: int) -> list[int]:
    """List the batch of each step: every batch once, in an order drawn from the seed,
    then all again in another.
    """
    generator = torch.Generator().manual_seed(seed)
    order: list[int] = []
    while len(order) < steps:
        order += torch.randperm(batches, generator=generator).tolist()
    return order[:steps]


def _notes(config: BenchConfig, workload: Workload, device: torch.device) -> list[str]:
    notes = []
    if config.format == "fp16" and slow_in_fp16(device):
        warn(SLOW_FP16)
        notes.append(SLOW_FP16)
    modules = workload.model.modules()
    has_dropout = any(isinstance(m, nn.Dropout) and m.p > 0 for m in modules)
    if config.backend in ("", "inductor") and has_dropout:
        notes.append("compiled dropout draws other random numbers than the reference")
    if config.format == "tf32" and device.type == "cpu":
        notes.append("a CPU has no tf32 that torch uses by default: this may be fp32")
    return notes
