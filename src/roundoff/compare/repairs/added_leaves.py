"""A parameter that a port holds alone, to which the reference adds another one.

A recurrent layer of one library has a bias for its input and one for its state, that of
another has their sum, or both in one. A loader that leaves one out leaves no value that is
the reference's.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch
from torch import Tensor

from roundoff.compare.records.parameter_names import module_of, name_in_module
from roundoff.compare.repairs.leaf_changes import Held, LeafChange
from roundoff.compare.repairs.other_layers import read_alike
from roundoff.compare.repairs.packed_leaves import PARTS
from roundoff.compare.values.value_flow import Flow, Value
from roundoff.compare.values.value_regions import Sides

#: A constant of up to 128 times the spread of a part, added and taken away in fp32: two
#: roundings of 2**-24 of it.
APART = 2 * 128 * 2.0**-24


def with_what_is_added(sides: Sides, present: Sequence[Held]) -> Iterator[LeafChange]:
    """Yield vectors with another one of the reference's module added: alone, then all that
    one line reads.

    Args:
        sides: both programs.
        present: the parameters that a wrong region reads.
    """
    ours = _vectors(sides)
    seen: set[int] = set()
    for leaf, tensor in present:
        for change in _sums(sides, ours, leaf, tensor):
            yield change
            if leaf.key not in seen:
                alike = read_alike(sides.candidate, leaf)
                seen.update(each.key for each in alike)
                yield from _of_all(sides, ours, alike, change.words)


def with_zeros_filled(sides: Sides, present: Sequence[Held]) -> Iterator[LeafChange]:
    """Yield stacked vectors with another one of the reference's module where they are zero.

    Alone, then all of the candidate's such.

    Args:
        sides: both programs.
        present: the parameters that a wrong region reads.
    """
    ours = _vectors(sides)
    filled: dict[int, Tensor] = {}
    words = ""
    for leaf, tensor in _stacks(sides.candidate):
        change = next(_filled(sides, ours, leaf, tensor), None)
        if change is not None:
            filled |= change.tensors
            words = words or change.words
            if any(leaf.key == near.key for near, _ in present):
                yield change
    if len(filled) > 1:
        yield LeafChange(filled, words)


def _stacks(flow: Flow) -> Iterator[Held]:
    """Yield the parameters that are several vectors, of which some are zero."""
    for leaf in flow.in_order():
        tensor = flow.tensor(leaf.key) if leaf.row.name and not leaf.is_call else None
        if tensor is None or tensor.dim() != 2 or not tensor.is_floating_point():
            continue
        are_zero = (tensor == 0).all(1)
        if are_zero.any() and not are_zero.all():
            yield leaf, tensor


def _filled(
    sides: Sides, ours: Sequence[Held], leaf: Value, tensor: Tensor
) -> Iterator[LeafChange]:
    """Yield a stack of vectors with each that the candidate lacks in the first place of
    zeros, its parts in the order that those of the others have."""
    place = int((tensor == 0).all(1).nonzero()[0])
    for row in tensor[(tensor != 0).any(1)]:
        for alone, held in ours:
            order = _order_of_parts(row, held)
            for added, more in ours if order is not None else ():
                is_lost = added.key not in sides.agreeing and more.shape == held.shape
                if order is not None and is_lost and _are_of_one_module(alone, added):
                    parts = more.chunk(len(order))
                    whole = tensor.clone()
                    whole[place] = torch.cat([parts[each] for each in order])
                    words = (
                        f"row {place} of {leaf.row.name} is zero; the reference has "
                        f"{added.row.name}"
                    )
                    yield LeafChange({leaf.key: whole}, words)


def _of_all(
    sides: Sides, ours: Sequence[Held], leaves: Sequence[Value], words: str
) -> Iterator[LeafChange]:
    """Yield all of several parameters with what is added to each."""
    tensors: dict[int, Tensor] = {}
    for leaf in leaves:
        held = sides.candidate.tensor(leaf.key)
        if held is not None:
            first = next(_sums(sides, ours, leaf, held), None)
            tensors |= {} if first is None else first.tensors
    if len(tensors) > 1:
        yield LeafChange(tensors, words)


def _vectors(sides: Sides) -> list[Held]:
    """Return the vectors among the reference's parameters."""
    named = [v for v in sides.reference.in_order() if v.row.name and not v.is_call]
    held = [(leaf, sides.reference.tensor(leaf.key)) for leaf in named]
    present = [(leaf, tensor) for leaf, tensor in held if tensor is not None]
    return [(leaf, tensor) for leaf, tensor in present if _is_vector(tensor)]


def _is_vector(tensor: Tensor) -> bool:
    return tensor.dim() == 1 and tensor.is_floating_point()


def _sums(
    sides: Sides, ours: Sequence[Held], leaf: Value, tensor: Tensor
) -> Iterator[LeafChange]:
    """Yield one vector with each of those added that the candidate lacks, the next first."""
    if not _is_vector(tensor):
        return
    for number, (alone, held) in enumerate(ours):
        order = _order_of_parts(tensor, held)
        if order is None:
            continue
        for added, more in (*ours[number:], *reversed(ours[:number])):
            is_lost = added.key not in sides.agreeing and more.shape == held.shape
            if not is_lost or not _are_of_one_module(alone, added):
                continue
            parts = more.chunk(len(order))
            total = tensor + torch.cat([parts[place] for place in order])
            words = (
                f"{leaf.row.name} holds {alone.row.name} alone; the reference adds "
                f"{added.row.name} to it"
            )
            yield LeafChange({leaf.key: total}, words)


def _are_of_one_module(one: Value, other: Value) -> bool:
    names = one.row.name or "", other.row.name or ""
    is_another = name_in_module(names[0]) != name_in_module(names[1])
    return is_another and module_of(names[0]) == module_of(names[1])


def _order_of_parts(tensor: Tensor, held: Tensor) -> list[int] | None:
    """Return which part of one vector each of another's is, but for a constant.

    >>> _order_of_parts(torch.tensor([3.0, 4.5, 1.0, 2.0]), torch.tensor([1.0, 2.0, 2.0, 3.5]))
    [1, 0]
    """
    if tensor.shape != held.shape:
        return None
    for count in (1, *PARTS):
        if len(tensor) % count or len(tensor) < 2 * count:
            continue
        theirs = held.chunk(count)
        order = [_which(part, theirs) for part in tensor.chunk(count)]
        places = [place for place in order if place is not None]
        if len(set(places)) == count:
            return places
    return None


def _which(part: Tensor, parts: Sequence[Tensor]) -> int | None:
    """Return the number of the part that is this one, but for a constant; None for one value."""
    spread = part - part.mean()
    size = float(spread.norm())
    if not size:
        return None
    for place, other in enumerate(parts):
        apart = float((spread - (other - other.mean())).norm())
        if apart <= APART * size:
            return place
    return None
