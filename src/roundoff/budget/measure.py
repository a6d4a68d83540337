"""``roundoff.budget``: measure all batches of a workload and collect a ``Budget``."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping
from dataclasses import replace

from torch import nn

from roundoff.budget.adjoint_run import AdjointRun, ManyProbesError
from roundoff.budget.decisions import FollowingMode
from roundoff.budget.precision import Sampled
from roundoff.budget.prepared import kept, prepared
from roundoff.budget.refine import refine
from roundoff.budget.run import Asked, BudgetRun
from roundoff.budget.table import Budget
from roundoff.budget.targets import metric_curve
from roundoff.budget.trial_cost import USUAL_PROBES, TrialCost, adjoint_cost
from roundoff.budget.trial_run import TrialRun
from roundoff.budget.trials import Programs, Recording, record
from roundoff.errors import FormatError, GradientPathError, WorkloadError, wrong_type
from roundoff.formats import Format, parse_format
from roundoff.ops import CallMode, Handler, watch
from roundoff.plan import Plain
from roundoff.preserve import preserve
from roundoff.workload import Workload, as_workload

#: Batches that are measured at least, so that they can be compared: those of a model
#: whose sites keep samples apart, and of others, which show one number a batch.
FEWEST_BATCHES = 2
FEWEST_MIXED_BATCHES = 4

#: Called with the name of the stage, how much is done, and of how much.
Progress = Callable[[str, int, int], None]


def budget(
    workload: Workload,
    formats: Iterable[str] = ("bf16", "fp16", "fp8_e4m3fn", "int8"),
    *,
    probes: int | None = None,
    precision: float | str | None = None,
    memory: int | None = None,
    of: str | None = None,
    around: Mapping[str, str] | None = None,
    seed: int = 0,
    trials: int | None = None,
    progress: Progress | None = None,
) -> Budget:
    """Measure what rounding each site to each format costs the target tensor.

    One forward and one backward pass of K probes a batch, whatever the number of formats
    and sites; or trials of every row, where a network is so small that they cost less:
    only what follows from a changed call runs again. Measuring ends with the batch that
    reaches the precision; the others run forward alone, and are measured too where they
    call a site that no other called. In a format whose samples share a scale, all batches
    run with every site rounded, and more are measured where those runs differ. The model
    runs in evaluation mode, and is left exactly as it was, also after an exception.

    Args:
        workload: model, batches and metric.
        formats: names of the number formats.
        probes: sign vectors a sample (K) for each output, drawn for every batch; by
            default as many as the precision needs, from 2 to 96, and from two outputs
            on at most 32 together.
        precision: standard error of a site's SQNR in dB (root mean square over sites)
            at which measuring may end: ``0.6``, ``"0.6dB"``, the default.
        memory: bytes that probe gradients may take; by default 128 MiB, or as much as
            a training step takes for the gradients of parameters.
        of: a part of the output by name, the name of a site, or ``"loss"``; when
            None what the workload is judged by, which is the whole output but for
            numbers beside larger tensors. Each named output has probes of its own.
        around: site to format; linearise around that rounded model instead of the
            unrounded one.
        seed: of the sign vectors.
        trials: most rows (a site in a format) to measure by running the model with that
            site rounded, where first order does not hold, strongest evidence first. By
            default all where that costs least, else those with strong evidence, a tenth
            of the rows or twelve a format at most, 96 a format where the model decides
            by its values; never where ``around`` is given.
        progress: called after each batch.

    Raises:
        WorkloadError: the workload cannot be measured.
        GradientPathError: nothing of the target has a gradient, and no trials are asked
            for or possible.
        NonFiniteError: the unrounded run holds NaN or Inf.
        FormatError: a format is unknown, or none is named.
    """
    workload = as_workload(workload)
    chosen = parse_formats(formats)
    if not chosen:
        raise FormatError(
            "no format to measure",
            where="formats",
            expected="such as bf16: fp32 is what it is measured against",
        )
    sampling = Sampled.of(probes, precision, memory)
    report = progress or _silent
    rounded = {site: parse_format(name) for site, name in (around or {}).items()}
    with prepared(workload.model):
        first = _followed(workload, of)
        asked = Asked(workload, chosen, of, rounded, sampling, seed, first)
        may_try = bool(first.batches) and not around
        is_free = trials is None and probes is None
        programs = Programs(workload, first)
        cost = TrialCost(programs, chosen) if may_try and is_free else None
        with kept(workload.model, first.is_pure):
            run, measured = _measured(asked, cost, report)
        if may_try and isinstance(run, AdjointRun) and trials != 0:
            measured = refine(
                workload,
                measured,
                programs,
                run.signs,
                run.rows.weight,
                trials,
                report,
            )
    if around is None and of is None and workload.metric is not None:
        curve = metric_curve(workload, run.outputs, measured)
        return replace(measured, about=replace(measured.about, metric=curve))
    return measured


def _followed(workload: Workload, target: str | None) -> Recording:
    """Return the first batch followed; no batch where the model needs gradients for it."""
    with preserve(workload.model):
        try:
            return record(workload, target, 1)
        except WorkloadError:
            return Recording(target, {}, is_pure=False)


def _measured(
    asked: Asked, cost: TrialCost | None, report: Progress
) -> tuple[BudgetRun, Budget]:
    """Measure by trials or by the adjoint, whichever costs less.

    ``cost`` is that of trials, None for the adjoint. What the adjoint costs is known
    once it knows how many probes it takes. Without any gradient trials it is.
    """
    if cost is None:
        return _by_adjoint(asked, math.inf, report)
    if not cost.is_below(adjoint_cost(USUAL_PROBES, decides=asked.decides)):
        try:
            return _by_adjoint(asked, cost.at_least, report)
        except ManyProbesError as many:
            if not cost.is_below(many.cost):
                return _by_adjoint(asked, math.inf, report)
        except GradientPathError:
            if not cost.is_below(math.inf):
                raise
    by_trial = TrialRun(asked, cost.programs.seen)
    budget = _all_batches(by_trial, by_trial.places, FollowingMode, report)
    return by_trial, budget


def _by_adjoint(
    asked: Asked, limit: float, report: Progress
) -> tuple[BudgetRun, Budget]:
    run = AdjointRun(asked, limit)
    return run, _all_batches(run, Plain(), CallMode, report)


def _all_batches(
    run: BudgetRun,
    handler: Handler,
    kind: Callable[[nn.Module, Handler], CallMode],
    report: Progress,
) -> Budget:
    """Measure as many batches as the precision needs."""
    batches = run.all_batches
    with watch(run.workload.model, handler, kind) as mode:
        for index in range(batches):
            report("budget", index, batches)
            if not run.is_precise or run.surprises(mode, index):
                run.batch(mode, index)
    report("budget", batches, batches)
    return run.budget(mode)


def _silent(stage: str, done: int, total: int) -> None:
    """Report no progress."""


def parse_formats(names: Iterable[str]) -> list[Format]:
    """Return formats by name, without repeats, in order; a text has commas between them.

    fp32, the reference, is left out. Raises ``FormatError`` for a name of none, and
    ``ArgumentError`` for what holds no names.
    """
    if isinstance(names, str):
        names = names.split(",")
    if not isinstance(names, Iterable):
        raise wrong_type("formats", names, "names of formats: ['bf16', 'int8']")
    formats = [parse_format(name) for name in names]
    return list({fmt.name: fmt for fmt in formats if fmt.name != "fp32"}.values())
