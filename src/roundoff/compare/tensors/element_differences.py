"""The elements behind the metrics of one site: which differ, how much, and where."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from torch import Tensor

from roundoff.compare.tensors.exact import (
    Array,
    absolute_difference,
    distance,
    grid_of,
    raw_equal,
    wide,
)
from roundoff.compare.tensors.metrics import comparable_pair

#: Elements that are held as fp64 at once: 8 MiB of each tensor.
_CHUNK = 2**20
#: Axes longer than this are not looked along.
_AXIS = 4096


@dataclass(frozen=True, slots=True)
class ElementPair:
    """One element of both tensors.

    A value is None for NaN; a complex number stands as its modulus. ``error`` is
    |r - c|, None where one of them is not finite; ``ulp`` as in ``Metrics``.
    """

    index: list[int]
    reference: float | int | None
    candidate: float | int | None
    error: float | None
    ulp: float | None


@dataclass(frozen=True, slots=True)
class Decade:
    """How many errors are from 10**low to below 10**(low + 1)."""

    low: int
    count: int


@dataclass(frozen=True, slots=True)
class AxisShare:
    """The index of an axis that holds most of the squared error, and its share."""

    axis: int
    index: int
    share: float


@dataclass(frozen=True, slots=True)
class ElementDifferences:
    """What differs between two tensors of one shape.

    Attributes:
        differing: how many elements have other bits; of two dtypes, other values. +0
            and -0 have other bits.
        first: the first of them.
        worst: those with the largest |r - c|; special values that disagree come
            before all others.
        errors: the histogram of finite errors other than 0, empty decades left out.
        axes: one entry for each axis of 2 to 4096 indexes, where there is a finite
            error; of n indexes a share of 1/n is even.
    """

    differing: int
    first: Sequence[ElementPair]
    worst: Sequence[ElementPair]
    errors: Sequence[Decade]
    axes: Sequence[AxisShare]


@dataclass(frozen=True, slots=True)
class NotCompared:
    """Why the elements of two tensors cannot be compared, as of ``measure``."""

    reason: str


def element_differences(
    reference: Tensor, candidate: Tensor, limit: int = 10
) -> ElementDifferences | NotCompared:
    """Find the elements that differ between two tensors; neither is changed.

    Args:
        reference: any dtype, device and strides.
        candidate: of the same shape.
        limit: length of the lists ``first`` and ``worst``.

    >>> import torch
    >>> found = element_differences(
    ...     torch.tensor([[1.0, 2.0], [3.0, 4.0]]),
    ...     torch.tensor([[1.0, 2.0], [3.0, 4.25]]),
    ... )
    >>> found.first[0].index, found.first[0].error, found.first[0].ulp
    ([1, 1], 0.25, 524288.0)
    >>> found.errors, found.axes[1]
    ([Decade(low=-1, count=1)], AxisShare(axis=1, index=1, share=1.0))
    """
    r, c, reason = comparable_pair(reference, candidate)
    if r is None or c is None:
        return NotCompared(reason or "")
    if not r.numel():
        return NotCompared("empty")
    search = _ElementSearch(r, c, limit)
    for start in range(0, r.numel(), _CHUNK):
        search.add_chunk(start)
    return search.result()


class _ElementSearch:
    """Goes through two tensors chunk by chunk, and keeps what is to be shown."""

    def __init__(self, reference: Tensor, candidate: Tensor, limit: int) -> None:
        self._shape = tuple(reference.shape)
        self._grid = grid_of(reference.dtype, candidate.dtype)
        self._x = reference.reshape(-1)
        self._y = candidate.reshape(-1)
        self._limit = limit
        self._largest = _largest_finite_error(self._x, self._y)
        self._differing = 0
        self._first = np.empty(0, np.int64)
        self._worst = _WorstPlaces(limit)
        self._decades: dict[int, int] = {}
        #: Squared errors by index of each axis, over the largest: they neither
        #: overflow nor all vanish.
        self._axes = [np.zeros(n) if 1 < n <= _AXIS else None for n in self._shape]

    def add_chunk(self, start: int) -> None:
        part = slice(start, start + _CHUNK)
        changed, error = _errors(self._x[part], self._y[part])
        (places,) = changed.nonzero()
        if not len(places):
            return
        self._differing += len(places)
        missing = self._limit - len(self._first)
        self._first = np.concatenate([self._first, places[:missing] + start])
        error = error[places]
        places = places + start
        self._worst.add(error, places)
        measurable = np.isfinite(error) & (error > 0)
        self._count_decades(error[measurable])
        if self._largest:
            squares = np.square(error[measurable] / self._largest)
            _add_along(self._axes, places[measurable], squares, self._shape)

    def _count_decades(self, errors: Array) -> None:
        decades, counts = np.unique(_decade(errors), return_counts=True)
        for low, count in zip(decades.tolist(), counts.tolist(), strict=True):
            self._decades[low] = self._decades.get(low, 0) + count

    def result(self) -> ElementDifferences:
        return ElementDifferences(
            differing=self._differing,
            first=[self._element(int(place)) for place in self._first],
            worst=[self._element(int(place)) for place in self._worst.places],
            errors=[Decade(low, n) for low, n in sorted(self._decades.items())],
            axes=[
                AxisShare(axis, int(total.argmax()), float(total.max() / total.sum()))
                for axis, total in enumerate(self._axes)
                if total is not None and total.sum()
            ],
        )

    def _element(self, place: int) -> ElementPair:
        r = self._x[place : place + 1]
        c = self._y[place : place + 1]
        x, y = wide(r, c)
        finite = bool(np.isfinite(x[0]) and np.isfinite(y[0]))
        error = ulp = None
        if finite:
            error = float(_errors(r, c)[1][0])
        if finite and self._grid is not None:
            ulp = float(distance(x, y, self._grid)[0])
        index = [int(i) for i in np.unravel_index(place, self._shape or (1,))]
        return ElementPair(
            index=index if self._shape else [],
            reference=_value(x[0]),
            candidate=_value(y[0]),
            error=error,
            ulp=ulp,
        )


class _WorstPlaces:
    """The places of the largest errors, largest first, and of equal ones the first."""

    def __init__(self, limit: int) -> None:
        self._limit = limit
        self._errors = np.empty(0)
        self.places = np.empty(0, np.int64)

    def add(self, errors: Array, places: Array) -> None:
        errors = np.concatenate([self._errors, errors])
        places = np.concatenate([self.places, places])
        if 0 < self._limit < len(errors):
            kept = self._enough(errors)
            errors = errors[kept]
            places = places[kept]
        order = np.lexsort((places, -errors))[: self._limit]
        self._errors = errors[order]
        self.places = places[order]

    def _enough(self, errors: Array) -> Array:
        """Return as many elements as the limit, without sorting: many errors may be equal."""
        at_limit = -np.partition(-errors, self._limit - 1)[self._limit - 1]
        (above,) = (errors > at_limit).nonzero()
        (equal,) = (errors == at_limit).nonzero()
        return np.concatenate([above, equal[: self._limit - len(above)]])


def _errors(r: Tensor, c: Tensor) -> tuple[Array, Array]:
    """Return which elements differ, and |r - c| in fp64.

    The error is inf where special values disagree, 0 where they agree.
    """
    x, y = wide(r, c)
    if x.dtype.kind in "iu":
        return np.asarray(x != y), absolute_difference(x, y)
    with np.errstate(all="ignore"):
        error = np.abs(x - y)
        both_nan = np.isnan(x) & np.isnan(y)
        special = ~(np.isfinite(x) & np.isfinite(y))
        same = (x == y) | both_nan
        error[special] = np.where(same, 0.0, np.inf)[special]
    changed = ~raw_equal(r, c).numpy() if r.dtype == c.dtype else ~same
    return np.asarray(changed), error


def _largest_finite_error(x: Tensor, y: Tensor) -> float:
    largest = 0.0
    for start in range(0, len(x), _CHUNK):
        _, error = _errors(x[start : start + _CHUNK], y[start : start + _CHUNK])
        finite = np.isfinite(error)
        largest = max(largest, float(error.max(where=finite, initial=0.0)))
    return largest


def _decade(errors: Array) -> Array:
    """Return floor(log10), right at the powers of ten where the logarithm is rounded."""
    low = np.floor(np.log10(errors))
    low -= errors < _power_of_ten(low)
    low += errors >= _power_of_ten(low + 1)
    decades: Array = low.astype(np.int64)
    return decades


def _power_of_ten(exponents: Array) -> Array:
    """Return 10**k as a decimal literal is read: ``np.power`` may be an ulp away."""
    distinct, which = np.unique(exponents, return_inverse=True)
    powers: Array = np.array([float(f"1e{int(k)}") for k in distinct])[which]
    return powers


def _add_along(
    axes: Sequence[Array | None], places: Array, squares: Array, shape: Sequence[int]
) -> None:
    """Add squared errors at flat ``places`` to the index of each axis they lie at."""
    inner = math.prod(shape)
    for total, size in zip(axes, shape, strict=True):
        inner //= size
        if total is not None:
            indexes = places // inner % size
            total += np.bincount(indexes, weights=squares, minlength=size)


def _value(value: Any) -> float | int | None:
    if isinstance(value, np.integer):
        return int(value)
    modulus = np.abs(value) if isinstance(value, np.complexfloating) else value
    number = float(modulus)
    return None if math.isnan(number) else number
