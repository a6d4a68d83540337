"""One value of two runs side by side: its makers, statistics, metrics and elements."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, fields, replace

from roundoff.compare.judging.divergence import EQUAL_INPUTS
from roundoff.compare.judging.explain import Sides
from roundoff.compare.pairing.alignment import Pair
from roundoff.compare.records.call_arguments import argument_differences
from roundoff.compare.records.recorded_rows import (
    RecordedRow,
    Rows,
    first_rows,
    shape_read_first,
)
from roundoff.compare.rounding.distance import Distances
from roundoff.compare.rounding.rounding_bound import tolerance, working_formats
from roundoff.compare.tensors.element_differences import (
    ElementDifferences,
    NotCompared,
    element_differences,
)
from roundoff.compare.tensors.metrics import Metrics, measure
from roundoff.record import STATISTICS


@dataclass(frozen=True, slots=True)
class ValueLabel:
    """The name of one value; ``call`` is below 0 for one from before the step."""

    site: str
    name: str | None
    phase: str
    place: int | None
    call: int


@dataclass(frozen=True, slots=True)
class ValueSide:
    """One side of a value, as its run recorded it."""

    site: str
    name: str | None
    line: str | None
    phase: str
    place: int | None
    operator: str
    overload: str | None
    dtype: str | None
    shape: Sequence[int] | None
    numel: int | None
    record: int
    call: int
    #: Why there are no statistics, or no tensor.
    reason: str | None


@dataclass(frozen=True, slots=True)
class ValueSides:
    """Both sides of a value; None where a run has no counterpart."""

    reference: ValueSide | None
    candidate: ValueSide | None


@dataclass(frozen=True, slots=True)
class InputDifference:
    """One input of both calls: the candidate's name, and the relative error."""

    site: str
    name: str | None
    call: int
    reference_site: str
    error: float | None
    #: True where the two inputs are each other's counterparts.
    same: bool


@dataclass(frozen=True, slots=True)
class StatisticDifference:
    """One statistic of both sides, and candidate - reference."""

    name: str
    reference: float | None
    candidate: float | None
    difference: float | None


@dataclass(frozen=True, slots=True, kw_only=True)
class ValueDifference:
    """One value of two runs side by side.

    Where one side has no counterpart, only the names are filled.
    """

    #: Where the runs are.
    reference: str
    candidate: str
    #: The site or name that was asked for.
    asked: str
    rank: int
    step: int
    #: How the sides were paired, and why: see ``alignment.Pair``.
    status: str
    reason: str | None
    sides: ValueSides
    #: More values of that name.
    others: Sequence[ValueLabel] = ()
    #: The constants that differ between the two calls, a text each.
    arguments: Sequence[str] = ()
    inputs: Sequence[InputDifference] = ()
    statistics: Sequence[StatisticDifference] = ()
    #: Relative.
    error: float | None = None
    #: What rounding explains, relative.
    tolerance: float | None = None
    #: Where both kept tensors.
    metrics: Metrics | None = None
    elements: ElementDifferences | NotCompared | None = None
    #: Why there are no metrics.
    note: str | None = None


def label_of(row: RecordedRow) -> ValueLabel:
    """Return the name of a value."""
    return ValueLabel(row.site, row.name, row.phase, row.place, row.call)


def side_of(row: RecordedRow | None) -> ValueSide | None:
    """Return one side of a value; None where a run has no counterpart."""
    if row is None:
        return None
    return ValueSide(**{f.name: getattr(row, f.name) for f in fields(ValueSide)})


def with_measures(
    named: ValueDifference,
    sides: Sides,
    pairs: Sequence[Pair],
    pair: tuple[RecordedRow, RecordedRow],
    *,
    limit: int,
    without_tensors: str | None = None,
) -> ValueDifference:
    """Return the difference with everything that can be measured.

    Args:
        named: only the names.
        sides: the step.
        pairs: all pairs of the step.
        pair: the rows to compare, reference first.
        limit: how many elements of each list.
        without_tensors: why tensors cannot be compared; None where both runs kept them.
    """
    twin, row = pair
    distances = Distances(
        sides.reference.rows,
        sides.candidate.rows,
        None if without_tensors else sides.reference.tensors,
        None if without_tensors else sides.candidate.tensors,
    )
    inputs = _input_differences(sides, pairs, pair, distances)
    ours = _first(sides.reference.rows, twin)
    theirs = _first(sides.candidate.rows, row)
    read = (
        shape_read_first(sides.reference.rows, ours),
        shape_read_first(sides.candidate.rows, theirs),
    )
    measured = replace(
        named,
        arguments=argument_differences(ours, theirs, read),
        inputs=inputs,
        statistics=[_statistic(name, twin, row) for name in STATISTICS],
        error=distances(twin.record, row.record).error,
        tolerance=_tolerance(sides, twin, row, inputs),
    )
    note = without_tensors or _why_no_tensor(sides, twin, row)
    x = sides.reference.tensor(twin.record)
    y = sides.candidate.tensor(row.record)
    if note is not None or x is None or y is None:
        return replace(measured, note=note)
    return replace(
        measured, metrics=measure(x, y), elements=element_differences(x, y, limit)
    )


def _tolerance(
    sides: Sides,
    twin: RecordedRow,
    row: RecordedRow,
    inputs: Sequence[InputDifference],
) -> float:
    ours = working_formats(sides.reference.rows.values())
    theirs = working_formats(sides.candidate.rows.values())
    rows = sides.candidate.rows
    read = [rows[record] for record in row.inputs if record in rows]
    explained = tolerance(twin, row, theirs - ours, read)
    equal_inputs = inputs and all(each.error == 0 for each in inputs)
    return explained * EQUAL_INPUTS if equal_inputs else explained


def _why_no_tensor(sides: Sides, twin: RecordedRow, row: RecordedRow) -> str | None:
    lacking = []
    if sides.reference.tensor(twin.record) is None:
        lacking.append("reference")
    if sides.candidate.tensor(row.record) is None:
        lacking.append("candidate")
    if not lacking:
        return None
    who = " and the ".join(lacking)
    why = twin.reason or row.reason or "unknown why"
    return f"the {who} kept no tensor of it: {why}"


def _first(rows: Rows, row: RecordedRow) -> RecordedRow:
    """Return the first row of the call: it holds the arguments."""
    return first_rows(rows)[row.call] if row.is_call else row


def _input_differences(
    sides: Sides,
    pairs: Sequence[Pair],
    pair: tuple[RecordedRow, RecordedRow],
    distances: Distances,
) -> list[InputDifference]:
    """Return what both calls read at the same places, and how far it is apart."""
    twin, row = pair
    if not row.is_call or not twin.is_call:
        return []
    counterpart = {each.candidate: each.reference for each in pairs}
    differences = []
    for ours, theirs in zip(twin.values_read(), row.values_read(), strict=False):
        reference = sides.reference.rows.get(ours)
        candidate = sides.candidate.rows.get(theirs)
        if reference is None or candidate is None:
            continue
        difference = InputDifference(
            site=candidate.site,
            name=candidate.name,
            call=candidate.call,
            reference_site=reference.site,
            error=distances(ours, theirs).error,
            same=counterpart.get(theirs) == ours,
        )
        differences.append(difference)
    return differences


def _statistic(name: str, twin: RecordedRow, row: RecordedRow) -> StatisticDifference:
    ours = getattr(twin, name)
    theirs = getattr(row, name)
    if ours is None or theirs is None:
        return StatisticDifference(name, ours, theirs, None)
    return StatisticDifference(name, ours, theirs, theirs - ours)
