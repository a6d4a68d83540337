"""``roundoff.tune``: the plan of formats for training that beats built-in autocast, found by one budget and verified."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from typing import Any, Literal

import torch

from roundoff.budget import Budget, Progress, parse_formats
from roundoff.errors import PlanError, WorkloadError
from roundoff.formats import parse_format
from roundoff.ops import MULTIPLYING_KINDS, SLOW_FP16, round_gradient, slow_in_fp16
from roundoff.plan import UNITS, Plan
from roundoff.train import BATCHES, Autocast, Search, Straight, Trial, Trials, trainable
from roundoff.workload import Workload

Aim = Literal["equal", "more", "cheapest"]
AIMS: Mapping[str, str] = {
    "equal": "the most exact plan that costs no more than built-in autocast",
    "more": "the most exact plan that costs at most {extra:.0%} more",
    "cheapest": "the cheapest plan as exact as built-in autocast",
}
#: Runs at most: fp32, built-in autocast, and plans.
RUNS, STEPS, EXTRA = 5, 20, 0.2


@dataclass(frozen=True)
class TunedRun:
    """One configuration that ran: ``fp32``, ``autocast``, or a plan by its aim (``mended``: its second try).

    ``predicted_db`` counts what the budget's target holds (gradients, and the loss), ``measured_db`` the gradients alone,
    simulated, ``native_db`` the same with real casts (None where a format has no arithmetic on the device). ``loss_error``
    is the largest relative error of the loss at the start, ``along`` the SQNR of the gradients at later steps.
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


@dataclass(frozen=True)
class Tuning:
    """What ``tune`` found. ``plan`` is the plan that stands (of ``aim``), ``met`` whether it beats autocast as asked."""

    plan: Plan
    aim: str
    met: bool
    reason: str
    runs: list[TunedRun]
    pareto: list[dict[str, Any]]
    ranking: list[dict[str, Any]]
    operators: int
    budget: Budget
    about: Mapping[str, Any]
    notes: list[str]

    def summary(self) -> dict[str, Any]:
        """Plain data for JSON and the terminal; the formats of each run are in the plan, or left out."""
        runs = []
        for run in self.runs:
            row = asdict(run)
            row["sites"] = len(row.pop("formats"))
            runs.append(row)
        return {
            **self.about,
            "aim": self.aim,
            "met": self.met,
            "reason": self.reason,
            "operators": self.operators,
            "runs": runs,
            "pareto": self.pareto,
            "ranking": self.ranking,
            "notes": self.notes,
            "excluded": self.budget.about["excluded"],
        }


