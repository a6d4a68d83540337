"""Which rows of the reference's parameters does a parameter hold, and in which order?

A port may hold the queries, keys and values of all layers in one tensor, the rows of each
head in an order of its own. Row by row it is seen which of the reference's parameters stand
where: so the rows of one can be put in another order, in every layer, or those of another
parameter in their place, which the loader may have missed.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import islice, permutations

import torch
from torch import Tensor

from roundoff.compare.blame.near_leaves import leaves_of, of_leaves_alone
from roundoff.compare.judging.step_causes import listed
from roundoff.compare.records.parameter_names import (
    module_of,
    numbers_in,
    without_numbers,
)
from roundoff.compare.records.value_sketch import in_reals
from roundoff.compare.repairs.leaf_changes import Held, LeafChange, cuts_of, order_of
from roundoff.compare.tensors.nearest import to_nearest
from roundoff.compare.values.value_flow import Flow, Value
from roundoff.compare.values.value_regions import Sides

#: Larger parameters are not looked at row by row, nor are programs with more in all.
MOST_ELEMENTS = 2**22
MOST_IN_ALL = 2**25
#: Orders of the parameters that make up one: all of five.
MOST_ORDERS = 120


@dataclass(frozen=True, slots=True)
class _Content:
    """What the reference holds in a parameter, or makes of parameters alone.

    Attributes:
        kind: its name without numbers, the same in all layers, and what is made of it.
        layer: the numbers in its name.
        rows: of shape (rows, elements of a row).
    """

    kind: str
    layer: tuple[str, ...]
    rows: Tensor


@dataclass(frozen=True, slots=True)
class _Found:
    """The rows of one content in a parameter.

    Attributes:
        content: of the reference.
        places: which rows of the parameter they are, rising.
        order: which row of the content stands at each of these.
    """

    content: _Content
    places: Tensor
    order: Tensor


@dataclass(frozen=True, slots=True)
class _Rows:
    """A parameter of the candidate row by row.

    Attributes:
        leaf: the parameter.
        tensor: what it holds, with an axis of one where single elements are looked at.
        axis: along which the elements of a row stand.
        kinds: what stands there of each of the reference's parameters, in all layers.
    """

    leaf: Value
    tensor: Tensor
    axis: int
    kinds: list[list[_Found]]

    def with_rows(self, others: Iterable[tuple[_Found, Tensor]]) -> Tensor | None:
        """Return the parameter with other rows in the places of some; None where it is so."""
        rows = self.tensor.movedim(self.axis, -1)
        flat = rows.reshape(-1, rows.shape[-1]).clone()
        for found, held in others:
            flat[found.places] = held.to(flat.dtype)
        moved = flat.reshape(rows.shape).movedim(-1, self.axis)
        if torch.equal(moved, self.tensor):
            return None
        return moved.reshape(tuple(self.leaf.row.shape or ())).contiguous()


def moved_rows(sides: Sides, present: Sequence[Held]) -> Iterator[LeafChange]:
    """Yield parameters with the reference's rows in another order.

    All that do not stand in the reference's order at once, then those of each of its
    parameters; or with the rows of another one, which the candidate holds nowhere.

    Args:
        sides: both programs.
        present: the parameters that a wrong region reads.
    """
    contents = list(_contents(sides.reference))
    if sum(content.rows.numel() for content in contents) > MOST_IN_ALL:
        return
    held = _all_held(sides.candidate)
    missed = [c for c in contents if not _are_among(in_reals(c.rows), held)]
    by_rows = [
        rows
        for leaf, tensor in (*present, *_beside(sides.candidate, present))
        for rows in _in_rows(leaf, tensor, contents)
    ]
    yield from _all_cut_alike(by_rows)
    yield from _in_order_of_layers(by_rows)
    yield from _shared_out_otherwise(sides.candidate, contents)
    yield from _joined_otherwise(by_rows)
    leaves = {leaf.key for leaf, _ in present}
    is_custom = any(_is_moved(f) for rows in by_rows for k in rows.kinds for f in k)
    by_rows = [rows for rows in by_rows if rows.leaf.key in leaves]
    for rows in by_rows:
        for kind in rows.kinds:
            # what stands as the reference's does is wrong where others do not
            orders = _in_other_orders(kind) if is_custom else ()
            beside = _in_order_of_others(kind, rows.kinds)
            for others, words in (*orders, *beside, *_of_others(kind, missed)):
                moved = rows.with_rows(others)
                if moved is not None:
                    tensors = {rows.leaf.key: moved}
                    yield LeafChange(tensors, f"{rows.leaf.row.name} {words}")


def _beside(flow: Flow, present: Sequence[Held]) -> Iterator[Held]:
    """Yield the other parameters of the modules that some are of."""
    known = {leaf.key for leaf, _ in present}
    modules = {module_of(leaf.row.name or "") for leaf, _ in present}
    for value in flow.in_order():
        is_leaf = bool(value.row.name) and not value.is_call and value.key not in known
        if is_leaf and module_of(value.row.name or "") in modules:
            tensor = flow.tensor(value.key)
            if tensor is not None:
                yield value, tensor


def _in_rows(
    leaf: Value, tensor: Tensor, contents: Sequence[_Content]
) -> Iterator[_Rows]:
    """Yield a parameter by rows, by columns and by single elements."""
    if not _is_looked_at(tensor):
        return
    for whole, axis in _ways(tensor):
        rows = whole.movedim(axis, -1)
        found = _found_in(rows.reshape(-1, rows.shape[-1]), contents)
        yield _Rows(leaf, whole, axis, list(_by_kind(found)))


def _ways(tensor: Tensor) -> list[tuple[Tensor, int]]:
    """Return a tensor with the axis along which the elements of a row stand: the last, the
    one before, and for single elements one more."""
    axes = (-1, -2) if tensor.dim() > 1 else ()
    ways = [(tensor, axis) for axis in axes if tensor.shape[axis] > 1]
    return [*ways, (tensor.unsqueeze(-1), -1)] if tensor.dim() < 3 else ways


def _is_looked_at(tensor: Tensor) -> bool:
    return tensor.is_floating_point() and 1 < tensor.numel() <= MOST_ELEMENTS


def _contents(flow: Flow) -> Iterator[_Content]:
    """Yield what parameters hold, and what is computed of one alone, in rows."""
    for value in flow.in_order():
        if value.inner or not of_leaves_alone(flow, value):
            continue
        leaves = leaves_of(flow, [value.key]) if value.is_call else [value]
        tensor = flow.tensor(value.key)
        is_moved = value.is_call and not value.computes
        if len(leaves) != 1 or is_moved or tensor is None or not _is_looked_at(tensor):
            continue
        name = leaves[0].row.name or ""
        kind = without_numbers(name)
        if value.is_call:
            kind = f"{kind} after {value.operator}"
        if tensor.dim() == 1:
            yield _Content(kind, numbers_in(name), tensor.unsqueeze(-1))
        if tensor.dim() == 2:
            yield _Content(kind, numbers_in(name), tensor)
            yield _Content(kind, numbers_in(name), tensor.mT)


def _found_in(rows: Tensor, contents: Sequence[_Content]) -> Iterator[_Found]:
    """Yield the contents of which all rows are there, each once."""
    places: dict[bytes, list[int]] = defaultdict(list)
    for place, row in enumerate(_as_bytes(rows)):
        places[row].append(place)
    for content in contents:
        if content.rows.shape[1:] != rows.shape[1:]:
            continue
        at = [places.get(row, []) for row in _as_bytes(content.rows)]
        are_found = all(len(each) == 1 for each in at)
        # rows that are equal, as of zeros, would all stand in one place
        if are_found and len({place for [place] in at}) == len(at):
            order = torch.tensor([place for [place] in at]).argsort()
            yield _Found(content, torch.tensor(at).flatten()[order], order)


def _as_bytes(rows: Tensor) -> list[bytes]:
    return [row.tobytes() for row in rows.to(torch.float64).numpy()]


def _by_kind(found: Iterator[_Found]) -> Iterator[list[_Found]]:
    """Yield together what stands for one parameter in several layers."""
    kinds: dict[tuple[str, torch.Size], list[_Found]] = {}
    for each in found:
        kinds.setdefault((each.content.kind, each.content.rows.shape), []).append(each)
    yield from kinds.values()


def _in_other_orders(
    kind: Sequence[_Found],
) -> Iterator[tuple[list[tuple[_Found, Tensor]], str]]:
    """Yield the rows of one kind in the reference's order, and cut otherwise."""
    count = len(kind[0].order)
    words = f"has the rows of the reference's {kind[0].content.kind} in another order"
    for order in (torch.arange(count), *map(order_of, cuts_of(count))):
        yield [(each, each.content.rows[order]) for each in kind], words


