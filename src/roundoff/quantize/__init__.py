"""Turn a trained network into one of few bits. The package is also the verb: ``roundoff.quantize(model, plan, batches)``.

``prepare_qat`` and ``convert`` are the way to train it further (see ``qat``).
"""

from __future__ import annotations

import sys
import types
from typing import Any


class _Verb(types.ModuleType):
    """A package that is called like the function it is named for, so that ``roundoff.quantize`` is one thing."""

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        from roundoff.quantize.pipeline import quantize

        return quantize(*args, **kwargs)

    def __getattr__(self, name: str) -> Any:
        if name in ("prepare_qat", "convert"):
            from roundoff.quantize.qat import prepare

            return getattr(prepare, name)
        if name in ("Options", "Rounding"):
            from roundoff.quantize import options, rounding

            return getattr(options if name == "Options" else rounding, name)
        raise AttributeError(f"module {self.__name__!r} has no attribute {name!r}")


sys.modules[__name__].__class__ = _Verb
