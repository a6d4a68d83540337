"""What the reference has that a parameter may be meant to hold, in each of its layouts."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from itertools import combinations, permutations

import torch
from torch import Tensor

from roundoff.compare.records.parameter_content import (
    EQUAL,
    axis_orders,
    backward_axes,
    relation,
)
from roundoff.compare.values.value_flow import Value
from roundoff.compare.values.value_regions import Sides

#: Rows at the ends of a table that a loader may leave out: of padding, of unknown words.
MOST_LACKING = 4
#: Gates of a recurrent layer, in any order.
GATES = (3, 4)
#: Yields what a tensor of some content may hold in the place of another.
Layouts = Callable[[Tensor, Tensor], Iterator[Tensor]]


def other_values(
    sides: Sides,
    ours: Sequence[Value],
    held: Tensor,
    layouts: Callable[[Tensor, Tensor], Iterator[Tensor]],
) -> Iterator[tuple[Value, Tensor, Tensor]]:
    """Yield what a leaf might hold in place of ``held``, with what it is made of."""
    for wanted, content in _contents(sides, ours, held):
        how = relation(content, held)
        if how is not None and how.kind == EQUAL and held.dim() < 2:
            continue
        for other in layouts(content.to(held.dtype), held):
            if not torch.equal(other, held):
                yield wanted, content, other


def _in_numbers_of(tensor: Tensor, held: Tensor) -> tuple[Tensor, ...]:
    """Return the real and the imaginary part of a complex tensor where another one is real."""
    if tensor.is_complex() and not held.is_complex():
        return tensor.real, tensor.imag
    return (tensor,)


def _contents(
    sides: Sides, leaves: Sequence[Value], held: Tensor
) -> Iterator[tuple[Value, Tensor]]:
    """Yield what a parameter may have to hold: one of the reference's, a part, several."""
    tensors = [(leaf, sides.reference.tensor(leaf.key)) for leaf in leaves]
    kept = [
        (leaf, part)
        for leaf, tensor in tensors
        if tensor is not None
        for part in _in_numbers_of(tensor, held)
    ]
    numel = held.numel()
    for leaf, tensor in kept:
        if tensor.numel() == numel:
            yield leaf, tensor
        elif tensor.numel() > numel and tensor.numel() % numel == 0:
            for part in _parts(tensor, tensor.numel() // numel):
                yield leaf, part
        elif tensor.numel() > numel:
            for part in _stretches(tensor, numel):
                yield leaf, part
    for (leaf, first), (_, second) in combinations(kept, 2):
        for content in _put_together(first, second, numel):
            yield leaf, content


def _put_together(first: Tensor, second: Tensor, numel: int) -> Iterator[Tensor]:
    """Yield what two tensors make of ``numel`` elements: their sum, or one by the other."""
    if first.shape == second.shape and first.numel() == numel:
        yield first + second
    elif first.numel() + second.numel() == numel:
        yield from _joined(first, second)


def _parts(tensor: Tensor, count: int) -> Iterator[Tensor]:
    for axis in range(tensor.dim()):
        if tensor.shape[axis] % count == 0:
            yield from tensor.chunk(count, axis)


def _stretches(tensor: Tensor, numel: int) -> Iterator[Tensor]:
    """Yield most of a tensor along an axis: without its first rows, its last ones, or both.

    >>> [part.tolist() for part in _stretches(torch.arange(5), 4)]
    [[0, 1, 2, 3], [1, 2, 3, 4]]
    """
    for axis, size in enumerate(tensor.shape):
        length, rest = divmod(numel * size, tensor.numel())
        lacking = size - length
        if not rest and 0 < lacking <= MOST_LACKING and 2 * lacking < size:
            for start in range(lacking + 1):
                yield tensor.narrow(axis, start, length)


def _joined(one: Tensor, other: Tensor) -> Iterator[Tensor]:
    if one.dim() != other.dim():
        return
    for axis in range(one.dim()):
        rest = [a for a in range(one.dim()) if a != axis]
        if all(one.shape[a] == other.shape[a] for a in rest):
            yield torch.cat([one, other], axis)
            yield torch.cat([other, one], axis)


def turned(content: Tensor, held: Tensor) -> Iterator[Tensor]:
    """Yield a tensor in each order of its axes that has the shape; those of length 1 stand anywhere."""
    wanted = held.squeeze().shape
    for order in axis_orders(content):
        other = content.permute(order)
        long_axes = other.squeeze().shape
        if len(long_axes) != len(wanted) or long_axes == wanted:
            yield other.reshape(held.shape)


def _backwards(content: Tensor, held: Tensor) -> Iterator[Tensor]:
    """Yield the values of one tensor in the shape of another, backwards along some axes.

    None for one that is the other as it is: what reads it is wrong then, not the loader.
    One whose axes a loader has put in another order may lack a turn in space, along
    several axes; along one alone a line would turn what it is multiplied with.
    """
    if content.shape == held.shape and torch.equal(content, held):
        return
    for layout in turned(content, held):
        for axes in backward_axes(layout):
            if len(axes) > 1 or content.shape == held.shape:
                yield layout.flip(axes)


def _gates_of(content: Tensor, held: Tensor) -> Iterator[Tensor]:
    """Yield the same with the blocks of an axis, as gates are, in every order."""
    for layout in turned(content, held):
        for axis in range(layout.dim()):
            for parts in GATES:
                size = layout.shape[axis]
                if size % parts == 0 and size > parts:
                    gates = layout.chunk(parts, axis)
                    for order in permutations(range(parts)):
                        yield torch.cat([gates[i] for i in order], axis)


def _split_axes(content: Tensor, held: Tensor) -> Iterator[Tensor]:
    """Yield the same with two axes exchanged of which another one is made.

    So do channels and pixels stand that one program flattens in the other order, and, in
    each head, the pairs of numbers that rotary attention turns.
    """
    for axis, size in enumerate(content.shape):
        for outer, first in _factors(size):
            sizes = (outer, first, size // outer // first)
            split = content.reshape(
                *content.shape[:axis], *sizes, *content.shape[axis + 1 :]
            )
            exchanged = split.transpose(axis + 1, axis + 2).flatten(axis, axis + 2)
            yield from turned(exchanged, held)


def _factors(size: int) -> list[tuple[int, int]]:
    """Return how an axis may be split in three, of which the last two are exchanged.

    The first two sizes; splits in two, whose first size is one, before the others.

    >>> _factors(8)
    [(1, 2), (1, 4), (2, 2)]
    """
    outers = [outer for outer in range(1, size) if size % outer == 0]
    return [
        (outer, first)
        for outer in outers
        for first in range(2, size // outer)
        if size // outer % first == 0
    ]


PLAIN_LAYOUTS: tuple[Layouts, ...] = (turned, _split_axes)


#: Gates have 24 orders: every leaf is tried in plain layouts before.
LAYOUTS: tuple[Layouts, ...] = (turned, _backwards, _split_axes, _gates_of)
