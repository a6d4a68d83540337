"""A number of the device that the host gets to know a little later, without waiting for it."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor


class Later:
    """``send`` starts a copy of a 0-d integer tensor of a CUDA device; ``value`` is 0 until it has arrived."""

    def __init__(self) -> None:
        self._host: Tensor | None = None
        self._event: Any = None

    def send(self, value: Tensor) -> None:
        """Copy behind what the device has still to do; replaces a copy that nobody read."""
        if self._host is None:
            self._host = torch.zeros((), dtype=value.dtype, pin_memory=True)
        if self._event is not None and not self._event.query():
            return  # the last one is under way
        self._host.copy_(value, non_blocking=True)
        self._event = torch.cuda.Event()  # type: ignore[no-untyped-call]
        self._event.record(torch.cuda.current_stream(value.device))

    def value(self) -> int:
        """The last number that has arrived."""
        if self._host is None or self._event is None or not self._event.query():
            return 0
        return int(self._host)

    def forget(self) -> None:
        """Whatever is under way no longer counts."""
        self._host = self._event = None
