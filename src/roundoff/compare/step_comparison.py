"""One step of one rank of both runs: aligned, measured and explained, row by row."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, fields, replace
from functools import cached_property
from typing import Any

from roundoff.compare.judging.divergence import Divergence, is_partly_written
from roundoff.compare.judging.explain import (
    EarlierSteps,
    RecordedStep,
    Sides,
    explain,
    explain_unwritten,
)
from roundoff.compare.judging.extra_draws import ExtraDraws
from roundoff.compare.judging.gradient_scale import rescaling
from roundoff.compare.judging.later_values import NORMS, clear_what_agrees_later
from roundoff.compare.judging.read_later import ReadLater
from roundoff.compare.judging.table import ComparedRow, names_of_both
from roundoff.compare.loop.step_results import clear_another_way
from roundoff.compare.pairing.alignment import (
    EQUIVALENT,
    MATCHED,
    REFERENCE_ONLY,
    Pair,
    align,
)
from roundoff.compare.portions.location import locate
from roundoff.compare.ports.port_comparison import by_different_hands, compare_port
from roundoff.compare.records.call_arguments import argument_differences
from roundoff.compare.records.data_portions import DataPortions
from roundoff.compare.records.recorded_calls import (
    RecentResults,
    ReferenceCalls,
    RunRegion,
)
from roundoff.compare.records.recorded_rows import (
    RecordedRow,
    Rows,
    first_rows,
    last_named,
    maker,
    shape_read_first,
)
from roundoff.compare.records.replay import (
    CallReplay,
    ReferenceSide,
    WorkingFormat,
    replay_call,
)
from roundoff.compare.rounding.distance import Distances, of_statistics
from roundoff.compare.rounding.findings import (
    OWN,
    Bound,
    Distance,
    Finding,
    contributions,
)
from roundoff.compare.rounding.rounding_bound import (
    REGION,
    REGION_LIMIT,
    SUMS,
    amplification,
    condition,
    format_of,
    smallest,
    terms,
    tolerance,
    unit,
    working_formats,
)
from roundoff.compare.rounding.same_kernel import run_as_it_was
from roundoff.compare.rounding.two_formulas import (
    Calls,
    explained_by_a_region,
    is_one_function,
    largest_condition,
)
from roundoff.compare.tensors.metrics import Metrics
from roundoff.ops import facts, operators_that

#: Why new memory is not measured.
UNWRITTEN = "memory that nothing was written to yet"
#: Their two operands may be exchanged.
COMMUTATIVE = frozenset(("add", "mul"))
#: A tolerance is at least this many times the noise floor: of few repeats the largest
#: difference may be one standard deviation, three hold 99.7 % of others.
ABOVE_NOISE = 3.0
#: Values of the reference in which one of the candidate's is looked for, at most.
MOST_HOLDERS = 256

#: The metrics that are columns of the same name; ``equal`` is ``share_equal`` there.
_METRICS = tuple(
    field.name
    for field in fields(Metrics)
    if field.name not in ("equal", "numel", "reason")
)

#: Of a value that is made in another way, where all that is made of it agrees again.
_MADE_OTHERWISE = {
    "status": EQUIVALENT,
    "error": None,
    "equal": None,
    "reason": "made in another way; what is made of it agrees",
}


@dataclass(frozen=True, slots=True)
class NoiseFloors:
    """How far honest runs of each side lie apart, relative, by record."""

    reference: Mapping[int, float]
    candidate: Mapping[int, float]


def compare_step(
    sides: Sides,
    memory: EarlierSteps,
    *,
    modules: Mapping[str, str],
    floors: NoiseFloors | None = None,
    portions: DataPortions | None = None,
    read_later: Callable[[], ReadLater] = lambda: ReadLater.of(None),
) -> list[ComparedRow]:
    """Return the rows of the table for one step; ``memory`` is changed.

    Those of the candidate come first, in its order of execution.

    Args:
        sides: the step.
        memory: what the steps before left.
        modules: module of the reference -> its name in the candidate.
        floors: of records that do not repeat themselves.
        portions: of the data, where the candidate works on others.
        read_later: gives what the next step reads.
    """
    reference = sides.reference.rows
    candidate = sides.candidate.rows
    if by_different_hands(reference, candidate, modules):
        return compare_port(sides, memory)
    pairs = align(reference, candidate, modules)
    measures = _Measures(
        sides,
        pairs,
        memory,
        floors or NoiseFloors({}, {}),
        portions=portions,
    )
    divergence = Divergence(
        reference,
        candidate,
        measures.counterpart,
        measures.exact,
        measures,
        guessed=_guessed(pairs),
    )
    findings = divergence.run()
    clear_what_agrees_later(divergence, read_later)
    clear_another_way(divergence, read_later)
    read = {record: candidate[record].values_read() for record in findings}
    shares = contributions(findings, read)
    extra_draws = ExtraDraws(reference, candidate)
    rows = []
    for pair in pairs:
        finding = findings.get(pair.candidate) if pair.candidate is not None else None
        columns = _measured_columns(sides, pair, measures.distances)
        if finding is not None:
            columns["contribution"] = shares[finding.record]
            if columns["reason"] != UNWRITTEN:
                columns |= _finding_columns(finding)
            if finding.error is None and columns.get("error") is not None:
                columns |= _MADE_OTHERWISE
            columns |= _explanation_columns(
                sides, divergence, finding, memory, extra_draws
            )
        rows.append(ComparedRow(**columns))
    memory.remember(divergence)
    _remember_unwritten(memory, reference, pairs)
    return rows


def _guessed(pairs: Sequence[Pair]) -> frozenset[int]:
    """Return the candidate's calls that were paired by what they do, not where."""
    return frozenset(
        pair.candidate
        for pair in pairs
        if pair.status == MATCHED and pair.reason is not None
        if pair.candidate is not None
    )


