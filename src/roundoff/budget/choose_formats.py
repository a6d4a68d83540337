"""From a budget to a plan: tied sites, constraints, costs, the exact solver, and the correlation between errors."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any

from roundoff.budget.table import Budget, Prediction, keeps, power
from roundoff.budget.targets import drop_to_db, parse_drop, parse_target
from roundoff.errors import InfeasibleError, PlanError
from roundoff.formats import parse_format
from roundoff.plan import (
    UNITS,
    Choice,
    Decision,
    Edge,
    Plan,
    Solution,
    Work,
    cost,
    solve,
)
from roundoff.site import matches, select

#: Solves allowed to match the correlated prediction with the target.
ROUNDS = 8


def choose(
    budget: Budget,
    *,
    target: float | str | None = None,
    metric_drop: float | str | None = None,
    max_cost: float | None = None,
    cost: str = "bytes",
    cost_table: Any = None,
    pin: Mapping[str, str] = {},
    allow: Mapping[str, Sequence[str]] = {},
    formats: Iterable[str] | None = None,
) -> Plan:
    """The cheapest plan with predicted SQNR of at least ``target`` dB, or the most exact one within ``max_cost``.

    Give one of ``target``, ``metric_drop`` (turned into dB with the budget's metric curve) and ``max_cost`` (in
    the unit of the cost model: MB, Gbitops, ms). ``pin`` fixes sites, ``allow`` lists the formats that sites may
    take; both are keyed by glob patterns over site and parameter names, first match first. Sites that share a
    parameter are one decision. Sites without a path to the target stay in the reference format.

    The solver adds noise powers as if errors were independent; its answer is then predicted with correlations,
    and solved again with the bound moved by the difference until the correlated prediction meets the target.

    Raises ``PlanError`` for contradictory arguments, ``PatternError`` for patterns that match nothing and
    ``InfeasibleError`` when no plan reaches the target.
    """
    given = [
        name
        for name, v in (
            ("target", target),
            ("metric_drop", metric_drop),
            ("max_cost", max_cost),
        )
        if v is not None
    ]
    if len(given) != 1:
        raise PlanError(
            "one aim is needed",
            where="plan",
            expected="one of target, metric_drop and max_cost",
            got=" and ".join(given) or "none",
        )
    note = ""
    goal: float | None = None
    if metric_drop is not None:
        goal, note = drop_to_db(budget.about.get("metric"), parse_drop(metric_drop))
    elif target is not None:
        goal = parse_target(target)
    problem = Problem(budget, cost, cost_table, pin, allow, formats)
    if goal is None:
        solution = solve(problem.decisions, problem.edges, max_cost=max_cost)
        chosen = problem.sites(solution)
    else:
        chosen = problem.cheapest(goal)
    return problem.plan(chosen, asked=goal, note=note)


class Problem:
    """The decisions of one budget: groups of tied sites, what each format costs them, and the operand edges."""

    def __init__(
        self,
        budget: Budget,
        model: str = "bytes",
        table: Any = None,
        pin: Mapping[str, str] = {},
        allow: Mapping[str, Sequence[str]] = {},
        formats: Iterable[str] | None = None,
    ) -> None:
        self.budget, self.model, self.table = budget, model, table
        self.offered = [
            parse_format(f).name
            for f in (formats if formats is not None else budget.about["formats"])
        ]
        missing = [
            f for f in self.offered if f not in (*budget.about["formats"], "fp32")
        ]
        if missing:
            raise PlanError(
                f"the budget did not measure {', '.join(missing)}",
                where="formats",
                expected="formats among " + ", ".join(budget.about["formats"]),
            )
        self.info = {s["site"]: s for s in budget.sites}
        self.work = {
            name: Work(kind=s["kind"], **s["sizes"]) for name, s in self.info.items()
        }
        if model == "storage":
            self._store_once()
        names = [
            *self.info,
            *dict.fromkeys(p for s in budget.sites for p in s["params"]),
        ]
        for pattern in (*pin, *allow):
            select(pattern, names)
        self.pin = {pattern: parse_format(f).name for pattern, f in pin.items()}
        self.allow = {
            pattern: [parse_format(f).name for f in fs] for pattern, fs in allow.items()
        }
        self.groups = _tied(budget.sites)
        self.owner = {
            site: name for name, group in self.groups.items() for site in group
        }
        self.decisions = [
            self._decision(name, group) for name, group in self.groups.items()
        ]
        self.edges = self._edges()

    def _store_once(self) -> None:
        """Count each parameter whole, where it is read first: a tied weight, or a module used again, is stored once."""
        known = self.budget.about.get("parameters")
        if known is None:
            raise PlanError(
                "this budget does not say how large parameters are",
                where="cost storage",
                got=f"a budget of roundoff {self.budget.about.get('version', 'of unknown version')}",
                do="measure it again",
            )
        stored: set[str] = set()
        for name, info in self.info.items():
            new = [p for p in dict.fromkeys(info["params"]) if p not in stored]
            self.work[name] = replace(
                self.work[name], weight_elements=float(sum(known[p] for p in new))
            )
            stored.update(new)

    def cost_of(self, formats: Mapping[str, str]) -> float:
        """What a choice of formats (site to format) costs, all sites counted, in the unit of the cost model."""
        return sum(self._cost(site, formats.get(site, "fp32")) for site in self.work)

    def _cost(self, site: str, fmt: str) -> float:
        return cost(self.work[site], parse_format(fmt), self.model, table=self.table)

    def _decision(self, name: str, group: list[str]) -> Decision:
        wanted = self._constraint(group)
        choices = [Choice("fp32", 0.0, sum(self._cost(s, "fp32") for s in group))]
        for fmt in self.offered:
            if fmt == "fp32" or any(
                self.info[s]["no_path"] or fmt in self.info[s]["refused"] for s in group
            ):
                continue
            exact = _casts(fmt)
            terms = [
                t
                for s in group
                for t in self.budget.rows(s, fmt)
                if not (exact and t.absorbable)
            ]
            choices.append(
                Choice(fmt, power(terms)[0], sum(self._cost(s, fmt) for s in group))
            )
        pinned = None
        if wanted is not None:
            kept = [c for c in choices if c.format in wanted]
            if not kept:
                reasons = {r for s in group for r in self.info[s]["refused"].values()}
                reasons |= {
                    str(self.info[s]["no_path"])
                    for s in group
                    if self.info[s]["no_path"]
                }
                raise PlanError(
                    f"{name} cannot run in {' or '.join(wanted)}",
                    where="pin or allow",
                    expected="one of " + ", ".join(c.format for c in choices),
                    got="; ".join(sorted(reasons)) or "not measured",
                )
            if (
                len(kept) == 1
            ):  # the other choices stay, so that an infeasible target can say what the pin costs
                pinned = kept[0].format
            else:
                choices = kept
        return Decision(name, tuple(choices), pinned)

    def _constraint(self, group: list[str]) -> list[str] | None:
        """The formats left by the first pattern that names a site of the group or its parameters; pins go first."""
        names = [n for s in group for n in (s, *self.info[s]["params"])]
        for rules in ({p: [f] for p, f in self.pin.items()}, self.allow):
            for pattern, formats in rules.items():
                if any(matches(pattern, n) for n in names):
                    return formats
        return None

    def _edges(self) -> list[Edge]:
        edges = []
        for site in self.info:
            for fmt in self.offered:
                if not _casts(fmt):
                    continue
                absorbing = frozenset(g for g in self.offered if keeps(g, fmt))
                for term in self.budget.rows(site, fmt):
                    if not term.absorbable:
                        continue
                    known = bool(term.sources) and all(
                        s in self.owner for s in term.sources
                    )
                    producers = (
                        tuple(sorted({self.owner[s] for s in term.sources}))
                        if known
                        else ()
                    )
                    noise = power([term])[0]
                    if noise > 0:
                        edges.append(
                            Edge(self.owner[site], producers, fmt, noise, absorbing)
                        )
        return edges

    def sites(self, solution: Solution) -> dict[str, str]:
        """Site to format of a solution; sites that stay in fp32 are left out."""
        return {
            s: f
            for name, f in solution.formats.items()
            if f != "fp32"
            for s in self.groups[name]
        }

    def cheapest(self, target_db: float) -> dict[str, str]:
        """The cheapest choice whose correlated prediction meets the target."""
        bound = 10 ** (-target_db / 10)
        limit = bound
        best: tuple[float, dict[str, str]] | None = None
        for _ in range(ROUNDS):
            try:
                solution = solve(self.decisions, self.edges, max_noise=limit)
            except InfeasibleError:
                if best is None and limit >= bound:
                    raise
                break
            chosen = self.sites(solution)
            noise = self.budget.predict(chosen).noise
            if noise <= bound and (best is None or solution.cost < best[0]):
                best = (solution.cost, chosen)
            if solution.noise <= 0 or 0.98 * bound <= noise <= bound:
                break
            # errors that partly cancel leave room, errors that add up take it: move the additive bound
            ratio = bound / noise if noise > 0 else 2.0
            limit = limit * min(max(ratio, 0.25), 1.5) * (0.999 if ratio < 1 else 1.0)
        if best is None:
            return self.sites(
                solve(self.decisions, self.edges, max_noise=max(limit, 1e-300))
            )
        return best[1]

    def lowest(self) -> tuple[dict[str, str], str]:
        """Every decision in its cheapest format, and the format most of them take."""
        chosen: dict[str, str] = {}
        for decision in self.decisions:
            open_to = [
                c for c in decision.choices if decision.pinned in (None, c.format)
            ]
            finite = [c for c in open_to if math.isfinite(c.noise)]
            cheapest = min(finite or open_to, key=lambda c: c.cost)
            chosen |= {
                s: cheapest.format
                for s in self.groups[decision.name]
                if cheapest.format != "fp32"
            }
        counts = list(chosen.values())
        return chosen, max(set(counts), key=counts.count) if counts else "fp32"

    def plan(
        self, chosen: Mapping[str, str], *, asked: float | None, note: str = ""
    ) -> Plan:
        """The plan with what is predicted of it."""
        prediction: Prediction = self.budget.predict(chosen)
        lowest, name = self.lowest()
        about = {
            "workload": self.budget.about["workload"],
            "target_db": asked,
            "note": note,
            "predicted_db": prediction.db if math.isfinite(prediction.db) else None,
            "additive_db": prediction.additive_db
            if math.isfinite(prediction.additive_db)
            else None,
            "cost_model": self.model,
            "unit": UNITS[self.model],
            "cost": self.cost_of(chosen),
            "cost_fp32": self.cost_of({}),
            "cost_lowest": self.cost_of(lowest),
            "lowest_format": name,
        }
        if (
            self.budget.about.get("forwards", 1) > 1
        ):  # numbers of calls go over that many forward passes
            about["forwards"] = self.budget.about["forwards"]
        return Plan.from_formats(chosen, about)


def _casts(fmt: str) -> bool:
    """Whether operands are rounded by a plain cast, so that an operand already in the format costs nothing."""
    rule = parse_format(fmt).execution
    return rule is not None and rule.activation == "exact"


def _tied(sites: Sequence[Mapping[str, Any]]) -> dict[str, list[str]]:
    """Groups of sites that share a parameter, or write into one tensor, each named by its first site."""
    parent: dict[str, str] = {}

    def root(name: str) -> str:
        while parent.setdefault(name, name) != name:
            name = parent[name]
        return name

    for site in sites:
        for param in site["params"]:
            parent[root("\0" + param)] = root(site["site"])
        for other in site.get("tied", ()):
            parent[root(other)] = root(site["site"])
    groups: dict[str, list[str]] = {}
    for site in sites:
        groups.setdefault(root(site["site"]), []).append(site["site"])
    return {group[0]: group for group in groups.values()}
