"""Is a difference one of the way alone: does all that is made of it agree again?

Two programs may add gradients in another order, multiply in parts, or subtract what the
other adds the negative of: what stands in between differs, and nothing after it does.
"""

from __future__ import annotations

import heapq
import math
from collections.abc import Callable, Mapping, Sequence

from roundoff.compare.judging.divergence import (
    EQUAL_INPUTS,
    NEARER,
    Divergence,
)
from roundoff.compare.judging.read_later import ReadLater
from roundoff.compare.records.recorded_rows import RecordedRow, Rows, last_named
from roundoff.compare.rounding.findings import INHERITED, OWN, Finding
from roundoff.ops import operators_that

#: Norms, which a clip divides by: they hide a factor from what comes after.
NORMS = operators_that("sum") & operators_that("take roots")
#: What the state of an optimizer begins as.
CREATED = operators_that("create")


def clear_what_agrees_later(
    step: Divergence, read_later: Callable[[], ReadLater]
) -> None:
    """Take the blame from values of which all that is made agrees again.

    Gradients of several uses of a value that are added in another order differ in
    between, as do parts of one product that are several products elsewhere, and a
    term that is added with the other sign where it is subtracted. What is
    read or inserted there and changes nothing after it is no fault. What a norm
    shows is, though a clip by that norm hides it later; and a loss of which the
    gradient's seed reads the shape alone.

    Args:
        step: of both runs; its findings are changed.
        read_later: gives what the next step reads of this one: all of it counts.
    """
    later = _LaterValues(step, read_later)
    forgiven = {
        record
        for record, finding in step.findings.items()
        if later.may_be_partial_sum(finding) and later.agrees_later(record)
    }
    for finding in step.findings.values():
        inherited = finding.cause == INHERITED and finding.origin in forgiven
        if finding.record in forgiven or inherited:
            finding.cause = None
            finding.origin = None
            if finding.error == math.inf:
                # of another shape, so that its distance says nothing
                finding.error = None
                finding.own_error = 0.0
    for finding in step.findings.values():
        finding.sources = [
            (record, error)
            for record, error in finding.sources
            if step.findings[record].error is not None
        ]


def _readers(rows: Rows) -> dict[int, list[int]]:
    """Return who reads each value, or writes over it."""
    readers: dict[int, list[int]] = {}
    for row in rows.values():
        for record in row.inputs if row.inplace else row.values_read():
            readers.setdefault(record, []).append(row.record)
    return readers


def _names(rows: Rows) -> set[str]:
    return {row.name for row in rows.values() if row.name}


def _last_records(rows: Rows) -> dict[str, int]:
    return {name: row.record for name, row in last_named(rows).items()}


