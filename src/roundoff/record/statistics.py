"""Statistics of every tensor of a step: what must be read now is read in one pass, the
rest is done after the step.

All are over the finite elements, accumulated in fp32 or wider: ``min``, ``max``,
``mean``, ``l2`` (root of the sum of squares) and ``std`` (of the population); ``nan``,
``posinf``, ``neginf``, ``zero`` and ``subnormal`` count elements. The exponent histogram
counts ``floor(log2 |x|)`` of the finite non-zero elements of a strided sample. Integers
and booleans count as numbers (int64 beyond 2**53 is rounded), complex numbers by their
modulus. Without finite elements the first five are None; an empty tensor has counts of
zero.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from roundoff.record.samples import (
    NUMPY,
    SAMPLE,
    ArrayView,
    ExponentHistogram,
    SampleEntry,
    Slab,
    histograms_of,
)
from roundoff.record.statistics_kernel import (
    CHUNK,
    COMPILED,
    FUNCTIONS,
    LARGEST,
    ROW,
    compiled,
)

#: fp32 sums of squares lose precision below this magnitude, and overflow to infinity
#: above 2**64.
_TINY = 2.0**-50
#: fp64 sums of squares may overflow above this magnitude: such elements are made smaller
#: by a power of two before they are added.
_HUGE = 2.0**480
_SHRINK = 2.0**-600
#: Elements that are read at once on other devices: fp64 copies of them take 32 MiB each,
#: and few calls read a large tensor.
_DEVICE_CHUNK = 2**22


class TensorStatistics(NamedTuple):
    """The statistics of one tensor; the fields are columns of ``TensorRecord``."""

    min: float | None
    max: float | None
    mean: float | None
    l2: float | None
    std: float | None
    nan: int = 0
    posinf: int = 0
    neginf: int = 0
    zero: int = 0
    subnormal: int = 0


STATISTICS = TensorStatistics._fields
#: The values of a tensor without finite elements.
_NO_VALUES = (None, None, None, None, None)
EMPTY = TensorStatistics(*_NO_VALUES)


class Statistics:
    """Collects the tensors of one step; ``finish`` gives the statistics of each by the
    number it was added with."""

    def __init__(self) -> None:
        self._slabs: dict[_Queue, Slab] = {}
        #: the samples of each block of a slab, in the order in which they stand there
        self._samples: dict[tuple[_Queue, int], list[SampleEntry]] = {}
        self._rows: dict[int, TensorStatistics] = {}
        #: sums on other devices, fetched once after the step
        self._unfetched: dict[_Queue, list[tuple[int, Tensor]]] = {}

    def add(self, number: int, tensor: Tensor) -> None:
        """Read ``tensor`` (plain, strided) now; it may change or go afterwards."""
        count = tensor.numel()
        if not count:
            self._rows[number] = EMPTY
            return
        if tensor.is_complex():
            tensor = tensor.abs()
        pieces = pieces_of(tensor)
        is_small = count <= SAMPLE
        queue = _queue_of(tensor.device)
        dtype = tensor.dtype
        slab = self._slabs.get(queue)
        if slab is None:
            slab = self._slabs[queue] = Slab(queue.device)
        if not is_small:
            self._measure(number, pieces, queue)
        # taken last: the pass before has brought the memory near
        every = 1 if is_small else -(-count // SAMPLE)
        block, start, size = slab.keep(pieces, every)
        tiny = torch.finfo(dtype).tiny if dtype.is_floating_point else 0.0
        entry = SampleEntry(number, start, size, is_small, tiny)
        self._samples.setdefault((queue, block), []).append(entry)

    def finish(
        self,
    ) -> tuple[dict[int, TensorStatistics], dict[int, ExponentHistogram]]:
        """Return statistics and histograms of exponents, by number."""
        for queue in self._slabs:
            queue.wait()
        for unfetched in self._unfetched.values():
            self._rows.update(_fetched(unfetched))
        histograms: dict[int, ExponentHistogram] = {}
        blocks = {
            queue: [block.cpu().numpy() for block in slab.blocks]
            for queue, slab in self._slabs.items()
        }
        for (queue, block), entries in self._samples.items():
            stored = blocks[queue][block]
            end = entries[-1].start + entries[-1].size
            values = stored[entries[0].start : end]
            histograms.update(histograms_of(values, entries))
            whole = [entry for entry in entries if entry.whole]
            if whole:
                parts = [stored[e.start : e.start + e.size] for e in whole]
                self._rows.update(_small_rows(np.concatenate(parts), whole))
        return self._rows, histograms

    def _measure(self, number: int, pieces: Sequence[Tensor], queue: _Queue) -> None:
        if queue.device.type == "cpu":
            self._rows[number] = measure(pieces)
            return
        # fp64 copies of the whole would take 16 times its memory
        chunks = [
            chunk for piece in pieces for chunk in torch.split(piece, _DEVICE_CHUNK)
        ]
        sums = torch.stack([torch.stack(_exact(chunk)) for chunk in chunks])
        self._unfetched.setdefault(queue, []).append((number, sums))


class _Queue(NamedTuple):
    """Where work is done in order: a device, and the stream of it that is current.

    Memory of a stream belongs to it: what one stream has freed may be given to its next
    caller while kernels of it still run, so that another stream would write under them.
    Hence each stream has a slab of its own, and who reads a slab waits for its stream.
    """

    device: torch.device
    stream: Any = None

    def wait(self) -> None:
        """Wait until all that was put in the queue is done."""
        if self.stream is not None:
            self.stream.synchronize()


def _queue_of(device: torch.device) -> _Queue:
    """Return the queue in which an operator on that device would stand now."""
    if device.type == "cpu":
        return _Queue(device)
    accelerator = torch.accelerator.current_accelerator()
    if accelerator is None or accelerator.type != device.type:
        return _Queue(device)
    return _Queue(device, torch.accelerator.current_stream(device))


def _fetched(unfetched: list[tuple[int, Tensor]]) -> dict[int, TensorStatistics]:
    """Return the statistics of the tensors of one device, read in one copy."""
    parts = torch.cat([sums for _, sums in unfetched]).tolist()
    rows = {}
    start = 0
    for number, sums in unfetched:
        rows[number] = _combined(parts[start : start + len(sums)])
        start += len(sums)
    return rows


def _small_rows(
    values: np.ndarray, entries: Sequence[SampleEntry]
) -> dict[int, TensorStatistics]:
    """Return statistics of tensors that were kept whole, one after the other in ``values``."""
    sizes = np.array([entry.size for entry in entries])
    starts = np.concatenate([[0], np.cumsum(sizes)[:-1]])
    tiny = np.repeat(np.array([entry.tiny for entry in entries]), sizes)

    def added(of: np.ndarray) -> np.ndarray:
        return np.add.reduceat(of, starts)

    is_finite = np.isfinite(values)
    is_zero = values == 0
    with np.errstate(over="ignore", invalid="ignore"):
        y = np.where(is_finite, values, 0.0)
        is_huge = np.maximum.reduceat(np.abs(y), starts) > _HUGE
        factor = np.where(is_huge, _SHRINK, 1.0)
        y = y * np.repeat(factor, sizes)
        n = added(is_finite.astype(np.int64))
        mean = added(y) / np.maximum(n, 1)
        spread = np.where(is_finite, y - np.repeat(mean, sizes), 0.0) ** 2
        columns = [
            np.minimum.reduceat(np.where(is_finite, values, np.inf), starts).tolist(),
            np.maximum.reduceat(np.where(is_finite, values, -np.inf), starts).tolist(),
            (mean / factor).tolist(),
            (np.sqrt(added(y * y)) / factor).tolist(),
            (np.sqrt(added(spread) / np.maximum(n, 1)) / factor).tolist(),
        ]
    marks = (
        np.isnan(values),
        values == np.inf,
        values == -np.inf,
        is_zero,
        (np.abs(values) < tiny) & ~is_zero,
    )
    counts = [added(mark.astype(np.int64)).tolist() for mark in marks]
    measured = zip(*columns, strict=True)
    counted = zip(*counts, strict=True)
    rows = {}
    for entry, finite, numbers, marked in zip(
        entries, n.tolist(), measured, counted, strict=True
    ):
        rows[entry.number] = TensorStatistics(
            *(numbers if finite else _NO_VALUES), *marked
        )
    return rows


def in_memory_order(tensor: Tensor) -> Tensor | None:
    """Return the elements as a flat view in the order of memory, or None where they do
    not lie densely in it.
    """
    if tensor.is_contiguous():
        return tensor.view(-1)
    dense, outer = _dense(tensor)
    return None if outer else tensor.as_strided((dense,), (1,), tensor.storage_offset())


def _dense(tensor: Tensor) -> tuple[int, list[tuple[int, int]]]:
    """Return how many elements lie beside each other, and stride and size of the axes that
    repeat such a block."""
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
    """Flat tensors in the order of memory that together are this one: views of it, one
    copy where it lies in crumbs."""
    if tensor.is_contiguous():
        return [tensor.view(-1)]
    dense, outer = _dense(tensor)
    has_many_pieces = math.prod(size for _, size in outer) > 64
    if has_many_pieces or (outer and dense < 2 * ROW):
        return [tensor.contiguous().view(-1)]  # reshape may give a view with gaps
    offsets = [tensor.storage_offset()]
    for stride, size in outer:
        offsets = [offset + stride * i for offset in offsets for i in range(size)]
    return [tensor.as_strided((dense,), (1,), offset) for offset in offsets]


def measure(pieces: Sequence[Tensor]) -> TensorStatistics:
    """Return the statistics of flat CPU tensors, taken together, now; none of them is empty."""
    dtype = pieces[0].dtype
    if dtype in COMPILED:
        row = _quick(pieces)
        return _masked(pieces) if row is None else row
    has_integers = dtype in NUMPY and not dtype.is_floating_point
    sums = _integer_sums if has_integers else _exact_sums
    parts = []
    for piece in pieces:
        for chunk in torch.split(piece, CHUNK // 4):  # fp64 copies of it
            parts.append(sums(chunk))
    return _combined(parts)


def _parts(name: str, pieces: Sequence[Tensor], *numbers: Tensor) -> list[list[float]]:
    """Return a function of the kernel over whole rows, compiled where it can be, and
    over the elements after them.
    """
    parts: list[list[float]] = []
    for piece in pieces:
        if piece.numel() <= LARGEST:
            parts += _parts_of(name, piece, *numbers)
        else:
            for part in torch.split(piece, LARGEST):
                parts += _parts_of(name, part, *numbers)
    return parts


def _parts_of(name: str, flat: Tensor, *numbers: Tensor) -> list[list[float]]:
    function = FUNCTIONS[name]
    count = flat.numel()
    remaining = count % ROW if count >= 2 * ROW else count
    whole = count - remaining
    parts: list[list[float]] = []
    if whole:
        rows = (flat[:whole] if remaining else flat).view(-1, ROW)
        run = compiled(name, flat.dtype)
        if run is None:
            chunks = torch.split(rows, CHUNK // ROW)
            parts += [function(chunk, *numbers).tolist() for chunk in chunks]
        else:
            parts.append(run([rows, *numbers]).tolist())
    if remaining:
        tail = flat[whole:]
        if name == "sums":
            parts.append(_tail_sums(tail))
        else:
            parts.append(function(tail.view(1, -1), *numbers).tolist())
    return parts


def _tail_sums(tail: Tensor) -> list[float]:
    """Return ``sums`` of a few elements, in fp64."""
    # also of the cast: memory not written yet may hold a signalling NaN
    with np.errstate(invalid="ignore"):
        if tail.dtype in NUMPY:
            wide = np.asarray(ArrayView(tail, 1, tail.numel())).astype(np.float64)
        else:
            wide = tail.double().numpy()
        return [
            wide.min(),
            wide.max(),
            wide.sum(),
            (wide * wide).sum(),
            np.abs(wide).min(),
        ]


def _quick(pieces: Sequence[Tensor]) -> TensorStatistics | None:
    """From ``sums``; None where fp32 does not do: non-finite elements, tiny or huge
    ones, a spread far below the mean."""
    count = sum(piece.numel() for piece in pieces)
    total = 0.0
    squares = 0.0
    low = math.inf
    high = -math.inf
    nearest = math.inf
    for least, most, added, squared, near in _parts("sums", pieces):
        if not math.isfinite(squared) or not math.isfinite(added):
            return None
        low = min(low, least)
        high = max(high, most)
        nearest = min(nearest, near)
        total += added
        squares += squared
    largest = max(abs(low), abs(high))
    if not math.isfinite(largest) or 0 < largest < _TINY:
        return None
    mean = total / count
    variance = squares / count - mean * mean
    # fp32 sums are good to about 2**-20 of the sum of squares: a variance below 2**-10
    # of it would keep three digits
    if largest and variance < 2.0**-10 * squares / count:
        return None
    zeros = 0.0
    small = 0.0
    if nearest < torch.finfo(pieces[0].dtype).tiny:
        zeros, small = map(math.fsum, zip(*_parts("counts", pieces), strict=True))
    return TensorStatistics(
        float(low),
        float(high),
        float(mean),
        math.sqrt(squares),
        math.sqrt(variance),
        zero=int(zeros),
        subnormal=int(small - zeros),
    )


def _total(values: Sequence[float]) -> float:
    """Return the sum, rounded once; NaN or Inf where a piece's own has overflowed."""
    is_finite = all(map(math.isfinite, values))
    return math.fsum(values) if is_finite else sum(values)


