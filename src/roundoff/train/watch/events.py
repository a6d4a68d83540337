"""What ``roundoff watch`` tells of a training, one event at a time."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any, ClassVar


class WatchEvent:
    """Something to tell."""

    #: the kind of event
    name: ClassVar[str]

    def to_dict(self) -> dict[str, Any]:
        """Return plain data; the kind stands under ``event``."""
        return {"event": self.name, **asdict(self)}  # type: ignore[call-overload]


@dataclass(frozen=True)
class StepEnd(WatchEvent):
    """A step has ended.

    Attributes:
        step: its number, from 0.
        loss: mean of what ran backward in it, without the loss scale; None without.
        loss_scale: that of the next step; None without a scaler.
        gradient_norm: L2 norm of the unscaled gradients before the optimizer's step (and
            after a clip that the script made), over the finite elements; None without.
        non_finite: share of the other elements.
        skipped: the scaler skipped the step.
        skips: number of skipped steps so far.
        lr: learning rate.
    """

    step: int
    loss: float | None
    loss_scale: float | None
    gradient_norm: float | None
    non_finite: float
    skipped: bool
    skips: int
    lr: float | None
    name: ClassVar[str] = "step"


@dataclass(frozen=True)
class BadGradients(WatchEvent):
    """The gradients of a step are not finite.

    Attributes:
        step: its number.
        scale: the loss scale; None without a scaler.
        skipped: a scaler skips the step.
        first: what the monitor saw first.
        gradient, made_by, born, origin, phase, line, cause, advice, notes: see ``Skip``;
            None where the step was not run again.
    """

    step: int
    scale: float | None
    skipped: bool
    first: str | None
    gradient: str | None = None
    made_by: str | None = None
    born: bool | None = None
    origin: str | None = None
    phase: str | None = None
    line: str | None = None
    cause: str | None = None
    advice: str | None = None
    notes: tuple[str, ...] = ()
    name: ClassVar[str] = "not finite"


@dataclass(frozen=True)
class LostLoss(WatchEvent):
    """The loss of a step is not finite, though its gradients are.

    Attributes:
        step: its number.
        first: what the monitor saw first.
        phase: where it was born: loss, data, weights; None where it is not known.
        origin, line, cause, advice: see ``Skip``.
    """

    step: int
    first: str | None
    phase: str | None = None
    origin: str | None = None
    line: str | None = None
    cause: str | None = None
    advice: str | None = None
    name: ClassVar[str] = "loss not finite"


@dataclass(frozen=True)
class LoopAdvice(WatchEvent):
    """The training loop has a fault; ``rule`` is a key of ``advice.RULES``, ``code`` the
    rule of ``roundoff lint`` that finds it without running; empty where only a run shows it.
    """

    step: int
    rule: str
    text: str
    code: str = ""
    name: ClassVar[str] = "warning"


@dataclass(frozen=True)
class WatchSummary(WatchEvent):
    """The script has ended.

    Attributes:
        steps: number of steps.
        skips: number of skipped ones.
        loss_scale: at the end; None without a scaler.
        trouble: why the training did not end well; None where it did.
        warnings: how many faults of the loop were said.
    """

    steps: int
    skips: int
    loss_scale: float | None
    trouble: str | None
    warnings: int = 0
    name: ClassVar[str] = "end"
