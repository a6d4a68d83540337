"""A strided sample of every tensor, kept until the step is over, and the histograms of
exponents made of it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

#: Elements of the strided sample; a tensor that is not larger is kept whole until the
#: step is over.
SAMPLE = 512
#: Elements of a block of samples: 2 MiB.
_BLOCK = 2**18
#: What numpy reads of torch's formats.
NUMPY = {
    torch.float32: "<f4",
    torch.float64: "<f8",
    torch.float16: "<f2",
    torch.int64: "<i8",
    torch.int32: "<i4",
    torch.bool: "|b1",
    torch.uint8: "|u1",
    torch.int8: "|i1",
}


@dataclass
class Slab:
    """Samples of one device, in blocks that are allocated once."""

    device: torch.device
    blocks: list[Tensor] = field(default_factory=list)
    used: int = _BLOCK

    def keep(self, pieces: Sequence[Tensor], every: int) -> tuple[int, int, int]:
        """Copy each ``every``-th element; give the block, where they begin in it, and
        how many they are."""
        sizes = [-(-piece.numel() // every) for piece in pieces]
        size = sum(sizes)
        if self.used + size > _BLOCK:
            self.blocks.append(
                torch.empty(_BLOCK, dtype=torch.float64, device=self.device)
            )
            self.used = 0
            if self.device.type == "cpu":
                self.array = self.blocks[-1].numpy()
        start = self.used
        with np.errstate(invalid="ignore"):  # NaN of fp16
            for piece, count in zip(pieces, sizes, strict=True):
                end = self.used + count
                if self.device.type == "cpu" and piece.dtype in NUMPY:
                    # a third of torch's time
                    elements = np.asarray(ArrayView(piece, every, count))
                    self.array[self.used : end] = elements
                else:
                    self.blocks[-1][self.used : end].copy_(piece[::every])
                self.used = end
        return len(self.blocks) - 1, start, size


class ArrayView:
    """Elements of a flat tensor as numpy reads them; ``Tensor.numpy()`` would fix the
    size of the program's storage."""

    __slots__ = ("__array_interface__",)

    def __init__(self, flat: Tensor, every: int, size: int) -> None:
        self.__array_interface__ = {
            "version": 3,
            "data": (flat.data_ptr(), True),
            "shape": (size,),
            "strides": (every * flat.element_size(),),
            "typestr": NUMPY[flat.dtype],
        }


class SampleEntry(NamedTuple):
    """Where the sample of one tensor is in a block."""

    number: int
    start: int
    size: int
    #: the tensor is kept whole
    whole: bool
    #: the smallest normal value of its dtype, 0 for integers
    tiny: float


class ExponentHistogram(NamedTuple):
    """``counts[i]`` of ``sampled`` elements have the exponent ``lowest + i``."""

    lowest: int
    counts: list[int]
    sampled: int


def histograms_of(
    values: np.ndarray, entries: Sequence[SampleEntry]
) -> dict[int, ExponentHistogram]:
    """Return the histogram of each entry's sample; the samples stand one after the other.

    The biased exponent is in bits 52 to 62 of an fp64 number: 0 is zero (fp64
    subnormals with it), 2047 not finite.
    """
    biased = (values.view(np.int64) >> 52).astype(np.int32) & 2047
    (used,) = np.nonzero(np.bincount(biased, minlength=2048)[1:2047])
    first = int(used[0]) + 1 if len(used) else 1
    last = int(used[-1]) + 1 if len(used) else 1
    width = last - first + 3  # with a column at each end for what does not count
    columns = np.arange(len(entries), dtype=np.int32) * width - (first - 1)
    segment = np.repeat(columns, [entry.size for entry in entries])
    places = np.clip(biased, first - 1, last + 1) + segment
    flat_counts = np.bincount(places, minlength=len(entries) * width)
    counts = flat_counts.reshape(-1, width)[:, 1:-1]
    is_used = counts.astype(np.bool_)
    low = is_used.argmax(axis=1).tolist()
    high = (width - 2 - is_used[:, ::-1].argmax(axis=1)).tolist()
    total = counts.sum(axis=1).tolist()
    histograms = {}
    for i, entry in enumerate(entries):
        histogram = ExponentHistogram(0, [], entry.size)
        if total[i]:
            lowest = low[i] + first - 1023
            row = counts[i, low[i] : high[i]].tolist()
            histogram = ExponentHistogram(lowest, row, entry.size)
        histograms[entry.number] = histogram
    return histograms
