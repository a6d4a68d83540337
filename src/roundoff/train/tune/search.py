"""The search of ``roundoff.tune``: a budget of the gradients, what built-in autocast
chooses, and the plans beside it.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from roundoff.budget import Budget, Goal, Problem, Progress, decibels, power
from roundoff.errors import InfeasibleError, PlanError
from roundoff.formats import parse_format
from roundoff.plan import solve
from roundoff.train.tune.gradients import gradient_budget
from roundoff.train.tune.simulated_step import SimulatedAutocast, gradients_of
from roundoff.train.tune.tuning import ParetoPoint, RankedSite
from roundoff.workload import Workload

#: Points of the Pareto curve between the cheapest plan and fp32.
POINTS = 9
#: The loss scale that fp16 starts from, as torch.amp.GradScaler does.
SCALE = 65536.0
#: Losses that do not have ``_loss`` in their name.
LOSSES = ("kl_div", "binary_cross_entropy", "binary_cross_entropy_with_logits")
#: Room for the rounding of a cost that is a bound too.
SLACK = 1 + 1e-9


@dataclass(kw_only=True)
class Search:
    """The optimisation: a budget, the baseline, and the plans between them.

    Attributes:
        workload: what is trained.
        offered: formats that a plan may use.
        measured: formats that the budget measures: the offered, and ``halves``.
        halves: formats that built-in autocast may run in: those offered, so that both
            sides choose among the same.
        model_device: type of the device that the model is on.
        device: type of the device whose autocast lists are the baseline.
        loss: the loss counts beside the gradients.
        cost, table: cost model and its table, see ``plan.cost``.
        pin, allow, tie: constraints, see ``roundoff.tune``.
        batches, probes, seed: of the budget.
        progress: called with (stage, done, total).
        scale: loss scale of every backward pass; set by ``baseline``.
        half: the format of the baseline, of ``halves`` the one predicted most exact; set
            by ``baseline``.
        autocast: sites that built-in autocast runs in ``half``; set by ``baseline``.
    """

    workload: Workload
    offered: list[str]
    measured: list[str]
    halves: list[str]
    model_device: str
    device: str
    loss: bool
    cost: str
    table: Any
    pin: Mapping[str, str]
    allow: Mapping[str, Sequence[str]]
    batches: int
    probes: int | None
    seed: int
    progress: Progress | None
    tie: str = "site"
    scale: float = 1.0
    half: str = ""
    autocast: dict[str, str] = field(default_factory=dict)
    budget: Budget = field(init=False)
    problem: Problem = field(init=False)

    def baseline(self, budget: Budget | None = None) -> None:
        """Find what built-in autocast runs in half precision, and measure the budget around it.

        For fp16 find a loss scale too. A ``budget`` of an earlier search is used in place
        of a new one; raises ``PlanError`` where it is not one of these gradients.
        """
        chosen = self._autocast_choices()
        if budget is None:
            self.measure_around(chosen[self.halves[0]])
        else:
            self._check(budget)
            self._use(budget)
        # what no gradient reaches costs no noise, and stays in fp32 in every plan: left
        # out of both sides
        followed = {s.site for s in self.budget.sites if not s.no_path}
        baselines = {
            half: {site: f for site, f in formats.items() if site in followed}
            for half, formats in chosen.items()
        }
        self.half = max(
            self.halves, key=lambda half: self.budget.predict(baselines[half]).db
        )
        self.autocast = baselines[self.half]

    def _autocast_choices(self) -> dict[str, dict[str, str]]:
        """Run autocast in each of its formats, with a loss scale that suits all.

        The scale falls until every gradient is finite.
        """
        self.scale = SCALE if "fp16" in self.measured else 1.0
        return {half: self._autocast_choice(half) for half in self.halves}

    def _autocast_choice(self, half: str) -> dict[str, str]:
        fmt = parse_format(half)
        while True:
            handler = SimulatedAutocast(fmt, self.device)
            gradients = gradients_of(
                self.workload,
                handler,
                batches=self.batches,
                seed=self.seed,
                scale=self.scale,
            )
            if self.scale <= 1.0 or all(batch.are_finite for batch in gradients):
                return handler.chosen
            self.scale /= 4

    def _check(self, budget: Budget) -> None:
        formats = budget.about.formats
        target = budget.about.target.name
        if not set(self.measured) <= set(formats) or "gradients" not in target:
            raise PlanError(
                "this budget is not one of these gradients",
                where="budget",
                expected=f"the budget of an earlier tune in {', '.join(self.measured)}",
                got=f"{target} in {', '.join(formats)}",
            )

    def measure_around(self, formats: Mapping[str, str]) -> None:
        """Measure the budget; derivatives that jump are smeared over the errors that
        ``formats`` make.
        """
        budget = gradient_budget(
            self.workload,
            self.measured,
            loss=self.loss,
            around=formats,
            batches=self.batches,
            probes=self.probes,
            seed=self.seed,
            scale=self.scale,
            progress=self.progress,
        )
        self._use(budget)

    def _use(self, budget: Budget) -> None:
        self.budget = budget
        losses = {s.site: "fp32" for s in budget.sites if _is_loss(s.operator)}
        goal = Goal(
            cost=self.cost,
            cost_table=self.table,
            pin={**self.pin, **losses},
            allow=self.allow,
            formats=self.offered,
            tie=self.tie,
        )
        self.problem = Problem(budget, goal)

    def within(self, bound: float) -> dict[str, str]:
        """Return the most exact plan of at most this cost; the cheapest where there is none."""
        cheapest, _ = self.problem.lowest()
        if bound < self.problem.cost_of(cheapest):
            return cheapest
        solution = solve(self.problem.decisions, self.problem.edges, max_cost=bound)
        return self.problem.sites(solution)

    def plan(self, aim: str, extra: float, shift: float = 0.0) -> dict[str, str]:
        """Return the plan of an aim.

        The cheapest must be predicted ``shift`` dB better than autocast.
        """
        if aim == "cheapest":
            autocast_db = self.budget.predict(self.autocast).db
            return self.problem.cheapest(autocast_db + shift)
        allowed = 1 + (extra if aim == "more" else 0.0)
        return self.within(self.problem.cost_of(self.autocast) * allowed * SLACK)

    def fp32_operators(self, formats: Mapping[str, str]) -> int:
        """Return how many operators stay in fp32."""
        return len(self.problem.info) - len(formats)

    def pareto(self) -> list[ParetoPoint]:
        """Return the most exact plan at each of some costs between the least and that of fp32.

        Each is more exact than all cheaper ones: the solver adds noise powers, while the
        prediction correlates, so a plan of a larger bound may be no better.
        """
        full = self.problem.cost_of({})
        points = []
        least_noise = math.inf
        for formats in self._plans_by_cost(full):
            noise = self.budget.predict(formats).noise
            if noise >= least_noise:
                continue
            least_noise = noise
            cost = self.problem.cost_of(formats)
            of_fp32 = cost / full if full else 1.0
            operators = self.fp32_operators(formats)
            points.append(ParetoPoint(cost, of_fp32, decibels(noise), operators))
        return points

    def _plans_by_cost(self, full: float) -> Iterator[dict[str, str]]:
        cheapest, _ = self.problem.lowest()
        lowest = self.problem.cost_of(cheapest)
        for index in range(POINTS):
            bound = lowest + (full - lowest) * index / (POINTS - 1)
            try:
                yield self.within(bound * SLACK)
            except InfeasibleError:  # its cheapest formats overflow
                continue

    def ranking(self) -> list[RankedSite]:
        """Rank the sites in the half format, worst first, with the parts of their noise in dB."""
        table = self.budget.table
        in_half = table.filter(table["format"] == self.half)
        return [
            RankedSite(
                site=row["site"],
                operator=row["operator"],
                sqnr_db=row["sqnr_db"],
                stderr_db=row["stderr_db"],
                share=row["share"],
                activation_db=row["activation_db"],
                weight_db=row["weight_db"],
                output_db=row["output_db"],
                note=row["note"],
                gradient_db=self._gradient_db(row["site"]),
            )
            for row in in_half.iter_rows(named=True)
        ]

    def _gradient_db(self, site: str) -> float | None:
        terms = self.budget.rows(site, self.half)
        noise, _ = power([term for term in terms if term.part == "gradient"])
        return decibels(noise)


def _is_loss(operator: str) -> bool:
    """Return True for losses, which stay in fp32.

    Their sums are where a format is worth least and hurts most, and autocast keeps them
    there.
    """
    return "_loss" in operator or operator in LOSSES
