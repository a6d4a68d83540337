"""Two ways to compute one value, held against each other in fp64.

Where two programs compute a value by other calls, their roundings differ, and one way
may cancel more than the other. Both are run again in fp64, from the values that both
runs have: what differs there is another function, what does not is rounding.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Iterator, Mapping
from dataclasses import dataclass, field

import torch
from torch import Tensor

from roundoff.compare.records.recorded_calls import (
    CannotRun,
    Tensors,
    copy_of,
    result_at,
    run_call,
)
from roundoff.compare.records.recorded_rows import RecordedRow, Rows
from roundoff.compare.rounding.rounding_bound import (
    MARGIN,
    REGION,
    REGION_LIMIT,
    condition,
    unit,
)
from roundoff.record import own_error

#: How many calls one after the other lead from the values of both runs to one.
DEEPEST = 24
#: How many calls are run for one value.
MOST_CALLS = 96
#: Two fp64 results are one function where they agree to a rounding of fp32: constants
#: of one program may be tensors of that format in the other.
SAME = 2.0**-24


@dataclass(frozen=True, slots=True)
class Calls:
    """The calls of one run, for running them again.

    Attributes:
        rows: by record.
        first: the first row of each call, which holds the arguments.
        tensors: of this run, for values from before the step.
    """

    rows: Rows
    first: Mapping[int, RecordedRow]
    tensors: Tensors


def explained_by_a_region(
    error: float, dtype: str | None, condition: float = math.inf
) -> bool:
    """Return True for an error that the roundings of many other calls explain.

    ``condition`` is how much they amplify, where that is known.
    """
    u = unit(dtype)
    return error <= min(REGION * u, REGION_LIMIT, MARGIN * u * condition)


def largest_condition(rows: Rows, record: int, shared: Collection[int]) -> float:
    """Return how much single numbers that lead to a value may amplify their roundings.

    That is the worst of them, such as the difference of 1 and 0.999; 1 or more. What
    larger tensors lose by cancelling is not in their statistics.

    Args:
        rows: of one run.
        record: of the value.
        shared: records of values that both runs have, before which nothing is looked at.
    """
    numbers = [row for row in _leading_to(rows, record, shared) if row.numel == 1]
    amplified = [condition(row, _read_by(rows, row)) for row in numbers]
    return max([1.0, *filter(math.isfinite, amplified)])


def _leading_to(
    rows: Rows, record: int, shared: Collection[int]
) -> Iterator[RecordedRow]:
    """Yield the results of the calls that lead to a value, from it back."""
    visited: set[int] = set()
    waiting = [record]
    while waiting and len(visited) < MOST_CALLS:
        reached = waiting.pop()
        row = rows.get(reached)
        if row is None or reached in visited or not row.is_call:
            continue
        visited.add(reached)
        yield row
        waiting += [i for i in row.inputs if i not in shared]


def _read_by(rows: Rows, row: RecordedRow) -> list[RecordedRow]:
    return [rows[record] for record in row.inputs if record in rows]


def is_one_function(
    reference: Calls,
    candidate: Calls,
    records: tuple[int, int],
    shared: Mapping[int, int],
) -> bool:
    """Return True where two values are one function of the values that both runs have.

    False too where the calls cannot be run again. Nothing is changed.

    Args:
        reference: its calls.
        candidate: its calls; where both runs have a value, its tensor is taken.
        records: of the two values, the reference's first.
        shared: the candidate's record of each of the reference's that both runs have.
            That of the value itself is not believed.
    """
    ours, theirs = records
    believed = {r: c for r, c in shared.items() if r != ours and c != theirs}
    held = {record: record for record in believed.values()}
    try:
        expected = _Again(reference, believed, candidate.tensors).value(ours)
        actual = _Again(candidate, held, candidate.tensors).value(theirs)
    except CannotRun:
        return False
    return _differ_by(actual, expected) <= SAME


def _differ_by(actual: Tensor, expected: Tensor) -> float:
    """Return the relative l2 distance; infinite for other shapes and for NaN."""
    if actual.shape != expected.shape:
        return math.inf
    [error] = own_error([actual], [expected])
    if error is None:
        return math.inf
    if error.reference:
        return error.l2 / error.reference
    return math.inf if error.l2 else 0.0


@dataclass(slots=True)
class _Again:
    """One value computed again in fp64: every call at most once."""

    calls: Calls
    holders: Mapping[int, int]
    held: Tensors
    _results: dict[int, list[Tensor | None]] = field(default_factory=dict)

    def value(self, record: int, depth: int = DEEPEST) -> Tensor:
        """Return the value of a record. Raises ``CannotRun``."""
        holder = self.holders.get(record)
        row = self.calls.rows.get(record)
        if holder is not None:
            return self._kept(holder, row)
        if row is None:
            raise CannotRun("one of its inputs was not recorded")
        if row.is_leaf:
            return copy_of(self.calls.tensors, record)
        return result_at(self._run(row, depth), row.place).clone()

    def _kept(self, holder: int, row: RecordedRow | None) -> Tensor:
        kept = copy_of(self.held, holder)
        if row is not None and tuple(row.shape or ()) != tuple(kept.shape):
            raise CannotRun("one of its inputs has another shape")
        return kept

    def _run(self, row: RecordedRow, depth: int) -> list[Tensor | None]:
        if row.call not in self._results:
            first = self.calls.first.get(row.call)
            if not depth or len(self._results) >= MOST_CALLS or first is None:
                raise CannotRun("what it is made of was not recorded")
            if first.arguments is None or first.overload is None:
                raise CannotRun("what it is made of was not recorded")
            value = self._values(depth - 1)
            results = run_call(first.overload, first.arguments, value, torch.float64)
            self._results[row.call] = results
        return self._results[row.call]

    def _values(self, depth: int) -> Callable[[int], Tensor]:
        return lambda record: self.value(record, depth)
