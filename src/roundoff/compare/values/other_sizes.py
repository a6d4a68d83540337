"""A recorded call on a tensor of another size: what its sizes would have been.

A program that takes the sizes of a view from the tensor leaves plain numbers in a recording.
Where an edit before it makes more rows, or fewer, they are taken from the tensor again.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from math import prod

from roundoff.ops import operators_that

_RESHAPE = operators_that("reshape")
#: Whose sizes follow the tensor that they read -> the axis that parameters belong to.
_ALONG_SPACE = {
    **dict.fromkeys(("convolution", "_convolution", "native_batch_norm"), 1),
    "native_layer_norm": -1,
}
#: The axes of one tensor, and those of another, that have the same elements.
JointAxes = tuple[range, range]


def takes_sizes(operator: str) -> bool:
    """Return True for a view or an expansion, whose second argument are sizes."""
    return operator in _RESHAPE or operator == "expand"


def may_be_longer(
    operator: str,
    recorded: Sequence[tuple[int, ...]],
    shapes: Sequence[tuple[int, ...]],
) -> bool:
    """Return True where nothing but the number of rows or places of the first input differs."""
    axis = _ALONG_SPACE.get(operator)
    if axis is None or list(recorded[1:]) != list(shapes[1:]):
        return False
    before, now = recorded[0], shapes[0]
    return len(before) == len(now) > 1 and before[axis] == now[axis]


def other_sizes(
    operator: str,
    sizes: Sequence[int],
    recorded: Sequence[int],
    shape: Sequence[int],
    changed: Mapping[int, int],
) -> list[int] | None:
    """Return the sizes that a view takes of a tensor of another shape; None where none fit.

    Args:
        operator: a view or an expansion.
        sizes: that it took.
        recorded: the shape of what it read.
        shape: of what it reads now.
        changed: what became of sizes of other tensors.

    >>> other_sizes("view", [2, 80, 32], [2, 8, 10, 32], [2, 7, 9, 32], {})
    [2, 63, 32]
    >>> other_sizes("view", [2, 8, 10, 32], [2, 80, 32], [2, 63, 32], {8: 7, 10: 9})
    [2, 7, 9, 32]
    >>> other_sizes("view", [2, 5, 4, 8], [2, 5, 32], [2, 6, 32], {})
    [2, 6, 4, 8]
    >>> other_sizes("expand", [2, 5, 8], [1, 5, 8], [1, 6, 8], {})
    [2, 6, 8]
    """
    if len(recorded) != len(shape):
        return None
    if operator == "expand":
        return _expanded(sizes, recorded, shape)
    whole = [*sizes]
    if -1 in whole:
        known = prod(size for size in whole if size != -1)
        if known == 0:
            return None
        whole[whole.index(-1)] = prod(recorded) // known
    if prod(whole) != prod(recorded) or not prod(recorded):
        return None
    for before, behind in joint_axes(recorded, whole):
        wanted = prod(shape[axis] for axis in before)
        if wanted == prod(whole[axis] for axis in behind):
            continue
        fitted = _fitted([whole[axis] for axis in behind], wanted, changed)
        if fitted is None:
            return None
        for axis, size in zip(behind, fitted, strict=True):
            whole[axis] = size
    return whole


def _expanded(
    sizes: Sequence[int], recorded: Sequence[int], shape: Sequence[int]
) -> list[int]:
    expanded = [*sizes]
    for axis in range(1, len(shape) + 1):
        if recorded[-axis] == sizes[-axis]:
            expanded[-axis] = shape[-axis]
    return expanded


def joint_axes(one: Sequence[int], other: Sequence[int]) -> Iterator[JointAxes]:
    """Yield the axes of two shapes that are made of each other, the fewest together."""
    ends = {prod(other[:count]): count for count in range(len(other) + 1)}
    first = second = 0
    for count in range(1, len(one) + 1):
        end = ends.get(prod(one[:count]), 0)
        if end > second:
            yield range(first, count), range(second, end)
            first, second = count, end


def _fitted(
    sizes: list[int], wanted: int, changed: Mapping[int, int]
) -> list[int] | None:
    """Return sizes that have so many: as others have changed, or the first that can be."""
    alike = [changed.get(size, size) for size in sizes]
    if prod(alike) == wanted:
        return alike
    for place, size in enumerate(sizes):
        others = prod(sizes[:place] + sizes[place + 1 :])
        if size > 1 and others and wanted % others == 0:
            return [*sizes[:place], wanted // others, *sizes[place + 1 :]]
    return None
