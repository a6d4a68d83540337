"""What this machine reaches: operations a second of a matrix product, bytes a second of a
copy, measured in the run."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass

import torch

#: Rows and columns of the matrices, elements of the copied tensor, and calls.
SIDE = 512
COPIED = 1 << 24
CALLS = 8


@dataclass(frozen=True, slots=True)
class Roofline:
    """The measured peaks of this machine.

    Attributes:
        flops_per_second: of an fp32 matrix product, two FLOP a multiply-accumulate.
        bytes_per_second: of a copy that does not fit the caches, read and written.
        threads: of torch, meanwhile.
    """

    flops_per_second: float
    bytes_per_second: float
    threads: int

    @property
    def ridge(self) -> float:
        """FLOPs a byte from which on arithmetic takes longer than memory."""
        return self.flops_per_second / self.bytes_per_second

    def least_seconds(self, flops: float, bytes_moved: float) -> float:
        """Return the seconds that work takes at the peaks, whichever is slower."""
        arithmetic = flops / self.flops_per_second
        return max(arithmetic, bytes_moved / self.bytes_per_second)


def measure_roofline(device: torch.device) -> Roofline:
    """Measure a matrix product of 512 rows and a copy of 64 MiB; a tenth of a second."""
    left = torch.ones(SIDE, SIDE, device=device)
    product = torch.empty(SIDE, SIDE, device=device)
    source = torch.ones(COPIED, device=device)
    target = torch.empty_like(source)
    with torch.no_grad():
        multiply = _fastest(lambda: torch.mm(left, left, out=product), device)
        copy = _fastest(lambda: target.copy_(source), device)
    moved = 2 * source.numel() * source.element_size()
    return Roofline(2 * SIDE**3 / multiply, moved / copy, torch.get_num_threads())


def _fastest(call: Callable[[], object], device: torch.device) -> float:
    """Return the seconds of the fastest call: other work on the machine only slows."""
    call()
    samples = []
    for _ in range(CALLS):
        _wait(device)
        start = time.perf_counter()
        call()
        _wait(device)
        samples.append(time.perf_counter() - start)
    return max(min(samples), 1e-9)


def _wait(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)
