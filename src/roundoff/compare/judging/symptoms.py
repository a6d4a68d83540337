"""What a fault looks like: a constant, an axis, a buffer, a kernel that stopped early...

The first description that fits gives the label: of the calls, of what they read, and of
the values (``structure``).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from roundoff.compare.judging.divergence import HANDS_ON
from roundoff.compare.judging.step_causes import listed, with_line
from roundoff.compare.judging.table import SCHEDULE, STALE, WRONG_CONSTANT
from roundoff.compare.records.call_arguments import number_for_tensor
from roundoff.compare.records.recorded_rows import RecordedRow, Rows, made_from
from roundoff.compare.rounding.findings import Finding
from roundoff.compare.rounding.rounding_bound import unit
from roundoff.compare.tensors.structure import fewer_digits, structure, usual_error
from roundoff.errors import RunError
from roundoff.ops import overload_of

#: Labels that say how a value from before the step was loaded or made.
OF_VALUES = (
    "wrong axis or layout",
    "constant factor",
    "constant offset",
    "corrupted elements",
)

ADVICE = {
    "rounding": (
        "keep this operator in a wider format (roundoff diagnose finds the "
        "cheapest plan that does)"
    ),
    WRONG_CONSTANT: "compare this argument in the two programs",
    SCHEDULE: "look for what changes this number from step to step",
    "other operator": "compare the code of the two programs at these lines",
    "other input": "compare what the two programs hand to this operator",
    "other shape": "compare what is sliced, padded or reshaped before it",
    "missing operator": (
        "the reference computes this before; look for the line that the candidate lacks"
    ),
    "gradient cut": "look for detach(), no_grad() or .data in one of the two programs",
    "extra operator": (
        "the reference has no such operator here; look for what inserts it (a "
        "mode, a hook, dropout left on)"
    ),
    "wrong axis or layout": (
        "compare dim, view and transpose arguments, and the layout the weights "
        "were saved in"
    ),
    STALE: (
        "look for a buffer that is written before it is read, reused, or was not "
        "updated or loaded"
    ),
    "other values": "check how it was loaded or made: checkpoint, seed, preprocessing",
    "overflow": (
        "keep it in a format with more range, or scale it; 'roundoff overflow' "
        "shows where it comes from"
    ),
    "NaN": "'roundoff overflow' shows where it is born",
    "narrower format": (
        "cast it up, or keep it out of autocast: the reference computes this in a "
        "wider format"
    ),
    "partly written output": (
        "suspect the kernel: its tail is not written; try another shape, backend "
        "or library version"
    ),
    "corrupted elements": (
        "run the step again: if it moves, suspect memory or a race; if not, the "
        "kernel's indexing"
    ),
    "constant offset": (
        "look for a bias, a mean or a zero point that is missing or counted twice"
    ),
    "constant factor": (
        "look for a missing or doubled scale: mean against sum, 1/sqrt(d), "
        "gradient averaging"
    ),
    "noise": (
        "run both again: if this changes from run to run it is a race or an "
        "unseeded random operator"
    ),
    "wrong kernel": (
        "run the operator alone on another backend or device: 'roundoff replay' "
        "does on the recorded inputs"
    ),
    "value of its own": "compare what the two programs do, and hand to it, at these lines",
    "difference": "run both with --keep tensors to see what it looks like",
}


#: What a call does with its second operand, where a number may stand.
_READS = {"div": "divides by", "mul": "multiplies by"}


@dataclass(frozen=True, slots=True)
class Symptom:
    """What a fault looks like: ``label`` is a key of ``ADVICE``, ``evidence`` a text."""

    label: str
    evidence: str

    @property
    def advice(self) -> str:
        """What to try."""
        return ADVICE[self.label]


@dataclass(frozen=True, slots=True, kw_only=True)
class Fault:
    """A row that made an error itself, and what a description of it may look at.

    Attributes:
        finding: of the row.
        row: the candidate's.
        twin: the reference's.
        reference: the rows of the step by record.
        candidate: the rows of the step by record.
        counterpart: the reference record of each candidate record.
        expected: what the row should hold, given its inputs; None where nothing was
            kept.
        actual: what it holds; None where nothing was kept.
        missing: a call that only the reference has.
        detach: a ``detach`` that only one side has; ``missing`` where that is the
            reference.
    """

    finding: Finding
    row: RecordedRow
    twin: RecordedRow
    reference: Rows
    candidate: Rows
    counterpart: Mapping[int, int]
    expected: Tensor | None = None
    actual: Tensor | None = None
    missing: RecordedRow | None = None
    detach: RecordedRow | None = None

    @property
    def other_operator(self) -> bool:
        return self.row.element_operator != self.twin.element_operator

    @property
    def replaced(self) -> bool:
        """True where other calls than the reference's lead to the value."""
        return self.other_operator or bool(self.finding.region)

    @property
    def differing_operators(self) -> str:
        if self.row.operator != self.twin.operator:
            return f"{self.row.operator} where the reference has {self.twin.operator}"
        behind = [
            self.candidate[record].operator
            for record in self.finding.region
            if record in self.candidate
        ]
        others = f", by {listed([*dict.fromkeys(behind)])}" if behind else ""
        return f"{self.row.operator} of what is computed otherwise{others}"


