"""Has a loader filled two parameters, or two parts of one, the wrong way round?

Keys and values, gates and ways up: what holds one may hold the other, and neither alone
makes anything right. So two are exchanged together, and what is made of them runs again.
Several that together hold one of the reference's may have been cut out of it otherwise,
every third row for a third of the rows, and are cut again.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import chain, combinations, permutations, product

import torch
from torch import Tensor

from roundoff.compare.blamed_leaves import Blamed, leaves_of, turned
from roundoff.compare.recorded_calls import CannotRun
from roundoff.compare.repair_trials import BUDGET, Region, Trials
from roundoff.compare.transplants import before
from roundoff.compare.value_flow import Flow, Value
from roundoff.compare.value_regions import Sides
from roundoff.compare.value_sketch import sketch_of_tensor

#: Parameters of a region of which pairs are tried.
MOST_LEAVES = 12
#: How many parts a fused parameter may have: key and value, with query, four gates.
PARTS = (2, 3, 4)


@dataclass(frozen=True, slots=True)
class _Exchange:
    leaf: Value
    tensors: Mapping[int, Tensor]
    words: str


def exchanged_leaves(sides: Sides, trials: Trials, region: Region) -> Blamed | None:
    """Return a parameter after whose exchange all agrees; None where none is exchanged.

    Args:
        sides: both programs.
        trials: of the candidate.
        region: where the two part.
    """
    trials.left = BUDGET
    leaves = _read_near(sides.candidate, region.parted)
    ours = _read_near(sides.reference, region.expected)
    exchanges = chain(_exchanges(sides, leaves), _cuts(sides, ours, leaves))
    for exchange in exchanges:
        if trials.left < 0:
            return None
        agrees = trials.outcome({}, exchange.tensors)[0]
        if agrees and not _loses(sides, trials, exchange.tensors):
            other = exchange.tensors[exchange.leaf.key]
            return Blamed(exchange.leaf, None, exchange.words, other)
    return None


def _loses(sides: Sides, trials: Trials, tensors: Mapping[int, Tensor]) -> bool:
    """Return True where a value of the reference is not there any more with other leaves.

    What one place gains another must not lose: then not the parameter is wrong, but what
    one of the two reads.
    """
    had: set[int] = set()
    has: set[int] = set()
    try:
        for row, tensor in trials.program.again({}, tensors):
            value = sides.candidate.values[row.record]
            sketch = sketch_of_tensor(tensor)
            if value.is_number and not value.says_nothing and sketch is not None:
                had.update(sides.all_twins(value))
                has.update(sides.near_in_reference(sketch))
    except CannotRun:
        return True
    return not had <= has


def _read_near(flow: Flow, region: Collection[int]) -> list[Value]:
    """Return the parameters that a region reads, and what it is made of.

    Parts that were cut otherwise agree as long as they are taken together.
    """
    source = [value.key for value in before(flow, region) if value.is_call]
    return leaves_of(flow, sorted({*region, *source}))[:MOST_LEAVES]


def _exchanges(sides: Sides, leaves: Sequence[Value]) -> Iterator[_Exchange]:
    held = {leaf.key: sides.candidate.tensor(leaf.key) for leaf in leaves}
    for one, other in combinations(leaves, 2):
        first, second = held[one.key], held[other.key]
        if first is None or second is None or first.shape != second.shape:
            continue
        if first.dtype == second.dtype and not torch.equal(first, second):
            tensors = {one.key: second, other.key: first}
            words = f"{one.row.name} and {other.row.name} stand in for each other"
            yield _Exchange(one, tensors, words)
    for leaf in leaves:
        tensor = held[leaf.key]
        if tensor is not None:
            yield from _of_parts(leaf, tensor)


def _of_parts(leaf: Value, tensor: Tensor) -> Iterator[_Exchange]:
    """Yield one parameter with two of its equal parts exchanged."""
    for axis, size in enumerate(tensor.shape):
        for count in PARTS:
            if size % count or size == count:
                continue
            for one, other in combinations(range(count), 2):
                parts = list(tensor.chunk(count, axis))
                parts[one], parts[other] = parts[other], parts[one]
                turned = torch.cat(parts, axis)
                if torch.equal(turned, tensor):
                    continue
                words = (
                    f"parts {one + 1} and {other + 1} of {count} along axis {axis} of "
                    f"{leaf.row.name} stand in for each other"
                )
                yield _Exchange(leaf, {leaf.key: turned}, words)


def _cuts(
    sides: Sides, ours: Sequence[Value], theirs: Sequence[Value]
) -> Iterator[_Exchange]:
    """Yield several parameters that hold the elements of one, as parts of it.

    Weights alone, and weights with biases that were cut in the same way.
    """
    cuts = list(_cuts_of_one(sides, ours, theirs))
    for choices in cuts:
        yield from choices
    for choices, others in combinations(cuts, 2):
        for one, other in product(choices, others):
            tensors = {**one.tensors, **other.tensors}
            yield _Exchange(one.leaf, tensors, one.words)


def _cuts_of_one(
    sides: Sides, ours: Sequence[Value], theirs: Sequence[Value]
) -> Iterator[list[_Exchange]]:
    """Yield the ways to cut each of the reference's parameters that was cut otherwise."""
    for wanted in ours:
        whole = sides.reference.tensor(wanted.key)
        if whole is None:
            continue
        for count in PARTS:
            for group in combinations(theirs, count):
                held = [sides.candidate.tensor(leaf.key) for leaf in group]
                present = [tensor for tensor in held if tensor is not None]
                if len(present) == count and _have_the_elements(present, whole):
                    yield list(_cut_again(group, present, wanted, whole))


def _have_the_elements(parts: Sequence[Tensor], whole: Tensor) -> bool:
    if len({part.shape for part in parts}) > 1:
        return False
    if sum(part.numel() for part in parts) != whole.numel():
        return False
    if any(part.dtype != whole.dtype for part in parts):
        return False
    together = torch.cat([part.reshape(-1) for part in parts])
    return torch.equal(together.sort().values, whole.reshape(-1).sort().values)


def _cut_again(
    group: Sequence[Value], held: Sequence[Tensor], wanted: Value, whole: Tensor
) -> Iterator[_Exchange]:
    """Yield the equal parts of a tensor along each axis, in each order."""
    names = ", ".join(leaf.row.name or "" for leaf in group)
    words = f"{names} are cut out of the reference's {wanted.row.name} in another way"
    for axis in range(whole.dim()):
        if whole.shape[axis] % len(group):
            continue
        parts = [list(turned(p, held[0])) for p in whole.chunk(len(group), axis)]
        for layouts in zip(*parts, strict=True):
            for order in permutations(layouts):
                tensors = {
                    leaf.key: part.contiguous()
                    for leaf, part in zip(group, order, strict=True)
                }
                yield _Exchange(group[0], tensors, words)
