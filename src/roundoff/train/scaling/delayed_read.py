"""A number of the device that the host gets to know a little later, without waiting for it."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from roundoff.record import in_graph_capture


def moved(tensor: Tensor, device: torch.device) -> Tensor:
    """Return a tensor on another device; the host waits only for what comes to the host.

    Kernels of a GPU that follow stand behind the copy. Those of the CPU do not: they
    would read the memory before anything has arrived there.
    """
    return tensor.to(device, non_blocking=device.type != "cpu")


class DelayedRead:
    """A copy of a 0-d integer tensor of a CUDA device that is under way to the host."""

    def __init__(self) -> None:
        self._host: Tensor | None = None
        self._event: Any = None

    def send(self, value: Tensor) -> None:
        """Start a copy, behind what the device has still to do.

        Nothing is sent as long as the last copy is under way, and into no CUDA graph,
        where an event of before may not be asked.
        """
        if in_graph_capture():
            return
        if self._host is None:
            self._host = torch.zeros((), dtype=value.dtype, pin_memory=True)
        if self._event is not None and not self._event.query():
            return
        self._host.copy_(value, non_blocking=True)
        self._event = torch.cuda.Event()  # type: ignore[no-untyped-call]
        self._event.record(torch.cuda.current_stream(value.device))

    def value(self) -> int:
        """Return the last number that has arrived; 0 until one has."""
        if self._host is None or self._event is None or not self._event.query():
            return 0
        return int(self._host)

    def forget(self) -> None:
        """Drop the copy that is under way."""
        self._host = None
        self._event = None
