"""The elements behind the metrics of one site: which differ, by how much, and where along each axis."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import numpy as np
from torch import Tensor

from roundoff.compare.exact import Array, Grid, distance, grid_of, raw_equal, wide
from roundoff.compare.metrics import readable

#: Elements that are held as fp64 at once: 8 MiB of each tensor.
_CHUNK = 2**20
#: Axes longer than this are not looked along.
_AXIS = 4096


def elements(reference: Tensor, candidate: Tensor, limit: int = 10) -> dict[str, Any]:
    """What differs between two tensors of one shape, as plain data.

    ``differing`` counts elements with other bits (of two dtypes, other values; +0 and -0 have other bits). ``first`` are the
    first ``limit`` of them, ``worst`` the ``limit`` with the largest |r - c|, special values that disagree before all
    others. Each has its ``index``, both values and the ``error`` |r - c|, None where one of them is not finite, and the
    ``ulp`` distance, as in ``Metrics``. A NaN is None, a complex number its modulus. ``errors`` is the histogram of finite
    non-zero errors by decade: ``{"low": k, "count": n}`` are from 10**k to below 10**(k + 1), decades without any left out.
    ``axes`` has for each axis of at most 4096 indexes the one that holds most of the squared error, and its share: of
    n indexes, 1/n is even. An axis of size 1, and all of them without a finite error, have no entry.
    Tensors that cannot be compared have a ``reason`` alone; the reasons are those of ``measure``. Neither tensor is changed.

    >>> import torch
    >>> found = elements(torch.tensor([[1.0, 2.0], [3.0, 4.0]]), torch.tensor([[1.0, 2.0], [3.0, 4.25]]))
    >>> found["first"]
    [{'index': [1, 1], 'reference': 4.0, 'candidate': 4.25, 'error': 0.25, 'ulp': 524288.0}]
    >>> found["errors"], found["axes"][1]
    ([{'low': -1, 'count': 1}], {'axis': 1, 'index': 1, 'share': 1.0})
    """
    if reference.shape != candidate.shape:
        return {
            "reason": f"shape {tuple(reference.shape)} against {tuple(candidate.shape)}"
        }
    r, why = readable(reference)
    c, why_not = readable(candidate)
    if r is None or c is None:
        return {"reason": f"reference: {why}" if r is None else f"candidate: {why_not}"}
    if r.shape != c.shape:
        return {
            "reason": f"shape {tuple(r.shape)} against {tuple(c.shape)} in this process"
        }
    if not r.numel():
        return {"reason": "empty"}
    shape, grid = tuple(r.shape), grid_of(r.dtype, c.dtype)
    x, y = r.reshape(-1), c.reshape(-1)
    differing, first, worst = 0, np.empty(0, np.int64), _Worst(limit)
    decades: dict[int, int] = {}
    axes = [np.zeros(n) if 1 < n <= _AXIS else None for n in shape]
    largest = _largest(x, y)
    for start in range(0, len(x), _CHUNK):
        part = slice(start, start + _CHUNK)
        changed, error = _errors(x[part], y[part])
        (places,) = changed.nonzero()
        if not len(places):
            continue
        differing += len(places)
        first = np.concatenate([first, places[: limit - len(first)] + start])
        off = error[places]
        worst.add(off, places + start)
        some = np.isfinite(off) & (off > 0)
        for low, count in zip(
            *np.unique(_decade(off[some]), return_counts=True), strict=True
        ):
            decades[int(low)] = decades.get(int(low), 0) + int(count)
        if largest:
            _along(axes, places[some] + start, np.square(off[some] / largest), shape)
    return {
        "differing": differing,
        "first": [_element(x, y, int(i), shape, grid) for i in first],
        "worst": [_element(x, y, int(i), shape, grid) for i in worst.places],
        "errors": [{"low": low, "count": decades[low]} for low in sorted(decades)],
        "axes": [
            {
                "axis": axis,
                "index": int(total.argmax()),
                "share": float(total.max() / total.sum()),
            }
            for axis, total in enumerate(axes)
            if total is not None and total.sum()
        ],
    }


class _Worst:
    """The places of the largest errors, largest first, and of equal ones the first."""

    def __init__(self, limit: int) -> None:
        self._limit = limit
        self._errors = np.empty(0)
        self.places = np.empty(0, np.int64)

    def add(self, errors: Array, places: Array) -> None:
        errors, places = (
            np.concatenate([self._errors, errors]),
            np.concatenate([self.places, places]),
        )
        if (
            0 < self._limit < len(errors)
        ):  # those at the limit and above, of which there may be many that are equal
            enough = -np.partition(-errors, self._limit - 1)[self._limit - 1]
            above, at = (errors > enough).nonzero()[0], (errors == enough).nonzero()[0]
            kept = np.concatenate([above, at[: self._limit - len(above)]])
            errors, places = errors[kept], places[kept]
        order = np.lexsort((places, -errors))[: self._limit]
        self._errors, self.places = errors[order], places[order]


def _errors(r: Tensor, c: Tensor) -> tuple[Array, Array]:
    """Which elements differ, and |r - c| in fp64: inf where special values disagree, 0 where they agree."""
    x, y = wide(r, c)
    if x.dtype.kind in "iu":
        larger, smaller = np.maximum(x, y), np.minimum(x, y)
        error = (larger.view(np.uint64) - smaller.view(np.uint64)).astype(np.float64)
        return np.asarray(x != y), error
    with np.errstate(all="ignore"):
        error = np.abs(x - y)
        nan = np.isnan(x) & np.isnan(y)
        odd = ~(np.isfinite(x) & np.isfinite(y))
        error[odd] = np.where((x == y) | nan, 0.0, np.inf)[odd]
    changed = ~raw_equal(r, c).numpy() if r.dtype == c.dtype else ~((x == y) | nan)
    return np.asarray(changed), error


def _largest(x: Tensor, y: Tensor) -> float:
    """The largest finite error: squares are taken of errors over it, which neither overflow nor all vanish."""
    found = 0.0
    for start in range(0, len(x), _CHUNK):
        _, error = _errors(x[start : start + _CHUNK], y[start : start + _CHUNK])
        found = max(found, float(error.max(where=np.isfinite(error), initial=0.0)))
    return found


def _decade(errors: Array) -> Array:
    """floor(log10), right at the powers of ten where the logarithm is rounded."""
    low = np.floor(np.log10(errors))
    low -= errors < _power(low)
    found: Array = (low + (errors >= _power(low + 1))).astype(np.int64)
    return found


def _power(exponents: Array) -> Array:
    """10**k as a decimal literal is read: ``np.power`` may be an ulp away."""
    kinds, which = np.unique(exponents, return_inverse=True)
    values: Array = np.array([float(f"1e{int(k)}") for k in kinds])[which]
    return values


def _along(
    axes: Sequence[Array | None], places: Array, squares: Array, shape: Sequence[int]
) -> None:
    inner = math.prod(shape)
    for total, size in zip(axes, shape, strict=True):
        inner //= size
        if total is not None:
            total += np.bincount(
                places // inner % size, weights=squares, minlength=size
            )


def _element(
    x: Tensor, y: Tensor, place: int, shape: Sequence[int], grid: Grid | None
) -> dict[str, Any]:
    r, c = x[place : place + 1], y[place : place + 1]
    _, error = _errors(r, c)
    one, other = wide(r, c)
    finite = bool(np.isfinite(one[0]) and np.isfinite(other[0]))
    return {
        "index": [int(i) for i in np.unravel_index(place, tuple(shape))]
        if len(shape)
        else [],
        "reference": _value(one[0]),
        "candidate": _value(other[0]),
        "error": float(error[0]) if finite else None,
        "ulp": float(distance(one, other, grid)[0])
        if finite and grid is not None
        else None,
    }


def _value(value: Any) -> float | int | None:
    if isinstance(value, np.integer):
        return int(value)
    number = float(np.abs(value) if isinstance(value, np.complexfloating) else value)
    return None if math.isnan(number) else number