def _masked(pieces: Sequence[Tensor]) -> TensorStatistics:
    """From ``masked_sums``, scaled so that no square leaves the range of fp32, and the
    spread around the mean."""

    def run(shift: float, scale: float) -> list[float]:
        parts = _parts("masked_sums", pieces, torch.tensor(shift), torch.tensor(scale))
        minima, maxima, *sums = zip(*parts, strict=True)
        return [min(minima), max(maxima), *map(_total, sums)]

    low, high, _, _, finite, *marks = run(0.0, 1.0)
    counts = [int(mark) for mark in marks]
    if not finite:
        return TensorStatistics(*_NO_VALUES, *counts)
    largest = max(abs(low), abs(high))
    # neither it nor what it is multiplied with is subnormal: some CPUs flush these
    exponent = min(126, max(-126, math.frexp(largest)[1]))
    scale = 2.0**-exponent if largest else 1.0
    _, _, total, squares, *_ = run(0.0, scale)
    shift = float(np.float32(total / finite))
    _, _, off, spread, *_ = run(shift, scale)
    variance = max(0.0, spread / finite - (off / finite) ** 2)
    return TensorStatistics(
        low,
        high,
        (shift + off / finite) / scale,
        math.sqrt(squares) / scale,
        math.sqrt(variance) / scale,
        *counts,
    )


