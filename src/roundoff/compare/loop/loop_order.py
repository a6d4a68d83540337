"""The training loops of two runs: what is done in another order, more often or not at all."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

from roundoff.compare.judging.step_causes import LOOP, Cause, with_line
from roundoff.compare.loop.loop_words import called, loop_cause, times
from roundoff.compare.loop.optimizer_steps import (
    OptimizerStep,
    optimizer_steps,
    outermost,
    same_optimizers,
)
from roundoff.compare.loop.optimizer_turns import (
    held_by_two,
    other_turns,
    steps_left_out,
)
from roundoff.compare.loop.other_clips import other_clips
from roundoff.compare.loop.other_settings import other_settings, settings_inside
from roundoff.record import LoopEvent

#: The name of the cause that there are more or fewer backward passes.
BACKWARD_PASSES = "backward"
#: The name of the cause that gradients are left out, or are those of other passes.
CLEARING = "zero_grad"
#: The name of the cause that gradients are taken with a graph in one run alone.
GRAPHS = "create_graph"
_TAKES_GRADIENTS = ("backward", "autograd.grad")


def loop_causes(
    reference: Sequence[tuple[int, LoopEvent]],
    candidate: Sequence[tuple[int, LoopEvent]],
    rank: int,
) -> list[Cause]:
    """Return what the two loops do differently, each once, where it is first seen.

    ``reference`` and ``candidate`` are the events of all compared steps, each with the
    number of its step. Nothing where one of the runs has none: another tool's.
    """
    if not reference or not candidate:
        return []
    ours = optimizer_steps(outermost(reference))
    theirs = optimizer_steps(outermost(candidate))
    causes = [*steps_left_out(ours, theirs, rank)]
    if not causes:
        causes += other_turns(ours, theirs, rank)
    causes += _other_graphs(reference, candidate, rank)
    causes += held_by_two(ours, theirs, rank)
    blamed = {cause.name for cause in causes}
    for twin, step in same_optimizers(ours, theirs):
        for compare in _COMPARED:
            for cause in compare(twin, step, rank):
                if cause.name not in blamed:
                    causes.append(cause)
                blamed.add(cause.name)
    causes += settings_inside(reference, candidate, rank, blamed)
    return causes


def _other_graphs(
    reference: Sequence[tuple[int, LoopEvent]],
    candidate: Sequence[tuple[int, LoopEvent]],
    rank: int,
) -> Iterator[Cause]:
    """The first gradient that is taken with a graph of its own in one run alone."""
    ours = _gradients_taken(reference)
    theirs = _gradients_taken(candidate)
    if len(ours) != len(theirs):
        return
    for (_, twin), (step, event) in zip(ours, theirs, strict=True):
        has_graph = bool(event.numbers.get(GRAPHS))
        if has_graph == bool(twin.numbers.get(GRAPHS)):
            continue
        evidence = (
            f"{called(event)} takes gradients without create_graph, the reference "
            "with it: what is computed from them here has no gradient, and a penalty on "
            "them trains nothing"
        )
        if has_graph:
            evidence = (
                f"{called(event)} takes gradients with create_graph, the reference "
                "without it: gradients go through what is computed from them here alone"
            )
        yield Cause(
            kind=LOOP,
            label="other loop",
            evidence=evidence,
            step=step,
            rank=rank,
            phase="backward",
            name=GRAPHS,
            at=event.call,
            line=event.line,
            reference_line=twin.line,
            decides=True,
        )
        return


def _gradients_taken(
    events: Sequence[tuple[int, LoopEvent]],
) -> list[tuple[int, LoopEvent]]:
    return [(step, event) for step, event in events if event.what in _TAKES_GRADIENTS]


def _backward_passes(
    twin: OptimizerStep, step: OptimizerStep, rank: int
) -> Iterator[Cause]:
    ours = len(twin.backward)
    theirs = len(step.backward)
    if ours == theirs or not ours:
        return
    evidence = (
        f"{times('backward pass', theirs)} before {step.event.of} steps where the "
        f"reference has {ours}: {_why_more_passes(twin, step)}"
    )
    yield loop_cause(
        twin,
        step,
        rank,
        name=BACKWARD_PASSES,
        evidence=evidence,
        phase="forward",
        shown=step.backward[0] if step.backward else None,
        reference=twin.backward[0],
    )


def _why_more_passes(twin: OptimizerStep, step: OptimizerStep) -> str:
    """Say what passes may be good for that only one of two loops makes before a step.

    One that throws its gradients away skips a step: behind too large a norm, or an overflow.
    """
    skipped, skipped_here = (max(0, -each.kept) for each in (twin, step))
    if skipped > skipped_here:
        cleared = f"it clears the gradients of {times('pass', skipped)} without a step"
        return f"{cleared}, and so skips one that is made here"
    if skipped_here > skipped:
        cleared = f"the gradients of {times('pass', skipped_here)} are cleared here"
        return f"{cleared} without a step: one is skipped that the reference makes"
    return "another number of micro-batches, or another loop"


def _clearing(twin: OptimizerStep, step: OptimizerStep, rank: int) -> Iterator[Cause]:
    if twin.kept == step.kept or len(twin.backward) != len(step.backward):
        return
    if step.kept > twin.kept:
        evidence = _not_cleared(twin, step)
    else:
        cleared = step.cleared or step.last_cleared
        where = "" if cleared is None else with_line(": zero_grad", cleared.line)
        evidence = (
            f"the gradients are cleared between the backward passes and the step of "
            f"{step.event.of}{where}; it takes those of "
            f"{times('backward pass', step.gathered)}, in the reference of "
            f"{twin.gathered}"
        )
    yield loop_cause(
        twin,
        step,
        rank,
        name=CLEARING,
        evidence=evidence,
        phase="backward",
        shown=step.last_cleared or (step.backward[0] if step.backward else None),
        reference=twin.last_cleared,
    )


def _not_cleared(twin: OptimizerStep, step: OptimizerStep) -> str:
    where = twin.cleared or twin.last_cleared
    theirs = "" if where is None else f"; the reference calls {called(where)}"
    return (
        f"the gradients are not cleared (no zero_grad): those of "
        f"{times('backward pass', step.gathered)} add up before {step.event.of} "
        f"steps, in the reference of {twin.gathered}{theirs}"
    )


def _has_one_a_scaler(twin: OptimizerStep, step: OptimizerStep) -> bool:
    """Return True where one loop works without a scale, and the other's is divided out."""
    with_scale, without = (twin, step) if twin.scaled else (step, twin)
    return with_scale.by_scaler and not without.scaled and not without.by_scaler


