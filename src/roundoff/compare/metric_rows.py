"""The compiled pass over two flat tensors: which form of it runs, on which blocks, and what its rows add up to."""

from __future__ import annotations

import math
from collections.abc import Sequence
from functools import lru_cache
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from roundoff.compare.exact import Array, Grid, Totals, add_exact
from roundoff.compare.metric_kernel import SUMS, TOPS, WIDE
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
#: Elements of one call, and those that are widened to fp32 at once, 16 MiB of each tensor: threads that are woken for a
#: millisecond often end up on one core.
_BLOCK, _WIDENED = 2**26, 2**22
#: From here on several threads, and the form for bf16, are worth their start.
_LARGE = 2**17
#: Errors below the first have squares that fp32 cannot hold to 2**-24, and so have values whose squares sum to the second.
_TINY, _TINY_SQUARES = 2.0**-50, 2.0**-90
_R2, _C2, _ULP, _SAME, _LONE, _SOLID, _MAX_ABS = (
    (*SUMS, *TOPS).index(name)
    for name in ("r2", "c2", "ulp", "same", "lone", "solid", "max_abs")
)


class _Pass(NamedTuple):
    run: Compiled
    #: Elements of one row.
    row: int
    #: Two bf16 elements seen as one int32.
    halves: bool
    extra: Sequence[Tensor]
    #: What the distances it gives are multiplied by.
    unit: float
    grid: Grid
    #: Where each tensor is widened to fp32, the same memory for all blocks: new memory costs more than the widening.
    room: tuple[Tensor | None, Tensor | None] = (None, None)


def add_rows(totals: Totals, x: Tensor, y: Tensor, grid: Grid) -> bool:
    """Add two flat tensors; False where there is no compiled pass: other dtypes, a few elements, no C++ compiler."""
    count = len(x)
    if x.dtype not in FLOATS or y.dtype not in FLOATS or count < 2 * ROW:
        return False
    if count < _LARGE:
        return _narrow(totals, x, y, 0, grid)
    halves = x.dtype is y.dtype is torch.bfloat16
    run = (
        compiled("packed_wide", torch.bfloat16)
        if halves
        else compiled("pairs_wide", torch.float32)
    )
    if run is None:
        return False
    way = _Pass(
        run,
        WIDE * ROW,
        halves,
        () if halves else _scale(grid),
        1.0 if halves else 2.0 ** (grid.bits - 23),
        grid,
    )
    plain = halves or x.dtype is y.dtype is torch.float32
    if not plain:
        room = [
            None if t.dtype is torch.float32 else torch.empty(_WIDENED) for t in (x, y)
        ]
        way = way._replace(room=(room[0], room[1]))
    step = _BLOCK if plain else _WIDENED
    whole = count - count % way.row
    for start in range(0, whole, step):
        part = slice(start, min(start + step, whole))
        _block(totals, x[part], y[part], start, way)
    if whole < count:
        _closer(totals, x[whole:], y[whole:], whole, grid)
    return True


def _narrow(totals: Totals, x: Tensor, y: Tensor, start: int, grid: Grid) -> bool:
    """Rows of ``ROW`` elements, on the caller's thread."""
    run = compiled("pairs", torch.float32)
    if run is not None:
        _block(
            totals,
            x,
            y,
            start,
            _Pass(run, ROW, False, _scale(grid), 2.0 ** (grid.bits - 23), grid),
        )
    return run is not None


def _closer(totals: Totals, x: Tensor, y: Tensor, start: int, grid: Grid) -> None:
    """Rows of a wide form, of which only a part may need fp64."""
    for first in range(0, len(x), _WIDENED):
        part = slice(first, first + _WIDENED)
        if not _narrow(totals, x[part], y[part], start + first, grid):
            add_exact(totals, x[part], y[part], start + first, grid)


@lru_cache
def _scale(grid: Grid) -> tuple[Tensor, Tensor]:
    """What sends the smallest normal number of a format to that of fp32, and the bits of its 1 ulp in steps of fp32's."""
    one = 0x3F800000 + ((23 - grid.bits) << 23)
    return torch.tensor(2.0 ** (-126 - grid.low)), torch.tensor(one, dtype=torch.int32)


