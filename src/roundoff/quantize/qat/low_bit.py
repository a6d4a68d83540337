"""Learners of one and two bits, and of few: DoReFa, BNN and XNOR-Net (ternary ones:
``ternary.py``).

Their scale comes from the weight as it is in each forward pass, so there is nothing to
learn beside the weight, and what is frozen is ``frozen(weight)``: the transformed
weight, on the grid of the format ``grid``. The papers leave the first and the last
layer in high precision; which layers those are, a plan says by pattern.
"""

from __future__ import annotations

from abc import abstractmethod
from typing import Any

import torch
from torch import Tensor

from roundoff.errors import QuantizationError
from roundoff.formats import (
    Format,
    Granularity,
    QParams,
    fake_quantize,
    integer,
    mean_magnitude,
    parse_format,
)
from roundoff.quantize.qat.clip import needs_zero_point
from roundoff.quantize.qat.learner import TINY, Learner, Role
from roundoff.train import straight

__all__ = ["Bnn", "Dorefa", "Transformed", "Xnor", "quantize_gradient"]

BINARY = parse_format("binary")


class Transformed(Learner):
    """A learner whose weights are codes times a scale that is found anew in each forward pass."""

    kept: tuple[str, ...] = ("scale",)
    scale: Tensor

    @abstractmethod
    def codes(self, view: Tensor, dims: tuple[int, ...]) -> tuple[Tensor, Tensor]:
        """Codes of format ``grid`` (as floating-point numbers) and their scale, for x
        in the granularity's view.
        """

    @abstractmethod
    def surrogate(self, view: Tensor, dims: tuple[int, ...], scale: Tensor) -> Tensor:
        """What has the gradient of the learner."""

    def first(self, x: Tensor) -> QParams:
        """See ``Learner``."""
        return QParams(self.codes(*self.split(x))[1], None, self.granularity)

    def begin(self, scale: Tensor, _zero_point: Tensor | None) -> dict[str, Tensor]:
        """See ``Learner``."""
        return {"scale": scale}

    def qparams(self) -> QParams:
        """Scale of the last forward pass (see ``Learner``)."""
        if not self.ready:
            raise self.not_ready()
        return QParams(self.scale, None, self.granularity)

    def estimate(self, x: Tensor) -> Tensor:
        """See ``Learner``."""
        view, dims = self.split(x)
        with torch.no_grad():
            codes, scale = self.codes(view, dims)
            self.scale = scale
            value = codes * scale
        return straight(self.surrogate(view, dims, scale), value).reshape(x.shape)


