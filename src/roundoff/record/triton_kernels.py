"""Kernels in Triton that a program launches itself: no operator of torch, so no dispatch
mode sees them."""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable, Sequence
from typing import Any

from torch import Tensor

#: Where ``kernel[grid](...)`` ends up: compiled, and in Triton's interpreter.
_LAUNCHERS = (
    ("triton.runtime.jit", "JITFunction"),
    ("triton.runtime.interpreter", "InterpretedFunction"),
)


class TritonCalls:
    """Calls ``listen`` with the name and the tensors of each launch, after it."""

    def __init__(self, listen: Callable[[str, Sequence[Tensor]], None]) -> None:
        self.listen = listen
        self._replaced: dict[type, Any] = {}

    def install(self) -> None:
        """Listen from now on, if Triton has been imported; nothing is imported here."""
        for module, name in _LAUNCHERS:
            launcher = getattr(sys.modules.get(module), name, None)
            if launcher is not None and launcher not in self._replaced:
                self._replaced[launcher] = launcher.run
                launcher.run = self._wrapped(launcher.run)

    def remove(self) -> None:
        """Undo ``install``."""
        for launcher, run in self._replaced.items():
            launcher.run = run  # type: ignore[attr-defined]
        self._replaced.clear()

    def _wrapped(self, run: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(run)
        def launch(kernel: Any, *args: Any, **kwargs: Any) -> Any:
            result = run(kernel, *args, **kwargs)
            if not kwargs.get("warmup"):
                name = getattr(getattr(kernel, "fn", kernel), "__name__", "kernel")
                values = (*args, *kwargs.values())
                self.listen(name, [v for v in values if isinstance(v, Tensor)])
            return result

        return launch