def _block(totals: Totals, x: Tensor, y: Tensor, start: int, way: _Pass) -> None:
    count = len(x)
    rows = max(2, -(-count // way.row))  # the pass takes two at least
    inputs = [
        _rows(t, rows, way, room) for t, room in zip((x, y), way.room, strict=True)
    ]
    found = way.run([*inputs, *way.extra])[0].numpy()
    if rows * way.row > count:  # zeros, which add to nothing else
        found[_SAME] -= np.clip(np.arange(1, rows + 1) * way.row - count, 0, way.row)
    with np.errstate(invalid="ignore", over="ignore"):
        added = found[: len(SUMS)].sum(1, dtype=np.float64)
    fine = _trusted(found, added, y, way.row)
    if fine is not None:
        if (
            way.row > ROW and 8 * np.count_nonzero(fine) < 7 * rows
        ):  # so many calls of their own would take longer
            _closer(totals, x, y, start, way.grid)
            return
        for row in (~fine).nonzero()[0].tolist():
            first, part = row * way.row, slice(row * way.row, (row + 1) * way.row)
            if len(x) > first:
                (add_exact if way.row == ROW else _closer)(
                    totals, x[part], y[part], start + first, way.grid
                )
                count -= min(way.row, len(x) - first)
        if not count:
            return
        found[:, ~fine] = 0.0
        added = found[: len(SUMS)].sum(1, dtype=np.float64)
    values = dict(
        zip(
            (*SUMS, *TOPS),
            [*added.tolist(), *found[len(SUMS) :].max(1).tolist()],
            strict=True,
        )
    )
    totals.compared += count
    totals.same += int(
        values["same"] if x.dtype is y.dtype else count - values["differ"]
    )
    totals.lone += int(values["lone"])
    totals.solid += int(values["solid"])
    totals.over += int(values["over"])
    totals.abs += values["abs"]
    totals.rel += values["rel"]
    totals.ulp += values["ulp"] * way.unit
    totals.e += values["e"]
    totals.r.append(math.sqrt(values["r2"]))
    totals.c.append(math.sqrt(values["c2"]))
    totals.d.append(math.sqrt(values["d2"]))
    totals.max_rel = max(totals.max_rel, values["max_rel"])
    totals.max_ulp = max(totals.max_ulp, values["max_ulp"] * way.unit)
    largest = values["max_abs"]
    if largest >= totals.max_abs:  # look again only there
        hit = found[_MAX_ABS] == largest
        row = int((hit if fine is None else hit & fine).argmax()) * way.row
        part = slice(row, row + way.row)
        near = (x[part].to(torch.float32) - y[part].to(torch.float32)).abs()
        totals.worst(largest, start + row + int(near.argmax()))


def _trusted(found: Array, added: Array, y: Tensor, row: int) -> Array | None:
    """Which rows are finite and within fp32's range of squares; None for all."""
    error = found[_MAX_ABS]
    faint = (error > 0) & (error < _TINY)
    small = [found[n] < _TINY_SQUARES for n in (_R2, _C2)]
    fine: Array = ~(faint | small[0] & (found[_SOLID] > 0))
    if not np.isfinite(added).all():
        with np.errstate(invalid="ignore", over="ignore"):
            fine &= np.isfinite(found[:_ULP].sum(0))
    # a candidate without any number but zero: known where the reference is so too
    for n in (
        (fine & small[1] & (found[_SOLID] + found[_LONE] > 0)).nonzero()[0].tolist()
    ):
        fine[n] = not y[n * row : (n + 1) * row].any()
    return None if fine.all() else fine


def _rows(flat: Tensor, rows: int, way: _Pass, room: Tensor | None) -> Tensor:
    """What the pass takes, filled up with zeros."""
    if len(flat) < rows * way.row:
        padded = torch.zeros(
            rows * way.row, dtype=flat.dtype if way.halves else torch.float32
        )
        padded[: len(flat)].copy_(flat)
        flat = padded
    if way.halves:
        if flat.storage_offset() % 2:
            flat = flat.clone()
        return flat.view(torch.int32).view(rows, -1, ROW)
    if flat.dtype is not torch.float32 and room is not None:
        flat = room[: rows * way.row].copy_(flat)
    return flat.to(torch.float32).view(rows, -1, ROW)
