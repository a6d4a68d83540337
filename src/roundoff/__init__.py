"""roundoff: an error budget for neural networks.

Measure what the rounding of every operator costs the output in any number format,
choose the cheapest formats that meet a target, and prove it. ``diagnose`` does all
three; ``budget``, ``plan`` and ``verify`` are its steps. Names are loaded when they are
first used, so importing this package costs nothing.
"""

from __future__ import annotations

import importlib
from typing import Any

import lazy_loader

_load, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)

#: Rooms that are called like the verb of the same name.
_CALLED = ("advise", "budget", "compare", "lint", "migrate", "plan", "quantize")


def __getattr__(name: str) -> Any:
    if name == "__version__":
        return importlib.import_module("roundoff.packages").installed_version()
    if name in _CALLED:
        return importlib.import_module(f"roundoff.{name}")
    if name not in __all__:
        raise AttributeError(
            f"module 'roundoff' has no attribute {name!r}; it has {', '.join(__all__)}"
        )
    return _load(name)
