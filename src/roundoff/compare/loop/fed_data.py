"""The data that two runs were fed: other samples, another order, other values.

Data are what the model and the loss read and no parameter went into: inputs from outside,
and what the script itself makes of them before the first module runs. What it draws at
random is not fed: the operator that draws is named.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from roundoff.compare.judging.changing_values import (
    made_of,
    other_draws,
    unstable_records,
)
from roundoff.compare.judging.divergence import HANDS_ON
from roundoff.compare.judging.explain import RecordedStep, Sides
from roundoff.compare.judging.step_causes import DATA, Cause, with_line
from roundoff.compare.judging.table import SCHEDULE, STALE, ComparedRow
from roundoff.compare.loop.data_records import data_records, first_read_of_a_name
from roundoff.compare.loop.data_relations import (
    OTHER_VALUES,
    how_data_differ,
    statistics_words,
)
from roundoff.compare.loop.fed_draws import draw_cause
from roundoff.compare.loop.loaded_values import is_reordered
from roundoff.compare.loop.told_values import FOR_PYTHON, ToldValues
from roundoff.compare.pairing.alignment import MATCHED
from roundoff.compare.records.data_portions import DataPortions
from roundoff.compare.records.recorded_rows import RecordedRow, Rows, made_from
from roundoff.compare.rounding.distance import of_metrics, of_statistics
from roundoff.compare.rounding.findings import OWN
from roundoff.compare.rounding.reproducibility import UnstableRow
from roundoff.compare.rounding.rounding_bound import unit
from roundoff.compare.tensors.metrics import measure
from roundoff.ops import operators_that

#: Data that were made otherwise may differ by this many roundings.
ROUNDINGS = 16.0
#: Most inputs that are described, each in words.
MOST = 3
#: Made of nothing, in the size that the program asks for.
_CREATED = operators_that("create")


@dataclass(frozen=True, slots=True)
class _FedPair:
    """A value of both sides that the model or the loss reads."""

    twin: RecordedRow
    row: RecordedRow
    words: str
    error: float | None
    #: What reads it in the place of another value; None for a value of its own.
    reader: RecordedRow | None = None


def _fed(
    sides: Sides, compared: Sequence[ComparedRow], ours: set[int], theirs: set[int]
) -> dict[tuple[int, int], RecordedRow]:
    """Return the data that the same calls of the model or the loss read, in order.

    Each with the candidate's call. One that was paired with a call of another operator, as
    a cast that one run alone has, or by what reads it, may not read the same. What is made
    of data while the model runs is data where the line reads it that has read some before:
    the next batch.
    """
    fed: dict[tuple[int, int], RecordedRow] = {}
    feeding: set[object] = set()
    for row in compared:
        if row.record in theirs or row.reference_record in ours:
            continue
        for place, (a, b) in enumerate(_read_by_both(sides, row)):
            if b not in theirs:
                continue
            reader = sides.candidate.rows[row.record or 0]
            argument = (_code_of(reader), place)
            is_next = argument in feeding and _is_of_data(sides.reference.rows, a)
            if a in ours or is_next:
                feeding.add(argument)
                fed.setdefault((a, b), reader)
    read_by_reference = {reference for reference, _ in fed}
    twins = {row.record: row.reference_record for row in compared if not row.error}
    in_both = {row.reference_record for row in compared if row.record is not None}
    return {
        (reference, candidate): reader
        for (reference, candidate), reader in fed.items()
        # another of the same inputs is read: the program's fault, not the data's
        if twins.get(candidate, reference) in {reference, None}
        or twins[candidate] not in read_by_reference
        or reference not in in_both
    }


def _code_of(row: RecordedRow) -> tuple[str, str | None, str]:
    """Return what is equal for calls that one line of a program makes."""
    return row.module, row.line, row.operator


def _is_of_data(rows: Rows, record: int) -> bool:
    """Return True for what no parameter went into, and no module made."""
    behind = (rows[each] for each in made_from(rows, [record]))
    return not any(row.name or row.module for row in behind)


def _read_by_both(sides: Sides, row: ComparedRow) -> list[tuple[int, int]]:
    """Return what a call of the forward pass reads in both runs, argument by argument.

    Nothing for what is no call of one operator in both, or reads more in one run, or
    prints a number; and no memory that it overwrites. What is copied into memory that
    holds no data, as from a checkpoint, is kept there.
    """
    if row.record is None or row.reference_record is None or row.place:
        return []
    if row.phase != "forward" or row.status != MATCHED:
        return []
    twin = sides.reference.rows[row.reference_record]
    reader = sides.candidate.rows[row.record]
    if not reader.is_call or twin.base_operator != reader.base_operator:
        return []
    is_kept = reader.base_operator == "copy" and bool(reader.inplace)
    if reader.base_operator in FOR_PYTHON or is_kept:
        return []
    ours = twin.values_read()
    theirs = reader.values_read()
    if len(ours) != len(theirs):
        return []
    return list(zip(ours, theirs, strict=True))


def data_causes(
    sides: Sides,
    compared: Sequence[ComparedRow],
    *,
    unstable: Sequence[UnstableRow] = (),
    rank: int,
    step: int,
) -> list[Cause]:
    """Return the cause "other data" where what a step is fed differs.

    Numbers that the program draws are not fed: where they alone differ, the cause is
    "other draws". What does not repeat itself is neither.

    Args:
        sides: the step.
        compared: its rows.
        unstable: what repeats show to change from run to run.
        rank: of the step.
        step: its number.
    """
    theirs = sides.candidate.rows
    data = data_records(theirs)
    changing_of_reference, changing = unstable_records(sides, unstable)
    begin = _begin_of_computed_sizes(theirs, compared)
    all_drawn = other_draws(theirs, compared, data - changing)
    drawn = [row for row in all_drawn if not _is_computed_size(row, begin)]
    in_sizes = [row.record for row in all_drawn if row not in drawn and row.record]
    of_draws = made_of(theirs, [row.record for row in drawn if row.record is not None])
    told_elsewhere = [
        row.record
        for row in compared
        if row.looks_like == SCHEDULE or _is_left_as_it_was(sides, row)
    ]
    of_others = made_of(theirs, [*in_sizes, *filter(None, told_elsewhere)])
    readers = _fed(sides, compared, data_records(sides.reference.rows), data)
    read = [
        (sides.reference.rows[twin], theirs[record])
        for twin, record in readers
        if twin not in changing_of_reference and record not in changing
    ]
    read = _without_computed_sizes(read, begin)
    whole = _without_portions(sides, read)
    pairs = [_differing(sides, twin, row) for twin, row in whole]
    told = ToldValues(sides.candidate, compared, data)
    apart = [pair for pair in pairs if pair is not None]
    differing = [pair for pair in apart if not told.has(pair.row, pair.error)]
    fed = [
        _by_its_reader(pair, readers, compared)
        for pair in differing
        if pair.row.record not in of_draws | of_others
    ]
    if fed:
        return [_cause(fed, data - changing - of_draws, compared, rank, step)]
    if any(pair.row.record in of_draws for pair in differing):
        shown_by = data & of_draws
        return [draw_cause(sides, compared, drawn[0], shown_by, rank, step)]
    return []


def told_inputs(step: RecordedStep, compared: Sequence[ComparedRow]) -> set[int]:
    """Return the records of inputs that differ and only hand on what was computed before.

    Args:
        step: of the candidate.
        compared: its rows.
    """
    own = {row.record: row.error for row in compared if row.cause == OWN}
    apart = [step.rows[record] for record in own if record is not None]
    inputs = [row for row in apart if not row.is_call and not row.name]
    if not inputs:
        return set()
    told = ToldValues(step, compared, data_records(step.rows))
    return {row.record for row in inputs if told.has(row, own[row.record])}


def _is_left_as_it_was(sides: Sides, row: ComparedRow) -> bool:
    """Return True for state that the reference alone moves on from what it was before."""
    if row.looks_like != STALE or row.record is None or row.reference_record is None:
        return False
    rows = sides.reference.rows
    write = rows[row.reference_record]
    if not write.inplace or not write.inputs or write.inputs[0] not in rows:
        return False
    [memory, *written] = write.inputs
    was = rows[memory].content_in_steps
    is_as_it_was = was == sides.candidate.rows[row.record].content_in_steps
    return is_as_it_was and memory in made_from(rows, written)


def _by_its_reader(
    pair: _FedPair,
    readers: Mapping[tuple[int, int], RecordedRow],
    compared: Sequence[ComparedRow],
) -> _FedPair:
    """Say of a value that is right, but stands where another one should, who reads it."""
    is_right = any(
        row.record == pair.row.record
        and row.reference_record not in (None, pair.twin.record)
        and not row.error
        and row.cause is None
        for row in compared
    )
    reader = readers.get((pair.twin.record, pair.row.record))
    if not is_right or reader is None or not pair.words.startswith(OTHER_VALUES):
        return pair
    words = (
        f"is read by {with_line(reader.site, reader.line)} where the reference reads "
        f"{with_line(pair.twin.site, pair.twin.line)}"
    )
    return replace(pair, words=words, reader=reader)


def _begin_of_computed_sizes(
    rows: Rows, compared: Sequence[ComparedRow]
) -> int | float:
    """Return the record from which on sizes may differ since a value before does.

    Of boxes, words or nodes that a mask chooses there are more or fewer; so there are of
    the samples that a model collects.
    """
    running = first_read_of_a_name(rows)
    wrong = [row.record for row in compared if row.cause == OWN and row.record]
    first = min(wrong, default=None)
    return math.inf if running is None or first is None else max(running, first)


def _is_computed_size(row: ComparedRow, begin: int | float) -> bool:
    return row.shape != row.reference_shape and (row.record or 0) > begin


def _without_computed_sizes(
    read: Sequence[tuple[RecordedRow, RecordedRow]], begin: int | float
) -> list[tuple[RecordedRow, RecordedRow]]:
    """Return what is read but for constants of a size that is computed."""
    return [
        (twin, row)
        for twin, row in read
        if twin.shape == row.shape
        or row.base_operator not in _CREATED
        or row.record < begin
    ]


def _without_portions(
    sides: Sides, read: Sequence[tuple[RecordedRow, RecordedRow]]
) -> list[tuple[RecordedRow, RecordedRow]]:
    """Return what is read but for values of other shapes that are the same data.

    Where a run reads its data in other portions, or padded, what the script makes of
    nothing from outside, as positions and masks, is made for them: their other shapes
    say nothing.
    """
    other_shapes = [pair for pair in read if pair[0].shape != pair[1].shape]
    if not other_shapes:
        return list(read)
    data = DataPortions(sides.reference.rows, sides.candidate.rows)
    portioned = [pair for pair in other_shapes if data.are_same(*pair)]
    if not portioned:
        return list(read)
    return [
        (twin, row)
        for twin, row in read
        if (twin, row) not in other_shapes
        or (
            (twin, row) not in portioned and _is_from_outside(sides.candidate.rows, row)
        )
    ]


def _is_from_outside(rows: Rows, row: RecordedRow) -> bool:
    """Return True for an input, and for what is made of one."""
    behind = made_from(rows, [row.record])
    return any(not rows[record].is_call for record in behind)


def _cause(
    pairs: Sequence[_FedPair],
    data: set[int],
    compared: Sequence[ComparedRow],
    rank: int,
    step: int,
) -> Cause:
    first = pairs[0]
    maker = _made_by(compared, data)
    described = [
        f"{with_line(pair.row.site, pair.row.line)} {pair.words}"
        for pair in pairs[:MOST]
    ]
    text = "; ".join(described)
    if len(pairs) > MOST:
        text += f"; and {len(pairs) - MOST:,} more inputs"
    return Cause(
        kind=DATA,
        label="other data",
        evidence=f"the runs were fed other data: {text}{_detail(maker)}",
        step=step,
        rank=rank,
        phase="forward",
        name=first.row.site,
        row=first.row,
        twin=first.twin,
        line=_line_of(first, maker),
        reference_line=None if maker is None else maker.blamed_reference_line,
        error=max((pair.error or 0.0 for pair in pairs), default=None),
        shown_by=tuple(sorted(data)),
        decides=True,
    )


def _line_of(first: _FedPair, maker: ComparedRow | None) -> str | None:
    if first.reader is not None:
        return first.reader.line
    return None if maker is None else maker.blamed_line


def _made_by(rows: Sequence[ComparedRow], data: set[int]) -> ComparedRow | None:
    """Return the first operator of the data that made another value."""
    for row in rows:
        if row.cause != "own" or row.record not in data:
            continue
        if row.call is not None and row.call >= 0 and row.blamed_line is not None:
            return row
    return None


def _detail(made: ComparedRow | None) -> str:
    if made is None:
        return ""
    place = with_line(made.blamed or "an operator", made.blamed_line)
    return f"; it begins at {place}: {made.looks_like}, {made.evidence}"


def _differing(sides: Sides, twin: RecordedRow, row: RecordedRow) -> _FedPair | None:
    if twin.shape != row.shape:
        words = f"has the shape {row.shape} where the reference has {twin.shape}"
        return _FedPair(twin, row, words, None)
    ours = sides.reference.tensor(twin.record)
    theirs = sides.candidate.tensor(row.record)
    if ours is None or theirs is None:
        return _by_statistics(
            _source(sides.reference.rows, twin), _source(sides.candidate.rows, row)
        )
    error = of_metrics(measure(ours, theirs)).error
    if error is None or error <= ROUNDINGS * max(unit(twin.dtype), unit(row.dtype)):
        return None
    return _FedPair(twin, row, how_data_differ(ours, theirs), error)


def _source(rows: Rows, row: RecordedRow) -> RecordedRow:
    """Return the row that these values come from, behind what hands them on."""
    while row.operator in HANDS_ON and len(row.inputs) == 1:
        source = rows.get(row.inputs[0])
        if source is None:
            break
        row = source
    return row


def _by_statistics(twin: RecordedRow, row: RecordedRow) -> _FedPair | None:
    distance = of_statistics(twin, row)
    if distance.error is None or distance.equal:
        return None
    if is_reordered(twin, row):
        words = "has the same values in another order, by its statistics"
        return _FedPair(twin, row, words, distance.error)
    if distance.error <= ROUNDINGS * max(unit(twin.dtype), unit(row.dtype)):
        return None
    return _FedPair(twin, row, statistics_words(twin, row), distance.error)
