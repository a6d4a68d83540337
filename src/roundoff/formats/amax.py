"""Symmetric scales from the largest magnitude, at speed: what budgets round by the thousand.

The result is that of ``choose_qparams`` and ``fake_quantize``, bit for bit, in a quarter of the
calls to torch: for small tensors these cost more than the arithmetic.
"""

from __future__ import annotations

import math
from functools import lru_cache

import numpy as np
import torch
from torch import Tensor

from roundoff.formats.affine import scale_limits, usable
from roundoff.formats.granularity import Granularity
from roundoff.formats.rounding import round_values
from roundoff.formats.types import Format, RoundingMode

__all__ = ["round_by_amax"]

_TINY = torch.finfo(torch.float32).tiny


def round_by_amax(x: Tensor, fmt: Format, granularity: Granularity) -> Tensor | None:
    """Round fp32 ``x`` on the CPU with scales of its own; None where the general way is to be taken.

    So it is for other scales, dtypes and devices, for an empty tensor, and where a value is NaN or
    Inf. (On other devices reading a number waits, and dividing by a number is another operation.)
    """
    if not _is_plain(fmt) or not _is_cheap(x):
        return None
    shape, dims = granularity.split(x.shape)
    view = x.detach().reshape(shape)
    amax = view.abs().amax(dims, keepdim=True)
    scale = _one_scale(amax, fmt) if amax.numel() == 1 else _scales(amax, fmt)
    if scale is None:
        return None
    y = view / scale
    y = round_values(y, fmt, fmt.rounding, True, out=y)
    return y.mul_(scale).reshape(x.shape)


@lru_cache(maxsize=64)
def _is_plain(fmt: Format) -> bool:
    """Return True for a format with a zero, and symmetric scales from the largest magnitude."""
    draws = fmt.rounding is RoundingMode.STOCHASTIC
    return fmt.symmetric and fmt.scale_from == "amax" and fmt.has_zero and not draws


def _is_cheap(x: Tensor) -> bool:
    return x.dtype == torch.float32 and x.device.type == "cpu" and x.numel() > 0


def _one_scale(amax: Tensor, fmt: Format) -> float | None:
    """Return the scale of a whole tensor; None where that holds NaN or Inf."""
    largest = amax.item()
    if not math.isfinite(largest):
        return None
    target, limit = _limits(fmt)
    scale = min(np.float32(largest) / target, limit)
    return max(float(scale), _TINY) if scale > 0 else 1.0


def _scales(amax: Tensor, fmt: Format) -> Tensor | None:
    """Return a scale for each set of elements; None where one holds NaN or Inf."""
    if not math.isfinite(amax.max().item()):
        return None
    target, limit = _limits(fmt)
    scale = amax.div_(float(target)).clamp_(max=float(limit))
    if scale.min().item() >= _TINY:
        return scale
    return usable(scale)


@lru_cache(maxsize=64)
def _limits(fmt: Format) -> tuple[np.float32, np.float32]:
    """Return what the largest magnitude is scaled to, and the largest scale, in fp32."""
    target, limit = scale_limits(fmt, torch.float32)
    return np.float32(target), np.float32(limit)
