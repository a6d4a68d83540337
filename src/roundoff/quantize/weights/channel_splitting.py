"""Outliers taken apart: channels split in two, or input columns kept in high precision beside a low-precision rest."""

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
    check_finite,
    check_matrices,
    output_db,
)


@dataclass(frozen=True)
class Split:
    """A weight with more input channels than before: ``y = weight @ x[..., index]``.

    Attributes:
        weight: ``[..., out, in + extra · taps]``, not rounded.
        index: ``[..., channels + extra]``, the channel that each new one reads; the first ones read themselves.
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
) -> Split:
    """Outlier channel splitting (Zhao et al., arXiv:1901.09504, section 3): the input channel with the largest weight is
    duplicated and both halves get half of its weights, again and again, so that the largest weight falls.

    With ``aware`` the halves are ``(w - Δ/2)/2`` and ``(w + Δ/2)/2`` (section 3.3, quantization-aware splitting), Δ the
    step of the row, so that both together round to what w rounds to; Δ is that of the weights as they are at that
    split (integers only). Otherwise both are ``w/2``, exact in floating point.

    Args:
        weight: ``[..., out, in]`` (``matrix_view``); every group gets as many new channels.
        fmt: the format that it will be rounded to.
        granularity: of the matrices; by default PerToken.
        share: new channels as a share of the old ones, rounded up; 0 changes nothing.
        taps: elements of ``in`` that belong to one channel (the size of a convolution's kernel), which lie together.
        hessian: ``[..., in, in]``; by default the identity: the gain is then that of the weights.
        aware: see above.

    Raises:
        QuantizationError: NaN or Inf, shapes that do not fit, a negative share, ``taps`` that do not divide ``in``.

    Example:
        >>> from roundoff.formats import parse_format
        >>> found = split_channels(torch.tensor([[1.0, 8.0, -2.0]]), parse_format("int4"), share=0.3, aware=False)
        >>> found.weight, found.index
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
    index = (
        torch.arange(channels, device=weight.device)
        .expand(*weight.shape[:-2], channels)
        .contiguous()
    )
    for _ in range(math.ceil(share * channels)):
        at = split.abs().amax((-1, -3)).argmax(-1, keepdim=True)  # [..., 1]
        place = at[..., None, :, None].expand(*split.shape[:-2], 1, taps)
        chosen = split.gather(-2, place)
        apart: Tensor | float = 0.0
        if aware and fmt.one_quantum == 1.0:
            apart = (
                choose_qparams(split.flatten(-2), fmt, PerToken()).scale[..., None] / 4
            )
        split = torch.cat(
            [split.scatter(-2, place, chosen / 2 - apart), chosen / 2 + apart], -2
        )
        index = torch.cat([index, index.gather(-1, at)], -1)
    found = split.flatten(-2)

    def rounded(x: Tensor) -> Tensor:
        return fake_quantize(x, choose_qparams(x, fmt, granularity), fmt)

    eye = torch.eye(weight.shape[-1], dtype=weight.dtype, device=weight.device)
    moments = eye.expand(*weight.shape[:-2], *eye.shape) if hessian is None else hessian
    merged = merge_channels(rounded(found), index, channels, taps)
    gain = Gain(
        "channel splitting",
        output_db(rounded(weight), weight, moments),
        output_db(merged, weight, moments),
    )
    return Split(found, index, gain)


def merge_channels(
    weight: Tensor, index: Tensor, channels: int, taps: int = 1
) -> Tensor:
    """The weight over the old channels that gives the same output: columns that read the same channel added up.

    >>> merge_channels(torch.tensor([[1.0, 4.0, -2.0, 4.0]]), torch.tensor([0, 1, 2, 1]), channels=3)
    tensor([[ 1.,  8., -2.]])
    """
    rows = weight.reshape(*weight.shape[:-1], index.shape[-1], taps)
    total = rows.new_zeros(*rows.shape[:-2], channels, taps)
    place = index[..., None, :, None].expand(rows.shape)
    return total.scatter_add_(-2, place, rows).flatten(-2)


@dataclass(frozen=True)
class Mixed:
    """``W x = low x + high x[..., columns]``: a rounded weight with zeros in the columns that stay exact.

    Attributes:
        low: ``[out, in]``, on the grid of ``scale``, zero in ``columns``.
        high: ``[out, k]``, the columns as they were.
        columns: ``[k]``, ascending.
        gain: SQNR of the layer's output, all columns rounded before.
    """

    low: Tensor
    high: Tensor
    columns: Tensor
    gain: Gain


def mixed_precision(
    weight: Tensor,
    activation: Tensor,
    fmt: Format,
    granularity: Granularity | None = None,
    *,
    threshold: float = 6.0,
    hessian: Tensor | None = None,
) -> Mixed:
    """Columns whose activations reach a threshold stay in high precision (LLM.int8(), Dettmers et al., arXiv:2208.07339).

    Equation 8 there (section 3.2): ``Σ_{h ∈ O} x_h w_h + s Σ_{h ∉ O} x̂_h ŵ_h`` with ``O = {h : max|x_h| ≥ α}``. The
    scales of the rest are chosen without these columns. None or all columns may be chosen.

    Args:
        weight: ``[out, in]``.
        activation: largest magnitude of each input, ``[in]``.
        fmt: of the rest.
        granularity: of the rest; by default PerToken, a scale for each output.
        threshold: α; 6.0 in the paper.
        hessian: ``[in, in]``, for the gain; by default each input has its activation's power.

    Raises:
        QuantizationError: NaN or Inf, or shapes that do not fit.

    Example:
        >>> from roundoff.formats import parse_format
        >>> weight, amax = torch.tensor([[1.0, 50.0, -2.0]]), torch.tensor([1.0, 20.0, 3.0])
        >>> found = mixed_precision(weight, amax, parse_format("int8"))
        >>> found.columns, found.high, found.low[0, 1]
        (tensor([1]), tensor([[50.]]), tensor(0.))
    """
    check_matrices("mixed_precision", weight, hessian)
    check_finite("mixed_precision", activation=activation)
    if weight.dim() != 2 or activation.shape != weight.shape[-1:]:
        raise QuantizationError(
            "the activation does not fit the weight",
            where="mixed_precision",
            expected="a weight [out, in] and magnitudes [in]",
            got=f"{tuple(weight.shape)} and {tuple(activation.shape)}",
        )
    granularity = granularity or PerToken()
    kept = activation.abs() >= threshold
    w = weight.detach()
    rest = w.masked_fill(kept, 0.0)
    low = fake_quantize(rest, choose_qparams(rest, fmt, granularity), fmt).masked_fill_(
        kept, 0.0
    )
    columns = kept.nonzero().flatten()
    high = w.index_select(-1, columns)
    moments = torch.diag(activation.to(w).square()) if hessian is None else hessian
    everything = fake_quantize(w, choose_qparams(w, fmt, granularity), fmt)
    mixed = low.index_add(-1, columns, high)
    note = f"{len(columns)} of {w.shape[-1]} columns in high precision"
    gain = Gain(
        "mixed precision",
        output_db(everything, w, moments),
        output_db(mixed, w, moments),
        note,
    )
    return Mixed(low, high, columns, gain)
