"""Statistics of every tensor of a step: what must be read now is read in one pass, the rest is done after the step.

All are over the finite elements, accumulated in fp32 or wider: ``min``, ``max``, ``mean``, ``l2`` (root of the sum of
squares) and ``std`` (of the population); ``nan``, ``posinf``, ``neginf``, ``zero`` and ``subnormal`` count elements. The
exponent histogram counts ``floor(log2 |x|)`` of the finite non-zero elements of a strided sample. Integers and booleans
count as numbers (int64 beyond 2**53 is rounded), complex numbers by their modulus. Without finite elements the first
five are None; an empty tensor has counts of zero.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from roundoff.record.samples import NUMPY, SAMPLE, Entry, Memory, Slab, histograms_of
from roundoff.record.statistics_kernel import (
    CHUNK,
    COMPILED,
    FUNCTIONS,
    LARGEST,
    ROW,
    compiled,
)

#: fp32 sums of squares lose precision below this magnitude, and overflow to infinity above 2**64.
_TINY = 2.0**-50

COLUMNS = (
    "min",
    "max",
    "mean",
    "l2",
    "std",
    "nan",
    "posinf",
    "neginf",
    "zero",
    "subnormal",
)
Row = tuple[
    float | None,
    float | None,
    float | None,
    float | None,
    float | None,
    int,
    int,
    int,
    int,
    int,
]
EMPTY: Row = (None, None, None, None, None, 0, 0, 0, 0, 0)


class Statistics:
    """Collects the tensors of one step; ``finish`` gives the statistics of each by the number it was added with."""

    def __init__(self) -> None:
        self._slabs: dict[torch.device, Slab] = {}
        self._samples: list[tuple[int, torch.device, int, int, int, bool, float]] = []
        self._rows: dict[int, Row] = {}
        self._later: list[tuple[int, Tensor]] = []

    def add(self, number: int, tensor: Tensor) -> None:
        """Read ``tensor`` (plain, strided) now; it may change or go afterwards."""
        count = tensor.numel()
        if not count:
            self._rows[number] = EMPTY
            return
        if tensor.is_complex():
            tensor = tensor.abs()
        pieces = pieces_of(tensor)
        small = count <= SAMPLE
        device, dtype = tensor.device, tensor.dtype
        slab = self._slabs.get(device)
        if slab is None:
            slab = self._slabs[device] = Slab(device)
        if small:
            pass
        elif device.type == "cpu":
            self._rows[number] = measure(pieces)
        else:  # fetched once, after the step
            self._later.append(
                (
                    number,
                    torch.stack(
                        _exact(torch.cat(pieces) if len(pieces) > 1 else pieces[0])
                    ),
                )
            )
        # taken last: the pass before has brought the memory near
        block, start, size = slab.keep(pieces, 1 if small else -(-count // SAMPLE))
        tiny = torch.finfo(dtype).tiny if dtype.is_floating_point else 0.0
        self._samples.append((number, device, block, start, size, small, tiny))

    def finish(self) -> tuple[dict[int, Row], dict[int, tuple[int, list[int], int]]]:
        """Statistics by number, and ``(lowest exponent, counts, size of the sample)`` by number."""
        for number, values in self._later:
            self._rows[number] = _row([values.tolist()])
        histograms: dict[int, tuple[int, list[int], int]] = {}
        fetched = {
            device: [b.cpu().numpy() for b in slab.blocks]
            for device, slab in self._slabs.items()
        }
        by_block: dict[
            tuple[torch.device, int], list[tuple[int, int, int, bool, float]]
        ] = {}
        for number, device, block, start, size, small, tiny in self._samples:
            by_block.setdefault((device, block), []).append(
                (number, start, size, small, tiny)
            )
        for (device, block), entries in by_block.items():
            stored = fetched[device][block]
            histograms.update(
                histograms_of(
                    stored[entries[0][1] : entries[-1][1] + entries[-1][2]], entries
                )
            )
            whole = [e for e in entries if e[3]]
            if whole:
                self._rows.update(
                    _small_rows(
                        np.concatenate([stored[e[1] : e[1] + e[2]] for e in whole]),
                        whole,
                    )
                )
        return self._rows, histograms


def _small_rows(values: np.ndarray, entries: Sequence[Entry]) -> dict[int, Row]:
    """Statistics of tensors that were kept whole, one after the other in ``values``."""
    sizes = np.array([e[2] for e in entries])
    starts = np.concatenate([[0], np.cumsum(sizes)[:-1]])
    tiny = np.repeat(np.array([e[4] for e in entries]), sizes)
    finite = np.isfinite(values)
    zero = values == 0

    def added(of: np.ndarray) -> np.ndarray:
        return np.add.reduceat(of, starts)

    with np.errstate(over="ignore", invalid="ignore"):
        y = np.where(finite, values, 0.0)
        n = added(finite.astype(np.int64))
        mean = added(y) / np.maximum(n, 1)
        spread = np.where(finite, y - np.repeat(mean, sizes), 0.0) ** 2
        columns = [
            np.minimum.reduceat(np.where(finite, values, np.inf), starts).tolist(),
            np.maximum.reduceat(np.where(finite, values, -np.inf), starts).tolist(),
            mean.tolist(),
            np.sqrt(added(y * y)).tolist(),
            np.sqrt(added(spread) / np.maximum(n, 1)).tolist(),
        ]
    marks = (
        np.isnan(values),
        values == np.inf,
        values == -np.inf,
        zero,
        (np.abs(values) < tiny) & ~zero,
    )
    counts = [added(mark.astype(np.int64)).tolist() for mark in marks]
    found: dict[int, Row] = {}
    for i, entry in enumerate(entries):
        numbers = [c[i] for c in columns] if n[i] else [None] * 5
        found[entry[0]] = (*numbers, *(c[i] for c in counts))
    return found


def in_memory_order(tensor: Tensor) -> Tensor | None:
    """The elements as a flat view in the order of memory, or None where they do not lie densely in it."""
    if tensor.is_contiguous():
        return tensor.view(-1)
    dense, outer = _dense(tensor)
    return None if outer else tensor.as_strided((dense,), (1,), tensor.storage_offset())


def _dense(tensor: Tensor) -> tuple[int, list[tuple[int, int]]]:
    """How many elements lie beside each other, and stride and size of the axes that repeat such a block."""
    expected = 1
    axes = sorted(
        (s, n) for s, n in zip(tensor.stride(), tensor.shape, strict=True) if n != 1
    )
    for place, (stride, size) in enumerate(axes):
        if stride != expected:
            return expected, axes[place:]
        expected *= size
    return expected, []


def pieces_of(tensor: Tensor) -> list[Tensor]:
    """Flat tensors in the order of memory that together are this one: views of it, one copy where it lies in crumbs."""
    if tensor.is_contiguous():
        return [tensor.view(-1)]
    dense, outer = _dense(tensor)
    if math.prod(size for _, size in outer) > 64 or outer and dense < 2 * ROW:
        return [tensor.contiguous().view(-1)]  # reshape may give a view with gaps
    offsets = [tensor.storage_offset()]
    for stride, size in outer:
        offsets = [offset + stride * i for offset in offsets for i in range(size)]
    return [tensor.as_strided((dense,), (1,), offset) for offset in offsets]


def measure(pieces: Sequence[Tensor]) -> Row:
    """The statistics of flat CPU tensors, taken together, now; none of them is empty."""
    dtype = pieces[0].dtype
    if dtype not in COMPILED:
        exact = (
            _integers
            if dtype in NUMPY and not dtype.is_floating_point
            else _exact_chunk
        )
        return _row(
            [
                exact(chunk)
                for piece in pieces
                for chunk in torch.split(piece, CHUNK // 4)
            ]
        )  # fp64 copies of it
    row = _quick(pieces)
    return _masked(pieces) if row is None else row


def _parts(name: str, pieces: Sequence[Tensor], *numbers: Tensor) -> list[list[float]]:
    """A function of the kernel over whole rows, compiled where it can be, and what is left over."""
    function = FUNCTIONS[name]
    found = []
    for piece in pieces:
        for part in (
            (piece,) if piece.numel() <= LARGEST else torch.split(piece, LARGEST)
        ):
            count = part.numel()
            rest = count % ROW
            if count >= 2 * ROW:
                rows = (
                    part[: count - rest].view(-1, ROW) if rest else part.view(-1, ROW)
                )
                run = compiled(name, part.dtype)
                if run is None:
                    found += [
                        function(r, *numbers).tolist()
                        for r in torch.split(rows, CHUNK // ROW)
                    ]
                else:
                    found.append(run([rows, *numbers])[0].tolist())
            else:
                rest = count
            if rest:
                left = part[count - rest :]
                found.append(
                    _tail(left)
                    if name == "sums"
                    else function(left.view(1, -1), *numbers).tolist()
                )
    return found


def _tail(left: Tensor) -> list[float]:
    """``sums`` of a few elements, in fp64."""
    with np.errstate(
        invalid="ignore"
    ):  # also of the cast: memory not written yet may hold a signalling NaN
        wide = (
            np.asarray(Memory(left, 1, left.numel())).astype(np.float64)
            if left.dtype in NUMPY
            else left.double().numpy()
        )
        return [
            wide.min(),
            wide.max(),
            wide.sum(),
            (wide * wide).sum(),
            np.abs(wide).min(),
        ]


def _quick(pieces: Sequence[Tensor]) -> Row | None:
    """From ``sums``; None where fp32 does not do: non-finite elements, tiny or huge ones, a spread far below the mean."""
    count = sum(piece.numel() for piece in pieces)
    total = squares = 0.0
    low, high, nearest = math.inf, -math.inf, math.inf
    for least, most, added, squared, near in _parts("sums", pieces):
        if not math.isfinite(squared) or not math.isfinite(added):
            return None
        low, high, nearest = min(low, least), max(high, most), min(nearest, near)
        total, squares = total + added, squares + squared
    largest = max(abs(low), abs(high))
    if not math.isfinite(largest) or 0 < largest < _TINY:
        return None
    mean = total / count
    variance = squares / count - mean * mean
    # fp32 sums are good to about 2**-20 of the sum of squares: a variance below 2**-10 of it would keep three digits
    if largest and variance < 2.0**-10 * squares / count:
        return None
    zeros = small = 0.0
    if nearest < torch.finfo(pieces[0].dtype).tiny:
        zeros, small = (
            math.fsum(c) for c in zip(*_parts("counts", pieces), strict=True)
        )
    marks = 0, 0, 0, int(zeros), int(small - zeros)
    return (
        float(low),
        float(high),
        float(mean),
        math.sqrt(squares),
        math.sqrt(variance),
        *marks,
    )


def _masked(pieces: Sequence[Tensor]) -> Row:
    """From ``masked_sums``, scaled so that no square leaves the range of fp32, and the spread around the mean."""

    def run(shift: float, scale: float) -> list[float]:
        parts = _parts("masked_sums", pieces, torch.tensor(shift), torch.tensor(scale))
        columns = list(zip(*parts, strict=True))
        return [min(columns[0]), max(columns[1]), *(math.fsum(c) for c in columns[2:])]

    low, high, _, _, finite, *marks = run(0.0, 1.0)
    counts = tuple(int(c) for c in marks)
    if not finite:
        return (None, None, None, None, None, *counts)  # type: ignore[return-value]
    largest = max(abs(low), abs(high))
    scale = 2.0 ** -max(-126, math.frexp(largest)[1]) if largest else 1.0
    _, _, total, squares, *_ = run(0.0, scale)
    mean = total / finite / scale
    _, _, off, spread, *_ = run(mean, scale)
    variance = max(0.0, spread / finite - (off / finite) ** 2)
    return (
        low,
        high,
        mean + off / finite / scale,
        math.sqrt(squares) / scale,
        math.sqrt(variance) / scale,
        *counts,
    )  # type: ignore[return-value]


def _exact(flat: Tensor) -> list[Tensor]:
    """Ten fp64 sums on the tensor's device: nothing waits for it."""
    tiny = torch.finfo(flat.dtype).tiny if flat.is_floating_point() else 0.0
    wide = (
        flat.to(torch.float32)
        if flat.element_size() == 1 and flat.is_floating_point()
        else flat
    )
    wide = wide.to(torch.float64)
    finite = wide.isfinite()
    y = torch.where(finite, wide, 0.0)
    n = finite.sum()
    mean = y.sum() / n.clamp(min=1)
    spread = torch.where(finite, y - mean, 0.0).square().sum()
    zero = wide == 0
    return [
        torch.where(finite, wide, math.inf).amin(),
        torch.where(finite, wide, -math.inf).amax(),
        mean,
        y.square().sum(),
        spread,
        n.double(),
        wide.isnan().sum().double(),
        (wide == math.inf).sum().double(),
        (wide == -math.inf).sum().double(),
        zero.sum().double(),
        ((wide.abs() < tiny) & ~zero).sum().double(),
    ]


