"""The search of ``roundoff.tune``: a budget of the gradients, what built-in autocast chooses, and the plans beside it."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

from roundoff.budget import Budget, Goal, Problem, Progress, decibels, power
from roundoff.errors import InfeasibleError, PlanError
from roundoff.formats import parse_format
from roundoff.plan import solve
from roundoff.train.tune.gradients import gradient_budget
from roundoff.train.tune.rounded_step import Autocast, gradients_of
from roundoff.workload import Workload

#: Points of the Pareto curve between the cheapest plan and fp32.
POINTS = 9
#: The loss scale that half precision starts from, as torch.amp.GradScaler does.
SCALE = 65536.0


class Search:
    """The optimisation: a budget, the baseline, and the plans between them."""

    def __init__(
        self,
        workload: Workload,
        on: str,
        measured: list[str],
        offered: list[str],
        half: str,
        device: str,
        loss: bool,
        cost: str,
        table: Any,
        given: Budget | None,
        pin: dict[str, str],
        allow: dict[str, Sequence[str]],
        batches: int,
        probes: int | None,
        seed: int,
        progress: Progress | None,
    ) -> None:
        self.workload, self.on, self.measured, self.offered = (
            workload,
            on,
            measured,
            offered,
        )
        self.half, self.device = half, device
        self.loss, self.cost, self.table, self.pin, self.allow = (
            loss,
            cost,
            table,
            pin,
            allow,
        )
        self.batches, self.probes, self.seed, self.progress = (
            batches,
            probes,
            seed,
            progress,
        )
        self.given = given
        self.scale = 1.0
        self.autocast: dict[str, str] = {}

    def baseline(self) -> None:
        """What built-in autocast runs in half precision, a loss scale where that is fp16, and the budget around it."""
        fmt = parse_format(self.half)
        self.scale = SCALE if "fp16" in self.measured else 1.0
        while True:
            handler = Autocast(fmt, self.device)
            found = gradients_of(
                self.workload,
                handler,
                batches=self.batches,
                seed=self.seed,
                scale=self.scale,
            )
            finite = all(
                bool(g.isfinite().all()) for one in found for g in one.weights.values()
            )
            if finite or self.scale <= 1.0:
                break
            self.scale /= 4
        if self.given is None:
            self.around(handler.chosen)
        else:
            held, target = (
                self.given.about.formats,
                self.given.about.target.name,
            )
            if not set(self.measured) <= set(held) or "gradients" not in target:
                raise PlanError(
                    "this budget is not one of these gradients",
                    where="budget",
                    expected=f"the budget of an earlier tune in {', '.join(self.measured)}",
                    got=f"{target} in {', '.join(held)}",
                )
            self._use(self.given)
        # what no gradient reaches costs no noise, and stays in fp32 in every plan: left out of both sides
        followed = {s.site for s in self.budget.sites if not s.no_path}
        self.autocast = {s: f for s, f in handler.chosen.items() if s in followed}

    def around(self, formats: Mapping[str, str]) -> None:
        """Measure the budget, with derivatives that jump smeared over the errors that ``formats`` make."""
        self._use(
            gradient_budget(
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
        )

    def _use(self, budget: Budget) -> None:
        self.budget = budget
        losses = {s.site: "fp32" for s in self.budget.sites if _is_loss(s.operator)}
        goal = Goal(
            cost=self.cost,
            cost_table=self.table,
            pin={**self.pin, **losses},
            allow=self.allow,
            formats=self.offered,
        )
        self.problem = Problem(self.budget, goal)

    def within(self, bound: float) -> dict[str, str]:
        """The most exact plan of at most this cost; the cheapest where none is."""
        if bound < self.problem.cost_of(cheapest := self.problem.lowest()[0]):
            return cheapest
        return self.problem.sites(
            solve(self.problem.decisions, self.problem.edges, max_cost=bound)
        )

    def plan(self, aim: str, extra: float, shift: float = 0.0) -> dict[str, str]:
        """The plan of an aim; ``shift`` dB more than autocast is predicted to have, for the cheapest."""
        base = self.problem.cost_of(self.autocast)
        if aim == "cheapest":
            return self.problem.cheapest(self.budget.predict(self.autocast).db + shift)
        return self.within(base * (1 + (extra if aim == "more" else 0.0)) * (1 + 1e-9))

    def fp32(self, formats: Mapping[str, str]) -> int:
        """How many operators stay in fp32."""
        return len(self.problem.info) - len(formats)

    def pareto(self) -> list[dict[str, Any]]:
        """The most exact plan at each of some costs between the least and that of fp32."""
        lowest, full = (
            self.problem.cost_of(self.problem.lowest()[0]),
            self.problem.cost_of({}),
        )
        points: list[dict[str, Any]] = []
        least = math.inf
        for index in range(POINTS):
            bound = lowest + (full - lowest) * index / (POINTS - 1)
            try:
                chosen = self.within(bound * (1 + 1e-9))
            except InfeasibleError:  # its cheapest formats overflow
                continue
            noise = self.budget.predict(chosen).noise
            spent = self.problem.cost_of(chosen)
            if (
                noise >= least
            ):  # no better than a cheaper one: the solver adds powers, this prediction correlates
                continue
            least = noise
            points.append(
                {
                    "cost": spent,
                    "of_fp32": spent / full if full else 1.0,
                    "predicted_db": decibels(noise),
                    "fp32_operators": self.fp32(chosen),
                }
            )
        return points

    def ranking(self) -> list[dict[str, Any]]:
        """Sites in the half format, worst first, with the parts of their noise in dB."""
        rows = []
        for row in self.budget.table.filter(
            self.budget.table["format"] == self.half
        ).iter_rows(named=True):
            terms = [
                t
                for t in self.budget.rows(row["site"], self.half)
                if t.part == "gradient"
            ]
            keys = (
                "site",
                "operator",
                "sqnr_db",
                "stderr_db",
                "share",
                "activation_db",
                "weight_db",
                "output_db",
                "note",
            )
            rows.append(
                {key: row[key] for key in keys}
                | {"gradient_db": decibels(power(terms)[0])}
            )
        return rows


def _is_loss(operator: str) -> bool:
    """Losses stay in fp32: their sums are where a format is worth least and hurts most, and autocast keeps them there."""
    return "_loss" in operator or operator in (
        "kl_div",
        "binary_cross_entropy",
        "binary_cross_entropy_with_logits",
    )
