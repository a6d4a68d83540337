"""What the layers of a model are called with: their inputs' shapes, and who shares an
input."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

CONVOLUTIONS = (nn.Conv1d, nn.Conv2d, nn.Conv3d)


@dataclass(frozen=True, slots=True)
class LayerCall:
    """One call of a convolution or linear layer.

    Attributes:
        path: of the module.
        module: itself.
        shape: of the input.
        dtype: of the input.
        source: a number that calls with the same input share.
    """

    path: str
    module: nn.Module
    shape: tuple[int, ...]
    dtype: torch.dtype
    source: int


def layer_calls(model: nn.Module, run: Callable[[], object]) -> tuple[LayerCall, ...]:
    """Return the calls of convolutions and linear layers in ``run()``, in their order."""
    calls: list[LayerCall] = []
    inputs_seen: list[Tensor] = []  # kept, so that no other takes an id

    def note(path: str) -> Callable[[nn.Module, tuple[Any, ...]], None]:
        def before(module: nn.Module, inputs: tuple[Any, ...]) -> None:
            if not inputs or not isinstance(inputs[0], Tensor):
                return
            tensor = inputs[0]
            inputs_seen.append(tensor)
            shape = tuple(tensor.shape)
            call = LayerCall(path, module, shape, tensor.dtype, id(tensor))
            calls.append(call)

        return before

    handles = [
        module.register_forward_pre_hook(note(path))
        for path, module in model.named_modules()
        if isinstance(module, (*CONVOLUTIONS, nn.Linear))
    ]
    try:
        run()
    finally:
        for handle in handles:
            handle.remove()
    return tuple(calls)
