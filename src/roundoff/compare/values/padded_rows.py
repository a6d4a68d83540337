"""Places of a batch that are filled up, and count for nothing.

Sequences of several lengths stand in one tensor behind padding, and a mask says where; or
all pairs of nodes, of which few have an edge. Or the rows of all samples are filled up to
one number, and no mask need say so. What a program computes there is anybody's
guess, and another program may leave these places out. They count for nothing where no
gradient goes on from them: then values agree that agree in the places that the mask keeps.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import cache
from itertools import chain, islice

import torch
from torch import Tensor

from roundoff.compare.records.value_sketch import Sketch, SketchIndex, sketch_of_tensor
from roundoff.compare.rounding.rounding_bound import PRODUCTS
from roundoff.compare.values.value_flow import Flow, Value

#: Masks that are tried, at most.
MOST_MASKS = 16
#: Kept values of fewer elements may be others by chance.
FEWEST = 16
#: Values with a gradient of which one has to say that nothing reaches the padding.
LEAST_GRADIENTS = 2
#: The share of all gradients that have to have the places: fewer do by chance.
LEAST_SHARE = 0.05
#: The share of those with the places that may have them by chance.
MOST_REACHING = 0.05
#: Values of the other side that a mask has to keep where a gradient reaches its padding: one
#: of ``FEWEST`` elements may be another by chance, several of several calls are not.
LEAST_KEPT = 4
_FORWARD = "forward"
_BACKWARD = "backward"
#: What a backward pass begins with.
_ONES = "ones_like"


def padding_masks(reference: Flow, candidate: Flow, limit: float) -> tuple[Tensor, ...]:
    """Return the masks of either side outside which no gradient of either is.

    None without tensors, or without a backward pass. Or one that keeps what the other
    side, which has no such places, computes: then a fault lets them count. And without a
    mask the rows that a gradient reaches, if the other side has none but those.

    Args:
        reference: its values.
        candidate: its values.
        limit: relative distance up to which values agree.
    """
    flows = (reference, candidate)
    places = {shape for flow in flows for shape in _places_of_gradients(flow)}
    fitting = ((m for m in _masks(flow) if tuple(m.shape) in places) for flow in flows)
    each = (islice(_different(masks), MOST_MASKS) for masks in fitting)
    masks = _different(chain.from_iterable(each))
    sure: list[Tensor] = []
    unsure: list[tuple[int, Tensor]] = []
    for mask in masks:
        shares = [_reach(flow, mask) for flow in flows]
        if _counts_for_nothing(shares):
            sure.append(mask)
        elif shares.count(None) == 1:
            unsure.append((shares.index(None), mask))
        elif None in shares:
            # of a loss alone: few of all gradients have its places
            holders = [n for n, flow in enumerate(flows) if _reach(flow, mask, 0) == 0]
            unsure += [(1 - holder, mask) for holder in holders]
    index = cache(lambda number: _index_of(flows[number], sure))
    kept = [
        mask
        for other, mask in unsure
        if _keeps(flows[1 - other], mask, index(other), limit)
    ]
    known = {mask.numel() for mask in (*sure, *kept)}
    for other, flow in enumerate(reversed(flows)):
        for mask in _rows_with_gradients(flow):
            is_new = mask.numel() not in known
            if is_new and _keeps(flow, mask, index(other), limit, least=1):
                kept.append(mask)
    return (*sure, *kept)


def _rows_with_gradients(flow: Flow) -> Iterator[Tensor]:
    """Yield, of each number of rows that gradients have, the rows where any is not zero.

    Of those that are zero in some rows; of parameters, as many rows may be something else.
    """
    reached: dict[int, Tensor] = {}
    counts: Counter[int] = Counter()
    for key in _gradients(flow):
        row = flow.values[key].row
        tensor = flow.tensor(key)
        if tensor is None or tensor.dim() < 2 or row.name:
            continue
        rows = tensor.ne(0).flatten(1).any(1)
        if rows.any() and not rows.all():
            reached[len(rows)] = reached.get(len(rows), rows) | rows
            counts[len(rows)] += 1
    for size, rows in reached.items():
        if counts[size] >= LEAST_GRADIENTS and not rows.all():
            yield rows


def _places_of_gradients(flow: Flow) -> Iterator[tuple[int, ...]]:
    """Yield the first axes of gradients, as many as a mask may have."""
    for key in _gradients(flow):
        shape = tuple(flow.values[key].row.shape or ())
        yield from (shape[:count] for count in range(2, len(shape) + 1))


def _counts_for_nothing(shares: Sequence[float | None]) -> bool:
    """Return True where no gradient outside a mask goes on, by the share of each program's.

    Where one program alone has the places, some of its gradients have as many by chance.
    """
    known = [share for share in shares if share is not None]
    allowed = MOST_REACHING if len(known) == 1 else 0.0
    return bool(known) and max(known) <= allowed


def _index_of(flow: Flow, masks: Sequence[Tensor]) -> SketchIndex:
    """Return what a forward pass computes, whole and as these masks keep it."""
    whole = [
        (value.key, value.sketch)
        for value in flow.values.values()
        if value.row.phase == _FORWARD and value.sketch is not None
    ]
    kept = [(each.key, each.sketch) for each in kept_values(flow, masks)]
    return SketchIndex([*whole, *kept])


def _keeps(
    flow: Flow,
    mask: Tensor,
    others: SketchIndex,
    limit: float,
    *,
    least: int = LEAST_KEPT,
) -> bool:
    """Return True where so many of the values that a mask keeps are the other program's."""
    found: set[int] = set()
    for each in kept_values(flow, [mask]):
        if others.near(each.sketch, limit):
            found.add(each.key)
        if len(found) == least:
            return True
    return False


