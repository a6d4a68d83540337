"""Two tensors compared in fp64, special values first.

This is for tensors that the compiled pass cannot measure, and the check on it.
``Totals`` is what both ways of measuring add up; ``add_exact`` takes a flat piece of
two tensors, which it only reads.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

#: Elements of one piece: 256 KiB of fp64, so that a few temporaries fit a core's cache.
PIECE = 2**15
_RAW = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
Array = np.ndarray[Any, np.dtype[Any]]


class Grid(NamedTuple):
    """The numbers of a floating-point format.

    ``bits`` of the fraction are stored; ``low`` is the exponent of the smallest normal.
    """

    bits: int
    low: int


@dataclass(slots=True)
class Specials:
    """Counts of NaN and infinities, by where they stand."""

    nan_both: int = 0
    nan_reference: int = 0
    nan_candidate: int = 0
    inf_both: int = 0
    inf_reference: int = 0
    inf_candidate: int = 0


@dataclass(slots=True)
class Totals:
    """Sums over the elements that are finite in both; r reference, c candidate.

    Norms are kept piece by piece, and put together by ``math.hypot``, which neither
    overflows nor loses small ones.
    """

    #: Elements that are finite in both.
    compared: int = 0
    #: Elements with the same bits.
    same: int = 0
    #: Elements with r = 0 and another c.
    lone: int = 0
    #: Elements with r other than 0.
    solid: int = 0
    #: Sums of |r - c|, of |r - c| / |r|, and of distances in ulp.
    abs: float = 0.0
    rel: float = 0.0
    ulp: float = 0.0
    #: Distances above 1 ulp.
    over: int = 0
    #: |r|² - |c|²; NaN where squares leave fp64's range.
    e: float = 0.0
    #: Norms of r, of c and of r - c.
    r: list[float] = field(default_factory=list)
    c: list[float] = field(default_factory=list)
    d: list[float] = field(default_factory=list)
    max_abs: float = -1.0
    max_rel: float = 0.0
    max_ulp: float = 0.0
    #: Where the largest |r - c| is.
    place: int | None = None
    specials: Specials = field(default_factory=Specials)
    #: The first element at which special values disagree.
    broken: int | None = None

    def worst(self, error: float, place: int) -> None:
        """Note the largest error, and of equal ones the first."""
        first = self.place is None or place < self.place
        if error > self.max_abs or (error == self.max_abs and first):
            self.max_abs = error
            self.place = place


def grid_of(one: torch.dtype, other: torch.dtype) -> Grid | None:
    """Return the coarser of two formats; None for types without floating point.

    Coarser has fewer bits of fraction, then the larger smallest normal number.
    """
    if not (one.is_floating_point and other.is_floating_point):
        return None
    return min(_grid(one), _grid(other), key=lambda grid: (grid.bits, -grid.low))


def _grid(dtype: torch.dtype) -> Grid:
    if dtype is torch.float8_e5m2fnuz:
        return Grid(2, -15)  # torch 2.13 says eps = 0.125, but the fraction has 2 bits
    limits = torch.finfo(dtype)
    bits = round(-math.log2(limits.eps))
    return Grid(bits, round(math.log2(limits.smallest_normal)))


def add_exact(
    totals: Totals, r: Tensor, c: Tensor, start: int, grid: Grid | None
) -> None:
    """Add flat tensors whose first element has the number ``start``."""
    for first in range(0, len(r), PIECE):
        part = slice(first, first + PIECE)
        _add(totals, r[part], c[part], start + first, grid)


def _add(totals: Totals, r: Tensor, c: Tensor, start: int, grid: Grid | None) -> None:
    x, y = wide(r, c)
    if x.dtype.kind in "iu":
        _add_integers(totals, x, y, start)
        return
    same = raw_equal(r, c).numpy() if r.dtype == c.dtype else x == y
    totals.same += int(np.count_nonzero(same))
    with np.errstate(all="ignore"):
        finite = np.isfinite(x) & np.isfinite(y)
        if finite.all():
            places: Array | range = range(start, start + x.size)
        else:
            _count_specials(totals, x, y, start)
            (kept,) = finite.nonzero()
            places = kept + start
            x = x[kept]
            y = y[kept]
        totals.compared += x.size
        if x.size:
            _add_finite(totals, x, y, np.abs(x - y), places, grid)


def _add_integers(totals: Totals, x: Array, y: Array, start: int) -> None:
    error = absolute_difference(x, y)
    totals.compared += x.size
    totals.same += int(np.count_nonzero(x == y))
    places = range(start, start + x.size)
    _add_finite(totals, x.astype(np.float64), y.astype(np.float64), error, places)


def absolute_difference(x: Array, y: Array) -> Array:
    """Return |x - y| of integers in fp64; computed modulo 2**64, so that none overflows."""
    larger = np.maximum(x, y).view(np.uint64)
    smaller = np.minimum(x, y).view(np.uint64)
    return (larger - smaller).astype(np.float64)


def _count_specials(totals: Totals, x: Array, y: Array, start: int) -> None:
    nan_x = np.isnan(x)
    nan_y = np.isnan(y)
    inf_x = np.isinf(x) & ~nan_x
    inf_y = np.isinf(y) & ~nan_y
    inf_both = inf_x & inf_y & (x == y)
    nan_reference = nan_x & ~nan_y
    nan_candidate = nan_y & ~nan_x
    inf_reference = inf_x & ~inf_both
    inf_candidate = inf_y & ~inf_both
    specials = totals.specials
    specials.nan_both += int(np.count_nonzero(nan_x & nan_y))
    specials.nan_reference += int(np.count_nonzero(nan_reference))
    specials.nan_candidate += int(np.count_nonzero(nan_candidate))
    specials.inf_both += int(np.count_nonzero(inf_both))
    specials.inf_reference += int(np.count_nonzero(inf_reference))
    specials.inf_candidate += int(np.count_nonzero(inf_candidate))
    broken = nan_reference | nan_candidate | inf_reference | inf_candidate
    if broken.any():
        first = start + int(broken.argmax())
        if totals.broken is None or first < totals.broken:
            totals.broken = first


def _add_finite(
    totals: Totals,
    x: Array,
    y: Array,
    error: Array,
    places: Array | range,
    grid: Grid | None = None,
) -> None:
    """Add elements that are finite in both; ``places`` are their numbers."""
    first = int(error.argmax())
    largest = float(error[first])
    totals.worst(largest, int(places[first]))
    is_complex = x.dtype.kind == "c"
    norms = (
        norm(np.abs(x) if is_complex else x),
        norm(np.abs(y) if is_complex else y),
        norm(error),
    )
    for kept, value in zip((totals.r, totals.c, totals.d), norms, strict=True):
        kept.append(value)
    solid = x != 0
    count = int(np.count_nonzero(solid))
    totals.solid += count
    if not largest:
        return
    totals.lone += int(np.count_nonzero(y[~solid] if count else y))
    totals.e += _difference_of_squares(x, y, norms)
    totals.abs += float(error.sum())
    if count:
        rel = np.divide(error, np.abs(x), out=np.zeros_like(error), where=solid)
        totals.rel += float(rel.sum())
        totals.max_rel = max(totals.max_rel, float(rel.max()))
    if grid is not None:
        ulp = distance(x, y, grid)
        totals.ulp += float(ulp.sum())
        totals.max_ulp = max(totals.max_ulp, float(ulp.max()))
        totals.over += int(np.count_nonzero(ulp > 1))


def _difference_of_squares(x: Array, y: Array, norms: Iterable[float]) -> float:
    """Return |x|² - |y|² as (x - y)(x + y); NaN where squares leave fp64's range."""
    if not all(n == 0 or 1e-140 < n < 1e140 for n in norms):
        return math.nan
    difference = x - y
    total = x + y
    if x.dtype.kind != "c":
        return float((difference * total).sum())
    real = difference.real * total.real
    return float((real + difference.imag * total.imag).sum())


