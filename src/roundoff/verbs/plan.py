"""``roundoff.plan``: the cheapest plan that meets a target, from a budget."""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from roundoff.budget import Budget
from roundoff.files import as_path
from roundoff.plan import Plan


def plan(
    budget: Budget | str | os.PathLike[str],
    target: float | str | None = None,
    *,
    metric_drop: float | str | None = None,
    max_cost: float | None = None,
    cost: str = "bytes",
    cost_table: Any = None,
    pin: Mapping[str, str] | None = None,
    allow: Mapping[str, Sequence[str]] | None = None,
    formats: Iterable[str] | None = None,
    tie: str = "site",
) -> Plan:
    """Choose a format for each site: the cheapest plan whose predicted SQNR is enough.

    The model is not needed. Give one of ``target``, ``metric_drop`` and ``max_cost``.

    Args:
        budget: a budget, or the path of the file that ``Budget.save`` wrote.
        target: least SQNR of the output: ``40``, ``"40dB"``.
        metric_drop: most the metric may lose: ``0.005``, ``"0.5%"`` of 1. The budget
            says what that is in dB.
        max_cost: most the plan may cost, in the unit of ``cost`` (MB, Gbitops, ms); the
            plan is then the most exact one.
        cost: what to save: ``bytes``, ``storage``, ``bitops``, ``seconds`` or
            ``operators``.
        cost_table: seconds per operation, for the cost ``seconds``.
        pin: format of sites, by glob patterns over site and parameter names.
        allow: formats that sites may take, by patterns likewise; first match first.
        formats: offered formats; all that the budget measured by default.
        tie: what runs in one format: each ``"site"`` for itself, all calls of an
            ``"operator"``, or all of one operator type of ``"ascend"``, ``"paddle"`` or
            ``"tensorflow"``, for whose lists ``write_lists`` writes the plan.

    Raises:
        PlanError: contradictory arguments, or the file is no budget.
        PatternError: a pattern matches nothing.
        InfeasibleError: no plan reaches the target.
    """
    measured = budget
    if not isinstance(measured, Budget):
        measured = Budget.load(
            as_path(
                budget, "budget", "a Budget, or the file of one: roundoff.budget(...)"
            )
        )
    return measured.plan(
        target,
        metric_drop=metric_drop,
        max_cost=max_cost,
        cost=cost,
        cost_table=cost_table,
        pin=pin,
        allow=allow,
        formats=formats,
        tie=tie,
    )
