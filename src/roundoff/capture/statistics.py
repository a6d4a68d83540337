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
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from torch import Tensor

from roundoff.capture.kernel import CHUNK, COMPILED, LARGEST, ROW, compiled, masked_sums, sums

#: Elements of the strided sample; a tensor that is not larger is kept whole until the step is over.
SAMPLE = 512
#: fp32 sums of squares lose precision below this magnitude, and overflow to infinity above 2**64.
_TINY = 2.0**-50

COLUMNS = ("min", "max", "mean", "l2", "std", "nan", "posinf", "neginf", "zero", "subnormal")
Row = tuple[float | None, float | None, float | None, float | None, float | None, int, int, int, int, int]
EMPTY: Row = (None, None, None, None, None, 0, 0, 0, 0, 0)


@dataclass
class _Slab:
    """Samples of one device, in blocks that are allocated once."""

    device: torch.device
    blocks: list[Tensor] = field(default_factory=list)
    used: int = 0

    def keep(self, sample: Tensor) -> tuple[int, int]:
        size = sample.numel()
        if not self.blocks or self.used + size > self.blocks[-1].numel():
            block = torch.empty(2**18, dtype=torch.float64, device=self.device)
            self.blocks.append(block)
            self.used = 0
        start, self.used = self.used, self.used + size
        self.blocks[-1][start : self.used].copy_(sample)
        return len(self.blocks) - 1, start


