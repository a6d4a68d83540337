"""Parameters and slow copies that no module names, and that one run alone changes.

A script may keep its weights in a dict or a list: what an optimizer writes tells that
they are parameters. What follows them beside the optimizer, as an average or a target
network does, is memory from before the step that is written from a parameter.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from roundoff.compare.judging.explain import Sides
from roundoff.compare.judging.step_causes import (
    UPDATE,
    Cause,
    listed,
    with_line,
)
from roundoff.compare.judging.table import ComparedRow
from roundoff.compare.loop.loaded_values import GRADIENT, ROUNDINGS
from roundoff.compare.records.recorded_rows import RecordedRow, Rows
from roundoff.compare.rounding.distance import of_statistics
from roundoff.compare.rounding.rounding_bound import unit
from roundoff.ops import operators_that, written_input

#: A scaler of the loss notes in memory of its own whether gradients are finite.
_OF_SCALERS = operators_that("unscale gradients") | {"_amp_update_scale"}
#: The names of the causes.
PARAMETERS = "weights without a module"
COPIES = "slow copies of the weights"


def unnamed_state(rows: Rows) -> list[RecordedRow]:
    """Return the parameters without a name, and the slow copies of any parameters."""
    sources = written_sources(rows)
    parameters = _parameters(rows, sources)
    copies = _moved_copies(rows, sources, parameters)
    return [rows[record] for record in {**parameters, **copies}]


def written_before(rows: Rows) -> list[RecordedRow]:
    """Return the last write of an optimizer to each value without a name from before it."""
    written = {}
    for record, source in written_sources(rows).items():
        before = rows.get(source)
        write = rows[record]
        if before is None or before.name or write.name:
            continue
        if write.base_operator in _OF_SCALERS or write.phase != "optimizer":
            continue
        if before.is_leaf or before.phase == "forward":
            written[source] = write
    return [*written.values()]


def _parameters(rows: Rows, sources: Mapping[int, int]) -> dict[int, RecordedRow]:
    """Return the last write of an optimizer to each value that has no name, by its record.

    The record is that of the value as the step read it, before any write to it. What a
    loss scaler writes are gradients and its own flags.
    """
    parameters = {}
    for record, source in sources.items():
        before = rows.get(source)
        write = rows[record]
        if before is None or before.name or write.name:  # named later in the step
            continue
        if write.base_operator in _OF_SCALERS:
            continue
        if before.phase == "forward" and write.phase == "optimizer":
            parameters[source] = write
    return parameters


def written_sources(rows: Rows) -> dict[int, int]:
    """Return the value that each write in place began with, before the first of them.

    Of a write through a view that is the value that it shows.
    """
    results = Counter(row.call for row in rows.values() if row.inplace)
    sources: dict[int, int] = {}
    for row in rows.values():
        if not row.inplace or not row.is_call:
            continue
        written = written_input(
            row.operator,
            row.overload,
            row.inputs,
            place=row.place or 0,
            outputs=results[row.call],
        )
        if written is not None:
            shown = _shown(rows, written)
            sources[row.record] = sources.get(shown, shown)
    return sources


def _shown(rows: Rows, record: int) -> int:
    """Return the record of what a view shows, and of views of it; else its own."""
    row = rows.get(record)
    while row is not None:
        if row.operator == "alias" and row.inputs:
            record = row.inputs[0]
        elif row.view_of is not None:
            record = row.view_of
        else:
            break
        row = rows.get(record)
    return record


def unnamed_update_causes(
    sides: Sides, compared: Sequence[ComparedRow], *, rank: int, step: int
) -> list[Cause]:
    """Return the updates of values without a name that only one run makes in a step.

    Of parameters those whose counterpart the other run has and no optimizer writes; of
    slow copies those that a run lacks, where it moves none in any other way, and those
    that it moves on the other side of the optimizer.

    Args:
        sides: the step.
        compared: its rows.
        rank: of the step.
        step: its number.
    """
    ours = _Side.of(sides.reference.rows)
    theirs = _Side.of(sides.candidate.rows)
    twins = _values_before(ours, theirs, sides.candidate.rows, compared)
    backwards = {candidate: reference for reference, candidate in twins.items()}
    causes = [
        _of_parameters(ours, theirs, twins, rank, step, lost=True),
        _of_parameters(theirs, ours, backwards, rank, step, lost=False),
        _of_copies(ours, theirs, twins, rank, step, lost=True),
        _of_copies(theirs, ours, backwards, rank, step, lost=False),
        _of_order(ours, theirs, rank, step),
    ]
    return [cause for cause in causes if cause is not None]


def _values_before(
    ours: _Side, theirs: _Side, rows: Rows, compared: Sequence[ComparedRow]
) -> dict[int, int]:
    """Return the candidate's value from before the step for each of the reference's.

    Those that are counterparts themselves go before those of which later writes are: of
    an optimizer that does more to a value these are of other calls.
    """
    twins: dict[int, int] = {}
    by_writes: dict[int, int] = {}
    for row in compared:
        if row.record is None or row.reference_record is None:
            continue
        if rows[row.record].view_of is not None:
            continue
        before = ours.before(row.reference_record), theirs.before(row.record)
        is_before = before == (row.reference_record, row.record)
        (twins if is_before else by_writes)[before[0]] = before[1]
    taken = {*twins.values()}
    later = {our: their for our, their in by_writes.items() if their not in taken}
    return later | twins


@dataclass(frozen=True, slots=True)
class _Side:
    """What one run does to values without a name."""

    rows: Rows
    #: The value that each write in place began with.
    sources: Mapping[int, int]
    #: The last write of an optimizer to each, by the record of the value before.
    parameters: Mapping[int, RecordedRow]
    #: The last write to each value from before the step that a parameter goes into.
    copies: Mapping[int, RecordedRow]

    @classmethod
    def of(cls, rows: Rows) -> _Side:
        """Return what the rows of a step tell."""
        sources = written_sources(rows)
        parameters = _parameters(rows, sources)
        copies = _moved_copies(rows, sources, parameters)
        return cls(rows, sources, parameters, copies)

    def before(self, record: int) -> int:
        """Return the record of a value before the first write in place to it."""
        return self.sources.get(record, record)

    def steps(self, record: int) -> bool:
        """Return True for a parameter that an optimizer writes, with a name or without one."""
        if record in self.parameters:
            return True
        is_named = record in self.rows and bool(self.rows[record].name)
        return is_named and record in self.sources.values()

    @property
    def is_stepped(self) -> bool:
        """True where an optimizer is seen to write anything."""
        return any(row.phase == "optimizer" for row in self.rows.values())

    def moves_before_optimizer(self) -> list[RecordedRow]:
        """Return the writes to copies of parameters between a backward pass and the
        optimizer's steps, whether the copies are of this step or from before."""
        first_pass = min(self._calls_of("backward"), default=-1)
        stepped_with = self._read_by_optimizer()
        moves = []
        for row in self._between():
            source = self.rows.get(self.sources.get(row.record, -1))
            if source is None or row.name or row.record in stepped_with:
                continue
            # a copy of a module made in this step has names once, as it is made
            if str(source.name).endswith(GRADIENT) or (source.name and source.is_leaf):
                continue
            if source.call < first_pass:
                moves.append(row)
        return moves

    def writes_beside(self, writes: Sequence[RecordedRow]) -> list[int]:
        """Return the records of all writes to what some writes are to."""
        written = {self.before(write.record) for write in writes}
        return [record for record, source in self.sources.items() if source in written]

    def _read_by_optimizer(self) -> set[int]:
        """Return what optimizers read: gradients, to which a decay may be added by hand."""
        steps = (row for row in self.rows.values() if row.phase == "optimizer")
        return {_shown(self.rows, record) for row in steps for record in row.inputs}

    def read_beside_optimizer(self) -> set[int]:
        """Return what calls read that are none of an optimizer, and write nothing."""
        calls = (r for r in self.rows.values() if r.is_call and r.phase != "optimizer")
        reading = (row for row in calls if not row.inplace)
        return {_shown(self.rows, record) for row in reading for record in row.inputs}

    def computes_before_optimizer(self) -> bool:
        """Return True where new values are made of parameters there."""
        moved = operators_that("move values")
        return any(
            not row.inplace and row.view_of is None and row.base_operator not in moved
            for row in self._between()
        )

    def _between(self) -> list[RecordedRow]:
        """Return what is made of parameters between the last backward pass and the steps.

        Each is the parameter's shape, and no parameter.
        """
        steps = [row.call for row in self.rows.values() if self._is_step(row)]
        passes = self._calls_of("backward")
        of_parameters: set[int] = set()
        between = []
        for row in self.rows.values():
            if _is_named(row) or self._is_parameter(row):
                of_parameters.add(row.record)
                continue
            behind = [self.rows[i] for i in row.inputs if i in of_parameters]
            if not any(_shape(other) == _shape(row) for other in behind):
                continue
            if not row.inplace:
                of_parameters.add(row.record)
            if row.numel == 1 or row.phase != "forward" or not row.is_call:
                continue
            last_step = max((call for call in steps if call < row.call), default=-1)
            next_step = min((call for call in steps if call > row.call), default=-1)
            last_pass = max((c for c in passes if c < next_step), default=-1)
            if last_step < last_pass < row.call:
                between.append(row)
        return between

    def _calls_of(self, phase: str) -> list[int]:
        calls = (row.call for row in self.rows.values() if row.phase == phase)
        return [call for call in calls if call >= 0]

    def _is_step(self, row: RecordedRow) -> bool:
        """Return True for what an optimizer writes to a parameter."""
        is_write = row.phase == "optimizer" and bool(row.inplace)
        return is_write and (_is_named(row) or self._is_parameter(row))

    def _is_parameter(self, row: RecordedRow) -> bool:
        return self.before(row.record) in self.parameters


