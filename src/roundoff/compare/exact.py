"""Two tensors compared in fp64, special values first: where the compiled pass cannot, and as the check on it.

``Totals`` is what both ways of measuring add up; ``add_exact`` takes a flat piece of two tensors, which it only reads.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

#: Elements of one piece: 256 KiB of fp64, so that a few of its temporaries fit a core's cache.
PIECE = 2**15
_RAW = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
Array = np.ndarray[Any, np.dtype[Any]]


class Grid(NamedTuple):
    """The numbers of a floating-point format: stored ``bits`` of fraction, ``low`` the exponent of the smallest normal."""

    bits: int
    low: int


@dataclass(slots=True)
class Totals:
    """Sums over the elements that are finite in both. Norms are kept piece by piece, and put together by ``math.hypot``,
    which neither overflows nor loses small ones; ``e`` is |r|² - |c|², NaN where squares leave fp64's range."""

    compared: int = 0
    same: int = 0
    lone: int = 0
    solid: int = 0
    abs: float = 0.0
    rel: float = 0.0
    ulp: float = 0.0
    over: int = 0
    e: float = 0.0
    r: list[float] = field(default_factory=list)
    c: list[float] = field(default_factory=list)
    d: list[float] = field(default_factory=list)
    max_abs: float = -1.0
    max_rel: float = 0.0
    max_ulp: float = 0.0
    place: int | None = None
    #: NaN in both, only in the reference, only in the candidate; the same of infinities.
    specials: list[int] = field(default_factory=lambda: [0] * 6)
    #: The first element at which special values disagree.
    broken: int | None = None

    def worst(self, error: float, place: int) -> None:
        """The largest error, and of equal ones the first."""
        if (
            error > self.max_abs
            or error == self.max_abs
            and (self.place is None or place < self.place)
        ):
            self.max_abs, self.place = error, place


def grid_of(one: torch.dtype, other: torch.dtype) -> Grid | None:
    """The coarser of two formats: fewer bits of fraction, then the larger smallest normal number. None for other types."""
    if not (one.is_floating_point and other.is_floating_point):
        return None
    grids = []
    for dtype in (one, other):
        if (
            dtype is torch.float8_e5m2fnuz
        ):  # torch 2.13 says eps = 0.125 of it, but its fraction has two bits
            grids.append(Grid(2, -15))
            continue
        limits = torch.finfo(dtype)
        grids.append(
            Grid(
                round(-math.log2(limits.eps)), round(math.log2(limits.smallest_normal))
            )
        )
    return min(grids, key=lambda g: (g.bits, -g.low))


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
        larger, smaller = np.maximum(x, y), np.minimum(x, y)
        # modulo 2**64, so that no difference overflows
        error = (larger.view(np.uint64) - smaller.view(np.uint64)).astype(np.float64)
        same = x == y
        totals.compared += x.size
        totals.same += int(np.count_nonzero(same))
        _finite(totals, x.astype(np.float64), y.astype(np.float64), error, None, start)
        return
    same = raw_equal(r, c).numpy() if r.dtype == c.dtype else x == y
    with np.errstate(all="ignore"):
        fine = np.isfinite(x) & np.isfinite(y)
        places: Array | None = None
        if not fine.all():
            _classify(totals, x, y, start)
            (places,) = fine.nonzero()
            x, y = x[places], y[places]
        totals.compared += x.size
        totals.same += int(np.count_nonzero(same))
        if x.size:
            _finite(totals, x, y, np.abs(x - y), grid, start, places)


def _classify(totals: Totals, x: Array, y: Array, start: int) -> None:
    nan_x, nan_y = np.isnan(x), np.isnan(y)
    inf_x, inf_y = np.isinf(x) & ~nan_x, np.isinf(y) & ~nan_y
    both = inf_x & inf_y & (x == y)
    marks = (
        nan_x & nan_y,
        nan_x & ~nan_y,
        nan_y & ~nan_x,
        both,
        inf_x & ~both,
        inf_y & ~both,
    )
    totals.specials = [
        n + int(np.count_nonzero(m))
        for n, m in zip(totals.specials, marks, strict=True)
    ]
    broken = marks[1] | marks[2] | marks[4] | marks[5]
    if broken.any() and (
        totals.broken is None or start + int(broken.argmax()) < totals.broken
    ):
        totals.broken = start + int(broken.argmax())