def symptom(fault: Fault) -> Symptom:
    """Return the first description that fits a row which made an error itself."""
    for describe in _DESCRIPTIONS:
        described = describe(fault)
        if described is not None:
            return described
    inputs_agree = "its inputs agree with the reference's, its result does not"
    return Symptom("difference", inputs_agree)


# -- of the calls ----------------------------------------------------------------------


def _gradient_cut(fault: Fault) -> Symptom | None:
    detach = fault.detach
    if detach is None:
        return None
    who = "the reference does not detach"
    if detach is fault.missing:
        who = "only the reference detaches"
    return Symptom("gradient cut", f"{who} at {_site_and_line(detach)}")


def _missing_operator(fault: Fault) -> Symptom | None:
    if fault.missing is None:
        return None
    parameter = _parameter_and_line(fault.reference, fault.missing)
    where = _site_and_line(fault.missing)
    evidence = f"{where} is in the reference only, and its result is not read here"
    if parameter is not None:
        evidence = f"the reference reads {parameter} there, which is not read here"
    return Symptom("missing operator", evidence)


def _another_input(fault: Fault) -> Symptom | None:
    if fault.finding.read is None:
        return None
    reference, candidate = fault.finding.read
    row = fault.candidate[candidate]
    twin = fault.reference[reference]
    theirs = _parameter_and_line(fault.candidate, row) or _site_and_line(row)
    ours = _parameter_and_line(fault.reference, twin) or _site_and_line(twin)
    if theirs == ours:
        theirs = f"result {row.place} of {theirs}"
        ours = f"result {twin.place}"
    evidence = f"reads {theirs} where the reference reads {ours}"
    write = _written_later(fault, reference)
    if write is not None:
        written = f"before {_site_and_line(write)} writes it"
        evidence = f"reads {theirs} {written}; the reference reads it after that"
    stale = _is_overwritten(fault, reference, candidate)
    return Symptom(STALE if stale else "other input", evidence)


def _written_later(fault: Fault, reference: int) -> RecordedRow | None:
    """Return the write of which the reference reads the result, if it comes after here."""
    writes = (
        fault.candidate[record]
        for record, twin in fault.counterpart.items()
        if twin == reference and record > fault.row.record
    )
    return next((write for write in writes if write.inplace), None)


def _is_overwritten(fault: Fault, proper: int, record: int) -> bool:
    """Return True where a record was written in place over the proper one, or is older."""
    visited: set[int] = set()
    while record in fault.candidate and record not in visited:
        visited.add(record)
        row = fault.candidate[record]
        if not row.is_call or fault.counterpart.get(record) == proper:
            return True
        if not row.inplace or not row.inputs:
            return False
        record = row.inputs[0]
    return False