class _LaterValues:
    """What one step of both runs makes of a value after it."""

    def __init__(self, step: Divergence, read_later: Callable[[], ReadLater]) -> None:
        self._step = step
        self._read_later = read_later
        self._readers: Mapping[int, Sequence[int]] = _readers(step.candidate)
        #: By name, the record of the last value of each run.
        self._last = _last_records(step.candidate)
        self._last_of_reference = _last_records(step.reference)
        #: Names of which one of the runs does not show what the step leaves.
        self._unseen = _names(step.candidate) - self._last.keys()
        self._unseen |= _names(step.reference) - self._last_of_reference.keys()

    def may_be_partial_sum(self, finding: Finding) -> bool:
        """Return True where another program may have no such value, and be right."""
        if finding.cause != OWN or finding.faulty is not None:
            return False
        record = finding.record
        by_use = record not in self._step.exact  # the operands may be exchanged
        if by_use or self._is_of_another_formula(finding):
            return True
        if self._is_of_another_part(record):
            return True
        if _is_negated(self._step.candidate[record], self._step.twin(record)):
            return True
        if self._step.measures.can_replay and self._is_put_otherwise(finding):
            return True
        if not self._step.measures.can_replay:
            # equal statistics of what comes after may be those of other values
            row = self._step.candidate[record]
            may_be_right = row.phase == "backward" or self._is_of_another_form(row)
            return may_be_right and finding.read is not None
        other_shape = (
            self._step.candidate[record].shape != self._step.twin(record).shape
        )
        return record in self._step.guessed or other_shape or finding.read is not None

    def _is_put_otherwise(self, finding: Finding) -> bool:
        """Return True for a call with other arguments on other values: on those of the
        other axis the softmax is along it too, and half of a variance is divided by two."""
        return bool(finding.arguments) and finding.inputs > finding.tolerance

    def _is_of_another_form(self, row: RecordedRow) -> bool:
        """Return True for an element of a list beside a call on one tensor: the two forms
        of an optimizer take the same steps in another order."""
        return row.is_on_lists != self._step.twin(row.record).is_on_lists

    def _is_of_another_part(self, record: int) -> bool:
        """Return True for a sum over more or fewer terms than the reference's: the same
        operator, on operands of other shapes."""
        ours = _shapes_read(self._step.reference, self._step.twin(record))
        return ours != _shapes_read(self._step.candidate, self._step.candidate[record])

    def _is_of_another_formula(self, finding: Finding) -> bool:
        """Return True for a call that reads another number of values, some of them new."""
        row = self._step.candidate[finding.record]
        twin = self._step.twin(row.record)
        other_call = (row.overload, len(row.inputs)) != (
            twin.overload,
            len(twin.inputs),
        )
        return bool(finding.region) and other_call

    def agrees_later(self, record: int) -> bool:
        """Return True where every value made of this one soon agrees with its counterpart.

        And no norm shows the difference before.
        """
        tainted = {record}
        agrees_again = False
        if self._is_left(record):
            return False
        met = {record, *self._readers.get(record, ())}
        waiting = sorted(met - {record})
        while waiting:
            reader = heapq.heappop(waiting)
            if reader <= record:
                continue
            further = self._readers.get(reader, ())
            agrees = self._agrees_despite(reader, tainted)
            if self._is_written_in_part(reader):
                tainted.add(reader)  # what it leaves of the memory may differ
            elif agrees:
                further = [r for r in further if self._reads_memory_of(r, reader)]
                agrees_again |= not further
            elif self._is_norm(reader):
                return False
            else:
                tainted.add(reader)
            if reader in tainted and self._is_left(reader):
                return False
            for other in further:
                if other not in met:
                    met.add(other)
                    heapq.heappush(waiting, other)
        return all(
            self._is_read(reader)
            or (agrees_again and reader != record and self._is_left_in_both(reader))
            or self._is_same_number(reader)
            for reader in tainted
        )

    def _is_left(self, record: int) -> bool:
        """Return True for what the step leaves, or the next one reads."""
        return (
            self._is_gradient_left(record)
            or self._is_state_left(record)
            or self._is_read_in_next_step(record)
        )

    def _is_written_in_part(self, record: int) -> bool:
        """Return True for a write to a part of a memory: who reads the memory after it
        reads the rest of it too."""
        row = self._step.candidate[record]
        if not row.inplace or not row.inputs:
            return False
        memory = self._step.before_views(row.inputs[0])
        return memory is not None and memory.numel != row.numel

    def _reads_memory_of(self, record: int, view: int) -> bool:
        """Return True for what is written to a view, or is a view of it."""
        row = self._step.candidate[record]
        written = row.inplace and row.inputs[0] == view
        return bool(written) or row.view_of is not None

    def _is_left_in_both(self, record: int) -> bool:
        """Return True for a value that nothing reads, and the reference has in other
        portions: what packed sequences leave of theirs."""
        row = self._step.candidate[record]
        if row.name or row.phase != "forward" or not self._step.measures.can_replay:
            return False
        if (
            record in self._step.counterpart
            and self._step.twin(record).shape == row.shape
        ):
            return False
        return self._step.measures.stands_in_reference(row)

    def _is_same_number(self, record: int) -> bool:
        """Return True for a number that nothing reads, as a loss, and that the reference has.

        There it is made by another call than its counterpart, which is no number.
        """
        row = self._step.candidate[record]
        if (
            row.numel != 1
            or row.phase != "forward"
            or record not in self._step.counterpart
        ):
            return False
        if self._step.twin(record).numel == 1 or not self._step.measures.can_replay:
            return False
        tolerance = self._step.findings[record].tolerance
        numbers = (r for r in self._step.reference.values() if r.numel == 1)
        errors = (
            self._step.measures.distance(number.record, record).error
            for number in numbers
            if number.phase == "forward" and number.dtype == row.dtype
        )
        return any(error is not None and error <= tolerance for error in errors)

    def _is_gradient_left(self, record: int) -> bool:
        """Return True for what a step leaves in the gradient of a parameter in both runs.

        It is a result, whatever an optimizer makes of it: a step that is divided by the
        gradient's size hides a factor.
        """
        if record not in self._step.counterpart:
            return False
        name = self._step.candidate[record].name or ""
        twin = self._step.twin(record)
        return (
            name.endswith(".grad")
            and (twin.name or "").endswith(".grad")
            and self._last[name] == record
            and self._last_of_reference[twin.name or ""] == twin.record
        )

    def _is_state_left(self, record: int) -> bool:
        """Return True for what an optimizer leaves in its state in both runs.

        The first step of Adam is of one size whatever the moments are, later ones not.
        """
        if record not in self._step.counterpart:
            return False
        ours = (self._step.reference, self._step.twin(record).record)
        theirs = (self._step.candidate, record)
        return all(_is_left_by_optimizer(*side) for side in (ours, theirs))

    def _is_read_in_next_step(self, record: int) -> bool:
        """Return True for what the next step of both runs reads: it may read other parts."""
        if record not in self._step.counterpart:
            return False
        twin = self._step.twin(record)
        return self._read_later().has(twin, self._step.candidate[record])

    def _is_read(self, record: int) -> bool:
        """Return False for what a step leaves, and nothing in it reads.

        What is computed again is there for gradients, which show in themselves; a
        buffer that it writes stays. What is left of one that a run writes through views
        is read, and seen, in the next step.
        """
        row = self._step.candidate[record]
        if record in self._readers or (bool(row.recomputed) and not row.name):
            return True
        return self._name_written_to(row) in self._unseen

    def _name_written_to(self, row: RecordedRow) -> str | None:
        """Return the name of the value that a call writes to, or to a view of it."""
        if row.name or not row.inplace or not row.inputs:
            return row.name
        memory = self._step.before_views(row.inputs[0])
        return None if memory is None else memory.name

    def _is_norm(self, record: int) -> bool:
        """Return True for a norm with a counterpart: the order of a sum is not in it."""
        return (
            record in self._step.exact
            and self._step.candidate[record].base_operator in NORMS
        )

    def _agrees_despite(self, record: int, tainted: set[int]) -> bool:
        """Return True where a row agrees as well as its inputs outside ``tainted`` do."""
        finding = self._step.findings.get(record)
        if finding is None or finding.error is None:
            return False
        if finding.one_function:
            return True
        sound = [
            error
            for source, error in finding.sources
            if source not in tainted and self._step.findings[source].cause is None
        ]
        allowed = max(2 * max(sound, default=0.0), EQUAL_INPUTS * finding.tolerance)
        by_chance = self._left_by_a_sum(finding, tainted)
        is_sure = allowed < by_chance or NEARER * finding.error <= by_chance
        return finding.error <= allowed and is_sure

    def _left_by_a_sum(self, finding: Finding, tainted: set[int]) -> float:
        """Return the error that is left of the tainted inputs' in a value of fewer elements.

        Of n terms with independent errors the sum is off by 1/sqrt(n) of theirs: it may
        agree although they are wrong. Infinite where no terms are summed.
        """
        numel = self._step.candidate[finding.record].numel or 0
        left = [
            error / math.sqrt((self._step.candidate[source].numel or 0) / numel)
            for source, error in finding.sources
            if source in tainted
            and 0 < numel < (self._step.candidate[source].numel or 0)
        ]
        return min(left, default=math.inf)


