"""Estimated derivatives: forward ``fake_quantize``, backward what a learner says
element by element.
"""

from __future__ import annotations

from abc import abstractmethod
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from roundoff.formats import Format, QParams, fake_quantize
from roundoff.quantize.qat.learner import Learner

__all__ = ["Affine", "At"]


@dataclass(frozen=True)
class At:
    """Where derivatives are taken: x in the granularity's view, ``x / scale``, and the
    axes whose elements share a scale.
    """

    x: Tensor
    steps: Tensor
    scale: Tensor
    zero_point: Tensor | None
    dims: tuple[int, ...]

    def on_grid(self, fmt: Format) -> Tensor:
        """``steps`` rounded and saturated: the result over the scale."""
        identity = QParams(
            torch.ones((), dtype=self.x.dtype, device=self.x.device), self.zero_point
        )
        return fake_quantize(self.steps, identity, fmt)


class Affine(Learner):
    """A learner whose forward pass is ``fake_quantize(x, qparams(), fmt)``."""

    def begin(self, scale: Tensor, zero_point: Tensor | None) -> dict[str, Tensor]:
        """See ``Learner``."""
        if zero_point is None:
            return {"scale": scale}
        return {"scale": scale, "zero_point": zero_point}

    @abstractmethod
    def slopes(self, at: At) -> tuple[Tensor, ...]:
        """Element by element, the estimated derivative of the result by x, then by each
        learned parameter.
        """

    def estimate(self, x: Tensor) -> Tensor:
        """See ``Learner``."""
        result: Tensor = _Estimate.apply(
            x, self, *(getattr(self, n) for n in self.learned)
        )  # type: ignore[no-untyped-call]
        return result

    def limits(
        self, zero_point: Tensor | None
    ) -> tuple[Tensor | float, Tensor | float]:
        """The ends of the range in steps from real 0: LSQ's -Qn and Qp."""
        if zero_point is None:
            return self.fmt.min_finite, self.fmt.max_finite
        return self.fmt.min_finite - zero_point, self.fmt.max_finite - zero_point


class _Estimate(torch.autograd.Function):
    """Forward ``fake_quantize``, backward the learner's slopes, summed over the
    elements that share a parameter.
    """

    @staticmethod
    def forward(ctx: Any, x: Tensor, learner: Affine, *parameters: Tensor) -> Tensor:
        qparams = learner.qparams()
        ctx.learner = learner
        ctx.zero_point = qparams.zero_point
        ctx.save_for_backward(x, qparams.scale, *parameters)
        return fake_quantize(x, qparams, learner.fmt)

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> tuple[Any, ...]:
        with torch._C.DisableTorchFunction():
            x, scale, *parameters = ctx.saved_tensors
            learner = ctx.learner
            zero_point = ctx.zero_point
            view, dims = learner.split(x)
            scale = scale.to(x.dtype)
            zero_point = None if zero_point is None else zero_point.to(x.dtype)
            by_x, *rest = learner.slopes(
                At(view, view / scale, scale, zero_point, dims)
            )
            gradient = gradients[0].to(x.dtype).reshape(view.shape)
            needed = zip(rest, parameters, ctx.needs_input_grad[2:], strict=True)
            by_parameters = [
                (gradient * d).sum(dims).to(p.dtype).reshape(p.shape) if need else None
                for d, p, need in needed
            ]
            return (gradient * by_x).reshape(x.shape), None, *by_parameters
