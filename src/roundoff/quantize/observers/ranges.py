"""Observers that choose the range from a streaming histogram."""

from __future__ import annotations

from abc import abstractmethod

import torch
from torch import Tensor

from roundoff.errors import QuantizationError
from roundoff.formats import Format, Granularity, PerTensor
from roundoff.quantize.observers.histogram import FINE, Histogram
from roundoff.quantize.observers.observer import RangeObserver, check_parameter
from roundoff.quantize.observers.search import search

__all__ = ["Adjoint", "HistogramObserver", "Mse", "Percentile"]

#: bytes of one observer's histograms
LARGEST = 2**30


class HistogramObserver(RangeObserver):
    """A range observer with a histogram for each set, made when the first batch comes.

    Args:
        granularity: which elements share a range; not per token.
        bins: on each side of 0, a power of two. By default 4096, and 512 where there
            are several sets.
    """

    def __init__(
        self, granularity: Granularity | None = None, *, bins: int | None = None
    ) -> None:
        super().__init__(granularity)
        if bins is None:
            bins = 4096 if isinstance(self.granularity, PerTensor) else 512
        check_parameter(self.name, "bins", bins, 16, 65536, whole=True)
        if bins & (bins - 1):
            raise QuantizationError(
                "bins is not a power of two",
                where=f"observer {self.name}",
                expected="16, 32, … 65536",
                got=str(bins),
            )
        self.side = bins
        self.histogram: Histogram | None = None

    def _add(self, x: Tensor, low: Tensor, high: Tensor, power: Tensor | None) -> None:
        if self.histogram is None:
            size = 8 * len(x) * (2 * self.side * FINE + 1)
            if size > LARGEST:
                raise QuantizationError(
                    f"histograms for {len(x)} sets of elements would take {size / 2**30:.1f} GiB",
                    where=f"observer {self.name}",
                    expected=f"at most {LARGEST / 2**30:.1f} GiB",
                    got=f"{self.granularity}, {self.side} bins on each side",
                    do="give fewer bins, or use minmax",
                )
            self.histogram = Histogram(len(x), self.side, x.device)
        self.histogram.add(x, low, high, power)

    def _range(self, fmt: Format) -> tuple[Tensor, Tensor]:
        if self.histogram is None:
            raise AssertionError  # qparams has checked the count
        return self._choose(self.histogram, fmt)

    @abstractmethod
    def _choose(self, histogram: Histogram, fmt: Format) -> tuple[Tensor, Tensor]:
        """The range of each set, (sets,)."""


class Percentile(HistogramObserver):
    """The quantiles ``1 - percentile`` and ``percentile`` of the values that are not
    zero, on both sides.

    Zeros are left out: after a ReLU most values may be zero, and say nothing about the
    range. Of ``n`` values the one of rank ``n - int(percentile * n)`` (at least 1) from
    the top is taken, and likewise from the bottom: the extremes exactly, others up to
    1/16,384 of the largest magnitude (with the default number of bins).

    Args:
        granularity: which elements share a range.
        percentile: a share, in (0.5, 1]; 1 is min-max.
    """

    name = "percentile"

    def __init__(
        self,
        granularity: Granularity | None = None,
        *,
        percentile: float = 0.9999,
        bins: int | None = None,
    ) -> None:
        super().__init__(granularity, bins=bins)
        check_parameter(self.name, "percentile", percentile, 0.5, 1.0)
        self.percentile = percentile

    def _choose(self, histogram: Histogram, fmt: Format) -> tuple[Tensor, Tensor]:  # noqa: ARG002
        n = histogram.parts.sum(1) - histogram.parts[:, self.side * FINE]
        rank = (n - (self.percentile * n).floor()).clamp_(min=1.0)
        return histogram.smallest(rank, zeros=False), histogram.largest(
            rank, zeros=False
        )


class Mse(HistogramObserver):
    """The range whose mean square error is least, both sides searched, with the scale
    and zero point as rounded.
    """

    name = "mse"

    def _choose(self, histogram: Histogram, fmt: Format) -> tuple[Tensor, Tensor]:
        return search(histogram.bins(), histogram.low, histogram.high, fmt, self.dtype)


class Adjoint(Mse):
    """The range whose error costs the output least: ``Mse`` with each element's square
    error times its ``power``.

    ``power`` is the squared adjoint ``(∂output / ∂x)²`` of each element, so the sum is
    the error of the output to first order if the elements' errors are uncorrelated.
    Without power it equals ``Mse``.

    Raises:
        QuantizationError: also for power that is negative, NaN or Inf, or does not
            broadcast to ``x``, or that comes with some batches only (which would weigh
            them by a unit of their own).
    """

    name = "adjoint"

    def __init__(
        self, granularity: Granularity | None = None, *, bins: int | None = None
    ) -> None:
        super().__init__(granularity, bins=bins)
        self.weighted: bool | None = None

    def see(self, x: Tensor, power: Tensor | None = None) -> None:
        if self.weighted not in (None, power is not None) and x.numel():
            raise QuantizationError(
                "power came with some batches only",
                where=f"observer {self.name}",
                expected="power" if self.weighted else "no power",
                got="none" if self.weighted else "power",
                do="give the squared adjoint with every batch, or with none",
            )
        super().see(x, power)
        if x.numel():
            self.weighted = power is not None

    def _power(self, power: Tensor | None, shape: torch.Size) -> Tensor | None:
        if power is None:
            return None
        try:
            power = power.detach().expand(shape)
        except RuntimeError:
            raise QuantizationError(
                "power does not fit the tensor",
                where=f"observer {self.name}",
                expected=f"a shape that broadcasts to {tuple(shape)}",
                got=f"shape {tuple(power.shape)}",
            ) from None
        low, high = torch.aminmax(power)
        if not (bool(low >= 0) and bool(high < torch.inf)):
            raise QuantizationError(
                "power has negative, NaN or infinite values",
                where=f"observer {self.name}",
                expected="squares",
                got=f"values in [{float(low):g}, {float(high):g}]",
                do="square the adjoint, and find where it overflows",
            )
        return power
