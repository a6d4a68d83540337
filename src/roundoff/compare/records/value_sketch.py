"""A tensor's values without their places: what two programs of other layouts share.

With tensors, the sorted values (means of equal stretches of them where they are many);
without, the recorded statistics. Neither depends on the order of axes or on the shape.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
from torch import Tensor

from roundoff.compare.records.recorded_rows import RecordedRow

#: Of more values, means of this many equal stretches of the sorted ones are kept.
STRETCHES = 1024
#: Beyond this magnitude a value stands for "never": an additive mask.
MASK = 1e8

Array = np.ndarray[Any, np.dtype[Any]]


@dataclass(frozen=True, slots=True, eq=False)
class Sketch:
    """The values of one tensor in an order that does not depend on its layout.

    Attributes:
        numel: how many elements.
        values: sorted values, or minimum, maximum, mean, l2 norm and spread.
        size: the l2 norm of the values that are neither masks nor NaN.
        exact: True for sorted values.
        constant: True where all elements are equal.
        masked: how many are not finite, or masks.
        repeats: how often each value stands there, at least: a table that is laid out
            twice has 2. 1 where only statistics are known.
        once: the sorted values with each as often less; None without repeats.
    """

    numel: int
    values: Array
    size: float
    exact: bool
    constant: bool
    masked: int
    repeats: int = 1
    once: Array | None = None

    @property
    def without_repeats(self) -> Sketch:
        """The sketch of the values laid out once."""
        if self.once is None:
            return self
        return Sketch(
            self.numel // self.repeats,
            self.once,
            self.size / math.sqrt(self.repeats),
            self.exact,
            self.constant,
            self.masked // self.repeats,
        )

    @property
    def negative(self) -> Sketch:
        """The sketch of the same tensor with the other sign."""
        if self.exact:
            values = -self.values[::-1]
        else:
            low, high, mean, norm, spread = self.values
            values = np.array([-high, -low, -mean, norm, spread])
        once = -self.once[::-1] if self.once is not None else None
        return replace(self, values=values, once=once)

    def times(self, factor: float) -> Sketch:
        """The sketch of the same tensor times a positive number."""
        once = self.once * factor if self.once is not None else None
        return replace(
            self, values=self.values * factor, size=self.size * factor, once=once
        )

    def distance(self, other: Sketch) -> float:
        """Return how far the values are apart, relative to this one's.

        Infinite for another number of elements.
        """
        if self.numel != other.numel or self.exact != other.exact:
            return math.inf
        if self.values.shape != other.values.shape:
            return math.inf
        if not self.exact:
            return _of_statistics(self, other)
        difference = float(np.linalg.norm(self.values - other.values))
        scale = float(np.linalg.norm(self.values))
        if scale:
            return difference / scale
        return math.inf if difference else 0.0


def _of_statistics(one: Sketch, other: Sketch) -> float:
    low, high, mean, norm, spread = np.abs(one.values - other.values)
    largest = max(abs(one.values[0]), abs(one.values[1]))
    rms = one.size / math.sqrt(max(1, one.numel - one.masked))
    if not largest or not rms:
        return 0.0 if not np.any(other.values) else math.inf
    return float(
        max(low / largest, high / largest, mean / rms, norm / one.size, spread / rms)
    )


def in_reals(tensor: Tensor) -> Tensor:
    """Return complex numbers as pairs of real ones, along an axis more; others as they are.

    >>> in_reals(torch.tensor([1 + 2j])).tolist(), in_reals(torch.tensor([3.0])).tolist()
    ([[1.0, 2.0]], [3.0])
    """
    return torch.view_as_real(tensor.resolve_conj()) if tensor.is_complex() else tensor


def rising(tensor: Tensor) -> Tensor:
    """Return the places of a tensor's elements in rising order, equal ones in their own.

    Complex numbers rise by their real parts, then by their imaginary ones.

    >>> rising(torch.tensor([2 + 1j, 1 + 5j, 2 - 1j])).tolist()
    [1, 2, 0]
    """
    flat = tensor.detach().reshape(-1)
    if not flat.is_complex():
        return flat.argsort(stable=True)
    by_imaginary = flat.imag.argsort(stable=True)
    return by_imaginary[flat.real[by_imaginary].argsort(stable=True)]


def sketch_of_tensor(tensor: Tensor) -> Sketch | None:
    """Return the sketch of a tensor; None for empty ones.

    That of complex numbers is of their real and imaginary parts together.
    """
    if not tensor.numel():
        return None
    tensor = in_reals(tensor.detach())
    flat = tensor.reshape(-1)
    if not flat.is_floating_point():
        flat = flat.to(torch.float64)
    elif flat.element_size() < 4:
        flat = flat.to(torch.float32)
    masked = ~(flat.abs() < MASK)
    count = int(masked.sum())
    # NumPy sorts without the places, which torch always adds: many times as fast
    rising_values = np.sort(flat.masked_fill(masked, 0.0).numpy())
    values = rising_values.astype(np.float64)
    constant = bool(values[0] == values[-1])
    # no BLAS: its threads wait for each other where other programs run
    size = math.sqrt(float(np.einsum("i,i->", values, values)))
    repeats = _repeats(values) if not count and not constant else 1
    once = _stretches(values[::repeats]) if repeats > 1 else None
    return Sketch(
        tensor.numel(), _stretches(values), size, True, constant, count, repeats, once
    )


def sketch_of_row(row: RecordedRow) -> Sketch | None:
    """Return the sketch of recorded statistics; None where there are none."""
    numbers = (row.min, row.max, row.mean, row.l2, row.std)
    if not row.numel or row.l2 is None or any(n is None for n in numbers):
        return None
    low, high, mean, norm, spread = (float(n or 0.0) for n in numbers)
    masked = (row.nan or 0) + (row.posinf or 0) + (row.neginf or 0)
    values = np.array([low, high, mean, norm, spread])
    return Sketch(row.numel, values, norm, False, low == high, masked)


def together(parts: Sequence[Sketch]) -> Sketch | None:
    """Return the sketch of several tensors as one; None where it is not known.

    Of sorted values only where none were left out.
    """
    first = parts[0]
    numel = sum(part.numel for part in parts)
    masked = sum(part.masked for part in parts)
    size = math.sqrt(sum(part.size**2 for part in parts))
    constant = all(part.constant for part in parts)
    if first.exact:
        largest = max(part.numel for part in parts)
        if largest > STRETCHES or numel > STRETCHES * STRETCHES:
            return None
        values = np.sort(np.concatenate([part.values for part in parts]))
        constant = bool(values[0] == values[-1])
        return Sketch(numel, _stretches(values), size, True, constant, masked)
    columns = np.array([part.values for part in parts])
    mean = float(np.average(columns[:, 2], weights=[part.numel for part in parts]))
    spread = math.sqrt(max(0.0, size**2 / numel - mean**2))
    low = float(columns[:, 0].min())
    high = float(columns[:, 1].max())
    values = np.array([low, high, mean, size, spread])
    return Sketch(numel, values, size, False, low == high, masked)


def zeros_sketch(numel: int) -> Sketch:
    """Return the sketch of the statistics of zeros."""
    return Sketch(numel, np.zeros(5), 0.0, False, True, 0)


def _repeats(values: Array) -> int:
    """Return the largest number by which the lengths of all runs of equal values divide."""
    starts = np.flatnonzero(np.diff(values)) + 1
    runs = np.diff(starts, prepend=0, append=len(values))
    return int(np.gcd.reduce(runs))


def _stretches(values: Array) -> Array:
    """Return sorted values, or the means of stretches of them times the root of their number."""
    if len(values) <= STRETCHES:
        return values
    starts = np.linspace(0, len(values), STRETCHES, endpoint=False).astype(int)
    lengths = np.diff(np.append(starts, len(values)))
    sums: Array = np.add.reduceat(values, starts) / np.sqrt(lengths)
    return sums


class SketchIndex:
    """The sketches of one side, to look up the nearest one."""

    def __init__(self, sketches: Iterable[tuple[int, Sketch]]) -> None:
        by_size: dict[int, list[tuple[float, int, Sketch]]] = {}
        for key, sketch in sketches:
            by_size.setdefault(sketch.numel, []).append((sketch.size, key, sketch))
        self._by_size = {
            numel: sorted(entries, key=lambda entry: entry[:2])
            for numel, entries in by_size.items()
        }
        self._sizes = {
            numel: np.array([entry[0] for entry in entries])
            for numel, entries in self._by_size.items()
        }

    def has_numel(self, numel: int) -> bool:
        """Return True where one of these has so many elements."""
        return numel in self._by_size

    def may_have(self, tensor: Tensor, limit: float) -> bool:
        """Return False where none of these has about the l2 norm of a real tensor: cheaper
        than ``near``."""
        if not self.has_numel(tensor.numel()):
            return False
        size = float(torch.linalg.vector_norm(tensor, dtype=torch.float64))
        # masks count in this norm and not in that of a sketch
        return not size < MASK or self.has_size(tensor.numel(), size, limit)

    def has_size(self, numel: int, size: float, limit: float) -> bool:
        """Return True where one of these has about this l2 norm: cheaper than ``near``."""
        sizes = self._sizes.get(numel)
        if sizes is None:
            return False
        start = int(np.searchsorted(sizes, size * (1 - limit), "left"))
        return start < len(sizes) and float(sizes[start]) <= size * (1 + limit)

    def near(self, sketch: Sketch, limit: float) -> list[tuple[float, int]]:
        """Return distance and key of those within ``limit``, the nearest first.

        Norms of tensors within a relative distance differ by no more than it.
        """
        entries = self._by_size.get(sketch.numel)
        if entries is None:
            return []
        sizes = self._sizes[sketch.numel]
        spread = limit * sketch.size
        start = int(np.searchsorted(sizes, sketch.size - spread, "left"))
        end = int(np.searchsorted(sizes, sketch.size + spread, "right"))
        near = []
        for _, key, other in entries[start:end]:
            distance = sketch.distance(other)
            if distance <= limit:
                near.append((distance, key))
        return sorted(near)