def _exact(flat: Tensor) -> list[Tensor]:
    """Twelve fp64 numbers on the tensor's device: nothing waits for them.

    The last is what the elements were multiplied with before they were added.
    """
    tiny = torch.finfo(flat.dtype).tiny if flat.is_floating_point() else 0.0
    is_fp8 = flat.element_size() == 1 and flat.is_floating_point()
    wide = flat.to(torch.float32) if is_fp8 else flat
    wide = wide.to(torch.float64)
    is_finite = wide.isfinite()
    y = torch.where(is_finite, wide, 0.0)
    is_huge = y.abs().amax() > _HUGE
    factor = torch.where(is_huge, y.new_full((), _SHRINK), 1.0)
    y *= factor
    n = is_finite.sum()
    mean = y.sum() / n.clamp(min=1)
    spread = torch.where(is_finite, y - mean, 0.0).square().sum()
    is_zero = wide == 0
    return [
        torch.where(is_finite, wide, math.inf).amin(),
        torch.where(is_finite, wide, -math.inf).amax(),
        mean,
        y.square().sum(),
        spread,
        n.double(),
        wide.isnan().sum().double(),
        (wide == math.inf).sum().double(),
        (wide == -math.inf).sum().double(),
        is_zero.sum().double(),
        ((wide.abs() < tiny) & ~is_zero).sum().double(),
        factor,
    ]


