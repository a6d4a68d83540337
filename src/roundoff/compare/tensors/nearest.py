"""How far elements are from the nearest ones of another tensor."""

from __future__ import annotations

import torch
from torch import Tensor


def to_nearest(rising: Tensor, wanted: Tensor) -> Tensor:
    """Return how far each wanted element is from the nearest of ``rising``.

    Both of one axis and one dtype, ``rising`` sorted and not empty. What is NaN is NaN far
    from all.

    >>> to_nearest(torch.tensor([0.0, 1.0, 4.0]), torch.tensor([3.5, -1.0, 1.0])).tolist()
    [0.5, 1.0, 0.0]
    """
    after = torch.searchsorted(rising, wanted).clamp(max=len(rising) - 1)
    before = (after - 1).clamp(min=0)
    return torch.minimum(
        (rising[after] - wanted).abs(), (rising[before] - wanted).abs()
    )
