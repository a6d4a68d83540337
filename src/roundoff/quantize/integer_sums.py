"""Integer sums: the step that a call's products are added in, and biases rounded to it."""

from __future__ import annotations

import torch
from torch import Tensor

from roundoff.formats import PerAxis, PerTensor
from roundoff.quantize.quantizer import Quantizer
from roundoff.train import straight


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
