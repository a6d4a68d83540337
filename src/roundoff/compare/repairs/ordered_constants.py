"""Does a table of a few numbers stand in another order: the means of colours, a box's scales?

The reference has the same numbers, or multiples of them: of pictures whose values go up to
255, or to 1. A port may hold its channels backwards, or a box from its
top: then what goes with them has to stand so too, and no value says in which order but those
that follow. So the orders are tried.
"""

from __future__ import annotations

from collections.abc import Iterator
from itertools import permutations

import torch
from torch import Tensor

from roundoff.compare.blame.blamed import Blamed
from roundoff.compare.repairs.goals import TINY
from roundoff.compare.repairs.trials import BUDGET, Region, Trials
from roundoff.compare.tensors.structure import WRONG_AXIS
from roundoff.compare.values.value_flow import Value
from roundoff.compare.values.value_regions import Sides, upstream

#: Numbers of which all orders are tried.
FEW = 4
#: Two tables of means are one up to this: written with three digits or more.
ROUNDED = 1e-3
#: Numbers of a table; more are data.
MOST = 16


def ordered_constant(sides: Sides, trials: Trials, region: Region) -> Blamed | None:
    """Return a table of numbers with which, in another order, all results are right."""
    trials.left = BUDGET
    for leaf, held, twin in _tables(sides, region):
        for moved in _in_other_orders(held):
            if trials.left < 0:
                return None
            if trials.outcome({}, {leaf.key: moved}, is_patient=True)[0]:
                return _blamed(leaf, twin, moved)
    return None


def _in_other_orders(table: Tensor) -> Iterator[Tensor]:
    numbers = table.reshape(-1)
    for order in _orders(table.numel()):
        moved = numbers[list(order)]
        if not torch.equal(moved, numbers):
            yield moved.reshape(table.shape)


def _tables(sides: Sides, region: Region) -> Iterator[tuple[Value, Tensor, Value]]:
    """Yield the tables that a wrong region is made of, with what they hold and the
    reference's of the same numbers in any order."""
    flow = sides.candidate
    made_of = upstream(flow, sorted(region.parted), lambda _value: True)
    for leaf in (flow.values[key] for key in sorted(made_of)):
        held = flow.tensor(leaf.key) if _is_table(leaf) else None
        if held is None or _are_places(held):
            continue
        twin = _twin_of(sides, leaf, held)
        if twin is not None:
            yield leaf, held, twin


def _twin_of(sides: Sides, leaf: Value, held: Tensor) -> Value | None:
    """Return the reference's table of the same numbers, or of multiples of them."""
    reference = sides.reference
    for key in sides.all_twins(leaf):
        return reference.values[key]
    for other in reference.values.values():
        content = reference.tensor(other.key) if may_be_table(other) else None
        if content is not None and _are_multiples(held, content):
            return other
    return None


def _are_multiples(one: Tensor, other: Tensor) -> bool:
    """Return True for tables that are the same in some order, but for a factor."""
    if one.numel() != other.numel() or not _are_numbers(one, other):
        return False
    a = one.reshape(-1).double().sort().values
    b = other.reshape(-1).double().sort().values
    factor = float(a @ b) / max(float(b @ b), TINY)
    apart = float((a - factor * b).norm())
    return factor > 0 and apart <= ROUNDED * float(a.norm())


def _are_numbers(*tables: Tensor) -> bool:
    return all(each.is_floating_point() and each.isfinite().all() for each in tables)


def _is_table(leaf: Value) -> bool:
    """Return True for a few numbers that the program has written down."""
    return may_be_table(leaf) and not leaf.row.name and leaf.row.line is not None


def may_be_table(leaf: Value) -> bool:
    """Return True for a few numbers, or whole numbers, that are there before the step."""
    is_leaf = not leaf.is_call and not leaf.inputs
    is_few = 1 < (leaf.row.numel or 0) <= MOST and leaf.row.dtype != "bool"
    return is_leaf and is_few and not leaf.says_nothing


def _are_places(numbers: Tensor) -> bool:
    """Return True for each number from nought on: which place goes where."""
    if numbers.is_floating_point():
        return False
    rising = numbers.reshape(-1).sort().values
    return torch.equal(rising, torch.arange(rising.numel(), dtype=rising.dtype))


def _orders(count: int) -> Iterator[tuple[int, ...]]:
    """Yield the orders that are tried of so many numbers.

    >>> [list(order) for order in _orders(6)]
    [[5, 4, 3, 2, 1, 0], [1, 0, 3, 2, 5, 4], [3, 4, 5, 0, 1, 2], [0, 2, 4, 1, 3, 5], [0, 3, 1, 4, 2, 5]]
    """
    places = range(count)
    if count <= FEW:
        yield from list(permutations(places))[1:]
        return
    yield tuple(reversed(places))
    if count % 2 == 0:
        half = count // 2
        yield tuple(place ^ 1 for place in places)
        yield (*places[half:], *places[:half])
        yield (*places[::2], *places[1::2])
        yield tuple(place // 2 + half * (place % 2) for place in places)


def _blamed(leaf: Value, twin: Value, right: Tensor) -> Blamed:
    line = f" ({twin.row.line})" if twin.row.line else ""
    numbers = ", ".join(f"{number:.6g}" for number in right.reshape(-1).tolist())
    words = (
        f"its numbers are the reference's{line} in another order: with [{numbers}] all "
        "results are right"
    )
    return Blamed(leaf, twin, words, is_operator=True, label=WRONG_AXIS)
