"""Gradients that are clipped before the loop changes them by hand, or after it.

A mask, a scale or noise that a loop puts on gradients counts in the norm they are clipped
by only where it comes first.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

from roundoff.compare.judging.explain import Sides
from roundoff.compare.judging.step_causes import LOOP, Cause, with_line
from roundoff.compare.loop.loop_words import called
from roundoff.compare.loop.optimizer_steps import CLIPS
from roundoff.compare.records.recorded_rows import RecordedRow, Rows
from roundoff.record import LoopEvent

_BACKWARD = "backward"
_OPTIMIZER = "optimizer"


def clip_order_causes(
    sides: Sides,
    events: tuple[Sequence[LoopEvent], Sequence[LoopEvent]],
    *,
    rank: int,
    step: int,
) -> list[Cause]:
    """Return the changes of gradients that one run makes before it clips, the other after.

    Args:
        sides: the step.
        events: what the loops did in it, of the reference and of the candidate.
        rank: of the step.
        step: its number.
    """
    ours = _Changes.of(sides.reference.rows, events[0])
    theirs = _Changes.of(sides.candidate.rows, events[1])
    if ours is None or theirs is None:
        return []
    late = _moved(ours.before, theirs.before) & _moved(theirs.after, ours.after)
    early = _moved(theirs.before, ours.before) & _moved(ours.after, theirs.after)
    if not late and not early:
        return []
    operator = min(late or early)
    here, there = ("before", "after") if late else ("after", "before")
    change = _first(theirs.after if late else theirs.before, operator)
    evidence = (
        f"the gradients are clipped ({called(theirs.clip)}) {here} they are changed by "
        f"{with_line(change.operator, change.line)}; the reference clips {there} it"
    )
    return [
        Cause(
            kind=LOOP,
            label="other loop",
            evidence=evidence,
            step=step,
            rank=rank,
            phase=_OPTIMIZER,
            name="clip of the gradients",
            at=min(theirs.clip.call, change.call),
            line=theirs.clip.line,
            reference_line=ours.clip.line,
            decides=True,
        )
    ]


@dataclass(frozen=True, slots=True)
class _Changes:
    """What a loop does to gradients about the first clip before its optimizer's step."""

    clip: LoopEvent
    before: Sequence[RecordedRow]
    after: Sequence[RecordedRow]

    @classmethod
    def of(cls, rows: Rows, events: Sequence[LoopEvent]) -> _Changes | None:
        """Return what a step tells; None without a clip."""
        clip = next((event for event in events if event.what in CLIPS), None)
        if clip is None:
            return None
        following = (event.call for event in events if event.call > clip.call)
        stepped = min(following, default=None)
        changes = [
            row
            for row in _changes_of_gradients(rows)
            if row.line != clip.line and (stepped is None or row.call < stepped)
        ]
        before = [row for row in changes if row.call < clip.call]
        after = [row for row in changes if row.call > clip.call]
        return cls(clip, before, after)


def _changes_of_gradients(rows: Rows) -> list[RecordedRow]:
    """Return the calls outside of the backward pass that make a gradient of one gradient."""
    gradients = {row.record for row in rows.values() if row.phase == _BACKWARD}
    changes = []
    for row in rows.values():
        if row.phase != _OPTIMIZER:
            continue
        read = [rows[i] for i in row.inputs if i in gradients and i in rows]
        if any(one.numel == row.numel for one in read):
            gradients.add(row.record)
            if row.view_of is None and row.numel != 1:
                changes.append(row)
    return changes


def _moved(
    changes: Sequence[RecordedRow], others: Sequence[RecordedRow]
) -> frozenset[str]:
    """Return the operators of some changes that there are fewer of among the others."""
    ours = Counter(row.base_operator for row in changes)
    theirs = Counter(row.base_operator for row in others)
    return frozenset(ours - theirs)


def _first(changes: Sequence[RecordedRow], operator: str) -> RecordedRow:
    return next(row for row in changes if row.base_operator == operator)
