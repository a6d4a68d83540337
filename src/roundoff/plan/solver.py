"""Choose one format per decision, exactly: the least cost for a bound on noise, or the reverse."""

from __future__ import annotations

import math
import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace

import numpy as np

from roundoff.errors import InfeasibleError, PlanError
from roundoff.plan.knapsack import Choice, Decision, Edge, Knapsack
from roundoff.plan.milp import Bools, Floats, Limit, MilpResult, minimise, total

__all__ = ["Choice", "Decision", "Edge", "Solution", "solve"]


@dataclass(frozen=True)
class Solution:
    """The chosen format of each decision.

    Attributes:
        noise: relative noise power with edges, summed in float64: SQNR = -10
            log10(noise) dB; of several outputs that of the worst.
        noises: that of each output.
        cost: sum of the chosen costs.
        optimal: whether ``gap`` is within the asked one; false after the time limit.
        gap: (objective - proven lower bound) / objective, of the cost with
            ``max_noise``, of the noise with ``max_cost``.
    """

    formats: dict[str, str]
    noise: float
    cost: float
    optimal: bool
    gap: float
    noises: tuple[float, ...] = ()


def solve(
    decisions: Iterable[Decision],
    edges: Iterable[Edge] = (),
    *,
    max_noise: float | Sequence[float] | None = None,
    max_cost: float | None = None,
    outputs: Sequence[str] = (),
    time_limit: float = 30.0,
    relative_gap: float = 1e-6,
) -> Solution:
    """Find the least cost with ``noise <= max_noise``, or the least noise with ``cost <=
    max_cost``.

    The bound holds in float64 for the returned solution (sums by :func:`math.fsum`).
    Among plans of equal least cost (within 1e-9, relative) the one with less noise is
    taken; likewise less cost among plans of equal noise.

    Args:
        decisions: each name once.
        edges: operands whose rounding may be absorbed.
        max_noise: at least 0; ``inf`` for no bound. ``10 ** (-db / 10)`` for a target
            in dB. One number for all outputs, or one for each.
        max_cost: at least 0; ``inf`` for no bound. Of several outputs the sum of their
            noise is made least: it is at most as many times the least worst as there
            are outputs.
        outputs: names of several outputs, for messages.
        time_limit: seconds for all searches together. When it ends, the best plan so far is
            returned with its gap.
        relative_gap: a plan is optimal if its objective is within this of the proven bound.

    Returns:
        The solution; with no decisions, an empty one without noise or cost.

    Raises:
        PlanError: a name is unknown or used twice, a pinned format isn't offered, a
            cost isn't finite, noise is negative, not exactly one of the two bounds is
            given, or not even one plan was found in time.
        InfeasibleError: no plan meets the bound. ``best_db`` is the best reachable SQNR
            (``-inf`` if every plan overflows; ``nan`` if ``max_cost`` excludes every
            plan); of several outputs that of the one furthest from its bound, in a plan
            with little noise at all of them. ``short_db`` is by how much it is too low.
            ``pinned`` names the pinned decisions any one of which, unpinned, makes the
            target reachable; if no single one does, a smallest set that does together;
            empty if the pins are not what stands in the way.

    Example:
        >>> query = Decision("query", (Choice("fp32", 1e-14, 4.0), Choice("int8", 1e-4, 1.0)))
        >>> value = Decision("value", (Choice("fp32", 1e-14, 4.0), Choice("int8", 1e-3, 1.0)))
        >>> solution = solve([query, value], max_noise=10 ** (-35 / 10))
        >>> solution.formats, solution.cost, solution.optimal
        ({'query': 'int8', 'value': 'fp32'}, 5.0, True)
    """
    table = Knapsack.build(tuple(decisions), tuple(edges))
    _check_bounds(max_noise, max_cost)
    if not table.decisions:
        return Solution({}, 0.0, 0.0, True, 0.0)
    question = _question(table, max_noise, max_cost)
    deadline = time.monotonic() + time_limit

    # The plan with the least of the bounded quantity: shows whether any plan meets the
    # bound, and is one if so.
    least = question.least_of_bounded(relative_gap, deadline)
    best = question.best(least, relative_gap, deadline)
    if best.columns is None:
        if not best.complete or not least.complete:
            raise PlanError(
                "no plan found in time",
                expected="one plan that meets the bound",
                got=f"none in {time_limit:g} s",
                do="raise time_limit",
            )
        raise _infeasible(question, least, deadline, outputs)
    value = total(question.minimised, best.columns)
    gap = (value - best.bound) / value if value > 0.0 else 0.0
    tied = question.least_among_ties(best.columns, value, relative_gap, deadline)
    chosen = best.columns if tied.columns is None else tied.columns
    noises = tuple(total(noise, chosen) for noise in table.noises)
    return Solution(
        table.formats(chosen),
        max(noises),
        total(table.cost, chosen),
        gap <= relative_gap,
        gap,
        noises,
    )


