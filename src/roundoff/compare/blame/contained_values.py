"""Values that are parts of the reference's, where no whole value agrees.

Two programs may cut what they compute in different ways: one joins what the other has
apart, and takes other slices of it. Then no value of one is a value of the other, though
all elements are. A value is *contained* where each of its elements is an element of what
one operator of the reference computes there. What is wrong comes after the last contained
value.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from roundoff.compare.blame.blamed import Blamed
from roundoff.compare.records.value_sketch import in_reals
from roundoff.compare.values.value_flow import Flow, Value
from roundoff.compare.values.value_regions import Part, Sides, first_of

#: That all elements are near others by chance must be less likely than this: of a
#: thousand values against a thousand, one in a thousand.
CHANCE = 1e-9
#: No more elements than this are looked for.
MOST_ELEMENTS = 1 << 22


def blamed_after_contained(sides: Sides, part: Part) -> Blamed | None:
    """Return the first call that makes of contained values what the reference has nowhere.

    None where the place is known better, where no value is contained, and without tensors.
    """
    if part.reference is None or not math.isinf(part.distance):
        return None
    pools = list(_pools(sides, part))
    contained = {
        value.key: pool
        for value in _numbers(sides.candidate, part.region)
        for pool in pools
        if pool.contains(sides.candidate.tensor(value.key))
    }
    if not contained:
        return None
    lost = part.region - _leading_to(sides.candidate, part.region, set(contained))
    for value in first_of(sides.candidate, set(lost)):
        read = [pool for key, pool in contained.items() if key in value.inputs]
        if read:
            twin = read[0].values[0]
            words = (
                f"what it reads is in {twin.operator} of {twin.row.site} "
                f"({twin.row.line}); the reference has nowhere what it gives"
            )
            return Blamed(value, part.reference, words, is_operator=True, is_sure=False)
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
        if not bool((_to_nearest(self.elements, wanted) <= near).all()):
            return False
        # of elements like these, so many have another one as near; of n none shows less
        # than one in n
        gaps = self.elements.diff()
        ends = gaps.new_full((1,), math.inf)
        apart = torch.minimum(torch.cat([ends, gaps]), torch.cat([gaps, ends]))
        share = float((apart <= near).double().mean())
        by_chance = max(share, 1 / len(self.elements))
        return by_chance ** len(wanted) <= CHANCE


def _to_nearest(rising: Tensor, wanted: Tensor) -> Tensor:
    """Return how far each wanted element is from the nearest of ``rising``."""
    after = torch.searchsorted(rising, wanted).clamp(max=len(rising) - 1)
    before = (after - 1).clamp(min=0)
    return torch.minimum(
        (rising[after] - wanted).abs(), (rising[before] - wanted).abs()
    )


def _pools(sides: Sides, part: Part) -> Iterator[_Pool]:
    """Yield the elements of each operator of the reference that leads to its results."""
    flow = sides.reference
    by_operator: dict[str, list[Value]] = {}
    for value in _numbers(flow, part.expected):
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


def _numbers(flow: Flow, region: frozenset[int]) -> list[Value]:
    """Return the numbers that a region computes, in order."""
    values = [flow.values[key] for key in region]
    values = [v for v in values if v.computes and v.is_number and not v.says_nothing]
    return sorted(values, key=lambda value: value.order)


def _leading_to(flow: Flow, region: frozenset[int], ends: set[int]) -> set[int]:
    """Return the ends and all of a region that leads to one."""
    leading: set[int] = set()
    waiting = list(ends)
    while waiting:
        key = waiting.pop()
        if key in region and key not in leading:
            leading.add(key)
            waiting += flow.values[key].inputs
    return leading
