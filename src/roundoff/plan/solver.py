"""Choose one format per decision, exactly: the least cost for a bound on noise, or the reverse."""

from __future__ import annotations

import math
import time
from collections.abc import Iterable
from dataclasses import dataclass, replace

import numpy as np

from roundoff.errors import InfeasibleError, PlanError
from roundoff.plan.knapsack import Choice, Decision, Edge, Knapsack
from roundoff.plan.milp import Limit, Outcome, minimise, total

__all__ = ["Choice", "Decision", "Edge", "Solution", "solve"]


@dataclass(frozen=True)
class Solution:
    """The chosen format of each decision.

    Attributes:
        noise: relative noise power with edges, summed in float64: SQNR = -10 log10(noise) dB.
        cost: sum of the chosen costs.
        optimal: whether ``gap`` is within the asked one; false after the time limit.
        gap: (objective - proven lower bound) / objective, of the cost with ``max_noise``, of the
            noise with ``max_cost``.
    """

    formats: dict[str, str]
    noise: float
    cost: float
    optimal: bool
    gap: float


def solve(
    decisions: Iterable[Decision],
    edges: Iterable[Edge] = (),
    *,
    max_noise: float | None = None,
    max_cost: float | None = None,
    time_limit: float = 30.0,
    relative_gap: float = 1e-6,
) -> Solution:
    """Find the least cost with ``noise <= max_noise``, or the least noise with ``cost <=
    max_cost``.

    The bound holds in float64 for the returned solution (sums by :func:`math.fsum`). Among plans of
    equal least cost (within 1e-9, relative) the one with less noise is taken; likewise less cost
    among plans of equal noise.

    Args:
        decisions: each name once.
        edges: operands whose rounding may be absorbed.
        max_noise: at least 0; ``inf`` for no bound. ``10 ** (-db / 10)`` for a target in dB.
        max_cost: at least 0; ``inf`` for no bound.
        time_limit: seconds for all searches together. When it ends, the best plan so far is
            returned with its gap.
        relative_gap: a plan is optimal if its objective is within this of the proven bound.

    Returns:
        The solution; with no decisions, an empty one without noise or cost.

    Raises:
        PlanError: a name is unknown or used twice, a pinned format isn't offered, a cost isn't
            finite, noise is negative, not exactly one of the two bounds is given, or not even one
            plan was found in time.
        InfeasibleError: no plan meets the bound. ``best_db`` is the best reachable SQNR (``-inf``
            if every plan overflows; ``nan`` if ``max_cost`` excludes every plan). ``pinned`` names
            the pinned decisions any one of which, unpinned, makes the target reachable; if no
            single one does, a smallest set that does together; empty if the pins are not what
            stands in the way.

    Example:
        >>> query = Decision("query", (Choice("fp32", 1e-14, 4.0), Choice("int8", 1e-4, 1.0)))
        >>> value = Decision("value", (Choice("fp32", 1e-14, 4.0), Choice("int8", 1e-3, 1.0)))
        >>> solution = solve([query, value], max_noise=10 ** (-35 / 10))
        >>> solution.formats, solution.cost, solution.optimal
        ({'query': 'int8', 'value': 'fp32'}, 5.0, True)
    """
    table = Knapsack.build(tuple(decisions), tuple(edges))
    if (max_noise is None) == (max_cost is None):
        raise PlanError(
            "a target needs one bound",
            expected="max_noise or max_cost",
            got="both or neither",
        )
    for name, bound in (("max_noise", max_noise), ("max_cost", max_cost)):
        if bound is not None and not bound >= 0.0:
            raise PlanError(
                "not a bound",
                where=name,
                expected="a number of at least 0",
                got=str(bound),
            )
    if not table.decisions:
        return Solution({}, 0.0, 0.0, True, 0.0)
    deadline = time.monotonic() + time_limit
    minimised, bounded = (
        (table.cost, table.noise) if max_cost is None else (table.noise, table.cost)
    )
    limit = Limit(
        bounded,
        max_noise
        if max_noise is not None
        else max_cost
        if max_cost is not None
        else math.inf,
    )
    finite = Limit(
        table.noise, math.inf
    )  # overflow forbids a choice whatever is minimised

    # The plan with the least of the bounded quantity: shows whether any plan meets the bound, and
    # is one if so.
    least = minimise(
        table.program, bounded, [finite], relative_gap=relative_gap, deadline=deadline
    )
    incumbent = least.columns
    if incumbent is not None and total(bounded, incumbent) > limit.bound:
        incumbent = None
    # Closer to the bound than the solver's own tolerances, the answer is still open.
    surely_infeasible = least.complete and least.bound > limit.bound * (1.0 + 1e-6)
    best = Outcome(None, math.inf, True)
    if not surely_infeasible:
        best = minimise(
            table.program,
            minimised,
            [limit, finite],
            incumbent=incumbent,
            relative_gap=relative_gap,
            deadline=deadline,
        )
    if best.columns is None:
        if not best.complete or not least.complete:
            raise PlanError(
                "no plan found in time",
                expected="one plan that meets the bound",
                got=f"none in {time_limit:g} s",
                do="raise time_limit",
            )
        reachable = math.inf if least.columns is None else total(bounded, least.columns)
        raise _infeasible(
            table,
            limit,
            [limit, finite],
            reachable,
            deadline,
            noise_bound=max_cost is None,
        )
    value = total(minimised, best.columns)
    gap = (value - best.bound) / value if value > 0.0 else 0.0
    ties = [limit, finite, Limit(minimised, value * (1.0 + 1e-9))]
    tied = minimise(
        table.program,
        bounded,
        ties,
        incumbent=best.columns,
        relative_gap=relative_gap,
        deadline=deadline,
    )
    chosen = best.columns if tied.columns is None else tied.columns
    return Solution(
        table.formats(chosen),
        total(table.noise, chosen),
        total(table.cost, chosen),
        gap <= relative_gap,
        gap,
    )


