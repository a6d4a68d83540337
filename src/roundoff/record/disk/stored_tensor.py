"""Where a kept tensor is on disk, and how its elements become the tensor."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import torch

from roundoff.errors import RunError


@dataclass(frozen=True, slots=True)
class StoredTensor:
    """The columns of ``TensorRecord`` that find a tensor; no ``blob``: none is kept."""

    rank: int
    step: int
    record: int
    blob: str | None
    shape: list[int] | None
    stride: list[int] | None
    offset: int | None

    def strided(self, elements: torch.Tensor, run: Path) -> torch.Tensor:
        """Return the tensor from its elements in the order of memory.

        A view of a larger tensor shows its own elements only. Raises ``RunError`` where
        shape and stride do not fit; ``run`` is named in it.
        """
        shape = self.shape
        stride = self.stride
        offset = self.offset or 0
        if shape is not None and stride is not None and _is_layout(shape, stride):
            if offset >= 0 and 0 in shape:
                return elements.new_empty(shape)
            last = offset + sum(
                (size - 1) * step for size, step in zip(shape, stride, strict=True)
            )
            if offset >= 0 and last < elements.numel():
                return elements.view(-1).as_strided(shape, stride, offset)
        raise RunError(
            "a row does not fit the tensor it names",
            where=f"{run}: rank {self.rank}, step {self.step}, record {self.record}",
            expected=f"a view of {elements.numel()} elements",
            got=f"shape {shape}, stride {stride}, offset {offset}",
        )


def _is_layout(shape: list[int], stride: list[int]) -> bool:
    """Return True for as many strides as sizes, none missing or negative."""
    if len(shape) != len(stride) or None in shape or None in stride:
        return False
    return min([0, *shape, *stride]) >= 0
