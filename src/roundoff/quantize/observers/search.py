"""Which range loses least: all candidates at once, over the bins of a histogram."""

from __future__ import annotations

import torch
from torch import Tensor

from roundoff.formats import Format, PerAxis, QParams, choose_qparams, fake_quantize
from roundoff.quantize.observers.histogram import Bins

__all__ = ["losses", "pick", "range_qparams", "search"]

#: elements of a working tensor: fp64 of this size stay in the cache
CHUNK = 1 << 17


def range_qparams(
    low: Tensor, high: Tensor, fmt: Format, dtype: torch.dtype
) -> QParams:
    """The qparams of ranges of any shape: scale and zero point have that shape, and no
    granularity.
    """
    bounds = torch.stack([low, high], -1).to(dtype)
    chosen = choose_qparams(bounds.reshape(-1, 2), fmt, PerAxis(0))
    zero_point = chosen.zero_point
    return QParams(
        chosen.scale.reshape(low.shape),
        None if zero_point is None else zero_point.reshape(low.shape),
    )


def losses(
    bins: Bins,
    low: Tensor,
    high: Tensor,
    fmt: Format,
    dtype: torch.dtype = torch.float32,
) -> Tensor:
    """Σ weight (x - x̂)² for candidate ranges ``low``, ``high`` of shape (sets,
    candidates), in fp64 of that shape.

    x̂ is what the format gives with the scale and zero point of the range, both as
    rounded as they will be used. Integer formats: the integral over each bin's uniform
    density in closed form. With ``u = x / scale`` and ``n`` the integer it is rounded
    and clamped to, ``∫ (t - n(t))² dt = n / 12 + (u - n)³ / 3`` from 0 to u, also where
    u is clipped, since the function is continuous. Other formats: two points for each
    bin that have its mean and variance.
    """
    qparams = range_qparams(low, high, fmt, dtype)
    integral = fmt.one_quantum == 1.0 and fmt.has_zero
    step = max(CHUNK // bins.mean.numel(), 1)
    parts = []
    for at in range(0, low.shape[1], step):
        scale = qparams.scale[:, at : at + step].double().unsqueeze(-1)
        point = qparams.zero_point
        zero_point = (
            torch.zeros_like(scale)
            if point is None
            else point[:, at : at + step].double().unsqueeze(-1)
        )
        parts.append(
            _uniform(bins, scale, zero_point, fmt)
            if integral
            else _two_points(bins, scale, fmt)
        )
    return torch.cat(parts, 1)


def _uniform(bins: Bins, scale: Tensor, zero_point: Tensor, fmt: Format) -> Tensor:
    lowest = fmt.min_finite - zero_point
    highest = fmt.max_finite - zero_point
    mean = bins.mean.unsqueeze(1) / scale
    # No narrower than what the difference below can resolve; adds less than 1e-12 scale².
    half = (bins.half.unsqueeze(1) / scale).clamp_(min=1e-6)
    upper = mean + half
    lower = mean.sub_(half)
    n = upper.round().clamp_(lowest, highest)
    m = lower.round().clamp_(lowest, highest)
    upper.sub_(n)
    lower.sub_(m)
    crossed = n.sub_(m)  # how many integers lie between
    # With A = u - n at the upper and B at the lower end of the bin, (A³ - B³) / 3 = (A
    # - B) (A² + AB + B²) / 3 and A - B = 2 half - crossed: where nothing is crossed, no
    # large numbers cancel.
    square = (upper + lower).mul_(upper).addcmul_(lower, lower).div_(3.0)
    error = crossed.mul_(1.0 / 12.0 - square).div_(half.mul_(2.0)).add_(square)
    return torch.einsum("scb,sb->sc", error, bins.weight).mul_(scale[..., 0] ** 2)


def _two_points(bins: Bins, scale: Tensor, fmt: Format) -> Tensor:
    sigma = bins.half * 3.0**-0.5
    total = torch.zeros(scale.shape[:2], dtype=scale.dtype, device=scale.device)
    for x in (bins.mean - sigma, bins.mean + sigma):
        x = x.unsqueeze(1).expand(-1, scale.shape[1], -1)
        error = fake_quantize(x, QParams(scale), fmt).sub_(x)
        total += torch.einsum("scb,sb->sc", error.square_(), bins.weight)
    return total / 2.0


def pick(loss: Tensor, *values: Tensor) -> list[Tensor]:
    """For each set, the values (sets, candidates) of the candidate of least loss; the
    first of equals. (sets,) each.
    """
    best = loss.argmin(1, keepdim=True)
    return [v.gather(1, best).squeeze(1) for v in values]


def search(
    bins: Bins,
    low: Tensor,
    high: Tensor,
    fmt: Format,
    dtype: torch.dtype = torch.float32,
) -> tuple[Tensor, Tensor]:
    """The range of least loss, starting from the extremes ``low``, ``high`` (sets,).

    First a common bound on the magnitude, from 1.4 amax down to amax / 1024 in steps of
    1/8 octave; then, each side that is not 0 on its own, in ever smaller steps around
    the best, down to 0.5 %. Symmetric formats: one bound all the way, with the closer
    look at the four best places. Where nothing has weight, the extremes.
    """
    if fmt.symmetric:
        ends = _symmetric(bins, torch.maximum(-low, high), fmt, dtype)
    else:
        ends = _two_sided(bins, low.clamp(max=0.0), high.clamp(min=0.0), fmt, dtype)
    some = bins.weight.sum(1) > 0
    return torch.where(some, ends[0], low), torch.where(some, ends[1], high)


def _octaves(first: float, last: float, count: int, like: Tensor) -> Tensor:
    """``count`` powers of two from 2**first to 2**last, in steps of one factor."""
    return torch.exp2(
        torch.linspace(first, last, count, dtype=torch.float64, device=like.device)
    )


def _symmetric(
    bins: Bins, amax: Tensor, fmt: Format, dtype: torch.dtype
) -> tuple[Tensor, Tensor]:
    bound = amax[:, None] * _octaves(0.5, -10.0, 85, amax)
    # The error of the largest values makes the loss of floats ragged: four places are
    # worth a closer look.
    best = losses(bins, -bound, bound, fmt, dtype).topk(4, dim=1, largest=False).indices
    bound = bound.gather(1, best)
    for octaves in (0.0625, 0.01):
        bound = (bound[..., None] * _octaves(-octaves, octaves, 17, amax)).flatten(1)
        (bound,) = (
            part[:, None]
            for part in pick(losses(bins, -bound, bound, fmt, dtype), bound)
        )
    return -bound[:, 0], bound[:, 0]


def _two_sided(
    bins: Bins, low: Tensor, high: Tensor, fmt: Format, dtype: torch.dtype
) -> tuple[Tensor, Tensor]:
    factors = _octaves(0.5, -10.0, 85, low)
    bound = torch.maximum(-low, high)[:, None] * factors
    # A common bound on the magnitude; above the extremes, both are stretched.
    lows = torch.maximum(low[:, None] * factors.clamp(min=1.0), -bound)
    highs = torch.minimum(high[:, None] * factors.clamp(min=1.0), bound)
    low, high = pick(losses(bins, lows, highs, fmt, dtype), lows, highs)
    for octaves in (2.0, 0.25, 0.05):
        factors = _octaves(-octaves, octaves, 21, low)
        if bool(high.any()):
            highs = high[:, None] * factors
            lows = low[:, None].expand(-1, 21)
            (high,) = pick(losses(bins, lows, highs, fmt, dtype), highs)
        if bool(low.any()):
            highs = high[:, None].expand(-1, 21)
            lows = low[:, None] * factors
            (low,) = pick(losses(bins, lows, highs, fmt, dtype), lows)
    return low, high
