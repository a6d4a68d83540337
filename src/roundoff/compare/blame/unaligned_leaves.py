"""Which parameter stands in another order than the columns that it is added to?

A port may keep the channels of a layer in an order of its own: then a bias, a gain or a
mean has to stand in the same order. Both operands of the call have the reference's
elements, and each column of one meets another element of the other.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from roundoff.compare.blame.blamed_leaves import Blamed, leaves_of, of_leaves_alone
from roundoff.compare.values.value_flow import Value
from roundoff.compare.values.value_regions import Part, Sides, first_of
from roundoff.ops import operators_that

#: Fewer columns may be told apart by chance.
FEWEST = 4
_PAIRS = operators_that("pair elements")


def blamed_alignment(sides: Sides, part: Part) -> Blamed | None:
    """Return the parameter that a first call of the region combines with other columns."""
    flow = sides.candidate
    for value in first_of(flow, set(part.region)):
        if value.inner or value.operator not in _PAIRS:
            continue
        read = [flow.values[key] for key in value.inputs if key in flow.values]
        if len(read) != 2:
            continue
        for leaf_read, other in (read, read[::-1]):
            if of_leaves_alone(flow, leaf_read) and not of_leaves_alone(flow, other):
                blamed = _unaligned(sides, leaf_read, other)
                if blamed is not None:
                    return blamed
    return None


def _unaligned(sides: Sides, read: Value, other: Value) -> Blamed | None:
    flow = sides.candidate
    leaves = [read] if not read.is_call else leaves_of(flow, [read.key])
    held = flow.tensor(read.key)
    values = flow.tensor(other.key)
    if len(leaves) != 1 or held is None or values is None or read.says_nothing:
        return None
    axis = _axis_of(held, values)
    if axis is None:
        return None
    flat = held.reshape(-1).to(torch.float64)
    columns = _columns(values, axis)
    for source in _twins_among_leaves(sides, read):
        content = sides.reference.tensor(source.key)
        if content is None or content.numel() != flat.numel():
            continue
        for theirs in _columns_in_reference(sides, other, len(flat)):
            order = _order(columns, theirs, sides.limit)
            if order is None:
                continue
            wanted = content.reshape(-1).to(torch.float64)[order]
            if float((wanted - flat).norm()) <= sides.limit * float(wanted.norm()):
                return None
            [leaf] = leaves
            words = (
                f"{leaf.row.name} has the elements of the reference's {source.row.name} in "
                f"another order than the columns of {other.row.site}, which it is "
                "combined with"
            )
            return Blamed(leaf, source, words, line=read.row.line)
    return None


def _axis_of(held: Tensor, values: Tensor) -> int | None:
    """Return the one axis of a value along which a parameter is laid; None for several."""
    if held.dim() > values.dim() or held.numel() < FEWEST:
        return None
    shape = [1] * (values.dim() - held.dim()) + list(held.shape)
    axes = [axis for axis, size in enumerate(shape) if size > 1]
    is_alone = len(axes) == 1 and values.shape[axes[0]] == held.numel()
    return axes[0] if is_alone else None


def _twins_among_leaves(sides: Sides, read: Value) -> Iterator[Value]:
    """Yield the reference's parameters that have the elements of a candidate's."""
    for key in sides.all_twins(read):
        twin = sides.reference.values[key]
        if twin.row.name and not twin.is_call:
            yield twin


def _columns_in_reference(sides: Sides, value: Value, count: int) -> Iterator[Tensor]:
    """Yield the columns of the reference's values that agree with a candidate's."""
    for key in sides.all_twins(value):
        content = sides.reference.tensor(key)
        for axis, size in enumerate(content.shape if content is not None else ()):
            if content is not None and size == count:
                yield _columns(content, axis)


def _columns(values: Tensor, axis: int) -> Tensor:
    """Return the columns of a value along an axis, each sorted: rows may stand otherwise."""
    rows = values.movedim(axis, 0).reshape(values.shape[axis], -1)
    return rows.to(torch.float64).sort(dim=1).values


def _order(columns: Tensor, theirs: Tensor, limit: float) -> Tensor | None:
    """Return which of the reference's columns each is; None where one is none, or several."""
    if columns.shape != theirs.shape or not torch.isfinite(columns).all():
        return None
    apart = torch.cdist(columns, theirs)
    near = apart <= limit * theirs.norm(dim=1)
    is_one_to_one = bool((near.sum(0) == 1).all() and (near.sum(1) == 1).all())
    return near.to(torch.uint8).argmax(dim=1) if is_one_to_one else None
