"""The same model in each usual format alone: accuracy against size and work."""

from __future__ import annotations

from dataclasses import replace

from roundoff.budget import Progress
from roundoff.errors import RoundoffError
from roundoff.export.delivery.choose import whole_plan
from roundoff.export.delivery.judge import ModelQuality
from roundoff.export.delivery.outcome import QuantizationResult
from roundoff.export.delivery.records import PruningCost, TradeoffRow
from roundoff.export.delivery.request import Ask
from roundoff.export.delivery.storage import stored_bytes, work
from roundoff.quantize import QuantizedModel, model_cost, quantize

#: Formats that are tried, one run each.
CANDIDATES = ("int8", "w6a8", "w4a8", "w4a4", "w8", "w4", "fp8_e4m3fn", "mxfp4")


def tradeoff(
    outcome: QuantizationResult, ask: Ask, progress: Progress | None = None
) -> tuple[TradeoffRow, ...]:
    """Measure ``CANDIDATES`` and the formats asked for, beside fp32 and what was chosen.

    Candidates are neither pruned nor trained.
    """
    workload = outcome.workload
    counted = model_cost(workload.model, workload.batches[0], forward=workload.forward)
    exact = ModelQuality(float("inf"), outcome.judge.metric, 1.0)
    rows = [_row("fp32", counted.bytes, 1.0, exact)]
    names = list(dict.fromkeys((*ask.formats, *CANDIDATES)))
    for index, name in enumerate(names):
        if progress is not None:
            progress("formats", index, len(names))
        rows.append(_candidate(name, outcome, ask, counted.by_site))
    if progress is not None:
        progress("formats", len(names), len(names))
    return (*rows, chosen(outcome))


def chosen(outcome: QuantizationResult) -> TradeoffRow:
    """Return the row of the model that was made."""
    workload = outcome.workload
    counted = model_cost(
        outcome.model.model, workload.batches[0], forward=workload.forward
    )
    share = work(_executed_formats(outcome.model), counted.by_site)
    pruning = outcome.pruning
    if share is not None and isinstance(pruning, PruningCost) and pruning.macs.before:
        share *= pruning.macs.after / pruning.macs.before
    return _row("chosen", stored_bytes(outcome.model), share, outcome.judged)


def _candidate(
    name: str, outcome: QuantizationResult, ask: Ask, macs: dict[str, int]
) -> TradeoffRow:
    whole = replace(
        ask,
        formats=("int8",),
        plan=None,
        target=None,
        pin={},
        skip=(),
        prune="",
        qat=False,
        epochs=0,
        distill=False,
    )
    try:
        model = quantize(
            outcome.workload,
            whole_plan(outcome.workload, name, whole),
            options=ask.options,
            rounding=ask.rounding,
            fold=ask.fold,
        )
    except RoundoffError as error:
        return TradeoffRow(name=name, reason=error.what)
    share = work(_executed_formats(model), macs)
    return _row(name, stored_bytes(model), share, outcome.judge.judge(model))


def _executed_formats(model: QuantizedModel) -> dict[str, str]:
    return {row.site: row.format for row in model.rows if row.format != "codes"}


def _row(
    name: str, size: int, share: float | None, judged: ModelQuality
) -> TradeoffRow:
    return TradeoffRow(
        name=name,
        bytes=size,
        work=share,
        db=judged.db,
        metric=judged.metric,
        agreement=judged.agreement,
    )
