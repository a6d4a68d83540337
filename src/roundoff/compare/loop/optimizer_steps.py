"""What went into each step of an optimizer, and which steps of two loops are of the same one.

Each is described by what the loop did since the step before it: how many backward passes
went into the gradients, when they were unscaled and clipped, how often the schedule had
moved, and the settings. So loops that are written in another order and do the same are
equal.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field

from roundoff.compare.loop.optimizer_settings import values_held
from roundoff.record import HELD, LoopEvent

CLIPS = ("clip_grad_norm_", "clip_grad_value_")


@dataclass(slots=True)
class OptimizerStep:
    """What went into one step of an optimizer.

    Attributes:
        step: of the recording.
        event: the step itself.
        backward: the backward passes since the optimizer step before, of whatever
            optimizer.
        gathered: those since the gradients were last cleared.
        passes: those since the last step of this optimizer.
        cleared: the clearing after the last backward pass; None where there is none.
        last_cleared: the last clearing before it.
        clips: the clippings, each with True where gradients carry no loss scale; not
            those of what another optimizer holds.
        clipped_after: how many of the backward passes came before each of them.
        unscaled: the ``unscale_`` call.
        scaled: the losses that were scaled.
        by_scaler: the scaler made the step, and so divides its scale out.
        moved: how often a schedule had moved.
        schedule: its last move.
    """

    step: int
    event: LoopEvent
    backward: list[LoopEvent]
    gathered: int
    passes: int
    cleared: LoopEvent | None
    last_cleared: LoopEvent | None
    clips: list[tuple[LoopEvent, bool]]
    clipped_after: list[int]
    unscaled: LoopEvent | None
    scaled: list[LoopEvent]
    by_scaler: bool
    moved: int
    schedule: LoopEvent | None

    @property
    def kept(self) -> int:
        """How many passes from before the last step add up too; below 0 where some of
        its own are cleared away."""
        return self.gathered - self.passes

    @property
    def is_clipped_early(self) -> bool:
        """True where a backward pass comes after the last clip."""
        return bool(self.clips) and self.clipped_after[-1] < len(self.backward)


@dataclass(slots=True)
class _Loop:
    """The state of a loop while its events are gone through.

    ``holding``: the optimizer that holds a number of values, where one alone does.
    """

    holding: Mapping[float, str] = field(default_factory=dict)
    backward: list[LoopEvent] = field(default_factory=list)
    passes: int = 0
    stepped_at: dict[str, int] = field(default_factory=dict)
    cleared_at: dict[str, int] = field(default_factory=dict)
    cleared_by: dict[str, LoopEvent] = field(default_factory=dict)
    cleared_late: dict[str, LoopEvent] = field(default_factory=dict)
    clips: list[tuple[LoopEvent, bool]] = field(default_factory=list)
    clipped_after: list[int] = field(default_factory=list)
    unscaled: LoopEvent | None = None
    scaled: list[LoopEvent] = field(default_factory=list)
    by_scaler: bool = False
    moved: int = 0
    schedule: LoopEvent | None = None

    def clear(self, event: LoopEvent) -> None:
        """Note that the gradients of one optimizer, or of a module, are cleared."""
        self.cleared_at[event.of] = self.passes
        self.cleared_by[event.of] = event
        if self.backward:
            self.cleared_late[event.of] = event

    def take(self, step: int, event: LoopEvent) -> OptimizerStep:
        """Return what went into an optimizer step, and begin the next one."""
        cleared_at = _latest(self.cleared_at, event.of)
        clips = [*zip(self.clips, self.clipped_after, strict=True)]
        mine = [each for each in clips if self._is_clip_for(event, each[0][0])]
        taken = OptimizerStep(
            step=step,
            event=event,
            backward=self.backward,
            gathered=self.passes - cleared_at,
            passes=self.passes - self.stepped_at.get(event.of, 0),
            cleared=_of_optimizer(self.cleared_late, event.of),
            last_cleared=_of_optimizer(self.cleared_by, event.of),
            clips=[clip for clip, _ in mine],
            clipped_after=[after for _, after in mine],
            unscaled=self.unscaled,
            scaled=self.scaled,
            by_scaler=self.by_scaler,
            moved=self.moved,
            schedule=self.schedule,
        )
        self.stepped_at[event.of] = self.passes
        self.backward = []
        self.cleared_late = {}
        self.clips = [each[0] for each in clips if each not in mine]
        self.clipped_after = [0] * len(self.clips)
        self.unscaled = None
        self.scaled = []
        self.by_scaler = False
        return taken

    def _is_clip_for(self, step: LoopEvent, clip: LoopEvent) -> bool:
        """Return False for a clip of what another optimizer holds."""
        owner = self.holding.get(clip.numbers.get(HELD, 0.0), step.of)
        return owner == step.of


#: A module, which clears the gradients of all optimizers.
_ALL = ""


def _latest(values: Mapping[str, int], optimizer: str) -> int:
    return max(values.get(optimizer, 0), values.get(_ALL, 0))


def _of_optimizer(events: Mapping[str, LoopEvent], optimizer: str) -> LoopEvent | None:
    return events.get(optimizer) or events.get(_ALL)


def optimizer_steps(events: Sequence[tuple[int, LoopEvent]]) -> list[OptimizerStep]:
    """Return what went into each optimizer step; ``events`` have the number of their step."""
    loop = _Loop(holding=_holding([event for _, event in events]))
    steps = []
    for number, event in events:
        if event.what == "optimizer.step":
            steps.append(loop.take(number, event))
        else:
            _go_on(loop, event)
    return steps


def _holding(events: Sequence[LoopEvent]) -> dict[float, str]:
    """Return the optimizer that holds a number of values, where one alone does."""
    steps = [event for event in events if event.what == "optimizer.step"]
    held = {event.of: values_held(event) for event in steps}
    counted = Counter(held.values())
    return {values: name for name, values in held.items() if counted[values] == 1}


def _go_on(loop: _Loop, event: LoopEvent) -> None:
    if event.what == "zero_grad":
        loop.clear(event)
    elif event.what == "backward":
        loop.backward.append(event)
        loop.passes += 1
    elif event.what in CLIPS:
        is_unscaled = loop.unscaled is not None or not loop.scaled
        loop.clips.append((event, is_unscaled))
        loop.clipped_after.append(len(loop.backward))
    elif event.what == "scaler.unscale_":
        loop.unscaled = event
    elif event.what == "scaler.scale":
        loop.scaled.append(event)
    elif event.what == "scaler.step":
        loop.by_scaler = True
    elif event.what == "scheduler.step":
        loop.moved += 1
        loop.schedule = event


def outermost(
    events: Sequence[tuple[int, LoopEvent]],
) -> list[tuple[int, LoopEvent]]:
    """Leave out the steps of optimizers that another one's step makes."""
    return [(step, event) for step, event in events if not event.inside]


