"""Optimizers that step in one run alone, hold what another holds, or take other turns."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import groupby

from roundoff.compare.judging.step_causes import LOOP, UPDATE, Cause
from roundoff.compare.loop.loop_words import loop_cause, times
from roundoff.compare.loop.optimizer_settings import values_held
from roundoff.compare.loop.optimizer_steps import (
    OptimizerStep,
    first_steps,
    paired_optimizers,
)

#: The name of the cause that optimizers take turns in another way.
TURNS = "turns of the optimizers"


def steps_left_out(
    ours: Sequence[OptimizerStep], theirs: Sequence[OptimizerStep], rank: int
) -> Iterator[Cause]:
    """Optimizers that step in one run alone.

    But for those of both runs that hold as many values together: they share them out
    otherwise.
    """
    pairs = paired_optimizers(ours, theirs)
    alone = [*first_steps(ours, {name for name, _ in pairs})]
    others = [*first_steps(theirs, {name for _, name in pairs})]
    held = sum(values_held(step.event) for step in alone)
    if held and held == sum(values_held(step.event) for step in others):
        return
    for step in alone:
        evidence = (
            f"the optimizer {step.event.of} steps in the reference at "
            f"{step.event.line}, and never in the candidate: what it should update "
            "stays as it was"
        )
        yield Cause(
            kind=UPDATE,
            label="missing update",
            evidence=evidence,
            step=step.step,
            rank=rank,
            phase="optimizer",
            name=f"optimizer {step.event.of}",
            reference_line=step.event.line,
            decides=True,
        )
    for step in others:
        evidence = (
            f"the optimizer {step.event.of} steps in the candidate at "
            f"{step.event.line}, and never in the reference"
        )
        yield Cause(
            kind=LOOP,
            label="other loop",
            evidence=evidence,
            step=step.step,
            rank=rank,
            phase="optimizer",
            name=f"optimizer {step.event.of}",
            line=step.event.line,
            decides=True,
        )


def held_by_two(
    ours: Sequence[OptimizerStep], theirs: Sequence[OptimizerStep], rank: int
) -> Iterator[Cause]:
    """An optimizer that holds as many values more as another one holds: it holds them too.

    What both hold is updated twice in a step.
    """
    mine = {step.event.of: step for step in reversed(ours)}
    others = {step.event.of: step for step in reversed(theirs)}
    pairs = [
        (mine[name], others[other]) for name, other in paired_optimizers(ours, theirs)
    ]
    alike = [step for twin, step in pairs if _held_more(twin, step) == 0]
    for twin, step in pairs:
        more = _held_more(twin, step)
        second = [each for each in alike if more and values_held(each.event) == more]
        if not second:
            continue
        held = values_held(step.event)
        evidence = (
            f"the optimizer {step.event.of} holds {held:,.0f} values, in the reference "
            f"{held - more:,.0f}: those of {second[0].event.of} too, which both optimizers "
            f"update, so that they move twice in a step ({step.event.line} and "
            f"{second[0].event.line})"
        )
        yield loop_cause(
            twin,
            step,
            rank,
            name=f"optimizer {step.event.of}",
            evidence=evidence,
            phase="optimizer",
            label="other setting",
        )


def _held_more(twin: OptimizerStep, step: OptimizerStep) -> float:
    """Return how many values more than the reference's an optimizer holds."""
    return values_held(step.event) - values_held(twin.event)


def other_turns(
    ours: Sequence[OptimizerStep], theirs: Sequence[OptimizerStep], rank: int
) -> Iterator[Cause]:
    """An optimizer that steps more or less often before another one has its turn.

    Which of them begins is not compared: optimizers of other parameters may step in any
    order.
    """
    for name, other in paired_optimizers(ours, theirs):
        pairs = zip(_turns(ours, name), _turns(theirs, other), strict=False)
        for twin, turn in pairs:
            if not _is_other_turn(twin, turn):
                continue
            last = turn.steps[min(len(turn.steps), len(twin.steps)) - 1]
            evidence = (
                f"{times('step', len(turn.steps))} of {other} before another "
                f"optimizer steps ({last.event.line}), in the reference "
                f"{len(twin.steps)}: another number of turns of an inner loop"
            )
            yield Cause(
                kind=LOOP,
                label="other loop",
                evidence=evidence,
                step=last.step,
                rank=rank,
                phase="optimizer",
                name=TURNS,
                at=last.event.call,
                line=last.event.line,
                reference_line=twin.steps[0].event.line,
                decides=True,
            )
            return


@dataclass(frozen=True, slots=True)
class _Turn:
    """Steps of one optimizer with none of another between; ``is_over`` where one follows."""

    steps: Sequence[OptimizerStep]
    is_over: bool


def _turns(steps: Sequence[OptimizerStep], optimizer: str) -> list[_Turn]:
    runs = [list(run) for _, run in groupby(steps, lambda step: step.event.of)]
    return [
        _Turn(run, is_over=run is not runs[-1])
        for run in runs
        if run[0].event.of == optimizer
    ]


def _is_other_turn(twin: _Turn, turn: _Turn) -> bool:
    """Return True where one of two turns ended, and the other has more steps than it."""
    if len(twin.steps) > len(turn.steps):
        return turn.is_over
    return twin.is_over and len(turn.steps) > len(twin.steps)
