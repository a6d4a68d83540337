"""The training loops of two runs: what each optimizer step is made of.

Each step of an optimizer is described by what the loop did since the step before it: how
many backward passes went into the gradients, when they were unscaled and clipped, how
often the schedule had moved, and the settings. So loops that are written in another
order and do the same are equal.
"""

from __future__ import annotations

from collections.abc import Callable, Container, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import groupby

from roundoff.compare.judging.step_causes import LOOP, UPDATE, Cause, listed, with_line
from roundoff.compare.loop.optimizer_settings import (
    differing_settings,
    same_number,
    settings_of,
    values_held,
)
from roundoff.record import LoopEvent

#: The name of the cause that there are more or fewer backward passes.
BACKWARD_PASSES = "backward"
#: The name of the cause that gradients are left out, or are those of other passes.
CLEARING = "zero_grad"
#: The name of the cause that optimizers take turns in another way.
TURNS = "turns of the optimizers"
#: The name of the cause that gradients are taken with a graph in one run alone.
GRAPHS = "create_graph"
_NAMES = {"lr": "learning rate", "weight_decay": "weight decay", "max_norm": "limit"}
_TAKES_GRADIENTS = ("backward", "autograd.grad")
_CLIPS = ("clip_grad_norm_", "clip_grad_value_")


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
        clips: the clippings, each with True where gradients carry no loss scale.
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
    """The state of a loop while its events are gone through."""

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
        taken = OptimizerStep(
            step=step,
            event=event,
            backward=self.backward,
            gathered=self.passes - cleared_at,
            passes=self.passes - self.stepped_at.get(event.of, 0),
            cleared=_of_optimizer(self.cleared_late, event.of),
            last_cleared=_of_optimizer(self.cleared_by, event.of),
            clips=self.clips,
            clipped_after=self.clipped_after,
            unscaled=self.unscaled,
            scaled=self.scaled,
            by_scaler=self.by_scaler,
            moved=self.moved,
            schedule=self.schedule,
        )
        self.stepped_at[event.of] = self.passes
        self.backward = []
        self.cleared_late = {}
        self.clips = []
        self.clipped_after = []
        self.unscaled = None
        self.scaled = []
        self.by_scaler = False
        return taken


#: A module, which clears the gradients of all optimizers.
_ALL = ""


def _latest(values: Mapping[str, int], optimizer: str) -> int:
    return max(values.get(optimizer, 0), values.get(_ALL, 0))


def _of_optimizer(events: Mapping[str, LoopEvent], optimizer: str) -> LoopEvent | None:
    return events.get(optimizer) or events.get(_ALL)


def optimizer_steps(events: Sequence[tuple[int, LoopEvent]]) -> list[OptimizerStep]:
    """Return what went into each optimizer step; ``events`` have the number of their step."""
    loop = _Loop()
    steps = []
    for number, event in events:
        if event.what == "optimizer.step":
            steps.append(loop.take(number, event))
        else:
            _go_on(loop, event)
    return steps


def _go_on(loop: _Loop, event: LoopEvent) -> None:
    if event.what == "zero_grad":
        loop.clear(event)
    elif event.what == "backward":
        loop.backward.append(event)
        loop.passes += 1
    elif event.what in _CLIPS:
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
    ours = optimizer_steps(_outermost(reference))
    theirs = optimizer_steps(_outermost(candidate))
    causes = [*_steps_left_out(ours, theirs, rank)]
    if not causes:
        causes += _other_turns(ours, theirs, rank)
    causes += _other_graphs(reference, candidate, rank)
    causes += _held_by_two(ours, theirs, rank)
    blamed = {cause.name for cause in causes}
    for twin, step in _same_optimizers(ours, theirs):
        for compare in _COMPARED:
            for cause in compare(twin, step, rank):
                if cause.name not in blamed:
                    causes.append(cause)
                blamed.add(cause.name)
    causes += _settings_inside(reference, candidate, rank, blamed)
    return causes


