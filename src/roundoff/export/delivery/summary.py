"""Summarize everything that was asked, made, measured and refused."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

import torch

from roundoff.export.delivery.judge import count_samples
from roundoff.export.delivery.outcome import QuantizationResult, fall, keeps
from roundoff.export.delivery.records import (
    Asked,
    AverageBits,
    CalibrationData,
    ExcludedRow,
    FileRow,
    JudgedOn,
    NoteRow,
    ProofSummary,
    QuantizedCoverage,
    QuantizedSiteRow,
    Result,
    StepRow,
    Summary,
    TradeoffRow,
    WeightBytes,
)
from roundoff.export.delivery.request import Ask
from roundoff.export.delivery.sites import prove_rows, site_rows
from roundoff.export.delivery.storage import stored_bytes
from roundoff.export.delivery.tradeoff import chosen
from roundoff.export.onnx.proof import Proof
from roundoff.ops import MULTIPLYING_KINDS
from roundoff.packages import installed_version
from roundoff.plan import UNITS
from roundoff.quantize import average_bits, model_cost


def summarize(
    outcome: QuantizationResult,
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
    workload = outcome.workload
    judge = outcome.judge
    rows = site_rows(outcome, ask)
    weight_bits, value_bits = average_bits(outcome.model)
    whole = model_cost(workload.model, workload.batches[0], forward=workload.forward)
    return Summary(
        version=installed_version(),
        workload=workload.name,
        torch=torch.__version__,
        threads=torch.get_num_threads(),
        asked=_asked(ask),
        calibration=CalibrationData(
            len(workload.batches), count_samples(workload.batches)
        ),
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
        proof=None if proof is None else _proof_summary(proof, ask),
        files=tuple(files),
        notes=(*outcome.notes, *(() if proof is None else proof.remarks)),
        lost=tuple(lost),
        seconds=outcome.seconds if seconds is None else seconds,
    )


def _asked(ask: Ask) -> Asked:
    goal = ask.goal
    return Asked(
        target=goal.text if goal else None,
        kind=goal.kind if goal else None,
        value=goal.value if goal else None,
        of=ask.of,
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


def _result(outcome: QuantizationResult, ask: Ask) -> Result:
    judged = outcome.judged
    return Result(
        met=outcome.met(ask),
        sqnr_db=judged.db,
        outputs=judged.outputs,
        agreement=judged.agreement,
        metric_name=outcome.workload.metric_name,
        metric_reference=outcome.judge.metric,
        metric=judged.metric,
        drop=outcome.drop,
    )


def _coverage(
    rows: Sequence[QuantizedSiteRow], outcome: QuantizationResult
) -> QuantizedCoverage:
    states = [row.state for row in rows]
    products = [row for row in rows if row.kind in MULTIPLYING_KINDS]
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


def _proof_summary(proof: Proof, ask: Ask) -> ProofSummary:
    drop = fall(proof.metric_fp32, proof.metric)
    return ProofSummary(
        met=keeps(ask.goal, proof.outputs, drop),
        samples=proof.samples,
        metric=proof.metric,
        metric_fp32=proof.metric_fp32,
        agreement=proof.agreement,
        sqnr_db=proof.sqnr_db,
        outputs=proof.outputs,
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


def _count_formats(rows: Sequence[QuantizedSiteRow]) -> dict[str, int]:
    counts: dict[str, int] = {}
    for row in rows:
        if row.state == "quantized":
            counts[row.format] = counts.get(row.format, 0) + 1
    return dict(sorted(counts.items(), key=lambda item: -item[1]))


def _none_if_nan(value: float) -> float | None:
    return None if math.isnan(value) else value