@dataclass(frozen=True, slots=True)
class Kept:
    """What a mask keeps of a value of the forward pass."""

    key: int
    rows: Tensor
    sketch: Sketch


def kept_values(flow: Flow, masks: Sequence[Tensor]) -> Iterator[Kept]:
    """Yield what masks keep of the values of a forward pass, but for constants."""
    if not masks:
        return
    for value in flow.values.values():
        if value.row.phase != _FORWARD or value.says_nothing:
            continue
        tensor = flow.tensor(value.key)
        if tensor is None:
            continue
        for mask in masks:
            for rows in kept_rows(tensor, mask):
                sketch = sketch_of_tensor(rows)
                if sketch is None or sketch.constant or sketch.numel < FEWEST:
                    continue
                yield Kept(value.key, rows, sketch)


def kept_rows(tensor: Tensor, mask: Tensor) -> Iterator[Tensor]:
    """Yield the places of a tensor that a mask of sequences and places keeps.

    The axes of the mask are the tensor's first ones as one, or the sequences are the first
    axis and the places any other; what has places alone is the same in all sequences. A mask
    of more axes, of pairs, keeps those of a tensor's first ones; one of rows those of any.

    >>> mask = torch.tensor([[True, False, True], [True, True, False]])
    >>> [rows.tolist() for rows in kept_rows(torch.arange(6).view(2, 3), mask)]
    [[0, 2, 3, 4]]
    >>> [rows.tolist() for rows in kept_rows(torch.arange(6).view(6, 1), mask)]
    [[[0], [2], [3], [4]]]
    >>> [rows.tolist() for rows in kept_rows(torch.arange(6).view(2, 1, 3), mask)]
    [[[0], [2], [3], [4]]]
    >>> [rows.tolist() for rows in kept_rows(torch.arange(3).view(3, 1), mask)]
    [[[0], [2], [0], [1]]]
    """
    if tensor.dim() < 2:
        return
    if len(tensor) == mask.numel():
        yield tensor[mask.flatten()]
    elif mask.dim() > 2:
        if _has_places(tensor, mask):
            yield tensor[mask]
    elif mask.dim() == 1:
        for axis in range(1, tensor.dim()):
            if tensor.shape[axis] == len(mask):
                yield tensor.movedim(axis, 0)[mask]
    else:
        yield from _rows_of_sequences(tensor, mask)


def places_kept(shape: Sequence[int], masks: Sequence[Tensor]) -> Iterator[Tensor]:
    """Yield, for each way in which a mask fits a shape, where a tensor of it counts.

    >>> mask = torch.tensor([[True, False, True], [True, True, False]])
    >>> [kept.shape for kept in places_kept((2, 3, 1), [mask])]
    [torch.Size([2, 3, 1])]
    >>> [kept[..., 0].tolist() for kept in places_kept((6, 1), [mask])]
    [[True, False, True, True, True, False]]
    """
    numel = math.prod(shape)
    if not numel:
        return
    places = torch.arange(numel).view(tuple(shape))
    for mask in masks:
        for rows in kept_rows(places, mask):
            kept = torch.zeros(numel, dtype=torch.bool)
            kept[rows.reshape(-1)] = True
            if not kept.all():
                yield kept.view(tuple(shape))


def _rows_of_sequences(tensor: Tensor, mask: Tensor) -> Iterator[Tensor]:
    sequences, places = mask.shape
    if len(tensor) == sequences:
        for axis in range(1, tensor.dim()):
            if tensor.shape[axis] == places:
                yield tensor.movedim(axis, 1)[mask]
    elif len(tensor) == places:
        yield tensor.expand(sequences, *tensor.shape)[mask]


