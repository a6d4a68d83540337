"""What is kept of a tensor besides its statistics: all of it, a seeded sample, a hash of
its bits, or, of those that a step begins with, all as long as they are not too large."""

from __future__ import annotations

from typing import Any, Protocol

import torch
from torch import Tensor

from roundoff.record.disk.tensors import content_hash
from roundoff.record.recorder import Keep
from roundoff.record.statistics import in_memory_order

#: Elements of a sample; a smaller tensor is kept whole.
SAMPLE = 4096
#: MiB that the leaves of one step may take beside statistics: parameters, buffers, data.
LEAVES = 8.0


class Sink(Protocol):
    """Where tensors go: ``disk.writer.Writer``."""

    def add(self, step: int, key: str, tensor: Tensor) -> Any:
        """Keep ``tensor`` in this step."""

    def discard(self, step: int) -> None:
        """Keep none of the tensors of this step."""


class Keeper:
    """Keeps ``tensors``, a ``sample`` of each or a ``hash`` of its bits.

    Beside ``stats`` alone, tensors up to ``leaves`` MiB a step. A step with more keeps
    none, nor do those after it.

    Attributes:
        gave_up: True once a step had more.
    """

    def __init__(
        self, content: str, sink: Sink, seed: int, leaves: float = LEAVES
    ) -> None:
        self.content = content
        self.sink = sink
        self.seed = seed
        self.gave_up = not leaves
        self._most = leaves * 2**20
        self._bytes = 0
        #: number of elements -> the positions of a sample
        self._positions: dict[int, Tensor] = {}

    def keep(self, step: int) -> Keep:
        """The function that a ``Recorder`` calls for each new value of one step.

        A tensor is kept in the order of memory, with its strides in its row; one with
        gaps in memory without them.
        """
        self._bytes = 0

        def keep_value(record: int, tensor: Tensor) -> dict[str, Any]:
            if self.content == "hash":
                return {"hash": content_hash(tensor.detach())}
            flat = in_memory_order(tensor)
            if flat is None:
                flat = tensor.contiguous().view(-1)
            if self.content == "stats" and not self._fits(step, flat):
                return {}
            if self.content == "sample" and flat.numel() > SAMPLE:
                flat = flat[self._sampled(flat.numel()).to(flat.device)]
            key = self.sink.add(step, str(record), flat.detach())
            return {"blob": str(record) if key is None else key}

        return keep_value

    def _fits(self, step: int, flat: Tensor) -> bool:
        """Return True as long as a step keeps its leaves; give them up where it cannot."""
        if self.gave_up:
            return False
        self._bytes += flat.nbytes
        if self._bytes <= self._most:
            return True
        self.gave_up = True
        self.sink.discard(step)
        return False

    def _sampled(self, count: int) -> Tensor:
        """Return positions in memory order, the same for every tensor of this size and
        every run with this seed.
        """
        positions = self._positions.get(count)
        if positions is None:
            generator = torch.Generator().manual_seed(self.seed * 1_000_003 + count)
            drawn = torch.randint(0, count, (SAMPLE,), generator=generator)
            positions = drawn.sort().values
            self._positions[count] = positions
        return positions
