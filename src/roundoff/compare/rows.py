"""The compiled pass over two flat tensors: which form of it runs, on which blocks, and what its rows add up to."""

from __future__ import annotations

import math
from collections.abc import Sequence
from functools import lru_cache
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from roundoff.capture.kernel import ROW, Compiled, compiled
from roundoff.compare.exact import Array, Grid, Totals, add_exact
from roundoff.compare.kernel import SUMS, TOPS

FLOATS = (
    torch.float32, torch.bfloat16, torch.float16, torch.float8_e4m3fn, torch.float8_e5m2,
    torch.float8_e4m3fnuz, torch.float8_e5m2fnuz,
)  # fmt: skip
#: Rows of one call, and rows that are widened to fp32 at once, 16 MiB of each tensor: threads that are woken for a
#: millisecond often end up on one core.
_BLOCK, _WIDENED = 2**16, 2**12
#: From here on several threads, and the form for bf16, are worth their start.
_LARGE = 2**17
#: Errors below the first have squares that fp32 cannot hold to 2**-24, and so have values whose squares sum to the second.
_TINY, _TINY_SQUARES = 2.0**-50, 2.0**-90
_R2, _C2, _ULP, _SAME, _MAX_ABS = (
    (*SUMS, *TOPS).index(name) for name in ("r2", "c2", "ulp", "same", "max_abs")
)


class _Pass(NamedTuple):
    run: Compiled
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
    small = count < _LARGE
    halves = not small and x.dtype is y.dtype is torch.bfloat16
    name = "pairs" if small else "packed_wide" if halves else "pairs_wide"
    run = compiled(name, torch.bfloat16 if halves else torch.float32)
    if run is None:
        return False
    way = _Pass(run, halves, () if halves else _scale(grid), 1.0 if halves else 2.0 ** (grid.bits - 23), grid)
    if small:
        _block(totals, x, y, 0, way)
        return True
    plain = halves or x.dtype is y.dtype is torch.float32
    if not plain:
        room = [None if t.dtype is torch.float32 else torch.empty(_WIDENED * ROW) for t in (x, y)]
        way = way._replace(room=(room[0], room[1]))
    step = ROW * (_BLOCK if plain else _WIDENED)
    whole = count - count % ROW
    for start in range(0, whole, step):
        part = slice(start, min(start + step, whole))
        _block(totals, x[part], y[part], start, way)
    if whole < count:
        _block(totals, x[whole:], y[whole:], whole, way)
    return True


@lru_cache
def _scale(grid: Grid) -> tuple[Tensor, Tensor]:
    """What sends the smallest normal number of a format to that of fp32, and the bits of its 1 ulp in steps of fp32's."""
    one = 0x3F800000 + ((23 - grid.bits) << 23)
    return torch.tensor(2.0 ** (-126 - grid.low)), torch.tensor(one, dtype=torch.int32)


def _block(totals: Totals, x: Tensor, y: Tensor, start: int, way: _Pass) -> None:
    count = len(x)
    rows = max(2, -(-count // ROW))  # the pass takes two at least
    inputs = [_rows(t, rows, way.halves, room) for t, room in zip((x, y), way.room, strict=True)]
    found = way.run([*inputs, *way.extra])[0].numpy()
    if rows * ROW > count:  # zeros, which add to nothing else
        found[_SAME] -= np.clip(np.arange(1, rows + 1) * ROW - count, 0, ROW)
    with np.errstate(invalid="ignore", over="ignore"):
        added = found[: len(SUMS)].sum(1, dtype=np.float64)
    fine = _trusted(found, added, x, y)
    if fine is not None:
        for row in (~fine).nonzero()[0].tolist():
            part = slice(row * ROW, (row + 1) * ROW)
            if len(x) > part.start:
                add_exact(totals, x[part], y[part], start + row * ROW, way.grid)
                count -= min(ROW, len(x) - row * ROW)
        if not count:
            return
        found[:, ~fine] = 0.0
        added = found[: len(SUMS)].sum(1, dtype=np.float64)
    values = dict(zip((*SUMS, *TOPS), [*added.tolist(), *found[len(SUMS) :].max(1).tolist()], strict=True))
    totals.compared += count
    totals.same += int(values["same"] if x.dtype is y.dtype else count - values["differ"])
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
        row = int((hit if fine is None else hit & fine).argmax()) * ROW
        near = (x[row : row + ROW].to(torch.float32) - y[row : row + ROW].to(torch.float32)).abs()
        totals.worst(largest, start + row + int(near.argmax()))


def _trusted(found: Array, added: Array, x: Tensor, y: Tensor) -> Array | None:
    """Which rows are finite and within fp32's range of squares; None for all."""
    error = found[_MAX_ABS]
    faint = (error > 0) & (error < _TINY)
    fine: Array = ~faint
    if not np.isfinite(added).all():
        with np.errstate(invalid="ignore", over="ignore"):
            fine &= np.isfinite(found[:_ULP].sum(0))
    for squares, flat in ((found[_R2], x), (found[_C2], y)):
        if squares.min() < _TINY_SQUARES:
            for row in (squares < _TINY_SQUARES).nonzero()[0].tolist():
                fine[row] &= not flat[row * ROW : (row + 1) * ROW].any()
    return None if fine.all() else fine


def _rows(flat: Tensor, rows: int, halves: bool, room: Tensor | None) -> Tensor:
    """What the pass takes, filled up with zeros."""
    if len(flat) < rows * ROW:
        padded = torch.zeros(rows * ROW, dtype=torch.bfloat16 if halves else torch.float32)
        padded[: len(flat)].copy_(flat)
        flat = padded
    if halves:
        if flat.storage_offset() % 2:
            flat = flat.clone()
        return flat.view(torch.int32).view(rows, ROW // 2)
    if flat.dtype is not torch.float32 and room is not None:
        flat = room[: rows * ROW].copy_(flat)
    return flat.to(torch.float32).view(rows, ROW)
