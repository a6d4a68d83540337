"""Numbers that a program computes, keeps as Python's own, and reads again later.

Scores of a frozen model are computed once before the loop and kept in a list. What is read
of it comes from outside by all that is recorded; but what made it was recorded too, and
is what differs.
"""

from __future__ import annotations

from collections.abc import Container, Sequence
from functools import cached_property

import torch
from torch import Tensor

from roundoff.compare.judging.explain import RecordedStep
from roundoff.compare.judging.table import ComparedRow
from roundoff.compare.records.recorded_rows import RecordedRow
from roundoff.ops import operators_that

#: Fewer different numbers stand among others by chance.
FEWEST = 3
#: What only hands on results is about as far off as these: one of them may be less.
AS_FAR = 0.1
#: These read a number for the program, not for the model.
FOR_PYTHON = operators_that("ask about values")
_MOVES = operators_that("move values")


class ToldValues:
    """The results of a step that nothing recorded is computed of, and how far off they are.

    Args:
        step: of the candidate.
        compared: its rows.
        data: records that no parameter went into: they are no results.
    """

    def __init__(
        self, step: RecordedStep, compared: Sequence[ComparedRow], data: Container[int]
    ) -> None:
        self._step = step
        self._compared = compared
        self._data = data

    def has(self, row: RecordedRow, error: float | None) -> bool:
        """Return True where all numbers of an input are among such results before it.

        It needs its tensor, of at least ``FEWEST`` different numbers in a floating-point
        format. Results that are much nearer to the reference's than the input, by its
        ``error``, are right: other ones of them are read.
        """
        tensor = self._step.tensor(row.record)
        if tensor is None or not tensor.is_floating_point():
            return False
        wanted = torch.unique(_in_fp64(tensor))
        if len(wanted) < FEWEST:
            return False
        least = AS_FAR * (error or 0.0)
        for result, its_error in self._results:
            if its_error < least:
                continue
            content = self._step.tensor(result.record)
            if result.record > row.record or content is None:
                continue
            if content.dtype == tensor.dtype:
                wanted = wanted[~torch.isin(wanted, _in_fp64(content))]
            if not len(wanted):
                return True
        return False

    @cached_property
    def _results(self) -> list[tuple[RecordedRow, float]]:
        rows = self._step.rows
        read = self._read()
        results = []
        for each in self._compared:
            if each.record is None or each.record in read or not each.error:
                continue
            row = rows[each.record]
            is_result = row.is_call and row.phase == "forward"
            if is_result and row.record not in self._data:
                results.append((row, each.error))
        return results

    def _read(self) -> set[int]:
        """Return the records that something is computed of."""
        read: set[int] = set()
        for record, row in reversed([*self._step.rows.items()]):
            is_only_moved = row.base_operator in _MOVES and record not in read
            if row.base_operator not in FOR_PYTHON and not is_only_moved:
                read.update(row.inputs)
        return read


def _in_fp64(tensor: Tensor) -> Tensor:
    # torch finds no numbers of eight bits among others
    return tensor.detach().to(torch.float64)