def _exact_chunk(flat: Tensor) -> list[float]:
    found: list[float] = torch.stack(_exact(flat)).tolist()
    return found


def _integers(flat: Tensor) -> list[float]:
    """What ``_exact`` gives, of integers and booleans, all of which are finite."""
    numbers = np.asarray(Memory(flat, 1, flat.numel()))
    wide = numbers.astype(np.float64)
    mean = wide.mean()
    off = wide - mean
    zeros = len(wide) - np.count_nonzero(numbers)
    # no "@": the threads of numpy's BLAS would go on spinning beside torch's
    return [
        numbers.min(),
        numbers.max(),
        mean,
        (wide * wide).sum(),
        (off * off).sum(),
        len(wide),
        0,
        0,
        0,
        zeros,
        0,
    ]


def _row(parts: list[list[Any]]) -> Row:
    """Chunks put together (Chan, Golub and LeVeque, COMPSTAT 1982, eq. 2.1 for mean and spread)."""
    low, high, squares, mean, spread, count = math.inf, -math.inf, 0.0, 0.0, 0.0, 0.0
    counts = [0.0] * 5
    for least, most, average, squared, spread_here, n, *marks in parts:
        counts = [a + b for a, b in zip(counts, marks, strict=True)]
        if not n:
            continue
        low, high, squares = min(low, least), max(high, most), squares + squared
        shift = average - mean
        spread += spread_here + shift * shift * count * n / (count + n)
        count += n
        mean += shift * n / count
    marked = tuple(int(c) for c in counts)
    if not count:
        return (None, None, None, None, None, *marked)  # type: ignore[return-value]
    return (low, high, mean, math.sqrt(squares), math.sqrt(spread / count), *marked)  # type: ignore[return-value]
