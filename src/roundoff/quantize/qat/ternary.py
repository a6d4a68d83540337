"""Learners of ternary weights: TWN and TTQ. For weights only; both keep a real-valued
weight that is trained.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from roundoff.formats import (
    Format,
    QParams,
    extremes,
    integer,
    mean_magnitude,
    parse_format,
)
from roundoff.quantize.qat.learner import TINY, Learner
from roundoff.quantize.qat.low_bit import Transformed, needs

__all__ = ["Ttq", "Twn"]

INT8 = integer(8)


class Twn(Transformed):
    """Ternary weight networks (Li et al., arXiv:1605.04711).

    ``alpha * t`` with t = sign(w) where ``|w| > 0.7 E|w|``, else 0 (eqs. 3 and 6), and
    alpha the mean magnitude of those above (eq. 5). The gradient is passed on to w
    unchanged (section 2.3).
    """

    kind = "twn"

    def check(self) -> None:
        """See ``Learner``."""
        for_weights(self)

    def codes(self, view: Tensor, dims: tuple[int, ...]) -> tuple[Tensor, Tensor]:
        """See ``Transformed``."""
        large = view.abs() > 0.7 * mean_magnitude(view, dims)
        counted = large & view.isfinite()
        total = torch.where(counted, view.abs(), 0.0).sum(dims, keepdim=True)
        scale = total / counted.sum(dims, keepdim=True).clamp(min=1)
        return torch.where(view.isnan(), view, view.sign() * large), scale.clamp(
            min=TINY
        )

    def surrogate(self, view: Tensor, _dims: tuple[int, ...], _scale: Tensor) -> Tensor:
        """See ``Transformed``."""
        return view


class Ttq(Learner):
    """Trained ternary quantization (Zhu et al., arXiv:1612.01064): two learned values,
    ``positive`` and ``negative``.

    With ``threshold = 0.05 max|w|`` (eq. 9), the result is ``positive`` where
    ``w > threshold``, ``-negative`` where ``w < -threshold``, else 0 (eq. 6).
    Gradients: by ``positive`` the sum over its elements, by ``negative`` minus the sum
    over its own (eq. 7, with the sign of its derivative); to w the gradient times
    ``positive``, ``negative`` or 1 (eq. 8), where both values are counted in ``unit``,
    what they started at: the paper's weights are normalised, and its values start at 1.
    In units of the weights, where both are some hundredths, weights at 0 would get many
    times the gradient of the others, and few would stay there. The paper has one pair
    of values, and one threshold, for a whole layer.

    No affine grid of two bits holds both values; ``grid`` is int8 with
    ``scale = max(positive, negative) / 127``, on which both are rounded in training
    too, so that freezing changes nothing: at most half a step, 0.4 % of the larger
    value.
    """

    kind = "ttq"
    learned: tuple[str, ...] = ("positive", "negative")
    kept: tuple[str, ...] = ("unit",)
    positive: Tensor
    negative: Tensor
    unit: Tensor

    def check(self) -> None:
        """See ``Learner``."""
        for_weights(self)

    @property
    def grid(self) -> Format:
        """See ``Learner``."""
        return INT8

    def first(self, x: Tensor) -> QParams:
        """See ``Learner``: both values start at the mean magnitude of what is above the
        threshold.
        """
        view, dims = self.split(x)
        large = (view.abs() > _threshold(view, dims)) & view.isfinite()
        scale = torch.where(large, view.abs(), 0.0).sum(dims, keepdim=True) / large.sum(
            dims, keepdim=True
        ).clamp(min=1)
        return QParams(
            torch.where(scale >= 127 * TINY, scale, 1.0), None, self.granularity
        )

    def begin(self, scale: Tensor, _zero_point: Tensor | None) -> dict[str, Tensor]:
        """See ``Learner``."""
        return {"positive": scale, "negative": scale, "unit": scale}

    def valid(self) -> Tensor:
        """See ``Learner``."""
        smallest = torch.minimum(self.positive, self.negative)
        largest = torch.maximum(self.positive, self.negative)
        return (smallest > 0) & largest.isfinite() & (largest >= 127 * TINY)

    @property
    def scale(self) -> Tensor | None:
        """The scale as it is now; ``None`` before there is one."""
        return self.qparams().scale if self.ready else None

    def qparams(self) -> QParams:
        """See ``Learner``."""
        if not self.ready:
            raise self.not_ready()
        largest = torch.maximum(self.positive.detach(), self.negative.detach())
        return QParams(largest / INT8.max_finite, None, self.granularity)

    def estimate(self, x: Tensor) -> Tensor:
        """See ``Learner``."""
        result: Tensor = _Ternary.apply(x, self, self.positive, self.negative)  # type: ignore[no-untyped-call]
        return result


def _threshold(view: Tensor, dims: tuple[int, ...]) -> Tensor:
    low, high = extremes(view, dims)
    return 0.05 * torch.maximum(high, -low)


class _Ternary(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, x: Tensor, learner: Ttq, positive: Tensor, negative: Tensor
    ) -> Tensor:
        view, dims = learner.split(x)
        scale = learner.qparams().scale.to(x.dtype)
        values = [(v.to(x.dtype) / scale).round() * scale for v in (positive, negative)]
        threshold = _threshold(view, dims)
        above = view > threshold
        below = view < -threshold
        ctx.learner = learner
        ctx.save_for_backward(above, below, positive, negative)
        zero_or_nan = torch.where(view.isnan(), view, 0.0)
        return torch.where(
            above, values[0], torch.where(below, -values[1], zero_or_nan)
        ).reshape(x.shape)

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> tuple[Any, ...]:
        above, below, positive, negative = ctx.saved_tensors
        with torch._C.DisableTorchFunction():
            gradient, dims = ctx.learner.split(gradients[0])
            up, down = (
                (value / ctx.learner.unit).to(gradient.dtype)
                for value in (positive, negative)
            )
            slope = torch.where(above, up, torch.where(below, down, 1.0))
            by_positive = (
                (gradient * above).sum(dims).to(positive.dtype).reshape(positive.shape)
            )
            by_negative = (
                -(gradient * below).sum(dims).to(negative.dtype).reshape(negative.shape)
            )
            return (
                (gradient * slope).reshape(gradients[0].shape),
                None,
                by_positive,
                by_negative,
            )


def for_weights(learner: Learner) -> None:
    """Raise QuantizationError unless it stands before a weight and has the ternary format."""
    needs(learner, parse_format("ternary"))
    if learner.role != "weight":
        raise learner.fault(
            f"{learner.kind} is for weights",
            expected="role weight",
            got=learner.role,
            do="use lsq+ or dorefa for activations",
        )
