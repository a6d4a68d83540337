"""Operators that only one run has in its forward pass, and that no value there shows.

What is added to a loss, or left out of it, changes nothing that the forward pass reads
any more: it shows in the gradients alone.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from roundoff.compare.judging.explain import Sides
from roundoff.compare.judging.step_causes import OPERATORS, Cause, with_line
from roundoff.compare.judging.table import ComparedRow
from roundoff.compare.loop.left_out_updates import (
    lone_detach,
    lone_detach_of_reference,
)
from roundoff.compare.pairing.call_pairs import TRANSPARENT
from roundoff.compare.records.recorded_rows import RecordedRow, Rows
from roundoff.compare.rounding.findings import OWN
from roundoff.compare.rounding.rounding_bound import DIVISIONS, PRODUCTS

_CUT = "gradient cut"


def operator_causes(
    sides: Sides, compared: Sequence[ComparedRow], *, rank: int, step: int
) -> list[Cause]:
    """Return the forward operator that one run lacks, where gradients alone differ.

    Nothing where an operator of the forward pass made an error of its own: that is the
    cause then.
    """
    if not _gradients_alone_differ(compared):
        return []
    detach = lone_detach(sides.candidate.rows, compared)
    if detach is not None:
        evidence = (
            f"{with_line(detach.site, detach.line)} cuts the gradient here, and not in "
            "the reference"
        )
        return [_cause(_CUT, evidence, rank, step, row=detach)]
    cut = lone_detach_of_reference(sides.reference.rows, compared)
    is_told = any(row.looks_like == _CUT for row in compared if row.cause == OWN)
    if cut is not None and not is_told:
        evidence = (
            f"{with_line(cut.site, cut.line)} cuts the gradient in the reference, and "
            "not here"
        )
        return [_cause(_CUT, evidence, rank, step, twin=cut)]
    paired = _Paired.of(compared)
    missing = _lone(
        sides.reference.rows, paired.of_reference, paired.agreeing_of_reference
    )
    if missing is not None:
        evidence = (
            f"{with_line(missing.site, missing.line)} is in the reference only: "
            f"{_does(missing, sides.reference.rows)} is left out here, and the gradients "
            "show it"
        )
        return [_cause("missing operator", evidence, rank, step, twin=missing)]
    extra = _lone(
        sides.candidate.rows, paired.of_candidate, paired.agreeing_of_candidate
    )
    if extra is None:
        return []
    evidence = (
        f"{with_line(extra.site, extra.line)} is in the candidate only: "
        f"{_does(extra, sides.candidate.rows)} is not in the reference, and the gradients "
        "show it"
    )
    return [_cause("extra operator", evidence, rank, step, row=extra)]


def _does(row: RecordedRow, rows: Rows) -> str:
    """Return what an operator does to a loss: it adds something, or scales by a factor."""
    source = rows.get(row.inputs[0])
    is_factor = row.base_operator in PRODUCTS | DIVISIONS
    if source is None or not is_factor or source.numel != row.numel:
        return "what it adds"
    if not source.l2 or not row.l2:
        return "what it multiplies by"
    return f"a factor of {row.l2 / source.l2:.6g}"


def _gradients_alone_differ(compared: Sequence[ComparedRow]) -> bool:
    """Return True where operators of the backward pass alone made errors of their own."""
    phases = {
        row.phase for row in compared if row.cause == OWN and (row.call or 0) >= 0
    }
    return "backward" in phases and "forward" not in phases


@dataclass(frozen=True, slots=True)
class _Paired:
    """The records of each side that have a counterpart, and those that agree with it."""

    of_reference: set[int]
    of_candidate: set[int]
    agreeing_of_reference: set[int]
    agreeing_of_candidate: set[int]

    @classmethod
    def of(cls, compared: Sequence[ComparedRow]) -> _Paired:
        """Return those of the rows of a step."""
        twins = {
            row.record: row.reference_record
            for row in compared
            if row.record is not None and row.reference_record is not None
        }
        differing = {
            row.record for row in compared if row.error and row.cause is not None
        }
        agreeing = {r: twin for r, twin in twins.items() if r not in differing}
        return cls(
            set(twins.values()), set(twins), set(agreeing.values()), set(agreeing)
        )


def _lone(rows: Rows, paired: set[int], sound: set[int]) -> RecordedRow | None:
    """Return the first forward operator without counterpart whose inputs agree."""
    for row in rows.values():
        if row.record in paired or not row.is_call or row.phase != "forward":
            continue
        if row.operator in TRANSPARENT or not row.inputs or row.name:
            continue
        if all(record in sound for record in row.inputs):
            return row
    return None


def _cause(
    label: str,
    evidence: str,
    rank: int,
    step: int,
    *,
    row: RecordedRow | None = None,
    twin: RecordedRow | None = None,
) -> Cause:
    shown = row or twin
    site = "" if shown is None else shown.site
    return Cause(
        kind=OPERATORS,
        label=label,
        evidence=evidence,
        step=step,
        rank=rank,
        phase="forward",
        name=site,
        at=0,
        row=row,
        twin=twin,
    )
