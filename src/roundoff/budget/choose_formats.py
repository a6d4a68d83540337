"""From a budget to a plan: tied sites, constraints, costs and the exact solver."""

from __future__ import annotations

import math
import operator
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

from roundoff.budget.aim import parse_drop
from roundoff.budget.facts import MeasuredOutput, MeasuredSite
from roundoff.budget.goal import Goal
from roundoff.budget.noise_power import Term, casts, keeps
from roundoff.budget.outputs import powers
from roundoff.budget.sqnr_target import SqnrTarget
from roundoff.budget.table import Budget
from roundoff.budget.ties import SITE, groups_of, plan_by_operator
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
from roundoff.workload import is_output

#: Solves allowed to match the correlated prediction with the target.
ROUNDS = 8
#: A noise this close below the bound needs no further solve.
CLOSE = 0.98
#: Most that the additive bound moves down and up from one solve to the next.
STEP_DOWN = 0.25
STEP_UP = 1.5


def choose(budget: Budget, goal: Goal) -> Plan:
    """Choose the cheapest plan that reaches the goal.

    With ``max_cost`` it is the most exact plan within it. Sites that share a parameter
    are one decision. Sites without a path to the target stay in the reference format.

    The solver adds noise powers as if errors were independent; its answer is then
    predicted with correlations, and solved again with the bound moved by the difference
    until the correlated prediction meets the target.

    Raises ``PlanError`` for contradictory arguments, ``PatternError`` for patterns that
    match nothing and ``InfeasibleError`` when no plan reaches the target.
    """
    target, note = goal.aim(budget.about.metric)
    problem = Problem(budget, goal)
    if target is None:
        chosen = problem.most_exact()
    else:
        problem.check(target)
        chosen = problem.cheapest(target)
    return problem.plan(chosen, asked=target, note=note)


