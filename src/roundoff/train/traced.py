"""The monitor's part in code that ``torch.compile`` has compiled: what a hook computes becomes part of the graph.

The summary of an output is written into a tensor that stays. That of a gradient comes out as the gradient of a second such
tensor, which an identity takes beside the output: so neither graph breaks, and the compiler fuses the reductions.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn


class _Beside(torch.autograd.Function):
    """``x`` unchanged, and in the backward pass the summary of its gradient as the gradient of ``sink``."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, sink: Tensor) -> Tensor:  # noqa: ARG004
        return x.clone()  # a view would refuse to be changed in place

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, Tensor]:  # type: ignore[override]  # noqa: ARG004
        return gradient, _counted(gradient)


class Sink:
    """What compiled code found at one module: ``[least, most, sum, norm, calls]`` of its output and of the gradient at it."""

    def __init__(self, module: nn.Module, gradients: bool) -> None:
        first = next(iter(module.parameters()), None)
        device = torch.device("cpu") if first is None else first.device
        self.output = torch.zeros(5, device=device)
        self.gradient = torch.zeros(5, device=device, requires_grad=True) if gradients else None
        self.numel = 0

    def look(self, output: Any) -> Any:
        """Traced by the compiler: what the module returns in place of ``output``, which is a tensor or a tuple that starts
        with one (anything else is not looked at)."""
        if isinstance(output, tuple) and type(output) is tuple and output and isinstance(output[0], Tensor):
            return (self.look(output[0]), *output[1:])
        if not isinstance(output, Tensor) or not output.is_floating_point():
            return output
        self.output.copy_(_counted(output))
        if self.gradient is None or not output.requires_grad:
            return output
        return _Beside.apply(output, self.gradient)  # type: ignore[no-untyped-call]

    def take(self) -> tuple[Tensor, Tensor | None]:
        """What was found since the last time, copied; the count is 0 where nothing was."""
        found = self.output.clone()
        self.output.zero_()
        if self.gradient is None or self.gradient.grad is None:
            return found, None
        gradient, self.gradient.grad = self.gradient.grad, None
        return found, gradient


def _counted(x: Tensor) -> Tensor:
    x = x.detach()
    low, high = torch.aminmax(x)
    total, norm = x.sum(dtype=torch.float32), torch.linalg.vector_norm(x, dtype=torch.float32)
    return torch.stack([low.float(), high.float(), total, norm, torch.full((), x.numel(), dtype=torch.float32, device=x.device)])
