"""What edits are made of: numbers, operators and values of the reference near where two programs part."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence
from functools import cache
from itertools import islice
from typing import Any

import torch
from torch import Tensor

from roundoff.compare.records.recorded_rows import RecordedRow
from roundoff.compare.repairs.edits.edited_calls import (
    Ingredients,
    Insertion,
    floats_in,
)
from roundoff.compare.repairs.offset_values import OffsetValues
from roundoff.compare.repairs.similar_values import Masks, SimilarValues
from roundoff.compare.repairs.suspects import MOST_CALLS
from roundoff.compare.repairs.trials import (
    Region,
    Trials,
    calls_by_line,
    with_names,
)
from roundoff.compare.values.traced_calls import (
    BEFORE,
    EditStep,
    TracedCall,
    TracedProgram,
    records_in,
)
from roundoff.compare.values.value_flow import Flow, values_of_parameters
from roundoff.compare.values.value_regions import Sides
from roundoff.ops import operators_that

#: Operators that an activation takes where a line writes it out.
MOST_STEPS = 12
#: What the candidate does to other values, of which each is tried.
MOST_DONE = 6
#: Numbers that are tried in a call.
MOST_NUMBERS = 24
_MOVE = operators_that("move values")
_DONE = operators_that("pair elements") | operators_that("fill")
_PAIRS = operators_that("pair elements")
_UNARY = operators_that("work element by element") | operators_that("choose values")
_NORMALIZE = operators_that("normalize")


def ingredients_of(sides: Sides, trials: Trials, region: Region) -> Ingredients:
    program = trials.program
    reference = sides.reference
    theirs = TracedProgram(reference)
    near = _calls_near(reference, theirs, region.expected)
    similar = SimilarValues(program)

    def shapes(record: int) -> tuple[int, ...]:
        row = sides.candidate.step.rows.get(record)
        return tuple(row.shape or ()) if row is not None else ()

    @cache
    def mask_format(record: int) -> str | None:
        row = sides.candidate.step.rows.get(record)
        values = None if row is None else sides.candidate.tensor(record)
        if row is None or values is None or not values.numel():
            return None
        is_truth = values.dtype == torch.bool
        return row.dtype if is_truth or _are_zeros_and_ones(values) else None

    masks = Masks(similar, sides.candidate, mask_format)

    def maker(record: int) -> TracedCall | None:
        row = sides.candidate.step.rows.get(record)
        return None if row is None else program.calls.get(row.call)

    by_line = calls_by_line(program)

    def siblings(call: TracedCall) -> list[Any]:
        return [each.parsed for each in by_line.get(call.first.line or "", ())]

    def turns(count: int, shape: tuple[int, ...]) -> Iterator[Sequence[TracedCall]]:
        seen: set[int] = set()
        for family in trials.families.values():
            first = family[0].first
            is_alike = len(family) == count and tuple(first.shape or ()) == shape
            if is_alike and first.call not in seen:
                seen.add(first.call)
                yield family

    return Ingredients(
        list(theirs.calls.values()),
        constants=_numbers_in(near, reference),
        inserted=[
            *_insertable(reference, near),
            *_done_to_others(sides.candidate, program, region.parted),
        ],
        activations=_activations(reference, region.expected),
        is_read_again=lambda record: len(sides.candidate.readers.get(record, ())) > 1,
        shapes=shapes,
        mask_format=mask_format,
        offset=cache(OffsetValues(sides, region.expected).offset),
        turns=turns,
        maker=maker,
        written_out=_WrittenOut(trials).source,
        siblings=siblings,
        similar=similar.to,
        masks=masks.of,
        contents=sides.candidate.tensor,
    )


class _WrittenOut:
    """What a line computes of one value in several operators, element by element."""

    def __init__(self, trials: Trials) -> None:
        self._program = trials.program
        self._rows = trials.program.flow.step.rows
        self._families = trials.families

    def source(self, call: TracedCall) -> int | None:
        """Return the value that a call is the last to compute with; None of any other."""
        flow = self._program.flow
        readers = flow.readers.get(call.rows[0].record, ())
        rows = [flow.values[key].row for key in readers]
        if not self._is_step(call) or any(self._is_beside(call, row) for row in rows):
            return None
        seen = [call]
        sources: set[int] = set()
        waiting = [call]
        while waiting and len(seen) <= MOST_STEPS:
            for record in records_in(waiting.pop().parsed):
                row = self._rows.get(record)
                made = None if row is None else self._program.calls.get(row.call)
                is_inside = row is not None and self._is_beside(call, row)
                if made is None or not is_inside or self._is_turn_of(seen, made):
                    sources.add(record)
                elif made not in seen:
                    seen.append(made)
                    waiting.append(made)
        if waiting or len(sources) != 1 or len(seen) < 2:
            return None
        [source] = sources
        row = self._rows.get(source)
        is_alike = row is not None and row.shape == call.first.shape
        return source if is_alike else None

    def _is_step(self, call: TracedCall) -> bool:
        name = call.first.base_operator
        return name in _UNARY | _PAIRS and len(call.rows) == 1

    def _is_beside(self, call: TracedCall, row: RecordedRow) -> bool:
        made = self._program.calls.get(row.call)
        is_step = made is not None and self._is_step(made)
        return is_step and row.line is not None and row.line == call.first.line

    def _is_turn_of(self, seen: Sequence[TracedCall], made: TracedCall) -> bool:
        """Return True for what the same place of the line has made in another turn."""
        family = self._families.get(made.first.call)
        return any(
            each is not made and self._families.get(each.first.call) is family
            for each in seen
        )


def _are_zeros_and_ones(values: Tensor) -> bool:
    ones = values == 1
    zeros = values == 0
    return bool((ones | zeros).all() and ones.any() and zeros.any())


def _calls_near(
    flow: Flow, program: TracedProgram, wanted: Collection[int]
) -> list[TracedCall]:
    """Return the first calls of a region of one program."""
    calls = sorted({flow.values[key].row.call for key in wanted})
    return [program.calls[call] for call in calls if call in program.calls][:MOST_CALLS]


def _numbers_in(calls: Sequence[TracedCall], flow: Flow) -> list[float]:
    """Return the numbers in the arguments of calls, and the roots of their sizes."""
    numbers: dict[float, None] = {}
    for call in calls:
        for value in floats_in(call.parsed):
            numbers[value] = None
        if call.first.base_operator not in _MOVE:
            for record in records_in(call.parsed)[:1]:
                shape = flow.step.rows[record].shape if record in flow.step.rows else ()
                for size in (shape or ())[-1:]:
                    if size > 1:
                        numbers[float(size) ** -0.5] = None
    return list(numbers)[:MOST_NUMBERS]


def _activations(flow: Flow, expected: Collection[int]) -> list[str]:
    """Return the activations of a region, those inside of its calls included."""
    computed = {flow.values[key].operator for key in expected}
    return sorted(computed & operators_that("activate"))


def _insertable(flow: Flow, calls: Sequence[TracedCall]) -> Iterator[Insertion]:
    """Yield the reference's calls that a value may go through: activations and norms."""
    seen: set[str] = set()
    for call in calls:
        if call.first.base_operator not in _UNARY | _NORMALIZE:
            continue
        insertion = _insertion(flow, call)
        if insertion is None:
            continue
        key = f"{insertion.step.overload} {insertion.step.arguments}"
        if key not in seen or insertion.held:
            seen.add(key)
            yield insertion