def _moved_copies(
    rows: Rows, sources: Mapping[int, int], parameters: Mapping[int, RecordedRow]
) -> dict[int, RecordedRow]:
    """Return the last write to each slow copy of a parameter, by the copy's record.

    What goes into it is the parameter, or is computed from it with its shape.
    """
    of_parameters: set[int] = set()
    copies = {}
    for row in rows.values():
        source = sources.get(row.record)
        is_parameter = row.record in parameters or _is_named(row)
        if is_parameter or source in of_parameters:
            of_parameters.add(row.record)
            continue
        behind = [rows[i] for i in row.inputs if i in of_parameters]
        # a single number, as the scale of a loss, has the shape of any other
        is_alike = any(_shape(other) == _shape(row) for other in behind)
        if not is_alike or row.numel == 1:
            continue
        if source is None:
            of_parameters.add(row.record)
        elif _is_from_before(rows.get(source)) and row.phase == "forward":
            copies[source] = row
    return copies


def _is_named(row: RecordedRow) -> bool:
    return bool(row.name) and not str(row.name).endswith(GRADIENT)


def _is_from_before(row: RecordedRow | None) -> bool:
    return row is not None and row.is_leaf and not row.name


def _shape(row: RecordedRow) -> tuple[int, ...]:
    return tuple(row.shape or ())


