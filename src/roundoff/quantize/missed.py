"""missed: why a target cannot be met, in words: how far the offered formats come, and whose noise is in the way."""

from __future__ import annotations

from collections.abc import Mapping

from roundoff.plan.budget import power
from roundoff.plan.choose import Problem
from roundoff.plan.plan import Plan

#: What calibration and repair are expected to gain over plain rounding, in dB, before anything is measured.
EXPECTED_GAIN = 6.0


def quietest(problem: Problem) -> str:
    """How far all sites that may leave fp32 come, each in the best format that it was offered."""
    chosen: dict[str, str] = {}
    for decision in problem.decisions:
        offered = [choice for choice in decision.choices if choice.format != "fp32"]
        if offered:
            chosen |= dict.fromkeys(problem.groups[decision.name], min(offered, key=lambda c: c.noise).format)
    if not chosen:
        return "none can run in another format"
    reached = problem.budget.predict(chosen).db + EXPECTED_GAIN
    return f"quantized as well as they can be, {len(chosen)} sites reach about {reached:.0f} dB; {_loudest(problem, chosen)}"


def in_the_way(problem: Problem, plan: Plan, reached: float, pins: Mapping[str, str]) -> str:
    """Why the best plan, which reaches so many dB, misses the target."""
    chosen = plan.formats(list(problem.info))
    fixed = [f"{pattern}={fmt}" for pattern, fmt in pins.items() if fmt != "fp32"]
    return f"the best plan found reaches {reached:.1f} dB: {_loudest(problem, chosen)}" + (
        f"; fixed: {', '.join(fixed)}" * bool(fixed))  # fmt: skip


def _loudest(problem: Problem, chosen: Mapping[str, str], top: int = 3) -> str:
    """The sites that a plan's noise comes from."""
    noise = {site: power(problem.budget.rows(site, fmt))[0] for site, fmt in chosen.items() if fmt != "fp32"}
    total = sum(noise.values())
    worst = sorted(noise, key=lambda site: -noise[site])[:top]
    said = ", ".join(f"{site} in {chosen[site]} ({noise[site] / total:.0%})" for site in worst if total > 0)
    return f"most noise comes from {said}" if said else "none of them makes noise"
