"""Symmetric scales from the largest magnitude, at speed: what budgets round by the thousand.

The result is that of ``choose_qparams`` and ``fake_quantize``, bit for bit, in a quarter of the
calls to torch: for small tensors these cost more than the arithmetic.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from functools import lru_cache

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from roundoff.formats.affine import scale_limits, usable
from roundoff.formats.granularity import Granularity
from roundoff.formats.rounding import round_values
from roundoff.formats.types import Format, RoundingMode

__all__ = ["round_by_amax"]

#: Elements up to which numpy takes less time, because each of its calls costs less.
SMALL = 2**16
_EXPONENT = np.int32(0x7F800000)
_TINY = torch.finfo(torch.float32).tiny


def round_by_amax(x: Tensor, fmt: Format, granularity: Granularity) -> Tensor | None:
    """Round fp32 ``x`` on the CPU with scales of its own; None where the general way is to be taken.

    So it is for other scales, dtypes and devices, for an empty tensor, and where a value is NaN or
    Inf. (On other devices reading a number waits, and dividing by a number is another operation.)
    """
    if not _is_plain(fmt) or not _is_cheap(x):
        return None
    shape, dims = granularity.split(x.shape)
    if x.numel() <= SMALL and _has_one_step(fmt):
        return _round_small(x, fmt, shape, dims)
    view = x.detach().reshape(shape)
    amax = view.abs().amax(dims, keepdim=True)
    scale = _one_scale(amax, fmt) if amax.numel() == 1 else _scales(amax, fmt)
    if scale is None:
        return None
    y = view / scale
    y = round_values(y, fmt, fmt.rounding, True, out=y)
    return y.mul_(scale).reshape(x.shape)


@lru_cache(maxsize=64)
def _has_one_step(fmt: Format) -> bool:
    """Return True where ``_to_grid`` knows the distances between values."""
    is_nearest = fmt.rounding is RoundingMode.NEAREST_EVEN
    is_regular = fmt.has_subnormals or not fmt.fraction_bits
    is_narrow = fmt.emin >= -126 and fmt.emax <= 127 and fmt.fraction_bits < 23
    return is_nearest and is_regular and is_narrow and not fmt.taper


def _round_small(
    x: Tensor, fmt: Format, shape: Sequence[int], dims: tuple[int, ...]
) -> Tensor | None:
    """Round with numpy, the same operations in the same order; None at NaN and Inf."""
    values = x.detach().numpy().reshape(shape)
    magnitudes = np.abs(values)
    scale: np.float32 | NDArray[np.float32]
    if len(dims) == len(shape):
        largest = magnitudes.max()
        if not math.isfinite(largest):
            return None
        scale = _scale_of(largest, fmt)
    else:
        amax = magnitudes.max(axis=dims, keepdims=True)
        if not math.isfinite(amax.max()):
            return None
        target, limit = _limits(fmt)
        scales = np.minimum(amax / target, limit)
        usable_scales = np.maximum(scales, np.float32(_TINY))
        scale = np.where(scales > 0, usable_scales, np.float32(1.0))
    rounded = np.divide(values, scale, out=magnitudes)
    _to_grid(rounded, fmt)
    rounded *= scale
    return torch.from_numpy(rounded.reshape(x.shape))


def _to_grid(values: NDArray[np.float32], fmt: Format) -> None:
    """Round finite values in place to those of a format that saturates."""
    step = fmt.one_quantum
    quantum: np.float32 | NDArray[np.float32]
    if step is None:
        power = (values.view(np.int32) & _EXPONENT).view(np.float32)
        quantum = np.clip(power, *_normal_powers(fmt), out=power)
        quantum *= np.float32(math.ldexp(1.0, -fmt.fraction_bits))
    else:
        quantum = np.float32(step)
    if step != 1.0:
        values /= quantum
    np.rint(values, out=values)
    if step != 1.0:
        values *= quantum
    low, high = _range(fmt)
    np.clip(values, low, high, out=values)


@lru_cache(maxsize=64)
def _normal_powers(fmt: Format) -> tuple[np.float32, np.float32]:
    """Return the least and the largest power of two among the normal numbers."""
    return np.float32(math.ldexp(1.0, fmt.emin)), np.float32(math.ldexp(1.0, fmt.emax))


@lru_cache(maxsize=64)
def _range(fmt: Format) -> tuple[np.float32, np.float32]:
    """Return the least and the largest value."""
    return np.float32(min(fmt.min_finite, 0.0)), np.float32(fmt.max_finite)


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
    return float(_scale_of(np.float32(largest), fmt))


def _scale_of(largest: np.float32, fmt: Format) -> np.float32:
    """Return the scale of elements up to ``largest``, which is finite."""
    target, limit = _limits(fmt)
    scale = min(largest / target, limit)
    return max(scale, np.float32(_TINY)) if scale > 0 else np.float32(1.0)


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
