"""``roundoff.tune``: the plan of formats for training that beats built-in autocast,
found by one budget and verified.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any, Literal

import torch

from roundoff.budget import Budget, Goal, Progress, parse_formats
from roundoff.errors import PlanError
from roundoff.formats import parse_format
from roundoff.ops import (
    MULTIPLYING_KINDS,
    SLOW_FP16,
    round_gradient,
    slow_in_fp16,
)
from roundoff.plan import UNITS, Plan
from roundoff.train import (
    BATCHES,
    ParetoPoint,
    RankedSite,
    Search,
    SimulatedAutocast,
    SimulatedFormats,
    Trial,
    Trials,
    TunedRun,
    Tuning,
    no_loss,
    trainable,
)
from roundoff.workload import Workload, as_workload

Aim = Literal["equal", "more", "cheapest"]
AIMS: Mapping[str, str] = {
    "equal": "the most exact plan that costs no more than built-in autocast",
    "more": "the most exact plan that costs at most {extra:.0%} more",
    "cheapest": "the cheapest plan as exact as built-in autocast",
}
#: Runs at most: fp32, built-in autocast, and plans.
RUNS = 5
#: fp32, built-in autocast, and one plan.
LEAST_RUNS = 3
STEPS = 20
EXTRA = 0.2
#: Formats of torch's autocast.
HALF = ("bf16", "fp16")
#: What a second try must be predicted beyond what the first one missed, in dB.
MARGIN_DB = 0.5
#: The same where the first one has no finite SQNR.
UNKNOWN_DB = 3.0
#: Room for the rounding of sums of costs.
COST_SLACK = 1 + 1e-6


def tune(
    workload: Workload | str | Path,
    formats: Iterable[str] = ("bf16",),
    *,
    loss: bool = True,
    aim: Aim = "equal",
    extra: float = EXTRA,
    cost: str = "bytes",
    cost_table: Any = None,
    pin: Mapping[str, str] | None = None,
    allow: Mapping[str, Sequence[str]] | None = None,
    tie: str = "site",
    device: str | None = None,
    steps: int = STEPS,
    runs: int = RUNS,
    batches: int = BATCHES,
    probes: int | None = None,
    seed: int = 0,
    budget: Budget | None = None,
    progress: Progress | None = None,
) -> Tuning:
    """Find which operators must stay in high precision in training, and prove it over real steps.

    Judged are the gradients against those of built-in autocast, and no named output by
    itself: several count by what the loss makes of each. One budget of the gradients
    (and the ``loss``) prices every site in every format. The built-in autocast's own
    choice of formats, by its lists for ``device`` ("cpu", "cuda", ...; by default the
    model's), is the baseline: in bf16 or fp16, of those offered the one predicted more
    exact. ``aim`` says which plan is wanted: "equal" (the most
    exact within autocast's cost), "more" (within ``extra`` above it) or "cheapest" (as
    exact as autocast). Costs are ``plan.cost``'s of the forward pass; the backward pass
    moves the same tensors and their gradients in the same formats.

    Then at most ``runs`` configurations train for ``steps`` real steps each, formats
    simulated: fp32, autocast, the plan of the aim (once more, from a budget measured
    around it, if it misses), and the other plans. Losses stay in fp32. Without an
    optimizer in the workload plain SGD takes the steps. ``tie`` chooses formats by
    operator type, as other tools' lists do (see ``roundoff.plan``). ``budget`` is that
    of an earlier ``tune`` of the same workload and lists, to choose by another cost or aim without
    measuring again.

    The model is left exactly as it was. Raises ``WorkloadError`` (no loss, no trainable
    parameters), ``FormatError``, ``PlanError``, ``NonFiniteError``,
    ``GradientPathError``.
    """
    _check_request(aim, runs, steps, extra)
    Goal(tie=tie)  # raises before anything is measured
    offered = [f.name for f in parse_formats(formats)]
    if not offered:
        raise PlanError(
            "no format below fp32 to tune",
            where="formats",
            expected="such as bf16",
            got="fp32",
        )
    workload = as_workload(workload)
    if workload.loss is None:
        raise no_loss(workload)
    halves = [name for name in offered if name in HALF] or ["bf16"]
    parameter = next(iter(trainable(workload).values()))
    search = Search(
        workload=workload,
        offered=offered,
        measured=list(dict.fromkeys([*offered, *halves])),
        halves=halves,
        model_device=parameter.device.type,
        device=device or parameter.device.type,
        loss=loss,
        cost=cost,
        table=cost_table,
        pin=dict(pin or {}),
        allow=dict(allow or {}),
        tie=tie,
        batches=batches,
        probes=probes,
        seed=seed,
        progress=progress,
    )
    search.baseline(budget)
    trials = Trials(
        workload, steps=steps, batches=batches, seed=seed, scale=search.scale
    )
    verification = _Verification(search, trials, aim, extra=extra, most_runs=runs)
    verification.run_all()
    return verification.tuning()


def _check_request(aim: str, runs: int, steps: int, extra: float) -> None:
    if aim not in AIMS:
        raise PlanError(
            "unknown aim", where="aim", expected=", ".join(AIMS), got=repr(aim)
        )
    if runs < LEAST_RUNS or steps < 1 or not extra >= 0:
        raise PlanError(
            "too little to verify with",
            where="runs, steps or extra",
            expected="3 runs or more (fp32, autocast, a plan), 1 step or more, extra of 0 or more",
            got=f"runs={runs}, steps={steps}, extra={extra}",
        )


class _Verification:
    """Real training steps of fp32, autocast and plans, and the plan that stands."""

    def __init__(
        self, search: Search, trials: Trials, aim: str, *, extra: float, most_runs: int
    ) -> None:
        self.search = search
        self.trials = trials
        self.aim = aim
        self.extra = extra
        self.most_runs = most_runs
        self.runs: list[TunedRun] = []
        self.pareto: list[ParetoPoint] = []
        self.ranking: list[RankedSite] = []

    def run_all(self) -> None:
        """Run fp32, autocast, the plan of the aim, another try at it if it misses, and
        the other plans.
        """
        search = self.search
        self._keep("fp32", {}, self.trials.reference)
        autocast = partial(SimulatedAutocast, parse_format(search.half), search.device)
        self._keep("autocast", search.autocast, self._run(autocast))
        others = {aim: search.plan(aim, self.extra) for aim in AIMS if aim != self.aim}
        chosen = search.plan(self.aim, self.extra)
        self._try(self.aim, chosen)
        self.pareto = search.pareto()
        self.ranking = search.ranking()
        if not self._is_met(self.runs[-1]) and len(self.runs) < self.most_runs:
            self._mend(chosen)
        for aim, formats in others.items():
            if len(self.runs) < self.most_runs:
                self._try(aim, formats)

    def _mend(self, missed: dict[str, str]) -> None:
        """Choose once more, from a budget measured around the plan that missed."""
        missing_db = self._autocast().measured_db - self.runs[-1].measured_db
        shift = max(missing_db, 0.0) + MARGIN_DB
        if not math.isfinite(missing_db):
            shift = UNKNOWN_DB
        self.search.measure_around(missed)
        mended = self.search.plan(self.aim, self.extra, shift)
        if mended != missed:
            self._try("mended", mended)

    def _run(self, make: Callable[[], SimulatedFormats]) -> Trial:
        if self.search.progress is not None:
            self.search.progress("runs", len(self.runs), self.most_runs)
        return self.trials.run(make)

    def _try(self, name: str, formats: dict[str, str]) -> None:
        parsed = {site: parse_format(f) for site, f in formats.items()}
        self._keep(name, formats, self._run(lambda: SimulatedFormats(parsed)))

    def _keep(self, name: str, formats: Mapping[str, str], trial: Trial) -> None:
        run = TunedRun(
            name=name,
            cost=self.search.problem.cost_of(formats),
            fp32_operators=self.search.fp32_operators(formats),
            predicted_db=_finite_or_none(self.search.budget.predict(formats).db),
            measured_db=trial.measured_db,
            native_db=self._native_db(name, formats),
            loss_error=trial.loss_error,
            along=trial.along,
            losses=trial.losses,
            formats=dict(formats),
        )
        self.runs.append(run)

    def _native_db(self, name: str, formats: Mapping[str, str]) -> float | None:
        """Measure with real casts; None for fp32, and where the device has no fast
        arithmetic for them.
        """
        search = self.search
        is_autocast = name == "autocast"
        used = set(formats.values()) | ({search.half} if is_autocast else set())
        # a CPU converts fp16 to fp32 and back: a simulation too, and a slow one
        is_slow = "fp16" in used and search.model_device == "cpu"
        if name == "fp32" or is_slow or not used <= set(HALF):
            return None
        if is_autocast:
            return self.trials.natively(search.half, policy=search.device)
        about = {"forwards": search.budget.about.forwards}
        return self.trials.natively(Plan.from_formats(formats, about))

    def _autocast(self) -> TunedRun:
        return self.runs[1]

    def _is_met(self, run: TunedRun) -> bool:
        """Return True if a run beats autocast as the aim asks."""
        autocast = self._autocast()
        allowed = 1 + (self.extra if self.aim == "more" else 0.0)
        if run.cost > autocast.cost * allowed * COST_SLACK:
            return False
        if self.aim == "cheapest":
            return run.measured_db >= autocast.measured_db
        return run.measured_db > autocast.measured_db

    def tuning(self) -> Tuning:
        """Return the result: the best plan of the aim."""
        search = self.search
        budget = search.budget
        tries = [run for run in self.runs if run.name in (self.aim, "mended")]
        best = max(tries, key=lambda run: (self._is_met(run), run.measured_db))
        return Tuning(
            version=budget.about.version,
            workload=search.workload.name,
            formats=search.offered,
            device=search.device,
            half=search.half,
            cost_model=search.cost,
            unit=UNITS[search.cost],
            extra=self.extra,
            steps=self.trials.steps,
            probes=budget.about.probes,
            batches=budget.about.samples,
            target=budget.about.target.name,
            loss_scale=search.scale,
            cost_fp32=search.problem.cost_of({}),
            aim=self.aim,
            met=self._is_met(best),
            reason=_reason(best, self._autocast()),
            operators=len(search.problem.info),
            runs=self.runs,
            pareto=self.pareto,
            ranking=self.ranking,
            notes=[*_notes(search), *_wide_products(search, best, self._autocast())],
            excluded=list(budget.about.excluded),
            plan=self._plan(best),
            budget=budget,
        )

    def _plan(self, best: TunedRun) -> Plan:
        search = self.search
        autocast = self._autocast()
        note = AIMS[self.aim].format(extra=self.extra)
        plan = search.problem.plan(best.formats, asked=None, note=note)
        about = {
            **plan.about,
            "predicted_db": best.predicted_db,
            "measured_db": _finite_or_none(best.measured_db),
            "autocast_db": _finite_or_none(autocast.measured_db),
            "autocast_cost": autocast.cost,
            "autocast_lists": search.device,
            "target": search.budget.about.target.name,
            "steps": self.trials.steps,
            "fp32_operators": best.fp32_operators,
            "autocast_fp32_operators": autocast.fp32_operators,
        }
        return Plan(plan.rules, plan.default, about)


def _reason(best: TunedRun, autocast: TunedRun) -> str:
    gain = best.measured_db - autocast.measured_db
    cost = best.cost / autocast.cost - 1 if autocast.cost else 0.0
    return (
        f"{best.measured_db:.1f} dB against {autocast.measured_db:.1f} dB of built-in autocast ({gain:+.1f}), cost "
        f"{cost:+.1%}, operators in fp32: {best.fp32_operators} against {autocast.fp32_operators}"
    )


def _wide_products(search: Search, best: TunedRun, autocast: TunedRun) -> list[str]:
    """Warn of matrix products in fp32 that autocast runs in half, where the cost model
    does not count their time.
    """
    if search.cost not in ("bytes", "operators"):
        return []
    in_fp32 = [
        site.site
        for site in search.budget.sites
        if site.kind in MULTIPLYING_KINDS
        and site.site in autocast.formats
        and site.site not in best.formats
    ]
    if not in_fp32:
        return []
    products = "matrix product" if len(in_fp32) == 1 else "matrix products"
    note = (
        f"The plan runs {len(in_fp32)} {products} in fp32 that autocast runs in "
        f"{search.half} ({in_fp32[0]} ...): counted in {search.cost} that is no more, but "
        "where products take the time, a step is slower. --cost bitops or seconds leaves them."
    )
    return [note]


def _rounds_gradients(name: str) -> bool:
    third = torch.tensor([1.0, 1 / 3])  # no binary format holds it
    rounded = round_gradient(third, parse_format(name), written=False)
    return not torch.equal(rounded, third)


def _finite_or_none(value: float) -> float | None:
    return value if math.isfinite(value) else None


def _notes(search: Search) -> list[str]:
    notes = [
        "Measured in simulated formats ('native': with real casts); the budget takes attention by its plain formula."
    ]
    if search.workload.optimizer is None:
        notes.append("The workload has no optimizer: plain SGD took the steps.")
    if "fp16" in search.offered and slow_in_fp16(torch.device(search.model_device)):
        notes.append(f"{SLOW_FP16}.")
    if len(search.halves) > 1:
        halves = " and ".join(search.halves)
        notes.append(
            f"Built-in autocast may run in {halves} too: {search.half} is predicted more exact, and stands here."
        )
    if search.half not in search.offered:
        offered = ", ".join(search.offered)
        notes.append(f"Built-in autocast has no {offered}: it ran in {search.half}.")
    straight = [name for name in search.offered if not _rounds_gradients(name)]
    if straight:
        notes.append(
            f"{', '.join(straight)} leave gradients in fp32 (straight through)."
        )
    if not search.budget.about.vendor_kernels:
        notes.append(
            "oneDNN and cuDNN were off in the budget: a fused operator has no second derivative there."
        )
    return notes
