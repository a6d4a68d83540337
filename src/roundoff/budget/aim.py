"""What a plan aims for, as users write it: decibels, or a drop of the metric."""

from __future__ import annotations

import math
import re
from typing import NamedTuple

from roundoff.budget.sqnr_target import SqnrTarget, TargetText, parse_target
from roundoff.errors import PlanError

_DROP = re.compile(r"\s*(\d+(?:\.\d*)?(?:[eE][+-]?\d+)?)\s*(%?)\s*")


class Aim(NamedTuple):
    """An aim; at most one of the two is set.

    Attributes:
        target: least SQNR of every output, or of each.
        metric_drop: most the metric may lose, in its own unit.
    """

    target: SqnrTarget | None = None
    metric_drop: float | None = None


def parse_drop(value: float | str) -> float:
    """Read a drop of the metric in its own unit: ``0.005``, or ``"0.5%"`` of 1.

    Raises ``PlanError`` for anything else, and for more than 100 %.

    >>> parse_drop("0.5%"), parse_drop(0.01)
    (0.005, 0.01)
    """
    match = _DROP.fullmatch(str(value))
    drop = math.inf
    if match is not None:
        drop = float(match[1]) / (100 if match[2] else 1)
    is_more_than_all = match is not None and bool(match[2]) and drop > 1
    if is_more_than_all or not math.isfinite(drop):
        raise PlanError(
            "not a drop of the metric",
            where="metric_drop",
            expected="0.5% or 0.005; at most 100%",
            got=repr(value),
        )
    return drop


def parse_aim(
    target: TargetText | SqnrTarget | None, metric_drop: float | str | None = None
) -> Aim:
    """Read what is aimed for: ``"40dB"``, ``40``, ``"cls=40dB,price=30dB"`` or ``"0.5%"``.

    A percentage is the most that the metric may lose, as ``metric_drop`` is. Raises
    ``PlanError`` for what is neither, and for both of them.

    >>> parse_aim("-5dB").target.db, parse_aim("0.5%").metric_drop
    (-5.0, 0.005)
    """
    if target is not None and metric_drop is not None:
        raise PlanError(
            "one aim is needed",
            where="plan",
            expected="one of target, metric_drop and max_cost",
            got="target and metric_drop",
        )
    if is_drop(target):
        return Aim(metric_drop=parse_drop(str(target)))
    if metric_drop is not None:
        return Aim(metric_drop=parse_drop(metric_drop))
    return Aim() if target is None else Aim(target=parse_target(target))


def is_drop(target: TargetText | SqnrTarget | None) -> bool:
    """Return True for a target that is a share of the metric: ``"0.5%"``."""
    return isinstance(target, str) and "%" in target
