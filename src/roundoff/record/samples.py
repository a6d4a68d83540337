"""A strided sample of every tensor, kept until the step is over, and the histograms of exponents made of it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
import torch
from torch import Tensor

#: Elements of the strided sample; a tensor that is not larger is kept whole until the step is over.
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
        """Every so-manyth element; gives the block, where they begin in it, and how many they are."""
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
                    self.array[self.used : end] = np.asarray(
                        Memory(piece, every, count)
                    )  # a third of torch's time
                else:
                    self.blocks[-1][self.used : end].copy_(piece[::every])
                self.used = end
        return len(self.blocks) - 1, start, size


class Memory:
    """What numpy reads; ``Tensor.numpy()`` would fix the size of the program's own storage."""

    __slots__ = ("__array_interface__",)

    def __init__(self, flat: Tensor, every: int, size: int) -> None:
        self.__array_interface__ = {
            "version": 3,
            "data": (flat.data_ptr(), True),
            "shape": (size,),
            "strides": (every * flat.element_size(),),
            "typestr": NUMPY[flat.dtype],
        }


Entry = tuple[int, int, int, bool, float]


def histograms_of(
    values: np.ndarray, entries: Sequence[Entry]
) -> dict[int, tuple[int, list[int], int]]:
    """The biased exponent is in bits 52 to 62 of an fp64 number: 0 is zero (fp64 subnormals with it), 2047 not finite."""
    biased = (values.view(np.int64) >> 52).astype(np.int32) & 2047
    (used,) = np.nonzero(np.bincount(biased, minlength=2048)[1:2047])
    first, last = (int(used[0]) + 1, int(used[-1]) + 1) if len(used) else (1, 1)
    width = last - first + 3  # with a column at each end for what does not count
    segment = np.repeat(
        np.arange(len(entries), dtype=np.int32) * width - (first - 1),
        [e[2] for e in entries],
    )
    counts = np.bincount(
        np.clip(biased, first - 1, last + 1) + segment, minlength=len(entries) * width
    )
    counts = counts.reshape(-1, width)[:, 1:-1]
    width -= 2
    seen = counts.astype(np.bool_)
    low = seen.argmax(axis=1).tolist()
    high = (width - seen[:, ::-1].argmax(axis=1)).tolist()
    some = counts.sum(axis=1).tolist()
    return {
        entry[0]: (
            low[i] + first - 1023,
            counts[i, low[i] : high[i]].tolist(),
            entry[2],
        )
        if some[i]
        else (0, [], entry[2])
        for i, entry in enumerate(entries)
    }
