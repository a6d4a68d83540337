"""What has to agree for a trial to be right, and how far values are apart."""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping, Sequence
from collections.abc import Set as AbstractSet
from dataclasses import dataclass, field
from itertools import chain

import torch
from torch import Tensor

from roundoff.compare.records.value_sketch import (
    MASK,
    Sketch,
    SketchIndex,
    in_reals,
    sketch_of_tensor,
)
from roundoff.compare.values.padded_rows import kept_rows

#: A result that was put right is this many times nearer than before.
CLEARLY = 8.0
#: The least size that a distance is relative to.
TINY = 1e-30
#: Fewer values that an edit gives may be chance, or that edit itself.
SEVERAL = 2
#: Values of fewer elements agree by chance.
FEWEST = 16
#: A result of so few elements that nothing else confirms has to be as near as this: it is
#: made of the last wide value in a few roundings, and one of hundreds of trials may come
#: near to it by chance.
CLOSE = 2.0**-20
#: Values that the reference may compute of what a model gives, for a loss: its formula may
#: be written out in operators of which none gives any of them.
MOST_IN_LOSS = 8
#: For results of the candidate the sketches, any of which they should have, and how far
#: they may be from it.
Ends = Mapping[int, Sequence[tuple[Sketch, float]]]


@dataclass(slots=True)
class Goal:
    """What has to agree.

    Attributes:
        lost: the reference's values that the candidate lacks.
        first: the first of them.
        limit: how far values that agree may be apart.
        ends: the results of the candidate.
        needed: those without which nothing is right. Of the others each may be another
            value of the same formula, which no repair makes equal: where one is not,
            lost values that are there now speak for it.
        held: what results are to be element by element, where that is known.
        kept: where elements of a result count, if not all do.
        padding: masks of places that count for something: see ``padded_rows``.
        is_trusting: a result of few elements agrees by no chance.
        is_far: the results are few numbers, more than a loss behind the first of what was
            lost: one of thousands of trials gives the same numbers by chance. One that is
            right gives some of what was lost before too.
    """

    lost: SketchIndex
    first: int | None
    limit: float
    ends: Ends
    needed: frozenset[int] = frozenset()
    held: Mapping[int, Tensor] = field(default_factory=dict)
    kept: Mapping[int, Tensor] = field(default_factory=dict)
    padding: Sequence[Tensor] = ()
    is_trusting: bool = False
    is_far: bool = False

    def is_reached(
        self, right: Collection[int], sure: AbstractSet[int], gained: Collection[int]
    ) -> bool:
        """Return True where these results are right, and that is enough.

        ``sure``: those that are so by no chance.
        """
        if not right or not self.needed.issubset(right):
            return False
        is_enough = self.is_trusting or len(gained) >= SEVERAL
        is_sure = bool(self.needed) and self.needed <= sure
        return len(right) == len(self.ends) or is_enough or is_sure

    def gains(self, tensor: Tensor) -> list[int]:
        """Return the reference's values that a new value is, or is but for its padding."""
        tensor = in_reals(tensor)
        kept = (rows for mask in self.padding for rows in kept_rows(tensor, mask))
        for each in chain([tensor], kept):
            gained = self._gained(each)
            if gained:
                return gained
        return []

    def _gained(self, tensor: Tensor) -> list[int]:
        if not tensor.is_floating_point() or tensor.numel() < FEWEST:
            return []
        if not self.lost.may_have(tensor, self.limit):
            return []
        sketch = sketch_of_tensor(tensor)
        if sketch is None or sketch.constant:
            return []
        return [key for _, key in self.lost.near(sketch, self.limit)[:1]]

    def is_right_end(self, record: int, tensor: Tensor, factor: float = 1.0) -> bool:
        """Return True for a result that agrees, up to ``factor`` times what is allowed."""
        if record not in self.ends:
            return False
        kept = self.kept.get(record)
        if kept is not None and kept.shape == tensor.shape:
            tensor = tensor[kept]
        if record in self.held:
            [(_, limit)] = self.ends[record]
            return apart(self.held[record], tensor) <= factor * limit
        sketch = sketch_of_tensor(tensor)
        if sketch is None:
            return False
        return any(
            wanted.distance(sketch) <= factor * limit
            for wanted, limit in self.ends[record]
        )

    def is_sure_end(self, record: int, tensor: Tensor) -> bool:
        """Return True for a result that agrees not by chance."""
        if record not in self.ends or record in self.held or self.is_trusting:
            return self.is_right_end(record, tensor)
        largest = max(limit for _, limit in self.ends[record])
        is_few = tensor.numel() < FEWEST and largest > CLOSE
        return self.is_right_end(record, tensor, CLOSE / largest if is_few else 1.0)


def apart(wanted: Tensor, tensor: Tensor) -> float:
    """Return how far two tensors are apart element by element, relative to the first."""
    if wanted.shape != tensor.shape:
        return math.inf
    # what stands for "never" is no number to compare
    seen = in_reals(wanted).to(torch.float64).clamp(-MASK, MASK)
    present = in_reals(tensor).to(torch.float64).clamp(-MASK, MASK)
    if present.shape != seen.shape:
        return math.inf
    apart = present - seen
    return float(apart.norm()) / max(float(seen.norm()), TINY)
