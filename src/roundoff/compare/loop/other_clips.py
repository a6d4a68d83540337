"""Gradients that are clipped in one loop alone, at another time or to another limit."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from roundoff.compare.judging.step_causes import Cause, listed
from roundoff.compare.loop.loop_words import called, loop_cause
from roundoff.compare.loop.optimizer_settings import same_number
from roundoff.compare.loop.optimizer_steps import OptimizerStep
from roundoff.record import HELD, LoopEvent


def other_clips(twin: OptimizerStep, step: OptimizerStep, rank: int) -> Iterator[Cause]:
    """Yield what is different about the clips before a step, once."""
    evidence = _clip_difference(twin, step)
    if evidence is None:
        return
    yield loop_cause(
        twin,
        step,
        rank,
        name="clip of the gradients",
        evidence=evidence,
        phase="optimizer",
        shown=_first_of_clip(step),
        reference=twin.clips[0][0] if twin.clips else None,
    )


def _first_of_clip(step: OptimizerStep) -> LoopEvent | None:
    """Return the clip, or what comes before it and should come after."""
    events = [clip for clip, _ in step.clips[:1]]
    if step.unscaled is not None:
        events.append(step.unscaled)
    return min(events, key=lambda event: event.call, default=None)


def _clip_difference(twin: OptimizerStep, step: OptimizerStep) -> str | None:
    if not twin.clips and not step.clips:
        return None
    if not step.clips:
        clip = twin.clips[0][0]
        return (
            f"the gradients are not clipped before {step.event.of} steps; the "
            f"reference clips them: {called(clip)}, {_limits(clip)}"
        )
    if not twin.clips:
        clip = step.clips[0][0]
        return (
            f"the gradients are clipped ({called(clip)}, {_limits(clip)}); the "
            "reference does not clip them before this step"
        )
    if twin.is_clipped_early != step.is_clipped_early:
        return _clipped_too_early(twin, step)
    if _is_clipped_otherwise_often(twin, step):
        return _clipped_otherwise_often(twin, step)
    if _is_norm_of_other_parts(twin, step):
        return _norm_of_other_parts(twin, step)
    return _other_clip(twin.clips[0], step.clips[0], twin)


def _clipped_too_early(twin: OptimizerStep, step: OptimizerStep) -> str:
    """Say which of the runs goes backward between a clip and the step."""
    here = called(step.clips[0][0])
    there = called(twin.clips[0][0])
    if step.is_clipped_early:
        return (
            f"clipped ({here}) before the backward pass: the gradients that "
            f"{step.event.of} steps with are not clipped; the reference clips them "
            f"after it ({there})"
        )
    return (
        f"clipped after the backward pass ({here}); the reference clips before it "
        f"({there}): gradients that {twin.event.of} does not step with"
    )


def _is_clipped_otherwise_often(twin: OptimizerStep, step: OptimizerStep) -> bool:
    """Return True where the gradients of as many backward passes are clipped between
    others of them."""
    is_same_work = len(twin.backward) == len(step.backward)
    return is_same_work and {*twin.clipped_after} != {*step.clipped_after}


def _clipped_otherwise_often(twin: OptimizerStep, step: OptimizerStep) -> str:
    here = called(step.clips[0][0])
    there = called(twin.clips[0][0])
    return (
        f"clipped ({here}) after {_passes(step)} of {len(step.backward)} before "
        f"{step.event.of} steps; the reference clips ({there}) after {_passes(twin)}"
    )


def _is_norm_of_other_parts(twin: OptimizerStep, step: OptimizerStep) -> bool:
    """Return True where gradients are clipped by the norms of other parts of them."""
    clips = [clip for clip, _ in (*twin.clips, *step.clips)]
    are_norms = all(clip.what == "clip_grad_norm_" for clip in clips)
    is_same_work = len(twin.backward) == len(step.backward)
    return are_norms and is_same_work and len(twin.clips) != len(step.clips)


def _norm_of_other_parts(twin: OptimizerStep, step: OptimizerStep) -> str:
    here = called(step.clips[0][0])
    there = called(twin.clips[0][0])
    return (
        f"clipped ({here}) by {_norms(step)} before {step.event.of} steps; the reference "
        f"clips ({there}) by {_norms(twin)}"
    )


def _norms(step: OptimizerStep) -> str:
    if len(step.clips) == 1:
        return "one norm of all gradients"
    return f"{len(step.clips)} norms, each of a part of the gradients"


def _passes(step: OptimizerStep) -> str:
    numbers = sorted({*step.clipped_after})
    noun = "backward pass" if len(numbers) == 1 else "backward passes"
    return f"{noun} {listed([str(number) for number in numbers])}"


def _other_clip(
    ours: tuple[LoopEvent, bool], theirs: tuple[LoopEvent, bool], twin: OptimizerStep
) -> str | None:
    mine, was_unscaled = ours
    other, is_unscaled = theirs
    if mine.what != other.what:
        return f"clipped by {called(other)} where the reference has {called(mine)}"
    if not _same_numbers(_limits_of(mine), _limits_of(other)):
        return f"clipped to {_limits(other)} where the reference has {_limits(mine)}"
    if was_unscaled == is_unscaled:
        return None
    if was_unscaled:
        return (
            f"clipped ({called(other)}) before the gradients are unscaled: the limit "
            f"meets gradients times the loss scale; the reference {_unscaled_by(twin)}"
        )
    return (
        f"clipped ({called(other)}) after unscale_; the reference clips gradients "
        "that still carry the loss scale"
    )


def _unscaled_by(twin: OptimizerStep) -> str:
    if twin.unscaled is None:
        return "has no loss scale"
    return f"calls unscale_ before the clip ({twin.unscaled.line})"


def _limits(event: LoopEvent) -> str:
    return listed([f"{name} {value:g}" for name, value in _limits_of(event).items()])


def _limits_of(event: LoopEvent) -> dict[str, float]:
    return {name: value for name, value in event.numbers.items() if name != HELD}


def _same_numbers(ours: Mapping[str, float], theirs: Mapping[str, float]) -> bool:
    if ours.keys() != theirs.keys():
        return False
    return all(same_number(value, theirs[name]) for name, value in ours.items())
