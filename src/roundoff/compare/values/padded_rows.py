"""Places of a batch that are filled up, and count for nothing.

Sequences of several lengths stand in one tensor behind padding, and a mask says where. What
a program computes there is anybody's guess, and another program may leave these places out.
They count for nothing where no gradient reaches them: then values agree that agree in the
places that the mask keeps.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from itertools import islice

import torch
from torch import Tensor

from roundoff.compare.records.value_sketch import Sketch, sketch_of_tensor
from roundoff.compare.values.value_flow import Flow

#: Masks that are tried, at most.
MOST_MASKS = 16
#: Kept values of fewer elements may be others by chance.
FEWEST = 16
#: Values with a gradient of which one has to say that nothing reaches the padding.
LEAST_GRADIENTS = 2
_FORWARD = "forward"
_BACKWARD = "backward"
#: What a backward pass begins with.
_ONES = "ones_like"


def padding_masks(reference: Flow, candidate: Flow) -> tuple[Tensor, ...]:
    """Return the masks of either side outside which no gradient of either is.

    None without tensors, or without a backward pass.
    """
    flows = (reference, candidate)
    masks = _different(mask for flow in flows for mask in _masks(flow))
    reaching = {
        mask: [_gradients_reaching(flow, mask) for flow in flows]
        for mask in islice(masks, MOST_MASKS)
    }
    return tuple(
        mask for mask, counts in reaching.items() if 0 in counts and not any(counts)
    )


def kept_sketches(flow: Flow, masks: Sequence[Tensor]) -> Iterator[tuple[int, Sketch]]:
    """Yield the sketches of what masks keep of the values of a forward pass, by key."""
    if not masks:
        return
    for value in flow.values.values():
        if value.row.phase != _FORWARD or value.says_nothing:
            continue
        tensor = flow.tensor(value.key)
        if tensor is None:
            continue
        for mask in masks:
            sketches = [sketch_of_tensor(rows) for rows in kept_rows(tensor, mask)]
            for sketch in filter(None, sketches):
                if sketch.numel >= FEWEST and not sketch.constant:
                    yield value.key, sketch


def kept_rows(tensor: Tensor, mask: Tensor) -> Iterator[Tensor]:
    """Yield the places of a tensor that a mask of sequences and places keeps.

    The axes of the mask are the tensor's first ones as one, or the sequences are the first
    axis and the places any other; what has places alone is the same in all sequences.

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
    sequences, places = mask.shape
    if tensor.dim() < 2:
        return
    if len(tensor) == mask.numel():
        yield tensor[mask.flatten()]
    elif len(tensor) == sequences:
        for axis in range(1, tensor.dim()):
            if tensor.shape[axis] == places:
                yield tensor.movedim(axis, 1)[mask]
    elif len(tensor) == places:
        yield tensor.expand(sequences, *tensor.shape)[mask]


def _masks(flow: Flow) -> Iterator[Tensor]:
    """Yield the tables of zeros and ones that a forward pass reads or makes."""
    for value in flow.in_order():
        row = value.row
        if row.phase != _FORWARD or row.name or len(row.shape or ()) != 2:
            continue
        if value.is_number and (row.min, row.max) != (0.0, 1.0):
            continue
        tensor = flow.tensor(value.key)
        if tensor is not None and bool(((tensor == 0) | (tensor == 1)).all()):
            yield tensor.to(torch.bool)


def _different(masks: Iterable[Tensor]) -> Iterator[Tensor]:
    """Yield masks that keep some places and not all, each once."""
    seen: list[Tensor] = []
    for mask in masks:
        is_new = not any(torch.equal(mask, other) for other in seen)
        if is_new and mask.any() and not mask.all():
            seen.append(mask)
            yield mask


def _gradients_reaching(flow: Flow, mask: Tensor) -> int | None:
    """Return how many gradients are not zero outside a mask; None where too few have it."""
    read = 0
    reaching = 0
    for key in _gradients(flow):
        # that of a sum is the same everywhere, before a mask is multiplied with it
        if flow.values[key].says_nothing:
            continue
        tensor = flow.tensor(key)
        if tensor is None or tensor.shape[: mask.dim()] != mask.shape:
            continue
        read += 1
        reaching += bool(tensor[~mask].any())
    return reaching if read >= LEAST_GRADIENTS else None


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