def _masks(flow: Flow) -> Iterator[Tensor]:
    """Yield the tables of zeros and ones that a forward pass reads or makes, as they are
    and the other way round: what is left out is masked as well. Behind them where factors
    for whole rows are not zero.

    Axes of one element are for broadcasting, and no axes of places.
    """
    factors: list[Tensor] = []
    for value in flow.in_order():
        row = value.row
        axes = [size for size in row.shape or () if size != 1]
        is_empty = 0 in axes
        if row.phase != _FORWARD or row.name or len(axes) < 2 or is_empty:
            continue
        may_be_table = not value.is_number or (row.min, row.max) == (0.0, 1.0)
        is_factor = bool(row.zero) and _is_factor_of_rows(flow, value)
        tensor = flow.tensor(value.key) if may_be_table or is_factor else None
        if tensor is None:
            continue
        mask = tensor.reshape(axes) != 0
        if bool(((tensor == 0) | (tensor == 1)).all()):
            yield from (mask, ~mask)
        elif is_factor:
            factors.append(mask)
    yield from factors


def masks_made(*flows: Flow) -> Iterator[Tensor]:
    """Yield what programs read or make that keeps some places and not all, each once."""
    return _different(chain.from_iterable(map(_masks, flows)))


def _is_factor_of_rows(flow: Flow, value: Value) -> bool:
    """Return True for what is multiplied with a value of more axes, or longer ones."""
    readers = (flow.values[key] for key in flow.readers.get(value.key, ()))
    return any(
        reader.operator in PRODUCTS and (reader.numel or 0) > (value.numel or 0)
        for reader in readers
    )


def _different(masks: Iterable[Tensor]) -> Iterator[Tensor]:
    """Yield masks that keep some places and not all, each once."""
    seen: list[Tensor] = []
    for mask in masks:
        is_new = not any(torch.equal(mask, other) for other in seen)
        if is_new and mask.any() and not mask.all():
            seen.append(mask)
            yield mask


def _reach(flow: Flow, mask: Tensor, least_share: float = LEAST_SHARE) -> float | None:
    """Return of how many gradients, as a share, what is outside a mask goes on to anything
    else.

    What is multiplied with zeros afterwards does not. None where too few gradients have the
    places of the mask: of all a smaller share than ``least_share``.
    """
    read = reaching = 0
    gradients = _gradients(flow)
    for key in gradients:
        if tuple(flow.values[key].row.shape or ())[: mask.dim()] != mask.shape:
            continue
        tensor = flow.tensor(key)
        if tensor is None:
            continue
        read += 1
        if _is_outside(tensor, mask) and _is_handed_on(flow, key, mask):
            reaching += 1
    if read < max(LEAST_GRADIENTS, least_share * len(gradients)):
        return None
    return reaching / read


def _is_outside(tensor: Tensor, mask: Tensor) -> bool:
    """Return True where a tensor holds anything outside of a mask.

    Not where it does not once its sequences, and those of the mask, stand by their lengths:
    packed sequences are sorted.

    >>> mask = torch.tensor([[True, False], [True, True]])
    >>> _is_outside(torch.tensor([[1, 2], [3, 0]]), mask)
    False
    >>> _is_outside(torch.tensor([[1, 2], [3, 4]]), mask)
    True
    """
    if not tensor[~mask].any():
        return False
    if mask.dim() != 2:
        return True
    there = tensor.reshape(*mask.shape, -1).ne(0).any(2)
    return bool((_by_length(there) & ~_by_length(mask)).any())


def _by_length(rows: Tensor) -> Tensor:
    return rows[rows.sum(1).argsort(stable=True)]


def _is_handed_on(flow: Flow, key: int, mask: Tensor) -> bool:
    """Return True where a gradient is read by what has other places, or is left."""
    value = flow.values[key]
    readers = [flow.values[k] for k in flow.readers.get(key, ())]
    held = [flow.tensor(reader.key) for reader in readers]
    is_left = bool(value.row.name)
    return is_left or any(t is not None and not _has_places(t, mask) for t in held)


def _has_places(tensor: Tensor, mask: Tensor) -> bool:
    return tensor.shape[: mask.dim()] == mask.shape


def _gradients(flow: Flow) -> set[int]:
    """Return what a backward pass makes of the gradient that it begins with."""
    waiting = [value.key for value in flow.values.values() if value.operator == _ONES]
    gradients: set[int] = set()
    while waiting:
        for key in flow.readers.get(waiting.pop(), ()):
            value = flow.values[key]
            if value.row.phase == _BACKWARD and key not in gradients:
                gradients.add(key)
                waiting.append(key)
    return gradients
