"""The range that keeps the order of logits."""

from __future__ import annotations

import torch
from torch import Tensor

from roundoff.errors import QuantizationError
from roundoff.formats import Format, Granularity, PerTensor, QParams, fake_quantize
from roundoff.quantize.observers.histogram import Histogram
from roundoff.quantize.observers.observer import check_parameter
from roundoff.quantize.observers.ranges import HistogramObserver
from roundoff.quantize.observers.search import losses, pick, range_qparams

__all__ = ["Isotone"]


class Isotone(HistogramObserver):
    """The range after which the largest element of each row is still larger than all
    others; rows lie on the last axis.

    Rounding keeps order but for ties, so a row is lost exactly if its two largest
    elements get one code. Of 200 ranges, the extremes times 1.5 down to 0.25, the one
    that loses the fewest rows is taken; of those, the one of least square error. Rows
    whose two largest are equal are not counted. Kept are the ``rows`` with the smallest
    gap between the two, which rounding loses, and the ``rows`` whose second is largest,
    which clipping loses: those of the others that a range loses are not counted.

    Attributes:
        lost: after ``qparams``: how many of the kept rows lose their order.

    Args:
        granularity: ``PerTensor`` only, since with several scales rounding does not
            keep order.
        rows: how many rows of each kind are kept.
        bins: see ``HistogramObserver``.

    Example:
        >>> from roundoff.formats import parse_format
        >>> observer = Isotone()
        >>> observer.see(torch.tensor([[0.0, 3.5, 4.4], [1.0, 7.0, 0.0]]))
        >>> _ = observer.qparams(parse_format("int4"))
        >>> observer.lost
        0
    """

    name = "isotone"

    def __init__(
        self,
        granularity: Granularity | None = None,
        *,
        rows: int = 4096,
        bins: int | None = None,
    ) -> None:
        super().__init__(granularity, bins=bins)
        if not isinstance(self.granularity, PerTensor):
            raise QuantizationError(
                "order is kept by one scale for all elements",
                where=f"observer {self.name}",
                expected="PerTensor()",
                got=str(self.granularity),
                do="use mse for several scales",
            )
        check_parameter(self.name, "rows", rows, 1, 1 << 24, whole=True)
        self.rows = rows
        self.pairs = torch.zeros(0, 2)
        self.lost = 0

    def see(self, x: Tensor, power: Tensor | None = None) -> None:
        super().see(x, power)
        if x.ndim == 0 or x.shape[-1] < 2 or x.numel() == 0:
            return
        pairs = x.detach().to(self.dtype).reshape(-1, x.shape[-1]).topk(2).values
        pairs = torch.cat([self.pairs.to(pairs), pairs[pairs[:, 0] > pairs[:, 1]]])
        if len(pairs) > 2 * self.rows:
            keep = torch.zeros(len(pairs), dtype=torch.bool, device=pairs.device)
            for hardness in (pairs[:, 1] - pairs[:, 0], pairs[:, 1]):
                keep[hardness.argsort(stable=True, descending=True)[: self.rows]] = True
            pairs = pairs[keep]
        self.pairs = pairs

    def _choose(self, histogram: Histogram, fmt: Format) -> tuple[Tensor, Tensor]:
        factors = (
            torch.logspace(
                0,
                1,
                200,
                base=0.25 / 1.5,
                dtype=torch.float64,
                device=histogram.low.device,
            )
            * 1.5
        )
        low, high = (
            factors * end
            for end in (histogram.low.clamp(max=0.0), histogram.high.clamp(min=0.0))
        )
        if fmt.symmetric:
            high = torch.maximum(-low, high)
            low = -high
        q = range_qparams(low[:, None], high[:, None], fmt, self.dtype)
        pairs = self.pairs.to(histogram.low.device)
        flat = pairs.flatten().expand(len(factors), -1)
        first, second = (
            fake_quantize(flat, QParams(q.scale, q.zero_point), fmt)
            .reshape(len(factors), -1, 2)
            .unbind(-1)
        )
        lost = (first <= second).sum(1)
        fewest = lost.min()
        loss = losses(
            histogram.bins(), low[None], high[None], fmt, self.dtype
        ).masked_fill_(lost > fewest, torch.inf)
        self.lost = int(fewest)
        low, high = pick(loss, low[None], high[None])
        return low, high