def _is_left_by_optimizer(rows: Rows, record: int) -> bool:
    """Return True for the last of a step's writes to what an optimizer keeps: memory from
    before the step, or memory that was made to be written to."""
    row = rows[record]
    is_write = row.phase == "optimizer" and bool(row.inplace) and not row.name
    if not is_write or not _is_kept(rows, row):
        return False
    later = (other for other in rows.values() if other.record > record)
    return not any(_writes_over(other, row) for other in later)


def _is_kept(rows: Rows, row: RecordedRow) -> bool:
    while row.is_call and row.inputs and (row.inplace or row.view_of is not None):
        row = rows[row.inputs[0]]
    return row.is_leaf or row.base_operator in CREATED


def _writes_over(later: RecordedRow, row: RecordedRow) -> bool:
    """Return True for a write to what a row wrote, or to the memory that it wrote to."""
    is_write = bool(later.inplace) and bool(later.inputs)
    return is_write and later.inputs[0] in (row.record, row.inputs[0])


def _is_negated(row: RecordedRow, twin: RecordedRow) -> bool:
    """Return True where one value is the other's times -1, as far as statistics tell."""
    if None in (row.min, row.max, row.l2, twin.min, twin.max, twin.l2) or not row.l2:
        return False
    ours = (-(twin.max or 0.0), -(twin.min or 0.0), twin.l2 or 0.0)
    theirs = (row.min or 0.0, row.max or 0.0, row.l2)
    return all(map(_are_close, ours, theirs))


def _are_close(one: float, other: float) -> bool:
    return math.isclose(one, other, rel_tol=1e-5)


def _shapes_read(rows: Rows, row: RecordedRow) -> list[tuple[int, ...]]:
    """Return the shapes of what a row reads, without axes of one element."""
    shapes = [rows[record].shape or () for record in row.inputs if record in rows]
    return [tuple(n for n in shape if n != 1) for shape in shapes]
