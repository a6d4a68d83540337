"""Outlier channel splitting (Zhao et al., arXiv:1901.09504).

The input channel with the largest weight is duplicated and both halves get half of its
weights (section 3), again and again, so that the largest weight falls.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from roundoff.errors import QuantizationError
from roundoff.formats import (
    Format,
    Granularity,
    PerToken,
    choose_qparams,
    fake_quantize,
)
from roundoff.quantize.weights.output_error import (
    Gain,
    check_matrices,
    output_db,
)


@dataclass(frozen=True)
class SplitChannels:
    """A weight with more input channels than before: ``y = weight @ x[..., index]``.

    Attributes:
        weight: ``[..., out, in + extra · taps]``, not rounded.
        index: ``[..., channels + extra]``, the channel that each new one reads; the
            first ones read themselves.
        gain: SQNR of the layer's output with min-max scales, before and after.
    """

    weight: Tensor
    index: Tensor
    gain: Gain


def split_channels(
    weight: Tensor,
    fmt: Format,
    granularity: Granularity | None = None,
    *,
    share: float = 0.02,
    taps: int = 1,
    hessian: Tensor | None = None,
    aware: bool = True,
) -> SplitChannels:
    """Split the input channels with the largest weights.

    With ``aware`` the halves are ``(w - Δ/2)/2`` and ``(w + Δ/2)/2`` (section 3.3,
    quantization-aware splitting), Δ the step of the row, so that both together round to
    what w rounds to; Δ is that of the weights as they are at that split (integers
    only). Otherwise both are ``w/2``, exact in floating point.

    Args:
        weight: ``[..., out, in]`` (``matrix_view``); every group gets as many new
            channels.
        fmt: the format that it will be rounded to.
        granularity: of the matrices; by default PerToken.
        share: new channels as a share of the old ones, rounded up; 0 changes nothing.
        taps: elements of ``in`` that belong to one channel (the size of a convolution's
            kernel), which lie together.
        hessian: ``[..., in, in]``; by default the identity: the gain is then that of
            the weights.
        aware: split by the step, see above.

    Raises:
        QuantizationError: NaN or Inf, shapes that do not fit, a negative share,
            ``taps`` that do not divide ``in``.

    Example:
        >>> from roundoff.formats import parse_format
        >>> weight, int4 = torch.tensor([[1.0, 8.0, -2.0]]), parse_format("int4")
        >>> split = split_channels(weight, int4, share=0.3, aware=False)
        >>> split.weight, split.index
        (tensor([[ 1.,  4., -2.,  4.]]), tensor([0, 1, 2, 1]))
    """
    check_matrices("split_channels", weight, hessian)
    if share < 0 or not math.isfinite(share) or taps < 1 or weight.shape[-1] % taps:
        raise QuantizationError(
            "these channels cannot be split",
            where="split_channels",
            expected="share ≥ 0 and taps that divide the last axis",
            got=f"share {share}, {taps} taps, shape {tuple(weight.shape)}",
        )
    granularity = granularity or PerToken()
    channels = weight.shape[-1] // taps
    split = weight.detach().unflatten(-1, (channels, taps))  # type: ignore[no-untyped-call]
    index = torch.arange(channels, device=weight.device)
    index = index.expand(*weight.shape[:-2], channels).contiguous()
    by_step = aware and fmt.one_quantum == 1.0
    for _ in range(math.ceil(share * channels)):
        largest = split.abs().amax((-1, -3)).argmax(-1, keepdim=True)  # [..., 1]
        place = largest[..., None, :, None].expand(*split.shape[:-2], 1, taps)
        channel = split.gather(-2, place)
        quarter_step: Tensor | float = 0.0
        if by_step:
            scale = choose_qparams(split.flatten(-2), fmt, PerToken()).scale
            quarter_step = scale[..., None] / 4
        lower_half = split.scatter(-2, place, channel / 2 - quarter_step)
        split = torch.cat([lower_half, channel / 2 + quarter_step], -2)
        index = torch.cat([index, index.gather(-1, largest)], -1)
    wide = split.flatten(-2)

    def rounded(x: Tensor) -> Tensor:
        return fake_quantize(x, choose_qparams(x, fmt, granularity), fmt)

    moments = hessian
    if moments is None:
        eye = torch.eye(weight.shape[-1], dtype=weight.dtype, device=weight.device)
        moments = eye.expand(*weight.shape[:-2], *eye.shape)
    merged = merge_channels(rounded(wide), index, channels, taps)
    gain = Gain(
        "channel splitting",
        output_db(rounded(weight), weight, moments),
        output_db(merged, weight, moments),
    )
    return SplitChannels(wide, index, gain)


def merge_channels(
    weight: Tensor, index: Tensor, channels: int, taps: int = 1
) -> Tensor:
    """The weight over the old channels that gives the same output.

    Columns that read the same channel are added up.

    >>> weight, index = torch.tensor([[1.0, 4.0, -2.0, 4.0]]), torch.tensor([0, 1, 2, 1])
    >>> merge_channels(weight, index, channels=3)
    tensor([[ 1.,  8., -2.]])
    """
    rows = weight.reshape(*weight.shape[:-1], index.shape[-1], taps)
    total = rows.new_zeros(*rows.shape[:-2], channels, taps)
    place = index[..., None, :, None].expand(rows.shape)
    return total.scatter_add_(-2, place, rows).flatten(-2)
