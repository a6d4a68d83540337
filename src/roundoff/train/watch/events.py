"""What ``roundoff watch`` has to tell, as data."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any, ClassVar


class Event:
    """Something to tell; ``to_dict`` has the name of the kind under ``event``."""

    name: ClassVar[str]

    def to_dict(self) -> dict[str, Any]:
        return {"event": self.name, **asdict(self)}  # type: ignore[call-overload]


@dataclass(frozen=True)
class StepEnd(Event):
    """A step that has ended. ``loss`` is the mean of what ran backward in it, without the loss scale; ``gradient_norm`` the
    L2 norm of the unscaled gradients before the optimizer's step (and after a clip that the script made), over the finite
    elements; ``non_finite`` the share of the others; ``loss_scale`` the one of the next step, None without a scaler."""

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
class Trouble(Event):
    """A step whose gradients are not finite. ``first`` is what the monitor saw first; the rest is that of ``skip.Skip``,
    None where the step was not run again."""

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
class Advice(Event):
    """Something in the loop that is not as it should be; ``rule`` is a key of ``rules.RULES``."""

    step: int
    rule: str
    text: str
    name: ClassVar[str] = "warning"


@dataclass(frozen=True)
class End(Event):
    """The script has ended; ``trouble`` says why the training did not end well, None where it did."""

    steps: int
    skips: int
    loss_scale: float | None
    trouble: str | None
    name: ClassVar[str] = "end"