def _of_parameters(
    side: _Side,
    other: _Side,
    twins: Mapping[int, int],
    rank: int,
    step: int,
    *,
    lost: bool,
) -> Cause | None:
    """Return the cause for parameters that an optimizer of one side alone writes."""
    if not other.is_stepped:
        return None
    alone = [
        record
        for record in side.parameters
        if record in twins and not other.steps(twins[record])
    ]
    # what nothing but an optimizer reads is its own state, which it may make before it steps
    read = side.read_beside_optimizer() if alone else set()
    alone = [record for record in alone if record in read]
    if not alone:
        return None
    write = side.parameters[alone[0]]
    change = with_line(write.operator, write.line)
    are = "is" if len(alone) == 1 else "are"
    it = "it" if len(alone) == 1 else "them"
    which = (
        f"{_count(alone, 'parameter')} that no module names, {_listed(side, alone)},"
    )
    if lost:
        evidence = (
            f"{which} {are} not changed here, for want of a gradient or of an optimizer "
            f"that holds {it}; the reference changes {it} by {change}"
        )
    else:
        evidence = f"{which} {are} changed here by {change}, and not in the reference"
    counterpart = other.rows.get(twins[alone[0]])
    return Cause(
        kind=UPDATE,
        label="missing update" if lost else "extra update",
        evidence=evidence,
        step=step,
        rank=rank,
        phase="optimizer",
        name=PARAMETERS,
        at=_first_call(other if lost else side, "optimizer"),
        row=counterpart if lost else write,
        twin=write if lost else counterpart,
        shown_by=[twins[record] if lost else record for record in alone],
        decides=True,
    )


