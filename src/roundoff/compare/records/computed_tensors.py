"""Tensors of a step that were computed, and not recorded."""

from __future__ import annotations

from collections.abc import Collection, Mapping

from torch import Tensor

from roundoff.record import StepTensors


class ComputedTensors(StepTensors):
    """Tensors by record that were never recorded.

    Attributes:
        forced: records whose tensors are not what their calls make.
        phases: those whose tensors are known; None for all.
    """

    def __init__(
        self,
        tensors: Mapping[int, Tensor],
        forced: Collection[int] = (),
        *,
        phases: tuple[str, ...] | None = None,
    ) -> None:
        self._tensors = tensors
        self.phases = phases
        self.forced = frozenset(forced)
        self.damage = {}

    def __getitem__(self, record: int, /) -> Tensor:
        return self._tensors[record]

    def __contains__(self, record: object, /) -> bool:
        return record in self._tensors

    def whole(self) -> ComputedTensors:
        """Return the same: each of them is whole."""
        return self

    def key(self, record: int) -> tuple[int]:
        """Equal for the same record alone: where elements lie is not known."""
        return (record,)

    def dense(self, record: int) -> None:
        """Say of none that its elements lie in memory as those of another run."""
