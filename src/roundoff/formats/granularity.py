"""Which elements share a scale."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from roundoff.errors import FormatError


@dataclass(frozen=True)
class PerTensor:
    """One scale for all elements.

    * tensor ``(A, B, C)`` -> scale ``(1, 1, 1)``
    """


@dataclass(frozen=True)
class PerAxis:
    """One scale for each index of ``axis``, the axis that is *kept*.

    * tensor ``(A, B, C)``, axis 1 -> scale ``(1, B, 1)``
    """

    axis: int


@dataclass(frozen=True)
class PerToken:
    """One scale for each vector along the last axis.

    * tensor ``(A, B, C)`` -> scale ``(A, B, 1)``
    """


@dataclass(frozen=True)
class PerGroup:
    """One scale for each run of ``group_size`` elements along ``axis``.

    * tensor ``(A, B, C)``, axis -1 -> groups ``(A, B, C / group_size, group_size)``, scale ``(A, B, C / group_size, 1)``
    """

    group_size: int
    axis: int = -1


@dataclass(frozen=True)
class PerBlock:
    """One scale for each block of ``block_size`` (one extent an axis).

    * tensor ``(A, B)``, block ``(a, b)`` -> blocks ``(A/a, a, B/b, b)``, scale ``(A/a, 1, B/b, 1)``
    """

    block_size: tuple[int, ...]


Granularity = PerTensor | PerAxis | PerToken | PerGroup | PerBlock


def grouped(x: Tensor, granularity: Granularity) -> tuple[Tensor, tuple[int, ...]]:
    """A view of ``x`` and the axes of it over which a scale is shared.

    Raises ``FormatError`` when an axis is out of range or a size does not divide.

    >>> import torch
    >>> view, axes = grouped(torch.zeros(8, 16), PerGroup(4))
    >>> tuple(view.shape), axes
    ((8, 4, 4), (2,))
    """
    axes = tuple(range(x.ndim))
    if isinstance(granularity, PerTensor):
        return x, axes
    if isinstance(granularity, PerToken):
        return x, axes[-1:]
    if isinstance(granularity, PerAxis):
        kept = _axis(x, granularity.axis)
        return x, tuple(a for a in axes if a != kept)
    sizes = [1] * x.ndim
    if isinstance(granularity, PerGroup):
        sizes[_axis(x, granularity.axis)] = granularity.group_size
        shared = {_axis(x, granularity.axis)}
    else:
        if len(granularity.block_size) != x.ndim:
            raise FormatError("a block needs one extent for each axis", where=repr(granularity),
                              expected=f"{x.ndim} extents", got=f"shape {tuple(x.shape)}")  # fmt: skip
        sizes = list(granularity.block_size)
        shared = set(axes)
    shape: list[int] = []
    over: list[int] = []
    for axis, (extent, size) in enumerate(zip(x.shape, sizes, strict=True)):
        if axis not in shared:
            shape.append(extent)
            continue
        if size < 1 or extent % size:
            raise FormatError(f"blocks of {size} do not divide axis {axis} of {extent}", where=repr(granularity),
                              expected=f"a divisor of {extent}", got=f"shape {tuple(x.shape)}",
                              do="pad the tensor, or choose another size")  # fmt: skip
        shape += [extent // size, size]
        over.append(len(shape) - 1)
    return x.reshape(shape), tuple(over)


def _axis(x: Tensor, axis: int) -> int:
    if not -x.ndim <= axis < x.ndim:
        raise FormatError(f"no axis {axis}", where="granularity", expected=f"-{x.ndim} <= axis < {x.ndim}",
                          got=f"shape {tuple(x.shape)}")  # fmt: skip
    return axis % x.ndim