class _Measures:
    """Distances, bounds and replays of one step: see ``divergence.StepMeasures``."""

    def __init__(
        self,
        sides: Sides,
        pairs: Sequence[Pair],
        memory: EarlierSteps,
        floors: NoiseFloors,
        *,
        portions: DataPortions | None,
    ) -> None:
        self._reference = sides.reference.rows
        self._candidate = sides.candidate.rows
        self._memory = memory
        self._floors = floors
        self.distances = Distances(
            self._reference,
            self._candidate,
            sides.reference.tensors,
            sides.candidate.tensors,
            (sides.reference.scales, sides.candidate.scales),
            portions=portions,
        )
        self._scales = sides.candidate.scales
        self._rescaling = rescaling(sides.candidate)
        self._rescaled = rescaling(sides.reference)
        self.counterpart = {
            pair.candidate: pair.reference
            for pair in pairs
            if pair.candidate is not None and pair.reference is not None
        }
        self.exact = frozenset(
            pair.candidate
            for pair in pairs
            if pair.candidate is not None and pair.status == MATCHED
        )
        self._first = first_rows(self._candidate)
        self._first_of_reference = first_rows(self._reference)
        ours = working_formats(self._reference.values())
        theirs = working_formats(self._candidate.values())
        self._adopted = theirs - ours
        self._hidden_error = 2 * max((unit(d) for d in ours | theirs), default=0.0)
        self._reference_tensors = _whole(sides.reference)
        self._candidate_tensors = _whole(sides.candidate)
        self._results = RecentResults()

    @property
    def can_replay(self) -> bool:
        return self._candidate_tensors.tensors is not None

    @property
    def hidden_error(self) -> float:
        return self._hidden_error

    def distance(self, reference: int, candidate: int) -> Distance:
        return self.distances(reference, candidate)

    def distance_within(self, one: int, other: int) -> Distance:
        row = self._candidate[other]
        reshaped = replace(self._candidate[one], shape=row.shape)
        return of_statistics(reshaped, row)

    def bound(self, twin: RecordedRow, row: RecordedRow) -> Bound:
        inputs = _inputs(self._candidate, row)
        explained = tolerance(twin, row, self._adopted, inputs)
        floor = max(
            self._floors.reference.get(twin.record, 0.0),
            self._floors.candidate.get(row.record, 0.0),
        )
        made_by = maker(self._reference, twin)
        made_of = _inputs(self._reference, made_by)
        conditioned = condition(made_by, made_of)
        gain = max(conditioned, amplification(made_by, made_of))
        return Bound(max(explained, ABOVE_NOISE * floor), conditioned, gain)

    def operands(self, twin: RecordedRow, row: RecordedRow) -> list[tuple[int, int]]:
        """Not the memory that is overwritten; operands of a sum may be exchanged."""
        ours = twin.values_read()
        theirs = row.values_read()
        if len(ours) != len(theirs):
            return []
        if len(ours) == 2 and row.base_operator in COMMUTATIVE:
            straight = self._counterparts(ours, theirs)
            if self._counterparts(ours[::-1], theirs) > straight:
                ours = ours[::-1]
        return list(zip(ours, theirs, strict=True))

    def _counterparts(self, ours: Sequence[int], theirs: Sequence[int]) -> int:
        pairs = zip(ours, theirs, strict=True)
        return sum(self.counterpart.get(b) == a for a, b in pairs)

    def changed_arguments(self, twin: RecordedRow, row: RecordedRow) -> tuple[str, ...]:
        ours = self._first_of_reference.get(twin.call)
        theirs = self._first.get(row.call)
        if ours is None or theirs is None:
            return ()
        read = (
            shape_read_first(self._reference, ours),
            shape_read_first(self._candidate, theirs),
        )
        return argument_differences(ours, theirs, read)

    def stands_in_reference(self, row: RecordedRow) -> bool:
        piece = self._candidate_tensors.tensor(row.record)
        if piece is None:
            return False
        likeliest_first = sorted(
            (twin for twin in self._reference.values() if _may_hold(twin, row)),
            key=lambda twin: (
                twin.module != row.module,
                twin.shape != row.shape,
                -twin.record,
            ),
        )
        rounding = min(REGION * unit(row.dtype), REGION_LIMIT)
        for twin in likeliest_first[:MOST_HOLDERS]:
            whole = self._reference_tensors.tensor(twin.record)
            location = None if whole is None else locate(whole, piece, rounding)
            if location is not None and location.complete:
                return True
        return False

    def is_noise(self, twin: RecordedRow) -> bool:
        return self._memory.is_noise(twin)

    def carried(self, row: RecordedRow) -> tuple[float, bool]:
        return self._memory.carried(row)

    def replay(
        self, twin: RecordedRow, row: RecordedRow, *, same_inputs: bool
    ) -> CallReplay:
        tensors = self._candidate_tensors.tensors
        if tensors is None:
            return CallReplay(reason="no tensors were kept")
        if row.record in self._rescaling:
            return CallReplay(reason="it multiplies by the scale of the loss")
        if self._hides_a_scale(row):
            return CallReplay(reason="it reads gradients times the scale of the loss")
        aligned = row.record in self.exact and twin.is_call
        result = None
        if same_inputs and twin.shape == row.shape:
            result = self._reference_tensors.tensor(twin.record)
            if result is not None and row.record in self._scales:
                result = result * self._scales[row.record]
        reference = ReferenceSide(
            first=self._first_of_reference.get(twin.call, twin) if aligned else None,
            result=result,
            region=self._region(twin, row),
            fits=self._fits,
        )
        return replay_call(
            row,
            self._first[row.call],
            tensors,
            self._working_format(twin, row),
            reference,
            self._results,
        )

    def _hides_a_scale(self, row: RecordedRow) -> bool:
        """Return True for a norm of gradients that still carry the scale of the loss."""
        if row.phase != "optimizer" or row.base_operator not in NORMS:
            return False
        return row.record not in self._scales and any(
            record in self._scales for record in row.inputs
        )

    def is_another_formula(
        self,
        twin: RecordedRow,
        row: RecordedRow,
        error: float,
        shared: Mapping[int, int],
    ) -> bool | None:
        dtype = format_of(twin, row, self._adopted)
        if not explained_by_a_region(error, dtype):
            return False
        ours = self._reference_tensors.tensors
        theirs = self._candidate_tensors.tensors
        if ours is None or theirs is None:
            worst = max(
                largest_condition(self._reference, twin.record, shared),
                largest_condition(self._candidate, row.record, set(shared.values())),
            )
            return None if explained_by_a_region(error, dtype, worst) else False
        return is_one_function(
            Calls(self._reference, self._first_of_reference, ours),
            Calls(self._candidate, self._first, theirs),
            (twin.record, row.record),
            shared,
        )

    def run_as_it_was(self, row: RecordedRow) -> CallReplay:
        tensors = self._candidate_tensors.tensors
        if tensors is None:
            return CallReplay(reason="no tensors were kept")
        return run_as_it_was(
            row,
            self._first[row.call],
            tensors,
            self._results,
            _inputs(self._candidate, row),
        )

    def _products(self, row: RecordedRow) -> float:
        """Return how many products are added for one element; 0 for other operators."""
        if not facts(row.operator).multiplies:
            return 0.0
        return terms(row, _inputs(self._candidate, row))

    def _working_format(self, twin: RecordedRow, row: RecordedRow) -> WorkingFormat:
        dtype = format_of(twin, row, self._adopted)
        inputs = _inputs(self._candidate, row)
        adopted = [unit(i.dtype) for i in inputs if i.dtype in self._adopted]
        added = terms(row, inputs)
        return WorkingFormat(
            max([unit(dtype), *adopted]),
            smallest(dtype),
            terms=added if row.base_operator in SUMS else 1.0,
            products=self._products(row),
        )

    def _region(self, twin: RecordedRow, row: RecordedRow) -> RunRegion | None:
        calls = self._reference_calls
        if calls is None or row.operator in operators_that("cast"):
            return None
        return calls.leading_to(twin.record, row.record)

    @cached_property
    def _reference_calls(self) -> ReferenceCalls | None:
        tensors = self._candidate_tensors.tensors
        if tensors is None:
            return None
        # of several records that one reference record was paired with, the first
        ordered = sorted(self.exact, reverse=True)
        holders = {self.counterpart[record]: record for record in ordered}
        # what its tensors hold on both sides of these differs by the scale
        rescaled = {self._reference[record].call for record in self._rescaled}
        first = {
            c: row for c, row in self._first_of_reference.items() if c not in rescaled
        }
        return ReferenceCalls(self._reference, first, holders, tensors, self._fits)

    def _fits(self, reference: int, candidate: int) -> bool:
        twin = self._reference.get(reference)
        row = self._candidate.get(candidate)
        if twin is None or row is None:
            return False
        return twin.shape == row.shape