def _finite(
    totals: Totals,
    x: Array,
    y: Array,
    error: Array,
    grid: Grid | None,
    start: int,
    places: Array | None = None,
) -> None:
    first = int(error.argmax())
    largest = float(error[first])
    totals.worst(largest, start + int(first if places is None else places[first]))
    a, b = (np.abs(x), np.abs(y)) if x.dtype.kind == "c" else (x, y)
    norms = norm(a), norm(b), norm(error)
    for kept, value in zip((totals.r, totals.c, totals.d), norms, strict=True):
        kept.append(value)
    solid = x != 0
    count = int(np.count_nonzero(solid))
    totals.solid += count
    if not largest:
        return
    totals.lone += (
        int(np.count_nonzero(y)) if not count else int(np.count_nonzero(y[~solid]))
    )
    if all(n == 0 or 1e-140 < n < 1e140 for n in norms):
        if x.dtype.kind == "c":
            difference = x - y
            total = x + y
            totals.e += float(
                (difference.real * total.real + difference.imag * total.imag).sum()
            )
        else:
            totals.e += float(((x - y) * (x + y)).sum())
    else:
        totals.e = math.nan
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


def distance(x: Array, y: Array, grid: Grid) -> Array:
    """Representable numbers of a format from each of ``x`` to ``y``, finite fp64 arrays: whole where both are in it, and
    between two of them as far as the value is (so that 0.5 is half of the way); its exponents have no upper end."""
    if grid.bits == 52:
        i, j = x.view(np.int64), y.view(np.int64)
        p, q = i & np.int64(2**63 - 1), j & np.int64(2**63 - 1)
        return np.where(
            (i ^ j) < 0, p.astype(np.float64) + q, np.abs(p - q).astype(np.float64)
        )
    found: Array = np.abs(_code(x, grid) - _code(y, grid))
    return found


def _code(x: Array, grid: Grid) -> Array:
    size = np.abs(x)
    # exponent and fraction stand beside each other in the bits, so they count as one number, from 2**low on
    steps = (size.view(np.int64) - ((grid.low + 1022) << 52)) * 2.0 ** (grid.bits - 52)
    if size.min() < 2.0**grid.low:
        steps = np.where(
            size < 2.0**grid.low, size * 2.0 ** (grid.bits - grid.low), steps
        )
    signed: Array = np.copysign(steps, x)
    return signed


def norm(x: Array) -> float:
    """The l2 norm of a real array, also where squares would overflow or vanish."""
    total = float((x * x).sum())
    if 1e-280 < total < 1e280:
        return math.sqrt(total)
    largest = float(np.abs(x).max())
    if largest in (0.0, math.inf):
        return largest
    return math.sqrt(float(np.square(x / largest).sum())) * largest


def wide(r: Tensor, c: Tensor) -> tuple[Array, Array]:
    """Copies as numpy arrays of one type: complex128, fp64, or int64 (uint64 where one is) for integers and booleans."""
    kinds = {r.dtype, c.dtype}
    if r.dtype.is_complex or c.dtype.is_complex:
        dtype = torch.complex128
    elif r.dtype.is_floating_point or c.dtype.is_floating_point:
        dtype = torch.float64
    elif torch.uint64 in kinds and (
        len(kinds) == 1 or kinds == {torch.uint64, torch.bool}
    ):
        dtype = torch.uint64
    else:
        dtype = torch.float64 if torch.uint64 in kinds else torch.int64
    x, y = (_copy(t, dtype) for t in (r, c))
    return x, y


def _copy(tensor: Tensor, dtype: torch.dtype) -> Array:
    """Never the tensor's own memory: ``Tensor.numpy()`` would fix the size of its storage."""
    if (
        tensor.dtype.is_floating_point
        and tensor.element_size() == 1
        and dtype is torch.float64
    ):
        tensor = tensor.to(torch.float32)  # fp8 has no other conversion everywhere
    copied: Array = tensor.to(dtype, copy=True).numpy()
    return copied


def raw_equal(r: Tensor, c: Tensor) -> Tensor:
    """Which elements of two flat tensors of one dtype have the same bits."""
    if r.is_complex():
        parts = (torch.view_as_real(r), torch.view_as_real(c))
        raw = _RAW[r.element_size() // 2]
        return (parts[0].view(raw) == parts[1].view(raw)).all(-1)
    return r.view(_RAW[r.element_size()]) == c.view(_RAW[c.element_size()])