def _infeasible(
    table: Knapsack,
    limit: Limit,
    limits: list[Limit],
    reachable: float,
    deadline: float,
    *,
    noise_bound: bool,
) -> InfeasibleError:
    """The error for an unreachable bound: what is reachable, and which pins are to blame."""
    alone, together, complete = _blame(table, limits, deadline)
    if noise_bound:
        best_db = math.inf if reachable == 0.0 else -10.0 * math.log10(reachable)
        expected = (
            "no noise at all"
            if limit.bound == 0.0
            else f"at least {-10.0 * math.log10(limit.bound):.2f} dB"
        )
        got = (
            f"{best_db:.2f} dB at best"
            if reachable < math.inf
            else "an overflow in every plan"
        )
        # Rounded down, so that asking for the printed number succeeds.
        ask = (
            f"ask for at most {math.floor(best_db * 100.0) / 100.0:.2f} dB"
            if reachable < math.inf
            else ""
        )
    else:
        best_db = math.nan
        expected = f"a cost of at most {limit.bound:.6g}"
        got = (
            f"{reachable:.6g} at least"
            if reachable < math.inf
            else "an overflow in every plan"
        )
        ask = f"allow a cost of {reachable:.6g}" if reachable < math.inf else ""
    if alone:
        unpin = (
            f"unpin {alone[0]}"
            if len(alone) == 1
            else f"unpin one of {', '.join(alone)}"
        )
    elif together:
        unpin = f"unpin all of {', '.join(together)}"
    else:
        unpin = "offer wider formats" if noise_bound else "offer narrower formats"
        unpin += "" if complete else " (the time ran out before every pin was examined)"
    return InfeasibleError(
        "no choice of formats meets the target",
        expected=expected,
        got=got,
        do=", or ".join(filter(None, (unpin, ask))),
        best_db=best_db,
        pinned=alone or together,
    )


def _blame(
    table: Knapsack, limits: list[Limit], deadline: float
) -> tuple[list[str], list[str], bool]:
    """Pinned decisions that alone make the bound reachable when unpinned; else a smallest set that
    does together.

    Each round asks for a plan that leaves the fewest pins; a single pin found is held and the
    question put again. The last value is false if the time ran out before the answer was complete.
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
        found = minimise(program, count, limits, relative_gap=0.0, deadline=deadline)
        if found.columns is None or not found.complete:
            return alone, [], found.complete
        left = [
            choices[at][0].name
            for at in np.flatnonzero(moved & found.columns[: len(choices)])
        ]
        if len(left) != 1:
            return alone, [] if alone else left, True
        alone += left
        allowed &= ~moved | np.array([d.name not in left for d, _ in choices])
    return alone, [], True
