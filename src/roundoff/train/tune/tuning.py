"""The result of ``roundoff.tune``: the plan, the runs that verified it, and what else
could be chosen.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any

from roundoff.budget import Budget, ExcludedCalls
from roundoff.plan import Plan


@dataclass(frozen=True, slots=True, kw_only=True)
class TunedRun:
    """One configuration that ran.

    Attributes:
        name: ``fp32``, ``autocast``, or the aim of a plan (``mended``: its second try).
        cost: in the unit of the cost model.
        fp32_operators: number of operators that stay in fp32.
        predicted_db: SQNR in dB that the budget predicts for its target (gradients, and
            the loss); None for fp32.
        measured_db: SQNR in dB of the gradients alone, simulated.
        native_db: the same with real casts; None where a format has no arithmetic on the
            device.
        loss_error: largest relative error of the loss at the start.
        along: (step, SQNR in dB) of the gradients at later steps.
        losses: losses of its steps.
        formats: site -> format of the plan.
    """

    name: str
    cost: float
    fp32_operators: int
    predicted_db: float | None
    measured_db: float
    native_db: float | None
    loss_error: float
    along: list[tuple[int, float]]
    losses: list[float]
    formats: Mapping[str, str]

    def to_dict(self) -> dict[str, Any]:
        """Return plain data; of ``formats`` only their number, as ``sites``."""
        row = asdict(self)
        row["sites"] = len(row.pop("formats"))
        return row


@dataclass(frozen=True, slots=True)
class ParetoPoint:
    """The most exact plan at one cost.

    Attributes:
        cost: in the unit of the cost model.
        of_fp32: cost relative to that of fp32.
        predicted_db: SQNR in dB; None without any noise.
        fp32_operators: number of operators that stay in fp32.
    """

    cost: float
    of_fp32: float
    predicted_db: float | None
    fp32_operators: int


@dataclass(frozen=True, slots=True, kw_only=True)
class RankedSite:
    """What one site in the half format costs the target.

    Attributes:
        site: the site.
        operator: its operator.
        sqnr_db: SQNR in dB; None without noise, or where it is not finite.
        stderr_db: standard error of ``sqnr_db``.
        share: part of the noise of all sites.
        activation_db, weight_db, output_db, gradient_db: SQNR in dB of one part of its
            noise alone; None without.
        note: what else to know; None without.
    """

    site: str
    operator: str
    sqnr_db: float | None
    stderr_db: float | None
    share: float
    activation_db: float | None
    weight_db: float | None
    output_db: float | None
    note: str | None
    gradient_db: float | None


@dataclass(frozen=True, slots=True, kw_only=True)
class Tuning:
    """The result of ``tune``.

    Attributes:
        version: of roundoff.
        workload: its name.
        formats: the formats that were offered.
        device: whose autocast lists are the baseline.
        half: the format of the baseline.
        cost_model: name of the cost model.
        unit: its unit.
        extra: share that the aim "more" may cost beyond autocast.
        steps: training steps of each run.
        probes: sign vectors of the budget, for each batch.
        batches: batches of the budget.
        target: what the budget is about.
        loss_scale: factor of the loss in every backward pass.
        cost_fp32: cost of all operators in fp32.
        aim: "equal", "more" or "cheapest".
        met: the plan beats autocast as ``aim`` asks.
        reason: the figures of the plan beside those of autocast, in words.
        operators: number of operators.
        runs: what ran, in order.
        pareto: the most exact plans at several costs, cheapest first.
        ranking: sites in the half format, worst first.
        notes: what else to know, in words.
        excluded: operators that the budget could not follow.
        plan: the plan that stands.
        budget: the budget that the plan was chosen by.
    """

    version: str
    workload: str
    formats: list[str]
    device: str
    half: str
    cost_model: str
    unit: str
    extra: float
    steps: int
    probes: int
    batches: int
    target: str
    loss_scale: float
    cost_fp32: float
    aim: str
    met: bool
    reason: str
    operators: int
    runs: list[TunedRun]
    pareto: list[ParetoPoint]
    ranking: list[RankedSite]
    notes: list[str]
    excluded: list[ExcludedCalls]
    plan: Plan
    budget: Budget

    def to_dict(self) -> dict[str, Any]:
        """Return plain data for JSON; without the plan and the budget."""
        names = [n for n in Tuning.__dataclass_fields__ if n not in ("plan", "budget")]
        return {name: _plain(getattr(self, name)) for name in names}


def _plain(value: Any) -> Any:
    if isinstance(value, list):
        return [_plain(item) for item in value]
    if isinstance(value, TunedRun):
        return value.to_dict()
    if isinstance(value, ParetoPoint | RankedSite | ExcludedCalls):
        return asdict(value)
    return value
