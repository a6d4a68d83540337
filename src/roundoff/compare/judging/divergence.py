"""Where two runs part: for every pair of rows, was the error made there or inherited?

A row *diverges* where its distance from the reference is more than rounding explains
(its tolerance). A divergent row whose inputs agree made the error itself; one whose
inputs differ may only hand it on, so the call is run again (where tensors were kept,
see ``replay``) on the inputs it really had. Rows are taken in the order of execution;
each hands the site at fault on to those that read it.

A call that reads something else than its counterpart does (an operator that was left
out, a stale buffer) is found by its inputs: they agree with *their* counterparts, and
not with what the reference reads in this place.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Protocol

from roundoff.compare.records.call_stacks import places_by_callers
from roundoff.compare.records.kept_results import is_kept_for_gradient
from roundoff.compare.records.recorded_calls import is_written_in_python
from roundoff.compare.records.recorded_rows import RecordedRow, Rows
from roundoff.compare.records.replay import CallReplay
from roundoff.compare.records.saved_values import SavedValues
from roundoff.compare.rounding.findings import INHERITED, OWN, Bound, Distance, Finding
from roundoff.compare.rounding.rounding_bound import REGION, unit
from roundoff.ops import operators_that
from roundoff.record import PARTLY_WRITTEN

#: Growth of an error through an operator above which it is run again.
GAIN_REPLAYED = 1.25
#: The same from statistics alone, where a difference of two near values looks like
#: nothing else: above it the error is taken for the operator's own.
GAIN = 32.0
#: From statistics alone, an error up to this many times what the inputs bring at the
#: worst has come in; between the two nobody can say.
GAIN_EXPLAINED = 2.0
#: Of operators with equal inputs only their own rounding is left: this part of the
#: tolerance.
EQUAL_INPUTS = 0.25
#: A value that is this far off tells nothing any more about what is computed from it:
#: three times what a region may be off (``REGION_LIMIT``).
NOISE = 0.3
#: An error up to this many times that of an earlier step is carried over from it: an
#: update adds the error of a gradient to that of the value, and a moment that of two.
CARRIED = 4.0
#: A value that is this many times nearer to its own counterpart than to what the
#: reference reads is the wrong value, not a wrong one.
NEARER = 8.0
#: Of a memory that was written in parts, so many are looked at.
MOST_PARTS = 256
#: Operators whose result holds the values of their inputs: they add no error of size.
EXACT = operators_that("add no error")
#: These give all elements of their input, in their order.
HANDS_ON = operators_that("hand on in order")
#: Their further results may be a workspace of bytes.
WORKSPACE = operators_that("return a workspace")
#: Memory that nothing was written to yet.
UNWRITTEN = operators_that("leave memory unwritten")
#: Their further results have elements that nothing was written to.
UNWRITTEN_IN_PART = operators_that("leave a further result unwritten in part")


class StepMeasures(Protocol):
    """What a divergence asks about one step of two runs, by record or row.

    Reference first, candidate second.
    """

    @property
    def can_replay(self) -> bool:
        """True where tensors were kept, so that calls can be run again."""

    @property
    def hidden_error(self) -> float:
        """The error that a value may have although its statistics are equal."""

    def distance(self, reference: int, candidate: int) -> Distance:
        """Return how far two values are apart."""

    def distance_within(self, one: int, other: int) -> Distance:
        """Return how far two of the candidate's own values are apart."""

    def bound(self, twin: RecordedRow, row: RecordedRow) -> Bound:
        """Return the error that rounding explains."""

    def operands(
        self, twin: RecordedRow, row: RecordedRow
    ) -> Sequence[tuple[int, int]]:
        """Return the records that two aligned rows read in the same places."""

    def changed_arguments(self, twin: RecordedRow, row: RecordedRow) -> tuple[str, ...]:
        """Return the arguments that differ between two calls, a text each."""

    def replay(
        self, twin: RecordedRow, row: RecordedRow, *, same_inputs: bool
    ) -> CallReplay:
        """Run a call again on the inputs it had."""

    def run_as_it_was(self, row: RecordedRow) -> CallReplay:
        """Run a call again on the inputs and in the formats it had."""

    def stands_in_reference(self, row: RecordedRow) -> bool:
        """Return True where a value of the reference holds all that the row has."""

    def is_noise(self, twin: RecordedRow) -> bool:
        """Return True for what an earlier step left that was rounding alone there."""

    def carried(self, row: RecordedRow) -> tuple[float, bool]:
        """Return the error of a value from before this step, and whether it is a fault."""

    def is_another_formula(
        self,
        twin: RecordedRow,
        row: RecordedRow,
        error: float,
        shared: Mapping[int, int],
    ) -> bool | None:
        """Return True where two programs compute one function, and rounding is left.

        False where they do not; None without tensors, where only the size of the error
        speaks for it. ``shared`` are the candidate's records of the reference's that
        both have.
        """


