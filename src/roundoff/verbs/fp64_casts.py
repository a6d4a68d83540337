"""A program in fp64 stays there: its own casts to narrower formats lead to fp64.

A model that casts to float32 itself (a norm, a softmax, rotary tables) would compute in
fp32 there although everything around it is fp64. Both sides would keep the rounding of
fp32, and that would look like a difference of the programs.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

#: What a narrower format becomes. Formats of eight bits stay: a cast to them is meant
#: to change values.
_WIDE = {
    torch.float16: torch.float64,
    torch.bfloat16: torch.float64,
    torch.float32: torch.float64,
    torch.complex32: torch.complex128,
    torch.complex64: torch.complex128,
}
#: Casts that name their format in their own name.
_CASTS = {
    Tensor.float: Tensor.double,
    Tensor.half: Tensor.double,
    Tensor.bfloat16: Tensor.double,
}
#: The old names of formats, which ``Tensor.type`` takes.
_OLD_NAMES = {
    f"torch.{kind}Tensor": torch.float64 for kind in ("Float", "Half", "BFloat16")
}
#: These read bits as another format, or choose what autocast computes in, which leaves
#: fp64 alone.
_LEFT_ALONE = frozenset(("view", "_enter_autocast", "_exit_autocast"))


class CastsToFp64(TorchFunctionMode):
    """While it is on, what a program casts to or makes in a narrower format is fp64.

    Formats of eight bits, integers and reinterpretations of bits stay as they are.

    >>> with CastsToFp64():
    ...     torch.ones(2, dtype=torch.float64).float().dtype
    torch.float64
    """

    def __torch_function__(
        self, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        """Run a call of torch with the formats that it names widened."""
        named = kwargs or {}
        if getattr(func, "__name__", "") in _LEFT_ALONE:
            return func(*args, **named)
        widened = {name: _widened(value) for name, value in named.items()}
        return _cast(func)(*map(_widened, args), **widened)


def _cast(func: Any) -> Any:
    try:
        return _CASTS.get(func, func)
    except TypeError:  # a callable without a hash
        return func


def _widened(value: Any) -> Any:
    if isinstance(value, torch.dtype):
        return _WIDE.get(value, value)
    if isinstance(value, str):
        return _OLD_NAMES.get(value, value)
    if isinstance(value, type(torch.FloatTensor)):
        return _OLD_NAMES.get(f"{value.__module__}.{value.__name__}", value)
    return value
