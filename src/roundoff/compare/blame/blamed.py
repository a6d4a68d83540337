"""What is said to be at fault, and in which words."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from roundoff.compare.values.value_flow import Value


@dataclass(frozen=True, slots=True)
class Blamed:
    """What is at fault where two programs part.

    Attributes:
        value: the candidate's parameter, or the value in the wrong layout.
        reference: what it should be.
        evidence: in words.
        other: what a parameter would have to hold, where that was tried.
        is_operator: True for an operator that computes something else.
        line: the line at fault, where it is known and may not be the operator's own.
        label: what it looks like, where that is known.
        is_sure: False where nothing was found that makes the value right: it is the first
            that may be wrong.
    """

    value: Value
    reference: Value | None
    evidence: str
    other: Tensor | None = None
    is_operator: bool = False
    line: str | None = None
    label: str | None = None
    is_sure: bool = True