class Dorefa(Transformed):
    """DoReFa-Net (Zhou et al., arXiv:1606.06160), with
    ``quantize_k(r) = round((2**k - 1) r) / (2**k - 1)`` (eq. 5).

    * Weights of k >= 2 bits: ``2 quantize_k(tanh(w) / (2 max|tanh(w)|) + 1/2) - 1``
      (eq. 9); the gradient is that of ``tanh(w) / max|tanh(w)|``. These are odd
      multiples of ``1 / (2**k - 1)``, so ``grid`` has k + 1 bits.
    * Weights of one bit (format binary): ``sign(w) E|w|`` with the gradient passed on
      unchanged (eqs. 7-8).
    * Activations: ``quantize_k(clip(x, 0, 1))`` (eqs. 10-11), gradient 1 inside [0, 1],
      else 0. The end of the range, 1 in the paper, is that of the qparams where these
      are given.

    Args:
        gradient_bits: of activations: round the gradient that goes back to this many
            bits (``quantize_gradient``).
    """

    kind = "dorefa"

    def __init__(
        self,
        fmt: Format | str,
        granularity: Granularity | None = None,
        qparams: QParams | None = None,
        *,
        role: Role = "weight",
        gradient_bits: int | None = None,
    ) -> None:
        self.gradient_bits = gradient_bits
        super().__init__(fmt, granularity, qparams, role=role)

    def check(self) -> None:
        """See ``Learner``."""
        if self.role == "activation":
            needs_zero_point(self)
            self.kept = ("scale", "zero_point")
        elif self.fmt.name != "binary" and self.fmt.one_quantum != 1.0:
            raise self.fault(
                "DoReFa needs integer codes",
                expected="binary, or an integer format",
                got=self.fmt.name,
            )
        if self.gradient_bits is not None and (
            self.role == "weight" or self.gradient_bits < 1
        ):
            raise self.fault(
                "gradients are rounded where activations are, to one bit or more",
                got=f"role {self.role}, gradient_bits={self.gradient_bits}",
            )

    @property
    def grid(self) -> Format:
        """See ``Learner``."""
        return (
            self.fmt
            if self.role == "activation" or self.fmt.width == 1
            else integer(self.fmt.width + 1)
        )

    def first(self, x: Tensor) -> QParams:
        """See ``Learner``."""
        if self.role == "weight":
            return super().first(x)
        ones = torch.ones([1] * self.split(x)[0].ndim, dtype=x.dtype, device=x.device)
        return QParams(
            ones / (self.fmt.max_finite - self.fmt.min_finite),
            ones * self.fmt.min_finite,
            self.granularity,
        )

    def begin(self, scale: Tensor, zero_point: Tensor | None) -> dict[str, Tensor]:
        """See ``Learner``."""
        if self.role == "weight":
            return {"scale": scale}
        if zero_point is None or bool((zero_point != self.fmt.min_finite).any()):
            raise self.fault(
                "DoReFa clips activations at 0, and this range goes below",
                got="negative values",
                expected=f"zero point {self.fmt.min_finite:g}",
                do="use lsq+ or ulq here, or put it behind a ReLU",
            )
        return {"scale": scale, "zero_point": zero_point}

    def qparams(self) -> QParams:
        """See ``Learner``."""
        trained = super().qparams()
        return (
            trained
            if self.role == "weight"
            else QParams(trained.scale, self.get_buffer("zero_point"), self.granularity)
        )

    def codes(self, view: Tensor, dims: tuple[int, ...]) -> tuple[Tensor, Tensor]:
        """See ``Transformed``."""
        if self.fmt.width == 1:
            return signs(view), mean_magnitude(view, dims).clamp(min=TINY)
        steps = 2.0**self.fmt.width - 1
        shape = [1 if i in dims else n for i, n in enumerate(view.shape)]
        scale = torch.full(shape, 1 / steps, dtype=view.dtype, device=view.device)
        return 2 * ((_squashed(view, dims) / 2 + 0.5) * steps).round() - steps, scale

    def surrogate(self, view: Tensor, dims: tuple[int, ...], _scale: Tensor) -> Tensor:
        """See ``Transformed``."""
        return view if self.fmt.width == 1 else _squashed(view, dims)

    def estimate(self, x: Tensor) -> Tensor:
        """See ``Learner``."""
        if self.role == "weight":
            return super().estimate(x)
        if self.gradient_bits is not None:
            x = quantize_gradient(x, self.gradient_bits)
        end = (self.scale * (self.fmt.max_finite - self.fmt.min_finite)).to(x.dtype)
        clipped = torch.minimum(self.split(x)[0].clamp(min=0.0), end).reshape(x.shape)
        return straight(clipped, fake_quantize(x, self.qparams(), self.fmt))


def _squashed(view: Tensor, dims: tuple[int, ...]) -> Tensor:
    """``tanh(w) / max|tanh(w)|``; 0 where all are 0."""
    bounded = view.tanh()
    largest = bounded.abs().amax(dims, keepdim=True)
    return bounded / torch.where(largest > 0, largest, 1.0)


class Bnn(Transformed):
    """BinaryNet (Courbariaux et al., arXiv:1602.02830): ``sign(x)``, +1 for both zeros (eq. 1).

    The gradient is passed on where ``|x| <= 1``, else it is 0 (eq. 4). The paper clips
    real-valued weights to [-1, 1] after each update: ``prepare.clip_binary_``. Where
    qparams are given, their scale multiplies result and gradient.
    """

    kind = "bnn"

    def check(self) -> None:
        """See ``Learner``."""
        needs(self, BINARY)

    def first(self, x: Tensor) -> QParams:
        """See ``Learner``.

        Raises ``QuantizationError`` where values have one sign only: their codes would
        be a constant.
        """
        if self.role == "activation" and bool((x >= 0).all()):
            raise self.fault(
                "the sign of values that are never negative is a constant",
                got="a first batch without one",
                expected="values of both signs",
                do="binarise what stands before the ReLU, or use dorefa here",
            )
        view, dims = self.split(x)
        return QParams(
            torch.ones([1 if i in dims else n for i, n in enumerate(view.shape)]).to(x),
            None,
            self.granularity,
        )

    def codes(self, view: Tensor, _dims: tuple[int, ...]) -> tuple[Tensor, Tensor]:
        """See ``Transformed``."""
        return signs(view), self.scale.to(view)

    def surrogate(self, view: Tensor, _dims: tuple[int, ...], scale: Tensor) -> Tensor:
        """See ``Transformed``."""
        return view.clamp(-1.0, 1.0) * scale


