"""Values that are parts of the reference's, where no whole value agrees.

Two programs may cut what they compute in different ways: one joins what the other has
apart, and takes other slices of it. Then no value of one is a value of the other, though
all elements are. A value is *contained* where each of its elements is an element of what
one operator of the reference computes there. What is wrong comes after the last contained
value.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from roundoff.compare.blame.blamed import Blamed
from roundoff.compare.records.value_sketch import in_reals
from roundoff.compare.tensors.nearest import to_nearest
from roundoff.compare.values.value_flow import Flow, Value
from roundoff.compare.values.value_regions import Part, Sides, first_of

#: That all elements are near others by chance must be less likely than this: of a
#: thousand values against a thousand, one in a thousand.
CHANCE = 1e-9
#: Where more of all numbers are near some element, that these are says nothing: then it
#: takes more than thirty of them for ``CHANCE``, each independent, and values are not.
MOST_BY_CHANCE = 0.5
#: How far beside a number others are looked for, in units of how near an element is: the
#: element that is near it is near none that is more than twice as far away.
SHIFTS = (-6.0, -3.0, 3.0, 6.0)
#: No more elements than this are looked for.
MOST_ELEMENTS = 1 << 22


def blamed_after_contained(sides: Sides, part: Part) -> Blamed | None:
    """Return the first call that makes of contained values what the reference has nowhere.

    None where the place is known better, where no value is contained, and without tensors.
    """
    if part.reference is None or not math.isinf(part.distance):
        return None
    return after_contained(sides, part.region, part.expected, part.reference)


def after_contained(
    sides: Sides, region: Collection[int], expected: Collection[int], twin: Value
) -> Blamed | None:
    """Return the first call of a region that makes of contained values what is not.

    Args:
        sides: both programs.
        region: of the candidate, where the two part.
        expected: of the reference.
        twin: what the region should make.
    """
    pools = list(_pools(sides, expected))
    contained = {
        value.key: pool
        for value in _numbers(sides.candidate, region)
        for pool in pools
        if pool.contains(sides.candidate.tensor(value.key))
    }
    if not contained:
        return None
    lost = {*region} - _leading_to(sides.candidate, region, set(contained))
    for value in first_of(sides.candidate, lost):
        read = [pool for key, pool in contained.items() if key in value.inputs]
        if read:
            held = read[0].values[0]
            words = (
                f"what it reads is in {held.operator} of {held.row.site} "
                f"({held.row.line}); the reference has nowhere what it gives"
            )
            return Blamed(value, twin, words, is_operator=True, is_sure=False)
    return None


@dataclass(frozen=True, slots=True, eq=False)
class _Pool:
    """The elements of all that an operator of the reference computes in a region, rising.

    Attributes:
        values: whose elements.
        elements: in fp64, without NaN.
        limit: how near an element is, relative to the largest of what is looked for.
    """

    values: tuple[Value, ...]
    elements: Tensor
    limit: float

    def contains(self, held: Tensor | None) -> bool:
        """Return True where each element of a tensor is near one of these, not by chance."""
        if held is None or not 0 < held.numel() <= len(self.elements):
            return False
        wanted = torch.unique(in_reals(held.detach()).double())
        if not bool(wanted.isfinite().all()):
            return False
        near = self.limit * float(wanted.abs().max())
        if not bool((to_nearest(self.elements, wanted) <= near).all()):
            return False
        # beside each of them another number would be as near to some element, so often
        beside = torch.cat([wanted + shift * near for shift in SHIFTS])
        share = float((to_nearest(self.elements, beside) <= near).double().mean())
        by_chance = max(share, 1 / len(self.elements))
        return by_chance <= MOST_BY_CHANCE and by_chance ** len(wanted) <= CHANCE


def _pools(sides: Sides, expected: Collection[int]) -> Iterator[_Pool]:
    """Yield the elements of each operator of the reference that leads to its results."""
    flow = sides.reference
    by_operator: dict[str, list[Value]] = {}
    for value in _numbers(flow, expected):
        by_operator.setdefault(value.operator, []).append(value)
    for values in by_operator.values():
        held = [flow.tensor(value.key) for value in values]
        elements = _joined([tensor for tensor in held if tensor is not None])
        if 1 < len(elements) <= MOST_ELEMENTS:
            yield _Pool(tuple(values), elements, sides.limit)


def _joined(tensors: Sequence[Tensor]) -> Tensor:
    """Return all elements that are finite, in fp64, rising."""
    if not tensors:
        return torch.empty(0, dtype=torch.float64)
    joined = torch.cat([in_reals(t.detach()).double().reshape(-1) for t in tensors])
    return joined[joined.isfinite()].sort().values


def _numbers(flow: Flow, region: Collection[int]) -> list[Value]:
    """Return the numbers that a region computes, in order."""
    values = [flow.values[key] for key in region]
    values = [v for v in values if v.computes and v.is_number and not v.says_nothing]
    return sorted(values, key=lambda value: value.order)


def _leading_to(flow: Flow, region: Collection[int], ends: set[int]) -> set[int]:
    """Return the ends and all of a region that leads to one."""
    leading: set[int] = set()
    waiting = list(ends)
    while waiting:
        key = waiting.pop()
        if key in region and key not in leading:
            leading.add(key)
            waiting += flow.values[key].inputs
    return leading
