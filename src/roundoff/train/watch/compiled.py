"""The monitor's part in code that ``torch.compile`` has compiled: what a hook computes becomes part of the graph.

The summary of an output is written into a tensor that stays. That of a gradient comes out as the gradient of a second such
tensor, which an identity takes beside the output: so neither graph breaks, and the compiler fuses the reductions.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from roundoff.train.watch.summary import reduced


class _Beside(torch.autograd.Function):
    """``x`` unchanged, and in the backward pass the summary of its gradient as the gradient of ``sink``."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, sink: Tensor) -> Tensor:
        return x.clone()  # a view would refuse to be changed in place

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, Tensor]:
        return gradient, torch.cat(
            [_found(gradient), gradient.new_ones(1, dtype=torch.float32)]
        )


class Sink:
    """What compiled code found at one module: ``[least, most, sum, norm]`` of its last output, and of the gradient at it
    with 1 behind it. The gradients of several calls are added up, so that more than 1 there says that only whether all
    are finite is known."""

    def __init__(self, module: nn.Module, gradients: bool) -> None:
        first = next(iter(module.parameters()), None)
        device = torch.device("cpu") if first is None else first.device
        self.output = torch.zeros(4, device=device)
        self.gradient = (
            torch.zeros(5, device=device, requires_grad=True) if gradients else None
        )
        self.numel = 0
        #: set by the compiled code whenever it runs
        self.written = False

    def look(self, output: Any) -> Any:
        """Traced by the compiler: what the module returns in place of ``output``, which is a tensor or a tuple that starts
        with one (anything else is not looked at)."""
        if (
            isinstance(output, tuple)
            and type(output) is tuple
            and output
            and isinstance(output[0], Tensor)
        ):
            return (self.look(output[0]), *output[1:])
        if (
            not isinstance(output, Tensor)
            or not output.is_floating_point()
            or not output.numel()
        ):
            return output
        self.output.copy_(_found(output))
        self.written, self.numel = True, output.numel()
        if self.gradient is None or not output.requires_grad:
            return output
        return _Beside.apply(output, self.gradient)  # type: ignore[no-untyped-call]

    def take(self) -> tuple[Tensor | None, Tensor | None]:
        """What was found since the last time, of the output and of the gradient."""
        output = self.output.clone() if self.written else None
        self.written = False
        gradient = None
        if self.gradient is not None:
            gradient, self.gradient.grad = self.gradient.grad, None
        return output, gradient


def _found(x: Tensor) -> Tensor:
    return torch.stack(reduced(x.detach())).float()
