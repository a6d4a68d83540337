"""Goal: what a plan is chosen for."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from roundoff.budget.aim import is_drop, parse_drop
from roundoff.budget.sqnr_target import SqnrTarget, TargetText, parse_target
from roundoff.budget.targets import drop_to_db
from roundoff.budget.ties import SITE, check_tie
from roundoff.errors import PlanError, did_you_mean, nearest
from roundoff.formats import parse_format
from roundoff.plan import UNITS

if TYPE_CHECKING:
    from roundoff.budget.facts import MetricCurve


@dataclass(frozen=True, slots=True, kw_only=True)
class Goal:
    """What a plan is to reach, what it is to save, and what it may not touch.

    One of ``target``, ``metric_drop`` and ``max_cost`` is the aim. What cannot be meant
    raises when the goal is made, before anything is measured: ``PlanError``, and
    ``FormatError`` for the formats.

    Attributes:
        target: least SQNR of every output: ``40``, ``"40dB"``; or of each by name:
            ``"cls=40dB,price=30dB"``, ``{"cls": 40, "price": 30}``. ``"0.5%"`` is a
            ``metric_drop``, and is kept as one.
        metric_drop: most the metric may lose: ``0.005``, ``"0.5%"``.
        max_cost: most the plan may cost, in the unit of ``cost`` (MB, Gbitops, ms).
        cost: what to save, a key of ``roundoff.plan.UNITS``.
        cost_table: seconds per operation, for the cost ``seconds``.
        pin: format of sites, by glob patterns over site and parameter names.
        allow: formats that sites may take, by patterns likewise; first match first.
        formats: offered formats; None for all that the budget measured.
        tie: what runs in one format: each ``site`` for itself, all calls of an
            ``operator``, or all of one operator type of ``ascend``, ``paddle`` or
            ``tensorflow``.
    """

    target: TargetText | None = None
    metric_drop: float | str | None = None
    max_cost: float | None = None
    cost: str = "bytes"
    cost_table: Any = None
    pin: Mapping[str, str] = field(default_factory=dict)
    allow: Mapping[str, Sequence[str]] = field(default_factory=dict)
    formats: Sequence[str] | None = None
    tie: str = SITE

    def __post_init__(self) -> None:
        if is_drop(self.target) and self.metric_drop is None:
            object.__setattr__(self, "metric_drop", self.target)
            object.__setattr__(self, "target", None)
        if self.target is not None:
            parse_target(self.target)
        if self.metric_drop is not None:
            parse_drop(self.metric_drop)
        if self.max_cost is not None and not self.max_cost >= 0:
            raise PlanError(
                "not a cost",
                where="max_cost",
                expected="a number of at least 0",
                got=str(self.max_cost),
            )
        if len(self._aims) > 1:
            raise _not_one_aim(self._aims)
        self._check_names()

    @property
    def _aims(self) -> list[str]:
        """The names of the aims that are set."""
        aims = {
            "target": self.target,
            "metric_drop": self.metric_drop,
            "max_cost": self.max_cost,
        }
        return [name for name, value in aims.items() if value is not None]

    def _check_names(self) -> None:
        """Raise for a cost model, a tie or a format that does not exist."""
        check_tie(self.tie)
        if self.cost not in UNITS:
            raise PlanError(
                "unknown cost model",
                where="cost",
                expected=", ".join(UNITS),
                got=repr(self.cost),
                do=did_you_mean(nearest(self.cost, UNITS, at_most=1)),
            )
        allowed = [fmt for formats in self.allow.values() for fmt in formats]
        for fmt in (*self.pin.values(), *allowed, *(self.formats or ())):
            parse_format(fmt)

    def aim(self, metric: MetricCurve | None) -> tuple[SqnrTarget | None, str]:
        """Return the SQNR to reach, and a sentence on where it comes from.

        None where the cost is bounded instead. Raises ``PlanError`` unless there is one
        aim, and where ``metric_drop`` is not reachable (see ``drop_to_db``).
        """
        if not self._aims:
            raise _not_one_aim([])
        if self.metric_drop is not None:
            db, note = drop_to_db(metric, parse_drop(self.metric_drop))
            return SqnrTarget(db), note
        return None if self.target is None else parse_target(self.target), ""

    @property
    def apart(self) -> tuple[str, ...]:
        """The outputs that the target names."""
        return () if self.target is None else parse_target(self.target).patterns


def _not_one_aim(aims: Sequence[str]) -> PlanError:
    return PlanError(
        "one aim is needed",
        where="plan",
        expected="one of target, metric_drop and max_cost",
        got=" and ".join(aims) or "none",
    )
