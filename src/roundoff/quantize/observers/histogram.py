"""One streaming histogram for all observers that search.

Bins lie symmetrically around 0; their width is a power of two. Bin 0 holds the zeros alone; bin ``i > 0`` holds
``((i - 1) w, i w]`` and bin ``-i`` its mirror image. When a value exceeds the range, ``w`` doubles as often as
needed: then bin ``i`` falls whole into bin ``ceil(i / 2)``. No count is divided, and the order of batches does not matter.
(A value below 2**-126 bin widths is counted with the zeros.)

Each bin keeps the sums of 1, x and x² (times the weight, if there is one). So its mean and variance are exact, and what is
read from it afterwards models a bin as uniformly filled around its own mean with its own variance: exact for one repeated
value (the 6 of ReLU6, the levels of an image), and for clipped bins.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

__all__ = ["Bins", "Histogram"]

#: Below 2**-100 bins get no narrower, because 1 / width has to stay finite in fp32.
SMALLEST_EXPONENT = -100
#: Elements that are counted at a time.
PART = 1 << 16


@dataclass(frozen=True)
class Bins:
    """The bins that hold anything but zeros, in fp64, each (sets, bins), left to right; sets with fewer end in weight 0."""

    #: what each bin counts; with power, its sum
    weight: Tensor
    mean: Tensor
    #: half the width of the uniform density with the bin's variance; 0 for one repeated value
    half: Tensor


class Histogram:
    """A histogram for each of ``sets`` sets of elements.

    Args:
        sets: how many.
        side: bins on each side of 0, a power of two. The largest magnitude lies in the upper half of them.
        device: where its 3 * 8 * sets * (2 * side + 1) bytes lie.
    """

    def __init__(self, sets: int, side: int, device: torch.device | None = None) -> None:
        self.side = side
        #: 2**exponent bounds the magnitudes
        self.exponent = torch.full((sets,), SMALLEST_EXPONENT, dtype=torch.int64, device=device)
        #: extremes of what was seen, exact
        self.low = torch.full((sets,), torch.inf, dtype=torch.float64, device=device)
        self.high = -self.low
        #: sums of 1, u and u² for each bin, u = x / width; times the weight
        self.sums = torch.zeros(3, sets, 2 * side + 1, dtype=torch.float64, device=device)

    @property
    def width(self) -> Tensor:
        """Width of a bin, (sets,)."""
        return torch.ldexp(torch.ones_like(self.low), self.exponent) / self.side

    def add(self, x: Tensor, low: Tensor, high: Tensor, weight: Tensor | None = None) -> None:
        """``x``: (sets, elements), finite; ``low``, ``high``: its extremes, (sets,); ``weight``: like ``x``, >= 0."""
        self.low, self.high = torch.minimum(self.low, low), torch.maximum(self.high, high)
        amax = torch.maximum(-low, high).double()
        fraction, exponent = torch.frexp(amax)  # amax = fraction * 2**exponent, fraction in [0.5, 1)
        exponent = torch.where(fraction == 0.5, exponent - 1, exponent).long()
        self._widen(torch.where(amax > 0, exponent, SMALLEST_EXPONENT))
        per_width = (1.0 / self.width).to(x.dtype)[:, None]
        # In parts, because fresh memory for tensors of full size costs more than the counting.
        columns = max(PART, 4 * self.sums[0].numel()) // len(x)
        for at in range(0, x.shape[1], columns):
            part = slice(at, at + columns)
            self._count(x[:, part] * per_width, None if weight is None else weight[:, part])

    def _count(self, u: Tensor, weight: Tensor | None) -> None:
        """Adds values in units of the bins' width."""
        shape = self.sums[0].shape
        first = torch.arange(self.side, shape[0] * shape[1], shape[1], dtype=torch.int32, device=u.device)
        index = u.abs().ceil_().copysign_(u).to(torch.int32).add_(first[:, None]).flatten()
        size, u = shape[0] * shape[1], u.flatten().double()
        if weight is None:
            self.sums[0] += torch.bincount(index, minlength=size).view(shape)
        else:
            weight = weight.flatten().double()
            self.sums[0] += torch.bincount(index, weight, size).view(shape)
        for i in (1, 2):
            weight = u if weight is None else weight * u
            self.sums[i] += torch.bincount(index, weight, size).view(shape)

    def _widen(self, exponent: Tensor) -> None:
        """Doubles the width of the bins until 2**exponent is inside."""
        doublings = (exponent - self.exponent).clamp_(min=0)
        for times in torch.unique(doublings).tolist():
            if times == 0:
                continue
            rows = doublings == times
            self.exponent[rows] += times
            old = self.sums[:, rows]
            old *= 0.5 ** (times * torch.arange(3, device=old.device, dtype=old.dtype))[:, None, None]
            for _ in range(min(times, self.side.bit_length())):  # then all lies in the two bins beside 0
                old = _halved(old, self.side)
            self.sums[:, rows] = old

    def bins(self) -> Bins:
        """The occupied bins without the zeros, which cost nothing in any format that has 0."""
        sums, width = self.sums.clone(), self.width[:, None]
        sums[:, :, self.side] = 0.0
        occupied = sums[0] > 0
        most = max(int(occupied.sum(1).max()), 1)
        order = (~occupied).to(torch.int8).argsort(dim=1, stable=True)[:, :most]
        weight, first, second = (part.gather(1, order) for part in sums)
        some = weight.clamp(min=torch.finfo(weight.dtype).tiny)
        mean = first / some
        half = (3.0 * (second / some - mean * mean)).clamp_(min=0.0).sqrt_()
        return Bins(weight, mean * width, half * width)

    def largest(self, rank: Tensor, *, zeros: bool = True) -> Tensor:
        """The value of rank 1, 2, … from the top in each set, (sets,), zeros counted or not; 0 where nothing is counted.

        Exact for rank 1, and where its bin holds one or two values or one repeated value; elsewhere within the width of a
        bin. Not for weights.
        """
        return self._ranked(rank, self.sums.flip(2), self.high, zeros)

    def smallest(self, rank: Tensor, *, zeros: bool = True) -> Tensor:
        """As ``largest``, from the bottom."""
        mirrored = self.sums * self.sums.new_tensor([1.0, -1.0, 1.0])[:, None, None]
        return -self._ranked(rank, mirrored, -self.low, zeros)

    def _ranked(self, rank: Tensor, sums: Tensor, top: Tensor, zeros: bool) -> Tensor:
        """``sums`` from the top bin down."""
        count, first, second = sums
        if not zeros:
            count = count.clone()
            count[:, self.side] = 0.0
        rank = rank.to(count.dtype)[:, None]
        before = count.cumsum(1)
        at = torch.searchsorted(before, rank).clamp_(max=count.shape[1] - 1)
        n, first, second = (part.gather(1, at) for part in (count, first, second))
        inside = rank - (before.gather(1, at) - n)  # 1 … n
        mean = first / n.clamp(min=1.0)
        sigma = (second / n.clamp(min=1.0) - mean * mean).clamp_(min=0.0).sqrt_()
        # n numbers at distance d have the variance d² (n² - 1) / 12.
        apart = sigma * torch.sqrt(12.0 / (n * n - 1.0).clamp(min=1.0))
        u = mean + apart * ((n + 1.0) / 2.0 - inside)
        edge = (self.side - at).to(u.dtype)  # what lies above 0 ends at its edge; below 0, it begins there
        low, high = torch.where(edge > 0, edge - 1, edge), torch.where(edge < 0, edge + 1, edge)
        value = u.clamp(low, high) * self.width[:, None]
        extreme = (rank[:, 0] <= 1) & (top != 0.0 if not zeros else torch.ones_like(top, dtype=torch.bool))
        return torch.where(extreme, top, torch.minimum(value[:, 0], top)).masked_fill_(n[:, 0] == 0, 0.0)


def _halved(sums: Tensor, side: int) -> Tensor:
    """Bins twice as wide: bin ±i goes to ±ceil(i / 2); new ones outside are empty."""
    out = torch.zeros_like(sums)
    out[..., side] = sums[..., side]
    out[..., side + 1 : side + 1 + side // 2] = sums[..., side + 1 :: 2] + sums[..., side + 2 :: 2]
    out[..., side - side // 2 : side] = sums[..., 0:side:2] + sums[..., 1:side:2]
    return out