class Problem:
    """The decisions of one budget: groups of tied sites, their costs, operand edges.

    ``goal`` gives cost, pins and offered formats; its aim is not looked at, except by
    ``most_exact``.
    """

    def __init__(self, budget: Budget, goal: Goal | None = None) -> None:
        self.budget = budget
        self.goal = goal or Goal()
        self.offered = _offered(budget, self.goal.formats)
        self.info = {site.site: site for site in budget.sites}
        self.work = {
            name: Work(kind=site.kind, **site.sizes) for name, site in self.info.items()
        }
        if self.goal.cost == "storage":
            self._store_once()
        self._rules = _rules(self.goal, budget.sites)
        self.groups = groups_of(budget.sites, self.goal.tie)
        self.owner = {
            site: name for name, group in self.groups.items() for site in group
        }
        self.decisions = [
            self._decision(name, group) for name, group in self.groups.items()
        ]
        self.edges = list(self._edges())

    def _store_once(self) -> None:
        """Count each parameter whole, at the site that reads it first.

        A tied weight, or a module used again, is stored once.
        """
        elements = self.budget.about.parameters
        if elements is None:
            raise PlanError(
                "this budget does not say how large parameters are",
                where="cost storage",
                got=f"a budget of roundoff {self.budget.about.version}",
                do="measure it again",
            )
        stored: set[str] = set()
        for name, site in self.info.items():
            first_read = set(site.params) - stored
            size = float(sum(elements[parameter] for parameter in first_read))
            self.work[name] = replace(self.work[name], weight_elements=size)
            stored |= first_read

    def cost_of(self, formats: Mapping[str, str]) -> float:
        """Return the cost of a choice of formats, site to format, over all sites."""
        return sum(self._cost(site, formats.get(site, "fp32")) for site in self.work)

    def _cost(self, site: str, fmt: str) -> float:
        table = self.goal.cost_table
        return cost(self.work[site], parse_format(fmt), self.goal.cost, table=table)

    def _decision(self, name: str, group: Sequence[str]) -> Decision:
        """Return the choices of a group of tied sites."""
        choices = [self._choice(group, fmt) for fmt in self._formats_of(group)]
        allowed = self._constraint(group)
        if allowed is None:
            return Decision(name, tuple(choices), None)
        kept = [choice for choice in choices if choice.format in allowed]
        if not kept:
            raise PlanError(
                f"{name} cannot run in {' or '.join(allowed)}",
                where="pin or allow",
                expected="one of " + ", ".join(choice.format for choice in choices),
                got="; ".join(self._refusals(group)) or "not measured",
            )
        if len(kept) == 1:
            # the other choices stay: an infeasible target can say what the pin costs
            return Decision(name, tuple(choices), kept[0].format)
        return Decision(name, tuple(kept), None)

    def _formats_of(self, group: Sequence[str]) -> list[str]:
        """Return the formats that every site of a group runs in, fp32 first."""
        sites = [self.info[name] for name in group]
        if any(site.no_path for site in sites):
            return ["fp32"]
        lower = [
            fmt
            for fmt in self.offered
            if fmt != "fp32" and not any(fmt in site.refused for site in sites)
        ]
        return ["fp32", *lower]

    def _choice(self, group: Sequence[str], fmt: str) -> Choice:
        """Return what a group costs in a format.

        The noise of operands that a plain cast may leave as they are is in the edges.
        """
        price = sum(self._cost(site, fmt) for site in group)
        outputs = len(self.budget.outputs)
        if fmt == "fp32":
            return Choice(fmt, (0.0,) * outputs, price)
        terms = [term for site in group for term in self.budget.rows(site, fmt)]
        if casts(fmt):
            terms = [term for term in terms if not term.absorbable]
        return Choice(fmt, powers(terms, outputs), price)

    def _constraint(self, group: Sequence[str]) -> Sequence[str] | None:
        """Return the formats of the first rule that names a site or its parameters."""
        names = [name for site in group for name in (site, *self.info[site].params)]
        for pattern, formats in self._rules:
            if any(matches(pattern, name) for name in names):
                return formats
        return None

    def shared(self, chosen: Mapping[str, str]) -> dict[str, str]:
        """Return why sites stay in fp32 that alone could run in a lower format.

        They share a weight, or a tensor that is written, with another site.
        """
        reasons = {}
        for group in self.groups.values():
            if len(group) == 1 or chosen.get(group[0], "fp32") != "fp32":
                continue
            for site in group:
                if self._constraint([site]) is None and self._formats_of([site])[1:]:
                    reasons[site] = self._shared_reason(site, group)
        return reasons

    def _shared_reason(self, site: str, group: Sequence[str]) -> str:
        """Return which site of a group keeps another one in fp32, and why."""
        others = [other for other in group if other != site]
        pinned = [other for other in others if self._constraint([other]) is not None]
        lower = self._formats_of([site])[1]
        unable = [other for other in others if lower not in self._formats_of([other])]
        other = next(iter([*pinned, *unable, *others]))
        tie = self._tie(site, other)
        if pinned:
            return f"{tie}, whose formats are fixed"
        if not unable:
            return f"{tie}: one format for both, and the plan leaves them in fp32"
        info = self.info[other]
        why = info.no_path or info.refused.get(lower, "")
        return f"{tie}, which stays in fp32: {why}"

    def _tie(self, site: str, other: str) -> str:
        theirs = self.info[other].params
        weights = [name for name in self.info[site].params if name in theirs]
        if weights:
            return f"shares {weights[0]} with {other}"
        if self.goal.tie != SITE:
            return f"is tied by its operator to {other}"
        return f"is tied to {other}"

    def _refusals(self, group: Sequence[str]) -> list[str]:
        """Return why the sites of a group do not run in some format."""
        sites = [self.info[name] for name in group]
        reasons = {reason for site in sites for reason in site.refused.values()}
        return sorted(reasons | {site.no_path for site in sites if site.no_path})

    def _edges(self) -> Iterator[Edge]:
        """Yield the noise of operands that an earlier site's format may absorb."""
        absorbing = {
            fmt: frozenset(name for name in self.offered if keeps(name, fmt))
            for fmt in filter(casts, self.offered)
        }
        for site in self.info:
            for fmt, formats in absorbing.items():
                for term in self.budget.rows(site, fmt):
                    if not term.absorbable:
                        continue
                    noise = powers([term], len(self.budget.outputs))
                    if any(noise):
                        producers = self._producers(term)
                        yield Edge(self.owner[site], producers, fmt, noise, formats)

    def _producers(self, term: Term) -> tuple[str, ...]:
        """Return the decisions that make an operand; none unless all are known."""
        if not all(source in self.owner for source in term.sources):
            return ()
        return tuple(sorted({self.owner[source] for source in term.sources}))

    def sites(self, solution: Solution) -> dict[str, str]:
        """Return site to format of a solution; sites that stay in fp32 are left out."""
        lowered = {name: f for name, f in solution.formats.items() if f != "fp32"}
        return {site: f for name, f in lowered.items() for site in self.groups[name]}

    def most_exact(self) -> dict[str, str]:
        """Return the most exact choice within the goal's ``max_cost``."""
        most = self.goal.max_cost
        return self.sites(solve(self.decisions, self.edges, max_cost=most))

    def check(self, target: SqnrTarget) -> None:
        """Raise ``PlanError`` where a target names no output, or one of many together."""
        outputs = self.budget.outputs
        names = [output.name for output in outputs]
        reasons = self.budget.about.not_measured
        for pattern in target.patterns:
            if pattern in reasons and pattern not in names:
                raise _not_measured(pattern, reasons[pattern], names)
        tensors = [tensor for output in outputs for tensor in output.tensors]
        target.check(list(dict.fromkeys([*names, *tensors])))
        for pattern in target.patterns:
            if not any(is_output(pattern, name) for name in names):
                raise _measured_together(pattern, outputs)

    def cheapest(
        self, target: SqnrTarget | float, rounds: int = ROUNDS
    ) -> dict[str, str]:
        """Return the cheapest choice whose correlated prediction meets the target.

        A number is the least SQNR in dB of every output. At most so many programs are
        solved on the way to a choice whose noise is all but the target's; the choice is
        a little dearer where they are too few. Raises ``InfeasibleError`` when none
        meets it.
        """
        if not isinstance(target, SqnrTarget):
            target = SqnrTarget(float(target))
        bounds = [_bound(target.of_output(o.name)) for o in self.budget.outputs]
        limits = list(bounds)
        best: tuple[float, dict[str, str]] | None = None
        for _ in range(rounds):
            solution = self._solution(limits, bounds, is_first=best is None)
            if solution is None:
                break
            chosen = self.sites(solution)
            noises = [output.noise for output in self.budget.predict(chosen).outputs]
            used = max(map(_share, noises, bounds))
            if used <= 1 and (best is None or solution.cost < best[0]):
                best = (solution.cost, chosen)
            if solution.noise <= 0 or CLOSE <= used <= 1:
                break
            limits = _moved(limits, bounds, noises)
        if best is not None:
            return best[1]
        return self.sites(self._solve([max(limit, 1e-300) for limit in limits]))

    def _solution(
        self, limits: Sequence[float], bounds: Sequence[float], *, is_first: bool
    ) -> Solution | None:
        """Return the cheapest plan within additive limits; None where there is none.

        Raises ``InfeasibleError`` where even the bounds themselves are out of reach.
        """
        try:
            return self._solve(limits)
        except InfeasibleError:
            if is_first and all(map(operator.ge, limits, bounds)):
                raise
            return None

    def _solve(self, limits: Sequence[float]) -> Solution:
        names = [output.name for output in self.budget.outputs]
        return solve(self.decisions, self.edges, max_noise=limits, outputs=names)

    def lowest(self) -> tuple[dict[str, str], str]:
        """Return every decision in its cheapest format, and the most frequent one."""
        chosen: dict[str, str] = {}
        for decision in self.decisions:
            fmt = _cheapest_format(decision)
            if fmt != "fp32":
                chosen |= dict.fromkeys(self.groups[decision.name], fmt)
        formats = list(chosen.values())
        return chosen, max(set(formats), key=formats.count) if formats else "fp32"

    def plan(
        self,
        chosen: Mapping[str, str],
        *,
        asked: SqnrTarget | None,
        note: str = "",
    ) -> Plan:
        """Return the plan of a choice, with what is predicted of it."""
        prediction = self.budget.predict(chosen)
        lowest, lowest_format = self.lowest()
        about: dict[str, Any] = {
            "workload": self.budget.about.workload,
            "target_db": None if asked is None else asked.db,
            "note": note,
            "predicted_db": _if_finite(prediction.db),
            "additive_db": _if_finite(prediction.additive_db),
            "cost_model": self.goal.cost,
            "unit": UNITS[self.goal.cost],
            "cost": self.cost_of(chosen),
            "cost_fp32": self.cost_of({}),
            "cost_lowest": self.cost_of(lowest),
            "lowest_format": lowest_format,
        }
        if self.goal.metric_drop is not None:
            about["metric_drop"] = parse_drop(self.goal.metric_drop)
        if asked is not None and asked.of:
            about["targets_db"] = dict(asked.of)
        if len(prediction.outputs) > 1:
            about["outputs_db"] = {
                o.output: _if_finite(o.db) for o in prediction.outputs
            }
        shared = self.shared(chosen)
        if shared:
            about["shared"] = shared
        if self.budget.about.target.name != "output":
            about["of"] = self.budget.about.target.name
        forwards = self.budget.about.forwards
        if forwards > 1:
            # numbers of calls go over that many forward passes
            about["forwards"] = forwards
        if self.goal.tie != SITE:
            about["tie"] = self.goal.tie
            return plan_by_operator(self.budget.sites, chosen, about)
        return Plan.from_formats(chosen, about)


