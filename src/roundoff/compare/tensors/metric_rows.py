"""The compiled pass over two flat tensors: its forms, its blocks, its sums."""

from __future__ import annotations

import math
from collections.abc import Sequence
from functools import lru_cache
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from roundoff.compare.tensors.exact import Array, Grid, Totals, add_exact
from roundoff.compare.tensors.metric_kernel import SUMS, TOPS, WIDE
from roundoff.record import ROW, Compiled, compiled

FLOATS = (
    torch.float32,
    torch.bfloat16,
    torch.float16,
    torch.float8_e4m3fn,
    torch.float8_e5m2,
    torch.float8_e4m3fnuz,
    torch.float8_e5m2fnuz,
)
#: Elements of one call.
_BLOCK = 2**26
#: Elements that are widened to fp32 at once, 16 MiB of each tensor: threads that are
#: woken for a millisecond often end up on one core.
_WIDENED = 2**22
#: From here on several threads, and the form for bf16, are worth their start.
_LARGE = 2**17
#: Errors below this have squares that fp32 cannot hold to 2**-24.
_TINY = 2.0**-50
#: The sum of squares of values whose errors may be that small.
_TINY_SQUARES = 2.0**-90
_COLUMNS = (*SUMS, *TOPS)
_R2 = _COLUMNS.index("r2")
_C2 = _COLUMNS.index("c2")
_ULP = _COLUMNS.index("ulp")
_SAME = _COLUMNS.index("same")
_LONE = _COLUMNS.index("lone")
_SOLID = _COLUMNS.index("solid")
_MAX_ABS = _COLUMNS.index("max_abs")


class _Pass(NamedTuple):
    """A compiled form of the pass, and what it takes."""

    run: Compiled
    #: Elements of one row.
    row: int
    #: Two bf16 elements seen as one int32.
    halves: bool
    extra: Sequence[Tensor]
    #: The factor from its distances to ulp.
    unit: float
    grid: Grid
    #: Where each tensor is widened to fp32, the same memory for all blocks: new memory
    #: costs more than the widening.
    room: tuple[Tensor | None, Tensor | None] = (None, None)


def add_rows(totals: Totals, x: Tensor, y: Tensor, grid: Grid) -> bool:
    """Add two flat tensors; return False where there is no compiled pass for them.

    Other dtypes and a few elements have none, and no format without a C++ compiler.
    """
    count = len(x)
    if x.dtype not in FLOATS or y.dtype not in FLOATS or count < 2 * ROW:
        return False
    if count < _LARGE:
        return _add_narrow(totals, x, y, 0, grid)
    form = _wide_form(x, y, grid)
    if form is None:
        return False
    widened = form.room != (None, None)
    step = _WIDENED if widened else _BLOCK
    whole = count - count % form.row
    for start in range(0, whole, step):
        part = slice(start, min(start + step, whole))
        _add_block(totals, x[part], y[part], start, form)
    if whole < count:
        _add_closer(totals, x[whole:], y[whole:], whole, grid)
    return True


def _wide_form(x: Tensor, y: Tensor, grid: Grid) -> _Pass | None:
    """Return the form for large tensors; None where it cannot be compiled."""
    if x.dtype is y.dtype is torch.bfloat16:
        packed = compiled("packed_wide", torch.bfloat16)
        if packed is None:
            return None
        return _Pass(packed, WIDE * ROW, True, (), 1.0, grid)
    pairs = compiled("pairs_wide", torch.float32)
    if pairs is None:
        return None
    unit = 2.0 ** (grid.bits - 23)
    room = (_room(x), _room(y))
    return _Pass(pairs, WIDE * ROW, False, _scale(grid), unit, grid, room)


def _room(tensor: Tensor) -> Tensor | None:
    return None if tensor.dtype is torch.float32 else torch.empty(_WIDENED)


def _add_narrow(totals: Totals, x: Tensor, y: Tensor, start: int, grid: Grid) -> bool:
    """Add rows of ``ROW`` elements, on the caller's thread."""
    pairs = compiled("pairs", torch.float32)
    if pairs is None:
        return False
    unit = 2.0 ** (grid.bits - 23)
    form = _Pass(pairs, ROW, False, _scale(grid), unit, grid)
    _add_block(totals, x, y, start, form)
    return True


def _add_closer(totals: Totals, x: Tensor, y: Tensor, start: int, grid: Grid) -> None:
    """Add rows of a wide form, of which only a part may need fp64."""
    for first in range(0, len(x), _WIDENED):
        part = slice(first, first + _WIDENED)
        if not _add_narrow(totals, x[part], y[part], start + first, grid):
            add_exact(totals, x[part], y[part], start + first, grid)


@lru_cache
def _scale(grid: Grid) -> tuple[Tensor, Tensor]:
    """Return the two last arguments of the form ``pairs``.

    The factor from the smallest normal number of a format to that of fp32, and the bits
    of its 1 ulp in steps of fp32's.
    """
    factor = torch.tensor(2.0 ** (-126 - grid.low))
    ulp_bits = 0x3F800000 + ((23 - grid.bits) << 23)
    return factor, torch.tensor(ulp_bits, dtype=torch.int32)


