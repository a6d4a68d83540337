"""Samples: the parts of a batch whose errors do not meet.

Sign vectors of different samples are independent, so errors that stay within a sample
are squared sample by sample, which gives as many measurements as there are samples. The
batch is divided by the lengths that its tensors have in common with the target, and a
backward pass that looks at every other sample shows which sites keep them apart.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves

#: Places of a length that may count the samples.
TARGET_ROWS = "rows of the target"
BATCH_FIRST = "first axis of the batch"
BATCH_SECOND = "second axis of the batch"
WAYS = (TARGET_ROWS, BATCH_FIRST, BATCH_SECOND)


@dataclass(frozen=True, slots=True)
class Division:
    """A batch divided into samples.

    Attributes:
        way: the length that counts the samples, one of ``WAYS``.
        samples: how many there are.
        axes: for each tensor of the target the axis that counts the samples, and how
            many entries in a row belong to one.
        preferred: the axis of a target that is taken where two have the length.
    """

    way: str
    samples: int
    axes: tuple[tuple[int, int], ...]
    preferred: int = 0

    @property
    def kept(self) -> Tensor:
        """True for every other sample, shape ``(samples,)``."""
        return torch.arange(self.samples) % 2 == 0

    def masked(self, vectors: Tensor, number: int) -> Tensor:
        """Return sign vectors of target ``number``, zero on the samples not kept.

        Shape ``(K, *target)``, as they come.
        """
        if self.samples == 1:
            return vectors
        axis, repeats = self.axes[number]
        drop = (~self.kept).repeat_interleave(repeats).to(vectors.device)
        shape = [1] * vectors.ndim
        shape[axis + 1] = -1
        return vectors.masked_fill(drop.view(shape), 0.0)

    def power(self, tensor: Tensor, number: int) -> Tensor:
        """Return the sum of squares of each sample of target ``number``, float64."""
        squares = tensor.detach().double().square()
        if self.samples == 1:
            return squares.sum().reshape(1).cpu()
        axis, _ = self.axes[number]
        return squares.movedim(axis, 0).reshape(self.samples, -1).sum(1).cpu()


def whole(targets: Sequence[Tensor]) -> Division:
    """Return the batch as one sample."""
    return Division(TARGET_ROWS, 1, tuple((0, 1) for _ in targets))


def divide(
    way: str, batch: Any, targets: Sequence[Tensor], preferred: int = 0
) -> Division:
    """Divide a batch in one way; it is one sample where a target has no such axis."""
    length = _length(way, batch, targets)
    if length is None or length < 2:
        return whole(targets)
    axes = [_axis_of(target, length, preferred) for target in targets]
    of_samples = tuple(axis for axis in axes if axis is not None)
    if len(of_samples) < len(axes):
        return whole(targets)
    return Division(way, length, of_samples, preferred)


def divisions(batch: Any, targets: Sequence[Tensor]) -> Iterator[Division]:
    """Yield the different ways to divide a batch, at least one.

    A target of one row is one sample.
    """
    is_one = _length(TARGET_ROWS, batch, targets) == 1
    seen = set()
    for preferred, way in itertools.product((0, 1), () if is_one else WAYS):
        division = divide(way, batch, targets, preferred)
        kind = (division.samples, division.axes)
        if division.samples > 1 and kind not in seen:
            seen.add(kind)
            yield division
    if not seen:
        yield whole(targets)


def _length(way: str, batch: Any, targets: Sequence[Tensor]) -> int | None:
    if way == TARGET_ROWS:
        rows = {target.shape[0] if target.ndim else 1 for target in targets}
        return rows.pop() if len(rows) == 1 else None
    axis = WAYS.index(way) - 1
    tensors = (leaf for leaf in tree_leaves(batch) if isinstance(leaf, Tensor))
    first = next((tensor for tensor in tensors if tensor.ndim), None)
    return None if first is None or first.ndim <= axis else first.shape[axis]


def _axis_of(target: Tensor, samples: int, preferred: int) -> tuple[int, int] | None:
    """Return the axis of a target that counts the samples, and entries a sample."""
    is_second = target.ndim > 1 and target.shape[1] == samples
    if is_second and preferred == 1:
        return 1, 1
    if target.ndim and target.shape[0] and target.shape[0] % samples == 0:
        return 0, target.shape[0] // samples
    return (1, 1) if is_second else None


def sample_axis(masked: Tensor, samples: int, keep: Tensor) -> tuple[int, int] | None:
    """Find the axis of a site's tensor that counts the samples.

    ``masked`` is the gradient, at the site, of a probe that is zero on the samples
    where ``keep`` (bool, shape ``(samples,)``) is False. On an axis that counts samples
    the slices of the other samples are exactly zero.

    Returns ``(axis, repeats)``: the axis has ``samples * repeats`` entries, samples
    slowest. None when the site mixes samples, or has another layout: its projections
    are then summed over the batch before squaring, which estimates the same sum of
    powers with more variance.
    """
    if samples < 2 or not bool(masked.any()):
        return None
    for axis in range(min(2, masked.ndim)):
        size = masked.shape[axis]
        if size == 0 or size % samples or (axis == 1 and size != samples):
            continue
        slices = masked.movedim(axis, 0).reshape(samples, -1)
        others = slices[~keep.to(slices.device)]
        if not bool(others.any()):
            return axis, size // samples
    return None
