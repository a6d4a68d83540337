"""What a later step reads that a step has made: it counts as a result of the step.

The answers of a frozen model that are computed once for all samples are read by parts, a
batch at a time. In the first step the parts that it reads may agree, and others not.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Self

from roundoff.compare.judging.table import ComparedRow
from roundoff.compare.pairing.alignment import MATCHED
from roundoff.compare.records.recorded_rows import Content, RecordedRow, Rows
from roundoff.compare.rounding.distance import of_statistics
from roundoff.compare.rounding.rounding_bound import REGION, unit

_BACKWARD = "backward"


@dataclass(frozen=True, slots=True)
class ReadLater:
    """What the next step of both runs reads that is no parameter, and that it did not make.

    Attributes:
        ours: contents of the reference's.
        theirs: of the candidate's.
    """

    ours: frozenset[Content]
    theirs: frozenset[Content]

    @classmethod
    def of(cls, later: tuple[Rows, Rows] | None) -> Self:
        """Return what these steps read; nothing where there are none."""
        if later is None:
            return cls(frozenset(), frozenset())
        ours, theirs = later
        return cls(_read_from_before(ours), _read_from_before(theirs))

    def has(self, twin: RecordedRow, row: RecordedRow) -> bool:
        """Return True for what both made outside of a backward pass, and read later.

        Values that are all alike may be others.
        """
        are_calls = twin.is_call and row.is_call and row.phase != _BACKWARD
        return (
            are_calls
            and row.min != row.max
            and twin.content_in_steps in self.ours
            and row.content_in_steps in self.theirs
        )

    def differs(
        self, reference: Rows, candidate: Rows, rows: Sequence[ComparedRow]
    ) -> bool:
        """Return True where both read later what the same call made otherwise.

        Not where the reference reads later what the candidate's made, of another call: an
        optimizer by hand may keep less, which names alone do not tell apart.

        Args:
            reference: the reference's rows of the step.
            candidate: the candidate's.
            rows: of their comparison by name.
        """
        kept = [r for r in reference.values() if r.content_in_steps in self.ours]
        apart = (
            candidate[row.record or 0]
            for row in rows
            if (row.error or 0.0) > REGION * unit(row.dtype)
            and row.status == MATCHED
            and self.has(
                reference[row.reference_record or 0], candidate[row.record or 0]
            )
        )
        return any(not any(_are_alike(twin, row) for twin in kept) for row in apart)


def _are_alike(twin: RecordedRow, row: RecordedRow) -> bool:
    """Return True for values of one shape with the same statistics, up to rounding."""
    if twin.shape != row.shape or not twin.is_call:
        return False
    error = of_statistics(twin, row).error
    return error is not None and error <= REGION * unit(row.dtype)


def _read_from_before(rows: Rows) -> frozenset[Content]:
    return frozenset(
        row.content_in_steps
        for row in rows.values()
        if not row.is_call and not row.name
    )
