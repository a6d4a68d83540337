"""Everything that was asked, made, measured and refused: what the reports show.

``summary.json`` has the fields of these records as keys, in their order.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, version

import torch

from roundoff.export.delivery.choose import TrialRow
from roundoff.export.delivery.files import FileRow
from roundoff.export.delivery.judge import count_samples
from roundoff.export.delivery.outcome import Outcome
from roundoff.export.delivery.prune import NotPruned, PrunedRow, PruningCost
from roundoff.export.delivery.request import Ask
from roundoff.export.delivery.sites import SiteRow, prove_rows, site_rows
from roundoff.export.delivery.storage import stored_bytes
from roundoff.export.delivery.tradeoff import TradeoffRow, chosen
from roundoff.export.onnx.proof import Proof
from roundoff.export.onnx.runtime import Latency
from roundoff.plan import UNITS
from roundoff.quantize import average_bits
from roundoff.quantize.sparsity import cost

#: Kinds of calls that multiply.
PRODUCTS = ("conv", "linear", "matmul", "attention", "rnn")


@dataclass(frozen=True, slots=True, kw_only=True)
class Asked:
    """What was asked for; see ``Ask``.

    Attributes:
        target: as written; None without one.
        kind, value: ``drop`` or ``db``, and the number.
        formats: empty where a plan was given.
        plan: a plan was given.
        cost: unit of what a target's plan saves.
        observer, weights: what chose the ranges of values, how weights were rounded.
    """

    target: str | None
    kind: str | None
    value: float | None
    formats: tuple[str, ...]
    plan: bool
    prune: str
    cost: str
    skip: tuple[str, ...]
    pin: Mapping[str, str]
    qat: bool
    epochs: int
    observer: str
    weights: str


@dataclass(frozen=True, slots=True)
class Calibration:
    """The data that was calibrated on."""

    batches: int
    samples: int


@dataclass(frozen=True, slots=True)
class JudgedOn:
    """The data that the model was judged on; ``held_out``: calibration has not seen it."""

    batches: int
    samples: int
    held_out: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class Result:
    """How the quantized model does against fp32.

    Attributes:
        met: it keeps the target, or there is none.
        sqnr_db: SQNR of the output in dB.
        agreement: share of equal top choices; None for outputs without rows.
        metric_name, metric_reference, metric, drop: the workload's metric, in fp32, of
            this model, and the difference; None without one.
    """

    met: bool
    sqnr_db: float
    agreement: float | None
    metric_name: str | None
    metric_reference: float | None
    metric: float | None
    drop: float | None


@dataclass(frozen=True, slots=True)
class ExcludedRow:
    """Calls that are no site, and why."""

    operator: str
    reason: str
    count: int


@dataclass(frozen=True, slots=True, kw_only=True)
class QuantizedCoverage:
    """How many sites there are, by state, and how many of them multiply."""

    sites: int
    quantized: int
    codes: int
    fp32: int
    products: int
    products_quantized: int
    excluded: tuple[ExcludedRow, ...]


@dataclass(frozen=True, slots=True)
class AverageBits:
    """Bits a weight and a value that products read; None where there is none."""

    weight: float | None
    value: float | None


@dataclass(frozen=True, slots=True)
class WeightBytes:
    """Bytes of the weights as stored, and in fp32."""

    bytes: int
    fp32: int


@dataclass(frozen=True, slots=True)
class StepRow:
    """One step and the SQNR of the output in dB around it; None where not measured."""

    name: str
    before: float | None
    after: float | None
    note: str


@dataclass(frozen=True, slots=True)
class NoteRow:
    """A remark on a quantizer."""

    name: str
    reason: str


@dataclass(frozen=True, slots=True, kw_only=True)
class ProofSummary:
    """What ONNX Runtime computed, and how fast; the fields of ``Proof`` that are totals.

    Attributes:
        kernels: integer operators of the optimised graph, and how many there are.
        operators: all of its operators.
    """

    samples: int
    metric: float | None
    metric_fp32: float | None
    agreement: float | None
    sqnr_db: float
    simulation_db: float
    codes: int
    differing: float
    kernels: Mapping[str, int]
    operators: Mapping[str, int]
    latency: Latency | None
    bytes: int
    bytes_fp32: int
    notes: tuple[NoteRow, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Summary:
    """The whole answer of ``roundoff quantize``.

    Attributes:
        version: version of roundoff.
        workload: its name.
        torch, threads: what it ran on.
        asked, calibration, judged_on, result: the question, the data and the answer.
        sites: one row for each call; ``ProvedSiteRow`` where there is a proof.
        coverage: how many of them are quantized.
        formats: format -> number of sites, most first.
        bits: average widths.
        weights: bytes.
        chosen: the model beside single formats.
        steps: what was done, with the SQNR after it.
        trials: what a target's search measured.
        pruned, pruning: what pruning did and saved.
        tradeoff: each usual format alone; empty where not asked for.
        proof: what ONNX Runtime did; None without an export.
        files: what was written.
        notes: remarks for the reader.
        lost: what AMCT's record cannot hold.
        seconds: by stage.
    """

    version: str
    workload: str
    torch: str
    threads: int
    asked: Asked
    calibration: Calibration
    judged_on: JudgedOn
    result: Result
    sites: tuple[SiteRow, ...]
    coverage: QuantizedCoverage
    formats: Mapping[str, int]
    bits: AverageBits
    weights: WeightBytes
    chosen: TradeoffRow
    steps: tuple[StepRow, ...]
    trials: tuple[TrialRow, ...]
    pruned: tuple[PrunedRow, ...]
    pruning: PruningCost | NotPruned
    tradeoff: tuple[TradeoffRow, ...]
    proof: ProofSummary | None
    files: tuple[FileRow, ...]
    notes: tuple[str, ...]
    lost: tuple[str, ...]
    seconds: Mapping[str, float]


def summarize(
    outcome: Outcome,
    ask: Ask,
    *,
    tradeoff: Sequence[TradeoffRow] = (),
    proof: Proof | None = None,
    files: Sequence[FileRow] = (),
    lost: Sequence[str] = (),
    seconds: Mapping[str, float] | None = None,
) -> Summary:
    """Return the answer.

    Args:
        outcome: what was made.
        ask: what was asked for.
        tradeoff: the model in single formats.
        proof: what ONNX Runtime did.
        files: what was written.
        lost: what AMCT's record cannot hold.
        seconds: by stage; those of the outcome by default.
    """
    workload, judge = outcome.workload, outcome.judge
    rows = site_rows(outcome, ask)
    weight_bits, value_bits = average_bits(outcome.model)
    whole = cost(workload.model, workload.batches[0], forward=workload.forward)
    return Summary(
        version=_version(),
        workload=workload.name,
        torch=torch.__version__,
        threads=torch.get_num_threads(),
        asked=_asked(ask),
        calibration=Calibration(len(workload.batches), count_samples(workload.batches)),
        judged_on=JudgedOn(
            len(judge.workload.batches), judge.samples, bool(workload.held_out)
        ),
        result=_result(outcome, ask),
        sites=rows if proof is None else prove_rows(rows, proof),
        coverage=_coverage(rows, outcome),
        formats=_count_formats(rows),
        bits=AverageBits(_none_if_nan(weight_bits), _none_if_nan(value_bits)),
        weights=WeightBytes(stored_bytes(outcome.model), whole.bytes),
        chosen=chosen(outcome),
        steps=tuple(
            StepRow(s.name, _none_if_nan(s.before), _none_if_nan(s.after), s.note)
            for s in outcome.model.steps
        ),
        trials=outcome.trials,
        pruned=outcome.pruned,
        pruning=outcome.pruning,
        tradeoff=tuple(tradeoff),
        proof=None if proof is None else _proof_summary(proof),
        files=tuple(files),
        notes=outcome.notes,
        lost=tuple(lost),
        seconds=outcome.seconds if seconds is None else seconds,
    )


def _asked(ask: Ask) -> Asked:
    goal = ask.goal
    return Asked(
        target=goal.text if goal else None,
        kind=goal.kind if goal else None,
        value=goal.value if goal else None,
        formats=ask.formats if ask.plan is None else (),
        plan=ask.plan is not None,
        prune=ask.prune,
        cost=UNITS[ask.cost],
        skip=ask.skip,
        pin=dict(ask.pin),
        qat=ask.qat,
        epochs=ask.epochs,
        observer=ask.rounding.observer,
        weights=ask.rounding.weights,
    )


def _result(outcome: Outcome, ask: Ask) -> Result:
    judged = outcome.judged
    return Result(
        met=outcome.met(ask),
        sqnr_db=judged.db,
        agreement=judged.agreement,
        metric_name=outcome.workload.metric_name,
        metric_reference=outcome.judge.metric,
        metric=judged.metric,
        drop=outcome.drop,
    )


def _coverage(rows: Sequence[SiteRow], outcome: Outcome) -> QuantizedCoverage:
    states = [row.state for row in rows]
    products = [row for row in rows if row.kind in PRODUCTS]
    return QuantizedCoverage(
        sites=len(rows),
        quantized=states.count("quantized"),
        codes=states.count("codes"),
        fp32=states.count("fp32"),
        products=len(products),
        products_quantized=sum(row.state == "quantized" for row in products),
        excluded=tuple(
            ExcludedRow(e.operator, e.reason, e.count)
            for e in outcome.model.graph.excluded
        ),
    )


def _proof_summary(proof: Proof) -> ProofSummary:
    return ProofSummary(
        samples=proof.samples,
        metric=proof.metric,
        metric_fp32=proof.metric_fp32,
        agreement=proof.agreement,
        sqnr_db=proof.sqnr_db,
        simulation_db=proof.simulation_db,
        codes=proof.codes,
        differing=proof.differing,
        kernels=dict(proof.kernels.integer),
        operators=dict(proof.kernels.counts),
        latency=proof.latency,
        bytes=proof.bytes,
        bytes_fp32=proof.bytes_fp32,
        notes=tuple(NoteRow(name, reason) for name, reason in proof.notes.items()),
    )


def _count_formats(rows: Sequence[SiteRow]) -> dict[str, int]:
    counts: dict[str, int] = {}
    for row in rows:
        if row.state == "quantized":
            counts[row.format] = counts.get(row.format, 0) + 1
    return dict(sorted(counts.items(), key=lambda item: -item[1]))


def _none_if_nan(value: float) -> float | None:
    return None if math.isnan(value) else value


def _version() -> str:
    try:
        return version("roundoff")
    except PackageNotFoundError:
        return "0"