def _scaling(twin: OptimizerStep, step: OptimizerStep, rank: int) -> Iterator[Cause]:
    ours = len(twin.scaled)
    theirs = len(step.scaled)
    if ours == theirs or _has_one_a_scaler(twin, step):
        return
    if len(twin.backward) != len(step.backward) and ours and theirs:
        return
    where = twin.scaled or step.scaled
    who = "the reference" if ours > theirs else "the candidate"
    evidence = (
        f"{who} multiplies {abs(ours - theirs)} more losses by the loss scale "
        f"(GradScaler.scale, {where[0].line}); the other goes backward without the scale"
    )
    yield loop_cause(
        twin,
        step,
        rank,
        name="loss scale",
        evidence=evidence,
        phase="backward",
        shown=step.scaled[0] if step.scaled else _first(step.backward),
        reference=_first(twin.scaled),
    )


def _first(events: Sequence[LoopEvent]) -> LoopEvent | None:
    return events[0] if events else None


def _unscaling(twin: OptimizerStep, step: OptimizerStep, rank: int) -> Iterator[Cause]:
    if (twin.unscaled is None) == (step.unscaled is None):
        return
    if _has_one_a_scaler(twin, step):
        return
    if twin.clips and step.clips:
        return  # told with the clip
    event = twin.unscaled or step.unscaled
    who = "the reference" if step.unscaled is None else "the candidate"
    evidence = f"only {who} calls unscale_ ({'' if event is None else event.line})"
    yield loop_cause(
        twin, step, rank, name="unscale_", evidence=evidence, phase="optimizer"
    )


_COMPARED: tuple[
    Callable[[OptimizerStep, OptimizerStep, int], Iterator[Cause]], ...
] = (
    _backward_passes,
    _clearing,
    _scaling,
    other_clips,
    _unscaling,
    other_settings,
)
