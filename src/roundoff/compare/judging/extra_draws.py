"""Random numbers that one function call draws in the candidate alone.

A network that is made once more, instead of copied, draws what the reference never does,
and all that is drawn later is other. The calls that draw stand in the library, or in the
network's code; the line that is wrong is the one from which all of them were called.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass
from difflib import SequenceMatcher
from functools import cached_property

from roundoff.compare.judging.symptoms import drawing_rows, draws
from roundoff.compare.records.call_stacks import stack_of
from roundoff.compare.records.recorded_rows import RecordedRow, Rows


@dataclass(frozen=True)
class ExtraDraws:
    """The draws of a step that the candidate alone makes, looked for once."""

    reference: Rows
    candidate: Rows

    @cached_property
    def stack(self) -> tuple[str, ...]:
        """The lines that led to all of them, the outermost first; the last is to be named.

        Empty where the reference draws as often, and where they were not called from one
        line, or not they alone.
        """
        ours, theirs = drawing_rows(self.reference), drawing_rows(self.candidate)
        if len(theirs) < len(ours) + 2:
            return ()
        alike = itertools.takewhile(_are_equal, zip(ours, theirs, strict=False))
        before = len(list(alike))
        kinds, other_kinds = (
            list(map(_kind, drawn[before:])) for drawn in (ours, theirs)
        )
        matcher = SequenceMatcher(None, kinds, other_kinds, autojunk=False)
        proper = set(range(before))
        for block in matcher.get_matching_blocks():
            proper.update(range(before + block.b, before + block.b + block.size))
        stacks = [stack_of(row) for row in theirs]
        common = _common([s for place, s in enumerate(stacks) if place not in proper])
        if any(stacks[place][: len(common)] == common for place in proper):
            return ()
        return common

    def line_of(self, row: RecordedRow) -> str | None:
        """Return the line to name for a row that is one of them; None for another one."""
        if not draws(row) or not self.stack:
            return None
        is_one = stack_of(row)[: len(self.stack)] == self.stack
        return self.stack[-1] if is_one else None


def _kind(row: RecordedRow) -> tuple[object, ...]:
    return row.operator, tuple(row.shape or ()), row.dtype


def _are_equal(pair: tuple[RecordedRow, RecordedRow]) -> bool:
    one, other = pair
    values = [(row.min, row.max, row.l2) for row in pair]
    return _kind(one) == _kind(other) and values[0] == values[1]


def _common(stacks: Sequence[tuple[str, ...]]) -> tuple[str, ...]:
    """Return the lines from which all of these were called, from the outermost one on.

    >>> _common([("a:9", "a:5", "a:2"), ("a:9", "a:5", "a:3")])
    ('a:9', 'a:5')
    """
    depth = 0
    while all(len(stack) > depth + 1 for stack in stacks):
        if len({stack[depth] for stack in stacks}) != 1:
            break
        depth += 1
    return stacks[0][:depth] if stacks else ()