def _of_copies(
    side: _Side,
    other: _Side,
    twins: Mapping[int, int],
    rank: int,
    step: int,
    *,
    lost: bool,
) -> Cause | None:
    """Return the cause for slow copies that one side alone moves."""
    if other.copies:
        return None
    written = {*other.sources.values()}
    left = {
        record
        for record, twin in twins.items()
        if _is_from_before(other.rows.get(twin)) and twin not in written
    }
    alone = [record for record in side.copies if record not in twins or record in left]
    if not alone:
        return None
    write = side.copies[alone[0]]
    change = with_line(write.operator, write.line)
    are = "is" if len(alone) == 1 else "are"
    where = (
        "in the reference, and not here" if lost else "here, and not in the reference"
    )
    evidence = (
        f"{_count(alone, 'value')} from before the step, of a parameter's shape, {are} "
        f"moved towards it by {change} {where}: a slow copy of the weights stays behind"
    )
    return Cause(
        kind=UPDATE,
        label="missing update" if lost else "extra update",
        evidence=evidence,
        step=step,
        rank=rank,
        phase=write.phase,
        name=COPIES,
        at=-1 if lost else write.call,
        row=None if lost else write,
        twin=write if lost else None,
    )


def _of_order(ours: _Side, theirs: _Side, rank: int, step: int) -> Cause | None:
    """Return the cause for slow copies that are moved before an optimizer steps in one
    run, and after one in the other: in this step or the next."""
    twins = ours.moves_before_optimizer()
    writes = theirs.moves_before_optimizer()
    if bool(twins) == bool(writes):
        return None
    late = ours if writes else theirs
    if late.computes_before_optimizer():
        return None  # the same in new memory
    twin = _first(twins or [*ours.copies.values()])
    write = _first(writes or [*theirs.copies.values()])
    if twin is not None and write is not None and not is_other_value(twin, write):
        return None
    if write is None:
        here = "are not moved before the optimizer steps"
    else:
        here = f"are moved {'before' if writes else 'after'} the optimizer steps{_by(write)}"
    if twin is None:
        there = "does not move them there"
    else:
        there = f"moves them {'after' if writes else 'before'} it{_by(twin)}"
    evidence = f"slow copies of the weights {here}; the reference {there}"
    return Cause(
        kind=UPDATE,
        label="other order",
        evidence=evidence,
        step=step,
        rank=rank,
        phase="forward",
        name=COPIES,
        at=-1 if write is None else write.call,
        row=write,
        twin=twin,
        shown_by=theirs.writes_beside(writes),
        decides=True,
    )


def _first(writes: Sequence[RecordedRow]) -> RecordedRow | None:
    return min(writes, key=lambda row: row.call, default=None)


def _by(write: RecordedRow) -> str:
    return f", by {with_line(write.operator, write.line)}"


def is_other_value(one: RecordedRow, other: RecordedRow) -> bool:
    """Return True where the statistics are further apart than rounding brings them."""
    if _shape(one) != _shape(other):
        return True
    error = of_statistics(one, other).error
    return error is not None and error > ROUNDINGS * unit(one.dtype)


def _first_call(side: _Side, phase: str) -> int:
    calls = (row.call for row in side.rows.values() if row.phase == phase)
    return min((call for call in calls if call >= 0), default=0)


def _count(records: Sequence[int], what: str) -> str:
    return f"a {what}" if len(records) == 1 else f"{len(records):,} {what}s"


def _listed(side: _Side, records: Sequence[int]) -> str:
    """Return the values by their shapes and the lines that read them first."""
    return listed([_read_at(side.rows, record) for record in records])


def _read_at(rows: Rows, record: int) -> str:
    made = rows[record].line if rows[record].is_call else None
    lines = (row.line for row in rows.values() if record in row.inputs)
    line = next((line for line in lines if line and line != made), rows[record].line)
    shape = " × ".join(map(str, _shape(rows[record]))) or "one number"
    return with_line(f"of {shape}", line)
