"""Block formats: elements along one axis that share a scale (OCP Microscaling Formats v1.0; NVFP4).

The scale of an MX block is a power of two in e8m0, by ``fmt.scale_rule``. NVFP4: a
tensor scale ``amax(x) / (448 * 6)`` in fp32 times a block scale
``amax(block) / 6 / tensor scale`` in e4m3fn.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from roundoff.formats.affine import extremes
from roundoff.formats.granularity import PerGroup
from roundoff.formats.rounding import round_values, working_dtype
from roundoff.formats.types import BlockFormat, RoundingMode, ScaleRule

__all__ = ["block_scale", "round_blocks"]


def round_blocks(
    x: Tensor,
    fmt: BlockFormat,
    axis: int,
    rounding: RoundingMode,
    generator: torch.Generator | None,
) -> Tensor:
    """Round ``x`` to ``fmt`` with blocks along ``axis``, in x's shape and dtype.

    Elements saturate.
    """
    shape, dims = PerGroup(fmt.block_size, axis).split(x.shape)
    if x.numel() == 0:
        return x.clone()
    view = x.detach().to(working_dtype(x)).reshape(shape)
    low, high = extremes(view, dims)
    scale = block_scale(torch.maximum(high, -low), fmt)
    # A block whose scale is 0 (NVFP4, tiny beside the tensor's largest) holds zeros:
    # divide by 1, multiply by 0.
    y = view / torch.where(scale == 0, 1.0, scale)
    return (
        round_values(y, fmt, rounding, True, generator, out=y)
        .mul_(scale)
        .reshape(x.shape)
        .to(x.dtype)
    )


def block_scale(amax: Tensor, fmt: BlockFormat) -> Tensor:
    """Return the scale of blocks with the given largest magnitudes (fp32 or fp64,
    finite), of amax's shape.

    Example:
        >>> from roundoff.formats import parse_format
        >>> block_scale(torch.tensor([6.0, 7.9, 8.0, 0.0]), parse_format("mxfp4")).tolist()
        [1.0, 1.0, 2.0, 5.877471754111438e-39]
    """
    scale_format = fmt.scale_format
    if fmt.tensor_scale:
        tensor_scale = amax.amax() / (scale_format.max_finite * fmt.max_finite)
        tensor_scale = torch.where(
            tensor_scale > 0, tensor_scale.clamp(min=torch.finfo(amax.dtype).tiny), 1.0
        )
        block = round_values(
            amax / fmt.max_finite / tensor_scale,
            scale_format,
            RoundingMode.NEAREST_EVEN,
            True,
        )
        return block.mul_(tensor_scale)
    fraction, exponent = torch.frexp(
        amax
    )  # amax = fraction * 2**exponent, fraction in [0.5, 1)
    exponent = exponent - 1 - fmt.emax
    if fmt.scale_rule is ScaleRule.CEIL:
        exponent = exponent + (fraction > 0.5)
    elif fmt.scale_rule is ScaleRule.RCEIL:
        exponent = exponent + (fraction > math.frexp(fmt.max_finite)[0])
    exponent = exponent.clamp_(scale_format.emin, scale_format.emax).masked_fill_(
        amax == 0, scale_format.emin
    )
    return torch.ldexp(torch.ones_like(amax), exponent)
