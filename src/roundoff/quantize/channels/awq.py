"""AWQ: weights of channels with large activations are scaled up, and clipped.

Lin et al., arXiv:2306.00978: ``s = s_X^α`` with s_X the mean magnitude of each input
channel and α from a grid over [0, 1] (equation 5), so that
``L(s) = |Q(W diag(s)) diag(s)⁻¹ X - W X|`` is least (equation 4). The squared loss is
``tr(Δ H Δᵀ)``, ``Δ = Q(W diag(s)) diag(s)⁻¹ - W``, so it needs second moments and no
data.
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
    """Factors of an activation's channels, and its readers' weights rounded with them.

    Attributes:
        factors: ``[channels]``; divide the activation by them.
        strength: α.
        weights: of each reader, times the factors, rounded.
        qparams: of each reader's weight.
        gain: SQNR of the outputs.
    """

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
    """The factors on a grid of α with the least output error of all readers.

    ``s = s_X^α / sqrt(max s · min s)``; α = 0, that is no factors, is on the grid, so
    the loss never rises. Channels that are always zero have factor 1. With ``clip`` the
    ranges are searched too, by ``clip_search``, after the factors.

    Args:
        readers: for each operator its matrices ``[groups, out, in]`` (``matrix_view``)
            and the second moments of its inputs ``[groups, in, in]``
            (``Hessian.matrix``).
        activation: s_X, the mean magnitude of each channel, ``[channels]``. Operators
            with taps have ``groups · in = channels · taps``, the taps of a channel
            together.
        fmt: of the weights.
        granularity: of the matrices; by default PerToken, a scale for each output
            channel.
        grid: how many values of α in [0, 1).
        clip: shares of the range that are tried, as (0.95, 0.9, …); none: no clipping.

    Returns:
        With the gain: SQNR in dB of the operators' outputs together, rounded to nearest
        in their min-max ranges before.

    Raises:
        QuantizationError: NaN, Inf or negative magnitudes, no readers, or shapes that
            do not fit.

    Example:
        >>> from roundoff.formats import parse_format
        >>> torch.manual_seed(0)
        <torch...>
        >>> x = torch.randn(200, 32) * torch.linspace(0, 4, 32).exp()
        >>> readers = [(torch.randn(1, 8, 32), x.T @ x / 200)]
        >>> scaled = awq(readers, x.abs().mean(0), parse_format("int4"))
        >>> scaled.gain.db > 1, scaled.strength > 0
        (True, True)
    """
    _check_awq(readers, activation, grid)
    granularity = granularity or PerToken()
    signal = 0.0
    for weight, hessian in readers:
        signal += float(quadratic(weight, hessian).double().sum())

    def loss(factors: Tensor) -> float:
        """Output error of all operators, in their min-max ranges."""
        total = 0.0
        for weight, hessian in readers:
            wide = _wide(factors, weight)
            scaled = weight * wide
            qparams = choose_qparams(scaled, fmt, granularity)
            rounded = fake_quantize(scaled, qparams, fmt)
            total += float(quadratic(rounded / wide - weight, hessian).double().sum())
        return total

    losses = [loss(_factors(activation, i / grid)) for i in range(grid)]
    strength = min(range(grid), key=losses.__getitem__) / grid
    factors = _factors(activation, strength)
    clipped = []
    final_loss = 0.0
    for weight, hessian in readers:
        wide = _wide(factors, weight)
        moments = hessian / (wide * wide.mT)  # of the inputs divided by the factors
        scaled = weight * wide
        repaired = clip_search(scaled, moments, fmt, granularity, ratios=clip)
        clipped.append(repaired)
        error = quadratic(repaired.weight - scaled, moments)
        final_loss += float(error.double().sum())
    before = relative_db(losses[0], signal)
    return Awq(
        factors,
        strength,
        [repaired.weight for repaired in clipped],
        [repaired.qparams for repaired in clipped],
        Gain("awq", before, relative_db(final_loss, signal)),
    )


def _check_awq(
    readers: Sequence[tuple[Tensor, Tensor]], activation: Tensor, grid: int
) -> None:
    check_finite("awq", activation=activation)
    magnitudes = activation.dim() == 1 and not bool((activation < 0).any())
    if not readers or grid < 1 or not magnitudes:
        raise QuantizationError(
            "nothing to scale",
            where="awq",
            expected="readers, magnitudes ≥ 0 of shape [channels], and grid ≥ 1",
            got=f"{len(readers)} readers, shape {tuple(activation.shape)}, grid {grid}",
        )
    channels = len(activation)
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


def _factors(activation: Tensor, strength: float) -> Tensor:
    """``s_X^α`` with geometric middle 1, and 1 for channels without activation."""
    alive = activation > 0
    if not bool(alive.any()):
        return torch.ones_like(activation)
    powered = torch.where(alive, activation.double(), 1.0) ** strength
    middle = (powered[alive].amax() * powered[alive].amin()).sqrt()
    factors = torch.where(alive, powered / middle, 1.0)
    return factors.clamp_(2.0**-60, 2.0**60).to(activation.dtype)


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
    """Clip the ranges of weights where that lowers the layer's output error.

    AWQ, section 3.2's weight clipping. Each set's range times each ratio is tried, and
    the one with the least ``Δ H Δᵀ`` over the set's own inputs kept: over the whole row
    for one scale per output channel, over the group's block of H for groups. With one
    scale per row this is the scale search under the full Hessian.

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
    size = _set_size(weight, granularity)
    w = weight.detach().to(working_dtype(weight))
    h = hessian.detach().to(working_dtype(weight))
    sets = (*w.shape[:-1], w.shape[-1] // size, size)
    blocks = h.reshape(*h.shape[:-2], sets[-2], size, sets[-2], size)
    blocks = blocks.diagonal(dim1=-4, dim2=-2).movedim(-1, -3)
    unclipped = choose_qparams(w, fmt, granularity)
    scale = unclipped.scale
    zero_point = unclipped.zero_point

    def loss(qparams: QParams) -> Tensor:
        """Of each set, in the shape of the scales."""
        error = (fake_quantize(w, qparams, fmt) - w).reshape(sets)
        error = error.transpose(-2, -3)  # [..., sets, out, size]
        return quadratic(error, blocks).mT.reshape(unclipped.scale.shape)

    least = loss(unclipped)
    view = w.reshape(granularity.split(w.shape)[0])
    low = view.amin(-1, keepdim=True)
    high = view.amax(-1, keepdim=True)
    for ratio in ratios:
        clipped = view.clamp(low * ratio, high * ratio).reshape(w.shape)
        qparams = choose_qparams(clipped, fmt, granularity)
        losses = loss(qparams)
        better = losses < least
        least = torch.where(better, losses, least)
        scale = torch.where(better, qparams.scale, scale)
        if zero_point is not None and qparams.zero_point is not None:
            zero_point = torch.where(better, qparams.zero_point, zero_point)
    best = QParams(scale, zero_point, granularity)
    rounded = fake_quantize(w, best, fmt)
    before = output_db(fake_quantize(w, unclipped, fmt), w, h)
    gain = Gain("clipping", before, output_db(rounded, w, h))
    return Repaired(rounded.to(weight.dtype), best, gain)


def _set_size(weight: Tensor, granularity: Granularity) -> int:
    """How many inputs of a row share a scale."""
    if isinstance(granularity, PerToken):
        return weight.shape[-1]
    last = (-1, weight.dim() - 1)
    if isinstance(granularity, PerGroup) and granularity.axis in last:
        return granularity.group_size
    raise QuantizationError(
        "ranges cannot be clipped with this granularity",
        where="clip_search",
        expected="PerToken or PerGroup along the last axis",
        got=str(granularity),
        do="use search_scales",
    )