@dataclass(slots=True)
class Divergence:
    """One step of both runs, and what is found of its rows.

    Attributes:
        reference: rows by record.
        candidate: rows by record.
        counterpart: the reference record of a candidate record.
        exact: candidate records of calls that were aligned by name or structure.
        measures: distances, bounds and replays of this step.
        guessed: those of ``exact`` whose counterpart is in another module or place.
        findings: by candidate record, in the order of execution.
    """

    reference: Rows
    candidate: Rows
    counterpart: Mapping[int, int]
    exact: frozenset[int]
    measures: StepMeasures
    guessed: frozenset[int] = frozenset()
    findings: dict[int, Finding] = field(default_factory=dict)
    #: By candidate record, what the call made when it was run again as it was.
    _alone: dict[int, CallReplay] = field(default_factory=dict)
    #: What stands in the step before it is read from outside, of both sides.
    _saved: tuple[SavedValues, SavedValues] = field(init=False)
    #: Where calls stand among those of their callers, on both sides, once somebody asks.
    _places: list[dict[int, int]] = field(init=False, default_factory=list)

    def __post_init__(self) -> None:
        self._saved = SavedValues(self.reference), SavedValues(self.candidate)

    def run(self) -> dict[int, Finding]:
        """Judge every row that has a counterpart, in the order of execution."""
        for record in sorted(self.counterpart):
            self.findings[record] = self._finding(record)
        return self.findings

    def twin(self, record: int) -> RecordedRow:
        """Return the reference's row of a candidate record."""
        return self.reference[self.counterpart[record]]

    # -- one row -----------------------------------------------------------------

    def _finding(self, record: int) -> Finding:
        row = self.candidate[record]
        twin = self.twin(record)
        distance = self.measures.distance(twin.record, record)
        bound = self.measures.bound(twin, row)
        tolerance = bound.tolerance
        if not (self.measures.can_replay and row.is_call):
            tolerance *= bound.condition
        finding = Finding(record, distance.error, tolerance=tolerance, gain=bound.gain)
        if distance.error is None:
            return finding
        says_nothing = is_without_value(row, twin) or is_workspace(row)
        if distance.equal or says_nothing or self.measures.is_noise(twin):
            finding.own_error = 0.0
            return finding
        wrong_input = self._look_at_inputs(finding, row, twin)
        if is_kept_for_gradient(row, self.candidate):
            # of which call a result is kept follows from what was detached before
            finding.own_error = 0.0
            self._inherit(finding)
            return finding
        self._decide(finding, row, twin, distance.error, wrong_input)
        if self.measures.can_replay:
            self._check_alone(finding, row)
        self._clear_another_formula(finding, row, twin, distance.error)
        if finding.cause is None:
            self._inherit(finding)
        if finding.cause is None and not self._can_be_judged(row):
            finding.undecided = self._is_undecided(finding, distance.error)
        return finding

    def _is_undecided(self, finding: Finding, error: float) -> bool:
        """Return True where neither rounding nor the inputs are sure to explain an error."""
        return finding.one_function or not self._explains(finding, error)

    def _clear_another_formula(
        self, finding: Finding, row: RecordedRow, twin: RecordedRow, error: float
    ) -> None:
        """Take the blame from a value that both programs agree on, but for rounding."""
        if finding.cause != OWN or finding.faulty is not None or not row.is_call:
            return
        if not finding.region and row.record in self.exact and not self._parted(row):
            return
        shared = self._agreeing()
        agree = self.measures.is_another_formula(twin, row, error, shared)
        if agree is not False:
            finding.cause = None
            finding.origin = None
            finding.one_function = True

    def _agreeing(self) -> dict[int, int]:
        """Return the candidate's records of values that both have so far, by the reference's."""
        return {
            self.counterpart[record]: record
            for record, earlier in self.findings.items()
            if earlier.cause is None and earlier.error is not None
        }

    def _parted(self, row: RecordedRow) -> bool:
        """Return True where a value that the row reads has parted from its counterpart."""
        read = (self.findings.get(record) for record in row.inputs)
        return any(each is not None and each.cause is not None for each in read)

    def _can_be_judged(self, row: RecordedRow) -> bool:
        """Return True where tensors were kept, and the call is none of the user's kernels."""
        if not self.measures.can_replay:
            return False
        return row.overload is None or not is_written_in_python(row.overload)

    def _explains(self, finding: Finding, error: float) -> bool:
        """Return True where rounding, here or before, explains what statistics show."""
        return error <= finding.tolerance or not self._exceeds(
            finding, error, GAIN_EXPLAINED
        )

    def _decide(
        self,
        finding: Finding,
        row: RecordedRow,
        twin: RecordedRow,
        error: float,
        wrong_input: tuple[int, int] | None,
    ) -> None:
        """Say whether the row made its error itself."""
        finding.own_error = _part_made_here(error, finding.inputs)
        if row.record in self.exact and row.is_call:
            finding.arguments = self.measures.changed_arguments(twin, row)
        if _is_from_before(row):
            finding.inputs, finding.carried = self.measures.carried(row)
            self._ask_what_was_saved(finding, row, twin)
            finding.own_error = _part_made_here(error, finding.inputs)
        if finding.carried and error <= CARRIED * finding.inputs:
            finding.cause = INHERITED if error > finding.tolerance else None
        elif wrong_input is not None and error > finding.tolerance:
            self._blame_input(finding, wrong_input)
        elif self._is_suspect(finding, row, error):
            self._judge(finding, row, twin, error)

    def _ask_what_was_saved(
        self, finding: Finding, row: RecordedRow, twin: RecordedRow
    ) -> None:
        """Note how far the values were off that both runs saved, and read here again."""
        ours, theirs = self._saved
        saved = theirs.saved(row)
        expected = ours.saved(twin)
        if saved is None or expected is None:
            return
        blamed = self._blamed_for(expected, saved)
        if blamed is not None:
            finding.inputs = finding.error or 0.0
            finding.carried, finding.origin = True, blamed
            return
        earlier = self.findings.get(saved)
        if earlier is None and (finding.error or 0.0) <= REGION * unit(row.dtype):
            # computed in other operators: what it holds is what their roundings leave
            finding.inputs = finding.error or 0.0
        if earlier is None or earlier.error is None:
            return
        if earlier.cause is None and earlier.error > earlier.tolerance:
            return  # it shows the bytes of a storage, which nobody judges
        finding.inputs = earlier.error
        finding.carried = earlier.cause is not None
        if finding.carried:
            finding.origin = saved if earlier.origin is None else earlier.origin

    def _blamed_for(self, expected: int, saved: int) -> int | None:
        """Return what is blamed already for a value that is not the one that was meant."""
        if self.counterpart.get(saved) in (None, expected):
            return None
        return next(
            (
                record
                for record, finding in self.findings.items()
                if finding.cause == OWN and finding.read == (expected, saved)
            ),
            None,
        )

    # -- what the row reads ------------------------------------------------------

    def _look_at_inputs(
        self, finding: Finding, row: RecordedRow, twin: RecordedRow
    ) -> tuple[int, int] | None:
        """Note how far the inputs are off; return a pair that should be one value."""
        read, finding.region = self._values_read(row, twin)
        finding.unknown |= any(self._is_unseen_gradient(r, row) for r in finding.region)
        wrong_input = None
        for ours, theirs in read:
            distance = self.measures.distance(ours, theirs)
            if is_without_value(self.candidate[theirs], self.reference[ours]):
                continue  # what is written over, or to be
            if distance.error is None or distance.equal or distance.masked:
                finding.unknown |= not distance.equal
            elif self._is_wrong_input(
                ours, theirs, distance.error, finding.tolerance
            ) and not self._is_read_alike(row, twin, ours, theirs):
                wrong_input = wrong_input or (ours, theirs)
            else:
                finding.inputs = max(finding.inputs, distance.error)
                if theirs in self.findings:
                    finding.sources.append((theirs, distance.error))
        if row.inputs and not finding.inputs and not finding.unknown:
            finding.tolerance *= EQUAL_INPUTS
        return wrong_input

    def _is_unseen_gradient(self, record: int, reader: RecordedRow) -> bool:
        """Return True for a gradient of a compiled backward pass, whose calls nobody sees.

        What ``reader`` adds to in place was there before the pass.
        """
        row = self.candidate[record]
        is_added_to = reader.inplace and reader.inputs[:1] == [record]
        return row.phase == "backward" and row.is_leaf and not is_added_to

    def _values_read(
        self, row: RecordedRow, twin: RecordedRow
    ) -> tuple[list[tuple[int, int]], list[int]]:
        """Return the values behind a row, each with what the reference has for it.

        Rows without counterpart in between are looked through; they are the second
        of the result.
        """
        operands = self.measures.operands(twin, row) if self._is_alike(row) else ()
        read = [pair for pair in operands if pair[1] in self.counterpart]
        waiting = [theirs for _, theirs in operands if theirs not in self.counterpart]
        if not operands and self._is_seen_again(row, twin):
            read = [(twin.inputs[0], row.inputs[0])]
        elif not operands:
            waiting = row.values_read() if row.is_call else self._written_parts(row)
        region: set[int] = set()
        visited: set[int] = set()
        while waiting:
            record = waiting.pop()
            if record in visited or record not in self.candidate:
                continue
            visited.add(record)
            if record in self.counterpart:
                read.append((self.counterpart[record], record))
            else:
                region.add(record)
                waiting += self.candidate[record].inputs
        return read, sorted(region)

    def _is_alike(self, row: RecordedRow) -> bool:
        """Return True for a call that reads in each place what its counterpart reads there."""
        if not row.is_call:
            return False
        twin = self.twin(row.record)
        is_same = row.overload == twin.overload and len(row.inputs) == len(twin.inputs)
        return row.record in self.exact or (row.base_operator in EXACT and is_same)

    def _is_seen_again(self, row: RecordedRow, twin: RecordedRow) -> bool:
        """Return True for a value that is seen whole through its memory, on both sides."""
        if row.is_call or twin.is_call or len(row.inputs) != 1 or len(twin.inputs) != 1:
            return False
        source = self.candidate.get(row.inputs[0])
        wanted = self.reference.get(twin.inputs[0])
        if source is None or wanted is None or source.record not in self.counterpart:
            return False
        sizes = {source.numel, wanted.numel, row.numel, twin.numel}
        return len(sizes) == 1 and not source.inplace and not wanted.inplace

    def _written_parts(self, row: RecordedRow) -> list[int]:
        """Return the records that were written, part by part, to the memory of a value.

        A view of memory that calls have written in parts holds the values of them all.
        """
        parts: list[int] = []
        waiting = list(row.inputs)
        while waiting and len(parts) < MOST_PARTS:
            record = waiting.pop()
            parts.append(record)
            write = self.candidate.get(record)
            if write is None or not write.inplace or not write.inputs:
                continue
            before = self.before_views(write.inputs[0])
            if before is None:
                continue
            is_part = not before.is_call and before.inputs
            waiting += before.inputs[:1] if is_part else [before.record]
        return parts

    def before_views(self, record: int) -> RecordedRow | None:
        """Return the candidate's row that a record is a view of, behind all views."""
        row = self.candidate.get(record)
        while row is not None and row.is_call and row.view_of is not None:
            if not row.inputs or row.inplace:
                break
            row = self.candidate.get(row.inputs[0])
        return row

    def _is_wrong_input(
        self, ours: int, theirs: int, error: float, tolerance: float
    ) -> bool:
        """Return True for a value that is right in itself, and not the one to read here."""
        proper = self.counterpart.get(theirs)
        if proper is None or proper == ours or error <= tolerance:
            return False
        itself = self.measures.distance(proper, theirs)
        if itself.error is None:
            return False
        return itself.equal or itself.error * NEARER < error

    def _is_read_alike(
        self, row: RecordedRow, twin: RecordedRow, ours: int, theirs: int
    ) -> bool:
        """Return True where both programs read what the same line made as many calls before.

        They do the same then, in turns of a loop that are not each other's counterparts: of
        two vectors one product stands in two turns.
        """
        wanted, read = self.reference[ours], self.candidate[theirs]
        if not all(each.is_call for each in (row, twin, wanted, read)):
            return False
        are_beside = row.callers == read.callers and twin.callers == wanted.callers
        line, other = ((each.line, each.base_operator) for each in (wanted, read))
        if not are_beside or line != other:
            return False
        if not self._places:
            sides = (self.reference, self.candidate)
            self._places = [places_by_callers(side) for side in sides]
        before, now = self._places
        return before[twin.record] - before[ours] == now[row.record] - now[theirs]

    def _blame_input(self, finding: Finding, wrong_input: tuple[int, int]) -> None:
        """Something else is read: an operator was left out, or another tensor taken."""
        _make_own(finding, finding.error)
        finding.read = wrong_input
        expected = wrong_input[0]
        finding.missing = self._left_out(expected)

    def _left_out(self, expected: int) -> int | None:
        """Return the reference's call without counterpart that made an expected value.

        Of memory that was written in part, the last write.
        """
        paired = set(self.counterpart.values())
        record = expected
        while record in self.reference and record not in paired:
            row = self.reference[record]
            if row.is_call and row.base_operator not in EXACT:
                return record
            if not row.inputs:
                break
            record = row.inputs[0]
        if expected in paired:
            return None
        whole = self.reference[expected]
        is_written = not whole.is_call and whole.inputs
        return whole.inputs[0] if is_written else expected

    # -- judging -----------------------------------------------------------------

    def _is_suspect(self, finding: Finding, row: RecordedRow, error: float) -> bool:
        """Return True where an error may have been made here, so that it has to be judged."""
        can_replay = self.measures.can_replay
        if finding.arguments:
            return True
        if error <= finding.tolerance / (4 if can_replay else 1):
            return False
        if row.record not in self.exact and row.is_call:
            return True
        is_moved = row.base_operator in EXACT and not _is_from_before(row)
        if is_moved and math.isfinite(error):
            return self._inputs_agree(finding)
        if math.isinf(error):
            return not math.isinf(finding.inputs)
        if can_replay:
            return error > GAIN_REPLAYED * finding.inputs + finding.tolerance / 4
        return self._inputs_agree(finding) or self._exceeds_inputs(finding, error)

    def _inputs_agree(self, finding: Finding) -> bool:
        """Return True where the inputs agree: by statistics exactly, for noise agrees nearly."""
        allowed = finding.tolerance / 8 if self.measures.can_replay else 0.0
        return not finding.unknown and finding.inputs <= allowed

    def _exceeds_inputs(self, finding: Finding, error: float) -> bool:
        """Return True for an error larger than the inputs bring; unknown for inputs of noise."""
        return finding.inputs < NOISE and self._exceeds(finding, error, GAIN)

    def _exceeds(self, finding: Finding, error: float, gain: float) -> bool:
        """Return True for an error larger than what the inputs bring, so many times."""
        inputs = finding.inputs
        if not self.measures.can_replay:
            inputs = max(inputs, self.measures.hidden_error)
        return error > gain * finding.gain * inputs + finding.tolerance

    def _judge(
        self, finding: Finding, row: RecordedRow, twin: RecordedRow, error: float
    ) -> None:
        """Run the call again where possible; else decide by the inputs."""
        if self.measures.can_replay and row.is_call:
            same_inputs = not finding.inputs and not finding.unknown
            # of another overload: a number has more digits than a tensor in its place
            same_inputs &= row.overload == twin.overload
            replay = self.measures.replay(twin, row, same_inputs=same_inputs)
            finding.replayed = replay
            if replay.reason is None:
                if _is_compensated(finding, replay, error):
                    return
                if _is_of_other_inputs(finding, replay, error):
                    return
                if replay.at_fault:
                    _make_own(finding, replay.own)
                    return
                finding.own_error = replay.own
                if _is_cleared(replay, finding):
                    return
            else:
                finding.tolerance *= self.measures.bound(twin, row).condition
        elif self._is_another_call(finding, row, twin):
            _make_own(finding, finding.own_error or error)
            return
        if error > finding.tolerance and self._stands_out(finding, row, twin, error):
            _make_own(finding, error)

    def _is_another_call(
        self, finding: Finding, row: RecordedRow, twin: RecordedRow
    ) -> bool:
        """Return True where constants of one operator differ, which nothing can run again.

        Those of an operator that moves values say where they go, and show in them.
        """
        if not finding.arguments or row.overload != twin.overload:
            return False
        if (finding.error or 0.0) <= finding.tolerance:
            # other inputs, which the constants make up for
            is_made_up_for = finding.inputs > NEARER * finding.tolerance
            return not is_made_up_for and row.base_operator not in EXACT
        return row.base_operator not in EXACT

    def _check_alone(self, finding: Finding, row: RecordedRow) -> None:
        """Run the call, and those without counterpart before it, on their own inputs.

        An error that looks inherited may hide one that was made here.
        """
        for record in (*finding.region, row.record):
            replay = self._run_as_it_was(record)
            if replay is None or replay.reason is not None:
                continue
            if replay.at_fault:
                finding.faulty = record
                if finding.cause != OWN:
                    finding.replayed = replay
                    _make_own(finding, replay.own)
                return
            if finding.cause != OWN and finding.replayed is None:
                finding.own_error = replay.own or finding.own_error

    def _run_as_it_was(self, record: int) -> CallReplay | None:
        """Return what a candidate's call makes of its inputs; None for what is no call."""
        row = self.candidate[record]
        is_judged = row.is_call and row.view_of is None and not is_workspace(row)
        if not is_judged or row.base_operator in UNWRITTEN:
            return None
        if record not in self._alone:
            self._alone[record] = self.measures.run_as_it_was(row)
        return self._alone[record]

    def _stands_out(
        self, finding: Finding, row: RecordedRow, twin: RecordedRow, error: float
    ) -> bool:
        """Return True where an error cannot have come in with the inputs."""
        if _is_from_before(row):
            alone = error > CARRIED * finding.inputs + finding.tolerance
        else:
            agree = self._inputs_agree(finding)
            alone = agree and not _is_amplified(finding, error)
        return (
            alone
            or self._exceeds_inputs(finding, error)
            or self._is_inserted(finding, row, twin)
        )

    def _is_inserted(
        self, finding: Finding, row: RecordedRow, twin: RecordedRow
    ) -> bool:
        """Return True for an operator that the reference lacks, which changes a value.

        The reference hands the value on as it is.
        """
        if row.record in self.exact or not row.is_call:
            return False
        made_of = self._maker(twin.record)
        for source, _ in finding.sources:
            if self._maker(self.counterpart[source]) != made_of:
                continue
            moved = self.measures.distance_within(source, row.record).error
            if moved is not None and moved > EQUAL_INPUTS * finding.tolerance:
                return True
        return False

    def _maker(self, record: int) -> int:
        """Return the reference record whose values a record holds, behind views and casts."""
        row = self.reference[record]
        while row.base_operator in HANDS_ON and len(row.inputs) == 1:
            source = self.reference.get(row.inputs[0])
            if source is None:
                break
            row = source
        return row.record

    def _inherit(self, finding: Finding) -> None:
        """Take over the fault that the largest divergent input comes from."""
        divergent = [
            (error, self.findings[record].origin)
            for record, error in finding.sources
            if self.findings[record].cause is not None
        ]
        beyond = finding.error is not None and finding.error > finding.tolerance
        if divergent and beyond:
            finding.cause = INHERITED
            finding.origin = max(divergent, key=lambda source: source[0])[1]


