"""What loops do otherwise: as a cause, and in words."""

from __future__ import annotations

from roundoff.compare.judging.step_causes import LOOP, Cause, with_line
from roundoff.compare.loop.optimizer_steps import OptimizerStep
from roundoff.record import LoopEvent


def loop_cause(
    twin: OptimizerStep,
    step: OptimizerStep,
    rank: int,
    *,
    name: str,
    evidence: str,
    phase: str,
    label: str = "other loop",
    shown: LoopEvent | None = None,
    reference: LoopEvent | None = None,
) -> Cause:
    """Return what a loop does otherwise for a step of an optimizer.

    Args:
        twin: the reference's step.
        step: the candidate's.
        rank: of both.
        name: of what is done, by which a cause is told once.
        evidence: in words.
        phase: in which values show it.
        label: what it looks like.
        shown: where it is done; None for the step.
        reference: the reference's place.
    """
    at = shown or step.event
    return Cause(
        kind=LOOP,
        label=label,
        evidence=evidence,
        step=min(twin.step, step.step),
        rank=rank,
        phase=phase,
        name=name,
        at=at.call,
        line=at.line,
        reference_line=(reference or twin.event).line,
        decides=True,
    )


def called(event: LoopEvent) -> str:
    """Return what is called, with its line."""
    return with_line(event.what, event.line)


def times(noun: str, count: int) -> str:
    """Return a count with its noun.

    >>> times("backward pass", 1), times("backward pass", 2), times("time", 0)
    ('1 backward pass', '2 backward passes', '0 times')
    """
    plural = f"{noun}es" if noun.endswith("s") else f"{noun}s"
    return f"{count} {noun if count == 1 else plural}"