def _wrong_constant(fault: Fault) -> Symptom | None:
    finding = fault.finding
    replay = finding.replayed
    differs = replay is None or replay.semantic is None or replay.another_program
    if not finding.arguments or not differs:
        return None
    return Symptom(WRONG_CONSTANT, "; ".join(finding.arguments))


def _number_for_tensor(fault: Fault) -> Symptom | None:
    """A number in the place of a tensor with other values, in either program."""
    here = number_for_tensor(fault.row, fault.twin)
    there = number_for_tensor(fault.twin, fault.row)
    made = set() if there is None else made_from(fault.candidate, [there[1]])
    if fault.other_operator or not made.issuperset(fault.finding.region):
        return None
    reads = _READS.get(fault.row.base_operator, "reads")
    if here is not None and _holds_other_values(fault.reference, *here):
        number, record = here
        ours = _site_and_line(fault.reference[record])
        return Symptom(
            "other input", f"{reads} {number:g} where the reference {reads} {ours}"
        )
    if there is not None and _holds_other_values(fault.candidate, *there):
        number, record = there
        theirs = _site_and_line(fault.candidate[record])
        return Symptom(
            "other input", f"{reads} {theirs} where the reference has {number:g}"
        )
    return None


def _holds_other_values(rows: Rows, number: float, record: int) -> bool:
    row = rows.get(record)
    if row is None or row.min is None or row.max is None:
        return False
    # a tensor of the same number has it rounded to its format, at most one unit away
    limit = unit(row.dtype) * abs(number)
    return abs(row.min - number) > limit or abs(row.max - number) > limit


def _other_program(fault: Fault) -> Symptom | None:
    replay = fault.finding.replayed
    if replay is None or not replay.another_program or not fault.other_operator:
        return None
    return Symptom("other operator", fault.differing_operators)


class _SpecialCount(NamedTuple):
    """How often a NaN or Inf stands in the reference's row and in the candidate's."""

    kind: str
    expected: int
    actual: int

    @property
    def differs(self) -> bool:
        return self.expected != self.actual


def _special_counts(fault: Fault) -> Iterator[_SpecialCount]:
    fields = {"NaN": "nan", "+Inf": "posinf", "-Inf": "neginf"}
    for kind, field in fields.items():
        expected = getattr(fault.twin, field) or 0
        actual = getattr(fault.row, field) or 0
        yield _SpecialCount(kind, expected, actual)


def _special_values(fault: Fault) -> Symptom | None:
    """NaN or Inf that the reference does not have. Unknown counts are none."""
    differing = [count for count in _special_counts(fault) if count.differs]
    if not differing:
        return None
    text = ", ".join(
        f"{count.actual:,} {count.kind} where the reference has {count.expected:,}"
        for count in differing
    )
    more = [count.kind for count in differing if count.actual > count.expected]
    if more == ["NaN"]:
        return Symptom("NaN", text)
    if more:
        return Symptom("overflow", f"{text}, in {fault.row.dtype}")
    if fault.other_operator:
        return Symptom("other operator", f"{fault.differing_operators}: {text}")
    return Symptom(WRONG_CONSTANT, text)


def _from_before_the_step(fault: Fault) -> Symptom | None:
    """A parameter, a buffer or an input that differs before anything ran."""
    if not fault.row.is_leaf:
        return None
    structured = _structure(fault)
    if structured is not None and structured.label in OF_VALUES:
        return structured
    narrower = _narrower_than_twin(fault)
    if narrower is not None:
        return narrower
    if fault.twin.is_call:
        maker = _site_and_line(fault.twin)
        evidence = f"left from before, where the reference makes it by {maker}"
        return Symptom(STALE, evidence)
    detail = f": {structured.evidence}" if structured else ""
    if fault.row.operator == "buffer":
        evidence = f"a buffer that differs before anything ran{detail}"
        return Symptom(STALE, evidence)
    return Symptom("other values", f"it differs before anything ran{detail}")