def innermost(
    events: Sequence[tuple[int, LoopEvent]],
) -> list[tuple[int, LoopEvent]]:
    """Leave out the steps of optimizers that are made of others' steps."""
    wrappers = {event.inside for _, event in events if event.inside}
    return [
        (step, event)
        for step, event in events
        if event.what != "optimizer.step" or event.of not in wrappers
    ]


def same_optimizers(
    ours: Sequence[OptimizerStep], theirs: Sequence[OptimizerStep]
) -> Iterator[tuple[OptimizerStep, OptimizerStep]]:
    """Pair the steps of each optimizer in their order."""
    for name, other in paired_optimizers(ours, theirs):
        mine = [step for step in ours if step.event.of == name]
        others = [step for step in theirs if step.event.of == other]
        yield from zip(mine, others, strict=False)


def paired_optimizers(
    ours: Sequence[OptimizerStep], theirs: Sequence[OptimizerStep]
) -> list[tuple[str, str]]:
    """Pair the names of the optimizers: by how much they hold, where that tells all apart.

    They are named in the order in which they step, which may be another one. Else as many
    of other classes in their order.
    """
    mine = {step.event.of: values_held(step.event) for step in reversed(ours)}
    others = {step.event.of: values_held(step.event) for step in reversed(theirs)}
    by_values = {values: name for name, values in others.items()}
    tells_apart = len(by_values) == len(others) == len(mine)
    names = [*dict.fromkeys(step.event.of for step in ours)]
    if tells_apart and {*mine.values()} == {*by_values}:
        return [(name, by_values[mine[name]]) for name in names]
    if len(mine) == len(others) and {*mine} != {*others}:
        other_names = dict.fromkeys(step.event.of for step in theirs)
        return list(zip(names, other_names, strict=True))
    return [(name, name) for name in names if name in others]


def first_steps(
    steps: Sequence[OptimizerStep], paired: set[str]
) -> Iterator[OptimizerStep]:
    """Yield the first step of each optimizer that the other run lacks."""
    first: dict[str, OptimizerStep] = {}
    for step in steps:
        first.setdefault(step.event.of, step)
    yield from (step for name, step in first.items() if name not in paired)