class Statistics:
    """Collects the tensors of one step; ``finish`` gives the statistics of each by the number it was added with."""

    def __init__(self) -> None:
        self._slabs: dict[torch.device, _Slab] = {}
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
        flat = in_memory_order(tensor)
        flat = tensor.reshape(-1) if flat is None else flat
        small = count <= SAMPLE
        device, dtype = tensor.device, tensor.dtype
        slab = self._slabs.get(device)
        if slab is None:
            slab = self._slabs[device] = _Slab(device)
        sample = flat if small else flat[:: -(-count // SAMPLE)]
        block, start = slab.keep(sample)
        tiny = torch.finfo(dtype).tiny if dtype.is_floating_point else 0.0
        self._samples.append((number, device, block, start, sample.numel(), small, tiny))
        if small:
            return
        if device.type == "cpu":
            self._rows[number] = measure(flat)
        else:  # fetched once, after the step
            self._later.append((number, torch.stack(_exact(flat))))

    def finish(self) -> tuple[dict[int, Row], dict[int, tuple[int, list[int], int]]]:
        """Statistics by number, and ``(lowest exponent, counts, size of the sample)`` by number."""
        for number, values in self._later:
            self._rows[number] = _row([values.tolist()])
        histograms: dict[int, tuple[int, list[int], int]] = {}
        fetched = {device: [b.cpu().numpy() for b in slab.blocks] for device, slab in self._slabs.items()}
        by_block: dict[tuple[torch.device, int], list[tuple[int, int, int, bool, float]]] = {}
        for number, device, block, start, size, small, tiny in self._samples:
            by_block.setdefault((device, block), []).append((number, start, size, small, tiny))
        for (device, block), entries in by_block.items():
            for first in range(0, len(entries), 256):
                part = entries[first : first + 256]
                begin, end = part[0][1], part[-1][1] + part[-1][2]
                stored = fetched[device][block]
                histograms.update(_histograms(stored[begin:end], part))
                whole = [e for e in part if e[3]]
                if whole:
                    self._rows.update(_small_rows(np.concatenate([stored[e[1] : e[1] + e[2]] for e in whole]), whole))
        return self._rows, histograms


_Entry = tuple[int, int, int, bool, float]


def _histograms(values: np.ndarray, entries: Sequence[_Entry]) -> dict[int, tuple[int, list[int], int]]:
    """The biased exponent is in bits 52 to 62 of an fp64 number: 0 is zero (fp64 subnormals with it), 2047 not finite."""
    segment = np.repeat(np.arange(len(entries)), [e[2] for e in entries])
    biased = (values.view(np.int64) >> 52) & 2047
    counts = np.bincount(segment * 2048 + biased, minlength=len(entries) * 2048).reshape(-1, 2048)
    counts = counts[:, 1:2047]
    seen = np.asarray(counts > 0)
    low = seen.argmax(1)
    high = seen.shape[1] - seen[:, ::-1].argmax(1)
    some = seen.any(axis=1).tolist()
    return {
        entry[0]: (int(low[i]) - 1022, counts[i, low[i] : high[i]].tolist(), entry[2]) if some[i] else (0, [], entry[2])
        for i, entry in enumerate(entries)
    }


def _small_rows(values: np.ndarray, entries: Sequence[_Entry]) -> dict[int, Row]:
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
            mean.tolist(), np.sqrt(added(y * y)).tolist(), np.sqrt(added(spread) / np.maximum(n, 1)).tolist(),
        ]  # fmt: skip
    marks = (np.isnan(values), values == np.inf, values == -np.inf, zero, (np.abs(values) < tiny) & ~zero)
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
    expected = 1
    for stride, size in sorted((s, n) for s, n in zip(tensor.stride(), tensor.shape, strict=True) if n != 1):
        if stride != expected:
            return None
        expected *= size
    return tensor.as_strided((tensor.numel(),), (1,), tensor.storage_offset())


def measure(flat: Tensor) -> Row:
    """The statistics of a flat, not empty CPU tensor, now."""
    if flat.dtype not in COMPILED:
        return _row([torch.stack(_exact(c)).tolist() for c in torch.split(flat, CHUNK)])
    row = _quick(_parts("sums", flat))
    return _masked(flat) if row is None else row


def _parts(name: str, flat: Tensor, *numbers: Tensor) -> list[tuple[int, list[float]]]:
    """``sums`` or ``masked_sums`` of whole rows, compiled, and of what is left over; all of it in eager chunks where
    nothing is compiled. With each part the number of its elements."""
    function = sums if name == "sums" else masked_sums
    found = []
    for part in (flat,) if flat.numel() <= LARGEST else torch.split(flat, LARGEST):
        count = part.numel()
        many = count >= 2**20 and torch.get_num_threads() >= 4
        run = compiled(name, flat.dtype, many) if count >= 2 * ROW else None
        if run is None:
            found += [(c.numel(), function(c.view(1, -1), *numbers).tolist()) for c in torch.split(part, CHUNK)]
            continue
        rest = count % ROW
        found.append((count - rest, run([part[: count - rest].view(-1, ROW), *numbers])[0].tolist()))
        if rest:
            found.append((rest, function(part[count - rest :].view(1, -1), *numbers).tolist()))
    return found


def _quick(parts: list[tuple[int, list[float]]]) -> Row | None:
    """From ``sums``; None where fp32 does not do: non-finite elements, tiny or huge ones, a spread far below the mean."""
    total = squares = 0.0
    count = zeros = small = 0
    low, high = math.inf, -math.inf
    for size, (least, most, added, squared, zero, below) in parts:
        if not math.isfinite(squared) or not math.isfinite(added):
            return None
        low, high = min(low, least), max(high, most)
        total, squares = total + added, squares + squared
        count, zeros, small = count + size, zeros + int(zero), small + int(below)
    largest = max(abs(low), abs(high))
    if not math.isfinite(largest) or 0 < largest < _TINY:
        return None
    mean = total / count
    variance = squares / count - mean * mean
    # fp32 sums are good to about 2**-20 of the sum of squares: a variance below 2**-10 of it would keep three digits
    if largest and variance < 2.0**-10 * squares / count:
        return None
    return (low, high, mean, math.sqrt(squares), math.sqrt(variance), 0, 0, 0, zeros, small - zeros)


def _masked(flat: Tensor) -> Row:
    """From ``masked_sums``, scaled so that no square leaves the range of fp32, and the spread around the mean."""

    def run(shift: float, scale: float) -> list[float]:
        parts = _parts("masked_sums", flat, torch.tensor(shift), torch.tensor(scale))
        columns = list(zip(*(p for _, p in parts), strict=True))
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
    return (low, high, mean + off / finite / scale, math.sqrt(squares) / scale, math.sqrt(variance) / scale, *counts)  # type: ignore[return-value]


def _exact(flat: Tensor) -> list[Tensor]:
    """Ten fp64 sums on the tensor's device: nothing waits for it."""
    tiny = torch.finfo(flat.dtype).tiny if flat.is_floating_point() else 0.0
    wide = flat.to(torch.float32) if flat.element_size() == 1 and flat.is_floating_point() else flat
    wide = wide.to(torch.float64)
    finite = wide.isfinite()
    y = torch.where(finite, wide, 0.0)
    n = finite.sum()
    mean = y.sum() / n.clamp(min=1)
    spread = torch.where(finite, y - mean, 0.0).square().sum()
    zero = wide == 0
    return [
        torch.where(finite, wide, math.inf).amin(), torch.where(finite, wide, -math.inf).amax(), mean,
        y.square().sum(), spread, n.double(), wide.isnan().sum().double(), (wide == math.inf).sum().double(),
        (wide == -math.inf).sum().double(), zero.sum().double(), ((wide.abs() < tiny) & ~zero).sum().double(),
    ]  # fmt: skip


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
