"""The searches of Ascend's AMCT, IFMR and HFMG, from the streaming histogram."""

from __future__ import annotations

from bisect import bisect_left, bisect_right

import torch
from torch import Tensor

from roundoff.errors import QuantizationError
from roundoff.formats import Format, Granularity
from roundoff.quantize.observers.histogram import Bins, Histogram
from roundoff.quantize.observers.observer import check_parameter
from roundoff.quantize.observers.ranges import HistogramObserver
from roundoff.quantize.observers.search import losses, pick

__all__ = ["Hfmg", "Ifmr"]


class Ifmr(HistogramObserver):
    """IFMR (input feature map reconstruction): the upper clip value searched around a percentile.

    The start is the value of rank ``n - int(percentile * n)`` (at least 1) from the
    top, among all ``n`` values, zeros too, and likewise from the bottom; but never so
    far in that no value is left beyond 0. The candidates are the upper one times
    ``search_range[0] + i * search_step``, up to ``search_range[1]``; the lower one
    stays, as AMCT's code has it (its documentation searches both). Symmetric formats:
    one bound on the magnitude. The least mean square error wins, with the scale and the
    zero point as they will be used (AMCT leaves the rounding of the zero point out of
    its loss).

    Args:
        granularity: which elements share a range.
        search_range: factors on the start.
        search_step: distance of the factors.
        max_percentile: share of the values below the upper start, in (0.5, 1].
        min_percentile: share of the values above the lower start.
        both_ends: search the lower clip value too, then the upper one once more.
        bins: see ``HistogramObserver``.
    """

    name = "ifmr"

    def __init__(
        self,
        granularity: Granularity | None = None,
        *,
        search_range: tuple[float, float] = (0.7, 1.3),
        search_step: float = 0.01,
        max_percentile: float = 0.999999,
        min_percentile: float = 0.999999,
        both_ends: bool = False,
        bins: int | None = None,
    ) -> None:
        super().__init__(granularity, bins=bins)
        check_parameter(self.name, "max_percentile", max_percentile, 0.5, 1.0)
        check_parameter(self.name, "min_percentile", min_percentile, 0.5, 1.0)
        check_parameter(self.name, "search_step", search_step, 1e-4, 10.0)
        if not 0 < search_range[0] < search_range[1] <= 100:
            raise QuantizationError(
                "search_range is no range of factors",
                where="observer ifmr",
                expected="two numbers, 0 < low < high <= 100",
                got=repr(search_range),
            )
        self.search_range = search_range
        self.search_step = search_step
        self.both_ends = both_ends
        self.max_percentile = max_percentile
        self.min_percentile = min_percentile

    def _choose(self, histogram: Histogram, fmt: Format) -> tuple[Tensor, Tensor]:
        low, high = self._start(histogram)
        bins = histogram.bins()
        lowest, highest = self.search_range
        count = int((highest - lowest) / self.search_step + 1e-9) + 1
        steps = torch.arange(count, dtype=torch.float64, device=low.device)
        factors = lowest + steps * self.search_step
        if fmt.symmetric:
            bound = torch.maximum(high, -low)[:, None] * factors
            (high,) = pick(losses(bins, -bound, bound, fmt, self.dtype), bound)
            return -high, high
        start_low = low[:, None] * factors
        start_high = high[:, None] * factors
        for end in ("high", "low", "high") if self.both_ends else ("high",):
            lows = start_low if end == "low" else low[:, None].expand_as(start_low)
            highs = start_high if end == "high" else high[:, None].expand_as(start_high)
            low, high = pick(losses(bins, lows, highs, fmt, self.dtype), lows, highs)
        return low, high

    def _start(self, histogram: Histogram) -> tuple[Tensor, Tensor]:
        count = histogram.counts()
        n = count.sum(1)
        above = count[:, self.side + 1 :].sum(1)
        below = count[:, : self.side].sum(1)
        ranks = [
            torch.minimum(n - (share * n).floor(), there).clamp_(min=1.0)
            for share, there in (
                (self.max_percentile, above),
                (self.min_percentile, below),
            )
        ]
        return histogram.smallest(ranks[1]).clamp_(max=0.0), histogram.largest(
            ranks[0]
        ).clamp_(min=0.0)