def distance(x: Array, y: Array, grid: Grid) -> Array:
    """Return how many representable numbers lie from each of ``x`` to ``y``.

    Args:
        x: finite fp64 values.
        y: the same number of them.
        grid: the format; its exponents have no upper end.

    Returns:
        A whole number where both are in the format; a value between two of its numbers
        counts as far as it lies, 0.5 for half of the way.
    """
    if grid.bits == 52:
        return _distance_in_fp64(x, y)
    steps: Array = np.abs(_code(x, grid) - _code(y, grid))
    return steps


def _distance_in_fp64(x: Array, y: Array) -> Array:
    i = x.view(np.int64)
    j = y.view(np.int64)
    without_sign = np.int64(2**63 - 1)
    p = i & without_sign
    q = j & without_sign
    across_zero = p.astype(np.float64) + q
    return np.where((i ^ j) < 0, across_zero, np.abs(p - q).astype(np.float64))


def _code(x: Array, grid: Grid) -> Array:
    """Return the number of steps of a format from zero to each value, with its sign."""
    size = np.abs(x)
    # exponent and fraction stand side by side in the bits: one number, from 2**low on
    steps = (size.view(np.int64) - ((grid.low + 1022) << 52)) * 2.0 ** (grid.bits - 52)
    if size.min() < 2.0**grid.low:
        steps = np.where(
            size < 2.0**grid.low, size * 2.0 ** (grid.bits - grid.low), steps
        )
    signed: Array = np.copysign(steps, x)
    return signed


def norm(x: Array) -> float:
    """Return the l2 norm of a real array, also where squares would overflow or vanish."""
    total = float((x * x).sum())
    if 1e-280 < total < 1e280:
        return math.sqrt(total)
    largest = float(np.abs(x).max())
    if largest in (0.0, math.inf):
        return largest
    return math.sqrt(float(np.square(x / largest).sum())) * largest


def wide(r: Tensor, c: Tensor) -> tuple[Array, Array]:
    """Return copies as numpy arrays of one type that holds both.

    complex128, fp64, or int64 for integers and booleans (uint64 where one is).
    """
    dtype = _common_type(r.dtype, c.dtype)
    return _copy(r, dtype), _copy(c, dtype)


def _common_type(one: torch.dtype, other: torch.dtype) -> torch.dtype:
    if one.is_complex or other.is_complex:
        return torch.complex128
    if one.is_floating_point or other.is_floating_point:
        return torch.float64
    kinds = {one, other}
    if torch.uint64 not in kinds:
        return torch.int64
    unsigned = kinds <= {torch.uint64, torch.bool}
    return torch.uint64 if unsigned else torch.float64


def _copy(tensor: Tensor, dtype: torch.dtype) -> Array:
    """Return a copy: ``Tensor.numpy()`` of the memory itself would fix its storage's size."""
    if (
        tensor.dtype.is_floating_point
        and tensor.element_size() == 1
        and dtype is torch.float64
    ):
        tensor = tensor.to(torch.float32)  # fp8 has no other conversion everywhere
    copied: Array = tensor.to(dtype, copy=True).numpy()
    return copied


def raw_equal(r: Tensor, c: Tensor) -> Tensor:
    """Return which elements of two flat tensors of one dtype have the same bits."""
    if r.is_complex():
        parts = (torch.view_as_real(r), torch.view_as_real(c))
        raw = _RAW[r.element_size() // 2]
        return (parts[0].view(raw) == parts[1].view(raw)).all(-1)
    return r.view(_RAW[r.element_size()]) == c.view(_RAW[c.element_size()])
