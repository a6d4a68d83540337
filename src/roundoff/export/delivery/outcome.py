"""What came of a request, before anything is written."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from roundoff.budget import OutputRow, all_met
from roundoff.export.delivery.judge import Judge, ModelQuality
from roundoff.export.delivery.records import NotPruned, PrunedRow, PruningCost, TrialRow
from roundoff.export.delivery.request import Ask, QualityTarget
from roundoff.plan import Plan
from roundoff.quantize import QuantizedModel
from roundoff.workload import Workload

#: How far a metric may be off its target: rounding of the sums that it is made of.
METRIC_ROUNDING = 1e-12


@dataclass(frozen=True, slots=True, kw_only=True)
class QuantizationResult:
    """What came of an ``Ask``.

    Attributes:
        workload: the user's, with the batches that were calibrated on.
        start: the same with what was quantized: the model itself, or what pruning left.
        judge: what the model was judged by.
        model: the quantized model.
        plan: which site runs in which format.
        judged: how the model does.
        trials: what a target's search measured.
        shares: each site's share of the noise that the budget predicts for the plan;
            empty without a target.
        pruned: what pruning did, by parameter or group of channels.
        pruning: what that saved.
        notes: remarks for the reader.
        seconds: by stage.
    """

    workload: Workload
    start: Workload
    judge: Judge
    model: QuantizedModel
    plan: Plan
    judged: ModelQuality
    trials: tuple[TrialRow, ...]
    shares: Mapping[str, float]
    pruned: tuple[PrunedRow, ...]
    pruning: PruningCost | NotPruned
    notes: tuple[str, ...]
    seconds: Mapping[str, float]

    def met(self, ask: Ask) -> bool:
        """Return True if every output of the judged model keeps its target, or there is none."""
        return keeps(ask.goal, self.judged.outputs, self.drop)

    @property
    def drop(self) -> float | None:
        """By how much the metric fell; None without one."""
        return fall(self.judge.metric, self.judged.metric)


def keeps(
    goal: QualityTarget | None, outputs: Iterable[OutputRow], drop: float | None
) -> bool:
    """Return True if these figures keep a target, or there is none.

    Args:
        goal: the target.
        outputs: each named output, judged.
        drop: by how much the metric fell; None where it is not known.
    """
    if goal is None:
        return True
    if goal.kind == "db":
        return all_met(outputs)
    most = goal.value or 0.0
    return drop is not None and drop <= most + METRIC_ROUNDING


def fall(reference: float | None, metric: float | None) -> float | None:
    """Return by how much a metric is below that of the reference; None without both."""
    if reference is None or metric is None:
        return None
    return reference - metric
