"""What a script does with gradients between the backward pass and the optimizer: clipping,
scaling, an update written by hand.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from roundoff.record.module_paths import Paths


class GradientWork:
    """Tells the calls that work on parameters' gradients, directly or on what was made
    of them, from those of a forward pass.
    """

    def __init__(self, paths: Paths) -> None:
        self._paths = paths
        #: records that such calls have made in this step
        self._made: set[int] = set()
        #: memory of the gradients; None where it has to be looked up again
        self._memory: set[int] | None = None
        self._has_run_backward = False

    def begin(self) -> None:
        """Start a new step."""
        self._made.clear()
        self._memory = None
        self._has_run_backward = False

    def run_backward(self) -> None:
        """Note that a call of a backward pass ran: gradients may be new."""
        self._memory = None
        self._has_run_backward = True

    def reads(self, tensors: Sequence[Tensor], records: Sequence[int]) -> bool:
        """Return True for a call outside of all modules that reads a gradient, or what
        was made of one, and has no gradient itself.
        """
        if not self._has_run_backward:
            return False
        if torch.is_grad_enabled() and any(t.requires_grad for t in tensors):
            return False  # a penalty on gradients is part of a loss
        if not self._made.isdisjoint(records):
            return True
        if self._memory is None:
            self._memory = self._gradients()
        return any(_memory(tensor) in self._memory for tensor in tensors)

    def made(self, records: Sequence[int]) -> None:
        """Note what such a call has made."""
        self._made.update(records)

    def _gradients(self) -> set[int]:
        gradients = (
            parameter.grad
            for module in self._paths.modules()
            for parameter in module.parameters()
        )
        memory = {_memory(grad) for grad in gradients if isinstance(grad, Tensor)}
        return memory - {0}


def _memory(tensor: Tensor) -> int:
    """Return what identifies a tensor's memory; 0 where it has none of its own."""
    if tensor.layout is not torch.strided or tensor.is_nested:
        return 0
    try:
        return int(tensor.untyped_storage()._cdata)
    except (RuntimeError, NotImplementedError):
        return 0
