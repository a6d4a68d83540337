"""Numbers that a program computes, keeps as Python's own, and reads again later.

Scores of a frozen model are computed once before the loop and kept in a list. What is read
of it comes from outside by all that is recorded; but what made it was recorded too, and
is what differs.
"""

from __future__ import annotations

from collections.abc import Container, Sequence
from functools import cached_property

import torch

from roundoff.compare.judging.explain import RecordedStep
from roundoff.compare.judging.table import ComparedRow
from roundoff.compare.records.recorded_rows import RecordedRow
from roundoff.compare.rounding.findings import OWN
from roundoff.ops import operators_that

#: Fewer different numbers stand among others by chance.
FEWEST = 3

#: These read a number for the program, not for the model.
_FOR_PYTHON = operators_that("ask about values")
_MOVES = operators_that("move values")


class ToldValues:
    """The results of a step that differ from the reference's, that nothing recorded is computed of.

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

    def inputs(self) -> set[int]:
        """Return the records of inputs that differ and only hand on such results."""
        rows = self._step.rows
        apart = [row.record for row in self._compared if row.cause == OWN]
        inputs = [rows[record] for record in apart if record is not None]
        inputs = [row for row in inputs if not row.is_call and not row.name]
        return {row.record for row in inputs if self.has(row)}

    def has(self, row: RecordedRow) -> bool:
        """Return True where all numbers of an input are among such results before it.

        It needs its tensor, of at least ``FEWEST`` different numbers in a floating-point
        format.
        """
        tensor = self._step.tensor(row.record)
        if tensor is None or not tensor.is_floating_point():
            return False
        wanted = torch.unique(tensor.detach())
        if len(wanted) < FEWEST:
            return False
        for result in self._results:
            content = self._step.tensor(result.record)
            if result.record > row.record or content is None:
                continue
            if content.dtype == wanted.dtype:
                wanted = wanted[~torch.isin(wanted, content.detach())]
            if not len(wanted):
                return True
        return False

    @cached_property
    def _results(self) -> list[RecordedRow]:
        rows = self._step.rows
        read = self._read()
        apart = {row.record for row in self._compared if row.cause is not None}
        return [
            row
            for record, row in rows.items()
            if record in apart
            and record not in read
            and record not in self._data
            and row.is_call
            and row.phase == "forward"
        ]

    def _read(self) -> set[int]:
        """Return the records that something is computed of."""
        read: set[int] = set()
        for record, row in reversed([*self._step.rows.items()]):
            is_only_moved = row.base_operator in _MOVES and record not in read
            if row.base_operator not in _FOR_PYTHON and not is_only_moved:
                read.update(row.inputs)
        return read
