"""The explanation of a row that made an error itself: the operator to name, and why."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field, replace

import torch
from torch import Tensor

from roundoff.compare.judging.divergence import (
    Divergence,
    is_without_value,
    is_workspace,
)
from roundoff.compare.judging.extra_draws import ExtraDraws
from roundoff.compare.judging.symptoms import ADVICE, Fault, symptom
from roundoff.compare.pairing.call_pairs import TRANSPARENT
from roundoff.compare.records.call_stacks import shared, stack_of
from roundoff.compare.records.kept_results import cutting_detaches, is_forward_detach
from roundoff.compare.records.recorded_rows import (
    Content,
    RecordedRow,
    Rows,
    last_named,
)
from roundoff.compare.rounding.findings import OWN, Finding
from roundoff.record import CALLED_FROM, StepTensors

#: Names of parameters of both programs that hold together the same values, and how many
#: elements they have where one side leaves zeros out: see ``ports.counterparts``.
Paired = tuple[tuple[tuple[str, ...], tuple[str, ...], int | None], ...]


@dataclass(slots=True)
class EarlierSteps:
    """What the earlier steps of a rank leave to later ones; written step by step."""

    #: By name of a parameter or buffer: its error, and True where a fault made it.
    names: dict[str, tuple[float, bool]] = field(default_factory=dict)
    #: The reference's last write to a name that the candidate lacks.
    unwritten: dict[str, RecordedRow] = field(default_factory=dict)
    #: The largest error of any value.
    worst: float = 0.0
    #: True once a fault was found.
    parted: bool = False
    #: What the reference's values that are rounding alone hold.
    noise: set[Content] = field(default_factory=set)
    #: What ``ports.counterparts`` has found.
    counterparts: Paired = ()

    def copy(self) -> EarlierSteps:
        """Return the same, to be changed apart from it."""
        return replace(self, names={**self.names}, unwritten={**self.unwritten})

    def carried(self, row: RecordedRow) -> tuple[float, bool]:
        """Return the error of a value from before the step, and True for that of a fault."""
        return self.names.get(row.name or "", (self.worst, self.parted))

    def is_noise(self, twin: RecordedRow) -> bool:
        """Return True for a value of the reference from before the step that was rounding
        alone there: the moment of a gradient that is zero in exact arithmetic."""
        return twin.is_leaf and twin.content in self.noise

    def remember(self, divergence: Divergence) -> None:
        """Leave the errors of a step to later ones, but for those of memory without values."""
        for record, finding in divergence.findings.items():
            row = divergence.candidate[record]
            if is_without_value(row, divergence.twin(record)) or is_workspace(row):
                continue
            error = finding.error or 0.0
            parted = finding.cause is not None
            self.parted |= parted
            self.worst = max(self.worst, error)
            if row.name:
                self.names[row.name] = (error, parted)
        for name, row in last_named(divergence.candidate).items():
            # written through a view: the parts of complex numbers too
            is_named = divergence.candidate[row.record].name is not None
            if not is_named and row.record in divergence.findings:
                finding = divergence.findings[row.record]
                self.names[name] = (finding.error or 0.0, finding.cause is not None)


@dataclass(frozen=True, slots=True)
class RecordedStep:
    """One step of one run: its rows, and its tensors where they were kept."""

    rows: Rows
    tensors: StepTensors | None = None
    #: By record, the scale of the loss that gradients carry, where it is not 1. The
    #: statistics of these rows are divided by it.
    scales: Mapping[int, float] = field(default_factory=dict)

    def tensor(self, record: int) -> Tensor | None:
        """Return the tensor of a record, without the scale of the loss; None where it was
        not kept."""
        if self.tensors is None or record not in self.tensors:
            return None
        scale = self.scales.get(record, 1.0)
        tensor = self.tensors[record]
        if scale == 1.0:
            return tensor
        return tensor.to(torch.promote_types(tensor.dtype, torch.float64)) / scale


@dataclass(frozen=True, slots=True)
class Sides:
    """One step of both runs."""

    reference: RecordedStep
    candidate: RecordedStep


@dataclass(frozen=True, slots=True, kw_only=True)
class Explanation:
    """The columns of a ``ComparedRow`` that an explanation fills."""

    blamed: str | None
    blamed_line: str | None
    blamed_phase: str | None
    blamed_reference: str | None
    blamed_reference_line: str | None
    looks_like: str
    evidence: str
    advice: str
    semantic: float | None = None
    kernel_excess: float | None = None


def explain(
    sides: Sides, divergence: Divergence, finding: Finding, extra_draws: ExtraDraws
) -> Explanation:
    """Name the operator behind a finding, and say what its error looks like."""
    row = sides.candidate.rows[finding.record]
    twin = divergence.twin(finding.record)
    blamed = _operator_at_fault(sides.candidate.rows, finding, row)
    missing = None
    if finding.missing is not None:
        missing = _as_forward(sides.reference.rows[finding.missing], divergence)
    detach = None
    if missing is not None or twin.operator != row.operator:
        detach = _lone_detach(divergence, row)
    if detach is not None and detach is sides.candidate.rows.get(detach.record):
        blamed = detach
        missing = None
    elif detach is not None:
        missing = detach
    if row.operator == twin.operator and row.is_call and not finding.arguments:
        finding.arguments = divergence.measures.changed_arguments(twin, row)
    faulty = finding.record if finding.faulty is None else finding.faulty
    actual = sides.candidate.tensor(faulty)
    looks_like = symptom(
        Fault(
            finding=finding,
            row=row,
            twin=twin,
            reference=sides.reference.rows,
            candidate=sides.candidate.rows,
            counterpart=divergence.counterpart,
            expected=_expected(sides.reference, finding, twin, actual),
            actual=actual,
            missing=missing,
            detach=detach,
        )
    )
    replay = finding.replayed
    in_reference = missing or twin
    handed_at = _handed_at(divergence, row, finding) if blamed is row else None
    called_at = _called_at(divergence, blamed)
    evidence = looks_like.evidence
    drawn_at = extra_draws.line_of(row) if blamed is row else None
    if drawn_at is not None:
        evidence += f"; what the candidate alone draws is called from {drawn_at}"
    return Explanation(
        blamed=blamed.site,
        blamed_line=handed_at or drawn_at or called_at or blamed.line,
        blamed_phase=(missing or blamed).phase,
        blamed_reference=in_reference.site,
        blamed_reference_line=in_reference.line,
        looks_like=looks_like.label,
        evidence=evidence,
        advice=looks_like.advice,
        semantic=None if replay is None else _without_nan(replay.semantic),
        kernel_excess=None if replay is None else _without_nan(replay.excess),
    )


def explain_unwritten(
    memory: EarlierSteps, row: RecordedRow, explanation: Explanation
) -> Explanation:
    """Blame the step before, where its write to this tensor is in the reference only."""
    missing = None if row.is_call else memory.unwritten.get(row.name or "")
    if missing is None:
        return explanation
    line = f" ({missing.line})" if missing.line else ""
    where = f"{missing.site}{line} of the step before"
    return replace(
        explanation,
        blamed_reference=missing.site,
        blamed_reference_line=missing.line,
        blamed_phase=missing.phase,
        looks_like="missing operator",
        advice=ADVICE["missing operator"],
        evidence=f"{where} is in the reference only, and wrote this",
    )


def _operator_at_fault(rows: Rows, finding: Finding, row: RecordedRow) -> RecordedRow:
    """Of several calls without counterpart, the one to name.

    The one that is wrong for the inputs it had, the one where NaN or Inf came up, or the
    last that computes.
    """
    if finding.faulty is not None:
        return rows[finding.faulty]
    region = [rows[record] for record in finding.region]
    if math.isinf(finding.error or 0.0):
        for inner in region:
            if inner.nonfinite:
                return inner
    if row.is_call and row.operator not in TRANSPARENT:
        return row
    computing = [r for r in region if r.is_call and r.operator not in TRANSPARENT]
    return computing[-1] if computing else row


def _as_forward(missing: RecordedRow, divergence: Divergence) -> RecordedRow:
    """Return the forward call without counterpart that a backward call belongs to."""
    if missing.phase != "backward":
        return missing
    paired = set(divergence.counterpart.values())
    for row in divergence.reference.values():
        if row.phase != "forward" or not row.is_call or row.record in paired:
            continue
        same_code = (row.module, row.line) == (missing.module, missing.line)
        if same_code and row.operator == missing.operator:
            return row
    return missing


def _lone_detach(divergence: Divergence, row: RecordedRow) -> RecordedRow | None:
    """Return a forward detach that only one side has, the candidate's first.

    The values agree, and in the backward pass a branch is missing or is too much.
    """
    if row.phase != "backward":
        return None
    ours = [
        candidate.record
        for candidate in divergence.candidate.values()
        if candidate.record not in divergence.exact and is_forward_detach(candidate)
    ]
    written = next(cutting_detaches(divergence.candidate, ours), None)
    if written is not None:
        return written
    paired = set(divergence.counterpart.values())
    theirs = [
        reference.record
        for reference in divergence.reference.values()
        if reference.record not in paired and is_forward_detach(reference)
    ]
    return next(cutting_detaches(divergence.reference, theirs), None)


def _expected(
    reference: RecordedStep, finding: Finding, twin: RecordedRow, actual: Tensor | None
) -> Tensor | None:
    """Return what the row should hold, given its inputs; None where that is not known."""
    expected = None
    if finding.replayed is not None:
        expected = finding.replayed.expected
    if expected is None and finding.inputs == 0:
        expected = reference.tensor(twin.record)
    if expected is None or actual is None or actual.shape == expected.shape:
        return expected
    return None


def _without_nan(value: float | None) -> float | None:
    """Return the value; infinity for NaN."""
    if value is None or math.isfinite(value):
        return value
    return math.inf


def _given_at(divergence: Divergence, row: RecordedRow) -> str | None:
    """Return the line that calls a model with other weights; None where one layer alone
    reads another."""
    misread = [
        stack_of(divergence.candidate[finding.record])
        for finding in divergence.findings.values()
        if finding.cause == OWN and _reads_other_weight(divergence, finding)
    ]
    stack = stack_of(row)
    depth = min((shared(stack, other) for other in misread), default=0)
    at_depth = {stack[depth] for stack in misread if len(stack) > depth}
    if len(at_depth) < 2 or not depth:
        return None
    return stack[depth - 1]


def _reads_other_weight(divergence: Divergence, finding: Finding) -> bool:
    """Return True for what reads a parameter where the reference reads a value that is none."""
    if finding.read is None:
        return False
    ours, theirs = finding.read
    twin, source = divergence.reference[ours], divergence.candidate[theirs]
    return bool(source.is_leaf and source.name) and not twin.name


def _called_at(divergence: Divergence, row: RecordedRow) -> str | None:
    """Return the line that calls a function once more than the reference; None for no such.

    Of all else that the function computes there nothing has a counterpart.
    """
    if not row.callers:
        return None
    further_in = CALLED_FROM + row.callers
    beside = [
        other.record
        for other in divergence.candidate.values()
        if other.is_call and other.callers
        if other.callers.endswith(further_in)
        or (other.callers == row.callers and other.line != row.line)
    ]
    if not beside or not divergence.exact.isdisjoint(beside):
        return None
    return row.callers.partition(CALLED_FROM)[0]


def _handed_at(
    divergence: Divergence, row: RecordedRow, finding: Finding
) -> str | None:
    """Return the line of the call that hands a function another value; None for no such.

    Where the function reads the value rightly too, it is the function that mistakes it.
    """
    if finding.read is None or row.phase != "forward":
        return None
    _, read = finding.read
    source = divergence.candidate[read]
    if source.is_leaf and source.name:
        return _given_at(divergence, row)
    stack = stack_of(row)
    place = shared(stack, stack_of(source))
    if not source.is_call or not source.line or place >= len(stack) - 1:
        return None
    proper = divergence.counterpart.get(read)
    inside = (
        other.record
        for other in divergence.candidate.values()
        if read in other.inputs
        and stack_of(other)[: place + 1] == stack[: place + 1]
        and other.record in divergence.counterpart
    )
    if any(proper in divergence.twin(record).inputs for record in inside):
        return None
    return stack[place]