def _may_hold(twin: RecordedRow, row: RecordedRow) -> bool:
    """Return True for a forward value of the same kind, at least as large in all ways."""
    if None in (twin.min, twin.max, row.min, row.max):
        return False
    room = REGION_LIMIT * max(abs(row.min or 0.0), abs(row.max or 0.0))
    if (twin.min or 0.0) > (row.min or 0.0) + room:
        return False
    if (twin.max or 0.0) < (row.max or 0.0) - room:
        return False
    is_same_kind = bool(unit(twin.dtype)) == bool(unit(row.dtype))
    is_larger = (twin.numel or 0) >= (row.numel or 1)
    return twin.is_call and twin.phase == "forward" and is_same_kind and is_larger


def _whole(step: RecordedStep) -> RecordedStep:
    """Return the step with the tensors alone on which an operator can run again."""
    if step.tensors is None:
        return step
    return RecordedStep(step.rows, step.tensors.whole(), step.scales)


def _inputs(rows: Rows, row: RecordedRow) -> list[RecordedRow]:
    return [rows[record] for record in row.inputs if record in rows]


def _remember_unwritten(
    memory: EarlierSteps, rows: Rows, pairs: Sequence[Pair]
) -> None:
    """Leave the last writes of the reference that the candidate lacks to later steps."""
    lonely = {pair.reference for pair in pairs if pair.status == REFERENCE_ONLY}
    for name, row in last_named(rows).items():
        if row.is_call and row.record in lonely:
            memory.unwritten[name] = row


