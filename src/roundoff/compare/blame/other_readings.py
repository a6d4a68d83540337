"""What else may be meant where a parameter stands in another order than its program reads.

A parameter in another order and code that takes or gives its parts in another order
compute the same: no value tells them apart. Both are said, the name of the parameter and
the line of the code.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from itertools import permutations

import torch
from torch import Tensor

from roundoff.compare.blame.blamed import Blamed
from roundoff.compare.blame.unlike_operands import moves_to
from roundoff.compare.records.value_sketch import rising
from roundoff.compare.values.value_flow import Flow, Value
from roundoff.compare.values.value_regions import Sides
from roundoff.ops import operators_that

_CUT = operators_that("cut out")
_JOIN = operators_that("join")
_MOVE = operators_that("move values")
_PERMUTE = operators_that("permute axes")
_PRODUCTS = operators_that("multiply")
#: Parts of equal size that an axis is cut into, at most: gates of a cell.
MOST_PARTS = 4


@dataclass(frozen=True, slots=True)
class _Parts:
    """A tensor has equal parts along an axis in another order."""

    axis: int
    order: tuple[int, ...]


def with_other_reading(sides: Sides, blamed: Blamed | None) -> Blamed | None:
    """Return a parameter that should stand in another order with what else may be meant.

    What it is multiplied with may be brought into that order instead, or what is computed
    with it may be taken apart so: the line that does it is named beside the parameter.
    Anything else is returned as it is.
    """
    if blamed is None or blamed.other is None or blamed.value.is_call:
        return blamed
    held = sides.candidate.tensor(blamed.value.key)
    if blamed.line is not None or held is None:
        return blamed
    if not _same_elements(held, blamed.other):
        return blamed
    product, beside = _product_of(sides.candidate, blamed.value)
    if product is None:
        return blamed
    parts = _parts_in_other_order(held, blamed.other)
    if parts is None:
        move = _permuted(sides.candidate, beside)
        does = "brings what it is multiplied with into another order"
        return _also(blamed, blamed.evidence, move, does)
    words = (
        f"{blamed.value.row.name} has its {len(parts.order)} parts along axis "
        f"{parts.axis} in another order than it is read: {parts.order}"
    )
    size = held.shape[parts.axis]
    join = _joined(sides.candidate, beside, len(parts.order), size)
    if join is not None:
        return _also(blamed, words, join, "joins what it is multiplied with so")
    cut = _cut(sides.candidate, product, size)
    return _also(blamed, words, cut, "takes what is computed with it apart so")


def _also(blamed: Blamed, words: str, call: Value | None, does: str) -> Blamed:
    """Return a blamed parameter with the line of a call that may be meant as well."""
    if call is None or call.row.line in (None, blamed.value.row.line):
        return blamed
    there = f"{call.row.site} ({call.row.line})"
    return replace(blamed, evidence=f"{words}, or {there} {does}", line=call.row.line)


def _same_elements(one: Tensor, other: Tensor) -> bool:
    if one.numel() != other.numel():
        return False
    return torch.equal(one.reshape(-1)[rising(one)], other.reshape(-1)[rising(other)])


def _parts_in_other_order(held: Tensor, other: Tensor) -> _Parts | None:
    """Return how a tensor becomes another one when its parts change places."""
    if held.shape != other.shape:
        return None
    for axis, size in enumerate(held.shape):
        for count in range(2, MOST_PARTS + 1):
            if size % count:
                continue
            parts = held.chunk(count, axis)
            for order in permutations(range(count)):
                if torch.equal(torch.cat([parts[k] for k in order], axis), other):
                    return _Parts(axis, order)
    return None


def _product_of(flow: Flow, leaf: Value) -> tuple[Value | None, list[Value]]:
    """Return the first product that a parameter is a factor of, and its other factors."""
    waiting = [leaf.key]
    while waiting:
        key = waiting.pop(0)
        for reader in (flow.values[k] for k in flow.readers.get(key, ())):
            if reader.row.phase != leaf.row.phase or reader.inner:
                continue
            if not reader.computes or reader.operator in _MOVE:
                waiting.append(reader.key)
            elif reader.operator in _PRODUCTS:
                others = [k for k in reader.row.inputs if k != key and k in flow.values]
                return reader, [flow.values[k] for k in others]
    return None, []


def _permuted(flow: Flow, beside: list[Value]) -> Value | None:
    """Return the last move of axes that leads to one of these values."""
    moves = [move for value in beside for move in moves_to(flow, value)]
    permuted = [move for move in moves if move.operator in _PERMUTE]
    return permuted[-1] if permuted else None


def _joined(flow: Flow, beside: list[Value], count: int, size: int) -> Value | None:
    """Return the call that joins one of these values of so many parts.

    What works element by element on what was joined keeps its parts.
    """
    for value in beside:
        for source in _back(flow, value):
            read = [k for k in source.row.inputs if k in flow.values]
            is_join = source.operator in _JOIN and len(read) == count
            if is_join and size in (source.row.shape or ()):
                return source
    return None


def _back(flow: Flow, value: Value) -> Iterator[Value]:
    """Yield a value and what it is made of, through calls that read one value."""
    while value.is_call:
        yield value
        if len(value.inputs) != 1 or value.inputs[0] not in flow.values:
            return
        value = flow.values[value.inputs[0]]


def _cut(flow: Flow, product: Value, size: int) -> Value | None:
    """Return the first call that cuts what is computed from a product.

    Until then that has an axis of the size that is cut.
    """
    waiting = [product]
    seen: set[int] = set()
    while waiting:
        value = waiting.pop(0)
        readers = [flow.values[key] for key in flow.readers.get(value.key, ())]
        for reader in sorted(readers, key=lambda each: each.order):
            if reader.key in seen or reader.row.phase != product.row.phase:
                continue
            seen.add(reader.key)
            shape = reader.row.shape or ()
            if reader.operator in _CUT and size not in shape:
                return reader
            if size in shape:
                waiting.append(reader)
    return None