def _settings_inside(
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
    ours = optimizer_steps(_innermost(reference))
    theirs = optimizer_steps(_innermost(candidate))
    for twin, step in _same_optimizers(ours, theirs):
        for cause in _settings(twin, step, rank, known):
            if cause.name not in blamed:
                found.setdefault(cause.name, cause)
    yield from found.values()


def _settings_of_both(
    reference: Sequence[tuple[int, LoopEvent]],
    candidate: Sequence[tuple[int, LoopEvent]],
) -> frozenset[str]:
    """Return the names of settings that both outer optimizers have."""
    ours = optimizer_steps(_outermost(reference))
    theirs = optimizer_steps(_outermost(candidate))
    return frozenset(
        name
        for twin, step in _same_optimizers(ours, theirs)
        for name in settings_of(twin.event) & settings_of(step.event)
    )


def _outermost(
    events: Sequence[tuple[int, LoopEvent]],
) -> list[tuple[int, LoopEvent]]:
    """Leave out the steps of optimizers that another one's step makes."""
    return [(step, event) for step, event in events if not event.inside]


def _innermost(
    events: Sequence[tuple[int, LoopEvent]],
) -> list[tuple[int, LoopEvent]]:
    """Leave out the steps of optimizers that are made of others' steps."""
    wrappers = {event.inside for _, event in events if event.inside}
    return [
        (step, event)
        for step, event in events
        if event.what != "optimizer.step" or event.of not in wrappers
    ]


def _same_optimizers(
    ours: Sequence[OptimizerStep], theirs: Sequence[OptimizerStep]
) -> Iterator[tuple[OptimizerStep, OptimizerStep]]:
    """Pair the steps of each optimizer in their order."""
    for name, other in _optimizers(ours, theirs):
        mine = [step for step in ours if step.event.of == name]
        others = [step for step in theirs if step.event.of == other]
        yield from zip(mine, others, strict=False)


def _optimizers(
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


def _steps_left_out(
    ours: Sequence[OptimizerStep], theirs: Sequence[OptimizerStep], rank: int
) -> Iterator[Cause]:
    """Optimizers that step in one run alone.

    But for those of both runs that hold as many values together: they share them out
    otherwise.
    """
    pairs = _optimizers(ours, theirs)
    alone = [*_first_steps(ours, {name for name, _ in pairs})]
    others = [*_first_steps(theirs, {name for _, name in pairs})]
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


def _held_by_two(
    ours: Sequence[OptimizerStep], theirs: Sequence[OptimizerStep], rank: int
) -> Iterator[Cause]:
    """An optimizer that holds as many values more as another one holds: it holds them too.

    What both hold is updated twice in a step.
    """
    mine = {step.event.of: step for step in reversed(ours)}
    others = {step.event.of: step for step in reversed(theirs)}
    pairs = [(mine[name], others[other]) for name, other in _optimizers(ours, theirs)]
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
        yield _cause(
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


def _other_turns(
    ours: Sequence[OptimizerStep], theirs: Sequence[OptimizerStep], rank: int
) -> Iterator[Cause]:
    """An optimizer that steps more or less often before another one has its turn.

    Which of them begins is not compared: optimizers of other parameters may step in any
    order.
    """
    for name, other in _optimizers(ours, theirs):
        pairs = zip(_turns(ours, name), _turns(theirs, other), strict=False)
        for twin, turn in pairs:
            if not _is_other_turn(twin, turn):
                continue
            last = turn.steps[min(len(turn.steps), len(twin.steps)) - 1]
            evidence = (
                f"{_times('step', len(turn.steps))} of {other} before another "
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
            f"{_called(event)} takes gradients without create_graph, the reference "
            "with it: what is computed from them here has no gradient, and a penalty on "
            "them trains nothing"
        )
        if has_graph:
            evidence = (
                f"{_called(event)} takes gradients with create_graph, the reference "
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


def _first_steps(
    steps: Sequence[OptimizerStep], paired: set[str]
) -> Iterator[OptimizerStep]:
    """Yield the first step of each optimizer that the other run lacks."""
    first: dict[str, OptimizerStep] = {}
    for step in steps:
        first.setdefault(step.event.of, step)
    yield from (step for name, step in first.items() if name not in paired)


def _cause(
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


def _backward_passes(
    twin: OptimizerStep, step: OptimizerStep, rank: int
) -> Iterator[Cause]:
    ours = len(twin.backward)
    theirs = len(step.backward)
    if ours == theirs or not ours:
        return
    evidence = (
        f"{_times('backward pass', theirs)} before {step.event.of} steps where the "
        f"reference has {ours}: another number of micro-batches, or another loop"
    )
    yield _cause(
        twin,
        step,
        rank,
        name=BACKWARD_PASSES,
        evidence=evidence,
        phase="forward",
        shown=step.backward[0] if step.backward else None,
        reference=twin.backward[0],
    )


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
            f"{_times('backward pass', step.gathered)}, in the reference of "
            f"{twin.gathered}"
        )
    yield _cause(
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
    theirs = "" if where is None else f"; the reference calls {_called(where)}"
    return (
        f"the gradients are not cleared (no zero_grad): those of "
        f"{_times('backward pass', step.gathered)} add up before {step.event.of} "
        f"steps, in the reference of {twin.gathered}{theirs}"
    )


def _called(event: LoopEvent) -> str:
    return with_line(event.what, event.line)


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
    yield _cause(
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


def _clipping(twin: OptimizerStep, step: OptimizerStep, rank: int) -> Iterator[Cause]:
    evidence = _clip_difference(twin, step)
    if evidence is None:
        return
    yield _cause(
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
            f"reference clips them: {_called(clip)}, {_limits(clip)}"
        )
    if not twin.clips:
        clip = step.clips[0][0]
        return (
            f"the gradients are clipped ({_called(clip)}, {_limits(clip)}); the "
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
    here = _called(step.clips[0][0])
    there = _called(twin.clips[0][0])
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
    here = _called(step.clips[0][0])
    there = _called(twin.clips[0][0])
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
    here = _called(step.clips[0][0])
    there = _called(twin.clips[0][0])
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
        return f"clipped by {_called(other)} where the reference has {_called(mine)}"
    if not _same_numbers(mine.numbers, other.numbers):
        return f"clipped to {_limits(other)} where the reference has {_limits(mine)}"
    if was_unscaled == is_unscaled:
        return None
    if was_unscaled:
        return (
            f"clipped ({_called(other)}) before the gradients are unscaled: the limit "
            f"meets gradients times the loss scale; the reference {_unscaled_by(twin)}"
        )
    return (
        f"clipped ({_called(other)}) after unscale_; the reference clips gradients "
        "that still carry the loss scale"
    )


def _unscaled_by(twin: OptimizerStep) -> str:
    if twin.unscaled is None:
        return "has no loss scale"
    return f"calls unscale_ before the clip ({twin.unscaled.line})"


def _limits(event: LoopEvent) -> str:
    return listed([f"{name} {value:g}" for name, value in event.numbers.items()])


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
    yield _cause(
        twin, step, rank, name="unscale_", evidence=evidence, phase="optimizer"
    )


def _settings(
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
    return _cause(
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
            f"({_times('time', step.moved)}, in the reference {twin.moved}){before}: "
            f"{'' if where is None else _called(where)}"
        )
    return _cause(
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


def _times(noun: str, count: int) -> str:
    """Return a count with its noun.

    >>> _times("backward pass", 1), _times("backward pass", 2), _times("time", 0)
    ('1 backward pass', '2 backward passes', '0 times')
    """
    plural = f"{noun}es" if noun.endswith("s") else f"{noun}s"
    return f"{count} {noun if count == 1 else plural}"


def _same_numbers(ours: Mapping[str, float], theirs: Mapping[str, float]) -> bool:
    if ours.keys() != theirs.keys():
        return False
    return all(same_number(value, theirs[name]) for name, value in ours.items())


_COMPARED: tuple[
    Callable[[OptimizerStep, OptimizerStep, int], Iterator[Cause]], ...
] = (
    _backward_passes,
    _clearing,
    _scaling,
    _clipping,
    _unscaling,
    _settings,
)
