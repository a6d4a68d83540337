"""What a training loop does, as events in their order."""

from __future__ import annotations

import ast
import enum
from dataclasses import dataclass, field

from roundoff.lint.things import Thing


class Act(enum.Enum):
    """What happens at an event."""

    FORWARD = "forward"  # a model is called
    LOSS = "loss"  # a loss function is called
    BACKWARD = "backward"
    UNSCALE = "unscale"  # by a scaler, or without one by ``p.grad /= scale``
    CLIP = "clip"
    GRADIENT = "gradient"  # the value of ``p.grad`` is used
    STEP = "step"  # of an optimizer, by itself
    SCALER_STEP = "scaler step"  # of an optimizer, by a scaler
    UPDATE = "update"  # of a scaler
    ZERO_GRAD = "zero_grad"
    SCHEDULER_STEP = "scheduler step"
    SAVE = "save"
    EVAL = "eval"
    TRAIN = "train"
    CREATE = "create"  # a scaler, an optimizer, a model … is made


@dataclass(frozen=True)
class Condition:
    """What holds where an event happens: a test of an ``if`` came out so."""

    test: str
    outcome: bool


@dataclass(frozen=True, eq=False)
class Event:
    """Something that a loop does.

    Args:
        act: what.
        node: the call, also in a helper function that the loop calls; of GRADIENT the
            attribute, of ``p.grad = None`` the assignment.
        subject: the object it is done with: the optimizer that steps, the scaler that
            updates, the model that is called. None where it is not known.
        scaler: of BACKWARD, STEP, UNSCALE: the scaler, where one takes part.
        is_managed: a library (accelerate, Fabric, DeepSpeed) scales by itself.
        conditions: what holds here, of the tests inside the loop.
        contexts: ``with`` items around it, the outermost first, also those of callers.
        loops: loops around it, the outermost first; the training loop is the first one.
        order: its place in the loop.
    """

    act: Act
    node: ast.AST
    subject: Thing | None
    scaler: Thing | None = None
    is_managed: bool = False
    conditions: frozenset[Condition] = frozenset()
    contexts: tuple[ast.expr, ...] = ()
    loops: tuple[ast.AST, ...] = ()
    order: int = 0

    def may_meet(self, other: Event) -> bool:
        """Return True where one iteration can reach both events."""
        return not any(
            Condition(each.test, not each.outcome) in other.conditions
            for each in self.conditions
        )

    def implies(self, other: Event) -> bool:
        """Return True where an iteration that reaches this event reaches the other too."""
        return other.conditions <= self.conditions


@dataclass(frozen=True, eq=False)
class Loop:
    """A loop, or a function that something outside the script calls again and again,
    and the events of one iteration.

    ``node`` is the ``for`` or ``while`` statement, or the function.
    """

    node: ast.AST
    events: tuple[Event, ...] = field(default=())

    def of(self, *acts: Act) -> list[Event]:
        """Return the events of these acts in their order."""
        return [event for event in self.events if event.act in acts]

    def before(self, event: Event, *acts: Act) -> list[Event]:
        """Return the events of these acts that may happen before one, in its iteration."""
        return [
            each
            for each in self.of(*acts)
            if each.order < event.order and each.may_meet(event)
        ]

    def after(self, event: Event, *acts: Act) -> list[Event]:
        """Return the events of these acts that may happen after one, in its iteration."""
        return [
            each
            for each in self.of(*acts)
            if each.order > event.order and each.may_meet(event)
        ]
