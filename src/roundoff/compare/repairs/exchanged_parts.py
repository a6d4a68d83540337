"""Equal parts of parameters in another order: gates, directions, layers in one tensor.

A library has its gates in an order of its own. A loader that forgets it does so in each
cell, and where several cells stand in one tensor no value shows before they are taken apart.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from functools import partial
from itertools import combinations, permutations, product

import torch
from torch import Tensor

from roundoff.compare.repairs.leaf_changes import Held, LeafChange
from roundoff.compare.repairs.other_layers import in_all_read_alike
from roundoff.compare.repairs.packed_leaves import PARTS
from roundoff.compare.values.value_flow import Flow, Value


def exchanged_parts(leaf: Value, tensor: Tensor) -> Iterator[LeafChange]:
    """Yield one parameter with two of its equal parts exchanged."""
    for axis, size in enumerate(tensor.shape):
        for count in PARTS:
            if size % count or not _has_parts(tensor, axis, count):
                continue
            for first, second in combinations(range(count), 2):
                order = list(range(count))
                order[first] = second
                order[second] = first
                turned = _parts_in_order(order, axis, tensor)
                if torch.equal(turned, tensor):
                    continue
                words = (
                    f"parts {first + 1} and {second + 1} of {count} along axis {axis} of "
                    f"{leaf.row.name} stand in for each other"
                )
                made = partial(_parts_in_order, order, axis)
                yield LeafChange({leaf.key: turned}, words, made)


def parts_of_several(members: Sequence[Held]) -> Iterator[LeafChange]:
    """Yield all parameters of a layer with their parts, as gates are, in another order."""
    for axis, count in product((0, -1), PARTS):
        if any(tensor.shape[axis] % count for _, tensor in members if tensor.dim()):
            continue
        for order in list(permutations(range(count)))[1:]:
            tensors = {
                leaf.key: _parts_in_order(order, axis, tensor)
                for leaf, tensor in members
                if tensor.dim() and _has_parts(tensor, axis, count)
            }
            if len(tensors) > 1:
                names = ", ".join(leaf.row.name or "" for leaf, _ in members)
                words = f"{names} have their {count} parts in another order: {order}"
                yield LeafChange(tensors, words)


def parts_of_all_read_alike(
    flow: Flow, present: Sequence[Held]
) -> Iterator[LeafChange]:
    """Yield two parts exchanged in all that one line reads: one alone may show nowhere."""
    seen: set[int] = set()
    for leaf, tensor in present:
        if leaf.key in seen:
            continue
        for change in exchanged_parts(leaf, tensor):
            tensors = in_all_read_alike(flow, change)
            seen.update(tensors)
            if len(tensors) > 1:
                yield replace(change, tensors=tensors)


def parts_of_stacked(present: Sequence[Held]) -> Iterator[LeafChange]:
    """Yield two parts exchanged of what stands in one tensor for several layers at once.

    None of these computes what the reference does before they are taken apart.
    """
    for leaf, tensor in present:
        if tensor.dim() > 2:
            for change in exchanged_parts(leaf, tensor):
                yield replace(change, is_patient=True)


def _has_parts(tensor: Tensor, axis: int, count: int) -> bool:
    """Return True where one of so many parts along an axis is more than a number.

    Of an axis of that size they are layers or gates that stand in one tensor.
    """
    is_last = axis in (-1, tensor.dim() - 1)
    return tensor.shape[axis] > count or (not is_last and tensor.dim() > 1)


def _parts_in_order(order: Sequence[int], axis: int, tensor: Tensor) -> Tensor:
    """Return the equal parts along an axis in another order; as it is where it has none."""
    if axis >= tensor.dim() or tensor.shape[axis] % len(order):
        return tensor
    parts = tensor.chunk(len(order), axis)
    return torch.cat([parts[place] for place in order], axis)