def _add_block(totals: Totals, x: Tensor, y: Tensor, start: int, form: _Pass) -> None:
    count = len(x)
    rows = max(2, -(-count // form.row))  # the pass takes two at least
    inputs = [
        _rows(x, rows, form, form.room[0]),
        _rows(y, rows, form, form.room[1]),
    ]
    sums = form.run([*inputs, *form.extra])
    if rows * form.row > count:  # filled up with zeros, which add to nothing else
        ends = np.arange(1, rows + 1) * form.row
        sums[_SAME] -= np.clip(ends - count, 0, form.row)
    with np.errstate(invalid="ignore", over="ignore"):
        added = sums[: len(SUMS)].sum(1, dtype=np.float64)
    trusted = _trusted(sums, added, y, form.row)
    if trusted is not None:
        few_trusted = 8 * np.count_nonzero(trusted) < 7 * rows
        if form.row > ROW and few_trusted:  # a call for each would take longer
            _add_closer(totals, x, y, start, form.grid)
            return
        count -= _add_untrusted(totals, x, y, start, form, ~trusted)
        if not count:
            return
        sums[:, ~trusted] = 0.0
        added = sums[: len(SUMS)].sum(1, dtype=np.float64)
    tops = sums[len(SUMS) :].max(1)
    values = dict(zip(_COLUMNS, [*added.tolist(), *tops.tolist()], strict=True))
    if x.dtype is not y.dtype:
        values["same"] = count - values["differ"]
    _add_values(totals, values, count, form.unit)
    largest = values["max_abs"]
    if largest >= totals.max_abs:  # look again only there
        hit = sums[_MAX_ABS] == largest
        row = int((hit if trusted is None else hit & trusted).argmax()) * form.row
        part = slice(row, row + form.row)
        near = (x[part].to(torch.float32) - y[part].to(torch.float32)).abs()
        totals.worst(largest, start + row + int(near.argmax()))


def _add_untrusted(
    totals: Totals, x: Tensor, y: Tensor, start: int, form: _Pass, rows: Array
) -> int:
    """Add the marked rows in fp64; return how many elements they are."""
    add = add_exact if form.row == ROW else _add_closer
    added = 0
    for row in rows.nonzero()[0].tolist():
        first = row * form.row
        if first < len(x):
            part = slice(first, first + form.row)
            add(totals, x[part], y[part], start + first, form.grid)
            added += min(form.row, len(x) - first)
    return added


def _add_values(
    totals: Totals, values: dict[str, float], count: int, unit: float
) -> None:
    """Add the sums and maxima of ``count`` elements; distances are times ``unit``."""
    totals.compared += count
    totals.same += int(values["same"])
    totals.lone += int(values["lone"])
    totals.solid += int(values["solid"])
    totals.over += int(values["over"])
    totals.abs += values["abs"]
    totals.rel += values["rel"]
    totals.ulp += values["ulp"] * unit
    totals.e += values["e"]
    totals.r.append(math.sqrt(values["r2"]))
    totals.c.append(math.sqrt(values["c2"]))
    totals.d.append(math.sqrt(values["d2"]))
    totals.max_rel = max(totals.max_rel, values["max_rel"])
    totals.max_ulp = max(totals.max_ulp, values["max_ulp"] * unit)


def _trusted(sums: Array, added: Array, y: Tensor, row: int) -> Array | None:
    """Return which rows are finite and within fp32's range of squares; None for all."""
    error = sums[_MAX_ABS]
    faint = (error > 0) & (error < _TINY)
    small_reference = sums[_R2] < _TINY_SQUARES
    trusted: Array = ~(faint | small_reference & (sums[_SOLID] > 0))
    if not np.isfinite(added).all():
        with np.errstate(invalid="ignore", over="ignore"):
            trusted &= np.isfinite(sums[:_ULP].sum(0))
    # a candidate without any number but zero: known where the reference is so too
    small_candidate = sums[_C2] < _TINY_SQUARES
    not_zero = sums[_SOLID] + sums[_LONE] > 0
    for n in (trusted & small_candidate & not_zero).nonzero()[0].tolist():
        trusted[n] = not y[n * row : (n + 1) * row].any()
    return None if trusted.all() else trusted


def _rows(flat: Tensor, rows: int, form: _Pass, room: Tensor | None) -> Tensor:
    """Return one tensor as the pass takes it, filled up with zeros."""
    if len(flat) < rows * form.row:
        dtype = flat.dtype if form.halves else torch.float32
        padded = torch.zeros(rows * form.row, dtype=dtype)
        padded[: len(flat)].copy_(flat)
        flat = padded
    if form.halves:
        if flat.storage_offset() % 2:
            flat = flat.clone()
        return flat.view(torch.int32).view(rows, -1, ROW)
    if flat.dtype is not torch.float32 and room is not None:
        flat = room[: rows * form.row].copy_(flat)
    return flat.to(torch.float32).view(rows, -1, ROW)
