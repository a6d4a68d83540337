"""The sign vectors of a batch once more, and its target tensors sample by sample."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from roundoff.budget.samples import Division
from roundoff.budget.signs import draw_signs


@dataclass(frozen=True, slots=True)
class DrawnSigns:
    """The sign vectors of one batch, to be drawn once more.

    Attributes:
        index: number of the batch.
        state: of the generator before it drew them.
        count: vectors a sample (K).
        names: of the target tensors, in order.
        drawn: those of them that had sign vectors, because they have a gradient.
        division: of the batch into samples.
    """

    index: int
    state: Tensor
    count: int
    names: tuple[str, ...]
    drawn: tuple[str, ...]
    division: Division

    @property
    def samples(self) -> int:
        """Samples of the batch."""
        return self.division.samples

    def again(self, targets: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Return the vectors ``(K, samples, elements)`` of each target tensor.

        Those of tensors that had none come after.
        """
        generator = torch.Generator()
        generator.set_state(self.state)
        others = [name for name in self.names if name not in self.drawn]
        vectors = {}
        for name in (*self.drawn, *others):
            like = targets[name]
            drawn = draw_signs((self.count, *like.shape), generator, like)
            vectors[name] = self.divided(name, drawn, axes=1)
        return vectors

    def divided(self, name: str, values: Tensor, axes: int = 0) -> Tensor:
        """Return values of a target tensor as ``(samples, elements)``.

        ``axes`` stand before those of the tensor, and stay.
        """
        before = values.shape[:axes]
        if self.samples == 1:
            return values.reshape(*before, 1, -1)
        axis, _ = self.division.axes[self.names.index(name)]
        samples_first = values.movedim(axis + axes, axes)
        return samples_first.reshape(*before, self.samples, -1)
