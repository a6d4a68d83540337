"""In which orders may one parameter hold several of the reference's?

Queries, keys and values are packed into one weight by parts, by heads, or by both: the
axes of parts, heads and elements of a head may stand in any order. What reads it says
which is meant, and not which is there: each is tried.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import combinations, permutations

import torch
from torch import Tensor

from roundoff.compare.records.value_sketch import in_reals, rising
from roundoff.compare.values.value_flow import Value
from roundoff.compare.values.value_regions import Sides

#: How many parts a packed parameter may have: key and value, with query, four gates.
PARTS = (2, 3, 4)
#: Elements that are looked for before all are compared.
SEEN = 8


@dataclass(frozen=True, slots=True)
class Packing:
    """The order of the parts, how many heads, and the order of the axes of parts, heads and
    elements."""

    order: tuple[int, ...]
    heads: int
    axes: tuple[int, int, int]

    def packed(self, parts: Sequence[Tensor]) -> Tensor:
        """Return parts of shape (rows, ...) in one tensor, by rows."""
        stacked = torch.stack([parts[place] for place in self.order])
        count, rows, *rest = stacked.shape
        split = stacked.reshape(count, self.heads, rows // self.heads, *rest)
        moved = split.permute(*self.axes, *range(3, split.dim()))
        return moved.reshape(count * rows, *rest)

    @property
    def words(self) -> str:
        """The order of the axes, in words."""
        names = ("parts", "heads", "elements")
        axes = ", ".join(names[axis] for axis in self.axes)
        order = ", ".join(map(str, self.order))
        return f"({axes}) with {self.heads} heads and parts in the order {order}"


def packings(count: int, rows: int) -> Iterator[Packing]:
    """Yield each way to pack so many parts of so many rows, parts in their order first.

    >>> [each.axes for each in packings(2, 3)][:2]
    [(0, 1, 2), (1, 2, 0)]
    """
    heads = [number for number in range(1, rows) if not rows % number]
    for order in permutations(range(count)):
        for number in heads:
            all_axes = permutations(range(3))
            for axes in all_axes if number > 1 else ((0, 1, 2), (1, 2, 0)):
                yield Packing(order, number, (axes[0], axes[1], axes[2]))


def parts_of(
    sides: Sides, held: Tensor, ours: Sequence[Value]
) -> Iterator[tuple[list[Value], list[Tensor]]]:
    """Yield the reference's parameters that one of the candidate holds, and its parts.

    Several of one shape, or one that is packed there too.
    """
    contents = [(leaf, sides.reference.tensor(leaf.key)) for leaf in ours]
    present = [
        (leaf, tensor)
        for leaf, tensor in contents
        if tensor is not None and _is_in(tensor, held)
    ]
    for count in PARTS:
        for leaf, whole in present:
            if whole.dim() and not whole.shape[0] % count and _are_one([whole], held):
                yield [leaf], list(whole.chunk(count))
        for group in combinations(present, count):
            parts = [tensor for _, tensor in group]
            if len({part.shape for part in parts}) == 1 and _are_one(parts, held):
                yield [leaf for leaf, _ in group], parts


def _is_in(part: Tensor, held: Tensor) -> bool:
    """Return True where a tensor has the elements of a smaller one."""
    is_smaller = bool(part.dim()) and part.numel() <= held.numel()
    if not is_smaller or part.dtype != held.dtype:
        return False
    return bool(torch.isin(in_reals(part), in_reals(held)).all())


def _are_one(parts: Sequence[Tensor], held: Tensor) -> bool:
    """Return True where a tensor has the elements of several."""
    if sum(part.numel() for part in parts) != held.numel():
        return False
    together = torch.cat([part.reshape(-1) for part in parts])
    return torch.equal(together[rising(together)], held.reshape(-1)[rising(held)])


def laid_out_as(packed: Tensor, held: Tensor) -> Iterator[Tensor]:
    """Yield a packed tensor in the shape of another, by rows or by columns."""
    if packed.dim() < 2 or held.shape[-1] == packed.shape[-1]:
        yield packed.reshape(held.shape)
    if packed.dim() == 2 and held.shape[0] == packed.shape[1]:
        yield packed.mT.reshape(held.shape).contiguous()