def is_workspace(row: RecordedRow) -> bool:
    """Return True for bytes: a kernel's for its backward kernel, or those of a storage.

    A storage that is copied or loaded is set as bytes first, whatever numbers they are:
    of numbers that differ by rounding they differ wholly.
    """
    if row.dtype != "uint8":
        return False
    further_result = (row.place or 0) > 0
    return (further_result and row.operator in WORKSPACE) or row.base_operator == "set"


def _is_from_before(row: RecordedRow) -> bool:
    """Return True for a value that no call of the step is seen to make: a leaf, a storage
    that was saved or copied whole, or a gradient that the step before has left."""
    is_left_gradient = row.base_operator == "gradient" and not row.inputs
    return row.is_leaf or row.base_operator == "set" or is_left_gradient


def is_partly_written(row: RecordedRow, twin: RecordedRow) -> bool:
    """Return True where nothing was written to some of the elements.

    That is so for views of new memory, and for what a kernel leaves for its backward
    kernel beyond the lengths of the samples.
    """
    if row.reason == twin.reason == PARTLY_WRITTEN:
        return True
    further_result = (row.place or 0) > 0 and row.place == twin.place
    return further_result and row.operator == twin.operator in UNWRITTEN_IN_PART


def is_without_value(row: RecordedRow, twin: RecordedRow) -> bool:
    """Return True for new memory, or a view of it, that nothing was written to in full."""
    return row.base_operator in UNWRITTEN or is_partly_written(row, twin)