def _offered(budget: Budget, formats: Sequence[str] | None) -> list[str]:
    """Return the names of the formats to choose from.

    Raises ``PlanError`` for formats that the budget did not measure.
    """
    measured = budget.about.formats
    offered = [parse_format(f).name for f in (measured if formats is None else formats)]
    missing = [name for name in offered if name not in (*measured, "fp32")]
    if missing:
        raise PlanError(
            f"the budget did not measure {', '.join(missing)}",
            where="formats",
            expected="formats among " + ", ".join(measured),
        )
    return offered


def _rules(
    goal: Goal, sites: Sequence[MeasuredSite]
) -> list[tuple[str, Sequence[str]]]:
    """Return pattern and allowed formats of each constraint, pins first.

    Raises ``PatternError`` for patterns that match no site and no parameter.
    """
    parameters = dict.fromkeys(name for site in sites for name in site.params)
    names = [*(site.site for site in sites), *parameters]
    for pattern in (*goal.pin, *goal.allow):
        select(pattern, names)
    pins = [(pattern, [fmt]) for pattern, fmt in goal.pin.items()]
    return [
        (pattern, [parse_format(fmt).name for fmt in formats])
        for pattern, formats in [*pins, *goal.allow.items()]
    ]


def _not_measured(pattern: str, reason: str, names: Sequence[str]) -> PlanError:
    return PlanError(
        f"the budget did not measure {pattern}",
        where="target",
        expected="one of " + ", ".join(names),
        got=reason,
    )


