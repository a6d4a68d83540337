"""What all observers share: which elements share a range, checks of what comes in, and
a range made into qparams.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import Protocol

import torch
from torch import Tensor

from roundoff.errors import QuantizationError
from roundoff.formats import (
    BlockFormat,
    Format,
    Granularity,
    PerAxis,
    PerTensor,
    PerToken,
    QParams,
    choose_qparams,
    working_dtype,
)

__all__ = ["Observer", "RangeObserver", "check_format", "check_parameter"]


class Observer(Protocol):
    """Collects statistics of a tensor, batch by batch, and yields qparams.

    Its memory does not grow with the batches.
    """

    #: elements seen; 0: it never fired
    count: int
    #: what the last ``qparams`` could not scale as it should, as text for a report;
    #: empty if nothing
    degenerate: str

    def see(self, x: Tensor, power: Tensor | None = None) -> None:
        """One batch.

        ``power``: the squared adjoint of each element, broadcastable to ``x``; only
        ``adjoint`` uses it.
        """

    def qparams(self, fmt: Format) -> QParams:
        """Scale and zero point for ``fmt``, of the shape the granularity gives the last
        tensor's scale.
        """
        ...


class RangeObserver(ABC):
    """An observer that ends in a range ``[low, high]`` for each set of elements that share a scale.

    ``qparams`` hands that range to :func:`roundoff.formats.choose_qparams`, whose rules
    therefore hold: an asymmetric range is widened to contain 0, which is exact;
    ``low == 0`` gives the lowest code as zero point. A range of zero has scale 1, and a
    scale below the smallest normal number of its dtype becomes that number: both are
    said in ``degenerate``.

    Args:
        granularity: which elements share a range; by default all.

    Raises:
        QuantizationError: on ``see``: NaN or Inf in ``x``, ``x`` is not floating point,
            or its shape gives other sets than before. On ``qparams``: no element was
            seen, or the format has a scale rule of its own (blocks, ternary, binary). A
            batch that was refused leaves the observer as it was. An empty one changes
            nothing.
    """

    name = ""

    def __init__(self, granularity: Granularity | None = None) -> None:
        self.granularity = granularity or PerTensor()
        self.count = 0
        self.degenerate = ""
        self.shape: tuple[int, ...] | None = None  # of the scale
        self.dtype = torch.float32
        if isinstance(self.granularity, PerToken) and not self.dynamic:
            raise QuantizationError(
                "a token's range belongs to one batch, and this observer joins batches",
                where=f"observer {self.name}",
                expected="a granularity whose sets stay the same from batch to batch",
                got="PerToken()",
                do="use minmax, whose ranges per token are those of the last batch (dynamic), or PerTensor()",
            )

    #: whether it can work per token
    dynamic = False

    def see(self, x: Tensor, power: Tensor | None = None) -> None:
        """One batch (see :class:`Observer`)."""
        if not x.is_floating_point():
            raise QuantizationError(
                "a range needs floating-point values",
                where=f"observer {self.name}",
                got=f"dtype {x.dtype}",
                do="observe the tensor before it becomes an integer",
            )
        if x.numel() == 0:
            return
        whole_shape = x.shape
        x = x.detach().to(working_dtype(x))
        view, dims = self.granularity.split(x.shape)
        x = x.reshape(view)
        if len(dims) == x.ndim:
            low, high = (bound.reshape([1] * x.ndim) for bound in torch.aminmax(x))
        else:
            low = x.amin(dims, keepdim=True)
            high = x.amax(dims, keepdim=True)
        if not bool((low.isfinite() & high.isfinite()).all()):
            bad = x.numel() - int(x.isfinite().sum())
            raise QuantizationError(
                f"{bad} of {x.numel()} values are NaN or Inf",
                where=f"observer {self.name}",
                got=f"a tensor of shape {tuple(x.shape)}",
                do="find where they arise (roundoff watch), or leave it out",
            )
        shape = self._agreed(tuple(low.shape))
        power = self._power(power, whole_shape)
        order = [i for i in range(x.ndim) if i not in dims] + list(dims)
        sets = low.numel()
        self._add(
            x.permute(order).reshape(sets, -1),
            low.flatten(),
            high.flatten(),
            None
            if power is None
            else power.reshape(view).permute(order).reshape(sets, -1),
        )
        self.shape = shape
        self.dtype = torch.promote_types(self.dtype, x.dtype)
        self.count += x.numel()

    def qparams(self, fmt: Format) -> QParams:
        """Scale and zero point for ``fmt``; ``degenerate`` says where the scale is not
        what the range asks for.
        """
        check_format(fmt, self.name)
        if self.count == 0 or self.shape is None:
            raise QuantizationError(
                "the observer never fired, so there is no range",
                where=f"observer {self.name}",
                expected="a value",
                got="none",
                do="run calibration batches that reach this value, or leave it out",
            )
        low, high = self._range(fmt)
        return self._finish(low, high, fmt)

    @abstractmethod
    def _add(self, x: Tensor, low: Tensor, high: Tensor, power: Tensor | None) -> None:
        """A checked batch: ``x`` of shape (sets, elements), finite; its extremes,
        (sets,); power like ``x``.
        """

    @abstractmethod
    def _range(self, fmt: Format) -> tuple[Tensor, Tensor]:
        """The range of each set, (sets,)."""

    def _agreed(self, shape: tuple[int, ...]) -> tuple[int, ...]:
        if (
            self.shape is None
            or self.shape == shape
            or isinstance(self.granularity, PerToken)
        ):
            return shape
        if isinstance(self.granularity, PerTensor):
            return ()  # batches of different rank: a scale without axes fits all
        raise QuantizationError(
            "this batch has other sets of elements than the ones before",
            where=f"observer {self.name}, {self.granularity}",
            expected=f"a scale of shape {self.shape}",
            got=f"one of shape {shape}",
            do="observe tensors that differ only in the axes that share a scale, or use PerTensor()",
        )

    def _power(self, power: Tensor | None, shape: torch.Size) -> Tensor | None:  # noqa: ARG002
        """``power`` checked and expanded to ``shape``; here it is not used."""
        return None

    def _finish(self, low: Tensor, high: Tensor, fmt: Format) -> QParams:
        """``low`` and ``high``, (sets,), as qparams of the granularity."""
        low = low.to(self.dtype)
        high = high.to(self.dtype)
        chosen = choose_qparams(torch.stack([low, high], -1), fmt, PerAxis(0))
        self._report(low, high, fmt)
        return self._shaped(chosen.scale, chosen.zero_point)

    def _shaped(self, scale: Tensor, zero_point: Tensor | None) -> QParams:
        shape = () if self.shape is None else self.shape
        return QParams(
            scale.reshape(shape),
            None if zero_point is None else zero_point.reshape(shape),
            self.granularity,
        )

    def _report(self, low: Tensor, high: Tensor, fmt: Format) -> None:
        """Sets ``degenerate``: what ``choose_qparams`` replaced, from the same range in fp64."""
        low = low.double().clamp(max=0.0)
        high = high.double().clamp(min=0.0)
        levels = (
            (fmt.scale_target or fmt.max_finite)
            if fmt.symmetric
            else fmt.max_finite - fmt.min_finite
        )
        scale = (torch.maximum(high, -low) if fmt.symmetric else high - low) / levels
        tiny = torch.finfo(self.dtype).tiny
        zero = int((scale == 0).sum())
        small = int(((scale > 0) & (scale < tiny)).sum())
        of = f"of {scale.numel()} range{'s' if scale.numel() > 1 else ''}"
        self.degenerate = "; ".join(
            ([f"{zero} {of} zero: scale 1"] if zero else [])
            + (
                [
                    f"{small} {of} too small: the scale would be below {tiny:.3g} and is that"
                ]
                if small
                else []
            )
        )


def check_format(fmt: Format, name: str) -> None:
    """Raises if the scales of ``fmt`` do not come from a range."""
    if isinstance(fmt, BlockFormat) or fmt.scale_from != "amax":
        raise QuantizationError(
            f"the scales of {fmt.name} do not come from a range",
            where=f"observer {name}",
            expected="an integer, fp8 or fp4",
            got=fmt.name,
            do="block formats choose scales as they round (round_tensor), ternary and binary from the mean magnitude",
        )


def check_parameter(
    observer: str,
    name: str,
    value: object,
    low: float,
    high: float,
    *,
    whole: bool = False,
) -> None:
    """Raises unless ``low <= value <= high`` (and an integer)."""
    kinds = int if whole else (int, float)
    if (
        isinstance(value, kinds)
        and not isinstance(value, bool)
        and low <= value <= high
    ):
        return
    raise QuantizationError(
        f"{name} is out of range",
        where=f"observer {observer}",
        expected=f"{'an integer' if whole else 'a number'} in [{low:g}, {high:g}]",
        got=repr(value),
    )
