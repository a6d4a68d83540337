"""The rows of the table for one step of two programs by different hands."""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import replace
from typing import Any

from roundoff.compare.blame.blamed import Blamed
from roundoff.compare.judging.step_causes import CAUSE_ADVICE
from roundoff.compare.judging.symptoms import ADVICE
from roundoff.compare.judging.table import ComparedRow
from roundoff.compare.pairing.alignment import EQUIVALENT, MATCHED
from roundoff.compare.ports.counterparts import counterparts, named_leaves
from roundoff.compare.ports.difference import Difference
from roundoff.compare.ports.gradient_cuts import LABEL as GRADIENT_CUT
from roundoff.compare.records.call_arguments import argument_differences
from roundoff.compare.records.recorded_rows import (
    RecordedRow,
    first_rows,
    last_named,
    shape_read_first,
)
from roundoff.compare.rounding.findings import INHERITED, OWN
from roundoff.compare.values.value_flow import Flow
from roundoff.compare.values.value_regions import Sides
from roundoff.ops import operators_that

#: Hand on the values that they read, or some of them.
_MOVED = operators_that("move values")
#: Work on two tensors, or on one and a number.
_PAIRED = operators_that("pair elements")
#: What to try, of all labels.
_ADVICE = CAUSE_ADVICE | ADVICE
_OPTIMIZER = "optimizer"
_OTHER_OPERATORS = "computed in other operators; what leaves here agrees"
_NO_COUNTERPART = "no parameter of the reference holds what its parameter does"
_AFTER = "made of values that differ"


class PortRows:
    """The rows of the table of one step."""

    def __init__(self, sides: Sides, differences: list[Difference]) -> None:
        self._sides = sides
        self._by_record = {
            d.value.row.record: d for d in differences if d.value is not None
        }
        self._spoilt = _downstream(sides.candidate, self._by_record)
        self._uncompared = _uncompared(sides)

    def rows(self) -> list[ComparedRow]:
        """Return the candidate's rows, then those that only the reference has."""
        candidate = self._sides.candidate
        rows = [self._row(row) for row in candidate.step.rows.values()]
        taken = {row.reference_record for row in rows}
        for record, row in self._sides.reference.step.rows.items():
            if record not in taken:
                rows.append(self._reference_row(row))
        return rows

    def _row(self, row: RecordedRow) -> ComparedRow:
        difference = self._by_record.get(row.record)
        if difference is not None and difference.value is not None:
            # of two parameters in one memory one was recorded
            named = replace(row, name=difference.value.row.name)
            return self._own(named, difference)
        twin = self._sides.twins.get(row.record)
        if twin is not None:
            return self._agreeing(row, *twin)
        if row.record in self._spoilt:
            origin = self._spoilt[row.record]
            site = self._sides.candidate.values[origin].row.site
            return ComparedRow(
                **_names(row),
                status=EQUIVALENT,
                reason=_AFTER,
                cause=INHERITED,
                origin=site,
            )
        is_compared = row.record not in self._uncompared
        reason = _OTHER_OPERATORS if is_compared else _NO_COUNTERPART
        return ComparedRow(**_names(row), status=EQUIVALENT, reason=reason)

    def _agreeing(self, row: RecordedRow, key: int, distance: float) -> ComparedRow:
        twin = self._sides.reference.values[key].row
        return ComparedRow(
            **_names(row),
            **_names_of_reference(twin),
            status=MATCHED,
            reason=None if twin.shape == row.shape else "in another layout",
            error=distance,
            equal=distance == 0.0,
            tolerance=self._sides.limit,
        )

    def _reference_row(self, row: RecordedRow) -> ComparedRow:
        agreeing = row.record in self._sides.agreeing or not self._by_record
        return ComparedRow(
            **_names(row) | {"site": None, "line": None, "record": None},
            **_names_of_reference(row),
            status=EQUIVALENT,
            reason=_OTHER_OPERATORS if agreeing else "the candidate has no such value",
        )

    def _own(self, row: RecordedRow, difference: Difference) -> ComparedRow:
        part = difference.part
        twin = _named_reference(difference)
        label, evidence = _description(self._sides, difference)
        error = part.distance if math.isfinite(part.distance) else 1.0
        return ComparedRow(
            **_names(row),
            **(_names_of_reference(twin) if twin else {}),
            status=MATCHED if twin else EQUIVALENT,
            error=error,
            equal=False,
            tolerance=difference.limit,
            inputs_error=0.0,
            own_error=error,
            cause=OWN,
            contribution=1.0,
            blamed=row.site,
            blamed_line=difference.line,
            blamed_phase=_OPTIMIZER if part.phase == _OPTIMIZER else row.phase,
            blamed_reference=twin.site if twin else None,
            blamed_reference_line=twin.line if twin else None,
            looks_like=label,
            evidence=evidence,
            advice=_ADVICE[label],
        )


