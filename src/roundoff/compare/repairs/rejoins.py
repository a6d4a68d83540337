"""Values that are given what the reference has in their place, and what agrees after."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from torch import Tensor

from roundoff.compare.values.value_flow import Value

#: Values of the candidate, each with the reference's that it is given.
Pairs = Sequence[tuple[Value, Value]]


@dataclass(frozen=True, slots=True)
class Rejoin:
    """A value after which the candidate is right.

    Attributes:
        value: the candidate's.
        twin: what the reference has there.
        held: the same in the candidate's layout.
        region: the candidate's keys that it is made of and that do not agree.
        expected: the reference's.
        agrees: True where all results are right after it.
        in_any_order: True where they are so with its elements in other places too, as
            where all are added up.
    """

    value: Value
    twin: Value
    held: Tensor
    region: frozenset[int]
    expected: frozenset[int]
    agrees: bool = True
    in_any_order: bool = False


@dataclass(frozen=True, slots=True)
class Transplant:
    """What values of one place of a line are given: ``tensors`` by record.

    ``is_in_parts``: parts of the reference's values, of which nothing is there again until
    the candidate puts them together; or ``turns`` of the reference put together.
    """

    value: Value
    twin: Value
    tensors: Mapping[int, Tensor]
    is_in_parts: bool = False
    turns: Sequence[Value] = ()
