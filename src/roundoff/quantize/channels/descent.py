"""Gradient descent on the logarithms of channel factors: what ``spread`` and ``divide`` both minimise by."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

import torch
from torch import Tensor


def descend(
    noise: Callable[[Sequence[Tensor]], Tensor],
    sizes: Sequence[int],
    *,
    steps: int,
    rate: float,
    bounds: Sequence[tuple[Tensor, Tensor]] = (),
) -> tuple[list[Tensor], float, float]:
    """The logs, of these sizes and 0 at first, that make ``log noise`` least, and the noise before and after.

    Adam (Kingma and Ba, arXiv:1412.6980) with a rate that falls to 0; ``bounds`` are the lowest and highest logs. The best
    step is kept, so the noise never rises. NaN for both where there is no noise, or none that depends on the logs.

    >>> noise = lambda logs: torch.cosh(logs[0] - 0.5).sum()
    >>> logs, before, after = descend(noise, [1], steps=200, rate=0.1)
    >>> round(float(logs[0]), 2), before > after
    (0.5, True)
    """
    logs = [torch.zeros(size, requires_grad=True) for size in sizes]
    best = [log.detach().clone() for log in logs]
    with torch.enable_grad():
        first = noise(logs)
        before = least = float(first.detach())
        if not (first.requires_grad and before > 0):
            return best, math.nan, math.nan
        optimizer = torch.optim.Adam(logs, lr=rate)
        for step in range(steps):
            for group in optimizer.param_groups:
                group["lr"] = rate * (1 - step / steps)
            optimizer.zero_grad()
            found = noise(logs)
            found.log().backward()  # type: ignore[no-untyped-call]
            if float(found.detach()) < least:
                best, least = (
                    [log.detach().clone() for log in logs],
                    float(found.detach()),
                )
            optimizer.step()
            with torch.no_grad():
                for log, (low, high) in zip(logs, bounds, strict=False):
                    log.clamp_(low, high)
    return best, before, least