def _finding_columns(finding: Finding) -> dict[str, Any]:
    return {
        "tolerance": finding.tolerance,
        "inputs_error": finding.inputs,
        "own_error": finding.own_error,
        "cause": finding.cause,
        "undecided": finding.undecided or None,
    }


def _explanation_columns(
    sides: Sides,
    divergence: Divergence,
    finding: Finding,
    memory: EarlierSteps,
    extra_draws: ExtraDraws,
) -> dict[str, Any]:
    """Where the error comes from: nothing for a row that rounding explains."""
    if finding.cause == OWN:
        explanation = explain(sides, divergence, finding, extra_draws)
        row = sides.candidate.rows[finding.record]
        return asdict(explain_unwritten(memory, row, explanation))
    if finding.origin is not None:
        return {"origin": sides.candidate.rows[finding.origin].site}
    return {}


def _measured_columns(sides: Sides, pair: Pair, distances: Distances) -> dict[str, Any]:
    """Names of both sides, and their distance with all metrics."""
    row = None
    twin = None
    if pair.candidate is not None:
        row = sides.candidate.rows[pair.candidate]
    if pair.reference is not None:
        twin = sides.reference.rows[pair.reference]
    columns = {"status": pair.status, "reason": pair.reason}
    columns |= names_of_both(twin, row)
    if twin is not None and row is not None:
        columns |= _distance_columns(twin, row, distances, pair.reason)
    return columns


def _distance_columns(
    twin: RecordedRow, row: RecordedRow, distances: Distances, reason: str | None
) -> dict[str, Any]:
    unwritten = operators_that("leave memory unwritten")
    both_new = row.base_operator in unwritten and twin.base_operator in unwritten
    if both_new or is_partly_written(row, twin):
        return {"reason": UNWRITTEN}  # any values stood there
    distance, metrics = distances.full(twin.record, row.record)
    columns: dict[str, Any] = {"error": distance.error, "equal": distance.equal}
    if metrics is not None:
        columns |= _metric_columns(metrics)
        columns["reason"] = reason or metrics.reason
    elif distance.error is None:
        why = row.reason or twin.reason or _why_unknown(twin, row)
        columns["reason"] = reason or why
    return columns


def _metric_columns(metrics: Metrics) -> dict[str, Any]:
    columns = {name: getattr(metrics, name) for name in _METRICS}
    columns["share_equal"] = metrics.equal
    return columns


def _why_unknown(twin: RecordedRow, row: RecordedRow) -> str:
    if twin.shape != row.shape:
        return f"shapes differ: {twin.shape} in the reference, {row.shape} here"
    return "no statistics on both sides"
