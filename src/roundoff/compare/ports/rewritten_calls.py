"""A layer that is written anew in a program that is the same elsewhere.

Most calls have counterparts by module and operator, and where they differ that says it. A
layer that was ported has parameters of other names and layouts, and other operators: there
a comparison by values, as of two programs by different hands, names what is wrong.
"""

from __future__ import annotations

from collections.abc import Sequence

from roundoff.compare.judging.explain import Sides
from roundoff.compare.judging.table import ComparedRow
from roundoff.compare.pairing.alignment import CANDIDATE_ONLY, MATCHED
from roundoff.compare.ports.port_comparison import explained_by_values
from roundoff.compare.records.recorded_rows import Rows
from roundoff.compare.rounding.findings import OWN
from roundoff.compare.rounding.rounding_bound import unit

_FORWARD = "forward"
#: What a call looks like of which names say nothing but that it is another one.
_UNTOLD = frozenset(("other operator", "extra operator", "missing operator", "noise"))


def compared_by_values(
    sides: Sides, rows: Sequence[ComparedRow]
) -> list[ComparedRow] | None:
    """Return the rows of a step by what they compute, where that names what is wrong.

    None where the first fault is at a call that the reference writes alike or of which
    it is known what is wrong, where tensors are missing, and where nothing is named.
    Counterparts of calls that are written otherwise were chosen by what reads them.

    Args:
        sides: the first step in which the programs differ, or one in which they seem
            to agree.
        rows: of it, by name.
    """
    if sides.reference.tensors is None or sides.candidate.tensors is None:
        return None
    first = next((row for row in rows if row.cause == OWN), None)
    if first is None:
        # then nothing that was compared says that the result is right
        if not _lacks_results(sides.candidate.rows, rows):
            return None
        return explained_by_values(sides, suspect=None)
    is_forward_call = (first.call or 0) >= 0 and first.phase == _FORWARD
    if _is_told(first) or not is_forward_call:
        return None
    return explained_by_values(sides, suspect=first.record)


def _is_told(row: ComparedRow) -> bool:
    """Return True where names say what is wrong: the call is written alike, or is a known mistake.

    A counterpart that was chosen by its use says what should be there, and not which of
    the calls before it is wrong.
    """
    if row.status != MATCHED:
        return False
    return row.shape == row.reference_shape or row.looks_like not in _UNTOLD


def _lacks_results(candidate: Rows, rows: Sequence[ComparedRow]) -> bool:
    """Return True where a result of the candidate's forward pass has no counterpart."""
    read = {record for row in candidate.values() for record in row.inputs}
    alone = [row for row in rows if row.status == CANDIDATE_ONLY]
    return any(
        row.record not in read and row.phase == _FORWARD and unit(row.dtype)
        for row in alone
    )