def _other_shape(fault: Fault) -> Symptom | None:
    if fault.other_operator or fault.row.shape == fault.twin.shape:
        return None
    evidence = f"{fault.row.shape} where the reference has {fault.twin.shape}"
    return Symptom("other shape", evidence)


def _random(fault: Fault) -> Symptom | None:
    if fault.other_operator or not draws(fault.row):
        return None
    drawn = f"{fault.row.operator} draws random numbers"
    before = other_number_of_draws(
        fault.reference, fault.twin, fault.candidate, fault.row
    )
    evidence = f"{drawn}: other ones than in the reference{before}"
    return Symptom("noise", evidence)


def other_number_of_draws(
    reference: Rows, twin: RecordedRow, candidate: Rows, row: RecordedRow
) -> str:
    """Return how often each run has drawn before in the step, in words; "" for as often."""
    ours = _draws_before(reference, twin)
    theirs = _draws_before(candidate, row)
    if ours == theirs:
        return ""
    return f", after {theirs:,} draws in this step where the reference has {ours:,}"


def _draws_before(rows: Rows, row: RecordedRow) -> int:
    """Return how many calls before a row's draw."""
    return len({each.call for each in drawing_rows(rows) if each.call < row.call})


def drawing_rows(rows: Rows) -> list[RecordedRow]:
    """Return the rows of calls that draw random numbers; each overload is looked up once."""
    by_overload = {each.overload: each for each in rows.values() if each.is_call}
    drawing = {name for name, each in by_overload.items() if draws(each)}
    return [row for row in rows.values() if row.is_call and row.overload in drawing]


def draws(row: RecordedRow) -> bool:
    """Return True for an operator that draws random numbers."""
    try:
        tags = overload_of(row.overload or "").tags
    except RunError:
        return False
    return torch.Tag.nondeterministic_seeded in tags


# -- of the values ---------------------------------------------------------------------


def _single_value(fault: Fault) -> Symptom | None:
    """One value has no structure."""
    if fault.row.numel != 1 or not fault.replaced:
        return None
    return _narrower(fault) or _replaced(fault)


def _structure(fault: Fault) -> Symptom | None:
    if fault.expected is None or fault.actual is None:
        return None
    structured = structure(fault.expected, fault.actual, unit(fault.row.dtype))
    if structured is None:
        return None
    return Symptom(structured.label, structured.evidence)


def _fewer_digits(fault: Fault) -> Symptom | None:
    if fault.expected is None or fault.actual is None:
        return None
    few = fewer_digits(fault.expected, fault.actual, unit(fault.row.dtype))
    if few is None:
        return None
    evidence = f"every value is one of {few}, in {fault.row.dtype}"
    return Symptom("narrower format", evidence)


def _narrower(fault: Fault) -> Symptom | None:
    return _narrower_than_twin(fault) or _narrower_on_the_way(fault)


def _narrower_than_twin(fault: Fault) -> Symptom | None:
    ours = getattr(torch, fault.twin.dtype or "", None)
    theirs = getattr(torch, fault.row.dtype or "", None)
    if not isinstance(ours, torch.dtype) or not isinstance(theirs, torch.dtype):
        return None
    evidence = f"{fault.row.dtype} where the reference has {fault.twin.dtype}"
    if ours.is_floating_point != theirs.is_floating_point:
        return None
    if ours.is_floating_point:
        fewer = torch.finfo(theirs).eps > torch.finfo(ours).eps
        return Symptom("narrower format", evidence) if fewer else None
    shorter = theirs.itemsize < ours.itemsize
    return Symptom("overflow", evidence) if shorter else None


