"""Learners of a scale: straight-through (given or observed), LSQ and LSQ+.

With ``v = x / scale``, codes from ``n`` to ``p`` and ``low = n - zero_point``,
``high = p - zero_point``, the result is ``scale * Q(v)``,
``Q(v) = clamp(round(v), low, high)``. Each class gives the derivatives by which it is
trained; the gradient of a parameter is summed over the elements that share it. Formats
that are no integers take part with their own rounding for ``Q`` and their extreme
finite values for n and p.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from roundoff.formats import (
    Format,
    Granularity,
    QParams,
    choose_qparams,
    extremes,
    mean_magnitude,
)
from roundoff.quantize.qat.learner import TINY, Role, range_qparams
from roundoff.quantize.qat.straight_through import Affine, At

__all__ = ["Lsq", "LsqPlus", "Ste"]


class Ste(Affine):
    """Straight-through: the scale is given, or observed while training; nothing is
    learned but the model.

    ``dx̂/dx = 1`` where the rounded value is inside the range, else 0 (Bengio et al.,
    arXiv:1308.3432, section 4, with the saturation of arXiv:1712.05877, section 3.1;
    torch's ``fake_quantize_per_tensor_affine`` has the same derivative).

    Without qparams, the scale is observed in every forward pass in training mode: of a
    weight, from its min-max as it is; of an activation, from the moving averages of
    minimum and maximum, ``(1 - momentum) * old + momentum * batch`` (the same paper),
    whose first batch counts whole. ``freeze`` and evaluation mode end that. Values that
    are not finite are left out.

    Example:
        >>> x = torch.tensor([0.3, 9.0], requires_grad=True)
        >>> y = Ste("int4", qparams=QParams(torch.tensor(0.25)))(x)
        >>> y.sum().backward()
        >>> y.tolist(), x.grad.tolist()
        ([0.25, 1.75], [1.0, 0.0])
    """

    kind = "ste"
    scale: Tensor
    zero_point: Tensor | None
    low: Tensor
    high: Tensor

    def __init__(
        self,
        fmt: Format | str,
        granularity: Granularity | None = None,
        qparams: QParams | None = None,
        *,
        role: Role = "weight",
        momentum: float = 0.01,
    ) -> None:
        self.observes = qparams is None
        self.momentum = momentum
        super().__init__(fmt, granularity, qparams, role=role)

    def check(self) -> None:
        """See ``Learner``."""
        self.averages = (
            self.observes
            and self.role == "activation"
            and self.fmt.scale_from == "amax"
        )
        self.kept = (
            "scale",
            *(() if self.fmt.symmetric else ("zero_point",)),
            *(("low", "high") if self.averages else ()),
        )

    def first(self, x: Tensor) -> QParams:
        """See ``Learner``."""
        if not self.averages:
            return super().first(x)
        self.low, self.high = extremes(*self.split(x))
        return self.averaged()

    def averaged(self) -> QParams:
        """The qparams of the averaged range."""
        qparams = range_qparams(self.low, self.high, self.fmt)
        return QParams(qparams.scale, qparams.zero_point, self.granularity)

    def qparams(self) -> QParams:
        """See ``Learner``."""
        if not self.ready:
            raise self.not_ready()
        return QParams(
            self.scale,
            None if self.fmt.symmetric else self.zero_point,
            self.granularity,
        )

    def estimate(self, x: Tensor) -> Tensor:
        """See ``Learner``."""
        if self.observes and self.training and not self.is_frozen and x.numel():
            self._observe(x.detach())
        return super().estimate(x)

    def slopes(self, at: At) -> tuple[Tensor, ...]:
        """See ``Affine``."""
        low, high = self.limits(at.zero_point)
        steps = at.steps.round() if self.fmt.one_quantum == 1.0 else at.steps
        return (((steps >= low) & (steps <= high)).to(at.x.dtype),)

    def _observe(self, x: Tensor) -> None:
        if self.averages:
            low, high = extremes(*self.split(x))
            self.low = torch.lerp(self.low, low, self.momentum)
            self.high = torch.lerp(self.high, high, self.momentum)
        qparams = (
            self.averaged()
            if self.averages
            else choose_qparams(x, self.fmt, self.granularity)
        )
        self.scale = qparams.scale
        if qparams.zero_point is not None:
            self.zero_point = qparams.zero_point


class Lsq(Affine):
    """LSQ, learned step size (Esser et al., arXiv:1902.08153).

    Eq. 3: ``dx̂/dscale = Q(v) - v`` inside, that is where ``low < v < high``, else the
    end that is reached; ``dx̂/dx = 1`` inside, else 0 (eq. 5, the straight-through
    estimator). The gradient of the scale is multiplied by ``1 / sqrt(N Qp)`` (section
    2.2), with ``Qp = p``, 7 of signed 4-bit codes, and N the number of elements that
    share it: of a weight all, of an activation those of one sample. Without qparams,
    the scale starts at ``2 E|x| / sqrt(Qp)`` (section 2.1), E being the mean of the
    finite values.

    With an asymmetric format the zero point stays as it starts: from the min-max of the
    first tensor, so that activations that are never negative use all codes, as with the
    paper's unsigned ones. Qp is then ``max(high, -low)``: the paper's ``2**bits - 1``
    where all values are positive.
    """

    kind = "lsq"
    learned: tuple[str, ...] = ("scale",)
    scale: Tensor
    zero_point: Tensor

    def check(self) -> None:
        """See ``Learner``."""
        self.kept = () if self.fmt.symmetric else ("zero_point",)

    def first(self, x: Tensor) -> QParams:
        """See ``Learner``."""
        qparams = super().first(x)
        (view, dims) = self.split(x)
        scale = (
            2
            * mean_magnitude(view, dims)
            / torch.as_tensor(self.largest(qparams.zero_point)).sqrt()
        )
        return QParams(
            torch.where(scale >= TINY, scale, qparams.scale), qparams.zero_point
        )

    def valid(self) -> Tensor:
        """See ``Learner``."""
        return self.scale.isfinite() & (self.scale >= TINY)

    def qparams(self) -> QParams:
        """See ``Learner``."""
        if not self.ready:
            raise self.not_ready()
        return QParams(
            self.scale.detach(),
            None if self.fmt.symmetric else self.zero_point,
            self.granularity,
        )

    def slopes(self, at: At) -> tuple[Tensor, ...]:
        """See ``Affine``."""
        low, high = self.limits(at.zero_point)
        inside = (at.steps > low) & (at.steps < high)
        end = torch.where(at.steps >= high, high, low)
        by_scale = torch.where(inside, at.on_grid(self.fmt) - at.steps, end)
        return inside.to(at.x.dtype), by_scale * self.gradient_scale(
            at, self.largest(at.zero_point)
        )

    def largest(self, zero_point: Tensor | None) -> Tensor | float:
        """Qp."""
        low, high = self.limits(zero_point)
        if isinstance(low, Tensor) and isinstance(high, Tensor):
            return torch.maximum(high, -low)
        return self.fmt.max_finite

    def gradient_scale(self, at: At, largest: Tensor | float) -> Tensor:
        """``1 / sqrt(N Qp)``."""
        count = math.prod(
            at.x.shape[i] for i in at.dims if self.role == "weight" or i > 0
        )
        return torch.as_tensor(
            count * largest, dtype=at.x.dtype, device=at.x.device
        ).rsqrt()


class LsqPlus(Lsq):
    """LSQ+ (Bhalgat et al., arXiv:2004.09576): scale and, with an asymmetric format,
    the offset are learned.

    The codes stand for ``scale * code + offset`` there (eqs. 1-2). The paper's offset
    is real; here ``-offset / scale`` is rounded to an integer, the zero point, so that
    real 0 is exact and the result is what any deployed kernel computes. The derivatives
    are the paper's (eqs. 4-8): by the scale ``Q(v) - v`` inside, else the end code n or
    p; by the offset 0 inside, else 1; by x 1 inside, else 0. Both parameters' gradients
    are multiplied by LSQ's ``1 / sqrt(N Qp)``, Qp being ``p - n`` for asymmetric
    formats, the ``2**bits - 1`` of the paper's unsigned ones.

    Without qparams, asymmetric ones start at min-max; symmetric ones, which have no
    offset, are the paper's weights and start at
    ``max(|mean - 3 sd|, |mean + 3 sd|) / 2**(bits - 1)`` (section 3.2), mean and
    deviation being over the elements that share a scale.
    """

    kind = "lsq+"
    learned: tuple[str, ...] = ("scale", "offset")
    offset: Tensor

    def check(self) -> None:
        """See ``Learner``."""
        if self.fmt.symmetric:
            self.learned = ("scale",)

    def begin(self, scale: Tensor, zero_point: Tensor | None) -> dict[str, Tensor]:
        """See ``Learner``."""
        return (
            {"scale": scale}
            if zero_point is None
            else {"scale": scale, "offset": -zero_point * scale}
        )

    def first(self, x: Tensor) -> QParams:
        """See ``Learner``."""
        qparams = choose_qparams(x, self.fmt, self.granularity)
        (view, dims) = self.split(x)
        if not self.fmt.symmetric:
            return qparams
        spread = 3 * view.std(dims, correction=0, keepdim=True)
        mean = view.mean(dims, keepdim=True)
        end = torch.maximum((mean - spread).abs(), (mean + spread).abs())
        scale = end / (
            2.0 ** (self.fmt.width - 1)
            if self.fmt.one_quantum == 1.0
            else self.fmt.max_finite
        )
        return QParams(
            torch.where(scale.isfinite() & (scale >= TINY), scale, qparams.scale)
        )

    def valid(self) -> Tensor:
        """See ``Learner``."""
        return (
            super().valid()
            if self.fmt.symmetric
            else super().valid() & self.offset.isfinite()
        )

    def qparams(self) -> QParams:
        """See ``Learner``."""
        if not self.ready:
            raise self.not_ready()
        scale = self.scale.detach()
        if self.fmt.symmetric:
            return QParams(scale, None, self.granularity)
        zero_point = (
            (-self.offset.detach() / scale)
            .round()
            .clamp(self.fmt.min_finite, self.fmt.max_finite)
        )
        return QParams(scale, zero_point, self.granularity)

    def slopes(self, at: At) -> tuple[Tensor, ...]:
        """See ``Affine``."""
        if at.zero_point is None:
            return super().slopes(at)
        low, high = self.limits(at.zero_point)
        inside = (at.steps > low) & (at.steps < high)
        end = torch.where(at.steps >= high, self.fmt.max_finite, self.fmt.min_finite)
        by_scale = torch.where(inside, at.on_grid(self.fmt) - at.steps, end)
        factor = self.gradient_scale(at, self.fmt.max_finite - self.fmt.min_finite)
        return (
            inside.to(at.x.dtype),
            by_scale * factor,
            (~inside).to(at.x.dtype) * factor,
        )
