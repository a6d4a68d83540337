"""Is a value there in the reference, or in a turn of what the reference does at once?"""

from __future__ import annotations

import torch
from torch import Tensor

from roundoff.compare.records.value_sketch import in_reals
from roundoff.compare.values.value_flow import Value
from roundoff.compare.values.value_regions import Sides

#: A turn of what the reference does at once has at least so many elements: all of eight
#: within a limit of 2**-14 of some turn's are not there by chance, of two or three may be.
FEWEST_IN_TURN = 8
#: Of larger values only the turns that lie one after the other are looked at.
MOST_SORTED = 10**6


def is_in_reference(sides: Sides, tensor: Tensor) -> bool:
    """Return True where the reference has such a value, and the candidate had none."""
    return any(
        key not in sides.agreeing and not sides.reference.values[key].says_nothing
        for key in sides.near_in_reference(tensor)
    )


class Turns:
    """The turns of a loop, such as single samples, of what the reference does at once."""

    def __init__(self, sides: Sides, whole: Value) -> None:
        self._limit = sides.limit
        held = sides.reference.tensor(whole.key)
        self._whole = None if held is None else in_reals(held.detach())
        #: By their elements: the turns, sorted, and the norm of each.
        self._sorted: dict[int, tuple[Tensor, Tensor]] = {}

    def have(self, tensor: Tensor) -> bool:
        """Return True where one of them has these elements, in any layout."""
        values = in_reals(tensor)
        numel = values.numel()
        if self._whole is None or numel < FEWEST_IN_TURN or self._whole.numel() % numel:
            return False
        present = values.reshape(-1).to(torch.float64)
        size = present.norm()
        if not size:
            return False
        if numel not in self._sorted:
            turns = _sorted_turns(self._whole, numel)
            self._sorted[numel] = turns, torch.linalg.vector_norm(turns, dim=1)
        turns, sizes = self._sorted[numel]
        turns = turns[(sizes - size).abs() <= self._limit * size]
        if not len(turns):
            return False
        apart = torch.linalg.vector_norm(turns - present.sort().values, dim=1)
        return bool((apart <= self._limit * size).any())


def _sorted_turns(whole: Tensor, numel: int) -> Tensor:
    """Return the elements of each turn of ``numel``, sorted: along any axis, or a part of one.

    Of all turns, (turns, numel): those of a batch may be taken first or last in it.
    """
    values = whole.to(torch.float64)
    count = values.numel() // numel
    turns = [values.reshape(count, -1)]
    is_small = values.numel() <= MOST_SORTED
    for axis, size in enumerate(values.shape if is_small else ()):
        if size % count == 0:
            before, after = values.shape[:axis], values.shape[axis + 1 :]
            first = values.reshape(*before, count, size // count, *after)
            last = values.reshape(*before, size // count, count, *after)
            turns += [first.movedim(axis, 0), last.movedim(axis + 1, 0)]
    return torch.cat([each.reshape(count, -1).sort(dim=1).values for each in turns])
