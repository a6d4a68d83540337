"""Parameters and slow copies that one script alone writes between its optimizer's steps.

An average that follows the weights, a weight that is kept short: the script writes in
place to what was there before the step, outside of all modules.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Container

from roundoff.compare.judging.explain import Sides
from roundoff.compare.judging.step_causes import LOOP, UPDATE, Cause, listed, with_line
from roundoff.compare.loop.hand_updates import is_made_out_of_place
from roundoff.compare.loop.loaded_values import GRADIENT, values_before
from roundoff.compare.loop.unnamed_updates import is_other_value, written_sources
from roundoff.compare.records.recorded_rows import (
    RecordedRow,
    Rows,
    last_named,
    written_through_views,
)


def hand_write_causes(
    sides: Sides,
    rename: Callable[[str], str],
    known: tuple[Container[str], Container[str]],
    *,
    rank: int,
    step: int,
) -> list[Cause]:
    """Return the writes by hand to named values that only one run makes in a step.

    Args:
        sides: the step.
        rename: gives names of the reference their name in the candidate.
        known: what the reference and the candidate hold that their step may not read: by
            its name in the candidate.
        rank: of the step.
        step: its number.
    """
    ours = {rename(name): row for name, row in _writes(sides.reference.rows).items()}
    theirs = _writes(sides.candidate.rows)
    lost = _lacking(ours, theirs, sides.candidate.rows, lambda name: name)
    extra = _lacking(theirs, ours, sides.reference.rows, rename)
    lost = lost or _untouched(ours, sides.candidate.rows, known[1], lambda name: name)
    extra = extra or _untouched(theirs, sides.reference.rows, known[0], rename)
    causes = []
    if lost:
        causes.append(_cause(lost, ours, rank, step, lost=True))
    if extra:
        causes.append(_cause(extra, theirs, rank, step, lost=False))
    return causes


def hand_order_causes(
    sides: Sides, rename: Callable[[str], str], *, rank: int, step: int
) -> list[Cause]:
    """Return the writes by hand that come before an optimizer's step in one run alone.

    Those before the backward pass of a recorded step come after the step before it.
    """
    ours = {rename(name): row for name, row in _writes(sides.reference.rows).items()}
    theirs = _writes(sides.candidate.rows)
    names = [
        name
        for name, row in theirs.items()
        if name in ours
        and row.operator == ours[name].operator
        and _waits_for_a_step(row, sides.candidate.rows)
        != _waits_for_a_step(ours[name], sides.reference.rows)
    ]
    if not names:
        return []
    row, twin = theirs[names[0]], ours[names[0]]
    is_early = _waits_for_a_step(row, sides.candidate.rows)
    here, there = ("before", "after") if is_early else ("after", "before")
    are = "is" if len(names) == 1 else "are"
    evidence = (
        f"{listed(names)} {are} changed by {with_line(row.operator, row.line)} {here} the "
        f"optimizer steps, in the reference {there} it: another order of the calls"
    )
    return [
        Cause(
            kind=LOOP,
            label="other loop",
            evidence=evidence,
            step=step,
            rank=rank,
            phase=row.phase,
            name=names[0],
            names=names,
            row=row,
            twin=twin,
            decides=True,
        )
    ]


def _waits_for_a_step(write: RecordedRow, rows: Rows) -> bool:
    """Return True between a backward pass and the optimizer's step after it."""
    passes = (row.record for row in rows.values() if row.phase == "backward")
    steps = (row.record for row in rows.values() if row.phase == "optimizer")
    first = min(passes, default=write.record)
    return first < write.record < max(steps, default=write.record)


def _writes(rows: Rows) -> dict[str, RecordedRow]:
    """Return the last write by hand to each named value that was there before the step."""
    writes = {}
    for record, source in written_sources(rows).items():
        row = rows[record]
        before = rows.get(source)
        if before is None or not before.is_leaf or not row.name:
            continue
        is_state = not row.name.endswith(GRADIENT)
        if is_state and row.phase == "forward" and not row.module:
            writes[row.name] = row
    return writes


def _lacking(
    writes: dict[str, RecordedRow],
    of_other: dict[str, RecordedRow],
    other: Rows,
    rename: Callable[[str], str],
) -> list[str]:
    """Return the names of what the other run writes nothing to, and that is another value
    there."""
    there = {rename(name): row for name, row in values_before(other).items()}
    written = {*of_other, *map(rename, written_through_views(other))}
    for name, row in last_named(other).items():
        write = writes.get(rename(name))
        if row.is_call and write is not None and not is_other_value(write, row):
            written.add(rename(name))  # a module does
    lacking = [name for name in writes if name in there and name not in written]
    differs = any(is_other_value(writes[name], there[name]) for name in lacking)
    made_elsewhere = any(
        is_made_out_of_place(other, there[name], writes[name]) for name in lacking
    )
    return lacking if differs and not made_elsewhere else []


def _untouched(
    writes: dict[str, RecordedRow],
    other: Rows,
    known: Container[str],
    rename: Callable[[str], str],
) -> list[str]:
    """Return the names of what the other run holds, and neither reads nor writes."""
    there = {rename(row.name) for row in other.values() if row.name}
    return [name for name in writes if name in known and name not in there]


class KnownNames:
    """The names that a run holds, as its steps one after the other tell them."""

    def __init__(self) -> None:
        self._names: set[str] = set()
        #: How often the last step wrote each.
        self._written: Counter[str] = Counter()

    def note(self, rows: Rows, rename: Callable[[str], str]) -> None:
        """Note the names of a step."""
        self._names |= {rename(row.name) for row in rows.values() if row.name}
        written = (rows[record].name for record in written_sources(rows))
        self._written = Counter(rename(name) for name in written if name)

    def before(self, other: KnownNames) -> frozenset[str]:
        """Return the names in the steps so far.

        But for what the last of them writes oftener, or less often, than that of the other
        run: its loop may write it in another step of the recording.
        """
        unlike = {
            name
            for name in self._written | other._written
            if self._written[name] != other._written[name]
        }
        return frozenset(self._names - unlike)


def _cause(
    names: list[str],
    writes: dict[str, RecordedRow],
    rank: int,
    step: int,
    *,
    lost: bool,
) -> Cause:
    write = writes[names[0]]
    change = with_line(write.operator, write.line)
    are = "is" if len(names) == 1 else "are"
    if lost:
        it = "it" if len(names) == 1 else "them"
        evidence = (
            f"{listed(names)} {are} not changed between the steps of the optimizer; the "
            f"reference changes {it} by {change}"
        )
    else:
        evidence = (
            f"{listed(names)} {are} changed between the steps of the optimizer by "
            f"{change}, and not in the reference"
        )
    return Cause(
        kind=UPDATE,
        label="missing update" if lost else "extra update",
        evidence=evidence,
        step=step,
        rank=rank,
        phase=write.phase,
        name=names[0],
        names=names,
        at=-1 if lost else write.call,
        row=None if lost else write,
        twin=write if lost else None,
        decides=True,
    )
