"""Learners of a clipping range: ULQ and PACT.

With codes from n to p the result is ``scale * (code - zero_point)`` with
``scale = (clip_max - clip_min) / (p - n)``; below, ``v = x / scale``. The gradient of a
clip is summed over the elements that share it.
"""

from __future__ import annotations

import torch
from torch import Tensor

from roundoff.formats import Format, Granularity, QParams, extremes
from roundoff.quantize.qat.learner import TINY, Learner, Role, range_qparams
from roundoff.quantize.qat.straight_through import Affine, At

__all__ = ["Pact", "Ulq"]


class Ulq(Affine):
    """ULQ, learned clip range ``[clip_min, clip_max]`` (the universal linear
    quantization of Huawei's AMCT).

    Forward: ``scale = (clip_max - clip_min) / (p - n)``,
    ``zero_point = round(n - clip_min / scale)``. Backward, with
    ``e = (round(v) - v) / (p - n)`` and v of the clipped x: ``dx̂/dx = 1`` inside
    ``[clip_min, clip_max]``, else 0; ``dx̂/dclip_max = e + [x > clip_max]``;
    ``dx̂/dclip_min = [x < clip_min] - e``.

    A clip range is valid with ``clip_min <= 0 <= clip_max``, both finite, and a scale
    of at least fp32's smallest normal number; an invalid one goes back to the last
    valid one, element by element.

    Args:
        fixed_min: keep ``clip_min`` at 0, for values that are never negative.
    """

    kind = "ulq"
    learned: tuple[str, ...] = ("clip_max", "clip_min")
    clip_max: Tensor
    clip_min: Tensor

    def __init__(
        self,
        fmt: Format | str,
        granularity: Granularity | None = None,
        qparams: QParams | None = None,
        *,
        role: Role = "weight",
        fixed_min: bool = False,
    ) -> None:
        self.fixed_min = fixed_min
        super().__init__(fmt, granularity, qparams, role=role)

    def check(self) -> None:
        """See ``Learner``."""
        needs_zero_point(self)

    def begin(self, scale: Tensor, zero_point: Tensor | None) -> dict[str, Tensor]:
        """See ``Learner``."""
        low, high = self.limits(zero_point)
        low = torch.zeros_like(scale) if self.fixed_min else low * scale
        return {"clip_max": high * scale, "clip_min": torch.as_tensor(low)}

    def start(self, qparams: QParams) -> None:
        """See ``Learner``."""
        super().start(qparams)
        self.freeze(self.is_frozen)
        if not bool(self.valid().all()):
            self.ready = False
            raise self.fault(
                "the range has no zero inside",
                expected="clip_min <= 0 <= clip_max, not both 0",
                got="a zero point outside the codes",
            )

    def freeze(self, frozen: bool = True) -> None:
        """See ``Learner``; a fixed minimum stays fixed."""
        super().freeze(frozen)
        if self.fixed_min and self.clip_min is not None:
            self.clip_min.requires_grad_(False)

    def valid(self) -> Tensor:
        """See ``Learner``."""
        high = self.clip_max
        low = self.clip_min
        return (
            (high - low).isfinite()
            & (high >= 0)
            & (low <= 0)
            & ((high - low) / self.levels >= TINY)
        )

    @property
    def levels(self) -> float:
        """``p - n``."""
        return self.fmt.max_finite - self.fmt.min_finite

    @property
    def scale(self) -> Tensor | None:
        """The scale as it is now; ``None`` before there is one."""
        return self.qparams().scale if self.ready else None

    def qparams(self) -> QParams:
        """See ``Learner``."""
        if not self.ready:
            raise self.not_ready()
        qparams = range_qparams(
            self.clip_min.detach(), self.clip_max.detach(), self.fmt
        )
        return QParams(qparams.scale, qparams.zero_point, self.granularity)

    def slopes(self, at: At) -> tuple[Tensor, ...]:
        """See ``Affine``."""
        high = self.clip_max.detach().to(at.x.dtype)
        low = self.clip_min.detach().to(at.x.dtype)
        above = at.x > high
        below = at.x < low
        steps = torch.minimum(torch.maximum(at.x, low), high) / at.scale
        error = (steps.round() - steps) / self.levels
        return (
            (~(above | below)).to(at.x.dtype),
            error + above,
            below.to(at.x.dtype) - error,
        )


class Pact(Affine):
    """PACT, learned clipping of activations (Choi et al., arXiv:1805.06085).

    Eqs. 1-2: ``y = clip(x, 0, alpha)``, rounded to ``p - n`` equal steps. Eq. 3:
    ``dx̂/dalpha = 1`` where ``x >= alpha``, else 0; ``dx̂/dx = 1`` where
    ``0 <= x < alpha``, else 0. It takes the place of a ReLU, so values may come below
    0. The paper regularises alpha like a weight: ``parameter_groups`` gives it the
    model's weight decay. Without qparams, alpha starts at the largest value of the
    first tensor.
    """

    kind = "pact"
    decays = True
    learned: tuple[str, ...] = ("alpha",)
    alpha: Tensor

    def check(self) -> None:
        """See ``Learner``."""
        needs_zero_point(self)
        if self.role != "activation":
            raise self.fault(
                "PACT is for activations",
                expected="role activation",
                got=self.role,
                do="use lsq or dorefa for weights",
            )

    def first(self, x: Tensor) -> QParams:
        """See ``Learner``."""
        _, high = extremes(*self.split(x))
        return range_qparams(torch.zeros_like(high), high, self.fmt)

    def begin(self, scale: Tensor, zero_point: Tensor | None) -> dict[str, Tensor]:
        """See ``Learner``."""
        if zero_point is not None and bool((zero_point != self.fmt.min_finite).any()):
            raise self.fault(
                "PACT clips at 0, and this range goes below",
                expected=f"zero point {self.fmt.min_finite:g}",
                got="negative values",
                do="use lsq+ or ulq here, or put it behind a ReLU",
            )
        return {"alpha": scale * (self.fmt.max_finite - self.fmt.min_finite)}

    def valid(self) -> Tensor:
        """See ``Learner``."""
        return self.alpha.isfinite() & (
            self.alpha / (self.fmt.max_finite - self.fmt.min_finite) >= TINY
        )

    @property
    def scale(self) -> Tensor | None:
        """The scale as it is now; ``None`` before there is one."""
        return self.qparams().scale if self.ready else None

    def qparams(self) -> QParams:
        """See ``Learner``."""
        if not self.ready:
            raise self.not_ready()
        alpha = self.alpha.detach()
        qparams = range_qparams(torch.zeros_like(alpha), alpha, self.fmt)
        return QParams(qparams.scale, qparams.zero_point, self.granularity)

    def slopes(self, at: At) -> tuple[Tensor, ...]:
        """See ``Affine``."""
        above = at.x >= self.alpha.detach().to(at.x.dtype)
        return ((at.x >= 0) & ~above).to(at.x.dtype), above.to(at.x.dtype)


def needs_zero_point(learner: Learner) -> None:
    """Raise QuantizationError unless the format is an asymmetric integer."""
    if learner.fmt.symmetric or learner.fmt.one_quantum != 1.0:
        raise learner.fault(
            "this learner needs codes with a zero point",
            got=learner.fmt.name,
            expected="an asymmetric integer format such as int8_asym",
            do="use lsq, or the asymmetric format of the same width",
        )
