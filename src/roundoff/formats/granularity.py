"""Granularity: which elements of a tensor share qparams (one scale and zero point).

Each granularity gives the view in which the sharing elements lie along whole axes, and
those axes. For ``x`` of shape ``(6, 4)``:

====================  ===============  ============  ==================
granularity           view             reduced axes  shape of the scale
====================  ===============  ============  ==================
PerTensor()           (6, 4)           (0, 1)        (1, 1)
PerAxis(0)            (6, 4)           (1,)          (6, 1)
PerAxis(-1)           (6, 4)           (0,)          (1, 4)
PerToken()            (6, 4)           (1,)          (6, 1)
PerGroup(2)           (6, 2, 2)        (2,)          (6, 2, 1)
PerGroup(3, axis=0)   (2, 3, 4)        (1,)          (2, 1, 4)
PerBlock((3, 2))      (2, 3, 2, 2)     (1, 3)        (2, 1, 2, 1)
====================  ===============  ============  ==================

>>> import torch
>>> from roundoff.formats import choose_qparams, parse_format
>>> for granularity in (
...     PerTensor(), PerAxis(0), PerAxis(-1), PerToken(), PerGroup(2), PerGroup(3, axis=0), PerBlock((3, 2))
... ):
...     qparams = choose_qparams(torch.ones(6, 4), parse_format("int8"), granularity)
...     print(*granularity.split((6, 4)), tuple(qparams.scale.shape))
(6, 4) (0, 1) (1, 1)
(6, 4) (1,) (6, 1)
(6, 4) (0,) (1, 4)
(6, 4) (1,) (6, 1)
(6, 2, 2) (2,) (6, 2, 1)
(2, 3, 4) (1,) (2, 1, 4)
(2, 3, 2, 2) (1, 3) (2, 1, 2, 1)
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TypeAlias

from roundoff.errors import FormatError

__all__ = ["Granularity", "PerAxis", "PerBlock", "PerGroup", "PerTensor", "PerToken"]

Split: TypeAlias = tuple[tuple[int, ...], tuple[int, ...]]


@dataclass(frozen=True)
class PerTensor:
    """One scale for all elements.

    >>> PerTensor().split((6, 4))
    ((6, 4), (0, 1))
    """

    def split(self, shape: Sequence[int]) -> Split:
        return _view(shape, tuple(range(len(shape))))


@dataclass(frozen=True)
class PerAxis:
    """One scale for each index of ``axis``, the axis that is kept.

    >>> PerAxis(1).split((8, 3, 5, 5)), PerAxis(0).split((8,))
    (((8, 3, 5, 5), (0, 2, 3)), ((8, 1), (1,)))
    """

    axis: int

    def split(self, shape: Sequence[int]) -> Split:
        kept = _axis(self.axis, shape, self)
        return _view(shape, tuple(i for i in range(len(shape)) if i != kept))


@dataclass(frozen=True)
class PerToken:
    """One scale for each index of all but the last axis.

    >>> PerToken().split((2, 7, 16))
    ((2, 7, 16), (2,))
    """

    def split(self, shape: Sequence[int]) -> Split:
        return tuple(shape), (_axis(-1, shape, self),)


@dataclass(frozen=True)
class PerGroup:
    """One scale for each run of ``group_size`` elements along ``axis``.

    >>> PerGroup(32).split((8, 64))
    ((8, 2, 32), (2,))
    """

    group_size: int
    axis: int = -1

    def split(self, shape: Sequence[int]) -> Split:
        axis = _axis(self.axis, shape, self)
        groups = _divide(shape[axis], self.group_size, axis, shape, self)
        return (*shape[:axis], groups, self.group_size, *shape[axis + 1 :]), (axis + 1,)


@dataclass(frozen=True)
class PerBlock:
    """One scale for each block; ``block_size`` has one entry per axis.

    >>> PerBlock((128, 128)).split((256, 128))
    ((2, 128, 1, 128), (1, 3))
    """

    block_size: tuple[int, ...]

    def split(self, shape: Sequence[int]) -> Split:
        if len(self.block_size) != len(shape):
            raise FormatError(
                "one block size per axis is needed",
                where=str(self),
                expected=f"{len(shape)} sizes, for shape {tuple(shape)}",
                got=f"{len(self.block_size)} sizes",
                do="use the axis' own length where it shall not be divided",
            )
        view: list[int] = []
        for axis, size in enumerate(self.block_size):
            view += [_divide(shape[axis], size, axis, shape, self), size]
        return _view(view, tuple(range(1, len(view), 2)))


Granularity: TypeAlias = PerTensor | PerAxis | PerToken | PerGroup | PerBlock


def _view(shape: Sequence[int], axes: tuple[int, ...]) -> Split:
    """With an axis of length 1 to reduce where there is none, since torch takes no axes
    to mean all of them.
    """
    return (tuple(shape), axes) if axes else ((*shape, 1), (len(shape),))


def _axis(axis: int, shape: Sequence[int], granularity: object) -> int:
    """Count ``axis`` from the front."""
    if not -len(shape) <= axis < len(shape):
        raise FormatError(
            f"axis {axis} is out of range",
            where=str(granularity),
            expected=f"an axis in [{-len(shape)}, {len(shape)})"
            if shape
            else "a tensor with axes",
            got=f"a tensor of shape {tuple(shape)}",
            do="count axes from 0 in front or from -1 at the back, or use PerTensor()",
        )
    return axis % len(shape)


def _divide(
    length: int, size: int, axis: int, shape: Sequence[int], granularity: object
) -> int:
    """Return how many runs of ``size`` make up ``length``."""
    if size < 1 or length % size:
        raise FormatError(
            f"size {size} does not divide axis {axis}",
            where=str(granularity),
            expected=f"a positive divisor of {length}",
            got=f"a tensor of shape {tuple(shape)}",
            do="choose a size that divides the axis, or fill the axis up with zeros, which change no amax",
        )
    return length // size