class Hfmg(HistogramObserver):
    """HFMG (histogram of the feature map, greedy): both clip values move inwards over a histogram.

    From the full range, one of the two ends moves in at a time: each end would have to
    cross bins until 1/100,000 of the values (at least one) are cut, and the end that
    frees more bins moves; until a quarter of the bins is left. Among these ranges the
    one of least square error is taken. Ours differs from AMCT: bins grow by whole
    doublings, so no count is divided; zeros are not counted; the loss has the true grid
    with its zero point; and the path is tried at 64 places first, then at all between
    the neighbours of the best.

    Args:
        granularity: which elements share a range.
        num_of_bins: 1024, 2048, 4096 or 8192: bins from 0 to the power of two above the
            largest magnitude.
    """

    name = "hfmg"

    def __init__(
        self, granularity: Granularity | None = None, *, num_of_bins: int = 4096
    ) -> None:
        if num_of_bins not in (1024, 2048, 4096, 8192):
            raise QuantizationError(
                "num_of_bins is not one of AMCT's",
                where="observer hfmg",
                expected="1024, 2048, 4096 or 8192",
                got=repr(num_of_bins),
            )
        super().__init__(granularity, bins=num_of_bins)

    def _choose(self, histogram: Histogram, fmt: Format) -> tuple[Tensor, Tensor]:
        bins = histogram.bins()
        counts = histogram.counts().tolist()
        chosen = []
        for row, width in enumerate(histogram.width.tolist()):
            path = (
                torch.tensor(greedy_path(counts[row], self.side), dtype=torch.float64)
                * width
            )
            path = path.to(bins.mean.device).clamp(
                float(histogram.low[row]), float(histogram.high[row])
            )
            part = Bins(
                bins.weight[row, None], bins.mean[row, None], bins.half[row, None]
            )
            stride = max(len(path) // 64, 1)
            near = _least(part, path[::stride], fmt, self.dtype) * stride
            first = max(near - stride, 0)
            end = min(near + stride + 1, len(path))
            best = first + _least(part, path[first:end], fmt, self.dtype)
            chosen.append(path[best])
        low, high = torch.stack(chosen).unbind(1)
        return low, high


def greedy_path(counts: list[float], side: int) -> list[tuple[float, float]]:
    """The ranges HFMG tries, in units of the bins' width, for counts of the bins
    ``-side … side``.
    """
    counts = [*counts[:side], 0.0, *counts[side + 1 :]]
    up_to = [0.0]
    for count in counts:
        up_to.append(up_to[-1] + count)
    total = up_to[-1]
    if total == 0:
        return [(0.0, 0.0)]
    left = bisect_right(up_to, 0.0) - 1
    right = bisect_left(up_to, total) - 1
    step = max(-(-total // 100_000), 1.0)
    fewest = -(-(right - left + 1) // 4)
    path = []
    while True:
        low = left - side
        high = right - side
        path.append((float(low - (low > 0)), float(high + (high < 0))))
        if right - left + 1 <= fewest:
            return path
        # The first bins that stay when at least `step` is cut on that side.
        inner_left = bisect_left(up_to, up_to[left] + step)
        inner_right = bisect_right(up_to, up_to[right + 1] - step) - 2
        if inner_left > right or inner_right < left:
            return path
        if inner_left - left > right - inner_right:
            left = inner_left
        else:
            right = inner_right


def _least(bins: Bins, path: Tensor, fmt: Format, dtype: torch.dtype) -> int:
    low, high = path.T[:, None, :]
    return int(losses(bins, low, high, fmt, dtype)[0].argmin())
