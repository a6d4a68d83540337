"""Settings of optimizers that differ when they step: learning rate, decay, momentum."""

from __future__ import annotations

from collections.abc import Container, Iterator, Sequence

from roundoff.compare.judging.step_causes import Cause
from roundoff.compare.loop.loop_words import called, loop_cause, times
from roundoff.compare.loop.optimizer_settings import differing_settings, settings_of
from roundoff.compare.loop.optimizer_steps import (
    OptimizerStep,
    innermost,
    optimizer_steps,
    outermost,
    same_optimizers,
)
from roundoff.record import LoopEvent

_NAMES = {"lr": "learning rate", "weight_decay": "weight decay", "max_norm": "limit"}


def settings_inside(
    reference: Sequence[tuple[int, LoopEvent]],
    candidate: Sequence[tuple[int, LoopEvent]],
    rank: int,
    blamed: Container[str | None],
) -> Iterator[Cause]:
    """Other settings of optimizers that step inside of another, each once.

    Of settings that the outer ones have too nothing is said: these were compared, and a
    wrapper may do itself what it hands on to none.
    """
    if not any(event.inside for _, event in (*reference, *candidate)):
        return
    known = _settings_of_both(reference, candidate)
    found: dict[str | None, Cause] = {}
    ours = optimizer_steps(innermost(reference))
    theirs = optimizer_steps(innermost(candidate))
    for twin, step in same_optimizers(ours, theirs):
        for cause in other_settings(twin, step, rank, known):
            if cause.name not in blamed:
                found.setdefault(cause.name, cause)
    yield from found.values()


def _settings_of_both(
    reference: Sequence[tuple[int, LoopEvent]],
    candidate: Sequence[tuple[int, LoopEvent]],
) -> frozenset[str]:
    """Return the names of settings that both outer optimizers have."""
    ours = optimizer_steps(outermost(reference))
    theirs = optimizer_steps(outermost(candidate))
    return frozenset(
        name
        for twin, step in same_optimizers(ours, theirs)
        for name in settings_of(twin.event) & settings_of(step.event)
    )


def other_settings(
    twin: OptimizerStep,
    step: OptimizerStep,
    rank: int,
    known: Container[str] = (),
) -> Iterator[Cause]:
    """Yield the settings that differ, but those that are ``known`` to be equal."""
    for name, words in differing_settings(twin.event, step.event).items():
        if name in known:
            continue
        if name == "lr":
            yield _learning_rate(twin, step, words, rank)
        else:
            yield _setting(twin, step, name, words, rank)


def _setting(
    twin: OptimizerStep, step: OptimizerStep, name: str, words: str, rank: int
) -> Cause:
    what = _NAMES.get(name, name)
    evidence = f"{what} of {_optimizer(twin, step)}: {words}"
    return loop_cause(
        twin,
        step,
        rank,
        name=what,
        evidence=evidence,
        phase="optimizer",
        label="other setting",
    )


def _optimizer(twin: OptimizerStep, step: OptimizerStep) -> str:
    """Return the optimizer's name, and that of the reference where it is another."""
    if twin.event.of == step.event.of:
        return step.event.of
    return f"{step.event.of} (the reference has {twin.event.of})"


def _learning_rate(
    twin: OptimizerStep, step: OptimizerStep, words: str, rank: int
) -> Cause:
    """The rate itself, or a schedule that has moved more often by then."""
    evidence = f"learning rate of {_optimizer(twin, step)}: {words}"
    label = "other setting"
    shown = None
    reference = None
    if twin.moved != step.moved:
        label = "other loop"
        shown = step.schedule
        reference = twin.schedule
        when = "more often" if step.moved > twin.moved else "less often"
        where = step.schedule or twin.schedule
        before = _order_of_schedule(twin, step)
        evidence = (
            f"{evidence}: the scheduler has moved {when} by then "
            f"({times('time', step.moved)}, in the reference {twin.moved}){before}: "
            f"{'' if where is None else called(where)}"
        )
    return loop_cause(
        twin,
        step,
        rank,
        name="learning rate",
        evidence=evidence,
        phase="optimizer",
        label=label,
        shown=shown,
        reference=reference,
    )


def _order_of_schedule(twin: OptimizerStep, step: OptimizerStep) -> str:
    if step.moved == twin.moved + 1:
        return ", as where scheduler.step() comes before optimizer.step()"
    return ""
