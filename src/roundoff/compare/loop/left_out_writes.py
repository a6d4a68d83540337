"""What one step writes for the next in the reference alone: state that stays as it was here.

Statistics that a server averages, a queue of keys, an average that nothing in the step
reads: the step that lacks the write agrees, and the next one begins with other values.
"""

from __future__ import annotations

from collections.abc import Callable, Container, Sequence

from roundoff.compare.judging.explain import Sides
from roundoff.compare.judging.step_causes import UPDATE, Cause, listed, with_line
from roundoff.compare.judging.table import ComparedRow
from roundoff.compare.loop.loaded_values import GRADIENT
from roundoff.compare.loop.unnamed_updates import is_other_value, written_sources
from roundoff.compare.pairing.alignment import REFERENCE_ONLY
from roundoff.compare.records.recorded_rows import (
    Content,
    RecordedRow,
    Rows,
    last_named,
)


def left_write_causes(
    sides: Sides,
    compared: Sequence[ComparedRow],
    later: tuple[Rows, Rows],
    *,
    rank: int,
    step: int,
) -> list[Cause]:
    """Return the cause for memory that the reference alone writes, and both read later.

    Where the next step of the reference reads what was written, that of the candidate
    reads what was there before. What the candidate writes in another place, as before a
    copy is made and not after it, is not left out.

    Args:
        sides: the step.
        compared: its rows.
        later: the rows of both in the next step.
        rank: of the step.
        step: its number.
    """
    rows = sides.reference.rows
    alone = {r.reference_record for r in compared if r.status == REFERENCE_ONLY}
    read = _read_alike(*later)
    theirs = sides.candidate.rows
    elsewhere = {theirs[record].content_in_steps for record in written_sources(theirs)}
    lost = []
    for record in written_sources(rows):
        write = rows[record]
        before = _before_all(rows, write, alone)
        if record not in alone or before is None or not _is_whole(write, before):
            continue
        if write.content_in_steps in elsewhere:
            continue
        if (write.content_in_steps, before.content_in_steps) in read:
            lost.append(write)
    return [_cause(lost, _as_it_was(lost), rank, step)] if lost else []


def further_write_causes(
    sides: Sides,
    compared: Sequence[ComparedRow],
    rename: Callable[[str], str],
    *,
    rank: int,
    step: int,
) -> list[Cause]:
    """Return the cause for parameters that both change, and the reference alone once more.

    An optimizer around another one moves what that has stepped: back to slow weights, or
    into bounds. Where no later step was recorded nothing reads it.

    Args:
        sides: the step.
        compared: its rows.
        rename: gives names of the reference their name in the candidate.
        rank: of the step.
        step: its number.
    """
    alone = {r.reference_record for r in compared if r.status == REFERENCE_ONLY}
    ours = last_named(sides.reference.rows)
    theirs = last_named(sides.candidate.rows)
    written_alone = [
        (write, theirs.get(rename(name)))
        for name, write in ours.items()
        if write.record in alone and write.inplace and f"{name}{GRADIENT}" in ours
    ]
    lost = [
        write
        for write, twin in written_alone
        if twin is not None and twin.is_call and is_other_value(write, twin)
    ]
    return [_cause(lost, _once_more(lost), rank, step)] if lost else []


def untouched_causes(
    sides: Sides,
    idle: Container[str],
    rename: Callable[[str], str],
    *,
    rank: int,
    step: int,
) -> list[Cause]:
    """Return the cause for named values that the reference alone writes, in any step.

    Whole numbers count how often something happened, which a program may leave out.

    Args:
        sides: the step.
        idle: what the candidate holds, and reads and writes in no step.
        rename: gives names of the reference their name in the candidate.
        rank: of the step.
        step: its number.
    """
    rows = sides.reference.rows
    writes = (rows[record] for record in written_sources(rows))
    lost = {
        row.name: row
        for row in writes
        if row.name
        and rename(row.name) in idle
        and not (row.dtype or "").startswith(("int", "uint", "bool"))
    }
    left = [*lost.values()]
    return [_cause(left, _as_it_was(left), rank, step)] if left else []


def _read_alike(reference: Rows, candidate: Rows) -> set[tuple[Content, Content]]:
    """Return what stands at the same places of two steps, where it differs."""
    theirs = {row.site: row.content_in_steps for row in candidate.values()}
    pairs = ((row.content_in_steps, theirs.get(row.site)) for row in reference.values())
    return {(ours, other) for ours, other in pairs if other and ours != other}


def _before_all(
    rows: Rows, write: RecordedRow, alone: Container[int | None]
) -> RecordedRow | None:
    """Return what a memory held before this write, and those before it in the reference
    alone: sample by sample, as sums are kept."""
    before: RecordedRow | None = write
    while before is not None and before.record in alone and before.inplace:
        before = rows.get(before.inputs[0]) if before.inputs else None
    return before


def _is_whole(write: RecordedRow, before: RecordedRow) -> bool:
    """Return True for a write that changes all of a memory."""
    return (
        write.shape == before.shape
        and write.content_in_steps != before.content_in_steps
    )


def _as_it_was(lost: Sequence[RecordedRow]) -> str:
    writes = listed([with_line(write.site, write.line) for write in lost])
    return (
        f"the reference writes {writes} for the next step; here that memory stays as it "
        "was, and the next step begins with other values"
    )


def _once_more(lost: Sequence[RecordedRow]) -> str:
    names = listed([write.name or "" for write in lost])
    are, they = ("is", "it stays") if len(lost) == 1 else ("are", "they stay")
    first = with_line(lost[0].site, lost[0].line)
    return (
        f"{names} {are} written once more in the reference, by {first}; here {they} as "
        "the writes before have left them"
    )


def _cause(lost: Sequence[RecordedRow], evidence: str, rank: int, step: int) -> Cause:
    first = lost[0]
    return Cause(
        kind=UPDATE,
        label="missing update",
        evidence=evidence,
        step=step,
        rank=rank,
        phase=first.phase,
        name=first.name or first.site,
        twin=first,
        reference_line=first.line,
    )