def tune(
    workload: Workload,
    formats: Iterable[str] = ("bf16",),
    *,
    loss: bool = True,
    aim: Aim = "equal",
    extra: float = EXTRA,
    cost: str = "bytes",
    cost_table: Any = None,
    pin: Mapping[str, str] | None = None,
    allow: Mapping[str, Sequence[str]] | None = None,
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

    One budget of the gradients (and the ``loss``) prices every site in every format. The built-in autocast's own choice
    of formats, by its lists for ``device`` ("cpu", "cuda", ...; by default the model's), is the baseline. ``aim`` says
    which plan is wanted: "equal" (the most exact within autocast's cost), "more" (within ``extra`` above it) or
    "cheapest" (as exact as autocast). Costs are ``plan.cost``'s of the forward pass; the backward pass moves the same
    tensors and their gradients in the same formats.

    Then at most ``runs`` configurations train for ``steps`` real steps each, formats simulated: fp32, autocast, the plan
    of the aim (once more, from a budget measured around it, if it misses), and the other plans. Losses stay in fp32.
    Without an optimizer in the workload plain SGD takes the steps. ``budget`` is that of an earlier ``tune`` of the same
    workload and lists, to choose by another cost or aim without measuring again.

    The model is left exactly as it was. Raises ``WorkloadError`` (no loss, no trainable parameters), ``FormatError``,
    ``PlanError``, ``NonFiniteError``, ``GradientPathError``.
    """
    if aim not in AIMS:
        raise PlanError(
            "unknown aim", where="aim", expected=", ".join(AIMS), got=repr(aim)
        )
    if runs < 3 or steps < 1 or not extra >= 0:
        raise PlanError(
            "too little to verify with",
            where="runs, steps or extra",
            expected="3 runs or more (fp32, autocast, a plan), 1 step or more, extra of 0 or more",
            got=f"runs={runs}, steps={steps}, extra={extra}",
        )
    offered = [f.name for f in parse_formats(formats)]
    if not offered:
        raise PlanError(
            "no format below fp32 to tune",
            where="formats",
            expected="such as bf16",
            got="fp32",
        )
    if workload.loss is None:
        raise WorkloadError(
            "the workload has no loss",
            where=workload.name,
            expected="loss(output, batch)",
            do="define loss(output, batch) in the workload: tuning needs its gradients",
        )
    half = next((f for f in offered if f in ("bf16", "fp16")), "bf16")
    own = next(iter(trainable(workload).values())).device.type
    search = Search(
        workload,
        own,
        list(dict.fromkeys([*offered, half])),
        offered,
        half,
        device or own,
        loss,
        cost,
        cost_table,
        budget,
        dict(pin or {}),
        dict(allow or {}),
        batches,
        probes,
        seed,
        progress,
    )
    search.baseline()
    trials = Trials(
        workload, steps=steps, batches=batches, seed=seed, scale=search.scale
    )
    done = _Done(search, trials, aim, extra, runs, progress)
    done.all()
    return done.tuning(_notes(workload, offered, half, own, search))


class _Done:
    """The runs that were made, and the plan that stands."""

    def __init__(
        self,
        search: Search,
        trials: Trials,
        aim: str,
        extra: float,
        runs: int,
        progress: Progress | None,
    ) -> None:
        self.search, self.trials, self.aim, self.extra, self.most, self.progress = (
            search,
            trials,
            aim,
            extra,
            runs,
            progress,
        )
        self.runs: list[TunedRun] = []
        self.pareto: list[dict[str, Any]] = []
        self.ranking: list[dict[str, Any]] = []

    def all(self) -> None:
        """fp32, autocast, the plan of the aim, another try at it if it misses, and the other plans."""
        search = self.search
        self._keep("fp32", {}, self.trials.reference)
        fmt = parse_format(search.half)
        self._keep(
            "autocast",
            search.autocast,
            self._run(partial(Autocast, fmt, search.device)),
        )
        others = {
            name: search.plan(name, self.extra) for name in AIMS if name != self.aim
        }
        chosen = search.plan(self.aim, self.extra)
        self._try(self.aim, chosen)
        self.pareto, self.ranking = search.pareto(), search.ranking()
        if not self._good(self.runs[-1]) and len(self.runs) < self.most:
            missing = self._base().measured_db - self.runs[-1].measured_db
            search.around(chosen)
            mended = search.plan(
                self.aim,
                self.extra,
                max(missing, 0.0) + 0.5 if math.isfinite(missing) else 3.0,
            )
            if mended != chosen:
                self._try("mended", mended)
        for name, formats in others.items():
            if len(self.runs) < self.most:
                self._try(name, formats)

    def _run(self, make: Callable[[], Straight]) -> Trial:
        if self.progress is not None:
            self.progress("runs", len(self.runs), self.most)
        return self.trials.run(make)

    def _try(self, name: str, formats: dict[str, str]) -> None:
        parsed = {site: parse_format(f) for site, f in formats.items()}
        self._keep(name, formats, self._run(lambda: Straight(parsed)))

    def _keep(self, name: str, formats: Mapping[str, str], trial: Trial) -> None:
        search = self.search
        predicted = search.budget.predict(formats).db
        self.runs.append(
            TunedRun(
                name,
                search.problem.cost_of(formats),
                search.fp32(formats),
                predicted if math.isfinite(predicted) else None,
                trial.measured_db,
                self._natively(name, formats),
                trial.loss_error,
                trial.along,
                trial.losses,
                dict(formats),
            )
        )

    def _natively(self, name: str, formats: Mapping[str, str]) -> float | None:
        search = self.search
        used = set(formats.values()) | ({search.half} if name == "autocast" else set())
        slow = (
            "fp16" in used and search.on == "cpu"
        )  # converted to fp32 and back: a simulation too, and a slow one
        if name == "fp32" or slow or not used <= {"bf16", "fp16"}:
            return None
        if name == "autocast":
            return self.trials.natively(search.half, policy=search.device)
        return self.trials.natively(
            Plan.from_formats(formats, {"forwards": search.budget.about["forwards"]})
        )

    def _base(self) -> TunedRun:
        return self.runs[1]

    def _good(self, run: TunedRun) -> bool:
        base = self._base()
        if self.aim == "cheapest":
            return run.measured_db >= base.measured_db and run.cost <= base.cost * (
                1 + 1e-6
            )
        allowed = 1 + (self.extra if self.aim == "more" else 0.0)
        return (
            run.measured_db > base.measured_db
            and run.cost <= base.cost * allowed * (1 + 1e-6)
        )

    def tuning(self, notes: list[str]) -> Tuning:
        """The result."""
        search, base = self.search, self._base()
        own = [run for run in self.runs if run.name in (self.aim, "mended")]
        best = max(own, key=lambda run: (self._good(run), run.measured_db))
        met = self._good(best)
        gain, cost = (
            best.measured_db - base.measured_db,
            best.cost / base.cost - 1 if base.cost else 0.0,
        )
        reason = (
            f"{best.measured_db:.1f} dB against {base.measured_db:.1f} dB of built-in autocast ({gain:+.1f}), cost "
            f"{cost:+.1%}, operators in fp32: {best.fp32_operators} against {base.fp32_operators}"
        )
        wide = [
            site["site"]
            for site in search.budget.sites
            if site["kind"] in MULTIPLYING_KINDS
            and site["site"] in base.formats
            and site["site"] not in best.formats
        ]
        if wide and search.cost in ("bytes", "operators"):
            products = f"{len(wide)} matrix product" + "s" * (len(wide) > 1)
            notes = [
                *notes,
                (
                    f"The plan runs {products} in fp32 that autocast runs in {search.half} ({wide[0]} ...): counted in "
                    f"{search.cost} that is no more, but where products take the time, a step is slower. --cost bitops or "
                    "seconds leaves them."
                ),
            ]
        plan = search.problem.plan(
            best.formats, asked=None, note=AIMS[self.aim].format(extra=self.extra)
        )
        about = {
            **plan.about,
            "predicted_db": best.predicted_db,
            "measured_db": _number(best.measured_db),
            "autocast_db": _number(base.measured_db),
            "autocast_cost": base.cost,
            "autocast_lists": search.device,
            "target": search.budget.about["target"]["name"],
            "steps": self.trials.steps,
            "fp32_operators": best.fp32_operators,
            "autocast_fp32_operators": base.fp32_operators,
        }
        facts = {
            "version": search.budget.about["version"],
            "workload": search.workload.name,
            "formats": search.offered,
            "device": search.device,
            "half": search.half,
            "cost_model": search.cost,
            "unit": UNITS[search.cost],
            "extra": self.extra,
            "steps": self.trials.steps,
            "probes": search.budget.about["probes"],
            "batches": search.budget.about["samples"],
            "target": search.budget.about["target"]["name"],
            "loss_scale": search.scale,
            "cost_fp32": search.problem.cost_of({}),
        }
        return Tuning(
            Plan(plan.rules, plan.default, about),
            self.aim,
            met,
            reason,
            self.runs,
            self.pareto,
            self.ranking,
            len(search.problem.info),
            search.budget,
            facts,
            notes,
        )


def _rounds_gradients(name: str) -> bool:
    third = torch.tensor([1.0, 1 / 3])  # no binary format holds it
    return not torch.equal(
        round_gradient(third, parse_format(name), written=False), third
    )


def _number(value: float) -> float | None:
    return value if math.isfinite(value) else None


def _notes(
    workload: Workload, offered: list[str], half: str, device: str, search: Search
) -> list[str]:
    notes = [
        "Measured in simulated formats ('native': with real casts); the budget takes attention by its plain formula."
    ]
    if workload.optimizer is None:
        notes.append("The workload has no optimizer: plain SGD took the steps.")
    if "fp16" in offered and slow_in_fp16(torch.device(device)):
        notes.append(f"{SLOW_FP16}.")
    if half not in offered:
        notes.append(
            f"Built-in autocast has no {', '.join(offered)}: it ran in {half}."
        )
    straight = [f for f in offered if not _rounds_gradients(f)]
    if straight:
        notes.append(
            f"{', '.join(straight)} leave gradients in fp32 (straight through)."
        )
    if not search.budget.about["vendor_kernels"]:
        notes.append(
            "oneDNN and cuDNN were off in the budget: a fused operator has no second derivative there."
        )
    return notes