def _uncompared(sides: Sides) -> set[int]:
    """Return the records of gradients and updates of parameters without a counterpart."""
    flow = sides.candidate
    leaves = named_leaves(flow)
    compared = {name for each in counterparts(sides) for name in each.theirs}
    return {
        row.record
        for name, row in last_named(flow.step.rows).items()
        if (parameter := name.removesuffix(".grad")) in leaves
        and parameter not in compared
        and (parameter != name or row.phase == _OPTIMIZER)
    }


def _named_reference(difference: Difference) -> RecordedRow | None:
    blamed = difference.blamed
    reference = difference.part.reference
    # what was cut may be no value of the reference: none of its own stands for it
    if blamed is not None and (blamed.reference or blamed.label == GRADIENT_CUT):
        reference = blamed.reference
    return reference.row if reference is not None else None


def _downstream(flow: Flow, starts: Iterable[int]) -> dict[int, int]:
    """Return the values that are made of these, each with the one it comes from."""
    origin: dict[int, int] = {}
    for start in starts:
        waiting = [start]
        while waiting:
            for reader in flow.readers.get(waiting.pop(), ()):
                if reader not in origin:
                    origin[reader] = start
                    waiting.append(reader)
    return origin


def _description(sides: Sides, difference: Difference) -> tuple[str, str]:
    """Return the label and the evidence of a difference."""
    if difference.blamed is not None:
        return _description_of_blamed(sides, difference.blamed)
    part = difference.part
    wanted = part.reference
    value = part.candidate
    if wanted is None or value is None:
        return "other operator", "the reference has nothing like it here"
    line = f" ({wanted.row.line})" if wanted.row.line else ""
    constants = _constants_apart(sides, wanted.row, value.row)
    if constants:
        words = f"{'; '.join(constants)}: the reference's is {wanted.row.site}{line}"
        return "wrong constant", words
    there = f"{wanted.operator} of {wanted.row.site}{line}"
    if math.isinf(part.distance):
        words = f"what it reads agrees; the reference goes on with {there}"
        return "other operator", words
    words = (
        f"what it is made of agrees; it is {part.distance:.2g} off, relative, from "
        f"{there}"
    )
    return "other operator", words


def _description_of_blamed(sides: Sides, blamed: Blamed) -> tuple[str, str]:
    if blamed.label is not None:
        return blamed.label, blamed.evidence
    if not blamed.is_operator:
        is_call = blamed.value.is_call
        return "wrong axis or layout" if is_call else "other values", blamed.evidence
    constants: tuple[str, ...] = ()
    if blamed.reference is not None:
        constants = _constants_apart(sides, blamed.reference.row, blamed.value.row)
    if constants:
        return "wrong constant", f"{'; '.join(constants)}: {blamed.evidence}"
    return "other operator", blamed.evidence


def _constants_apart(
    sides: Sides, reference: RecordedRow, candidate: RecordedRow
) -> tuple[str, ...]:
    """Return the constants that differ between two calls of one operator on one shape.

    In another layout axes and sizes are others too, and say nothing; nor does the other
    factor or term of a formula that is written in another way.
    """
    if reference.base_operator != candidate.base_operator:
        return ()
    if reference.base_operator in _MOVED | _PAIRED:
        return ()
    rows = sides.reference.step.rows
    other_rows = sides.candidate.step.rows
    ours = first_rows(rows).get(reference.call)
    theirs = first_rows(other_rows).get(candidate.call)
    if ours is None or theirs is None:
        return ()
    shape = shape_read_first(rows, ours)
    other_shape = shape_read_first(other_rows, theirs)
    if shape != other_shape:
        return ()
    return argument_differences(ours, theirs, (shape, other_shape))


def _names(row: RecordedRow) -> dict[str, Any]:
    return {
        "rank": row.rank,
        "step": row.step,
        "phase": row.phase,
        "place": row.place,
        "role": row.role,
        "name": row.name,
        "numel": row.numel,
        "view": row.view_of is not None,
        "call": row.call,
        "site": row.site,
        "operator": row.operator,
        "line": row.line,
        "dtype": row.dtype,
        "shape": row.shape,
        "record": row.record,
    }


def _names_of_reference(row: RecordedRow) -> dict[str, Any]:
    return {
        "reference_site": row.site,
        "reference_operator": row.operator,
        "reference_line": row.line,
        "reference_dtype": row.dtype,
        "reference_shape": row.shape,
        "reference_record": row.record,
    }
