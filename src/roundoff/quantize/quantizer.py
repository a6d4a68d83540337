"""Quantizer: what one value or weight passes in a quantized model; biases of its sums."""

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
    """Fake quantization of one value, with the gradient straight through.

    With a ``scale`` it is static. A dynamic one chooses the scale from each tensor
    (``formats.choose_qparams``). Block formats always do, along the contracted axis, a
    last block that is not full completed with zeros.

    Attributes:
        name: a parameter ("fc.weight"), the site whose output it is ("body.0/add"), or an
            operand ("stem.0/conv2d:0").
        fmt: the format of the codes.
        operand: role and axes of the operand it stands before.
        granularity: which elements share a scale; ``None`` for block formats.
        dynamic: True where the scale is chosen from each tensor.
        scale, zero_point: buffers, of the granularity's shape (see
            ``formats.granularity``); ``None`` where there is none.
        exact: places along the contracted axis that stay in full precision beside the
            codes (``split_outliers_``), or None.
        sites: who reads the value through it.
        source: name of the quantizer whose scale it takes, where the value is a part of
            what a kernel writes through that one; or empty.
        observer, note: who chose the scale, and what it could not scale as it should
            (``Observer.degenerate``).
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
        self.name = name
        self.fmt = fmt
        self.operand = operand
        self.granularity = granularity
        self.sites = sites
        self.dynamic = dynamic or granularity is None or isinstance(fmt, BlockFormat)
        self.source = ""
        self.observer = ""
        self.note = ""
        self.register_buffer("scale", None)
        self.register_buffer("zero_point", None)
        self.register_buffer("exact", None)

    @property
    def weight(self) -> bool:
        """Return True if it stands before a weight."""
        return self.operand.role == "weight"

    def qparams(self) -> QParams:
        """Return scale and zero point.

        Raises ``QuantizationError`` where there are none, since nothing was observed.
        """
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
        """Take a scale and zero point; say who chose them, and what the range lacked."""
        zero_point = qparams.zero_point
        self.scale = qparams.scale.detach().clone()
        self.zero_point = None if zero_point is None else zero_point.detach().clone()
        self.granularity = qparams.granularity or self.granularity
        self.observer = observer
        self.note = note

    def forward(self, x: Tensor) -> Tensor:
        """Return ``x`` on the grid, in its shape and dtype.

        NaN stays NaN, what is out of range saturates.
        """
        if x.numel() == 0:
            return x
        if self.exact is None:
            return self._rounded(x)
        axis = self.operand.reduce
        exact = x.index_select(axis, self.exact)
        rounded = self._rounded(self.without_exact(x))
        return rounded.index_copy(axis, self.exact, exact)

    def without_exact(self, x: Tensor) -> Tensor:
        """Return what a scale is chosen from: zeros where full precision stays."""
        if self.exact is None:
            return x
        return x.index_fill(self.operand.reduce, self.exact, 0.0)

    def _rounded(self, x: Tensor) -> Tensor:
        if self.granularity is None or isinstance(self.fmt, BlockFormat):
            return straight(x, round_operand(x, self.operand, self.fmt))
        if not self.dynamic:
            return straight(x, fake_quantize(x, self.qparams(), self.fmt))
        # a token has one scale along its channels
        per_token = isinstance(self.granularity, PerToken)
        axis = self.operand.reduce if per_token else -1
        moved = x.detach().movedim(axis, -1)
        qparams = choose_qparams(moved, self.fmt, self.granularity)
        rounded = fake_quantize(moved, qparams, self.fmt)
        return straight(x, rounded.movedim(-1, axis))

    def codes(self, x: Tensor) -> Tensor:
        """Return the codes of ``x`` (int32), in its shape.

        The format has to be an integer one, with a scale.
        """
        return quantize(x, self.qparams(), self.fmt)

    def extra_repr(self) -> str:
        """Describe it for ``print(model)``."""
        shared = "blocks" if self.granularity is None else str(self.granularity)
        parts = [self.name, self.fmt.name, shared]
        if self.dynamic:
            parts.append("dynamic")
        return ", ".join(parts)

    def _load_from_state_dict(
        self, state_dict: Mapping[str, Any], prefix: str, *arguments: Any
    ) -> None:
        # of a fresh model they are None, which has no place to load into
        for name in ("scale", "zero_point"):
            if prefix + name in state_dict:
                setattr(self, name, state_dict[prefix + name].detach().clone())
        super()._load_from_state_dict(state_dict, prefix, *arguments)


def round_bias(bias: Tensor, quantizers: list[Quantizer]) -> Tensor:
    """Round a bias to the step of the integer sums that it is added to.

    That is the scale of the input times the scales of the weight, as ONNX Runtime has it
    for QLinearConv (bias of int32 with scale ``x_scale * w_scale``, zero point 0). Where
    a scale is neither per tensor nor per channel, or chosen while the model runs, the
    bias stays as it is.
    """
    step = sum_scale(quantizers, bias.shape[-1])
    if step is None:
        return bias
    codes = torch.round(bias.detach() / step).clamp_(-(2.0**31), 2.0**31 - 1)
    return straight(bias, (codes * step).to(bias.dtype))


def sum_scale(quantizers: list[Quantizer], channels: int) -> Tensor | None:
    """Return the step of the sums of a call's products.

    A number, or one for each output channel; None where there is none. A transposed
    convolution's weight has a scale for each channel of a group, which every group has.
    """
    weights = sum(quantizer.weight for quantizer in quantizers)
    if len(quantizers) != 2 or weights != 1:
        return None
    if not all(_has_sum_scale(quantizer) for quantizer in quantizers):
        return None
    first, second = (quantizer.qparams().scale.flatten() for quantizer in quantizers)
    step = first * second
    if step.numel() > 1 and channels % step.numel() == 0:
        step = step.repeat(channels // step.numel())
    return step


def _has_sum_scale(quantizer: Quantizer) -> bool:
    """Return True for static scales of whole tensors, or of a weight's channels."""
    if quantizer.dynamic or quantizer.scale is None:
        return False
    if quantizer.weight and isinstance(quantizer.granularity, PerAxis):
        return True
    return isinstance(quantizer.granularity, PerTensor)