def _make_own(finding: Finding, own_error: float | None) -> None:
    finding.cause = OWN
    finding.own_error = own_error
    finding.origin = finding.record


def _is_compensated(finding: Finding, replay: CallReplay, error: float) -> bool:
    """Return True where other inputs make up for other arguments.

    The result agrees with the reference's, and with its arguments it would be further
    from it than it is.
    """
    if not replay.another_program or error > finding.tolerance:
        return False
    excesses = (replay.excess, replay.reference_excess, replay.region_excess)
    if any(excess is not None and excess > 1.0 for excess in excesses):
        return False
    return (replay.semantic or 0.0) > NEARER * error


def _is_of_other_inputs(finding: Finding, replay: CallReplay, error: float) -> bool:
    """Return True where the reference's calls give something else, and what is there agrees.

    Then the values that they were run on, which differ wholly, are no counterparts of what
    the reference reads.
    """
    is_region = replay.region_excess is not None and replay.excess is None
    is_near = NEARER * error < (replay.kernel or 0.0)
    return is_region and is_near and finding.inputs >= NOISE


def _is_cleared(replay: CallReplay, finding: Finding) -> bool:
    """Return True where the same call gives the same: the difference came in with the inputs."""
    if replay.region_excess is not None:
        return True
    return replay.semantic is not None and not finding.region


def _is_amplified(finding: Finding, error: float) -> bool:
    """Return True where a sum that cancels makes an error of what its inputs bring.

    The call is right, run again on what it read: a moment that nearly vanishes has the
    error of a gradient many times its size.
    """
    replay = finding.replayed
    if replay is None or replay.reason is not None:
        return False
    return error <= finding.gain * finding.inputs + finding.tolerance


def _part_made_here(error: float, inputs: float) -> float:
    """Return the part of an error that cannot have come in: sqrt(error² - inputs²).

    Errors are taken to add like independent ones.
    """
    if math.isinf(error):
        return 0.0 if math.isinf(inputs) else math.inf
    if math.isinf(inputs):
        return 0.0
    return math.sqrt(max(0.0, error * error - inputs * inputs))
