"""A value behind one padding, as it stands behind another.

One program fills sequences up to the longest, and another to a multiple of a window: their
masks keep as many places of each sequence, in tensors of other lengths. Or one program fills
the rows of all samples up to one number, and the other has these rows alone.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import permutations

import torch
from torch import Tensor

#: A mask, and one of other lengths that keeps as many places of each sequence.
Pair = tuple[Tensor, Tensor]


def pairs_of_paddings(masks: Sequence[Tensor]) -> Iterator[Pair]:
    """Yield masks of the same sequences, behind paddings of two lengths.

    For a mask of rows one that keeps as many rows, and no others.

    >>> short = torch.tensor([[True, False], [True, True]])
    >>> long = torch.tensor([[True, False, False], [True, True, False]])
    >>> [(one.shape[1], other.shape[1]) for one, other in pairs_of_paddings([short, long])]
    [(2, 3), (3, 2)]
    """
    for mask in masks:
        if mask.dim() == 1:
            yield torch.ones(int(mask.sum()), dtype=torch.bool), mask
    for one, other in permutations(masks, 2):
        are_of_sequences = one.dim() == other.dim() == 2 and len(one) == len(other)
        if not are_of_sequences or one.shape == other.shape:
            continue
        if torch.equal(one.sum(1), other.sum(1)):
            yield one, other


def behind_other_padding(content: Tensor, pair: Pair) -> Tensor | None:
    """Return a tensor with its kept places behind the other padding, with zeros there.

    Sequences and places are its first axis, or the sequences the first and the places any
    other; rows are the first. None for a tensor without these.

    >>> short = torch.tensor([[True, False], [True, True]])
    >>> long = torch.tensor([[True, False, False], [True, True, False]])
    >>> behind_other_padding(torch.tensor([[1, 9], [2, 3]]), (short, long)).tolist()
    [[1, 0, 0], [2, 3, 0]]
    >>> behind_other_padding(torch.tensor([[1], [9], [2], [3]]), (short, long)).tolist()
    [[1], [0], [0], [2], [3], [0]]
    """
    mask, other = pair
    if not content.dim():
        return None
    if mask.dim() == 1:
        return _with_more_rows(content, mask, other)
    sequences, places = mask.shape
    if len(content) == mask.numel():
        apart = content.reshape(sequences, places, *content.shape[1:])
        return _moved(apart, 1, pair).flatten(0, 1)
    axes = [axis for axis in range(1, content.dim()) if content.shape[axis] == places]
    if len(content) != sequences or len(axes) != 1:
        return None
    return _moved(content, axes[0], pair)


def _with_more_rows(content: Tensor, mask: Tensor, other: Tensor) -> Tensor | None:
    if len(content) != len(mask):
        return None
    moved = content.new_zeros(len(other), *content.shape[1:])
    moved[other] = content[mask]
    return moved


def _moved(content: Tensor, axis: int, pair: Pair) -> Tensor:
    mask, other = pair
    rows = content.movedim(axis, 1)
    moved = rows.new_zeros(*other.shape, *rows.shape[2:])
    moved[other] = rows[mask]
    return moved.movedim(1, axis)