def _exact_sums(flat: Tensor) -> list[float]:
    sums: list[float] = torch.stack(_exact(flat)).tolist()
    return sums


def _integer_sums(flat: Tensor) -> list[float]:
    """Return what ``_exact`` gives, of integers and booleans, all of which are finite."""
    numbers = np.asarray(ArrayView(flat, 1, flat.numel()))
    wide = numbers.astype(np.float64)
    mean = wide.mean()
    off = wide - mean
    zeros = len(wide) - np.count_nonzero(numbers)
    # no "@": the threads of numpy's BLAS would go on spinning beside torch's
    squares = (wide * wide).sum()
    spread = (off * off).sum()
    extremes = [numbers.min(), numbers.max()]
    return [*extremes, mean, squares, spread, len(wide), 0, 0, 0, zeros, 0, 1]


def _combined(parts: list[list[Any]]) -> TensorStatistics:
    """Return chunks put together (Chan, Golub and LeVeque, COMPSTAT 1982, eq. 2.1 for
    mean and spread). All are added with the factor of the smallest.
    """
    factor = min(part[-1] for part in parts)
    low = math.inf
    high = -math.inf
    squares = 0.0
    mean = 0.0
    spread = 0.0
    count = 0.0
    counts = [0.0] * 5
    for least, most, chunk_mean, chunk_squares, chunk_spread, n, *marks, used in parts:
        counts = [a + b for a, b in zip(counts, marks, strict=True)]
        if not n:
            continue
        low = min(low, least)
        high = max(high, most)
        more = factor / used
        squares += chunk_squares * more * more
        shift = chunk_mean * more - mean
        spread += chunk_spread * more * more
        spread += shift * shift * count * n / (count + n)
        count += n
        mean += shift * n / count
    marked = [int(c) for c in counts]
    if not count:
        return TensorStatistics(*_NO_VALUES, *marked)
    return TensorStatistics(
        low,
        high,
        mean / factor,
        math.sqrt(squares) / factor,
        math.sqrt(spread / count) / factor,
        *marked,
    )
