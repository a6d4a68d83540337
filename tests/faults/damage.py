"""Broken kernels: one call of an aten operator whose result is damaged beneath the recording.

``Damage`` is a dispatch mode that stands below the recording's, so that a recording sees the damaged values as the
call's own result, and nothing else.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

Harm = Callable[[Tensor], None]


class Damage(TorchDispatchMode):
    """Hands output ``place`` of call number ``call`` of ``operator`` to ``harm``, which changes it in place."""

    def __init__(self, operator: str, call: int, harm: Harm, *, place: int = 0) -> None:
        super().__init__()
        self.operator, self.call, self.harm, self.place = operator, call, harm, place
        self.seen = 0

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        result = func(*args, **(kwargs or {}))
        if func.overloadpacket.__name__ == self.operator:
            if self.seen == self.call:
                self.harm(result[self.place] if isinstance(result, tuple) else result)
            self.seen += 1
        return result


def tail(share: float) -> Harm:
    """The last part of the memory was never written: zeros."""

    def harm(x: Tensor) -> None:
        flat = x.as_strided((x.numel(),), (1,))
        flat[int(len(flat) * (1 - share)) :] = 0

    return harm


def element(index: int, value: float) -> Harm:
    """One element is ``value``."""

    def harm(x: Tensor) -> None:
        x.as_strided((x.numel(),), (1,))[index] = value

    return harm


def times(factor: float) -> Harm:
    """Every element is ``factor`` times what it should be."""

    def harm(x: Tensor) -> None:
        x.mul_(factor)

    return harm


def noise(size: float, seed: int | None = 0) -> Harm:
    """Every element is off by a random relative error of standard deviation ``size``; without a seed, another each run."""

    def harm(x: Tensor) -> None:
        draw = torch.Generator()
        draw.seed() if seed is None else draw.manual_seed(seed)
        x.mul_(1 + size * torch.randn(x.shape, generator=draw))

    return harm


def transposed(x: Tensor) -> None:
    """The last two dimensions lie in memory in the other order."""
    x.copy_(x.transpose(-1, -2).reshape(x.shape).clone())


def saturated(limit: float) -> Harm:
    """Larger values are cut off at what an intermediate of another format could hold."""

    def harm(x: Tensor) -> None:
        x.clamp_(-limit, limit)

    return harm


def stale_rows(x: Tensor) -> None:
    """Each second row holds what the row before it should: one thread's buffer was not its own."""
    x[1::2] = x[0::2][: len(x[1::2])].clone()