class Xnor(Bnn):
    """XNOR-Net (Rastegari et al., arXiv:1603.05279).

    Weights: ``alpha sign(w)``, ``alpha = mean|w|`` over the elements that share it, in
    the paper a filter (eq. 6). Gradient by w_i, with n of them: that by the result
    times ``1/n + alpha [|w_i| <= 1]`` (section 3.1). Activations are BinaryNet's,
    without the paper's scales K of their positions (eq. 11).
    """

    kind = "xnor"

    def first(self, x: Tensor) -> QParams:
        """See ``Learner``."""
        return (
            super().first(x)
            if self.role == "activation"
            else Transformed.first(self, x)
        )

    def codes(self, view: Tensor, dims: tuple[int, ...]) -> tuple[Tensor, Tensor]:
        """See ``Transformed``."""
        if self.role == "activation":
            return super().codes(view, dims)
        return signs(view), mean_magnitude(view, dims).clamp(min=TINY)

    def surrogate(self, view: Tensor, dims: tuple[int, ...], scale: Tensor) -> Tensor:
        """See ``Transformed``."""
        result = super().surrogate(view, dims, scale)
        return (
            result
            if self.role == "activation"
            else result + view / (view.numel() // max(scale.numel(), 1))
        )


def signs(x: Tensor) -> Tensor:
    """+1 and -1, +1 for both zeros; NaN stays NaN.

    >>> signs(torch.tensor([0.3, -0.0, -2.0])).tolist()
    [1.0, 1.0, -1.0]
    """
    return fake_quantize(
        x, QParams(torch.ones((), dtype=x.dtype, device=x.device)), BINARY
    )


def quantize_gradient(
    x: Tensor, bits: int, generator: torch.Generator | None = None
) -> Tensor:
    """``x`` itself, whose gradient is rounded to ``bits`` on its way back, per sample
    (DoReFa eq. 12).

    With M the largest magnitude of a sample's gradient (all axes but the first) and
    noise N, uniform within half a step of ``1 / (2**bits - 1)``:
    ``2 M (quantize_k(g / (2 M) + 1/2 + N) - 1/2)``, whose mean is g where it is inside
    the range. A gradient of zeros stays.

    Raises:
        QuantizationError: fewer than one bit.
    """
    if bits < 1:
        raise QuantizationError(
            "a gradient needs one bit or more",
            where="quantize_gradient",
            got=f"bits={bits}",
        )
    result: Tensor = _Gradient.apply(x, bits, generator)  # type: ignore[no-untyped-call]
    return result


class _Gradient(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, x: Tensor, bits: int, generator: torch.Generator | None
    ) -> Tensor:
        ctx.how = bits, generator
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> tuple[Any, ...]:
        bits, generator = ctx.how
        with torch._C.DisableTorchFunction():
            gradient = gradients[0].float()
            steps = 2.0**bits - 1
            dims = tuple(range(1, gradient.ndim)) or (0,)
            largest = gradient.abs().amax(dims, keepdim=True)
            noise = (
                torch.rand(gradient.shape, device=gradient.device, generator=generator)
                - 0.5
            )
            unit = gradient / (2 * torch.where(largest > 0, largest, 1.0)) + 0.5
            rounded = (unit * steps + noise).round().clamp(0, steps) / steps
            return (2 * largest * (rounded - 0.5)).to(gradients[0].dtype), None, None


def needs(learner: Learner, fmt: Format) -> None:
    """Raise QuantizationError unless the format is ``fmt``."""
    if learner.fmt.name != fmt.name:
        raise learner.fault(
            f"{learner.kind} has a grid of its own",
            expected=fmt.name,
            got=learner.fmt.name,
        )