def _question(
    table: Knapsack,
    max_noise: float | Sequence[float] | None,
    max_cost: float | None,
) -> _Question:
    """Return what is made least, and what is bounded."""
    if max_noise is None:
        bound = math.inf if max_cost is None else max_cost
        return _Question(table, _sum(table.noises), (Limit(table.cost, bound),), False)
    bounds = _bounds(max_noise)
    if len(bounds) == 1:
        bounds *= len(table.noises)
    if len(bounds) != len(table.noises):
        raise PlanError(
            "a target needs one bound for each output",
            where="max_noise",
            expected=f"{len(table.noises)} numbers",
            got=str(len(bounds)),
        )
    limits = tuple(map(Limit, table.noises, bounds))
    return _Question(table, table.cost, limits, True)


def _sum(rows: Sequence[Floats]) -> Floats:
    """Return the sum of several quantities; of one the quantity itself."""
    total_of: Floats = np.sum(rows, axis=0)
    return rows[0] if len(rows) == 1 else total_of


def _bounds(max_noise: float | Sequence[float]) -> tuple[float, ...]:
    return tuple(max_noise) if isinstance(max_noise, Sequence) else (max_noise,)


def _check_bounds(
    max_noise: float | Sequence[float] | None, max_cost: float | None
) -> None:
    if (max_noise is None) == (max_cost is None):
        raise PlanError(
            "a target needs one bound",
            expected="max_noise or max_cost",
            got="both or neither",
        )
    bounds = [("max_cost", max_cost)]
    if max_noise is not None:
        bounds = [("max_noise", bound) for bound in _bounds(max_noise)]
    for name, bound in bounds:
        if bound is not None and not bound >= 0.0:
            raise PlanError(
                "not a bound",
                where=name,
                expected="a number of at least 0",
                got=str(bound),
            )


@dataclass(frozen=True)
class _Question:
    """Minimise one quantity of the knapsack under limits on another: the cost, or the
    noise at each output.
    """

    table: Knapsack
    minimised: Floats
    bounded: tuple[Limit, ...]
    bounds_noise: bool

    @property
    def limits(self) -> list[Limit]:
        """The limits, and no overflow: that forbids a choice whatever is minimised."""
        return [*self.bounded, *self._finite]

    @property
    def _finite(self) -> list[Limit]:
        return [Limit(noise, math.inf) for noise in self.table.noises]

    @property
    def _together(self) -> Floats:
        """The bounded quantities as one: each in units of its bound, where there are several."""
        if len(self.bounded) == 1:
            return self.bounded[0].coefficients
        # a bound of 0 or without end has no such unit
        units = [
            limit.bound if 0 < limit.bound < math.inf else 1 for limit in self.bounded
        ]
        parts = [
            limit.coefficients / unit
            for limit, unit in zip(self.bounded, units, strict=True)
            if limit.bound < math.inf
        ]
        return _sum(parts or [limit.coefficients for limit in self.bounded])

    def least_of_bounded(self, relative_gap: float, deadline: float) -> MilpResult:
        return minimise(
            self.table.program,
            self._together,
            self._finite,
            relative_gap=relative_gap,
            deadline=deadline,
        )

    def best(
        self, least: MilpResult, relative_gap: float, deadline: float
    ) -> MilpResult:
        """The answer, from the plan with the least of the bounded quantity on."""
        # Closer to the bound than the solver's own tolerances, the answer is still open.
        if least.complete and least.bound > self._surely_broken * (1.0 + 1e-6):
            return MilpResult(None, math.inf, True)
        incumbent = least.columns
        if incumbent is not None and not self._admits(incumbent):
            incumbent = None
        return minimise(
            self.table.program,
            self.minimised,
            self.limits,
            incumbent=incumbent,
            relative_gap=relative_gap,
            deadline=deadline,
        )

    @property
    def _surely_broken(self) -> float:
        """More than this of the bounded quantities together breaks one of the bounds."""
        if len(self.bounded) == 1:
            return self.bounded[0].bound
        bounds = [limit.bound for limit in self.bounded if limit.bound < math.inf]
        return float(sum(bound > 0 for bound in bounds)) if bounds else math.inf

    def _admits(self, columns: Bools) -> bool:
        return all(
            total(limit.coefficients, columns) <= limit.bound for limit in self.bounded
        )

    def least_among_ties(
        self, columns: Bools, value: float, relative_gap: float, deadline: float
    ) -> MilpResult:
        """The least of the bounded quantity among plans as good as ``columns``."""
        return minimise(
            self.table.program,
            self._together,
            [*self.limits, Limit(self.minimised, value * (1.0 + 1e-9))],
            incumbent=columns,
            relative_gap=relative_gap,
            deadline=deadline,
        )

    def furthest(self, columns: Bools | None) -> tuple[int, float]:
        """Number of the limit that these columns exceed most, and how much of it they have."""
        if columns is None:
            return 0, math.inf
        reached = [total(limit.coefficients, columns) for limit in self.bounded]
        excess = list(map(_excess, self.bounded, reached))
        place = excess.index(max(excess))
        return place, reached[place]


