"""Observers that keep nothing but extremes."""

from __future__ import annotations

import torch
from torch import Tensor

from roundoff.errors import QuantizationError
from roundoff.formats import Format, Granularity, PerToken, QParams
from roundoff.quantize.observers.observer import RangeObserver, check_parameter

__all__ = ["Arq", "MinMax", "MovingAverage"]


class MinMax(RangeObserver):
    """The smallest and the largest value seen.

    Per token: those of the last batch (dynamic quantization).

    Example:
        >>> from roundoff.formats import parse_format
        >>> observer = MinMax()
        >>> observer.see(torch.tensor([0.0, 2.0]))
        >>> observer.see(torch.tensor([0.5, 2.55]))
        >>> q = observer.qparams(parse_format("int8_asym"))
        >>> q.scale, q.zero_point, observer.count
        (tensor([0.0100]), tensor([-128.]), 4)
    """

    name = "minmax"
    dynamic = True

    def __init__(self, granularity: Granularity | None = None) -> None:
        super().__init__(granularity)
        self.low = self.high = torch.zeros(0)

    def _add(self, x: Tensor, low: Tensor, high: Tensor, power: Tensor | None) -> None:  # noqa: ARG002
        if self.count and not isinstance(self.granularity, PerToken):
            low = torch.minimum(self.low, low)
            high = torch.maximum(self.high, high)
        self.low = low
        self.high = high

    def _range(self, fmt: Format) -> tuple[Tensor, Tensor]:  # noqa: ARG002
        return self.low, self.high


class MovingAverage(MinMax):
    """An exponential moving average of each batch's extremes:
    ``low += averaging_constant * (batch's low - low)``.

    The first batch sets the start. The result depends on the order and the size of the
    batches.

    Args:
        granularity: which elements share a range.
        averaging_constant: in (0, 1]; 1 keeps the last batch only.
    """

    name = "moving_average"
    dynamic = False

    def __init__(
        self,
        granularity: Granularity | None = None,
        *,
        averaging_constant: float = 0.01,
    ) -> None:
        super().__init__(granularity)
        check_parameter(self.name, "averaging_constant", averaging_constant, 1e-9, 1.0)
        self.averaging_constant = averaging_constant

    def _add(self, x: Tensor, low: Tensor, high: Tensor, power: Tensor | None) -> None:  # noqa: ARG002
        if self.count:
            low = self.low + self.averaging_constant * (low - self.low)
            high = self.high + self.averaging_constant * (high - self.high)
        self.low = low
        self.high = high


class Arq(MinMax):
    """Min-max for weights by the symmetric rule of Ascend's ARQ:
    ``|min| / |min_finite|`` if ``|min| > |max|``, else ``|max| / max_finite``.

    With all 256 codes (``int8_full``: -128..127) the lowest code is thus used; if
    ``|min|`` is larger by less than 1/127, the maximum is clipped, by one code at most.
    With ``int8`` (-127..127) the scale is ``amax / 127``.

    Raises:
        QuantizationError: also for an asymmetric format, since the zero point of
            weights is 0 here.

    Example:
        >>> from roundoff.formats import integer
        >>> observer = Arq()
        >>> observer.see(torch.tensor([-1.28, 1.0]))
        >>> observer.qparams(integer(8, narrow_range=False)).scale, observer.qparams(integer(8)).scale
        (tensor([0.0100]), tensor([0.0101]))
    """

    name = "arq"
    dynamic = False

    def qparams(self, fmt: Format) -> QParams:
        if not fmt.symmetric:
            raise QuantizationError(
                "the rule has no zero point",
                where=f"observer {self.name}",
                expected="a symmetric format",
                got=fmt.name,
                do="use minmax",
            )
        chosen = super().qparams(fmt)
        if fmt.scale_target is not None or -fmt.min_finite <= fmt.max_finite:
            return chosen
        tiny = torch.finfo(self.dtype).tiny
        scale = torch.where(
            -self.low > self.high, self.low / fmt.min_finite, self.high / fmt.max_finite
        )
        return self._shaped(
            torch.where(scale > 0, scale.clamp(min=tiny), 1.0).to(self.dtype), None
        )
