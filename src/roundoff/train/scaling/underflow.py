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

#: As attribute.loss_scale: room for gradients twice as large as any measured.
MARGIN = 1.0


@dataclass(frozen=True)
class Underflow:
    """``share``: of the finite nonzero elements, those that ``format`` rounds to zero at ``scale``; None without any.

    ``zero``: of all elements, those that are zero already. Where the backward pass ran in the format, some of them were
    lost there, so that ``share`` alone is too small. ``largest`` is the largest magnitude at scale 1. ``recommended`` is
    the largest power of two that leaves it a margin of 2 (see ``attribute.loss_scale``); None where all are zero.
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
        return asdict(self)


def underflow(
    gradients: Sequence[Tensor],
    scale: float,
    factor: float | None = None,
    fmt: str = "fp16",
) -> Underflow:
    """Measure ``gradients``, which times ``factor`` are those at ``scale`` (``scale`` itself where they are unscaled).

    NaN and Inf are counted and left out. One read of all values, in float64 chunks of the tensors.
    """
    factor = scale if factor is None else factor
    ends, target = limits(fmt), parse_format(fmt)
    bound = ends.zero / factor
    lost = zero = bad = values = 0
    largest = 0.0
    for gradient in gradients:
        size = gradient.detach().abs().double()
        finite = torch.isfinite(size)
        size = torch.where(finite, size, 0.0)
        nothing = (size == 0) & finite
        small = (size <= bound) if ends.zero_tie else (size < bound)
        values += size.numel()
        zero += int(nothing.sum())
        bad += int((~finite).sum())
        lost += int((small & finite & ~nothing).sum())
        largest = max(largest, float(size.max()) if size.numel() else 0.0)
    there = values - zero - bad
    largest *= factor / scale
    return Underflow(
        target.name,
        scale,
        lost / there if there else None,
        zero / values if values else 0.0,
        largest,
        power_below(target.max_finite * 2.0**-MARGIN, largest) if largest else None,
        values,
        bad,
    )
