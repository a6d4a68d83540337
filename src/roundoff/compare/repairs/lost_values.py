"""Does what makes one place right make another one wrong?"""

from __future__ import annotations

from collections.abc import Collection, Mapping

from torch import Tensor

from roundoff.compare.records.recorded_calls import CannotRun
from roundoff.compare.values.traced_calls import Edit, TracedProgram
from roundoff.compare.values.value_regions import Sides
from roundoff.ops import operators_that

_MOVE = operators_that("move values")


def loses(
    sides: Sides,
    program: TracedProgram,
    edits: Mapping[int, Edit],
    leaves: Mapping[int, Tensor],
) -> bool:
    """Return True where a value of the reference is not there any more.

    What one place gains another must not lose: then not what was changed is wrong, but what
    one of the two reads. True too for what cannot run.

    Args:
        sides: both programs.
        program: the candidate's calls.
        edits: other calls in the place of some.
        leaves: other parameters in the place of some.
    """
    had: set[int] = set()
    has: set[int] = set()
    again: set[int] = set()
    try:
        for row, tensor in program.again(edits, leaves):
            value = sides.candidate.values[row.record]
            again.add(value.key)
            if value.is_number and not value.says_nothing:
                # parts that several make up are not looked for again
                is_part = value.key in sides.several
                twins = () if is_part else sides.all_twins(value)
                had.update(key for key in twins if _is_computed(sides, key))
                has.update(sides.near_in_reference(tensor))
    except CannotRun:
        return True
    lost = had - has
    return bool(lost) and not lost <= _held_beside(sides, again)


def _held_beside(sides: Sides, again: Collection[int]) -> set[int]:
    """Return what the candidate has of the reference apart from what runs again."""
    beside = (v for v in sides.candidate.values.values() if v.key not in again)
    return {key for value in beside for key in sides.all_twins(value)}


def _is_computed(sides: Sides, key: int) -> bool:
    """Return True for what a call gives, and not for what it computes inside of it."""
    value = sides.reference.values[key]
    return value.computes and value.operator not in _MOVE and not value.inner