def _narrower_on_the_way(fault: Fault) -> Symptom | None:
    """A call that leads here was computed in fewer digits than the result has."""
    digits = max(unit(fault.row.dtype), unit(fault.twin.dtype))
    for record in fault.finding.region:
        inner = fault.candidate[record]
        if unit(inner.dtype) > digits > 0:
            where = _site_and_line(inner)
            evidence = f"{where} is in {inner.dtype}, the result in {fault.row.dtype}"
            return Symptom("narrower format", evidence)
    return None


def _replaced(fault: Fault) -> Symptom | None:
    """An operator in the place of another one, or one too many."""
    if not fault.replaced:
        return None
    if not fault.twin.is_call:
        name = fault.twin.name or fault.twin.site
        evidence = (
            f"{fault.row.operator} changes {name}, which the reference leaves as it is"
        )
        return Symptom("extra operator", evidence)
    if _works_on_result(fault):
        if fault.row.phase == "backward" and fault.row.base_operator == "add":
            evidence = (
                "adds to a gradient that was there, where the reference begins anew: it "
                "is not cleared (zero_grad), or there are more backward passes"
            )
            return Symptom("extra operator", evidence)
        works = f"{fault.row.operator} works on what the reference's"
        evidence = f"{works} {fault.twin.operator} hands on as it is"
        return Symptom("extra operator", evidence)
    return Symptom("other operator", fault.differing_operators)


def _works_on_result(fault: Fault) -> bool:
    """Return True where the candidate reads what already is the reference's result."""
    same_values = {fault.twin.record}
    maker = fault.twin
    while maker.operator in HANDS_ON and len(maker.inputs) == 1:
        source = fault.reference.get(maker.inputs[0])
        if source is None:
            break
        maker = source
        same_values.add(maker.record)
    for record in (fault.row.record, *fault.finding.region):
        read = fault.candidate[record].inputs
        if any(fault.counterpart.get(each) in same_values for each in read):
            return True
    return False


def _wrong_alone(fault: Fault) -> Symptom | None:
    """The call was run again as it was, on its own inputs, and gives something else."""
    return None if fault.finding.faulty is None else _wrong_kernel(fault)


def _wrong_kernel(fault: Fault) -> Symptom | None:
    replay = fault.finding.replayed
    excess = None if replay is None else replay.excess
    if excess is None or excess <= 1.0:
        return None
    evidence = f"{excess:.3g} times what rounding explains on the inputs it had"
    return Symptom("wrong kernel", evidence + _usual_error(fault))


def _noise(fault: Fault) -> Symptom | None:
    if fault.expected is None or fault.actual is None:
        return None
    return Symptom("noise", "no structure in the difference" + _usual_error(fault))


def _usual_error(fault: Fault) -> str:
    if fault.expected is None or fault.actual is None:
        return ""
    usual = usual_error(fault.expected, fault.actual)
    if usual is None:
        return ""
    percent = f"{100 * usual:.2g} %"
    return f"; half of the values that differ are off by more than {percent}"


def _site_and_line(row: RecordedRow) -> str:
    return with_line(row.site, row.line)


def _parameter_and_line(rows: Rows, row: RecordedRow) -> str | None:
    """Return the parameter that a row is, or is a view of, and its line; None of others."""
    source: RecordedRow | None = row
    while source is not None and source.is_call:
        source = None if source.view_of is None else rows.get(source.view_of)
    if source is None or source.operator != "parameter":
        return None
    return with_line(source.name or source.site, row.line)


#: In this order: the first that fits is the symptom.
_DESCRIPTIONS: tuple[Callable[[Fault], Symptom | None], ...] = (
    _gradient_cut,
    _missing_operator,
    _another_input,
    _wrong_constant,
    _number_for_tensor,
    _other_program,
    _special_values,
    _from_before_the_step,
    _other_shape,
    _random,
    _single_value,
    _structure,
    _wrong_alone,
    _fewer_digits,
    _narrower,
    _replaced,
    _wrong_kernel,
    _noise,
)
