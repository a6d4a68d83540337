"""The share of gradients that a format loses at a loss scale, and the scale that fits.

>>> underflow([torch.tensor([1.0, 2.0**-30, 0.0, 2.0**-24])], scale=1.0)
Underflow(format='fp16', scale=1.0, share=0.333..., zero=0.25, largest=1.0, recommended=16384.0, values=4, nonfinite=0)
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

import torch
from torch import Tensor

from roundoff.compare import power_below
from roundoff.formats import limits, parse_format

#: Powers of two left free, as in ``compare.loss_scale``: room for gradients twice as
#: large as any measured.
MARGIN = 1.0


@dataclass(frozen=True)
class Underflow:
    """What a format loses of gradients.

    Attributes:
        format: the format.
        scale: the loss scale.
        share: of the finite nonzero elements, those that ``format`` rounds to zero at
            ``scale``; None without any.
        zero: of all elements, those that are zero already. Where the backward pass ran in
            the format, some of them were lost there, so that ``share`` alone is too small.
        largest: the largest magnitude at scale 1.
        recommended: the largest power of two that leaves it a margin of 2; None where all
            are zero.
        values: number of elements.
        nonfinite: number of those that are NaN or Inf.
    """

    format: str
    scale: float
    share: float | None
    zero: float
    largest: float
    recommended: float | None
    values: int
    nonfinite: int

    def to_dict(self) -> dict[str, Any]:
        """Return plain data."""
        return asdict(self)


def underflow(
    gradients: Sequence[Tensor],
    scale: float,
    factor: float | None = None,
    fmt: str = "fp16",
) -> Underflow:
    """Measure ``gradients``, which times ``factor`` are those at ``scale`` (``scale``
    itself where they are unscaled).

    NaN and Inf are counted and left out. One read of all values, in float64 chunks of the
    tensors.
    """
    factor = scale if factor is None else factor
    ends = limits(fmt)
    target = parse_format(fmt)
    bound = ends.zero / factor
    values = 0
    zero = 0
    lost = 0
    nonfinite = 0
    largest = 0.0
    for gradient in gradients:
        size = gradient.detach().abs().double()
        is_finite = torch.isfinite(size)
        size = torch.where(is_finite, size, 0.0)
        is_zero = (size == 0) & is_finite
        is_small = (size <= bound) if ends.zero_tie else (size < bound)
        values += size.numel()
        zero += int(is_zero.sum())
        nonfinite += int((~is_finite).sum())
        lost += int((is_small & is_finite & ~is_zero).sum())
        if size.numel():
            largest = max(largest, float(size.max()))
    nonzero = values - zero - nonfinite
    largest *= factor / scale
    room = target.max_finite * 2.0**-MARGIN
    return Underflow(
        format=target.name,
        scale=scale,
        share=lost / nonzero if nonzero else None,
        zero=zero / values if values else 0.0,
        largest=largest,
        recommended=power_below(room, largest) if largest else None,
        values=values,
        nonfinite=nonfinite,
    )
