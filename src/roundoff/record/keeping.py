"""What is kept of a tensor besides its statistics: all of it, a seeded sample, or a hash of its bits."""

from __future__ import annotations

from typing import Any, Protocol

import torch
from torch import Tensor

from roundoff.record.disk.tensors import content_hash
from roundoff.record.recorder import Keep
from roundoff.record.statistics import in_memory_order

#: Elements of a sample; a smaller tensor is kept whole.
SAMPLE = 4096


class Sink(Protocol):
    """Where tensors go: ``store.Writer``."""

    def add(self, step: int, key: str, tensor: Tensor) -> Any:
        """Keep ``tensor`` in this step."""


class Keeper:
    """``keep(step)`` gives what a ``Recorder`` calls for each new value."""

    def __init__(self, how: str, sink: Sink, seed: int) -> None:
        self.how, self.sink, self.seed = how, sink, seed
        self._positions: dict[int, Tensor] = {}

    def keep(self, step: int) -> Keep:
        """The function that keeps the values of one step. A tensor is kept in the order of memory, with its
        strides in its row; one with gaps in memory without them."""

        def kept(record: int, tensor: Tensor) -> dict[str, Any]:
            flat = in_memory_order(tensor)
            if self.how == "hash":
                return {"hash": content_hash(tensor.detach())}
            flat = tensor.contiguous().view(-1) if flat is None else flat
            if self.how == "sample" and flat.numel() > SAMPLE:
                flat = flat[self._sampled(flat.numel()).to(flat.device)]
            key = self.sink.add(step, str(record), flat.detach())
            return {"blob": str(record) if key is None else key}

        return kept

    def _sampled(self, count: int) -> Tensor:
        """Positions in memory order, the same for every tensor of this size and every run with this seed."""
        found = self._positions.get(count)
        if found is None:
            generator = torch.Generator().manual_seed(self.seed * 1_000_003 + count)
            found = (
                torch.randint(0, count, (SAMPLE,), generator=generator).sort().values
            )
            self._positions[count] = found
        return found
