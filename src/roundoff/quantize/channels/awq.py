"""AWQ: input channels that carry large activations are scaled up before their weights are rounded, and clipped ranges.

Lin et al., arXiv:2306.00978: ``s = s_X^α`` with s_X the mean magnitude of each input channel and α from a grid over [0, 1]
(equation 5), so that ``L(s) = |Q(W diag(s)) diag(s)⁻¹ X - W X|`` is least (equation 4). The squared loss is
``tr(Δ H Δᵀ)``, ``Δ = Q(W diag(s)) diag(s)⁻¹ - W``, so it needs second moments and no data.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from roundoff.errors import QuantizationError
from roundoff.formats import (
    Format,
    Granularity,
    PerGroup,
    PerToken,
    QParams,
    choose_qparams,
    fake_quantize,
    working_dtype,
)
from roundoff.quantize.weights.output_error import (
    Gain,
    Repaired,
    check_finite,
    check_matrices,
    output_db,
    quadratic,
    relative_db,
)


@dataclass(frozen=True)
class Awq:
    """Factors ``[channels]`` (divide the activation by them), and the weights times the factors, rounded, with qparams."""

    factors: Tensor
    strength: float
    weights: list[Tensor]
    qparams: list[QParams]
    gain: Gain


def awq(
    readers: Sequence[tuple[Tensor, Tensor]],
    activation: Tensor,
    fmt: Format,
    granularity: Granularity | None = None,
    *,
    grid: int = 20,
    clip: Sequence[float] = (),
) -> Awq:
    """The factors on a grid of α with the least output error of all operators that read one activation.

    ``s = s_X^α / sqrt(max s · min s)``; α = 0, that is no factors, is on the grid, so the loss never rises. Channels that
    are always zero have factor 1. With ``clip`` the ranges are searched too, by ``clip_search``, after the factors.

    Args:
        readers: for each operator its matrices ``[groups, out, in]`` (``matrix_view``) and the second moments of its inputs
            ``[groups, in, in]`` (``Hessian.matrix``).
        activation: s_X, the mean magnitude of each channel, ``[channels]``. Operators with taps have
            ``groups · in = channels · taps``, the taps of a channel together.
        fmt: of the weights.
        granularity: of the matrices; by default PerToken, a scale for each output channel.
        grid: how many values of α in [0, 1).
        clip: shares of the range that are tried, as (0.95, 0.9, …); none: no clipping.

    Returns:
        With the gain: SQNR in dB of the operators' outputs together, rounded to nearest in their min-max ranges before.

    Raises:
        QuantizationError: NaN, Inf or negative magnitudes, no readers, or shapes that do not fit.

    Example:
        >>> from roundoff.formats import parse_format
        >>> torch.manual_seed(0)
        <torch...>
        >>> x = torch.randn(200, 32) * torch.linspace(0, 4, 32).exp()
        >>> weight = torch.randn(1, 8, 32)
        >>> found = awq([(weight, x.T @ x / 200)], x.abs().mean(0), parse_format("int4"))
        >>> found.gain.db > 1, found.strength > 0
        (True, True)
    """
    check_finite("awq", activation=activation)
    granularity = granularity or PerToken()
    if not readers or grid < 1 or activation.dim() != 1 or bool((activation < 0).any()):
        raise QuantizationError(
            "nothing to scale",
            where="awq",
            expected="readers, magnitudes ≥ 0 of shape [channels], and grid ≥ 1",
            got=f"{len(readers)} readers, shape {tuple(activation.shape)}, grid {grid}",
        )
    channels = len(activation)
    signal = 0.0
    for weight, hessian in readers:
        check_matrices("awq", weight, hessian)
        if weight.dim() != 3 or weight.shape[0] * weight.shape[2] % channels:
            raise QuantizationError(
                "the weight does not fit the activation",
                where="awq",
                expected=f"matrices [groups, out, in] with groups · in a multiple of {channels} channels",
                got=f"shape {tuple(weight.shape)}",
                do="see matrix_view",
            )
        signal += float(quadratic(weight, hessian).double().sum())

    def loss(factors: Tensor) -> float:
        """Of all operators, in their min-max ranges."""
        total = 0.0
        for weight, hessian in readers:
            wide = _wide(factors, weight)
            scaled = weight * wide
            rounded = fake_quantize(
                scaled, choose_qparams(scaled, fmt, granularity), fmt
            )
            total += float(quadratic(rounded / wide - weight, hessian).double().sum())
        return total

    losses = [loss(_factors(activation, i / grid)) for i in range(grid)]
    first, strength = losses[0], min(range(grid), key=losses.__getitem__) / grid
    factors = _factors(activation, strength)
    weights, qparams, after = [], [], 0.0
    for weight, hessian in readers:
        wide = _wide(factors, weight)
        moments = hessian / (wide * wide.mT)  # of the inputs divided by the factors
        found = clip_search(weight * wide, moments, fmt, granularity, ratios=clip)
        weights.append(found.weight)
        qparams.append(found.qparams)
        after += float(quadratic(found.weight - weight * wide, moments).double().sum())
    return Awq(
        factors,
        strength,
        weights,
        qparams,
        Gain("awq", relative_db(first, signal), relative_db(after, signal)),
    )


def _factors(activation: Tensor, strength: float) -> Tensor:
    """``s_X^α`` brought to geometric middle 1, and 1 for channels without activation."""
    alive = activation > 0
    if not bool(alive.any()):
        return torch.ones_like(activation)
    powered = torch.where(alive, activation.double(), 1.0) ** strength
    middle = (powered[alive].amax() * powered[alive].amin()).sqrt()
    return (
        torch.where(alive, powered / middle, 1.0)
        .clamp_(2.0**-60, 2.0**60)
        .to(activation.dtype)
    )


def _wide(factors: Tensor, weight: Tensor) -> Tensor:
    """The factors of each element of ``in``: ``[groups, 1, in]``."""
    taps = weight.shape[0] * weight.shape[2] // len(factors)
    return factors.to(weight)[:, None].expand(-1, taps).reshape(weight.shape[0], 1, -1)


def clip_search(
    weight: Tensor,
    hessian: Tensor,
    fmt: Format,
    granularity: Granularity | None = None,
    *,
    ratios: Sequence[float] = (0.95, 0.9, 0.85, 0.8, 0.75, 0.7, 0.65, 0.6, 0.55, 0.5),
) -> Repaired:
    """Ranges of the weights clipped where that lowers the layer's output error (AWQ, section 3.2's weight clipping).

    Each set's range times each ratio is tried, and the one with the least ``Δ H Δᵀ`` over the set's own inputs kept: over
    the whole row for one scale per output channel, over the group's block of H for groups. With one scale per row this
    is the scale search under the full Hessian.

    Args:
        weight: ``[..., out, in]``.
        hessian: ``[..., in, in]``.
        fmt: of the weights.
        granularity: PerToken (the default) or PerGroup along the last axis.
        ratios: shares of the range; 1 is always tried first.

    Raises:
        QuantizationError: NaN or Inf, shapes that do not fit, or another granularity.
    """
    check_matrices("clip_search", weight, hessian)
    granularity = granularity or PerToken()
    size = weight.shape[-1]
    if isinstance(granularity, PerGroup) and granularity.axis in (-1, weight.dim() - 1):
        size = granularity.group_size
    elif not isinstance(granularity, PerToken):
        raise QuantizationError(
            "ranges cannot be clipped with this granularity",
            where="clip_search",
            expected="PerToken or PerGroup along the last axis",
            got=str(granularity),
            do="use search_scales",
        )
    w, h = (
        weight.detach().to(working_dtype(weight)),
        hessian.detach().to(working_dtype(weight)),
    )
    sets = (*w.shape[:-1], w.shape[-1] // size, size)
    split = granularity.split(w.shape)[0]
    blocks = (
        h.reshape(*h.shape[:-2], sets[-2], size, sets[-2], size)
        .diagonal(dim1=-4, dim2=-2)
        .movedim(-1, -3)
    )
    best = choose_qparams(w, fmt, granularity)
    scale, zero_point = best.scale, best.zero_point

    def loss(q: QParams) -> Tensor:
        """Of each set, in the shape of the scales."""
        off = (
            (fake_quantize(w, q, fmt) - w).reshape(sets).transpose(-2, -3)
        )  # [..., sets, out, size]
        return quadratic(off, blocks).mT.reshape(scale.shape)

    least = loss(best)
    low = w.reshape(split).amin(-1, keepdim=True)
    high = w.reshape(split).amax(-1, keepdim=True)
    for ratio in ratios:
        clipped = w.reshape(split).clamp(low * ratio, high * ratio).reshape(w.shape)
        q = choose_qparams(clipped, fmt, granularity)
        now = loss(q)
        better = now < least
        least = torch.where(better, now, least)
        scale = torch.where(better, q.scale, scale)
        if zero_point is not None and q.zero_point is not None:
            zero_point = torch.where(better, q.zero_point, zero_point)
    kept = QParams(scale, zero_point, granularity)
    found = fake_quantize(w, kept, fmt)
    gain = Gain(
        "clipping", output_db(fake_quantize(w, best, fmt), w, h), output_db(found, w, h)
    )
    return Repaired(found.to(weight.dtype), kept, gain)
