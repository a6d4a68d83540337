"""Operands that were rounded, remembered while others may read them."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Collection
from typing import Any

from torch import Tensor

from roundoff.formats import Format
from roundoff.ops.calls import Operand
from roundoff.ops.execute import round_operand


class RoundedOperands:
    """``round_operand`` that remembers: what several calls read is rounded once.

    It takes tensors that do not change while they are remembered: those of one backward
    pass, and parameters for longer (see ``keep_only``).

    Args:
        bytes_kept: the oldest results go when more than this is remembered.
    """

    def __init__(self, bytes_kept: int = 2**25) -> None:
        self.bytes_kept = bytes_kept
        self._size = 0
        # the operand is held beside its key, so that its memory is not used again
        self._results: OrderedDict[tuple[Any, ...], tuple[Tensor, Tensor]] = (
            OrderedDict()
        )

    def __call__(self, x: Tensor, operand: Operand, fmt: Format) -> Tensor:
        """Return what ``round_operand`` returns."""
        key = self._key(x, operand, fmt)
        remembered = self._results.get(key)
        if remembered is not None:
            return remembered[1]
        rounded = round_operand(x, operand, fmt)
        size = rounded.nbytes
        if size <= self.bytes_kept // 4:
            self._results[key] = (x, rounded)
            self._size += size
            while self._size > self.bytes_kept:
                _, (_, oldest) = self._results.popitem(last=False)
                self._size -= oldest.nbytes
        return rounded

    def keep_only(self, addresses: Collection[int]) -> None:
        """Forget all but what is at these addresses: parameters, between two batches."""
        kept = [
            (key, entry)
            for key, entry in self._results.items()
            if entry[0].data_ptr() in addresses
        ]
        self._results = OrderedDict(kept)
        self._size = sum(rounded.nbytes for _, (_, rounded) in kept)

    def _key(self, x: Tensor, operand: Operand, fmt: Format) -> tuple[Any, ...]:
        role = "activation" if operand.role == "activation" else "weight"
        # torch counts the writes into a tensor, but for those of inference mode
        writes = -1 if x.is_inference() else x._version
        place = (x.data_ptr(), writes, tuple(x.shape), x.stride(), x.dtype)
        return (*place, role, operand.reduce, operand.channel, fmt.name)
