"""The range whose quantized distribution diverges least from the observed one, as
TensorRT calibrates.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from roundoff.errors import QuantizationError
from roundoff.formats import Format, Granularity
from roundoff.quantize.observers.histogram import Histogram
from roundoff.quantize.observers.ranges import HistogramObserver

__all__ = ["Entropy", "divergences"]


class Entropy(HistogramObserver):
    """The bound on the magnitude of least Kullback-Leibler divergence (S.

    Migacz, 8-bit Inference with TensorRT, 2017).

    Over the histogram of ``|x|`` without zeros: P is the first ``i`` bins, with all
    beyond added to the last; Q is the same bins (without those beyond) merged to as
    many levels as the format has, spread evenly over the bins of each level that are
    not empty in P. ``i`` with the least KL(P ‖ Q) wins; tried are all multiples of 4
    and the full range.

    Levels: of symmetric formats those that are not negative (128 for int8). Our choice
    for asymmetric ones: all of them (256) where the values lie on one side of 0, else
    half, with the bound cutting both sides.

    Args:
        granularity: which elements share a range.
        bins: on each side of 0, a power of two; at least half of them are in use.

    Raises:
        QuantizationError: also for formats that are not integers, or that have more
            levels than half the bins.
    """

    name = "entropy"

    def __init__(
        self, granularity: Granularity | None = None, *, bins: int = 4096
    ) -> None:
        super().__init__(granularity, bins=bins)

    def _choose(self, histogram: Histogram, fmt: Format) -> tuple[Tensor, Tensor]:
        levels = int(fmt.max_finite - fmt.min_finite) + 1
        if fmt.one_quantum != 1.0 or levels > self.side:
            raise QuantizationError(
                "the divergence needs levels of one size, fewer than bins",
                where=f"observer {self.name}",
                expected=f"an integer format with at most {self.side} levels",
                got=fmt.name,
                do="use mse, or more bins",
            )
        half = int(fmt.max_finite) + 1
        counts = histogram.counts()
        magnitudes = counts[:, self.side + 1 :] + counts[:, : self.side].flip(1)
        one_sided = ((histogram.low >= 0) | (histogram.high <= 0)).tolist()
        bounds = []
        for magnitude, alone in zip(magnitudes.cpu(), one_sided, strict=True):
            at = divergences(magnitude, levels if alone and not fmt.symmetric else half)
            bounds.append(float(min(at, key=lambda i: at[i])) if at else 0.0)
        bound = histogram.width * torch.tensor(
            bounds, dtype=torch.float64, device=histogram.width.device
        )
        return torch.maximum(histogram.low, -bound), torch.minimum(
            histogram.high, bound
        )


def divergences(counts: Tensor, levels: int) -> dict[int, float]:
    """KL(P ‖ Q) for each number of bins that is tried, in nats; none where all counts
    are 0. See ``Entropy``.

    Sums over a level come from cumulative sums, so a candidate costs as many steps as
    there are levels, not bins. Level ``j`` of ``i`` bins has those from
    ``j * i // levels`` to ``(j + 1) * i // levels``. Inf where Q has no mass for the
    last bin of P.
    """
    counts = counts.cpu()  # a few thousand: on a GPU each step would cost a launch
    used = counts.nonzero()
    if not len(used):
        return {}
    length = int(used[-1]) + 1
    counts = counts[:length].double()
    tried = torch.tensor(sorted({*range(-(-levels // 4) * 4, length, 4), length}))
    start = torch.zeros(1, dtype=counts.dtype)
    mass, full, entropy = (
        torch.cat([start, part.cumsum(0)])
        for part in (counts, (counts > 0).double(), torch.xlogy(counts, counts))
    )
    total = mass[-1]
    edges = torch.arange(levels + 1) * tried[:, None] // levels
    inside = mass[edges].diff(dim=1)
    filled = full[edges].diff(dim=1)
    tail = total - mass[tried]
    last = counts[tried - 1]
    filled[:, -1] += (last == 0) & (tail > 0)
    wanted = inside.clone()
    wanted[:, -1] += tail
    spread = torch.xlogy(wanted, inside / filled.clamp(min=1.0)).sum(1)
    observed = entropy[tried - 1] + torch.xlogy(last + tail, last + tail)
    divergence = (
        (observed - spread) / total - math.log(float(total)) + torch.log(mass[tried])
    )
    return dict(
        zip(
            tried.tolist(),
            torch.nan_to_num(divergence, nan=math.inf, posinf=math.inf).tolist(),
            strict=True,
        )
    )