def _in_order_of_others(
    kind: Sequence[_Found], kinds: Sequence[Sequence[_Found]]
) -> Iterator[tuple[list[tuple[_Found, Tensor]], str]]:
    """Yield the rows of one kind in the order that another's have in each head.

    Keys are turned as queries are.
    """
    ours = kind[0]
    count = len(ours.order)
    for other in kinds:
        block = _order_in_blocks(other[0].order, count)
        if block is None:
            continue
        blocks = torch.arange(count).reshape(-1, len(block))
        order = blocks[:, block].flatten()
        words = (
            f"has the rows of the reference's {ours.content.kind} in another order than "
            f"those of {other[0].content.kind}"
        )
        yield [(each, each.content.rows[order]) for each in kind], words


def _order_in_blocks(order: Tensor, count: int) -> Tensor | None:
    """Return the order that rows have in all of the shortest blocks that fit ``count`` too.

    None for rows that are in order, and without such blocks.

    >>> _order_in_blocks(torch.tensor([0, 2, 1, 3, 4, 6, 5, 7]), 12).tolist()
    [0, 2, 1, 3]
    >>> _order_in_blocks(torch.arange(8), 12)
    """
    if torch.equal(order, torch.arange(len(order))):
        return None
    most = math.gcd(len(order), count)
    for size in (n for n in range(2, most + 1) if most % n == 0):
        blocks = order.reshape(-1, size)
        first = blocks - size * torch.arange(len(blocks))[:, None]
        if bool((first == first[0]).all()) and int(first.min()) == 0:
            return first[0]
    return None


