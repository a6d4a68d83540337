"""The monitor's part in code that ``torch.compile`` has compiled: what a hook computes
becomes part of the graph.

The summary of an output is written into a tensor that stays. That of a gradient comes out
as the gradient of a second such tensor, which an identity takes beside the output: so
neither graph breaks, and the compiler fuses the reductions.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from roundoff.train.watch.tensor_summary import reduced


class _Beside(torch.autograd.Function):
    """``x`` unchanged, and in the backward pass the summary of its gradient as the
    gradient of ``sink``.
    """

    @staticmethod
    def forward(ctx: Any, x: Tensor, sink: Tensor) -> Tensor:
        return x.clone()  # a view would refuse to be changed in place

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, Tensor]:
        one_call = gradient.new_ones(1, dtype=torch.float32)
        return gradient, torch.cat([_summary(gradient), one_call])


class SummarySink:
    """Where compiled code leaves the summaries of one module.

    ``output`` is ``[least, most, sum, norm]`` of its last output, ``gradient`` the same of
    the gradient at it with 1 behind it. The gradients of several calls are added up: where
    the last is more than 1, only whether all are finite can be said.
    """

    def __init__(self, module: nn.Module, gradients: bool) -> None:
        first = next(iter(module.parameters()), None)
        device = torch.device("cpu") if first is None else first.device
        self.output = torch.zeros(4, device=device)
        self.gradient: Tensor | None = None
        if gradients:
            self.gradient = torch.zeros(5, device=device, requires_grad=True)
        self.numel = 0
        #: set by the compiled code whenever it runs
        self.written = False

    def observe(self, output: Any) -> Any:
        """Return what the module returns in place of ``output``; traced by the compiler.

        ``output`` is a tensor or a tuple that starts with one; anything else is returned
        as it is.
        """
        if type(output) is tuple and output and isinstance(output[0], Tensor):
            return (self.observe(output[0]), *output[1:])
        if not isinstance(output, Tensor):
            return output
        if not output.is_floating_point() or not output.numel():
            return output
        self.output.copy_(_summary(output))
        self.written = True
        self.numel = output.numel()
        if self.gradient is None or not output.requires_grad:
            return output
        return _Beside.apply(output, self.gradient)  # type: ignore[no-untyped-call]

    def take(self) -> tuple[Tensor | None, Tensor | None]:
        """Take what was left since the last time, of the output and of the gradient."""
        output = self.output.clone() if self.written else None
        self.written = False
        if self.gradient is None:
            return output, None
        gradient = self.gradient.grad
        self.gradient.grad = None
        return output, gradient


def _summary(x: Tensor) -> Tensor:
    return torch.stack(reduced(x.detach())).float()
