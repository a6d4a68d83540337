"""One streaming histogram for all observers that search.

Bins lie symmetrically around 0; their width is a power of two. Bin 0 holds the zeros
alone; bin ``i > 0`` holds ``((i - 1) w, i w]`` and bin ``-i`` its mirror image. When a
value exceeds the range, ``w`` doubles as often as needed: then bin ``i`` falls whole
into bin ``ceil(i / 2)``. No count is divided, and the order of batches does not matter.
(A value below 2**-126 bin widths is counted with the zeros.)

Each bin is counted in ``FINE`` parts, because counting once in more bins is quicker
than to sum x and x² in each. Those who search look at whole bins, taken as uniformly
filled around the mean and with the variance that the parts give them.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

__all__ = ["FINE", "Bins", "Histogram"]

#: Below 2**-100 bins get no narrower, because 1 / width has to stay finite in fp32.
SMALLEST_EXPONENT = -100
#: Parts of a bin.
FINE = 8
#: Elements that are counted at a time.
PART = 1 << 16


@dataclass(frozen=True)
class Bins:
    """The bins that hold anything but zeros, in fp64, each (sets, bins), left to right;
    sets with fewer end in weight 0.
    """

    #: what each bin counts; with power, its sum
    weight: Tensor
    mean: Tensor
    #: half the width of the uniform density that has the bin's variance
    half: Tensor


class Histogram:
    """A histogram for each of ``sets`` sets of elements.

    Args:
        sets: how many.
        side: bins on each side of 0, a power of two. The largest magnitude lies in the
            upper half of them.
        device: where its 8 * sets * (2 * side * FINE + 1) bytes lie.
    """

    def __init__(
        self, sets: int, side: int, device: torch.device | None = None
    ) -> None:
        self.side = side
        #: 2**exponent bounds the magnitudes
        self.exponent = torch.full(
            (sets,), SMALLEST_EXPONENT, dtype=torch.int64, device=device
        )
        #: extremes of what was seen, exact
        self.low = torch.full((sets,), torch.inf, dtype=torch.float64, device=device)
        self.high = -self.low
        #: what each part of a bin counts, or the sum of its weights
        self.parts = torch.zeros(
            sets, 2 * side * FINE + 1, dtype=torch.float64, device=device
        )

    @property
    def width(self) -> Tensor:
        """Width of a bin, (sets,)."""
        return torch.ldexp(torch.ones_like(self.low), self.exponent) / self.side

    def counts(self) -> Tensor:
        """What each bin counts, from ``-side`` to ``side``, (sets, 2 * side + 1)."""
        zero = self.side * FINE
        sides = (
            self.parts[:, :zero],
            self.parts[:, zero : zero + 1],
            self.parts[:, zero + 1 :],
        )
        return torch.cat(
            [
                part if part.shape[1] == 1 else part.reshape(len(part), -1, FINE).sum(2)
                for part in sides
            ],
            1,
        )

    def add(
        self, x: Tensor, low: Tensor, high: Tensor, weight: Tensor | None = None
    ) -> None:
        """``x``: (sets, elements), finite; ``low``, ``high``: its extremes, (sets,);
        ``weight``: like ``x``, >= 0.
        """
        self.low = torch.minimum(self.low, low)
        self.high = torch.maximum(self.high, high)
        amax = torch.maximum(-low, high).double()
        fraction, exponent = torch.frexp(
            amax
        )  # amax = fraction * 2**exponent, fraction in [0.5, 1)
        exponent = torch.where(fraction == 0.5, exponent - 1, exponent).long()
        self._widen(torch.where(amax > 0, exponent, SMALLEST_EXPONENT))
        per_width = (FINE / self.width).to(x.dtype)[:, None]
        sets, parts = self.parts.shape
        first = torch.arange(
            self.side * FINE, sets * parts, parts, dtype=torch.int32, device=x.device
        )[:, None]
        # In pieces, because fresh memory for tensors of full size costs more than the
        # counting.
        columns = max(PART, 2 * sets * parts) // sets
        for at in range(0, x.shape[1], columns):
            u = x[:, at : at + columns] * per_width
            index = u.abs().ceil_().copysign_(u).to(torch.int32).add_(first).flatten()
            power = (
                None
                if weight is None
                else weight[:, at : at + columns].flatten().double()
            )
            self.parts += torch.bincount(index, power, sets * parts).view(sets, parts)

    def _widen(self, exponent: Tensor) -> None:
        """Doubles the width of the bins until 2**exponent is inside."""
        doublings = (exponent - self.exponent).clamp_(min=0)
        for times in torch.unique(doublings).tolist():
            if times == 0:
                continue
            rows = doublings == times
            self.exponent[rows] += times
            old = self.parts[rows]
            for _ in range(
                min(times, (self.side * FINE).bit_length())
            ):  # then all lies in the two beside 0
                old = _halved(old, self.side * FINE)
            self.parts[rows] = old

    def bins(self) -> Bins:
        """The occupied bins without the zeros, which cost nothing in any format that has 0."""
        sets = len(self.parts)
        zero = self.side * FINE
        sides = self.parts[:, :zero], self.parts[:, zero + 1 :]
        n = torch.cat(sides, 1).reshape(sets, -1, FINE)
        centre = torch.arange(FINE, dtype=n.dtype, device=n.device) - (FINE - 1) / 2
        weight = n.sum(2)
        first = n @ centre
        second = n @ centre.square()
        occupied = weight > 0
        order = (
            (~occupied)
            .to(torch.int8)
            .argsort(dim=1, stable=True)[:, : max(int(occupied.sum(1).max()), 1)]
        )
        weight, first, second = (
            part.gather(1, order) for part in (weight, first, second)
        )
        some = torch.where(weight > 0, weight, 1.0)
        mean = first / some
        # Sheppard's correction, backwards: a part is uniformly filled, with variance 1/12.
        half = (3.0 * (second / some - mean * mean).clamp_(min=0.0) + 0.25).sqrt_()
        width = self.width[:, None]
        middle = (order - self.side + 0.5) * width
        return Bins(weight, middle + mean * (width / FINE), half * (width / FINE))

    def largest(self, rank: Tensor, *, zeros: bool = True) -> Tensor:
        """The value of rank 1, 2, … from the top in each set, (sets,), zeros counted or
        not; 0 where nothing is counted.

        Exact for rank 1; otherwise off by the width of a part at most, 1 / (side *
        FINE) of the power of two above the largest magnitude. Meaningless after `add`
        with weights.
        """
        return self._ranked(rank, self.parts.flip(1), self.high, zeros)

    def smallest(self, rank: Tensor, *, zeros: bool = True) -> Tensor:
        """As ``largest``, from the bottom."""
        return -self._ranked(rank, self.parts, -self.low, zeros)

    def _ranked(self, rank: Tensor, count: Tensor, top: Tensor, zeros: bool) -> Tensor:
        """``count`` from the top part down."""
        zero = self.side * FINE
        if not zeros:
            count = count.clone()
            count[:, zero] = 0.0
        rank = rank.to(count.dtype)[:, None]
        up_to = count.cumsum(1)
        at = torch.searchsorted(up_to, rank).clamp_(max=count.shape[1] - 1)
        n = count.gather(1, at)
        edge = (zero - at).to(count.dtype)
        upper = torch.where(
            edge < 0, edge + 1, edge
        )  # what lies below 0 begins at its edge
        inside = (rank - (up_to.gather(1, at) - n) - 0.5) / n.clamp(
            min=1.0
        )  # 0 … 1 from the top
        value = torch.where(edge == 0, 0.0, upper - inside) * (
            self.width[:, None] / FINE
        )
        extreme = (rank[:, 0] <= 1) & ((top != 0.0) | zeros)
        return torch.where(extreme, top, torch.minimum(value[:, 0], top)).masked_fill_(
            n[:, 0] == 0, 0.0
        )


def _halved(sums: Tensor, side: int) -> Tensor:
    """Bins twice as wide: bin ±i goes to ±ceil(i / 2); new ones outside are empty."""
    out = torch.zeros_like(sums)
    out[..., side] = sums[..., side]
    out[..., side + 1 : side + 1 + side // 2] = (
        sums[..., side + 1 :: 2] + sums[..., side + 2 :: 2]
    )
    out[..., side - side // 2 : side] = sums[..., 0:side:2] + sums[..., 1:side:2]
    return out
