"""Do the rows of a parameter stand as those of the parameter that is used with them?

A port may put the rows of several of the reference's parameters together in an order of its
own, boxes and classes by turns. Any order is right as long as a weight and its bias have the
same one: a row of a weight goes with the element of the bias that the reference has in the
same place of the same module.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import permutations

import torch
import xxhash
from torch import Tensor

from roundoff.compare.records.parameter_names import module_of
from roundoff.compare.repairs.found_rows import MOST_ELEMENTS, MOST_IN_ALL
from roundoff.compare.repairs.leaf_changes import Held, LeafChange
from roundoff.compare.values.value_flow import Flow, Value
from roundoff.compare.values.value_regions import Sides

#: Where a row stands in the reference: the module of its parameter, and the place.
_Place = tuple[str, int]


@dataclass(frozen=True, slots=True)
class _Rows:
    """A parameter of the candidate along one axis.

    Attributes:
        leaf: the parameter.
        tensor: what it holds.
        axis: along which the rows stand.
        places: where each of them stands in the reference.
    """

    leaf: Value
    tensor: Tensor
    axis: int
    places: tuple[_Place, ...]

    def in_order_of(self, other: _Rows) -> Tensor:
        """Return what it would hold with its rows in the order of another's."""
        at = {place: number for number, place in enumerate(self.places)}
        index = [at[place] for place in other.places]
        return self.tensor.index_select(self.axis, torch.tensor(index))


def rows_as_beside(sides: Sides, present: Sequence[Held]) -> Iterator[LeafChange]:
    """Yield a parameter with its rows in the order of another one's, then all such at once.

    Both hold rows of the same places of the same modules of the reference. A loader that
    leaves the biases of one layer as they are leaves those of the others.

    Args:
        sides: both programs.
        present: the parameters that a wrong region reads.
    """
    pairs = list(_unlike(sides))
    near = {leaf.key for leaf, _ in present}
    for rows, other in pairs:
        if rows.leaf.key in near:
            yield LeafChange(
                {rows.leaf.key: rows.in_order_of(other)}, _words(rows, other)
            )
    for is_vector in (True, False):
        alike = [pair for pair in pairs if (pair[0].tensor.dim() == 1) == is_vector]
        tensors = {rows.leaf.key: rows.in_order_of(other) for rows, other in alike}
        if len(tensors) > 1 and not near.isdisjoint(tensors):
            yield LeafChange(tensors, _words(*alike[0]))


def _unlike(sides: Sides) -> Iterator[tuple[_Rows, _Rows]]:
    """Yield the parameters of the candidate of which the rows stand in two orders."""
    known = _rows_of_reference(sides.reference)
    flow = sides.candidate
    leaves = [v for v in flow.in_order() if v.row.name and not v.is_call]
    held = [(leaf, flow.tensor(leaf.key)) for leaf in leaves]
    by_places: dict[frozenset[_Place], list[_Rows]] = {}
    for leaf, tensor in held:
        for rows in () if tensor is None else _in_rows(known, leaf, tensor):
            by_places.setdefault(frozenset(rows.places), []).append(rows)
    for alike in by_places.values():
        for rows, other in permutations(alike, 2):
            if rows.leaf.key != other.leaf.key and rows.places != other.places:
                yield rows, other


def _words(rows: _Rows, other: _Rows) -> str:
    names = rows.leaf.row.name, other.leaf.row.name
    return f"the rows of {names[0]} stand in another order than those of {names[1]}"


def _rows_of_reference(flow: Flow) -> dict[bytes, _Place]:
    """Return where each row stands that the reference has once, in whatever order its
    elements are."""
    leaves = [v for v in flow.in_order() if v.row.name and not v.is_call]
    held = [(leaf.row.name or "", flow.tensor(leaf.key)) for leaf in leaves]
    looked_at = [(name, t) for name, t in held if t is not None and _is_looked_at(t)]
    if sum(tensor.numel() for _, tensor in looked_at) > MOST_IN_ALL:
        return {}
    count: Counter[bytes] = Counter()
    places: dict[bytes, _Place] = {}
    for name, tensor in looked_at:
        for axis in range(tensor.dim()):
            for place, row in enumerate(_digests(tensor, axis)):
                count[row] += 1
                places[row] = module_of(name), place
    return {row: place for row, place in places.items() if count[row] == 1}


def _in_rows(
    known: dict[bytes, _Place], leaf: Value, tensor: Tensor
) -> Iterator[_Rows]:
    """Yield a parameter along each axis of which all rows are known, each one's once."""
    if not _is_looked_at(tensor):
        return
    for axis in range(tensor.dim()):
        places = tuple(known.get(row, ("", -1)) for row in _digests(tensor, axis))
        if len(places) > 1 and ("", -1) not in places and len({*places}) == len(places):
            yield _Rows(leaf, tensor, axis, places)


def _is_looked_at(tensor: Tensor) -> bool:
    is_large = tensor.numel() > MOST_ELEMENTS
    return tensor.is_floating_point() and tensor.dim() > 0 and not is_large


def _digests(tensor: Tensor, axis: int) -> list[bytes]:
    """Return what tells each row from others, whatever the order of its elements."""
    rows = tensor.to(torch.float64).movedim(axis, 0).unsqueeze(-1).flatten(1)
    in_order = rows.sort(dim=1).values.numpy()
    return [xxhash.xxh3_128_digest(row.tobytes()) for row in in_order]