def _done_to_others(
    flow: Flow, program: TracedProgram, parted: Collection[int]
) -> Iterator[Insertion]:
    """Yield what the candidate does to values of a region with others that learn nothing.

    Of blocks that are masked alike one may be left as it is.
    """
    learnt = values_of_parameters(flow)
    by_line: dict[object, TracedCall] = {}
    for call in _calls_near(flow, program, parted):
        records = list(dict.fromkeys(records_in(call.parsed)))
        is_masking = call.first.base_operator in _DONE and len(records) == 2
        if is_masking and records[0] in learnt and records[1] not in learnt:
            by_line.setdefault((call.first.line, call.first.overload), call)
    for call in islice(by_line.values(), MOST_DONE):
        insertion = _insertion(flow, call)
        if insertion is not None:
            yield insertion


def _insertion(flow: Flow, call: TracedCall) -> Insertion | None:
    """Return a call with its first input left open; None where its others were not kept."""
    records = list(dict.fromkeys(records_in(call.parsed)))
    overload = call.first.overload
    if not records or overload is None:
        return None
    names = {records[0]: BEFORE}
    held: dict[int, Tensor] = {}
    for record in records[1:]:
        tensor = flow.tensor(record)
        if tensor is None:
            return None
        names[record] = BEFORE - 1 - len(held)
        held[names[record]] = tensor
    rows = flow.step.rows
    read = records_in(call.parsed)
    shapes = tuple(tuple(rows[r].shape or ()) for r in read if r in rows)
    step = EditStep(overload, with_names(call.parsed, names), shapes)
    name = call.first.base_operator
    words = f"{name} ({call.first.line})" if call.first.line else name
    shape = tuple(call.first.shape or ()) if held else ()
    return Insertion(step, held, words, shape)
