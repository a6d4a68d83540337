"""Quantizer: what one value or weight passes through in a quantized model."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn

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
    fake_quantize,
    quantize,
)
from roundoff.ops import Operand, round_operand
from roundoff.train import straight


class Quantizer(nn.Module):
    """Fake quantization of one value: quantize to ``fmt`` and dequantize, with the gradient straight through.

    With a ``scale`` it is static. A dynamic one chooses the scale from each tensor (``formats.choose_qparams``). Block
    formats always do, along the contracted axis, a last block that is not full completed with zeros.

    Attributes:
        name: a parameter ("fc.weight"), the site whose output it is ("body.0/add"), or an operand ("stem.0/conv2d:0").
        fmt: the format of the codes.
        operand: role and axes of the operand it stands before.
        granularity: which elements share a scale; ``None`` for block formats.
        dynamic: whether the scale is chosen from each tensor.
        scale, zero_point: buffers, of the granularity's shape (see ``formats.granularity``); ``None`` where there is none.
        exact: places along the contracted axis that stay in full precision beside the codes (``split_outliers_``), or None.
        sites: who reads the value through it.
        observer, note: who chose the scale, and what it could not scale as it should (``Observer.degenerate``).
    """

    scale: Tensor | None
    zero_point: Tensor | None
    exact: Tensor | None

    def __init__(
        self,
        name: str,
        fmt: Format,
        operand: Operand,
        granularity: Granularity | None,
        sites: tuple[str, ...] = (),
        *,
        dynamic: bool = False,
    ) -> None:
        super().__init__()
        self.name, self.fmt, self.operand, self.granularity, self.sites = (
            name,
            fmt,
            operand,
            granularity,
            sites,
        )
        self.dynamic = dynamic or granularity is None or isinstance(fmt, BlockFormat)
        self.observer = self.note = ""
        self.register_buffer("scale", None)
        self.register_buffer("zero_point", None)
        self.register_buffer("exact", None)

    @property
    def weight(self) -> bool:
        """Whether it stands before a weight."""
        return self.operand.role == "weight"

    def qparams(self) -> QParams:
        """Scale and zero point. Raises ``QuantizationError`` where there are none, since nothing was observed."""
        if self.scale is None:
            raise QuantizationError(
                "this value has no scale",
                where=self.name,
                expected="a calibrated quantizer",
                got="one that is dynamic" if self.dynamic else "one that saw no data",
                do="calibrate the model on batches that reach it",
            )
        return QParams(self.scale, self.zero_point, self.granularity)

    def set_(self, qparams: QParams, observer: str = "", note: str = "") -> None:
        """Take a scale and zero point; says who chose them, and what was wrong with the range."""
        self.note = note
        self.scale, self.zero_point = qparams.scale.detach().clone(), None
        if qparams.zero_point is not None:
            self.zero_point = qparams.zero_point.detach().clone()
        self.granularity, self.observer = (
            qparams.granularity or self.granularity,
            observer,
        )

    def forward(self, x: Tensor) -> Tensor:
        """``x`` on the grid, in its shape and dtype; NaN stays NaN, what is out of range saturates."""
        if x.numel() == 0:
            return x
        if self.exact is None:
            return self._rounded(x)
        kept = x.index_select(self.operand.reduce, self.exact)
        return self._rounded(self.without_exact(x)).index_copy(
            self.operand.reduce, self.exact, kept
        )

    def without_exact(self, x: Tensor) -> Tensor:
        """``x`` with zeros at the places that stay in full precision: what a scale is chosen from."""
        return (
            x
            if self.exact is None
            else x.index_fill(self.operand.reduce, self.exact, 0.0)
        )

    def _rounded(self, x: Tensor) -> Tensor:
        if self.granularity is None or isinstance(self.fmt, BlockFormat):
            return straight(x, round_operand(x, self.operand, self.fmt))
        if not self.dynamic:
            return straight(x, fake_quantize(x, self.qparams(), self.fmt))
        axis = (
            self.operand.reduce if isinstance(self.granularity, PerToken) else -1
        )  # a token has one scale along it
        moved = x.detach().movedim(axis, -1)
        rounded = fake_quantize(
            moved, choose_qparams(moved, self.fmt, self.granularity), self.fmt
        )
        return straight(x, rounded.movedim(-1, axis))

    def codes(self, x: Tensor) -> Tensor:
        """The codes of ``x`` as integers (int32), in its shape: of an integer format with a scale."""
        return quantize(x, self.qparams(), self.fmt)

    def extra_repr(self) -> str:
        """For print(model)."""
        how = "blocks" if self.granularity is None else str(self.granularity)
        return (
            f"{self.name}, {self.fmt.name}, {how}{', dynamic' if self.dynamic else ''}"
        )

    def _load_from_state_dict(
        self, state_dict: Mapping[str, Any], prefix: str, *rest: Any
    ) -> None:
        for name in (
            "scale",
            "zero_point",
        ):  # of a fresh model they are None, which has no place to load into
            if prefix + name in state_dict:
                setattr(self, name, state_dict[prefix + name].detach().clone())
        super()._load_from_state_dict(state_dict, prefix, *rest)


def on_sums(bias: Tensor, quantizers: list[Quantizer]) -> Tensor:
    """A bias rounded to the step of the integer sums that it is added to: scale of the input times scales of the weight.

    As ONNX Runtime has it for QLinearConv (bias of int32 with scale ``x_scale * w_scale``, zero point 0). Where a scale is
    neither per tensor nor per channel, or chosen while the model runs, the bias stays as it is.
    """
    scale = sum_scale(quantizers, bias.shape[-1])
    if scale is None:
        return bias
    codes = torch.round(bias.detach() / scale).clamp_(-(2.0**31), 2.0**31 - 1)
    return straight(bias, (codes * scale).to(bias.dtype))


def sum_scale(quantizers: list[Quantizer], channels: int) -> Tensor | None:
    """The step of the sums of a call's products, a number or one for each output channel; None where there is none.

    A transposed convolution's weight has a scale for each channel of a group, which every group has.
    """
    if len(quantizers) != 2 or any(q.dynamic or q.scale is None for q in quantizers):
        return None
    if sum(q.weight for q in quantizers) != 1:
        return None
    step: Tensor | None = None
    for quantizer in quantizers:
        if not isinstance(
            quantizer.granularity,
            PerTensor | (PerAxis if quantizer.weight else PerTensor),
        ):
            return None
        scale = quantizer.qparams().scale.flatten()
        step = scale if step is None else step * scale
    if step is not None and step.numel() > 1 and channels % step.numel() == 0:
        step = step.repeat(channels // step.numel())
    return step
