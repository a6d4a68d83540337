"""``roundoff.quantize``: a trained network in few bits, alone or proved, in a folder."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, overload

from torch import nn

from roundoff.budget import Progress, TargetText, parse_aim
from roundoff.errors import QuantizationError
from roundoff.export import (
    SAMPLES,
    Ask,
    Chosen,
    Folder,
    Judge,
    NotPruned,
    Proof,
    Pruned,
    PruningCost,
    QuantizationResult,
    Summary,
    TradeoffRow,
    calibration,
    check_free,
    check_workload,
    choose,
    export_fake_quant,
    lost_zeros,
    nothing_pruned,
    prove,
    prune,
    pruning_cost,
    replaced_folder,
    save_model,
    summarize,
    tradeoff,
    train_again,
    train_quantized,
    with_config,
    write_checkpoint,
    write_record,
)
from roundoff.plan import Plan
from roundoff.quantize import (
    Options,
    PipelineStep,
    QuantizedModel,
    Rounding,
    finish_,
    unrounded,
)
from roundoff.quantize import quantize as quantize_by_plan
from roundoff.report import write_json, write_quantize
from roundoff.unforeseen import going_on
from roundoff.workload import Workload

_UNTRAINED = (
    "nothing was trained after pruning: --epochs 2 (and --distill) "
    "brings back much of what it costs"
)
_WITHOUT_ONNX = ("model.onnx", "fake_quant.onnx", "fp32.onnx")


@dataclass(frozen=True, slots=True, kw_only=True)
class Delivery:
    """What ``quantize`` made and wrote.

    Attributes:
        model: the simulation in PyTorch.
        plan: which site runs in which format.
        summary: everything that was asked, measured and refused, as in ``summary.json``.
        folder: where the files are.
    """

    model: QuantizedModel
    plan: Plan
    summary: Summary
    folder: Path

    @property
    def met(self) -> bool:
        """True if model and file keep the target, or there is none."""
        return self.summary.met


@overload
def quantize(
    model: nn.Module | Workload,
    plan: Plan | Mapping[str, str] | str | Path,
    batches: Iterable[Any] | None = None,
    *,
    forward: Callable[[nn.Module, Any], Any] | None = None,
    options: Options | None = None,
    rounding: Rounding | None = None,
    fold: bool = True,
    spread: bool = True,
    skip: Iterable[str] = (),
) -> QuantizedModel: ...


@overload
def quantize(
    model: Workload | str | Path,
    plan: Plan | str | Path | None = None,
    *,
    output: str | Path,
    formats: Sequence[str] = ("int8",),
    target: TargetText | None = None,
    metric_drop: float | str | None = None,
    of: str | None = None,
    skip: Iterable[str] = (),
    pin: Mapping[str, str] | None = None,
    cost: str = "bitops",
    options: Options | None = None,
    rounding: Rounding | None = None,
    config: str | Path | None = None,
    samples: int | None = None,
    prune: str = "",
    qat: bool = False,
    epochs: int = 0,
    lr: float = 1e-4,
    distill: bool = False,
    tradeoff: bool = True,
    onnx: bool = True,
    checkpoint: bool = False,
    overwrite: bool = False,
    progress: Progress | None = None,
) -> Delivery: ...


def quantize(
    model: nn.Module | Workload | str | Path,
    plan: Any = None,
    batches: Iterable[Any] | None = None,
    *,
    output: str | Path | None = None,
    **arguments: Any,
) -> QuantizedModel | Delivery:
    """Quantize a model by a plan; with ``output`` also choose, export and prove it.

    ``quantize(model, plan, batches)`` returns the model in the formats of a plan,
    calibrated on the batches; see ``roundoff.quantize.quantize`` for its arguments.

    ``quantize(workload, output=folder)`` is ``roundoff quantize``: it prunes, chooses a
    format for each site, calibrates, trains, judges, exports and proves as asked, writes
    the files of ``FILES`` and returns a ``Delivery``.

    Args:
        model: a model or workload; with ``output`` a workload or the path of one. It is
            left as it was.
        plan: which site runs in which format.
        batches: calibration data; by default the workload's.
        output: folder for all files; new or empty.
        **arguments: without ``output`` those of ``roundoff.quantize.quantize``. With it:
            ``formats``, ``target``, ``metric_drop``, ``of``, ``skip``, ``pin``, ``cost``,
            ``options``, ``rounding``, ``samples``, ``prune``, ``qat``, ``epochs``, ``lr``,
            ``distill`` and ``tradeoff``, the fields of ``roundoff.export.Ask``;
            ``config``, an AMCT file (``.cfg``, ``.json``) in the place of a plan;
            ``onnx=False``, to export and prove no file;
            ``checkpoint=True``, to write the weights for compressed-tensors too;
            ``overwrite=True``, to replace the files of an earlier run;
            ``progress``, called as ``progress(stage, done, total)``.

    Raises:
        OutputError: the folder is in use or cannot be written; nothing was run.
        QuantizationError: a request that cannot be met, a target in a metric without
            one, training without a loss, or a model that cannot be quantized.
        InfeasibleError: no plan can meet the target.
        PlanError, PatternError: a plan for another model; a pattern that names no site.

    Example:
        >>> import tempfile, torch
        >>> net = nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 4))
        >>> workload = Workload(net, [torch.randn(32, 8) for _ in range(4)])
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     made = quantize(
        ...         workload, output=folder, target="20dB", onnx=False, tradeoff=False
        ...     )
        ...     (Path(folder) / "report.html").exists()
        True
        >>> made.met, made.summary.formats
        (True, {'int8': 2})
    """
    if output is None:
        return _by_plan(model, plan, batches, **arguments)
    if batches is not None:
        raise QuantizationError(
            "the workload has the batches", where="batches", got="batches beside output"
        )
    return _delivered(model, plan, Path(output), **arguments)


def _by_plan(model: Any, plan: Any, batches: Any, **arguments: Any) -> QuantizedModel:
    if plan is None:
        raise QuantizationError(
            "which formats, and what of it should be written?",
            where="roundoff.quantize",
            expected="a plan or a format such as int8, or output=, a folder",
        )
    return quantize_by_plan(model, plan, batches, **arguments)


def _delivered(
    model: Any,
    plan: Plan | str | Path | None,
    output: Path,
    *,
    config: str | Path | None = None,
    onnx: bool = True,
    checkpoint: bool = False,
    overwrite: bool = False,
    progress: Progress | None = None,
    **asked: Any,
) -> Delivery:
    ask = _ask(plan, **asked)
    check_free(output, overwrite)
    workload = model if isinstance(model, Workload) else Workload.load(model)
    if config is not None:
        ask = with_config(ask, config, workload.model)
    with replaced_folder(output) as folder:
        outcome = make(workload, ask, progress)
        summary = write(
            outcome, ask, folder, onnx=onnx, checkpoint=checkpoint, progress=progress
        )
    return Delivery(
        model=outcome.model, plan=outcome.plan, summary=summary, folder=output
    )


def _ask(
    plan: Plan | str | Path | None,
    *,
    formats: Sequence[str] = ("int8",),
    target: TargetText | None = None,
    metric_drop: float | str | None = None,
    skip: Iterable[str] = (),
    pin: Mapping[str, str] | None = None,
    options: Options | None = None,
    rounding: Rounding | None = None,
    **asked: Any,
) -> Ask:
    aim = parse_aim(target, metric_drop)
    if aim.metric_drop is not None and target is None:
        target = f"{aim.metric_drop * 100:.15g}%"
    return Ask(
        target=target,
        plan=plan if plan is None or isinstance(plan, Plan) else Plan.load(plan),
        formats=tuple(formats),
        skip=tuple(skip),
        pin=dict(pin or {}),
        options=options or Options(),
        rounding=rounding or Rounding(),
        **asked,
    )


def make(
    workload: Workload, ask: Ask, progress: Progress | None = None
) -> QuantizationResult:
    """Make everything that was asked for but files; the workload is left as it was.

    Raises:
        QuantizationError: a target in a metric without one, training without a loss, or
            what ``roundoff.quantize`` refuses.
        InfeasibleError: no plan can meet the target.
        PlanError, PatternError: a plan for another model; a pattern that names no site.
    """
    check_workload(workload, ask)
    sqnr = None if ask.goal is None else ask.goal.sqnr
    workload = workload.judging(ask.of, () if sqnr is None else sqnr.patterns)
    log = _Log(notes=list(ask.notes), progress=progress)
    with log.timed("judge"):
        judge = Judge(workload, sqnr)
    whole = calibration(
        workload, SAMPLES if ask.samples is None else ask.samples, ask.batches
    )
    pruned = _prune(whole, workload, ask, judge, log)
    chosen = _choose(pruned, ask, log, progress)
    model = chosen.model
    if ask.qat:
        _train_quantized(model, pruned, workload, ask, judge, log)
    model.eval()
    model.steps = log.steps
    log.notes += lost_zeros(model, pruned.masks, ask.pruning)
    with log.timed("judge"):
        judged = judge.judge(model)
    saved: PruningCost | NotPruned = NotPruned()
    if pruned.rows:
        with log.timed("cost of the pruned model"):
            saved = pruning_cost(whole, pruned.workload)
    return QuantizationResult(
        workload=whole,
        start=pruned.workload,
        judge=judge,
        model=model,
        plan=chosen.plan,
        judged=judged,
        trials=chosen.trials,
        shares=chosen.shares,
        pruned=pruned.rows,
        pruning=saved,
        notes=tuple(log.notes),
        seconds=log.seconds,
    )


@dataclass
class _Log:
    """What was done so far: steps, remarks for the reader, seconds by stage.

    ``progress`` hears when a stage begins and ends.
    """

    steps: list[PipelineStep] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    seconds: dict[str, float] = field(default_factory=dict)
    progress: Progress | None = None

    @contextmanager
    def timed(self, stage: str) -> Iterator[None]:
        start = time.perf_counter()
        self._report(stage, 0)
        with going_on(stage):
            yield
        self._report(stage, 1)
        taken = time.perf_counter() - start
        self.seconds[stage] = self.seconds.get(stage, 0.0) + taken

    def _report(self, stage: str, done: int) -> None:
        if self.progress is not None:
            self.progress(stage, done, 1)


def _prune(
    whole: Workload, workload: Workload, ask: Ask, judge: Judge, log: _Log
) -> Pruned:
    """Prune if asked, and train what is left."""
    if ask.pruning is None:
        return Pruned(whole)
    with log.timed("prune"):
        pruned = prune(whole, ask.pruning)
        model = pruned.workload.model
        db = judge.judge(model).db
        log.steps.append(PipelineStep(f"prune {ask.prune}", math.inf, db, ""))
        nothing = nothing_pruned(pruned.rows)
        if nothing is not None:
            log.notes.append(nothing)
    if ask.epochs:
        with log.timed("train"):
            train_again(model, workload, ask)
            after = judge.judge(model).db
            log.steps.append(
                PipelineStep("training", db, after, f"{ask.epochs} epochs")
            )
    else:
        log.notes.append(_UNTRAINED)
    if pruned.masks:
        finish_(model)
    return pruned


def _choose(pruned: Pruned, ask: Ask, log: _Log, progress: Progress | None) -> Chosen:
    """Choose formats and quantize by them."""
    if pruned.masks:
        ask = replace(ask, rounding=ask.rounding.keeping_zeros())
    with log.timed("quantize"):
        chosen = choose(pruned.workload, ask, progress)
    model = chosen.model
    if chosen.note:
        log.notes.append(chosen.note)
    log.notes += model.remarks
    log.notes += [f"{name}: {note}" for name, note in model.notes.items()]
    beside = "" if ask.pruning is None else "beside the pruned model"
    for step in model.steps:
        note = "; ".join(filter(None, (step.note, beside)))
        log.steps.append(replace(step, note=note))
    return chosen


def _train_quantized(
    model: QuantizedModel,
    pruned: Pruned,
    workload: Workload,
    ask: Ask,
    judge: Judge,
    log: _Log,
) -> None:
    with log.timed("train with quantization"):
        before = judge.judge(model).db
        log.notes += train_quantized(model, pruned.masks, workload, ask)
        after = judge.judge(model).db
        log.steps.append(
            PipelineStep("qat", before, after, f"lsq, lsq+, {ask.epochs} epochs")
        )


def write(
    outcome: QuantizationResult,
    ask: Ask,
    folder: Folder,
    *,
    onnx: bool = True,
    checkpoint: bool = False,
    progress: Progress | None = None,
) -> Summary:
    """Write all files into a folder and return the summary."""
    log = _Log(seconds=dict(outcome.seconds))
    model = outcome.model
    rows: tuple[TradeoffRow, ...] = ()
    if ask.tradeoff:
        with log.timed("other formats"):
            rows = tradeoff(outcome, ask, progress)
    folder.write("model.pt", lambda path: save_model(model, path))
    outcome.plan.save(folder.path / "plan.toml")
    record = model.record()
    record.save(folder.path / "record.toml")
    lost = folder.write("record.txt", lambda path: write_record(record, path))
    if checkpoint:
        folder.write("checkpoint", lambda path: write_checkpoint(model, path))
    proof = None
    if onnx:
        with log.timed("export and proof"):
            proof = _export(outcome, folder, progress)
    else:
        folder.reasons |= dict.fromkeys(_WITHOUT_ONNX, "--no-onnx")
    summary = summarize(
        outcome,
        ask,
        tradeoff=rows,
        proof=proof,
        files=folder.rows(checkpoint=checkpoint),
        lost=lost or (),
        seconds=log.seconds,
    )
    write_quantize(summary, folder.path / "report.html")
    write_json(summary, folder.path / "summary.json")
    return summary


def _export(
    outcome: QuantizationResult, folder: Folder, progress: Progress | None
) -> Proof | None:
    """Write the ONNX files and prove the quantized one; None where it cannot be."""

    def report(done: int) -> None:
        if progress is not None:
            progress("export and proof", done, 2)

    def write_proved(path: Path) -> Proof:
        return prove(
            outcome.workload,
            outcome.model,
            path,
            path.with_name("fp32.onnx"),
            exact=unrounded(outcome.model, outcome.start),
            pack=True,
            target=outcome.judge.target,
        )

    report(0)
    proof = folder.write("model.onnx", write_proved)
    report(1)
    if proof is None:  # not proved, so not handed out
        folder.withdraw("model.onnx", "")
        folder.withdraw("fp32.onnx", "only beside model.onnx")
    folder.write(
        "fake_quant.onnx",
        lambda path: export_fake_quant(outcome.workload, outcome.model, path),
    )
    report(2)
    return proof
