"""Why a target cannot be met, in words: how far the offered formats come, and whose noise is in the way."""

from __future__ import annotations

import math
from collections.abc import Mapping

from roundoff.budget import Budget, Problem
from roundoff.plan import Plan

#: What calibration and repair are expected to gain over plain rounding, in dB, before anything is measured.
EXPECTED_GAIN = 6.0


def quietest(problem: Problem) -> str:
    """How far all sites that may leave fp32 come, each in the best format that it was offered."""
    chosen: dict[str, str] = {}
    for decision in problem.decisions:
        offered = [choice for choice in decision.choices if choice.format != "fp32"]
        if offered:
            chosen |= dict.fromkeys(
                problem.groups[decision.name],
                min(offered, key=lambda c: c.noise).format,
            )
    if not chosen:
        return "none can run in another format"
    reached = problem.budget.predict(chosen).db + EXPECTED_GAIN
    return f"quantized as well as they can be, {len(chosen)} sites reach about {reached:.0f} dB; {_loudest(problem, chosen)}"


def in_the_way(
    problem: Problem, plan: Plan, reached: float, pins: Mapping[str, str]
) -> str:
    """Why the best plan, which reaches so many dB, misses the target."""
    chosen = plan.formats(list(problem.info))
    fixed = [f"{pattern}={fmt}" for pattern, fmt in pins.items() if fmt != "fp32"]
    return (
        f"the best plan found reaches {reached:.1f} dB: {_loudest(problem, chosen)}"
        + (f"; fixed: {', '.join(fixed)}" * bool(fixed))
    )


def shares(budget: Budget, formats: Mapping[str, str]) -> dict[str, float]:
    """Each site's share of the noise that a budget predicts, errors taken as independent, the largest first.

    Sites without noise are left out; infinite noise (an overflow) is a share of 1.
    """
    noise = {
        site: budget.predict({site: fmt}).additive
        for site, fmt in formats.items()
        if fmt != "fp32"
    }
    total = sum(value for value in noise.values() if math.isfinite(value))
    found = {
        site: value / total if math.isfinite(value) else 1.0
        for site, value in noise.items()
        if value > 0
    }
    return dict(sorted(found.items(), key=lambda item: -item[1]))


def _loudest(problem: Problem, chosen: Mapping[str, str], top: int = 3) -> str:
    """The sites that a plan's noise comes from."""
    worst = list(shares(problem.budget, chosen).items())[:top]
    said = ", ".join(f"{site} in {chosen[site]} ({share:.0%})" for site, share in worst)
    return f"most noise comes from {said}" if said else "none of them makes noise"
