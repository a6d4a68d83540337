"""Sign vectors of one batch that are orthogonal to each other, as far as they can be.

The entries of a vector for element ``i`` of sample ``s`` are
``H[a, s] H[b, i] r[s, i]``: rows ``a`` and ``b`` of two Hadamard matrices, another pair
for each vector, and random signs ``r``. Each vector alone is a random one, so every mean
is what independent vectors give. Together they have seen some part of all directions:
with n of these, and K vectors, ``(n - K) / (n - 1)`` of the variance is left (what a
sample of K from n without replacement leaves: Cochran, Sampling Techniques, 1977,
theorem 2.2), and none once all are seen. An output of one element needs one vector, of
ten elements sixteen at the very most.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from roundoff.budget.samples import Division
from roundoff.budget.signs import draw_signs

#: Directions of a sample from which on orthogonal vectors leave about what others do.
MOST_DIRECTIONS = 2**12


@dataclass(frozen=True, slots=True)
class Frame:
    """How many directions the target of a batch has.

    Both numbers are powers of two, at least what the target has.

    Attributes:
        samples: of the batch.
        directions: of one sample: its elements, of all target tensors together.
    """

    samples: int
    directions: int

    @classmethod
    def of(cls, samples: int, targets: Sequence[Tensor]) -> Frame:
        """Return the frame of some target tensors."""
        elements = sum(target.numel() for target in targets) // samples
        return cls(_power_of_two(samples), _power_of_two(elements))

    @property
    def is_small(self) -> bool:
        """True where vectors are made orthogonal."""
        return self.directions <= MOST_DIRECTIONS

    def left(self, probes: int) -> float:
        """Return the share of the variance that is left where samples are apart."""
        return _left(probes, self.directions) if self.is_small else 1.0

    def left_mixed(self, probes: int) -> float:
        """Return the share of the variance that is left where samples are mixed."""
        directions = self.samples * self.directions
        return _left(probes, directions) if self.is_small else 1.0


def _power_of_two(number: int) -> int:
    """Return the least power of two that is no less."""
    return 1 << max(0, number - 1).bit_length()


def _left(probes: int, directions: int) -> float:
    """Return the share of the variance of ``probes`` independent vectors that is left."""
    beyond = probes % directions
    if not beyond:
        return 0.0
    return beyond / probes * (directions - beyond) / (directions - 1)


def draw_frame(
    targets: Sequence[tuple[int, Tensor]],
    division: Division,
    count: int,
    generator: torch.Generator,
) -> list[Tensor]:
    """Draw ``count`` vectors of signs for target tensors, each ``(count, *shape)``.

    Args:
        targets: the tensors with a gradient, by their number among all targets.
        division: of the targets into samples.
        count: of vectors.
        generator: draws the signs, and which rows are taken.
    """
    frame = Frame.of(division.samples, [target for _, target in targets])
    if not frame.is_small:
        return [draw_signs((count, *t.shape), generator, t) for _, t in targets]
    across, within = _rows(frame, count, generator)
    of_samples = _hadamard(across, 0, division.samples)
    vectors = []
    start = 0
    for number, target in targets:
        elements = target.numel() // division.samples
        pattern = (
            of_samples[:, :, None] * _hadamard(within, start, elements)[:, None, :]
        )
        start += elements
        signs = draw_signs(target.shape, generator, target)
        in_place = division.arranged(pattern, target.shape, number)
        vectors.append(signs * in_place.to(signs.device, signs.dtype))
    return vectors


def _rows(
    frame: Frame, count: int, generator: torch.Generator
) -> tuple[Tensor, Tensor]:
    """Return the rows of both matrices for each vector, every pair once before any twice."""
    numbers = torch.arange(count)
    turn = numbers // max(frame.samples, frame.directions)
    of_samples = torch.randperm(frame.samples, generator=generator)
    of_elements = torch.randperm(frame.directions, generator=generator)
    across = of_samples[(numbers + turn) % frame.samples]
    return across, of_elements[numbers % frame.directions]


def _hadamard(rows: Tensor, start: int, columns: int) -> Tensor:
    """Return some rows, and some columns from ``start`` on, of Sylvester's matrix.

    Its entry is -1 where row and column have an odd number of bits in common.
    """
    common = rows[:, None] & torch.arange(start, start + columns)
    for bits in (32, 16, 8, 4, 2, 1):
        common ^= common >> bits
    return 1 - 2 * (common & 1)
