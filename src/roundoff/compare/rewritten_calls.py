"""A layer that is written anew in a program that is the same elsewhere.

Most calls have counterparts by module and operator, and where they differ that says it. A
layer that was ported has parameters of other names and layouts, and other operators: there
a comparison by values, as of two programs by different hands, names what is wrong.
"""

from __future__ import annotations

from collections.abc import Sequence

from roundoff.compare.alignment import CANDIDATE_ONLY, MATCHED
from roundoff.compare.explain import EarlierSteps, Sides
from roundoff.compare.findings import OWN
from roundoff.compare.port_comparison import compare_port
from roundoff.compare.recorded_rows import Rows
from roundoff.compare.rounding_bound import unit
from roundoff.compare.table import ComparedRow

_FORWARD = "forward"


def compared_by_values(
    sides: Sides, rows: Sequence[ComparedRow]
) -> list[ComparedRow] | None:
    """Return the rows of a step by what they compute, where that names what is wrong.

    None where the first fault is at a call that the reference writes alike, where tensors
    are missing, and where nothing is named.

    Args:
        sides: the first step in which the programs differ, or one in which they seem
            to agree.
        rows: of it, by name.
    """
    if sides.reference.tensors is None or sides.candidate.tensors is None:
        return None
    if not _is_rewritten(sides, rows):
        return None
    by_values = compare_port(sides, EarlierSteps())
    return by_values if any(row.cause == OWN for row in by_values) else None


def _is_rewritten(sides: Sides, rows: Sequence[ComparedRow]) -> bool:
    """Return True where the first fault is at a call that the reference writes otherwise.

    Its counterpart was chosen by what reads it. True too where the result of the forward
    pass has no counterpart: then nothing that was compared says that it is right.
    """
    first = next((row for row in rows if row.cause == OWN), None)
    if first is None:
        return _lacks_results(sides.candidate.rows, rows)
    is_call = first.call is not None and first.call >= 0
    return is_call and first.phase == _FORWARD and first.status != MATCHED


def _lacks_results(candidate: Rows, rows: Sequence[ComparedRow]) -> bool:
    """Return True where a result of the candidate's forward pass has no counterpart."""
    read = {record for row in candidate.values() for record in row.inputs}
    alone = [row for row in rows if row.status == CANDIDATE_ONLY]
    return any(
        row.record not in read and row.phase == _FORWARD and unit(row.dtype)
        for row in alone
    )
