"""Values that one program makes in turns of a loop, and the other at once or in other turns."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import combinations, permutations

import torch
from torch import Tensor

from roundoff.compare.values.loop_turns import MOST_ON_LINE, MOST_TURNS
from roundoff.compare.values.traced_calls import TracedCall
from roundoff.compare.values.value_flow import Flow, Value


def one_of_each_turn(members: Sequence[Value]) -> Iterator[Sequence[Value]]:
    """Yield what all turns of a loop make, where a line calls an operator once in each, or
    twice, and so on."""
    for calls in range(1, MOST_ON_LINE + 1):
        turns = len(members) // calls
        if len(members) % calls == 0 and 1 < turns <= MOST_TURNS:
            yield from (members[place::calls] for place in range(calls))


def joined(turns: Sequence[Tensor | None]) -> Tensor | None:
    """Return what several turns make in one tensor; None where that has no one shape.

    A new axis is the first where all are of one shape, else they lie along the axis in
    which they differ.
    """
    held = [each for each in turns if each is not None]
    if len(held) < len(turns) or len({(each.dim(), each.dtype) for each in held}) > 1:
        return None
    sizes = zip(*(each.shape for each in held), strict=True)
    differing = [axis for axis, of_axis in enumerate(sizes) if len({*of_axis}) > 1]
    if not differing:
        return torch.stack(held)
    return torch.cat(held, differing[0]) if len(differing) == 1 else None


def cut_in(whole: Sequence[Tensor], count: int) -> Iterator[list[Tensor]]:
    """Yield the parts of several tensors along an axis, or along two together.

    Of each tensor ``count``, of the first one first.
    """
    shape = whole[0].shape
    axes: list[tuple[int, ...]] = [
        (axis,) for axis, size in enumerate(shape) if size == count
    ]
    axes += [
        pair
        for pair in combinations(range(len(shape)), 2)
        if min(shape[axis] for axis in pair) > 1
        and shape[pair[0]] * shape[pair[1]] == count
    ]
    for chosen in axes:
        ends = tuple(range(len(chosen)))
        parts = [
            each.movedim(chosen, ends).flatten(0, len(chosen) - 1) for each in whole
        ]
        yield [part for each in parts for part in each]


def nested(values: int, parts: int) -> list[list[int]]:
    """Return how loops may run over parts of several values: the part of each turn.

    Over the values and over the parts, which may be two loops, in each order.

    >>> nested(2, 2)
    [[0, 1, 2, 3], [0, 2, 1, 3]]
    """
    orders: dict[tuple[int, ...], None] = {}
    for outer in range(1, parts + 1):
        if parts % outer:
            continue
        sizes = (values, outer, parts // outer)
        numbers = torch.arange(values * parts).reshape(sizes)
        for order in permutations(range(3)):
            orders[tuple(numbers.permute(order).reshape(-1).tolist())] = None
    return [list(order) for order in orders]


class Turns:
    """The values that one place of a line makes: in turns of a loop, and in layers."""

    def __init__(
        self, flow: Flow, families: Mapping[int, Sequence[TracedCall]]
    ) -> None:
        self._flow = flow
        self._families = families
        self._inner: dict[int, list[Value]] = {}
        for value in flow.in_order():
            if value.inner:
                self._inner.setdefault(value.row.call, []).append(value)
        self._number = {
            value.key: number
            for values in self._inner.values()
            for number, value in enumerate(values)
        }

    def of(self, value: Value) -> list[Value]:
        """Return the values of the same place, this one among them, in order."""
        family = self._families.get(value.row.call)
        if family is None:
            return [value]
        if not value.inner:
            place = value.row.place
            rows = [row for call in family for row in call.rows if row.place == place]
            return [self._flow.values[row.record] for row in rows]
        number = self._number[value.key]
        turns = [self._inner.get(call.first.call, []) for call in family]
        return [values[number] for values in turns if number < len(values)]

    def one_of_each(self, values: Iterable[Value]) -> Iterator[Value]:
        """Yield the first of each place."""
        seen: set[int] = set()
        for value in values:
            if value.key not in seen:
                seen.update(each.key for each in self.of(value))
                yield value
