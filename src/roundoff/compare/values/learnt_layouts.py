"""In which places of the candidate's tensors the reference's elements stand.

A port may lay a tensor out as no order of axes does: neighbours for halves, patches for
rows. It does so with all that is of one kind. Where two values agree each element of one is found
in the other, and any other value of the same two shapes is moved alike.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from itertools import islice

import torch
from torch import Tensor

from roundoff.compare.records.parameter_content import axis_orders
from roundoff.compare.records.value_sketch import in_reals
from roundoff.compare.values.other_padding import (
    Pair,
    behind_other_padding,
    pairs_of_paddings,
)
from roundoff.compare.values.value_flow import Flow, Value
from roundoff.compare.values.value_regions import Sides

#: Learnt layouts of two shapes that are tried.
MOST_LEARNT = 4
#: Values of two shapes that are looked at.
MOST_PAIRS = 32
#: Fewer elements may be different by chance and in places of their own.
FEWEST = 16
#: Rounding does not exchange elements that are so many times further apart than it moves any.
SURELY = 4

#: Moves a tensor of the reference to where the candidate has its elements, in a tensor of
#: that shape; None for one that does not fit.
Layout = Callable[[Tensor, torch.Size], Tensor | None]


def layouts_for(sides: Sides, content: Tensor, held: Tensor) -> Iterator[Layout]:
    """Yield how a tensor of the reference may be laid out in the place of a candidate's.

    As values that agree stand, then its axes in each order that the shapes allow: a
    product of two tensors is right in any order that both share. Where one is complex
    and the other is not, as pairs of real numbers, in their own order; ``stand_in`` makes
    them complex. What is padded to another length is padded as the candidate's.
    """
    is_one_kind = content.is_complex() == held.is_complex()
    if not is_one_kind:
        content = in_reals(content)
        held = in_reals(held)
    if content.numel() != held.numel():
        for pair in pairs_of_paddings(sides.padding):
            moved = behind_other_padding(content, pair)
            if moved is not None and moved.numel() == held.numel():
                for layout in layouts_for(sides, moved, held):
                    yield _behind_padding(pair, layout)
        return
    for places in _learnt(sides, tuple(content.shape), tuple(held.shape)):
        yield _by_places(places)
    for order in orders_of(content, held):
        if is_one_kind or order == tuple(range(content.dim())):
            yield _by_order(order)


def stand_in(layout: Layout, content: Tensor, held: Tensor) -> Tensor | None:
    """Return a tensor of the reference in the layout, and the format, of a candidate's.

    None where it does not fit.
    """
    is_one_kind = content.is_complex() == held.is_complex()
    shape = held.shape if is_one_kind else in_reals(held).shape
    moved = layout(content if is_one_kind else in_reals(content), shape)
    if moved is None:
        return None
    if held.is_complex() and not moved.is_complex():
        moved = torch.view_as_complex(moved.contiguous())
    return moved.to(held.dtype).contiguous()


def _behind_padding(pair: Pair, inner: Layout) -> Layout:
    def layout(content: Tensor, shape: torch.Size) -> Tensor | None:
        moved = behind_other_padding(content, pair)
        return None if moved is None else inner(moved, shape)

    return layout


def _by_order(order: tuple[int, ...]) -> Layout:
    def layout(content: Tensor, shape: torch.Size) -> Tensor | None:
        if content.dim() != len(order) or content.numel() != shape.numel():
            return None
        return content.permute(order).reshape(shape)

    return layout


def _by_places(places: Tensor) -> Layout:
    def layout(content: Tensor, shape: torch.Size) -> Tensor | None:
        if len(places) != content.numel() or len(places) != shape.numel():
            return None
        return content.reshape(-1)[places].reshape(shape)

    return layout


def orders_of(content: Tensor, held: Tensor) -> Iterator[tuple[int, ...]]:
    """Yield the orders of a tensor's axes with which it has another's shape.

    Up to the joining of neighbouring axes.
    """
    for order in axis_orders(content):
        shape = [content.shape[axis] for axis in order]
        if _joins(shape, held.shape) or _joins(held.shape, shape):
            yield order


def _joins(fine: Sequence[int], coarse: Sequence[int]) -> bool:
    """Return True where one shape is the other with neighbouring axes joined."""
    ends = {1}
    count = 1
    for size in fine:
        count *= size
        ends.add(count)
    count = 1
    for size in coarse:
        count *= size
        if count not in ends:
            return False
    return True


def _learnt(
    sides: Sides, shape: tuple[int, ...], other_shape: tuple[int, ...]
) -> list[Tensor]:
    """Return the places that values of two shapes that agree have in common, if any.

    By place of the candidate's tensor the place of the reference's; no order of axes.
    """
    kind = shape, other_shape
    if kind not in sides.learnt:
        places: list[Tensor] = []
        for content, held in _pairs(sides, shape, other_shape):
            agreeing = _places(content, held)
            is_new = agreeing is not None and not any(map(agreeing.equal, places))
            if agreeing is not None and is_new and not _is_turned(content, held):
                places.append(agreeing)
            if len(places) == MOST_LEARNT:
                break
        sides.learnt[kind] = places
    return sides.learnt[kind]


def _is_turned(content: Tensor, held: Tensor) -> bool:
    """Return True where an order of the axes says it: equal elements fit other places too."""
    orders = orders_of(content, held)
    return any(_close(content.permute(o).reshape(held.shape), held) for o in orders)


def _close(one: Tensor, other: Tensor) -> bool:
    """Return True for tensors that are as near, element by element, as any of their kind."""
    ours = one.reshape(-1).to(torch.float64)
    theirs = other.reshape(-1).to(torch.float64)
    apart = float((ours.sort().values - theirs.sort().values).abs().max())
    return float((ours - theirs).abs().max()) <= SURELY * apart


def _pairs(
    sides: Sides, shape: tuple[int, ...], other_shape: tuple[int, ...]
) -> Iterator[tuple[Tensor, Tensor]]:
    """Yield the tensors of values that agree and have these shapes, as real numbers."""
    pairs = (
        (content, held)
        for value, held in _of_shape(sides.candidate, sides.twins, other_shape)
        for twin in sides.all_twins(value)
        for content in [_in_reals_of(sides.reference, twin)]
        if content is not None and tuple(content.shape) == shape
    )
    yield from islice(pairs, MOST_PAIRS)


def _of_shape(
    flow: Flow, keys: Iterable[int], shape: tuple[int, ...]
) -> Iterator[tuple[Value, Tensor]]:
    for key in keys:
        value = flow.values[key]
        if value.is_number and not value.says_nothing:
            tensor = _in_reals_of(flow, key)
            if tensor is not None and tuple(tensor.shape) == shape:
                yield value, tensor


def _in_reals_of(flow: Flow, key: int) -> Tensor | None:
    tensor = flow.tensor(key)
    return None if tensor is None else in_reals(tensor)


def _places(content: Tensor, held: Tensor) -> Tensor | None:
    """Return where each element of one stands in the other; None where it is not sure.

    Equal elements, as one word at several places of a text has, stand in one order in both.
    """
    ours = content.reshape(-1).to(torch.float64).sort(stable=True)
    theirs = held.reshape(-1).to(torch.float64).sort(stable=True)
    apart = float((ours.values - theirs.values).abs().max())
    is_next = ours.values.diff() > SURELY * apart
    if int(is_next.sum()) < FEWEST:
        return None
    number = torch.cat([is_next.new_zeros(1), is_next]).cumsum(0)
    places = torch.empty_like(ours.indices)
    places[_by_number(theirs.indices, number)] = _by_number(ours.indices, number)
    moved = content.reshape(-1)[places].reshape(held.shape)
    is_same = float((moved - held).abs().max()) <= SURELY * apart
    return places if is_same else None


def _by_number(indices: Tensor, number: Tensor) -> Tensor:
    """Return indices with those of one number, which are one run, in rising order."""
    rising = indices.sort().indices
    return indices[rising[number[rising].sort(stable=True).indices]]