def _of_others(
    kind: Sequence[_Found], missed: Sequence[_Content]
) -> Iterator[tuple[list[tuple[_Found, Tensor]], str]]:
    """Yield the rows of other parameters, of the same layers, for those of one kind."""
    first = kind[0].content
    others: dict[str, dict[tuple[str, ...], _Content]] = {}
    for content in missed:
        if content.rows.shape == first.rows.shape and content.kind != first.kind:
            others.setdefault(content.kind, {})[content.layer] = content
    for other, layers in others.items():
        if all(each.content.layer in layers for each in kind):
            words = f"holds the reference's {first.kind}, and should hold {other}"
            yield (
                [(each, layers[each.content.layer].rows[each.order]) for each in kind],
                words,
            )


def _all_cut_alike(by_rows: Sequence[_Rows]) -> Iterator[LeafChange]:
    """Yield all parameters with what does not stand in the reference's order cut alike."""
    moved = [
        (rows, [found for kind in rows.kinds for found in kind if _is_moved(found)])
        for rows in by_rows
    ]
    moved = [(rows, found) for rows, found in moved if found]
    sizes = {len(found.order) for _, each in moved for found in each}
    cuts = {cut[1:] for size in sizes for cut in cuts_of(size)}
    for inner in [None, *sorted(cuts)]:
        tensors: dict[int, Tensor] = {}
        for rows, each in moved:
            others = [(found, _cut_again(found, inner)) for found in each]
            whole = rows.with_rows((f, held) for f, held in others if held is not None)
            if whole is not None:
                tensors[rows.leaf.key] = whole
        leaves = [rows.leaf for rows, _ in moved if rows.leaf.key in tensors]
        names = listed([*dict.fromkeys(leaf.row.name or "" for leaf in leaves)])
        if leaves:
            words = f"{names} have the rows of the reference's in another order"
            yield LeafChange(tensors, words)


def _in_order_of_layers(by_rows: Sequence[_Rows]) -> Iterator[LeafChange]:
    """Yield all parameters that hold those of several layers with these from the first on."""
    tensors: dict[int, Tensor] = {}
    leaves = []
    for rows in by_rows:
        others = [other for kind in rows.kinds for other in _from_the_first_on(kind)]
        whole = rows.with_rows(others)
        if whole is not None:
            tensors[rows.leaf.key] = whole
            leaves.append(rows.leaf)
    names = listed([*dict.fromkeys(leaf.row.name or "" for leaf in leaves)])
    if leaves:
        words = f"{names} hold the reference's layers in another order"
        yield LeafChange(tensors, words)


def _from_the_first_on(kind: Sequence[_Found]) -> Iterator[tuple[_Found, Tensor]]:
    by_place = sorted(kind, key=lambda found: int(found.places[0]))
    by_layer = sorted(kind, key=lambda found: [*map(int, found.content.layer)])
    for place, found in zip(by_place, by_layer, strict=True):
        yield place, found.content.rows[found.order]


def _joined_otherwise(by_rows: Sequence[_Rows]) -> Iterator[LeafChange]:
    """Yield each parameter that several of the reference's make up with these in another
    order, the one in which the reference reads them first: tables of several features."""
    for rows in by_rows:
        parts = [found for kind in rows.kinds for found in kind]
        stand = sorted(parts, key=lambda found: int(found.places[0]))
        count = math.prod(rows.tensor.shape) // rows.tensor.shape[rows.axis]
        places = torch.cat([found.places for found in stand] or [torch.empty(0)])
        if len(parts) < 2 or not torch.equal(places, torch.arange(count)):
            continue
        for order in islice(permutations(parts), MOST_ORDERS):
            held = torch.cat([found.content.rows[found.order] for found in order])
            whole = replace(parts[0], places=torch.arange(count))
            moved = rows.with_rows([(whole, held)])
            if moved is not None:
                names = listed([found.content.kind for found in order])
                words = f"{rows.leaf.row.name} should hold in this order: {names}"
                yield LeafChange({rows.leaf.key: moved}, words)