def _excess(limit: Limit, reached: float) -> float:
    """Ratio of a quantity to its bound; negative within a bound of 0 or without end."""
    if 0.0 < limit.bound < math.inf:
        return reached / limit.bound
    return math.inf if reached > limit.bound else -1.0


def _infeasible(
    question: _Question, least: MilpResult, deadline: float, outputs: Sequence[str]
) -> InfeasibleError:
    """The error for an unreachable bound: what is reachable, and which pins are to blame."""
    place, reachable = question.furthest(least.columns)
    limit = question.bounded[place]
    describe = _too_noisy if question.bounds_noise else _too_dear
    best_db, expected, got, ask = describe(limit.bound, reachable)
    alone, together, complete = _blame(question.table, question.limits, deadline)
    if alone:
        several = len(alone) > 1
        unpin = f"unpin one of {', '.join(alone)}" if several else f"unpin {alone[0]}"
    elif together:
        unpin = f"unpin all of {', '.join(together)}"
    else:
        wider = question.bounds_noise
        unpin = "offer wider formats" if wider else "offer narrower formats"
        unpin += "" if complete else " (the time ran out before every pin was examined)"
    short_db = math.inf
    if question.bounds_noise and limit.bound > 0.0:
        short_db = -10.0 * math.log10(limit.bound) - best_db
    is_named = question.bounds_noise and len(outputs) > 1
    return InfeasibleError(
        "no choice of formats meets the target",
        where=f"output {outputs[place]}" if is_named else None,
        expected=expected,
        got=got,
        do=", or ".join(filter(None, (unpin, ask))),
        best_db=best_db,
        short_db=short_db,
        pinned=alone or together,
    )


def _too_noisy(bound: float, reachable: float) -> tuple[float, str, str, str]:
    """(best dB, expected, got, what to ask for) where the bound is one on noise."""
    expected = "no noise at all"
    if bound != 0.0:
        expected = f"at least {-10.0 * math.log10(bound):.2f} dB"
    if reachable == math.inf:
        return -math.inf, expected, "an overflow in every plan", ""
    best_db = math.inf if reachable == 0.0 else -10.0 * math.log10(reachable)
    # Rounded down, so that asking for the printed number succeeds.
    rounded_down = math.floor(best_db * 100.0) / 100.0
    ask = f"ask for at most {rounded_down:.2f} dB"
    return best_db, expected, f"{best_db:.2f} dB at best", ask


def _too_dear(bound: float, reachable: float) -> tuple[float, str, str, str]:
    """(no dB, expected, got, what to ask for) where the bound is one on cost."""
    expected = f"a cost of at most {bound:.6g}"
    if reachable == math.inf:
        return math.nan, expected, "an overflow in every plan", ""
    ask = f"allow a cost of {reachable:.6g}"
    return math.nan, expected, f"{reachable:.6g} at least", ask


def _blame(
    table: Knapsack, limits: list[Limit], deadline: float
) -> tuple[list[str], list[str], bool]:
    """Pinned decisions that alone make the bound reachable when unpinned; else a
    smallest set that does together.

    Each round asks for a plan that leaves the fewest pins; a single pin found is held
    and the question put again. The last value is false if the time ran out before the
    answer was complete.
    """
    choices = [
        (decision, choice)
        for decision in table.decisions
        for choice in decision.choices
    ]
    moved = np.array(
        [d.pinned is not None and c.format != d.pinned for d, c in choices]
    )
    allowed = np.ones(len(choices), dtype=bool)
    alone: list[str] = []
    while (moved & allowed).any():
        count = np.concatenate(
            [moved.astype(float), np.zeros(len(table.program.links))]
        )
        program = replace(table.program, allowed=allowed.copy())
        outcome = minimise(program, count, limits, relative_gap=0.0, deadline=deadline)
        if outcome.columns is None or not outcome.complete:
            return alone, [], outcome.complete
        unpinned = [
            choices[at][0].name
            for at in np.flatnonzero(moved & outcome.columns[: len(choices)])
        ]
        if len(unpinned) != 1:
            return alone, [] if alone else unpinned, True
        alone += unpinned
        allowed &= ~moved | np.array([d.name not in unpinned for d, _ in choices])
    return alone, [], True