def _measured_together(pattern: str, outputs: Sequence[MeasuredOutput]) -> PlanError:
    together = [output.name for output in outputs if _holds(output, pattern)]
    return PlanError(
        f"the budget measured {pattern} with others",
        where="target",
        expected="one of " + ", ".join(output.name for output in outputs),
        got=f"a part of {', '.join(together)}",
        do=f"measure it by itself: roundoff budget --of {pattern}; or give the target to "
        "roundoff diagnose or quantize, which measure what it names",
    )


def _holds(output: MeasuredOutput, pattern: str) -> bool:
    return any(is_output(pattern, tensor) for tensor in output.tensors)


def _bound(db: float | None) -> float:
    """Return the most noise for an SQNR; infinite where nothing is asked."""
    return math.inf if db is None else 10 ** (-db / 10)


def _share(noise: float, bound: float) -> float:
    """Return how much of a bound noise takes; 0 of none."""
    if bound == math.inf:
        return 0.0 if math.isfinite(noise) else math.inf
    if bound == 0:
        return math.inf if noise else 0.0
    return noise / bound


def _moved(
    limits: Sequence[float], bounds: Sequence[float], noises: Sequence[float]
) -> list[float]:
    """Move additive limits to where the correlated noise is expected at the bounds.

    Errors that partly cancel leave room, errors that add up take it. While some output
    has too much noise, the limits of the others stay.
    """
    exceeded = any(map(operator.gt, noises, bounds))
    return [
        _moved_limit(limit, bound, noise)
        if bound < math.inf and exceeded == (noise > bound)
        else limit
        for limit, bound, noise in zip(limits, bounds, noises, strict=True)
    ]


def _moved_limit(limit: float, bound: float, noise: float) -> float:
    ratio = bound / noise if noise > 0 else 2.0
    step = min(max(ratio, STEP_DOWN), STEP_UP)
    return limit * step * (0.999 if ratio < 1 else 1.0)


def _cheapest_format(decision: Decision) -> str:
    """Return the cheapest format of a decision; those of finite noise come first."""
    open_to = [c for c in decision.choices if decision.pinned in (None, c.format)]
    finite = [choice for choice in open_to if math.isfinite(choice.worst)]
    return min(finite or open_to, key=lambda choice: choice.cost).format


def _if_finite(value: float) -> float | None:
    return value if math.isfinite(value) else None