@dataclass(frozen=True, slots=True)
class _Share:
    """A parameter that holds rows of one content, and which.

    Attributes: as of ``_Rows``; ``places`` are of the content.
    """

    leaf: Value
    tensor: Tensor
    axis: int
    places: list[int]

    @property
    def is_stretch(self) -> bool:
        """True for rows that stand one after the other."""
        return max(self.places) - min(self.places) < len(self.places)

    def with_rows(self, held: Tensor) -> Tensor:
        """Return the parameter with other rows."""
        moved = held.reshape(self.tensor.movedim(self.axis, -1).shape)
        moved = moved.movedim(-1, self.axis).to(self.tensor.dtype)
        return moved.reshape(tuple(self.leaf.row.shape or ())).contiguous()


def _shared_out_otherwise(
    flow: Flow, contents: Sequence[_Content]
) -> Iterator[LeafChange]:
    """Yield all parameters that hold a part of one of the reference's, each as a stretch of it.

    The heads of a layer, each with every second row for the first half of the rows.
    """
    tensors: dict[int, Tensor] = {}
    names: dict[str, None] = {}
    for number, shares in _shares_of(flow, contents).items():
        content = contents[number].rows
        places = sorted(place for share in shares for place in share.places)
        are_all = places == list(range(len(content))) and len(shares) > 1
        if not are_all or all(share.is_stretch for share in shares):
            continue
        shares.sort(
            key=lambda share: [*map(int, numbers_in(share.leaf.row.name or ""))]
        )
        stretches = torch.split(content, [len(share.places) for share in shares])
        for share, held in zip(shares, stretches, strict=True):
            tensors[share.leaf.key] = share.with_rows(held)
            names[share.leaf.row.name or ""] = None
    if tensors:
        words = f"{listed([*names])} hold rows that are no stretch of the reference's"
        yield LeafChange(tensors, words, is_patient=True)


def _shares_of(flow: Flow, contents: Sequence[_Content]) -> dict[int, list[_Share]]:
    """Return the parameters that hold rows of one content and no others, by its number."""
    known = {
        row: (number, place)
        for number, content in enumerate(contents)
        for place, row in enumerate(_as_bytes(content.rows))
    }
    shares: dict[int, list[_Share]] = defaultdict(list)
    for leaf in flow.in_order():
        tensor = None if leaf.is_call or not leaf.row.name else flow.tensor(leaf.key)
        if tensor is None or not _is_looked_at(tensor):
            continue
        for whole, axis in _ways(tensor):
            rows = whole.movedim(axis, -1)
            rows = rows.reshape(-1, rows.shape[-1])
            found = [known.get(row, (-1, 0)) for row in _as_bytes(rows)]
            numbers = {number for number, _ in found}
            if len(numbers) == 1 and -1 not in numbers:
                places = [place for _, place in found]
                shares[numbers.pop()].append(_Share(leaf, whole, axis, places))
    return shares


def _is_moved(found: _Found) -> bool:
    return not torch.equal(found.order, torch.arange(len(found.order)))


def _cut_again(found: _Found, inner: tuple[int, int, int] | None) -> Tensor | None:
    """Return the rows in the reference's order, or cut in these two axes inside of blocks."""
    count = len(found.order)
    if inner is None:
        return found.content.rows
    blocks, rest = divmod(count, math.prod(inner))
    return None if rest else found.content.rows[order_of((blocks, *inner))]


def _are_among(values: Tensor, held: Tensor) -> bool:
    """Return True where all of some values are among others, which rise."""
    if not held.numel():
        return not values.numel()
    return not to_nearest(held, values.reshape(-1).double()).any()


def _all_held(flow: Flow) -> Tensor:
    """Return the elements of all parameters of the candidate, in rising order."""
    parameters = [v for v in flow.values.values() if v.row.name and not v.is_call]
    tensors = [flow.tensor(value.key) for value in parameters]
    seen = [t for t in tensors if t is not None and _is_looked_at(t)]
    none = torch.empty(0, dtype=torch.float64)
    held = torch.cat([none, *(in_reals(t).reshape(-1).double() for t in seen)])
    return held.sort().values
