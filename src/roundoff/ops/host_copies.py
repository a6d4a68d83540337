"""Single values of tensors on the host, in one copy for all of them."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor


def numbers_of(values: Sequence[Tensor]) -> list[float]:
    """Return tensors of one value as numbers, in their order.

    The host waits once for each device and dtype, not for each value.

    >>> numbers_of([torch.tensor(1.5), torch.tensor(2.0)])
    [1.5, 2.0]
    """
    places: dict[tuple[torch.device, torch.dtype], list[int]] = {}
    for place, value in enumerate(values):
        places.setdefault((value.device, value.dtype), []).append(place)
    numbers = [0.0] * len(values)
    for together in places.values():
        copied = torch.stack([values[place].detach() for place in together]).tolist()
        for place, number in zip(together, copied, strict=True):
            numbers[place] = number
    return numbers
